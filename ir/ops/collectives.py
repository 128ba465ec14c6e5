"""Rows for collectives: what devices of a mesh do with one tensor together, and how a tensor changes its layout.

`over` names mesh axes, several as a list, the first major. The ranks that differ along these axes alone are a group,
and its members stand in the order of these axes. Types are those of one rank. Only `reshard` is an operation of the
whole form: there it changes the layout, and no number. The others belong to the local form, where a dimension of n
elements in k parts has ceil(n/k) on every rank, of each block. What a part has beyond the tensor is zero.
"""

from __future__ import annotations

from penstock.ir.attrs import Attr
from penstock.ir.types import TensorType, parse_type, part_size

from .table import Required, Types, Values, axis_of, integer, need, need_numbers, per_element, row

# Operations that the ranks of a group do together, each with a tensor of its own.
EXCHANGES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "shift")


def axes_over(over: Attr) -> tuple[str, ...]:
    """Return the mesh axes of a collective."""
    names = over if isinstance(over, tuple) else (over,)
    if not names or not all(isinstance(name, str) for name in names):
        raise TypeError(f"over must name axes of the mesh, got {over!r}")
    return tuple(map(str, names))


def layout_of(to: Attr) -> TensorType:
    """Return the type that a reshard gives."""
    try:
        return parse_type(str(to))
    except ValueError as error:
        raise TypeError(str(error)) from error


def _with_size(x: TensorType, axis: int, size: int) -> TensorType:
    return x.with_shape((*x.shape[:axis], size, *x.shape[axis + 1 :]))


def _whole(x: TensorType, axis: int, a: Values) -> int:
    """Return the whole size that an attribute gives a dimension. Its parts must fit."""
    size, blocks, local = integer(a["size"]), integer(a["blocks"]), x.dims[axis]
    need(
        blocks >= 1 and size % blocks == 0 and local % blocks == 0 and size >= local,
        f"parts of {local} in {blocks} blocks do not make a dimension of {size}",
    )
    return size


def _parts(a: Values) -> int:
    parts, blocks = integer(a["parts"]), integer(a["blocks"])
    need(parts >= 1 and blocks >= 1, f"parts and blocks must be 1 or more, got {parts} and {blocks}")
    return parts


def _reshard(x: Types, a: Values) -> tuple[TensorType, ...]:
    to = layout_of(a["to"])
    need(to.plain == x[0].plain, f"a reshard changes the layout alone, not {x[0].plain} to {to.plain}")
    return (to,)


def _all_reduce(x: Types, a: Values) -> tuple[TensorType, ...]:
    axes_over(a["over"])
    need_numbers(x)
    need(a["by"] in ("sum", "max"), f"attribute by must be sum or max, got {a['by']!r}")
    return (x[0],)


def _all_gather(x: Types, a: Values) -> tuple[TensorType, ...]:
    axes_over(a["over"])
    axis = axis_of(a["axis"], x[0].rank)
    return (_with_size(x[0], axis, _whole(x[0], axis, a)),)


def _reduce_scatter(x: Types, a: Values) -> tuple[TensorType, ...]:
    axes_over(a["over"])
    need_numbers(x)
    axis, parts, blocks = axis_of(a["axis"], x[0].rank), _parts(a), integer(a["blocks"])
    need(x[0].dims[axis] % blocks == 0, f"dimension {axis} of {x[0]} does not divide into {blocks} blocks")
    return (_with_size(x[0], axis, part_size(x[0].dims[axis], parts, blocks)),)


def _all_to_all(x: Types, a: Values) -> tuple[TensorType, ...]:
    axes_over(a["over"])
    split, join, parts = axis_of(a["split"], x[0].rank), axis_of(a["join"], x[0].rank), integer(a["parts"])
    size = integer(a["size"])
    need(split != join, f"split and join are both dimension {split}")
    need(parts >= 1, f"parts must be 1 or more, got {parts}")
    need(
        part_size(size, parts) == x[0].dims[join],
        f"{parts} parts of {x[0].dims[join]} do not make a dimension of {size}",
    )
    return (_with_size(_with_size(x[0], split, part_size(x[0].dims[split], parts)), join, size),)


def _shift(x: Types, a: Values) -> tuple[TensorType, ...]:
    axes_over(a["over"])
    integer(a["by"])
    return (x[0],)


ROWS = (
    row(
        "reshard",
        "collective",
        1,
        _reshard,
        "the same tensor, laid over the mesh as the type `to` says",
        to=Required(str),
        dims="^",
    ),
    row(
        "all_reduce",
        "collective",
        1,
        _all_reduce,
        "the sum (or `by=max` the largest) over the group, on every rank of it",
        over=Required(object),
        by="sum",
        flops=per_element(1),
        dims="^",
    ),
    row(
        "all_gather",
        "collective",
        1,
        _all_gather,
        "the parts of all ranks of the group side by side along `axis`, which has `size` elements then, in `blocks`",
        axis=Required(int),
        over=Required(object),
        size=Required(int),
        blocks=1,
        dims="^",
    ),
    row(
        "reduce_scatter",
        "collective",
        1,
        _reduce_scatter,
        "the rank's own of `parts` along `axis` of the sum over the group; each of `blocks` is parted",
        axis=Required(int),
        over=Required(object),
        parts=Required(int),
        blocks=1,
        flops=per_element(1),
        dims="^",
    ),
    row(
        "all_to_all",
        "collective",
        1,
        _all_to_all,
        "one of `parts` along `split`, of the whole along `join`, which has `size` elements then",
        split=Required(int),
        join=Required(int),
        over=Required(object),
        parts=Required(int),
        size=Required(int),
        dims="^",
    ),
    row(
        "shift",
        "collective",
        1,
        _shift,
        "the tensor of the rank that stands `by` places before this one in its group, in a ring",
        by=Required(int),
        over=Required(object),
        dims="^",
    ),
)
