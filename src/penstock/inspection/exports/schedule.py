"""The schedule as files: a Chrome trace, which Perfetto opens, and a table of comma-separated values.

In: a module with a schedule. Out: files.

Both list the actions of every rank for some batches, from an empty pipeline to an empty one. Times come from a
simulation with the rates of the module's cluster. Where the module cannot be simulated yet, the table has no times, and
there is no trace.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path

from penstock.inspection.subject import Subject
from penstock.ir.graph import Module
from penstock.passes.costs.prices import rank_seconds
from penstock.passes.simulator.forecast import Forecast, forecast, seconds_of
from penstock.runtime.telemetry.trace import write_trace
from penstock.support.errors import UsageError

from .outputs import write_whole

COLUMNS = (
    "rank",
    "stage",
    "device",
    "step",
    "action",
    "kind",
    "batch",
    "microbatch",
    "version",
    "peer",
    "start_s",
    "end_s",
)


def write_trace_file(subject: Subject, path: Path, batches: int) -> list[Path]:
    """Write the Chrome trace of a subject."""
    run = simulated(subject.module, batches)
    write_trace(
        path,
        [[(str(a), start, end) for a, start, end in run.simulated.timed(rank)] for rank in run.simulated.lines],
        module=subject.module,
    )
    return [path]


def write_csv(subject: Subject, path: Path, batches: int) -> list[Path]:
    """Write the table of a subject's schedule."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(COLUMNS)
    table.writerows(rows(subject.module, batches))
    return write_whole(path, text.getvalue())


def simulated(module: Module, batches: int) -> Forecast:
    """Simulate the run that a trace shows."""
    return forecast(module, seconds_of(module, rank_seconds(module)), batches)


def rows(module: Module, batches: int) -> Iterator[tuple[object, ...]]:
    """Yield one row per action, by COLUMNS.

    Fields that an action lacks are empty: an action once per batch has no microbatch.
    """
    schedule = module.schedule
    if schedule is None:
        raise UsageError("the module has no schedule yet", hint="inspect a dump after the pass `schedule`, or a bundle")
    run = simulated(module, batches) if module.cluster is not None and "wired" in module.facts else None
    devices = module.rank_devices()
    for rank in schedule.ranks:
        line = run.simulated.lines[rank] if run is not None else None
        for step, action in enumerate(schedule.expand(rank, batches)):
            times = (line.starts[step], line.finishes[step]) if line is not None else ("", "")
            microbatch = action.mb if action.holder >= 0 else ""
            version, peer = ("" if x is None else x for x in (action.version, action.peer))
            place = devices[rank] if rank < len(devices) else ""
            yield (
                rank,
                action.stage,
                place,
                step,
                str(action),
                action.kind,
                action.batch(schedule.microbatches),
                microbatch,
                version,
                peer,
                *times,
            )
