"""Kernels while they grow, and the sums that can ride along with their loops. In: a group and an operation. Out:
whether the loops of the group pass over all that the operation reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock.ir.graph import Op, Value
from penstock.ir.ops import OPS, complete_attrs, reduced_axes, table_of

# Reductions that share a sweep over memory, and the row operations that sums over the rows in front can ride along
# with.
SUMS = ("sum", "mean", "max", "layer_norm_grad_weight")
WITHSUMS = ("layer_norm_grad",)

# Operations with results that elementwise operations can go on with while they stand in registers.
OPEN = {
    *("matmul", "matmul_q", "matmul_bytes", "conv", "conv_bytes", "conv_grad_input", "conv_grad_weight"),
    *("softmax", "softmax_grad", "log_softmax", "log_softmax_grad"),
    *("layer_norm", "layer_norm_grad", "layer_norm_grad_weight"),
    *("sum", "mean", "max", "mse", "cumsum"),
    *("gather", "gather_q", "cross_entropy_grad", "attention"),
}

# The iteration space of a reduction: the shape, its axes among the dimensions, the element type.
Sweep = tuple[tuple[int, ...], tuple[int, ...], str]


@dataclass
class KernelGroup:
    """A kernel while it grows.

    `reached` are results that stand in registers, each at the element the loops are at. `apart` are those that can only
    be stored in another place. `swept` is the shape that its sums run over, with their axes. `added` is the result of a
    library that can be added to a variable in place of being stored.
    """

    number: int
    ops: list[Op] = field(default_factory=list)
    reached: set[Value] = field(default_factory=set)
    apart: set[Value] = field(default_factory=set)
    needs: int = 0
    scattered: bool = False
    swept: Sweep | None = None
    added: Value | None = None


def swept_by(op: Op) -> Sweep:
    x = op.ins[0].type
    if op.kind == "layer_norm_grad_weight":
        axis = complete_attrs(op)["axis"]
        assert isinstance(axis, int)
        return x.dims, tuple(range(axis % x.rank)), x.dtype
    return x.dims, tuple(reduced_axes(x, op.attrs["axes"])), x.dtype


def passes_by(value: Value, group: KernelGroup) -> bool:
    """Return whether a value of the group is one that its sums run over: it is there for a moment, and can only be
    stored as it is."""
    return group.swept is not None and value.type.dims == group.swept[0] and group.ops[0].kind not in WITHSUMS


def can_sweep(group: KernelGroup, op: Op, sweep: Sweep) -> bool:
    """Return whether the loops of a group pass over all operands of a sum."""
    shape, axes, dtype = sweep
    if not any(shape[a] > 1 for a in axes) or op.outs[0].type.dims == shape:
        return False
    main = group.ops[0]
    passed = {v for o in group.ops for v in o.ins if v.type.dims == shape}
    if not all(v in passed or v in group.reached for v in op.ins if v.type.dims == shape):
        return False
    if main.kind in WITHSUMS:
        axis = complete_attrs(main)["axis"]
        assert isinstance(axis, int)
        return (main.ins[0].type.dims, main.ins[0].type.dtype) == (shape, dtype) and axes == tuple(
            range(axis % len(shape))
        )
    if group.swept is not None:
        return group.swept == sweep
    # Otherwise the group makes the operands of the sum, and nothing else.
    elementwise = all(
        o.kind != "batch_norm" and OPS[o.kind].family == "elementwise" and o.outs[0].type.dims == shape
        for o in group.ops
    )
    return elementwise and any(v in group.reached for v in op.ins)


# Elements of a looked-up row lie apart in the order of a product: a lookup of more than this share of the rows would
# cost more than the memory is worth.
_FEW_ROWS = 16


def may_look_up_packed(lookup: Op, readers: Mapping[Value, Sequence[Op]]) -> bool:
    """Return whether few rows of a table are looked up, and products with its rows alone read it otherwise."""
    table, tokens = table_of(lookup), lookup.ins[0 if lookup.kind == "gather_q" else 1]
    few = 0 < tokens.type.size * _FEW_ROWS <= table[0].type.dims[0]
    return few and (_only_rows_of(table, lookup, readers) if len(table) > 1 else _only_rows(table[0], readers))


def _only_rows_of(table: tuple[Value, ...], lookup: Op, readers: Mapping[Value, Sequence[Op]]) -> bool:
    """Return the same of a table of 8 or 4 bits, all of which goes to the same products."""
    users = [op for value in table for op in readers[value]]
    return any(op.kind == "matmul_q" for op in users) and all(
        op.kind in ("matmul_q", "gather_q")
        and op.ins[1:] == table
        and op.ins[0] not in table
        and all(op.attrs[name] == lookup.attrs[name] for name in ("bits", "group"))
        for op in users
    )


def _only_rows(table: Value, readers: Mapping[Value, Sequence[Op]]) -> bool:
    """Return whether products with the rows of a table, which may be turned for them, and lookups alone read it."""
    products = [(table, True, op) for op in readers[table] if op.kind not in ("gather", "transpose")]
    for turn in readers[table]:
        if turn.kind == "transpose" and turn.attrs["perm"] == (1, 0):
            products += [(turn.outs[0], False, op) for op in readers.get(turn.outs[0], ())]
    return (
        table.type.rank == 2
        and table.type.dims[1] > 1
        and bool(products)
        and all(
            op.kind == "matmul"
            and "library" not in op.attrs
            and not op.attrs.get("ta")
            and bool(op.attrs.get("tb")) == by_rows
            and op.ins[1] is value
            and op.ins[0] is not value
            for value, by_rows, op in products
        )
    )
