"""The files that `inspect` writes.

In: their names, and the paths that are read. Out: one error for all bad names, before anything is read; and files that
are written whole or not at all.

Limit: a file that appears between the check and the writing is replaced.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from penstock.support.atomic_files import replacing
from penstock.support.errors import UsageError
from penstock.support.paths import is_inside, replacing_problem

# The endings that `--export` takes; exports.py has the writer of each.
ENDINGS = (".dot", ".gv", ".onnx", ".json", ".csv")


def check_outputs(exports: Sequence[str], html: str | None, reads: Mapping[str, str | None]) -> None:
    """Raise UsageError for files that cannot be written, have an unknown ending, or would replace an input or each
    other.

    `reads` gives the paths that are read, by a word for each.
    """
    outs = [("--export", path) for path in exports]
    outs += [] if html is None else [("--html", html)]
    inputs = {what: path for what, path in reads.items() if path}
    problems = [f"{flag} {path}: {problem}" for flag, path in outs for problem in _problems(flag, path, inputs)]
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
    elif problem := replacing_problem(path):
        yield problem
    else:
        yield from (
            f"is {'inside of ' if os.path.isdir(read) else ''}{what}"
            for what, read in reads.items()
            if _lies_in(path, read)
        )


def _lies_in(path: str, read: str) -> bool:
    """Return whether a path is the path that is read, by whatever name, or inside it."""
    if os.path.exists(path) and os.path.exists(read) and os.path.samefile(path, read):
        return True
    return is_inside(os.path.realpath(path), os.path.realpath(read))


def write_whole(path: Path, data: str | bytes) -> list[Path]:
    """Write a file and rename it into place when it is whole. An existing pipe or terminal is written to directly."""
    data = data.encode() if isinstance(data, str) else data
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return [path]
    with replacing(path) as work:
        work.write_bytes(data)
    return [path]
