"""Own forms: operations along a bounded dimension that need more than zeros for padding.

`FORMS[kind](b, op, dims)` writes the operation, with results under their names, or gives a reason why it cannot be
bounded. `dims` are the bounded dimensions of the first operand along which it works. A form writes what the model
computes on the request alone: a mean divides by the live count, a softmax sees -inf in padding, a largest element the
lowest number, attention hides keys. Everything else is refused by the walk (walk.py).

A key that is hidden by padding is hidden deeper than one that the model hides. So a row of which the model hides all
keys is the mean over the request's keys alone.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.ir.graph import Op, Value
from penstock.ir.ops import complete_attrs, integer, ints, make, reduced_axes
from penstock.ir.types import FLOATS

from .masks import LOWEST, MaskWriter, lowest_of

# Writes an operation, or says why it cannot be bounded.
Form = Callable[[MaskWriter, Op, list[int]], str | None]


def _again(b: MaskWriter, op: Op, ins: list[Value]) -> None:
    """Write the operation with other operands."""
    b.ops.append(Op(op.kind, tuple(ins), op.outs, op.attrs, op.loc))


def _filled(padding: Callable[[str], float]) -> Form:
    """Return the form of an operation for which padding of one number is as if it were not there."""

    def form(b: MaskWriter, op: Op, dims: list[int]) -> str | None:
        x = b.with_padding(op.ins[0], dims, padding(op.ins[0].type.dtype))
        _again(b, op, [x, *op.ins[1:]])
        return None

    return form


def _mean(b: MaskWriter, op: Op, dims: list[int]) -> str | None:
    """Write the sum over the request's elements, divided by their count. 16-bit numbers are added up in f32."""
    attrs = complete_attrs(op)
    x = b.with_padding(op.ins[0], dims, 0.0)
    dtype = x.type.dtype
    if dtype not in FLOATS:
        return "is a mean of whole numbers, which is rounded"
    wide = "f32" if dtype in ("f16", "bf16") else dtype
    if wide != dtype:
        x = b.emit("cast", x, dtype=wide)
    axes = reduced_axes(op.ins[0].type, attrs["axes"])
    total = b.emit("sum", x, axes=axes, keep=bool(attrs["keep"]))
    count: Value | None = None
    fixed = 1
    for dim in axes:
        n = op.ins[0].type.dims[dim]
        if dim not in dims:
            fixed *= n
            continue
        live = b.count(n // b.size, wide)
        count = live if count is None else b.emit("mul", count, live)
    assert count is not None
    if fixed > 1:
        count = b.emit("mul", count, b.number(fixed, wide))
    name = op.outs[0].name
    if wide == dtype:
        b.emit("div", total, count, name=name)
    else:
        b.emit("cast", b.emit("div", total, count), name=name, dtype=dtype)
    return None


def _cumsum(b: MaskWriter, op: Op, dims: list[int]) -> str | None:
    """Write a running sum: from the front it does not reach padding, from the end it begins with zeros."""
    if complete_attrs(op)["reverse"] or b.blocks_of(op.ins[0], dims[0]) > 1:
        return _filled(lambda dtype: 0.0)(b, op, dims)
    _again(b, op, list(op.ins))
    return None


def _conv(b: MaskWriter, op: Op, dims: list[int]) -> str | None:
    """Write a convolution that keeps the size: behind the request it reads zeros, as the model does."""
    return _windowed(b, op, dims, 0.0)


def _max_pool(b: MaskWriter, op: Op, dims: list[int]) -> str | None:
    return _windowed(b, op, dims, lowest_of(op.ins[0].type.dtype))


def _windowed(b: MaskWriter, op: Op, dims: list[int], padding: float) -> str | None:
    attrs = complete_attrs(op)
    strides = ints(attrs["strides"])
    for dim in dims:
        if b.blocks_of(op.ins[0], dim) > 1:
            return "has windows over several blocks"
        if op.outs[0].type.dims[dim] != op.ins[0].type.dims[dim] or (strides and strides[dim - 2] != 1):
            return "has windows that change the size; those of stride 1 that keep it can be bounded"
    x = b.with_padding(op.ins[0], dims, padding)
    _again(b, op, [x, *op.ins[1:]])
    return None


def _gather(b: MaskWriter, op: Op, dims: list[int]) -> str | None:
    """Write a look-up of the request's rows. Negative indices count from its end."""
    data, indices = op.ins
    if b.blocks_of(data, dims[0]) > 1:
        return "looks up rows of several blocks"
    known = b.constants.get(indices.name)
    if known is not None and min(known, default=0) >= 0:
        if max(known, default=0) >= b.least:
            return f"takes row {int(max(known))}, which a request of size {b.least} does not have"
    else:
        wide = indices if indices.type.dtype == "i64" else b.emit("cast", indices, dtype="i64")
        end = b.count(data.type.dims[dims[0]] // b.size)
        indices = b.emit("where", b.emit("less", wide, b.number(0, "i64")), b.emit("add", wide, end), wide)
    axis = integer(complete_attrs(op)["axis"])
    b.ops.append(make("gather", (data, indices), [op.outs[0].name], op.loc, axis=axis))
    return None


def last(b: MaskWriter, op: Op, dim: int) -> str | None:
    """Write a slice that takes the last element along a dimension: the last of the request."""
    if b.blocks_of(op.ins[0], dim) > 1:
        return "takes the last element of several blocks"
    x, attrs = op.ins[0], complete_attrs(op)
    n = x.type.dims[dim]
    start, stop, step = (list(ints(attrs[key])) for key in ("start", "stop", "step"))
    start[dim], stop[dim], step[dim] = 0, n, 1
    if (start, stop, step) != ([0] * x.type.rank, list(x.type.dims), [1] * x.type.rank):
        x = b.emit("slice", x, start=tuple(start), stop=tuple(stop), step=tuple(step))
    place = b.emit("sub", b.count(n // b.size), b.number(1, "i64"))
    row = b.emit("gather", x, place, axis=dim)
    b.emit("reshape", row, name=op.outs[0].name, shape=op.outs[0].type.dims)
    return None


def _argmax(b: MaskWriter, op: Op, dims: list[int]) -> str | None:
    if b.blocks_of(op.ins[0], dims[0]) > 1:
        return "gives places in several blocks"
    return _filled(lowest_of)(b, op, dims)


def _iota(b: MaskWriter, op: Op, dims: list[int]) -> str | None:
    """Count on through padding: the request's numbers are the first ones."""
    b.ops.append(op)
    return None


def attention(b: MaskWriter, op: Op, own: set[str]) -> str | None:
    """Write attention whose keys may be padding. `own` are the bounded ones of its dimensions s and t."""
    attrs = complete_attrs(op)
    q, k, v, *mask = op.ins
    if "t" not in own:
        b.ops.append(op)
        return None
    if b.blocks_of(k, 2) > 1:
        return "has keys of several blocks"
    k, v = b.finite(k, [2]), b.finite(v, [2])
    causal = bool(attrs["causal"]) and "s" in own and q.type.dims[2] == k.type.dims[2]
    if not causal:
        inside = b.inside(4, 3, k.type.dims[2], 1)
        mask = [_hidden(b, mask[0], inside, q.type.dtype) if mask else inside]
    elif mask:
        # Rows of the request look at none of the keys of padding, whose mask is a number all the same.
        mask = [b.finite(mask[0], [mask[0].type.rank - 1])]
    _again(b, op, [q, k, v, *mask])
    return None


def _hidden(b: MaskWriter, mask: Value, inside: Value, dtype: str) -> Value:
    """Return a mask that hides padding by the lowest number, and nothing else by less than half of it."""

    def write() -> Value:
        lowest = LOWEST[dtype]
        half = b.number(lowest / 2, dtype)
        if mask.type.dtype == "bool":
            shown = b.emit("where", mask, b.number(0.0, dtype), half)
        else:
            shown = b.emit("maximum", mask, half)
        return b.emit("where", inside, shown, b.number(lowest, dtype))

    return b.once(("hidden", mask.name, inside.name, dtype), write)


FORMS: dict[str, Form] = {
    "sum": _filled(lambda dtype: 0.0),
    "mean": _mean,
    "max": _filled(lowest_of),
    "argmax": _argmax,
    "softmax": _filled(lambda dtype: float("-inf")),
    "log_softmax": _filled(lambda dtype: float("-inf")),
    "cumsum": _cumsum,
    "conv": _conv,
    "max_pool": _max_pool,
    "gather": _gather,
    "iota": _iota,
}
