"""Mixed precision: activations and the operands of products in 16 bits, weights, statistics and losses in float32.

In: `main`, in f32, before gradients are taken. Out: the same model with casts. So the IR says where every number is
rounded, and the gradients that autodiff takes have the element type of their values. With `low` the 16-bit type:

    matmul, conv, attention        operands and result low; kernels add up in f32
    activations (values that depend on an input)
                                   low where they are stored and where they cross stages
    elementwise, layout, softmax, pooling
                                   on low operands in low: kernels compute them in f32 inside, and round results once
    layer_norm, batch_norm, sum, mean, losses, elementwise operations with a parameter or with a constant that low does
    not hold exactly
                                   f32: operands widened, the result rounded to low if it is an activation, statistics
                                   and losses are not
    parameters                     stay f32 (master weights): rounded where a product reads them, so gradients are
                                   accumulated, and the optimiser computes, in f32
    inputs, outputs                keep their types

Invariant: the first output, names, shapes and variables stay as they are; other element types than f32 are left alone.
A value that is rounded keeps its name, and the f32 that it is rounded from is %x.f32; of an output it is the f32 that
keeps the name.

Known limits: sums of gradients from several uses of an activation are rounded to low each. f16 has a narrow range:
gradients below 6e-8 would vanish, so training needs `autodiff{loss_scale=...}` and `guard`. Values computed from a
masking constant beyond low's range stay f32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from penstock.ir.graph import Graph, Module, Namer, Op, Value
from penstock.ir.ops import OPS, infer_op
from penstock.ir.types import numpy_dtype
from penstock.support.errors import UsageError

from .identities import uniform_number

PRECISIONS = ("f32", "bf16", "f16")
_WIDE = "f32"
_PRODUCTS = ("matmul", "conv", "attention")
# Operations computed on low operands as they are: they move elements, choose among them, or their kernel computes in
# f32 and rounds once.
_FOLLOWS = (
    *("relu", "gelu", "detach", "max", "argmax", "max_pool", "avg_pool", "softmax", "log_softmax"),
    *("reshape", "transpose", "broadcast", "slice", "pad", "concat", "gather"),
)
# Operations with results that stay f32: few numbers that much depends on.
_STATISTICS = ("sum", "mean", "cross_entropy", "mse")


@dataclass(frozen=True, slots=True)
class PrecisionOptions:
    """Options of `precision`. `compute` is the element type of activations and of the operands of products: bf16 or
    f16; f32 changes nothing."""

    compute: str = "bf16"


def check_precision(name: str) -> None:
    """Raise UsageError for a precision that does not exist."""
    if name not in PRECISIONS:
        raise UsageError(f"unknown precision {name!r}, expected one of {', '.join(PRECISIONS)}")


def precision(module: Module, options: PrecisionOptions) -> Module:
    """Compute in 16 bits with float32 sums, keep weights, statistics and losses in float32."""
    check_precision(options.compute)
    main = module.graphs.get("main")
    if main is None:
        raise UsageError(
            f"there is no graph main, only {', '.join(module.graphs)}", hint="run `precision` before `autodiff`"
        )
    if options.compute == _WIDE:
        return module
    lowering = _Lowering(main, options.compute)
    graph = lowering.run()
    if graph == main:
        return module
    note = f"{lowering.lowered} of {len(main.ops)} operations compute in {options.compute}, parameters stay {_WIDE}"
    return module.with_graph(graph).noted("precision", note)


def _written_only(graph: Graph) -> set[Value]:
    """Return values that only variables are computed from: the new values of running statistics, which add up over many
    steps."""
    used = {*graph.outs, *graph.saved}
    written: set[Value] = set()
    for op in reversed(graph.ops):
        if op.outs and used.isdisjoint(op.outs):
            written.update(op.outs)
        elif op.outs:
            used.update(op.ins)
    return written


class _Lowering:
    """One walk over the graph. Each f32 value gets a wide form, a low one, or both; `rounded` are those whose name
    stands for the low form."""

    def __init__(self, graph: Graph, low: str) -> None:
        self.graph, self.low = graph, low
        self.namer = Namer.of(graph)
        self.ops: list[Op] = []
        self.wide_of: dict[Value, Value] = {}
        self.low_of: dict[Value, Value] = {}
        self.rounded: set[Value] = set()
        # Values that depend on an input, by their names in the old graph.
        self.active: set[Value] = set(graph.ins)
        self.outs = set(graph.outs)
        self.makers = graph.producers()
        self.kept = _written_only(graph)
        self.lowered = 0

    def run(self) -> Graph:
        for op in self.graph.ops:
            self._place(op)
            if not self.active.isdisjoint(op.ins):
                self.active.update(op.outs)
        outs = tuple(self._wide(v, "") for v in self.graph.outs)
        return Graph(self.graph.name, self.graph.ins, outs, tuple(self.ops), self.graph.saved)

    # the form that an operation takes

    def _place(self, op: Op) -> None:
        floats = [v for v in op.ins if v.type.dtype == _WIDE]
        if OPS[op.kind].effect or not floats or self.kept.issuperset(op.outs):
            ins = tuple(self._wide(v, op.loc) if v.type.dtype == _WIDE else v for v in op.ins)
            self.ops.append(op if ins == op.ins else op.with_ins(ins))
        elif (op.kind in _PRODUCTS and (op.kind != "matmul" or not self.active.isdisjoint(op.ins))) or self._follows(
            op, floats
        ):
            self._emit_low(op)
        else:
            self._emit_wide(op)

    def _follows(self, op: Op, floats: list[Value]) -> bool:
        """Return whether nothing is lost by computing the operation on low operands."""
        moving = [v for v in floats if v in self.active]
        if not moving or not (op.kind in _FOLLOWS or OPS[op.kind].family == "elementwise") or op.kind == "batch_norm":
            return False
        if not all(v in self.rounded or v in self.graph.ins for v in moving):
            return False
        return all(v in self.active or self._is_exact(v) for v in floats)

    def _number(self, value: Value) -> float | None:
        number = uniform_number(self.makers.get, value)
        return None if number is None else float(number)

    def _is_exact(self, value: Value) -> bool:
        number = self._number(value)
        return number is not None and (math.isnan(number) or self._round(number) == number)

    def _round(self, number: float) -> float:
        with np.errstate(over="ignore"):
            return float(np.array(number, numpy_dtype(self.low)))

    def _stays_wide(self, op: Op) -> bool:
        """Return whether the first result of an operation computed in f32 should not be rounded."""
        beyond = [
            n for n in map(self._number, op.ins) if n is not None and math.isfinite(n) and math.isinf(self._round(n))
        ]
        return op.kind in _STATISTICS or self.active.isdisjoint(op.ins) or bool(beyond)

    # the two ways to emit an operation

    def _emit_low(self, op: Op) -> None:
        ins = tuple(self._low(v, op.loc) if v.type.dtype == _WIDE else v for v in op.ins)
        types = infer_op(Op(op.kind, ins, (), op.attrs), {})
        outs = []
        for old, new in zip(op.outs, types, strict=True):
            if new == old.type:
                outs.append(old)
                continue
            value = Value(self.namer.fresh(f"{old.name}.{self.low}") if old in self.outs else old.name, new)
            self.low_of[old] = value
            self.rounded.add(old)
            outs.append(value)
        self.lowered += 1
        self.ops.append(Op(op.kind, ins, tuple(outs), op.attrs, op.loc))

    def _emit_wide(self, op: Op) -> None:
        ins = tuple(self._wide(v, op.loc) if v.type.dtype == _WIDE else v for v in op.ins)
        first = op.outs[0]
        if first.type.dtype != _WIDE or first in self.outs or self._stays_wide(op):
            self.ops.append(op.with_ins(ins))
            return
        wide = Value(self.namer.fresh(f"{first.name}.{_WIDE}"), first.type)
        self.ops.append(Op(op.kind, ins, (wide, *op.outs[1:]), op.attrs, op.loc))
        low = Value(first.name, first.type.with_dtype(self.low))
        self.ops.append(Op("cast", (wide,), (low,), {"dtype": self.low}, op.loc))
        self.low_of[first] = low
        self.rounded.add(first)

    # forms

    def _wide(self, value: Value, loc: str) -> Value:
        if value not in self.low_of or value not in self.rounded:
            return value
        if value not in self.wide_of:
            name = value.name if value in self.outs else self.namer.fresh(f"{value.name}.{_WIDE}")
            self.wide_of[value] = self._cast(self.low_of[value], Value(name, value.type), loc)
        return self.wide_of[value]

    def _low(self, value: Value, loc: str) -> Value:
        if value not in self.low_of:
            low = Value(self.namer.fresh(f"{value.name}.{self.low}"), value.type.with_dtype(self.low))
            maker = self.makers.get(value)
            if maker is not None and maker.kind == "const":
                self.ops.append(Op("const", (), (low,), {**maker.attrs, "dtype": self.low}, maker.loc))
                self.low_of[value] = low
            else:
                self.low_of[value] = self._cast(value, low, loc)
        return self.low_of[value]

    def _cast(self, value: Value, out: Value, loc: str) -> Value:
        self.ops.append(Op("cast", (value,), (out,), {"dtype": out.type.dtype}, loc))
        return out
