"""Modules with one graph, from the lines a test is about; and whether a pass left its results what they were."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from penstock.ir.graph import Graph, Module
from penstock.ir.interpreter.interpreter import run_graph
from penstock.ir.text import parse_module
from penstock.ir.verify.verifier import check
from penstock.passes.rewrite.simplify import SimplifyOptions, simplify


def main_of(ins: str, lines: str | Iterable[str], outs: str = "%out", head: str | Iterable[str] = ()) -> Module:
    """A module whose graph `main` has these operations; `head` are lines of the module in front of it. Indentation is of no account."""
    words = [*_lines(head, "  "), f"  graph @main({ins}) {{", *_lines(lines, "    "), f"    return {outs}", "  }"]
    return parse_module("\n".join(["module @m {", *words, "}"]) + "\n")


def _lines(given: str | Iterable[str], indent: str) -> list[str]:
    lines = given.strip().splitlines() if isinstance(given, str) else given
    return [indent + line.strip() for line in lines]


def operands(module: Module, seed: int = 0) -> list[np.ndarray]:
    """For `main`: normal numbers, and bools of which more than half are true."""
    rng = np.random.default_rng(seed)
    types = [v.type for v in module.graphs["main"].ins]
    return [rng.random(t.dims) < 0.6 if t.dtype == "bool" else rng.normal(size=t.dims) for t in types]


def results(module: Module, ins: list[np.ndarray]) -> list[np.ndarray]:
    """Of `main`, in f64."""
    with np.errstate(all="ignore"):
        return run_graph(module.graphs["main"], ins, precision="f64")


def simplified_alike(module: Module, rtol: float = 1e-6, atol: float = 1e-7) -> Graph:
    """The simplified `main`, which has valid types and gives what it gave before."""
    check(module, ("typed",))
    found = simplify(module, SimplifyOptions())
    check(found, ("typed",))
    ins = operands(module)
    for after, before in zip(results(found, ins), results(module, ins), strict=True):
        np.testing.assert_allclose(after, before, rtol=rtol, atol=atol)
    return found.graphs["main"]
