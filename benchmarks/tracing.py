"""The cost of a trace: a pipeline of two stages without kernels, with --trace and without, in the same two processes.

    python benchmarks/tracing.py                            a quarter of a minute
    python benchmarks/tracing.py --rounds 20 --json tracing.json

The pipeline runs over loopback, and only the work between actions is measured (benchmarks/transport.py). Figures are
the processor time of the thread of rank 0 that runs actions, for a microbatch in which no kernel runs, and the addition
of a trace for each action and each entry of the memory ledger. Kernels take the same time with and without a trace, but
for the first call of each graph, whose allocations are watched. Both take turns, the first of each does not count, and
figures are medians.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch.distributed as dist
from machine import markdown, write_json
from transport import SCHEDULES, Pipeline, add_rank_arguments, run_rank, told_by_two, write_bundle

from penstock.runtime.group.group import RankGroup
from penstock.runtime.worker.executor import Executor

SIZE = 64 << 10
BATCHES = 25


class Traced(Pipeline):
    """A rank with a trace, which is emptied at the end of each run, as by a worker."""

    actions = entries = 0

    def run(self, executor: Executor, batches: int) -> None:
        super().run(executor, batches)
        assert executor.events is not None
        assert executor.ledger is not None
        self.actions, self.entries = len(executor.events), len(executor.ledger.taken())
        executor.events.clear()


def work(bundles: list[str], group: RankGroup, rounds: int) -> list[dict[str, Any]]:
    lines = []
    for bundle in bundles:
        both = {
            "plain": Pipeline(Path(bundle), group.rank, group),
            "traced": Traced(Path(bundle), group.rank, group, trace=True),
        }
        traced, microbatches = both["traced"], BATCHES * both["plain"].schedule.microbatches
        assert isinstance(traced, Traced)
        times: dict[str, list[float]] = {name: [] for name in both}
        for number in range(rounds + 1):
            for name, pipeline in both.items():
                dist.barrier()
                begin = time.thread_time()
                pipeline.run(pipeline.executors["shared"], BATCHES)
                if number:
                    times[name].append((time.thread_time() - begin) / microbatches)
        counts = {"actions": traced.actions / microbatches, "entries": traced.entries / microbatches}
        lines.append({"schedule": traced.schedule.name, **counts, "times": times})
    return lines


def table(lines: list[dict[str, Any]]) -> str:
    rows = []
    for line in lines:
        plain, traced = line["seconds"]["plain"], line["seconds"]["traced"]
        each = (traced - plain) / (line["actions"] + line["entries"])
        cells = [
            line["schedule"],
            f"{plain * 1e6:.0f} us",
            f"{traced * 1e6:.0f} us",
            f"{(traced - plain) * 1e6:+.0f} us",
        ]
        rows.append([*cells, f"{line['actions']:.1f}", f"{line['entries']:.1f}", f"{each * 1e6:.1f} us"])
    return markdown(["schedule", "a microbatch", "traced", "more", "actions", "entries", "for one of them"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=["1f1b", "2bw"])
    parser.add_argument("--rounds", type=int, default=11, metavar="N", help="turns of each contender (default: 11)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    add_rank_arguments(parser)
    arguments = parser.parse_args()
    if run_rank(arguments, work):
        return
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        bundles = [str(write_bundle(Path(folder), SIZE, schedule)) for schedule in arguments.schedules]
        lines = told_by_two(bundles, arguments.rounds)
    print(table(lines))
    write_json(arguments.json, {"lines": lines})


if __name__ == "__main__":
    main()
