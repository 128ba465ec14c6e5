"""Gradient rules of layout operations."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from penstock.ir.graph import Op, Value
from penstock.ir.ops import complete_attrs, ints

from .emitter import Grad, GradientEmitter, Rule


def _reshape(b: GradientEmitter, op: Op, dy: Value) -> Sequence[Grad]:
    return (lambda: b.emit("reshape", dy, shape=op.ins[0].type.dims),)


def _transpose(b: GradientEmitter, op: Op, dy: Value) -> Sequence[Grad]:
    perm = ints(op.attrs["perm"])
    return (lambda: b.emit("transpose", dy, perm=tuple(perm.index(i) for i in range(len(perm)))),)


def _slice(b: GradientEmitter, op: Op, dy: Value) -> Sequence[Grad]:
    start, step, sizes = ints(op.attrs["start"]), ints(op.attrs["step"]), op.ins[0].type.dims
    spans = [(n - 1) * s + 1 if n else 0 for n, s in zip(dy.type.dims, step, strict=True)]
    high = tuple(n - a - span for n, a, span in zip(sizes, start, spans, strict=True))
    return (lambda: b.emit("pad", dy, low=start, high=high, inner=tuple(s - 1 for s in step)),)


def _pad(b: GradientEmitter, op: Op, dy: Value) -> Sequence[Grad]:
    a, sizes = complete_attrs(op), dy.type.dims
    stop = tuple(n - q for n, q in zip(sizes, ints(a["high"]), strict=True))
    step = tuple(i + 1 for i in ints(a["inner"]) or (0,) * len(sizes))
    return (lambda: b.emit("slice", dy, start=a["low"], stop=stop, step=step),)


def _concat(b: GradientEmitter, op: Op, dy: Value) -> Sequence[Grad]:
    sizes = dy.type.dims
    axis = int(op.attrs["axis"]) % len(sizes)  # type: ignore[arg-type]
    ends = [0]
    for value in op.ins:
        ends.append(ends[-1] + value.type.dims[axis])

    def part(first: int, last: int) -> Grad:
        start = tuple(first if i == axis else 0 for i in range(len(sizes)))
        stop = tuple(last if i == axis else n for i, n in enumerate(sizes))
        return lambda: b.emit("slice", dy, start=start, stop=stop, step=(1,) * len(sizes))

    return [part(first, last) for first, last in pairwise(ends)]


RULES: dict[str, Rule] = {
    "reshape": _reshape,
    "transpose": _transpose,
    "broadcast": lambda b, op, dy: (lambda: dy,),  # the caller sums
    "slice": _slice,
    "pad": _pad,
    "concat": _concat,
}
