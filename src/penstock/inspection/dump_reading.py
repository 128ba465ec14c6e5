"""The modules of a compilation, read from its dump folder or computed again with the passes that a plan names.

    dumped_text     a dump folder and the name of a file in it -> its text; refuses a link that leads outside
    missing_dumps   a dump folder -> names of the modules in its table of passes that are not there
    pass_rows       a dump folder -> call and time of all passes, also of those that changed nothing
    dumped_passes   a dump folder -> the module after each pass that is dumped there, read on demand
    made_again      the model before `partition`, which bundles keep, and the pipeline in plan.json -> the module after
                    each pass from there on

The writer (penstock.inspection.dump) takes the names of these files from here: a report reads a dump, and a dump writes
a report.

Limit: passes may compute something else today than when a bundle was written. The caller compares the last module with
that of the bundle.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock.ir.files import read_module, read_text
from penstock.ir.graph import Module
from penstock.passes.manager import Call, parse_pipeline, run_passes
from penstock.support.errors import VerifyError

# The names of files in the folder, and the origin of the note that says a module is a part of another.
PASSES, REPRO, EXCERPT = "passes.tsv", "repro.ir", "excerpt"

_FILE = re.compile(r"(\d+)_([a-z0-9\-]+)\.ir")
_NUMBER = re.compile("[0-9]{1,9}")


@dataclass(frozen=True)
class Dumped:
    """A module of a dump folder, and the call of the pass that made it."""

    number: int
    call: str
    path: Path

    @property
    def module(self) -> Module:
        return read_module(_inside(self.path.parent, self.path.name))


@dataclass(frozen=True)
class PassResult:
    """The module after a pass; `number` is the place of the pass in the whole pipeline, from 1."""

    number: int
    call: Call
    module: Module


def dumped_text(folder: Path, name: str) -> str:
    """Return the text of a file in a dump folder."""
    return read_text(_inside(folder, name))


def _inside(folder: Path, name: str) -> Path:
    """Return the path of a file, and refuse one outside the folder: a dump may come from a stranger."""
    path = folder / name
    try:
        inside = path.resolve(strict=True).is_relative_to(folder.resolve(strict=True))
    except (OSError, RuntimeError, ValueError) as error:
        raise VerifyError(f"cannot be found: {error}", where=str(path)) from error
    if not inside:
        raise VerifyError("lies outside of the dump folder", where=str(path), hint="dumps hold no links to elsewhere")
    return path


def pass_rows(folder: Path) -> dict[int, tuple[str, float]]:
    """Return call and milliseconds of passes by number, as in passes.tsv; empty where there is no such file."""
    return {number: (call, ms) for number, call, ms, _ in _rows(folder)}


def missing_dumps(folder: Path) -> list[str]:
    """Return the files that a whole dump (no filter, modules rather than changes) would have and this folder lacks."""
    names = [f"{number:02d}_{call.partition('{')[0]}.ir" for number, call, _, changed in _rows(folder) if changed]
    return [name for name in names if not (folder / name).exists()]


def _rows(folder: Path) -> Iterator[tuple[int, str, float, bool]]:
    """Yield number, call, milliseconds, and whether the pass changed anything."""
    if not (folder / PASSES).is_file():
        return
    header, *lines = dumped_text(folder, PASSES).rstrip("\n").split("\n")
    for at, line in enumerate(lines, 2):
        row = dict(zip(header.split("\t"), line.split("\t"), strict=False))
        number, call, ms = row.get("number", ""), row.get("pass", ""), _milliseconds(row.get("ms", ""))
        if _NUMBER.fullmatch(number) is None or not call or not math.isfinite(ms):
            what = f"expected the number of a pass, its call and milliseconds, found {line[:80]!r}"
            raise VerifyError(what, where=f"{folder / PASSES}:{at}", hint="is this a dump folder?")
        yield int(number), call, ms, row.get("changed") == "yes"


def _milliseconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def dumped_passes(folder: str | Path) -> list[Dumped]:
    """Return the modules of passes in the order of the passes; none where the folder holds no dump."""
    place = Path(folder)
    files = sorted(
        (int(match[1]), match[2], path) for path in place.glob("*.ir") if (match := _FILE.fullmatch(path.name))
    )
    rows = pass_rows(place) if files else {}
    return [Dumped(number, rows[number][0] if number in rows else name, path) for number, name, path in files]


def made_again(reference: Module, pipeline: str) -> list[PassResult]:
    """Run the passes from `partition` on; return none where the pipeline has no such pass.

    Errors of passes are raised.
    """
    from penstock.passes.pipelines import PASSES as TABLE  # lazy: heavy

    calls = parse_pipeline(pipeline, TABLE)
    names = [call.name for call in calls]
    if "partition" not in names:
        return []
    start = names.index("partition")
    before: list[Module] = []

    def keep_input(call: Call, module: Module) -> Call:
        before.append(module)
        return call

    last = run_passes(reference, calls[start:], TABLE, before=keep_input)
    return [
        PassResult(start + i, call, module)
        for i, (call, module) in enumerate(zip(calls[start:], [*before[1:], last], strict=True), 1)
    ]
