"""The time and memory of the optimal contiguous split: on constructed graphs, one process each.

    python benchmarks/placement.py                                    all rows: about a minute
    python benchmarks/placement.py --only 36k --json placement.json

`diamonds LxW` is L layers of W parallel branches, as attention heads are; the number of ideals is L 2^W + 2. `bert` is
a training graph of the kind that exporters make of a transformer: per layer query, key and value with the operations
between products, two norms, and separate weights and biases. Every node has a backward node that shares its colour; a
tenth of the gradients of weights have a colour of their own (orphaned). With separate heads there are far too many
ideals.

`pairs` counts pairs of ideals of which one contains the other: the work of a plain dynamic programme. Seconds are
processor time of the row's process, from the problem to the placement; `peak` is its resident memory, with Python and
NumPy. With `--check` rows that miss their limits make the exit code 1: 36,000 ideals in 300 s and 1 GiB, 18,000 in 30
s, 2,000 nodes of training in 60 s.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import time
from typing import Any, NamedTuple

import numpy as np
from machine import write_json

from penstock.passes.placement.contiguous import split_contiguously
from penstock.passes.placement.ideals import bits, enumerate_ideals
from penstock.passes.placement.problem import DeviceKind, PlacedNode, PlacementProblem
from penstock.passes.placement.units import absorb, units_of
from penstock.support.terminal import table


class Row(NamedTuple):
    """A graph to split.

    `memory` is that of an accelerator, as a part of all nodes'; `update` the time of a weight's gradient by itself.
    """

    name: str
    shape: str
    layers: int
    width: int
    accelerators: int
    memory: float = 1.0
    seconds: float = 0.0
    update: float = 0.0


ROWS = (
    Row("18k, 6 accelerators", "diamonds", 70, 8, 6, seconds=30),
    Row("18k, 2 accelerators", "diamonds", 70, 8, 2, seconds=30),
    Row("36k, 6 accelerators", "diamonds", 140, 8, 6, seconds=300),
    Row("36k, 2 accelerators", "diamonds", 140, 8, 2, seconds=300),
    Row("36k, tight memory", "diamonds", 140, 8, 6, memory=0.168, seconds=300),
    Row("36k, wide", "diamonds", 9, 12, 4, seconds=300),
    Row("training, 2,000 nodes", "bert", 24, 1, 6, seconds=60),
    Row("training, tight memory", "bert", 24, 1, 6, memory=0.19, seconds=60),
    Row("training, 64 accelerators", "bert", 24, 1, 64, seconds=60),
    Row("training, updates apart", "bert", 24, 1, 6, seconds=60, update=0.2),
    Row("training, 16 heads apart", "bert", 24, 16, 6, seconds=60),
)


class Builder:
    """A collector of nodes and edges."""

    def __init__(self) -> None:
        self.random = random.Random(1)
        self.nodes: list[PlacedNode] = []
        self.edges: list[tuple[int, int]] = []

    def node(
        self, time: float, uses: list[int], memory: float = 0.0, colour: int | None = None, backward: bool = False
    ) -> int:
        time *= self.random.uniform(0.8, 1.2)
        name = str(len(self.nodes))
        transfer = 0.0 if memory else self.random.uniform(0.01, 0.05)
        self.nodes.append(
            PlacedNode(
                name, (time, 10 * time), memory, transfer, len(self.nodes) if colour is None else colour, backward
            )
        )
        self.edges += [(use, len(self.nodes) - 1) for use in uses]
        return len(self.nodes) - 1


def diamonds(row: Row) -> Builder:
    built = Builder()
    last = built.node(1.0, [], memory=1.0)
    for _ in range(row.layers):
        branches = [built.node(0.5, [last], memory=1.0) for _ in range(row.width)]
        last = built.node(1.5, [last, *branches], memory=1.0)
    return built


def bert(row: Row) -> Builder:
    built = Builder()

    def product(time: float, source: int, memory: float) -> int:
        return built.node(
            0.05, [built.node(time, [source, built.node(0.0, [], memory)]), built.node(0.0, [], memory / 1000)]
        )

    def chain(source: int, count: int, time: float = 0.02) -> int:
        for _ in range(count):
            source = built.node(time, [source])
        return source

    mask = built.node(0.0, [])
    last = product(1.0, built.node(0.0, []), 30.0)
    for _ in range(row.layers):
        query, key, value = (chain(product(1.0, last, 1.0), 2) for _ in range(3))
        scores = built.node(0.1, [chain(built.node(0.3, [query, key]), 1), mask])
        # Separate heads, each with its share, or all in one node.
        shares = [built.node(0.3 / row.width, [chain(scores, 2, 0.1 / row.width), value]) for _ in range(row.width)]
        joined = product(1.0, chain(built.node(0.0, shares), 2), 1.0)
        first = chain(built.node(0.1, [last, joined]), 1, 0.1)
        wide = chain(product(4.0, first, 4.0), 3, 0.05)
        last = chain(built.node(0.1, [first, product(4.0, wide, 4.0)]), 1, 0.1)
    product(3.0, last, 30.0)
    _add_backward(built, row)
    return built


def _add_backward(built: Builder, row: Row) -> None:
    """Add the mirror image: the gradient of a node uses those of its users, and the operands of the node."""
    count = len(built.nodes)
    users: list[list[int]] = [[] for _ in range(count)]
    makers: list[list[int]] = [[] for _ in range(count)]
    for a, b in built.edges:
        users[a].append(b)
        makers[b].append(a)
    of: dict[int, int] = {}
    for n in reversed(range(count)):
        orphaned = built.nodes[n].memory > 0 and built.random.random() < 0.1
        time = row.update if built.nodes[n].memory else 2 * built.nodes[n].times[0]
        of[n] = built.node(
            time,
            [of[user] for user in users[n]] + makers[n],
            built.nodes[n].memory,
            -1 - n if orphaned else n,
            backward=True,
        )


def problem_of(row: Row) -> PlacementProblem:
    built = {"diamonds": diamonds, "bert": bert}[row.shape](row)
    limit = sum(node.memory for node in built.nodes) * row.memory
    return PlacementProblem(
        (DeviceKind("accelerator", row.accelerators, limit), DeviceKind("CPU", 1, pays_transfers=False)),
        tuple(built.nodes),
        tuple(built.edges),
    )


def count_pairs(problem: PlacementProblem) -> int:
    """Count pairs of ideals of which one contains the other. Return 0 where there are too many ideals to list."""
    ideals = enumerate_ideals(*absorb(units_of(problem)).neighbours(), limit=50_000)
    if ideals is None:
        return 0
    rows = ideals.rows()
    held = [
        np.bitwise_and.reduce([rows[u] for u in bits(tops)]) if tops else np.ones(len(ideals), np.uint8)
        for tops in ideals.tops
    ]
    return sum(int(np.count_nonzero(row)) - 1 for row in held)


def measure(row: Row, pairs: bool) -> dict[str, Any]:
    """Measure a row. It has its own process because its peak is measured."""
    problem = problem_of(row)
    before = time.process_time()
    placement = split_contiguously(problem)
    seconds = time.process_time() - before
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "name": row.name,
        "nodes": len(problem.nodes),
        "ideals": int(placement.notes[0].split()[0]),
        "units": int(placement.notes[0].split()[3]),
        "pairs": count_pairs(problem) if pairs else 0,
        "seconds": seconds,
        "peak": peak,
        "value": placement.value,
        "gap": placement.gap,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="rows whose name has this in it")
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="the median of so many runs (default: 1)")
    parser.add_argument("--json", metavar="FILE", help="write the rows here")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a limit is missed")
    parser.add_argument("--row", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--pairs", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.row is not None:
        print(json.dumps(measure(ROWS[arguments.row], arguments.pairs)))
        return 0
    results, missed = [], []
    for i, row in enumerate(ROWS):
        if arguments.only not in row.name:
            continue
        runs = []
        for turn in range(arguments.repeat):
            words = [sys.executable, __file__, "--row", str(i), *(["--pairs"] if turn == 0 else [])]
            runs.append(json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout))
        middle = sorted(runs, key=lambda run: run["seconds"])[len(runs) // 2] | {"pairs": runs[0]["pairs"]}
        results.append(middle)
        if middle["seconds"] > row.seconds or middle["peak"] > 2**30:
            missed.append(
                f"{row.name}: {middle['seconds']:.1f} s of {row.seconds:.0f}, {middle['peak'] / 2**20:.0f} MiB of 1024"
            )
        print(f"{row.name}: {middle['seconds']:.1f} s", file=sys.stderr)
    header = ["graph", "nodes", "units", "ideals", "pairs", "seconds", "peak MiB", "gap"]
    cells = [
        [
            *(r["name"], r["nodes"], r["units"], r["ideals"], f"{r['pairs']:.2e}" if r["pairs"] else "-"),
            *(f"{r['seconds']:.1f}", round(r["peak"] / 2**20), f"{r['gap']:.2%}"),
        ]
        for r in results
    ]
    print(table(header, cells))
    write_json(arguments.json, results)
    for line in missed:
        print(f"missed: {line}", file=sys.stderr)
    return int(bool(missed) and arguments.check)


if __name__ == "__main__":
    sys.exit(main())
