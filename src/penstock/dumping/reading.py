"""The modules of a compilation once more: out of its dump folder, or by running the passes that a plan names.

    dumped_passes   a dump folder -> the module after each pass that is dumped there, read when it is asked for
    made_again      the model before `partition`, which bundles keep, and the pipeline that plan.json names -> the module after each pass from there on

Limit: what passes make today need not be what they made when a bundle was written; who asks compares the last module with that of the bundle.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from penstock.dumping.folder import PASSES
from penstock.ir.files import read_module
from penstock.ir.graph import Module
from penstock.passes.manager import Call, parse_pipeline, run_passes

_FILE = re.compile(r"(\d+)_([a-z0-9\-]+)\.ir")


@dataclass(frozen=True)
class Dumped:
    """A module of a dump folder, and the call of the pass that made it."""

    number: int
    call: str
    path: Path

    @property
    def module(self) -> Module:
        return read_module(self.path)


@dataclass(frozen=True)
class Made:
    """The module after a pass; `number` is the place of the pass in the whole pipeline, from 1."""

    number: int
    call: Call
    module: Module


def dumped_passes(folder: str | Path) -> list[Dumped]:
    """The modules of passes in the order of the passes; none where the folder holds no dump."""
    place = Path(folder)
    found = sorted((int(match[1]), match[2], path) for path in place.glob("*.ir") if (match := _FILE.fullmatch(path.name)))
    calls: dict[int, str] = {}
    if found and (place / PASSES).is_file():
        rows = (line.split("\t") for line in (place / PASSES).read_text(encoding="utf-8").splitlines())
        calls = {int(row[0]): row[1] for row in rows if len(row) > 1 and row[0].isdigit()}
    return [Dumped(number, calls.get(number, name), path) for number, name, path in found]


def made_again(reference: Module, pipeline: str) -> list[Made]:
    """Run the passes from `partition` on; none where the pipeline has no such pass. What they refuse is their error."""
    from penstock.passes.pipelines import PASSES as TABLE

    calls = parse_pipeline(pipeline, TABLE)
    names = [call.name for call in calls]
    if "partition" not in names:
        return []
    start = names.index("partition")
    before: list[Module] = []

    def look(call: Call, module: Module) -> Call:
        before.append(module)
        return call

    last = run_passes(reference, calls[start:], TABLE, before=look)
    return [Made(start + i, call, module) for i, (call, module) in enumerate(zip(calls[start:], [*before[1:], last], strict=True), 1)]
