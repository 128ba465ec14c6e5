"""The rows of the op table, and helpers that the type rules of all families share.

A type rule takes operand types and complete attributes and gives the result types; TypeError says what does not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.ir.attrs import Attr
from penstock.ir.types import DTYPES, FLOATS, TensorType, broadcast_shapes

# No upper limit for the number of operands.
ANY = 1 << 16


class Required(NamedTuple):
    """An attribute without a default, of this Python type."""

    kind: type


Types = Sequence[TensorType]
Values = Mapping[str, Attr]
Infer = Callable[[Types, Values], tuple[TensorType, ...]]
Flops = Callable[[Types, Types, Values], float]


class OpCost(NamedTuple):
    """Work of one op: floating-point operations, and bytes read plus written when nothing is fused."""

    flops: float
    bytes: float


@dataclass(frozen=True, slots=True)
class OpDef:
    name: str
    family: str
    arity: tuple[int, int]
    attrs: Mapping[str, Attr | Required]
    infer: Infer
    dims: str
    flops: Flops
    doc: str
    effect: bool = False
    linear: str = ""


def need(condition: bool, message: str) -> None:
    """Raise TypeError unless the condition holds."""
    if not condition:
        raise TypeError(message)


def axis_of(axis: Attr, rank: int) -> int:
    """Return an axis as a non-negative dimension."""
    if not isinstance(axis, int) or not -rank <= axis < rank:
        raise TypeError(f"axis {axis} is outside a tensor of rank {rank}")
    return axis % rank


def ints(attr: Attr) -> tuple[int, ...]:
    """Return a list-of-integers attribute."""
    numbers = tuple(n for n in attr if type(n) is int) if isinstance(attr, tuple) else None
    if numbers is None or numbers != attr:
        raise TypeError(f"expected a list of integers, got {attr!r}")
    return numbers


def integer(attr: Attr) -> int:
    """Return a whole-number attribute."""
    if type(attr) is not int:
        raise TypeError(f"expected an integer, got {attr!r}")
    return attr


def need_numbers(x: Types) -> None:
    """Raise TypeError for a bool operand."""
    need(all(t.dtype != "bool" for t in x), "is not defined for bool; cast first")


def need_floats(x: Types) -> None:
    """Raise TypeError for an operand that is not floating-point."""
    for t in x:
        need(t.dtype in FLOATS, f"needs a floating-point operand, got {t}")


def same_dtype(x: Types) -> None:
    """Raise TypeError unless all operands have one element type."""
    need(len({t.dtype for t in x}) == 1, f"element types differ: {' and '.join(map(str, x))}")


def dtype_of(a: Attr) -> str:
    """Return an element-type attribute."""
    need(a in DTYPES, f"unknown element type {a!r}, expected one of {', '.join(DTYPES)}")
    return str(a)


def reduced_axes(t: TensorType, axes: Attr) -> tuple[int, ...]:
    """Return the axes of a reduction, sorted and non-negative."""
    numbers = tuple(sorted(axis_of(i, t.rank) for i in ints(axes)))
    need(len(set(numbers)) == len(numbers), f"axes {axes} name a dimension twice")
    return numbers


def broadcast(x: Types, a: Values) -> tuple[TensorType, ...]:
    """Return the result of operands of one element type that broadcast as in NumPy."""
    same_dtype(x)
    return (TensorType(x[0].dtype, broadcast_shapes(*(t.shape for t in x))),)


def per_element(factor: float) -> Flops:
    """Return a cost rule: so many operations per element of the largest tensor."""
    return lambda x, y, a: factor * max((t.size for t in (*x, *y)), default=0)


def free(x: Types, y: Types, a: Values) -> float:
    """Return 0, the cost of an operation that computes nothing."""
    return 0.0


def row(
    name: str,
    family: str,
    arity: int | tuple[int, int],
    infer: Infer,
    doc: str,
    *,
    dims: str = "",
    flops: Flops = free,
    effect: bool = False,
    **attrs: Attr | Required,
) -> OpDef:
    """Return a row; keywords that are not fields are its attributes, with their defaults. `dims` may have the operands
    through which partial sums pass behind a bar."""
    names, _, linear = (part.strip() for part in dims.partition("|"))
    return OpDef(
        name,
        family,
        (arity, arity) if isinstance(arity, int) else arity,
        attrs,
        infer,
        names,
        flops,
        doc,
        effect,
        linear,
    )
