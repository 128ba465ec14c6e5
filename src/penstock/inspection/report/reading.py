"""The reader of a report's material.

In: a Subject (a bundle, a dump folder, an IR file), and perhaps the trace of a run. Out: the program, its passes with
their modules, plan, times, and sources of kernels.

A dump folder has the module after every pass, the plan, the sources, and the error if the pipeline failed. For a
bundle, passes are run again from `partition` on, as `inspect --why` does, and kernels are planned again for this
machine's CPU. A bundle with its dump folder beside it has all of that.

Limit: `--dump-ir-filter` and `--dump-ir-changed` leave modules out of a dump folder, so a report made from it later
shows less than its index.html.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.inspection.dump_reading import REPRO, dumped_text, pass_rows
from penstock.inspection.history import record_of
from penstock.inspection.kernels.kernels import kernel_rows, kernel_source
from penstock.inspection.plan_reading import plan_of_folder
from penstock.inspection.subject import Subject
from penstock.inspection.summary import rungs_of
from penstock.ir.graph import Module
from penstock.ir.schedule import Action
from penstock.passes.kernels.divide import Kernel
from penstock.runtime.telemetry.blocks import VALUES, Stays
from penstock.runtime.telemetry.collective_times import CollectiveTotal, collective_totals
from penstock.runtime.telemetry.memory_trace import read_trace
from penstock.support.errors import UsageError, VerifyError

from .material import Material, PassStep, RunTrace

if TYPE_CHECKING:
    from penstock.runtime.messages.ledger import LedgerEntry

_SOURCE = re.compile(r"kernels/[\w.-]+\.py")


def read_material(subject: Subject, trace: str | Path | None = None) -> Material:
    """Read all material there is."""
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
    rungs = () if subject.ladder is None else tuple(rungs_of(subject.ladder))
    steps = tuple(_steps(subject, folder))
    return Material(subject.module, steps, plan, times, sources, programs, failure, rungs=rungs)


def _steps(subject: Subject, folder: Path | None) -> Iterator[PassStep]:
    snapshots = {snapshot.number: snapshot for snapshot in record_of(subject).snapshots}
    rows = {} if folder is None else pass_rows(folder)
    for number in sorted({*snapshots, *rows}):
        call, ms = rows.get(number, (snapshots[number].call or "input" if number in snapshots else "", None))
        yield PassStep(number, call, ms, snapshots[number].module if number in snapshots else None)


def _failure(folder: Path) -> str:
    """Return the error in the comments of repro.ir."""
    if not (folder / REPRO).is_file():
        return ""
    lines = dumped_text(folder, REPRO).splitlines()
    return "\n".join(line[3:] for line in lines[1:] if line.startswith("// "))


def _dumped_sources(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the sources of stages/sN/kernels.tsv by graph and kernel."""
    for table in _files(folder, "stages/*/kernels.tsv"):
        home = table.rpartition("/")[0]
        for at, line in enumerate(dumped_text(folder, table).splitlines()[1:], 2):
            graph, kernel, file, *_ = [*line.split("\t"), "", "", ""]
            if not graph or _SOURCE.fullmatch(file) is None:
                what = f"expected a graph, a kernel and kernels/NAME.py, found {line[:80]!r}"
                raise VerifyError(what, where=f"{folder / table}:{at}", hint="is this a dump folder?")
            # An operation that a library computes has no source.
            if (folder / home / file).is_file():
                yield f"{graph}/{kernel}", dumped_text(folder, f"{home}/{file}")


def _files(folder: Path, pattern: str) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.glob(pattern))


def _planned_sources(module: Module) -> dict[str, str]:
    """Return the sources of all kernels for this machine's CPU.

    Kernels of several stages that differ in names only have that of the first.
    """
    if "fused" not in module.facts or module.cluster is None:
        return {}
    by_key: dict[str, str] = {}
    sources = {}
    for row in kernel_rows(module):
        if row.device.kind == "cpu":
            key = Kernel(row.names[0], row.ops, row.body).key
            if key not in by_key:
                by_key[key] = kernel_source([row], row.label)
            sources[row.label] = by_key[key]
    return sources


def trace_of(path: str | Path, module: Module) -> RunTrace:
    """Read a trace that `penstock run --trace` wrote of a run of this module."""
    # Imported here: it loads torch, which takes longer than a report without a trace.

    traces = read_trace(path)
    homes = module.rank_packs()
    actions = {
        rank: [(Action.parse(name), start, end - start) for name, start, end in trace.events]
        for rank, trace in enumerate(traces)
    }
    foreign = any(
        rank >= len(homes) or action.stage not in homes[rank] for rank, line in actions.items() for action, _, _ in line
    )
    times = [time for line in actions.values() for _, start, seconds in line for time in (start, seconds)]
    totals: list[CollectiveTotal] = []
    try:
        totals = collective_totals([trace.collectives for trace in traces], module)
    except ValueError:
        foreign = True
    if foreign or not times or not all(map(math.isfinite, times)):
        raise UsageError(
            "is not of a run of this program: its ranks, stages or times are none of its",
            where=str(path),
            hint="give a file that `penstock run --trace` wrote",
        )
    held = {rank: list(_held(trace.entries)) for rank, trace in enumerate(traces)}
    return RunTrace(actions, held, totals)


def _held(entries: Iterable[LedgerEntry]) -> Iterator[tuple[float, int]]:
    stays = Stays()
    for entry in entries:
        if entry.what in VALUES:
            stays.follow(entry)
            yield entry.at, stays.nbytes
