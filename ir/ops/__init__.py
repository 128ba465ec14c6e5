"""The op table: every operation of the IR, as data. One row says its family, attributes, type rule, dimension string
and cost.

Rules that belong to one concern live beside that concern, as dictionaries keyed by the names of this table: NumPy
meaning in ir/interpreter/ops, gradients in passes/training/vjp, ONNX in frontends/onnx, kernels in backends/tvm.
`penstock ops` prints which of them each row has.

Dimension strings read like einsum: one name per dimension, `...` for any leading dimensions; a plain name may be split
over a mesh axis, `k+` splits into a partial sum, `n^` must stay whole. An empty string means that all dimensions of all
operands are the same (after broadcasting) and any of them may be split.

The rows stand in one file per family; this file joins them and holds the functions of the table that all rooms use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from penstock.ir.attrs import Attr, Attrs
from penstock.ir.graph import ANNOTATIONS, Op, Value
from penstock.ir.types import TensorType

from . import (
    caches,
    collectives,
    contractions,
    draws,
    elementwise,
    indexing,
    layout,
    quantised,
    reductions,
    rows,
    training,
    windows,
)
from .caches import BLOCK, check_put
from .collectives import EXCHANGES, axes_over, layout_of
from .layout import VIEWS
from .table import ANY, OpCost, OpDef, Required, integer, ints, reduced_axes
from .windows import Window, window_of

_FAMILIES = (
    elementwise,
    draws,
    layout,
    reductions,
    contractions,
    quantised,
    windows,
    rows,
    indexing,
    caches,
    collectives,
    training,
)

OPS: dict[str, OpDef] = {row.name: row for family in _FAMILIES for row in family.ROWS}
assert len(OPS) == sum(len(family.ROWS) for family in _FAMILIES), "two rows have one name"


def table_of(lookup: Op) -> tuple[Value, ...]:
    """Return the table of a lookup: one of 8 or 4 bits is whole numbers with their scales, and perhaps zeros."""
    return lookup.ins[1:] if lookup.kind == "gather_q" else lookup.ins[:1]


def complete_attrs(op: Op) -> dict[str, Attr]:
    """Return all attributes of an op with defaults filled in and annotations left out. Raise TypeError for a wrong or
    missing one."""
    row = definition(op.kind)
    for name in op.attrs:
        if name not in row.attrs and name not in ANNOTATIONS:
            raise TypeError(f"{op.kind} has no attribute {name!r}, it has {', '.join(row.attrs) or 'none'}")
    full: dict[str, Attr] = {}
    for name, spec in row.attrs.items():
        if name in op.attrs:
            value, kind = op.attrs[name], spec.kind if isinstance(spec, Required) else type(spec)
            if kind is float and type(value) is int:
                value = float(value)
            if kind is not object and (type(value) is not kind):
                raise TypeError(f"attribute {name} must be {kind.__name__}, got {value!r}")
            full[name] = value
        elif isinstance(spec, Required):
            raise TypeError(f"attribute {name} is missing")
        else:
            full[name] = spec
    return full


def definition(kind: str) -> OpDef:
    row = OPS.get(kind)
    if row is None:
        raise TypeError(f"unknown operation {kind!r}; `penstock ops` lists those there are")
    return row


def infer_op(op: Op, var_types: Mapping[str, TensorType]) -> tuple[TensorType, ...]:
    """Return the result types of an op by its row, without layouts. Raise TypeError when operands, attributes or
    variable do not fit."""
    row, types = definition(op.kind), tuple([v.type.plain for v in op.ins])
    if row.family == "state":
        return _type_of_variable(op, types, var_types)
    # Constants may hold tables, whose hash takes longer than their check.
    if row.family != "source":
        try:
            return _known_types(op.kind, types, exact_attrs(op.attrs))
        except TypeError:
            # It does not fit, or has an attribute without a hash, which does not fit either. The rule reports the
            # problem.
            pass
    return _infer(op, types)


def _infer(op: Op, types: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    row, attrs = definition(op.kind), complete_attrs(op)
    _check_arity(row, types)
    return row.infer(list(types), attrs)


def _check_arity(row: OpDef, types: tuple[TensorType, ...]) -> None:
    low, high = row.arity
    if not low <= len(types) <= high:
        raise TypeError(f"takes {low if low == high else f'{low} or more'} operands, got {len(types)}")


# Attributes with their Python types: True is equal to 1 there, and 1.0 is.
Exact = tuple[tuple[str, type, Any], ...]


def exact_attrs(attrs: Attrs) -> Exact:
    """Return attributes without annotations, as a key."""
    return tuple(
        [
            (name, type(value), tuple([(type(x), x) for x in value]) if isinstance(value, tuple) else value)
            for name, value in attrs.items()
            if name not in ANNOTATIONS
        ]
    )


# Large modules have few different operations, but for names.
@lru_cache(maxsize=1 << 14)
def _known_types(kind: str, types: tuple[TensorType, ...], attrs: Exact) -> tuple[TensorType, ...]:
    return _infer(Op(kind, (), (), attrs_of(attrs)), types)


def attrs_of(exact: Exact) -> dict[str, Attr]:
    """Return the attributes that a key was made of."""
    return {name: tuple(x for _, x in value) if kind is tuple else value for name, kind, value in exact}


def _type_of_variable(
    op: Op, types: tuple[TensorType, ...], var_types: Mapping[str, TensorType]
) -> tuple[TensorType, ...]:
    var = str(complete_attrs(op)["var"])
    _check_arity(definition(op.kind), types)
    if var not in var_types:
        raise TypeError(f"no variable @{var} in the module")
    plain = var_types[var].plain
    if op.kind == "put":
        check_put(var, types, plain)
        return (plain,)
    if types and types[0] != plain:
        raise TypeError(f"@{var} is {plain}, the operand is {types[0]}")
    return (plain,) if op.kind in ("read", "take") else ()


def cost_of(op: Op) -> OpCost:
    """Return the analytic cost of one op on its own. Layout changes and state accesses cost their bytes at most."""
    x, y = [v.type for v in op.ins], [v.type for v in op.outs]
    row = definition(op.kind)
    # A `put` moves its rows, not the variable that it gives.
    moved = 2 * x[0].nbytes if op.kind == "put" else sum(t.nbytes for t in (*x, *y))
    moved = 0 if row.family in ("state", "source") and op.kind != "put" else moved
    return OpCost(row.flops(x, y, complete_attrs(op)), moved)


# The fewest channels, filters and squares of a batch for which a convolution is computed by squares of 2x2 outputs.
_LEAST_CHANNELS, _LEAST_SQUARES = 32, 24


def is_by_squares(op: Op) -> bool:
    """Return whether the back end for CPUs needs fewer multiplications than direct sums: for 3x3 taps side by side, and
    enough of them. The back end looks more closely (backends/tvm/kernels/conv/winograd.py)."""
    if op.kind not in ("conv", "conv_grad_input"):
        return False
    attrs, weight = complete_attrs(op), op.ins[1].type.dims
    window = window_of(attrs, weight[2:])
    return (
        window.kernel == (3, 3)
        and window.strides == window.dilations == (1, 1)
        and attrs["groups"] == 1
        and min(weight[:2]) >= _LEAST_CHANNELS
        and squares_of(op) >= _LEAST_SQUARES
    )


def squares_of(op: Op) -> int:
    """Return the number of squares of 2x2 outputs that a convolution over two dimensions has in a batch."""
    out = op.outs[0].type.dims
    return out[0] * -(-out[2] // 2) * -(-out[3] // 2)


def make(
    kind: str,
    ins: Sequence,  # type: ignore[type-arg]
    outs: Sequence[str],
    loc: str = "",
    /,
    **attrs: Attr,
) -> Op:
    """Return an op with its result types inferred. For state operations the caller passes the result Value."""
    probe = Op(kind, tuple(ins), (), attrs, loc)
    types = infer_op(probe, {})
    if len(types) != len(outs):
        raise TypeError(f"{kind} gives {len(types)} results, {len(outs)} names were given")
    return Op(kind, probe.ins, tuple(Value(n, t) for n, t in zip(outs, types, strict=True)), attrs, loc)


__all__ = [
    "ANY",
    "BLOCK",
    "EXCHANGES",
    "OPS",
    "VIEWS",
    "OpCost",
    "OpDef",
    "Required",
    "Window",
    "axes_over",
    "complete_attrs",
    "cost_of",
    "definition",
    "infer_op",
    "integer",
    "ints",
    "is_by_squares",
    "layout_of",
    "make",
    "reduced_axes",
    "squares_of",
    "table_of",
    "window_of",
]
