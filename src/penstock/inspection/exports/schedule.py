"""The schedule as files: a Chrome trace, which Perfetto opens, and a table of comma-separated values.
In: a module with a schedule. Out: files.

Both say what every rank does for some batches, from an empty pipeline to an empty one, with the times of the simulation by the rates of the
module's cluster. The table has actions without times where the module cannot be simulated yet, a trace needs them.
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
    from penstock.runtime.telemetry.trace import write_trace

    made = simulated(subject.module, batches)
    write_trace(
        path,
        [[(str(a), start, end) for a, start, end in made.found.timed(rank)] for rank in made.found.lines],
        module=subject.module,
    )
    return [path]


def write_csv(subject: Subject, path: Path, batches: int) -> list[Path]:
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(COLUMNS)
    table.writerows(rows(subject.module, batches))
    return write_whole(path, text.getvalue())


def simulated(module: Module, batches: int) -> Forecast:
    """The run that a trace shows."""
    return forecast(module, seconds_of(module, rank_seconds(module)), batches)


def rows(module: Module, batches: int) -> Iterator[tuple[object, ...]]:
    """One row per action, by COLUMNS; what an action does not have is empty. Once per batch is what has no microbatch."""
    schedule = module.schedule
    if schedule is None:
        raise UsageError("the module has no schedule yet", hint="inspect a dump after the pass `schedule`, or a bundle")
    made = simulated(module, batches) if module.cluster is not None and "wired" in module.facts else None
    devices = module.rank_devices()
    for rank in schedule.ranks:
        line = made.found.lines[rank] if made is not None else None
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
