"""Attention over caches beside the rate at which one thread reads memory.

16 sequences of 2048 positions take one row each: a step of decoding. The blocks of a sequence lie in no order. The bytes
of all live blocks, divided by the time, are a rate; `rho` is its share of the rate at which torch adds up as many
numbers. Both take turns; times are medians of processor time. `prompt` is a chunk of 64 rows of one sequence.

    python benchmarks/attend.py [--rounds N] [--json FILE]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import machine
import torch

from penstock.backends.interface import CompileOptions
from penstock.backends.tvm.compile.build import build_graphs
from penstock.backends.tvm.run.load import TvmProgram
from penstock.ir.graph import Graph, Value
from penstock.ir.ops import BLOCK, make
from penstock.ir.types import parse_type

POSITIONS = 2048


@dataclass(frozen=True)
class Case:
    """One shape: heads of the queries and of the cache, their size, the element type of the cache."""

    name: str
    heads: int
    cache_heads: int
    size: int
    dtype: str
    sequences: int = 16
    rows: int = 1


CASES = (
    Case("4 heads share one", 16, 4, 64, "f32"),
    Case("4 heads share one", 16, 4, 64, "bf16"),
    Case("each its own", 12, 12, 64, "f32"),
    Case("4 heads share one", 32, 8, 128, "bf16"),
    Case("prompt", 16, 4, 64, "f32", sequences=1, rows=64),
)


def prepared(case: Case, folder: Path) -> tuple[Callable[[], object], int]:
    """Return the call of a case, and the bytes of its live blocks."""
    each = POSITIONS // BLOCK
    blocks, rows = case.sequences * each, case.sequences * case.rows
    cache = f"{case.dtype}[{blocks},{BLOCK},{case.cache_heads},{case.size}]"
    kinds = {
        "q": f"f32[{rows},{case.heads},{case.size}]",
        "keys": cache,
        "values": cache,
        "starts": f"i32[{case.sequences + 1}]",
        "lengths": f"i32[{case.sequences}]",
        "table": f"i32[{case.sequences},{each}]",
    }
    ins = [Value(name, parse_type(kind)) for name, kind in kinds.items()]
    op = make("attend", ins, ["y"], scale=float(case.size) ** -0.5)
    graph = Graph("s0.F", op.ins, op.outs, (op,))
    program = TvmProgram(build_graphs([graph], folder / "stage.so", CompileOptions("host")).path, [graph])
    held = torch.bfloat16 if case.dtype == "bf16" else torch.float32
    torch.manual_seed(0)
    keys, values = (torch.randn(blocks, BLOCK, case.cache_heads, case.size).to(held) for _ in range(2))
    operands = [
        torch.randn(rows, case.heads, case.size),
        keys,
        values,
        torch.arange(case.sequences + 1, dtype=torch.int32) * case.rows,
        torch.full((case.sequences,), POSITIONS, dtype=torch.int32),
        torch.randperm(blocks).to(torch.int32).reshape(case.sequences, each),
    ]
    return lambda: program.call("s0.F", operands), 2 * keys.nbytes


def processor_time(call: Callable[[], object]) -> float:
    begin = time.process_time()
    call()
    return time.process_time() - begin


def measured(case: Case, rounds: int) -> dict[str, Any]:
    """Return the times and rates of a case."""
    with tempfile.TemporaryDirectory() as folder:
        call, moved = prepared(case, Path(folder))
        numbers = torch.zeros(max(moved, 64 << 20) // 4)
        call()
        times, reads = [], []
        for _ in range(rounds):
            times.append(processor_time(call))
            reads.append(processor_time(numbers.sum))
    seconds = statistics.median(times)
    rate, reading = moved / seconds, numbers.nbytes / statistics.median(reads)
    return {**asdict(case), "ms": seconds * 1e3, "GB/s": rate / 1e9, "read GB/s": reading / 1e9, "rho": rate / reading}


def main() -> None:
    """Measure all cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measured(case, arguments.rounds) for case in CASES]
    print(machine.markdown(*table_of(rows)))
    about = {"processor": machine.processor([0]), "system": machine.system(), "load": machine.load()}
    machine.write_json(arguments.json, {"about": about, "rows": rows})


def table_of(rows: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, ...], list[list[str]]]:
    """Return the heads and lines of the table of all cases."""
    heads, rates = ("name", "heads", "cache_heads", "size", "dtype", "sequences", "rows"), ("GB/s", "read GB/s", "rho")
    lines = [
        [*(str(row[head]) for head in heads), f"{row['ms']:.2f}", *(f"{row[head]:.2f}" for head in rates)]
        for row in rows
    ]
    return (*(head.replace("_", " ") for head in heads), "ms", *rates), lines


if __name__ == "__main__":
    main()
