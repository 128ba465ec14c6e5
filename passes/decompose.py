"""Replace composite operations by primitives, where gradients or kernels are defined for the primitives only.

In: any module. Out: the same meaning; an operation of `DECOMPOSE` becomes several that carry its loc and annotations, the last of them
its results' names. A rule must be exact up to rounding.

    attention   softmax(scale * q k^T, later positions hidden if causal) v
    batch_norm  (x - mean) * factor + bias, with one factor for a channel: scale / sqrt(var + eps)

The hidden scores become the lowest finite number of the element type, so that their share is exactly 0: position 0 is never hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..ir.graph import ANNOTATIONS, Attr, Module, Namer, Op, Value, rewrite
from ..ir.ops import complete_attrs, make
from ..ir.types import numpy_dtype


@dataclass(frozen=True, slots=True)
class DecomposeOptions:
    """`keep` names composite operations to leave alone."""

    keep: tuple[str, ...] = ()


class Expansion:
    """Collects the operations that stand for one composite."""

    def __init__(self, op: Op, namer: Namer) -> None:
        self.op, self.namer = op, namer
        self.ops: list[Op] = []
        self.annotations: dict[str, Attr] = {k: v for k, v in op.attrs.items() if k in ANNOTATIONS}

    def emit(self, kind: str, *ins: Value, **attrs: Attr) -> Value:
        name = self.namer.fresh(f"{self.op.outs[0].name}.{kind}")
        self.ops.append(make(kind, ins, [name], self.op.loc, **attrs, **self.annotations))
        return self.ops[-1].outs[0]

    def done(self) -> list[Op]:
        """The operations, the last one renamed to give the composite's results."""
        last = self.ops[-1]
        assert [v.type for v in last.outs] == [v.type for v in self.op.outs], f"{self.op.kind} was expanded to other types"
        return [*self.ops[:-1], Op(last.kind, last.ins, self.op.outs, last.attrs, last.loc)]


Rule = Callable[[Expansion, Op], object]


def _lowest(dtype: str) -> float:
    """The lowest finite number of a floating-point type."""
    if dtype == "bf16":
        return -(2.0 - 2.0**-7) * 2.0**127
    return float(np.finfo(numpy_dtype(dtype)).min)


def _attention(b: Expansion, op: Op) -> Value:
    q, k, v = op.ins
    attrs = complete_attrs(op)
    dtype, rows, columns = q.type.dtype, q.type.dims[2], k.type.dims[2]
    scores = b.emit("matmul", q, k, tb=True)
    scores = b.emit("mul", scores, b.emit("const", value=attrs["scale"], dtype=dtype))
    if attrs["causal"]:
        row = b.emit("iota", dtype="i32", shape=(rows, 1), axis=0)
        column = b.emit("iota", dtype="i32", shape=(1, columns), axis=1)
        scores = b.emit("where", b.emit("less", row, column), b.emit("const", value=_lowest(dtype), dtype=dtype), scores)
    return b.emit("matmul", b.emit("softmax", scores), v)


def _batch_norm(b: Expansion, op: Op) -> Value:
    """Per element a difference, a product and a sum, all of which run behind a convolution; roots and quotients are per channel. The mean
    is taken off first, so that the gradient of the scale is a sum of differences from it."""
    x, scale, bias, mean, variance = op.ins
    shape = (x.type.dims[1], *(1,) * (x.type.rank - 2))

    def column(value: Value) -> Value:
        return b.emit("reshape", value, shape=shape)

    root = b.emit("rsqrt", b.emit("add", variance, b.emit("const", value=complete_attrs(op)["eps"], dtype=x.type.dtype)))
    centred = b.emit("sub", x, column(mean))
    return b.emit("add", b.emit("mul", centred, column(b.emit("mul", scale, root))), column(bias))


DECOMPOSE: dict[str, Rule] = {"attention": _attention, "batch_norm": _batch_norm}


def decompose(module: Module, options: DecomposeOptions) -> Module:
    """Replace composite operations by primitives."""
    rules = {kind: rule for kind, rule in DECOMPOSE.items() if kind not in options.keep}
    namer = Namer.of(*module.graphs.values())

    def expand(op: Op) -> list[Op] | None:
        if op.kind not in rules:
            return None
        expansion = Expansion(op, namer)
        rules[op.kind](expansion, op)
        return expansion.done()

    graphs = {name: rewrite(graph, expand) for name, graph in module.graphs.items()}
    if all(graphs[name] is graph for name, graph in module.graphs.items()):
        return module
    return module.but(graphs=graphs)
