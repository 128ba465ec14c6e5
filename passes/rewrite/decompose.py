"""Replace composite operations by primitives, where gradients or kernels are defined for the primitives only, or are
better for them.

In: any module. Out: the same meaning; an operation that is not kept becomes several that carry its loc and annotations,
the last of them its results' names. A rule must be exact up to rounding.

    attention   softmax(scale * q k^T + mask) v; of a mask that hides, hidden scores become the lowest finite number of
                the element type; later positions, if causal, become -inf. Nothing but the result may be used: the row
                statistics belong to the kernel
    batch_norm  (x - mean) * factor + bias, with one factor for a channel: scale / sqrt(var + eps)

`keep` names composites that stay whole; attention does by default, because it and its gradient are one kernel each. It
is decomposed all the same where that does not pay: with up to `_FEW` queries in a call (decoding, say), for which
packing the keys costs more than looking at them once. For GPUs without libraries, pipelines keep nothing: the generated
products read keys once for many queries, the generated attention does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from penstock.ir.attrs import Attr
from penstock.ir.graph import ANNOTATIONS, Graph, Module, Namer, Op, Value
from penstock.ir.ops import complete_attrs, make
from penstock.ir.types import numpy_dtype


@dataclass(frozen=True, slots=True)
class DecomposeOptions:
    """Options of `decompose`. `keep` names composite operations to leave alone."""

    keep: tuple[str, ...] = ("attention",)


class Expansion:
    """The operations that replace one composite, collected while rules emit them."""

    def __init__(self, op: Op, namer: Namer) -> None:
        self.op, self.namer = op, namer
        self.ops: list[Op] = []
        self.annotations: dict[str, Attr] = {k: v for k, v in op.attrs.items() if k in ANNOTATIONS}

    def emit(self, kind: str, *ins: Value, **attrs: Attr) -> Value:
        name = self.namer.fresh(f"{self.op.outs[0].name}.{kind}")
        self.ops.append(make(kind, ins, [name], self.op.loc, **attrs, **self.annotations))
        return self.ops[-1].outs[0]

    def done(self) -> list[Op]:
        """Return the operations, the last one renamed to give the composite's first result."""
        last = self.ops[-1]
        assert last.outs[0].type == self.op.outs[0].type, f"{self.op.kind} was expanded to another type"
        return [*self.ops[:-1], Op(last.kind, last.ins, self.op.outs[:1], last.attrs, last.loc)]


Rule = Callable[[Expansion, Op], object]


def _lowest(dtype: str) -> float:
    """Return the lowest finite number of a floating-point type."""
    if dtype == "bf16":
        return -(2.0 - 2.0**-7) * 2.0**127
    return float(np.finfo(numpy_dtype(dtype)).min)


# Rows of queries up to which attention is decomposed.
_FEW = 4


def _attention(b: Expansion, op: Op) -> Value:
    q, k, v, *mask = op.ins
    attrs = complete_attrs(op)
    dtype, rows, columns = q.type.dtype, q.type.dims[2], k.type.dims[2]
    scores = b.emit("matmul", q, k, tb=True)
    scores = b.emit("mul", scores, b.emit("const", value=attrs["scale"], dtype=dtype))
    for m in mask:
        lowest = b.emit("const", value=_lowest(dtype), dtype=dtype)
        if m.type.dtype == "bool":
            scores = b.emit("where", m, scores, lowest)
        else:
            scores = b.emit("maximum", b.emit("add", scores, m), lowest)
    if attrs["causal"]:
        row = b.emit("iota", dtype="i32", shape=(rows, 1), axis=0)
        column = b.emit("iota", dtype="i32", shape=(1, columns), axis=1)
        scores = b.emit("where", b.emit("less", row, column), b.emit("const", value=-math.inf, dtype=dtype), scores)
    return b.emit("matmul", b.emit("softmax", scores), v)


def _batch_norm(b: Expansion, op: Op) -> Value:
    """Emit per element a difference, a product and a sum, all of which run behind a convolution; roots and quotients
    are per channel.

    The mean is subtracted first, so that the gradient of the scale is a sum of differences from it.
    """
    x, scale, bias, mean, variance = op.ins
    shape = (x.type.dims[1], *(1,) * (x.type.rank - 2))

    def column(value: Value) -> Value:
        return b.emit("reshape", value, shape=shape)

    root = b.emit(
        "rsqrt", b.emit("add", variance, b.emit("const", value=complete_attrs(op)["eps"], dtype=x.type.dtype))
    )
    centred = b.emit("sub", x, column(mean))
    return b.emit("add", b.emit("mul", centred, column(b.emit("mul", scale, root))), column(bias))


def _pays(op: Op) -> bool:
    """Return whether a composite that is to be kept has a kernel that is worth it."""
    return op.kind != "attention" or op.ins[0].type.dims[2] > _FEW


DECOMPOSE: dict[str, Rule] = {"attention": _attention, "batch_norm": _batch_norm}


def decompose(module: Module, options: DecomposeOptions) -> Module:
    """Replace composite operations by primitives."""
    namer = Namer.of(*module.graphs.values())
    graphs = {name: _decomposed(graph, namer, options) for name, graph in module.graphs.items()}
    if all(graphs[name] is graph for name, graph in module.graphs.items()):
        return module
    return module.but(graphs=graphs)


def _decomposed(graph: Graph, namer: Namer, options: DecomposeOptions) -> Graph:
    used = {v for op in graph.ops for v in op.ins} | {*graph.outs, *graph.saved}
    ops: list[Op] = []
    for op in graph.ops:
        if op.kind in DECOMPOSE and not (op.kind in options.keep and _pays(op)) and used.isdisjoint(op.outs[1:]):
            expansion = Expansion(op, namer)
            DECOMPOSE[op.kind](expansion, op)
            ops += expansion.done()
        else:
            ops.append(op)
    return graph if tuple(ops) == graph.ops else Graph(graph.name, graph.ins, graph.outs, tuple(ops), graph.saved)
