"""The interface of gradient rules, and helpers for the rules of several families."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from penstock.ir.attrs import Attr
from penstock.ir.graph import Op, Value
from penstock.ir.ops import OPS

Grad = Callable[[], Value] | None
Rule = Callable[..., Sequence[Grad]]


class GradientEmitter(Protocol):
    """The emitter that a rule calls: it emits one operation with one result or several, and scalars of a value's
    element type."""

    def emit(self, kind: str, *ins: Value, **attrs: Attr) -> Value: ...
    def emit_all(self, kind: str, *ins: Value, **attrs: Attr) -> tuple[Value, ...]: ...
    def scalar(self, number: float, like: Value) -> Value: ...


def sum_to(b: GradientEmitter, grad: Value, operand: Value) -> Value:
    """Undo broadcasting: sum over the dimensions that were repeated."""
    shape, target = grad.type.dims, operand.type.dims
    if shape == target:
        return grad
    extra = len(shape) - len(target)
    axes = tuple(i for i, n in enumerate(shape) if i < extra or target[i - extra] != n)
    summed = b.emit("sum", grad, axes=axes) if axes else grad
    return summed if summed.type.dims == target else b.emit("reshape", summed, shape=target)


def scaled(b: GradientEmitter, number: float, x: Value) -> Value:
    return b.emit("mul", x, b.scalar(number, x))


def own_attrs(op: Op) -> dict[str, Attr]:
    """Return the attributes of an op, without annotations."""
    return {k: v for k, v in op.attrs.items() if k in OPS[op.kind].attrs}
