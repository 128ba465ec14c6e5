"""The operation that an own form writes, with its local operands, and questions that many forms ask."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from penstock.ir.attrs import Attrs
from penstock.ir.graph import Op, Value
from penstock.ir.ops import complete_attrs
from penstock.ir.sharding.splits import SplitRule
from penstock.ir.types import FLOATS, ITEM_BYTES, UNSIGNED, TensorType

from .building import LocalWriter


@dataclass(frozen=True)
class LocalCall:
    """An operation that is made local. `axes` are those that split each name of its rule."""

    op: Op
    rule: SplitRule
    axes: Mapping[str, tuple[str, ...]]
    ins: tuple[Value, ...]

    @property
    def attrs(self) -> Attrs:
        return complete_attrs(self.op)

    def split_dims(self, operand: int) -> list[int]:
        """Return the dimensions of an operand that are split."""
        dims = self.rule.ins[operand]
        return [i for i, factors in enumerate(dims) if any(self.axes.get(name) for name in factors)]

    def axes_of(self, operand: int, dim: int) -> tuple[str, ...]:
        """Return the axes that split a dimension of an operand."""
        return self.op.ins[operand].type.axes_of(dim)

    def whole(self, operand: int) -> TensorType:
        return self.op.ins[operand].type


Form = Callable[[LocalWriter, LocalCall], Sequence[Value]]


def over(axes: tuple[str, ...]) -> str | tuple[str, ...]:
    return axes[0] if len(axes) == 1 else axes


def is_uneven(b: LocalWriter, call: LocalCall, operand: int, dim: int) -> bool:
    return call.whole(operand).dims[dim] % b.parts(call.axes_of(operand, dim)) != 0


def unpadded(
    b: LocalWriter, call: LocalCall, operand: int, dim: int, padding: float, value: Value | None = None
) -> Value:
    """Return an operand, or a value that lies as it does, whose padding along a dimension has another number."""
    x = call.ins[operand] if value is None else value
    if not is_uneven(b, call, operand, dim):
        return x
    return b.masked(x, dim, call.axes_of(operand, dim), call.whole(operand).dims[dim], padding)


def reduced(b: LocalWriter, x: Value, axes: tuple[str, ...], by: str = "sum") -> Value:
    """Return the sum, or the largest, over the ranks along some axes."""
    present = b.present(axes)
    if not present:
        return x
    return b.emit("all_reduce", x, over=over(present), **({"by": by} if by != "sum" else {}))


def widened(b: LocalWriter, x: Value) -> Value:
    """Return a value in the element type that is computed in."""
    return b.emit("cast", x, dtype="f32") if x.type.dtype in ("f16", "bf16") else x


def narrowed(b: LocalWriter, x: Value, dtype: str) -> Value:
    """Return a result in the element type that the operation gives."""
    return x if x.type.dtype == dtype else b.emit("cast", x, dtype=dtype)


def lowest_of(dtype: str) -> float:
    """Return a number of an element type that none is below."""
    if dtype in UNSIGNED:
        return 0
    return float("-inf") if dtype in FLOATS else -float(1 << (8 * ITEM_BYTES[dtype] - 1))
