"""The time to parse, print and verify the text of a large module, and to compare two of them by name.

    python benchmarks/large_module.py   a GPT of 250 layers, two stages, 2bw: 50,000 operations, half a minute
    python benchmarks/large_module.py --layers 12

The module has all facts, so that all of the verifier runs. It is compared with itself (`same`), with the model before
it was cut into stages (`cut`: every operation is in another graph and has got a kernel), and with itself where every
operation has another kernel (`kernels`). `error` is a text with a mistake in its last line but one: it takes the time
of parsing, and must name that line. Figures are medians of processor time in one process. The exit code is 1 where a
bound (below, seconds for 50,000 operations) is not kept, or a result is wrong.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from machine import load, system, write_json

import penstock as ps
from penstock.inspection.diff import differences
from penstock.ir.graph import Module
from penstock.ir.text import parse_module, print_module
from penstock.ir.verify.verifier import verify
from penstock.models import write_gpt
from penstock.passes.manager import count_ops
from penstock.support.errors import ParseError

# The bounds are seconds for this many operations.
OPERATIONS = 50_000
BOUNDS = {
    "parse": 1.5,
    "error": 1.5,
    "print": 0.5,
    "verify": 1.0,
    "diff same": 2.0,
    "diff cut": 2.0,
    "diff kernels": 2.0,
}


def planned(layers: int) -> ps.Plan:
    """Make a training plan with all facts."""
    with tempfile.TemporaryDirectory(prefix="large-module-") as folder:
        model = ps.from_onnx(
            write_gpt(Path(folder) / "gpt.onnx", layers=layers, width=64, heads=4, vocab=256, positions=32, batch=2)
        )
    training = ps.Training(loss="cross_entropy", optimizer=ps.AdamW(lr=1e-3), microbatches=4)
    return ps.plan(model, ps.Cluster.local(2), training, schedule="2bw")


def other_kernels(module: Module) -> Module:
    """Copy the module with every operation in another kernel."""
    graphs = {
        name: replace(graph, ops=tuple(op.with_attrs(kernel=f"n{i}") for i, op in enumerate(graph.ops)))
        for name, graph in module.graphs.items()
    }
    return module.but(graphs=graphs)


def afresh(module: Module) -> Module:
    """Copy the module without the facts that are cached with its graphs and operations."""
    graphs = {name: replace(graph, ops=tuple(map(replace, graph.ops))) for name, graph in module.graphs.items()}
    return module.but(graphs=graphs)


def refused(text: str, line: int) -> bool:
    """Say whether a mistake is reported in its line."""
    try:
        parse_module(text, "large.ir")
    except ParseError as error:
        return error.where == f"large.ir:{line}" and f"> {line:5d} | " in error.what
    return False


def measure(layers: int, rounds: int) -> dict[str, Any]:
    plan = planned(layers)
    module, text = plan.module, print_module(plan.module)
    changed = other_kernels(module)
    lines = text.splitlines()
    wrong = "\n".join([*lines[:-2], "  no such line", lines[-1]])
    # The modules of each task; they are copied outside of its time.
    tasks: dict[str, tuple[list[Module], Callable[..., object]]] = {
        "parse": ([], lambda: parse_module(text) == module),
        "error": ([], lambda: refused(wrong, len(lines) - 1)),
        "print": ([module], lambda fresh: print_module(fresh) == text),
        "verify": ([module], lambda fresh: verify(fresh) is None),
        "diff same": ([module, module], lambda one, other: not list(differences(one, other))),
        "diff cut": ([plan.reference, module], lambda one, other: len(list(differences(one, other))) > 10),
        "diff kernels": ([module, changed], lambda one, other: len(list(differences(one, other))) >= count_ops(module)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in tasks}
    for _ in range(rounds):
        for name, (modules, task) in tasks.items():
            copies = [afresh(one) for one in modules]
            begin = time.process_time()
            right = task(*copies)
            seconds[name].append(time.process_time() - begin)
            if not right:
                raise SystemExit(f"{name}: the result is wrong")
    return {"operations": count_ops(module), "bytes": len(text), "seconds": seconds}


def main() -> int:
    arguments = _arguments()
    print(f"{system()}, load {load()}")
    result = measure(arguments.layers, arguments.rounds)
    operations = result["operations"]
    print(f"{operations} operations, {result['bytes'] / 2**20:.1f} MiB of text, rounds: {arguments.rounds}\n")
    print(f"{'':12}  {'s':>6}  {'us/op':>6}  {'bound s':>7}")
    late = False
    for name, times in result["seconds"].items():
        seconds, bound = statistics.median(times), BOUNDS[name] * max(1.0, operations / OPERATIONS)
        late = late or seconds > bound
        print(f"{name:12}  {seconds:6.2f}  {seconds / operations * 1e6:6.1f}  {bound:7.2f}")
    write_json(arguments.json, result)
    return int(late)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=250, help="default: 250")
    parser.add_argument("--rounds", type=int, default=5, help="default: 5")
    parser.add_argument("--json", metavar="FILE", help="write every figure")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
