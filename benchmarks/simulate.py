"""The processor time to build and to simulate schedules of many ranks, and the memory of the process.

python benchmarks/simulate.py            all rows: a minute
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time

from penstock.passes.schedules.schedule import build_schedule
from penstock.passes.simulator.machine import Route, SimulatedMachine
from penstock.passes.simulator.simulate import simulate
from penstock.passes.simulator.wiring import wire_chain

# Stages, microbatches, batches, and the number of ranks that share a network card (0: none do).
ROWS = ((256, 64, 3, 0), (2048, 64, 3, 0), (2048, 64, 3, 8))


def one(stages: int, microbatches: int, batches: int, sharing: int) -> str:
    begun = time.process_time()
    schedule = wire_chain(build_schedule("2bw", stages, microbatches))
    built = time.process_time()

    def route(source: int, target: int) -> Route:
        cards = ((f"out {source // sharing}", 1e9), (f"in {target // sharing}", 1e9)) if sharing else ()
        return Route(((f"{source}>{target}", 1e9), *cards), 1e-5)

    result = simulate(schedule, batches, lambda rank, action: 1e-3, lambda phase, a, b: 1e5, SimulatedMachine(route))
    done = time.process_time()
    actions = sum(len(line.starts) for line in result.lines.values())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return (
        f"| {stages} | {microbatches} | {batches} | {sharing or '-'} | {actions / 1e6:.1f} | {built - begun:.1f} | "
        f"{done - built:.1f} | {peak:.0f} |"
    )


def main() -> None:
    if len(sys.argv) > 1:
        print(one(*map(int, sys.argv[1:])))
        return
    print(
        "| ranks | microbatches | batches | share a card | million actions | build s | simulate s | peak MiB |\n"
        + "| --- " * 8
        + "|",
        flush=True,
    )
    for row in ROWS:
        # Each in a process of its own, whose peak is its own.
        subprocess.run([sys.executable, __file__, *map(str, row)], check=True, timeout=600)


if __name__ == "__main__":
    main()
