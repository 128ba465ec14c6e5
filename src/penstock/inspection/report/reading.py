"""Material of reports, read. In: what is looked at (a bundle, a dump folder, an IR file), and perhaps the trace of a run. Out: the program,
its passes with their modules, plan, times, and sources of kernels.

A dump folder has the module after every pass, the plan, the sources, and if the pipeline failed, why. Of a bundle passes are
run again from `partition` on, as `inspect --why` does, and kernels are planned again for this machine's CPU. A bundle with
its dump folder beside it has all of that.

Limit: `--dump-ir-filter` and `--dump-ir-changed` leave modules out of a dump folder, so a report made of
it later knows less than its index.html.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.inspection.dump.folder import REPRO
from penstock.inspection.dump.reading import dumped_text, pass_rows
from penstock.inspection.history import record_of
from penstock.inspection.plan_reading import plan_of_folder
from penstock.inspection.subject import Subject
from penstock.ir.graph import Module
from penstock.ir.schedule import Action
from penstock.passes.kernels.divide import Kernel
from penstock.support.errors import UsageError, VerifyError

from .material import Material, PassStep, RunTrace

if TYPE_CHECKING:
    from penstock.runtime.messages.ledger import LedgerEntry

_SOURCE = re.compile(r"kernels/[\w.-]+\.py")


def read_material(subject: Subject, trace: str | Path | None = None) -> Material:
    """Everything that is there to be read."""
    folder = subject.dumps[0].path.parent if subject.dumps else None
    plan, sources, programs, failure = dict(subject.plan), dict[str, str](), dict[str, str](), ""
    if folder is not None:
        plan = plan or plan_of_folder(folder)
        sources, failure = dict(_dumped_sources(folder)), _failure(folder)
        files = [file for name in ("relax.py", "kernels.cu") for file in _files(folder, f"stages/*/{name}")]
        programs = {file.removeprefix("stages/"): dumped_text(folder, file) for file in files}
    if not sources and subject.backend == "tvm":
        sources = _planned_sources(subject.module)
    times = None if trace is None else trace_of(trace, subject.module)
    return Material(subject.module, tuple(_steps(subject, folder)), plan, times, sources, programs, failure)


def _steps(subject: Subject, folder: Path | None) -> Iterator[PassStep]:
    snapshots = {snapshot.number: snapshot for snapshot in record_of(subject).snapshots}
    rows = {} if folder is None else pass_rows(folder)
    for number in sorted({*snapshots, *rows}):
        call, ms = rows.get(number, (snapshots[number].call or "input" if number in snapshots else "", None))
        yield PassStep(number, call, ms, snapshots[number].module if number in snapshots else None)


def _failure(folder: Path) -> str:
    """What repro.ir says of the error, in its comments."""
    if not (folder / REPRO).is_file():
        return ""
    lines = dumped_text(folder, REPRO).splitlines()
    return "\n".join(line[3:] for line in lines[1:] if line.startswith("// "))


def _dumped_sources(folder: Path) -> Iterator[tuple[str, str]]:
    """The sources of stages/sN/kernels.tsv by graph and kernel."""
    for table in _files(folder, "stages/*/kernels.tsv"):
        home = table.rpartition("/")[0]
        for at, line in enumerate(dumped_text(folder, table).splitlines()[1:], 2):
            graph, kernel, file, *_ = [*line.split("\t"), "", "", ""]
            if not graph or _SOURCE.fullmatch(file) is None:
                what = f"expected a graph, a kernel and kernels/NAME.py, found {line[:80]!r}"
                raise VerifyError(what, where=f"{folder / table}:{at}", hint="is this a dump folder?")
            # What a library computes has no source.
            if (folder / home / file).is_file():
                yield f"{graph}/{kernel}", dumped_text(folder, f"{home}/{file}")


def _files(folder: Path, pattern: str) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.glob(pattern))


def _planned_sources(module: Module) -> dict[str, str]:
    """The sources of all kernels as they are for this machine's CPU. Kernels of several stages that differ
    in names only have that of the first."""
    from penstock.inspection.kernels.kernels import kernel_rows, kernel_source

    if "fused" not in module.facts or module.cluster is None:
        return {}
    made: dict[str, str] = {}
    found = {}
    for row in kernel_rows(module):
        if row.device.kind == "cpu":
            key = Kernel(row.names[0], row.ops, row.body).key
            if key not in made:
                made[key] = kernel_source([row], row.label)
            found[row.label] = made[key]
    return found


def trace_of(path: str | Path, module: Module) -> RunTrace:
    """What `penstock run --trace` wrote of a run of this module."""
    # Here alone: it loads torch, which takes longer than a report without a trace.
    from penstock.runtime.telemetry.memory_trace import read_trace

    found = read_trace(path)
    homes = module.rank_stages()
    actions = {
        rank: [(Action.parse(name), start, end - start) for name, start, end in ranks.events]
        for rank, ranks in enumerate(found)
    }
    strangers = any(
        rank >= len(homes) or action.stage != homes[rank] for rank, line in actions.items() for action, _, _ in line
    )
    times = [time for line in actions.values() for _, start, seconds in line for time in (start, seconds)]
    if strangers or not times or not all(map(math.isfinite, times)):
        raise UsageError(
            "is not of a run of this program: its ranks, stages or times are none of its",
            where=str(path),
            hint="give a file that `penstock run --trace` wrote",
        )
    return RunTrace(actions, {rank: list(_held(ranks.entries)) for rank, ranks in enumerate(found)})


def _held(entries: Iterable[LedgerEntry]) -> Iterator[tuple[float, int]]:
    from penstock.runtime.telemetry.blocks import VALUES, Stays

    stays = Stays()
    for entry in entries:
        if entry.what in VALUES:
            stays.follow(entry)
            yield entry.at, stays.nbytes
