"""Own forms of operations along a row that several ranks share: layer norms, running sums, and the largest elements.

A layer norm needs two sums of all ranks: that of the row, and that of the squared differences from its mean. A running
sum begins with the sums of the parts before the rank's own. The largest elements are among those of the parts: every
rank finds its own, all are gathered, and the largest of them are taken once more. They stand in the order of the row,
so that of equal ones the first comes first.
"""

from __future__ import annotations

from penstock.ir.graph import Value
from penstock.ir.ops import integer
from penstock.ir.types import FLOATS, ITEM_BYTES, UNSIGNED

from .building import LocalWriter
from .calls import Form, LocalCall, lowest_of, narrowed, over, reduced, unpadded, widened

# ------------------------------------------------------------------------------------------------ layer norms


class _Norm:
    """A layer norm whose row is split: the dimensions of a row, the axes that split it, and its number of elements."""

    def __init__(self, b: LocalWriter, call: LocalCall, operand: int) -> None:
        t = call.whole(operand)
        self.b, self.call = b, call
        self.dims = tuple(range(integer(call.attrs["axis"]) % t.rank, t.rank))
        self.axes = tuple(axis for dim in self.dims for axis in call.axes_of(operand, dim))
        self.count = 1
        for dim in self.dims:
            self.count *= t.dims[dim]

    def clean(self, x: Value, operand: int) -> Value:
        """Return a value that lies as an operand does, with zeros for padding along the row."""
        for dim in self.dims:
            x = unpadded(self.b, self.call, operand, dim, 0.0, x)
        return x

    def mean(self, x: Value) -> Value:
        """Return the mean over the rows of all ranks, kept as a column."""
        total = reduced(self.b, self.b.emit("sum", x, axes=self.dims, keep=True), self.axes)
        return self.b.emit("div", total, self.b.number(float(self.count), x.type.dtype))

    def column(self, statistic: Value, rank: int) -> Value:
        """Return a number per row, as a column beside the rows."""
        return self.b.emit("reshape", statistic, shape=(*statistic.type.dims, *(1,) * (rank - statistic.type.rank)))


def _layer_norm(b: LocalWriter, call: LocalCall) -> list[Value]:
    norm = _Norm(b, call, 0)
    x, scale, bias = (widened(b, v) for v in call.ins)
    x = norm.clean(x, 0)
    mean = norm.mean(x)
    centred = norm.clean(b.emit("sub", x, mean), 0)
    variance = norm.mean(b.emit("mul", centred, centred))
    eps = b.number(float(str(call.attrs["eps"])), x.type.dtype)
    rstd = b.emit("rsqrt", b.emit("add", variance, eps))
    y = b.emit("add", b.emit("mul", b.emit("mul", centred, rstd), scale), bias)
    statistics = (b.emit("reshape", v, shape=x.type.dims[: norm.dims[0]]) for v in (mean, rstd))
    return [narrowed(b, v, out.type.dtype) for v, out in zip((y, *statistics), call.op.outs, strict=True)]


def _layer_norm_grad(b: LocalWriter, call: LocalCall) -> list[Value]:
    """Write rstd * (g - mean(g) - n * mean(g * n)), with g = dy * scale and the normalised row n."""
    norm = _Norm(b, call, 1)
    dy, x, scale, mean, rstd = (widened(b, v) for v in call.ins)
    mean, rstd = (norm.column(v, x.type.rank) for v in (mean, rstd))
    g = norm.clean(b.emit("mul", dy, scale), 1)
    normal = b.emit("mul", b.emit("sub", norm.clean(x, 1), mean), rstd)
    along = b.emit("mul", normal, norm.mean(b.emit("mul", g, normal)))
    dx = b.emit("mul", rstd, b.emit("sub", b.emit("sub", g, norm.mean(g)), along))
    return [narrowed(b, dx, call.op.outs[0].type.dtype)]


# ------------------------------------------------------------------------------------------------ running sums


def _cumsum(b: LocalWriter, call: LocalCall) -> list[Value]:
    dim = integer(call.attrs["axis"]) % call.whole(0).rank
    reverse, axes = bool(call.attrs["reverse"]), call.axes_of(0, dim)
    x = widened(b, unpadded(b, call, 0, dim, 0.0))
    y = b.emit("cumsum", x, axis=dim, exclusive=bool(call.attrs["exclusive"]), reverse=reverse)
    if b.present(axes):
        totals = _gathered(b, b.emit("sum", x, axes=(dim,), keep=True), dim, axes)
        numbers, here = _column(b, totals, dim), b.index(axes)
        earlier = b.emit("less", *((here, numbers) if reverse else (numbers, here)))
        zero = b.number(0.0 if x.type.dtype in FLOATS else 0, x.type.dtype)
        before = b.emit("sum", b.emit("where", earlier, totals, zero), axes=(dim,), keep=True)
        y = b.emit("add", y, before)
    return [narrowed(b, y, call.op.outs[0].type.dtype)]


def _gathered(b: LocalWriter, x: Value, dim: int, axes: tuple[str, ...]) -> Value:
    """Return what all ranks have, one behind the other."""
    present = b.present(axes)
    if not present:
        return x
    return b.emit("all_gather", x, axis=dim, over=over(present), size=b.parts(axes) * x.type.dims[dim])


def _column(b: LocalWriter, x: Value, dim: int) -> Value:
    """Return 0, 1, 2, ... along a dimension of a local tensor, with size 1 in all others."""
    shape = tuple(n if i == dim else 1 for i, n in enumerate(x.type.dims))
    return b.emit("iota", name=b.namer.fresh("local.places"), dtype="i64", shape=shape, axis=dim)


# ------------------------------------------------------------------------------------------------ the largest


def _highest_of(dtype: str) -> float | int:
    """Return a number of an element type that none is above; nan is above all."""
    if dtype in FLOATS:
        return float("nan")
    bits = 8 * ITEM_BYTES[dtype]
    return (1 << bits if dtype in UNSIGNED else 1 << (bits - 1)) - 1


def _topk(b: LocalWriter, call: LocalCall) -> list[Value]:
    dim, k, largest = integer(call.attrs["axis"]) % call.whole(0).rank, integer(call.attrs["k"]), call.attrs["largest"]
    axes, dtype = call.axes_of(0, dim), call.whole(0).dtype
    x = unpadded(b, call, 0, dim, lowest_of(dtype) if largest else _highest_of(dtype))
    values, places = b.emit_all("topk", x, k=min(k, x.type.dims[dim]), axis=dim, largest=bool(largest))
    places = b.emit("add", places, b.first(axes, x.type.dims[dim]))
    values, places = (_gathered(b, v, dim, axes) for v in (values, places))
    best, chosen = b.emit_all("topk", values, k=k, axis=dim, largest=bool(largest))
    return [best, _taken_along(b, places, chosen, dim)]


def _taken_along(b: LocalWriter, x: Value, indices: Value, dim: int) -> Value:
    """Return for every place of the indices the element of x that stands at this index along a dimension."""
    dims, size = x.type.dims, x.type.dims[dim]
    behind = 1
    for n in dims[dim + 1 :]:
        behind *= n
    at = b.emit("mul", indices, b.number(behind, "i64"))
    step = 1
    for i in range(len(dims) - 1, -1, -1):
        if i != dim and dims[i] > 1:
            at = b.emit("add", at, b.emit("mul", _column(b, x, i), b.number(step, "i64")))
        step *= dims[i]
    flat = b.emit("reshape", x, shape=(step,))
    return b.emit("gather", flat, at, axis=0) if size else at


def _argmax(b: LocalWriter, call: LocalCall) -> list[Value]:
    dim = integer(call.attrs["axis"]) % call.whole(0).rank
    axes = call.axes_of(0, dim)
    x = unpadded(b, call, 0, dim, lowest_of(call.whole(0).dtype))
    largest = b.emit("max", x, axes=(dim,), keep=True)
    place = b.emit("reshape", b.emit("argmax", x, axis=dim), shape=largest.type.dims)
    places = _gathered(b, b.emit("add", place, b.first(axes, x.type.dims[dim])), dim, axes)
    first = b.emit("argmax", _gathered(b, largest, dim, axes), axis=dim)
    column = b.emit("reshape", first, shape=largest.type.dims)
    chosen = b.emit("where", b.emit("equal", _column(b, places, dim), column), places, b.number(0, "i64"))
    return [b.emit("sum", chosen, axes=(dim,))]


ROWS: dict[str, Form] = {
    "layer_norm": _layer_norm,
    "layer_norm_grad": _layer_norm_grad,
    "cumsum": _cumsum,
    "topk": _topk,
    "argmax": _argmax,
}
