"""Files that `inspect` writes. In: what they are called, and what is read. Out: one error for all that is wrong with where they are to go,
before anything is read; and files that are there whole or not at all.

Limit: a file that comes to be between the check and the writing is replaced as one that was there before.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from penstock.support.atomic_files import replacing
from penstock.support.errors import UsageError
from penstock.support.paths import file_problem, is_inside

# The endings that `--export` takes; exports.py has the writer of each.
ENDINGS = (".dot", ".gv", ".onnx", ".json", ".csv")


def check_outputs(exports: Sequence[str], html: str | None, reads: Mapping[str, str | None]) -> None:
    """UsageError where a file cannot be written, nobody knows as what, or where it would replace what is read or another
    one of them. `reads` is by words for it."""
    outs = [("--export", path) for path in exports]
    outs += [] if html is None else [("--html", html)]
    given = {what: path for what, path in reads.items() if path}
    problems = [f"{flag} {path}: {problem}" for flag, path in outs for problem in _problems(flag, path, given)]
    # Weights may go into a second file beside a model.
    places = [os.path.realpath(path) for _, path in outs] + [
        os.path.realpath(f"{path}.data") for path in exports if path.endswith(".onnx")
    ]
    if len(set(places)) < len(places):
        problems.append("the same file is named twice")
    if problems:
        raise UsageError("; ".join(problems))


def _problems(flag: str, path: str, reads: Mapping[str, str]) -> Iterator[str]:
    if flag == "--export" and Path(path).suffix not in ENDINGS:
        yield f"expected a name that ends in {', '.join(ENDINGS)}"
    elif problem := file_problem(path):
        yield problem
    else:
        yield from (
            f"is {'inside of ' if os.path.isdir(read) else ''}{what}"
            for what, read in reads.items()
            if _lies_in(path, read)
        )


def _lies_in(path: str, read: str) -> bool:
    """Whether a path is what is read, by whatever name, or in it."""
    if os.path.exists(path) and os.path.exists(read) and os.path.samefile(path, read):
        return True
    return is_inside(os.path.realpath(path), os.path.realpath(read))


def write_whole(path: Path, data: str | bytes) -> list[Path]:
    """A file, renamed into place when it is whole; what is there and is no file, a pipe or a terminal, is written to."""
    data = data.encode() if isinstance(data, str) else data
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return [path]
    with replacing(path) as work:
        work.write_bytes(data)
    return [path]
