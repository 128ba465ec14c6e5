"""Tolerances: how far two computations of one value may be apart, and the reason.

The same formula in another order, or with other roundings, differs by the effect of rounding. u is the unit roundoff of
the element type, n the terms of a sum, whose roundings add up like a random walk:

    in float64, where nothing else differs    SAFETY * u * sqrt(n) * depth, where depth is the longest chain of
                                              operations, along which errors add up at worst
    as the types say, another program         SAFETY * u * sqrt(n) of the operation that makes a value, or
                                              MARGIN * drift * sqrt(n), whichever is more

`drift` is the error of the interpreter against float64 when it rounds every result as its type says. It shows how a
chain of operations magnifies roundings. But the interpreter sums in float64, where a back end sums in float32: hence
sqrt(n), of the longest sum. Where types have 16 bits, sums are made in more, and it is MARGIN * u and MARGIN * drift.

Errors are relative to the largest element, so that small elements of a sum that cancels are not judged by their own
size. Some numbers are worse than that by nature: a gradient that is zero but for rounding, divided by its own size. For
them the reference is computed again with every input changed by one rounding. A float64 result may be MARGIN times as
far off as the reference moves. Where types are shorter, noise says how far rounding moves them (roundings.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import sqrt

from penstock.ir.graph import Graph, Op, Value
from penstock.ir.ops import OPS, cost_of
from penstock.ir.types import FLOATS, UNIT_ROUNDOFF
from penstock.support.words import counted

SAFETY, MARGIN = 16.0, 4.0
_WORDS = {"f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16"}


@dataclass(frozen=True)
class Allowed:
    """A relative error, and one line that says where it comes from.

    `blurred` says that rounding may change the value so much that a fault would not show in it.
    """

    error: float
    why: str
    blurred: bool = False

    def __str__(self) -> str:
        return f"{self.error:.2g}: {self.why}"

    def widened(self, drift: float, why: str) -> Allowed:
        """Allow at least MARGIN times an error that the reference has by itself."""
        return self if MARGIN * drift <= self.error else Allowed(MARGIN * drift, f"{MARGIN:g} times {drift:.1e}, {why}")


def asked(error: float) -> Allowed:
    """Return the tolerance of the option `--tolerance`."""
    return Allowed(error, "--tolerance")


def in_float64(graphs: Iterable[Graph], times: int = 1) -> Allowed:
    """Return the tolerance for graphs that run one after the other, `times` over."""
    graphs = list(graphs)
    terms = max((terms_of(op) for graph in graphs for op in graph.ops), default=1)
    depth = max(1, sum(max(depths(graph).values(), default=0) for graph in graphs)) * times
    u = UNIT_ROUNDOFF["f64"]
    why = (
        f"{SAFETY:g} roundings of float64 ({u:.1e}) * sqrt of sums of {counted(terms, 'term')} * "
        f"{counted(depth, 'operation')} in a row"
    )
    return Allowed(SAFETY * u * sqrt(terms) * depth, why)


def as_typed(graph: Graph, op: Op | None, drift: float) -> Allowed:
    """Return the tolerance for a value that `op` makes; `drift` is the error of the interpreter in it."""
    dtypes = {v.type.dtype for o in graph.ops for v in (*o.ins, *o.outs) if v.type.dtype in FLOATS} or {"f32"}
    coarsest = max(dtypes, key=lambda dtype: UNIT_ROUNDOFF[dtype])
    u, longest = UNIT_ROUNDOFF[coarsest], max(map(terms_of, graph.ops), default=1)
    reason = "what the interpreter is off by when it rounds as the types say"
    if coarsest in ("f16", "bf16"):
        return Allowed(MARGIN * u, f"{MARGIN:g} roundings of {_WORDS[coarsest]} ({u:.1e})").widened(drift, reason)
    terms = 1 if op is None else terms_of(op)
    local = Allowed(
        SAFETY * u * sqrt(terms),
        f"{SAFETY:g} roundings of {_WORDS[coarsest]} ({u:.1e}) * sqrt of a sum of {counted(terms, 'term')}",
    )
    return local.widened(drift * sqrt(longest), f"{reason} ({drift:.1e}) * sqrt of sums of {counted(longest, 'term')}")


def terms_of(op: Op) -> int:
    """Return the terms of the longest sum behind one element of an operation's results."""
    sizes = [v.type.size for v in op.outs if v.type.dtype in FLOATS and v.type.size]
    family = OPS[op.kind].family
    if not sizes or family == "state":
        return 1
    if family == "contract":
        return max(1, round(cost_of(op).flops / 2 / max(sizes)))
    whole = max((v.type.size for v in op.ins), default=1) // min(sizes)
    along = max((n for v in op.ins for n in v.type.dims), default=1) if family in ("row", "gather") else 1
    return max(1, whole, along)


def depths(graph: Graph) -> dict[Value, int]:
    """Count the operations behind each value, in the longest chain. Operations that only move elements do not round."""
    counts: dict[Value, int] = dict.fromkeys(graph.ins, 0)
    for op in graph.ops:
        step = 1 if cost_of(op).flops else 0
        depth = max((counts.get(v, 0) for v in op.ins), default=0) + step
        counts.update(dict.fromkeys(op.outs, depth))
    return counts
