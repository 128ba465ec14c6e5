"""Where the time of a batch goes that computations of a given time do not explain, along the longest path of a run.

    python benchmarks/schedule_path.py                                        4 devices, 16 microbatches
    python benchmarks/schedule_path.py --only 2x4 --schedules "interleaved /4"

The runs are those of schedules.py, traced. From the last action of the last rank the path goes back: to the action
before it on the rank, or, from a receive that was waited for, to the send of its message. Every microsecond of the run
is so in one line: the given times of computations, what these took beyond them, messages that were waited for from the
begin of their send, sends and receives that were not, and what lies between two actions of a rank. The last column is
what a line would cost if each of its parts took the median: on a busy machine a few parts take most of it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

from machine import load, markdown, processor, write_json
from processes import allowed_cores, awake
from schedules import ROWS, Row, built, compile_row, packs_of

from penstock.backends.bundle.format import open_bundle
from penstock.ir.grid import time_per_batch
from penstock.ir.schedule import RECEIVES, SENDS, Action
from penstock.runtime.job.job import Job
from penstock.runtime.messages.control import DataSpec
from penstock.runtime.telemetry.trace import Event

GIVEN = "given times"


class Timed(NamedTuple):
    """An action of a rank with its times."""

    action: Action
    begun: float
    ended: float


def longest_path(
    traces: Sequence[Sequence[Event]], homes: Sequence[int], given: Mapping[str, float]
) -> dict[str, list[float]]:
    """Return the parts of the path in seconds, by what they were spent on. `given` are the times of computations by
    kind."""
    ranks = [[Timed(Action.parse(name), begun, ended) for name, begun, ended in events] for events in traces]
    sends = {
        (a.stage, a.other(homes), a.phase, a.mb): (rank, i)
        for rank, line in enumerate(ranks)
        for i, (a, _, _) in enumerate(line)
        if a.kind in SENDS
    }
    parts: dict[str, list[float]] = {}

    def spend(what: str, spent: float) -> None:
        parts.setdefault(what, []).append(spent)

    rank = max(range(len(ranks)), key=lambda r: ranks[r][-1].ended)
    place = len(ranks[rank]) - 1
    while place >= 0:
        action, begun, ended = ranks[rank][place]
        source = (
            sends.get((action.other(homes), action.stage, action.phase, action.mb)) if action.kind in RECEIVES else None
        )
        if source is not None and ranks[source[0]][source[1]].begun > begun:
            rank, place = source
            begun = ranks[rank][place].begun
            spend("messages that were waited for", ended - begun)
        elif action.kind in given:
            spend(GIVEN, given[action.kind])
            spend("computations beyond them", ended - begun - given[action.kind])
        elif action.kind in RECEIVES:
            spend("messages that were there", ended - begun)
        else:
            spend("sends" if action.kind in SENDS else "updates and drops", ended - begun)
        place -= 1
        if place >= 0:
            spend("between actions", begun - ranks[rank][place].ended)
    return parts


def measure(row: Row, schedule: str, forward: float, batches: int, folder: Path) -> dict[str, Any]:
    """Run batches of one schedule, and return the times of its batches and the parts of its path, those of a batch."""
    part = forward / packs_of(schedule)
    given = {"F": part, "B": 2 * part}
    bundle = open_bundle(compile_row(row, schedule, folder))
    with Job(bundle, data=DataSpec(), pace=given, trace=True) as job:
        ends = [step.at for step in job.steps_from_data(batches)]
        parts = longest_path(job.traces, bundle.module.rank_stages(), given)
    return {
        "row": row.name,
        "schedule": schedule,
        "formula": time_per_batch(built(schedule, row), *given.values()),
        "seconds": [b - a for a, b in pairwise(ends)],
        "parts": {
            what: {"spent": sum(s) / batches, "times": len(s) / batches, "median": statistics.median(s)}
            for what, s in parts.items()
        },
    }


def over(path: Mapping[str, Any]) -> float:
    """Return how much of the formula the parts of a path are that it does not have, each at its median."""
    parts = (part for what, part in path["parts"].items() if what != GIVEN)
    return float(sum(part["times"] * part["median"] for part in parts) / path["formula"])


def table_of(paths: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return the heads and lines of the table: parts of the paths, and their sums."""
    head = ["part of the longest path"]
    for path in paths:
        head += [f"{path['schedule']}: times", "median", "of the formula"]
    whats = [
        what for what in sorted(paths[-1]["parts"], key=lambda w: -paths[-1]["parts"][w]["spent"]) if what != GIVEN
    ]
    lines = []
    for what in whats:
        lines.append([what])
        for path in paths:
            part = path["parts"].get(what, {"times": 0, "median": 0})
            share = part["times"] * part["median"] / path["formula"]
            lines[-1] += [f"{part['times']:.0f}", f"{part['median'] * 1e6:.0f} us", f"{share:.1%}"]
    sums, measured = ["sum of these"], ["batches, by the median"]
    for path in paths:
        sums += ["", "", f"{over(path):.1%}"]
        measured += ["", "", f"{statistics.median(path['seconds']) / path['formula'] - 1:.1%}"]
    return head, [*lines, sums, measured]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--forward", type=float, default=0.02, metavar="SECONDS", help="of all stages of a device")
    parser.add_argument("--batches", type=int, default=9, metavar="N")
    parser.add_argument("--only", nargs="+", default=["4x16"], metavar="DxM", help="rows of schedules.py")
    parser.add_argument("--schedules", nargs="+", default=["1f1b", "interleaved /2", "interleaved /4"])
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    paths, before = [], load()
    for row in (row for row in ROWS if row.name in arguments.only):
        for schedule in arguments.schedules:
            with tempfile.TemporaryDirectory(prefix="penstock-") as folder, awake():
                paths.append(measure(row, schedule, arguments.forward, arguments.batches, Path(folder)))
                print(markdown(*table_of(paths[-1:])))
    facts = {"forward": arguments.forward, "processor": processor(allowed_cores()), "load": [before, load()]}
    write_json(arguments.json, {"facts": facts, "rows": paths})
    return 0


if __name__ == "__main__":
    sys.exit(main())
