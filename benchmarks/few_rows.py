"""Products of few rows by weights of 32, 16, 8 and 4 bits: how near to the speed of memory they are read.

    python benchmarks/few_rows.py [--threads N] [--rows 1,4,16,256] [--only int8] [--json FILE]

Each row of the table is one product, x[m, k] times a weight [n, k], with weights packed when they are loaded, as a model
does it. So many copies of a weight are multiplied in turn that none is in a cache when its turn comes. `share` is the
rate at which bytes of the weight are read, over the fastest of three loops of NumPy and torch that read as much memory.
Beside it is torch's product in float32 on the same copies. Each result is checked against the interpreter's first.

With --json results are written after each row, and rows that the file has are not measured again.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from machine import load, markdown, processor, system, versions

from penstock.backends.interface import CompileOptions
from penstock.backends.numpy_backend import NumpyProgram
from penstock.backends.tvm.compile.build import build_graphs
from penstock.backends.tvm.run.load import TvmProgram
from penstock.ir.graph import Graph, Module, Op, Value, Var
from penstock.ir.interpreter.derived import derive
from penstock.ir.ops import make
from penstock.ir.types import parse_type
from penstock.passes.kernels.fuse import FuseOptions, fuse

SHAPES = ((1024, 4096), (4096, 4096), (768, 50257))
BITS = {"f32": 32, "bf16": 16, "int8": 8, "int4": 4}
GROUP = 32
# The copies of a weight take so many bytes together, and calls go on for so many seconds.
_FAR, _SECONDS = 120e6, 0.6


def variables_of(form: str, k: int, n: int) -> list[Var]:
    """Return the variables of a weight [n, k] in a form."""
    if form in ("f32", "bf16"):
        return [Var("w", parse_type(f"{form}[{n},{k}]"), "param", source="w", form="bf16")]
    bits = BITS[form]
    codes = f"i8[{n},{k}]" if bits == 8 else f"u8[{n},{k // 2}]"
    return [
        Var("q", parse_type(codes), "param", source="w", form=f"codes{bits}.{GROUP}"),
        Var("s", parse_type(f"f16[{n},{k // GROUP}]"), "param", source="w", form=f"scales{bits}.{GROUP}"),
    ]


def graph_of(form: str, m: int, k: int, n: int) -> Graph:
    """Return x times the transpose of a weight."""
    x, variables = Value("x", parse_type(f"f32[{m},{k}]")), {var.name: var for var in variables_of(form, k, n)}
    ops = [Op("read", (), (Value(name, var.type),), {"var": name}) for name, var in variables.items()]
    weight = [op.outs[0] for op in ops]
    if form == "bf16":
        ops.append(make("cast", weight, ["wide"], dtype="f32"))
        weight = list(ops[-1].outs)
    if form in ("f32", "bf16"):
        ops.append(make("matmul", [x, *weight], ["y"], tb=True))
    else:
        ops.append(make("matmul_q", [x, *weight], ["y"], bits=BITS[form], group=GROUP, act="i8"))
    graph = Graph("s0.F", (x,), ops[-1].outs, tuple(ops), ())
    return fuse(Module("m", graphs={graph.name: graph}, vars=variables), FuseOptions()).graphs[graph.name]


def weights_of(form: str, k: int, n: int, seed: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return a weight in a form, and in float32."""
    plain = torch.randn(n, k, generator=torch.Generator().manual_seed(seed))
    if form == "f32":
        return [plain], plain
    if form == "bf16":
        return [plain.bfloat16()], plain
    return [torch.from_numpy(derive(var, plain.numpy())) for var in variables_of(form, k, n)], plain


def seconds(call: Callable[[], object]) -> float:
    """Return the shortest time of a call."""
    times, end = [], time.perf_counter() + _SECONDS
    while len(times) < 3 or time.perf_counter() < end:
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return min(times)


def read_rate() -> float:
    """Return the bytes per second of the fastest loop that reads a large array."""
    x = torch.ones(48 << 20)
    loops = (lambda: x.sum(), lambda: x.max(), lambda: torch.dot(x, x), lambda: np.add.reduce(x.numpy()))
    return x.nbytes / min(map(seconds, loops))


def measured(form: str, m: int, k: int, n: int, threads: int) -> dict[str, object]:
    """Measure one product beside torch's."""
    graph = graph_of(form, m, k, n)
    with tempfile.TemporaryDirectory() as folder:
        built = build_graphs([graph], Path(folder) / "stage.so", CompileOptions())
        program = TvmProgram(built.path, [graph], threads)
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(1))
    calls, plain = [], []
    nbytes = sum(t.nbytes for t in weights_of(form, k, n, 0)[0])
    for copy in range(max(2, int(_FAR // nbytes))):
        slots, in_f32 = weights_of(form, k, n, copy)
        program.hold(graph.name, slots)
        calls.append((program.bind(graph.name, slots), slots))
        if len(plain) * in_f32.nbytes < _FAR:
            plain.append(in_f32)
    ours, expected = calls[0][0]([x])[0], NumpyProgram([graph]).call(graph.name, [x, *calls[0][1]])[0]
    error = float((ours - expected).abs().max() / expected.abs().max())
    if not error < 1e-5:
        raise SystemExit(f"{form} {m}x{k}x{n}: the result is off by {error:.1e}")
    took = seconds(lambda: [call([x]) for call, _ in calls]) / len(calls)
    torch_took = seconds(lambda: [torch.mm(x, w.T) for w in plain]) / len(plain)
    return {
        "us": took * 1e6,
        "rate": nbytes / took,
        "weights": k * n / took,
        "flops": 2.0 * m * k * n / took,
        "torch_us": torch_took * 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", default="1,4,16,256", help="numbers of rows, between commas")
    parser.add_argument("--only", help="one form of weights: f32, bf16, int8 or int4")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rate = read_rate()
    results: dict[str, dict[str, object]] = {}
    if arguments.json is not None and arguments.json.exists():
        results = json.loads(arguments.json.read_text(encoding="utf-8"))["rows"]
    for form in [arguments.only] if arguments.only else BITS:
        for k, n in SHAPES:
            for m in map(int, arguments.rows.split(",")):
                name = f"{form} {m}x{k}x{n} threads={arguments.threads}"
                if name not in results:
                    results[name] = measured(form, m, k, n, arguments.threads) | {"read": rate}
                if arguments.json is not None:
                    facts = {"processor": processor(sorted(os.sched_getaffinity(0))), "load": load()}
                    text = json.dumps({"facts": facts, "rows": results}, indent=2) + "\n"
                    arguments.json.write_text(text, encoding="utf-8")
    heads = ("product", "us", "GB/s", "share", "G weights/s", "GFLOP/s", "torch f32, us")
    lines = [
        (
            name,
            f"{row['us']:.0f}",
            f"{float(row['rate']) / 1e9:.1f}",  # type: ignore[arg-type]
            f"{float(row['rate']) / float(row['read']):.2f}",  # type: ignore[arg-type]
            f"{float(row['weights']) / 1e9:.1f}",  # type: ignore[arg-type]
            f"{float(row['flops']) / 1e9:.0f}",  # type: ignore[arg-type]
            f"{row['torch_us']:.0f}",
        )
        for name, row in results.items()
    ]
    print(f"{processor(sorted(os.sched_getaffinity(0)))}\n{system()}; {versions('torch', 'numpy')}; load {load()}")
    print(f"read: {rate / 1e9:.1f} GB/s\n\n{markdown(heads, lines)}")


if __name__ == "__main__":
    main()
