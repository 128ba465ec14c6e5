"""Modules with one graph, from the lines of a test; and the check that a pass left its results unchanged."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from penstock.ir.graph import Graph, Module
from penstock.ir.interpreter.graphs import run_graph
from penstock.ir.text import parse_module
from penstock.ir.verify.verifier import check
from penstock.passes.rewrite.simplify import SimplifyOptions, simplify


def main_of(ins: str, lines: str | Iterable[str], outs: str = "%out", head: str | Iterable[str] = ()) -> Module:
    """Return a module whose graph `main` has these operations.

    `head` are lines of the module in front of it. Indentation does not matter.
    """
    words = [*_lines(head, "  "), f"  graph @main({ins}) {{", *_lines(lines, "    "), f"    return {outs}", "  }"]
    return parse_module("\n".join(["module @m {", *words, "}"]) + "\n")


def _lines(text: str | Iterable[str], indent: str) -> list[str]:
    lines = text.strip().splitlines() if isinstance(text, str) else text
    return [indent + line.strip() for line in lines]


def operands(module: Module, seed: int = 0) -> list[np.ndarray]:
    """Draw operands of `main`: normal numbers, and bools of which more than half are true."""
    rng = np.random.default_rng(seed)
    types = [v.type for v in module.graphs["main"].ins]
    return [rng.random(t.dims) < 0.6 if t.dtype == "bool" else rng.normal(size=t.dims) for t in types]


def results(module: Module, ins: list[np.ndarray]) -> list[np.ndarray]:
    """Return the results of `main`, in f64."""
    with np.errstate(all="ignore"):
        return run_graph(module.graphs["main"], ins, precision="f64")


def simplified_alike(module: Module, rtol: float = 1e-6, atol: float = 1e-7) -> Graph:
    """Simplify `main`, and check that its types are valid and its results unchanged; return it."""
    check(module, ("typed",))
    simplified = simplify(module, SimplifyOptions())
    check(simplified, ("typed",))
    ins = operands(module)
    for after, before in zip(results(simplified, ins), results(module, ins), strict=True):
        np.testing.assert_allclose(after, before, rtol=rtol, atol=atol)
    return simplified.graphs["main"]
