"""How far two computations of one thing may be apart, and why: the one place where a tolerance is made.

The same formula in another order, or with other roundings, differs by what rounding does:

    allowed = SAFETY * u * sqrt(terms) * depth

u is the unit roundoff of the element type; `terms` the most arithmetic that stands behind one element of a result, whose roundings add up like a random
walk; `depth` the longest chain of operations, along which they add up at worst. Errors are relative to the largest element, so that small elements
of a sum that cancels are not judged by their own size.

Where numbers are worse than that by nature (a gradient that is zero but for rounding, divided by its own size), a second measure counts: how far the
reference itself moves when every number that goes into it is changed by one rounding, or when it is rounded as its types say. Up to MARGIN times that is allowed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import sqrt

from penstock.ir.graph import Graph, Op, Value
from penstock.ir.ops import OPS, cost_of
from penstock.ir.types import FLOATS, UNIT_ROUNDOFF
from penstock.ir.words import counted

SAFETY, MARGIN = 16.0, 4.0
_WORDS = {"f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16"}


@dataclass(frozen=True)
class Allowed:
    """A relative error, and one line that says where it comes from."""

    error: float
    why: str

    def __str__(self) -> str:
        return f"{self.error:.2g}: {self.why}"

    def widened(self, own: float, why: str) -> Allowed:
        """At least MARGIN times an error that the reference has by itself."""
        return self if MARGIN * own <= self.error else Allowed(MARGIN * own, f"{why}, {own:.2g}; {MARGIN:g} times that")


def asked(error: float) -> Allowed:
    return Allowed(error, "--tolerance")


def by_rounding(graphs: Iterable[Graph], dtype: str, times: int = 1) -> Allowed:
    """For graphs that run one after the other, `times` over, in this element type."""
    graphs = list(graphs)
    terms = max((terms_of(op) for graph in graphs for op in graph.ops), default=1.0)
    depth = max(1, sum(max(depths(graph).values(), default=0) for graph in graphs)) * times
    u = UNIT_ROUNDOFF[dtype]
    why = f"{SAFETY:g} roundings of {_WORDS[dtype]} ({u:.1e}) * sqrt of {counted(round(terms), 'operation')} behind an element * {counted(depth, 'step')} in a row"
    return Allowed(SAFETY * u * sqrt(terms) * depth, why)


def terms_of(op: Op) -> float:
    """Arithmetic behind one element of an operation's smallest float result; of operations on rows at least a row."""
    sizes = [v.type.size for v in op.outs if v.type.dtype in FLOATS and v.type.size]
    if not sizes:
        return 1.0
    along = max((n for v in op.ins for n in v.type.dims), default=1) if OPS[op.kind].family in ("row", "gather") else 1
    return max(1.0, along, cost_of(op).flops / min(sizes))


def depths(graph: Graph) -> dict[Value, int]:
    """How many operations stand behind each value, in the longest chain. Those that only move elements do not round."""
    found: dict[Value, int] = dict.fromkeys(graph.ins, 0)
    for op in graph.ops:
        own = 1 if cost_of(op).flops else 0
        behind = max((found.get(v, 0) for v in op.ins), default=0) + own
        found.update(dict.fromkeys(op.outs, behind))
    return found
