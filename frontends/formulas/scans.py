"""Products of all entries of a dimension, or of all up to each entry, in a logarithmic number of steps."""

from __future__ import annotations

from penstock.frontends.writer import Writer
from penstock.ir.graph import Value

from .layout import cut


def flipped(w: Writer, x: Value) -> Value:
    """Reverse the order of numbers: -x, and ~x for integers, because -x of the least integer overflows."""
    if x.type.dtype[0] == "i":
        return w.emit("sub", w.literal(-1, x.type.dtype), x)
    if x.type.dtype[0] == "u":
        return w.emit("sub", w.literal(2 ** int(x.type.dtype[1:]) - 1, x.type.dtype), x)
    return w.emit("neg", x)


def product_over(w: Writer, x: Value, axis: int) -> Value:
    """Multiply all entries along `axis`, which keeps size 1."""
    while (count := x.type.dims[axis]) > 1:
        half = count // 2
        y = w.emit("mul", cut(w, x, axis, 0, half), cut(w, x, axis, half, 2 * half))
        x = y if count % 2 == 0 else w.emit("concat", y, cut(w, x, axis, count - 1, count), axis=axis)
    return x


def cumulative_product(w: Writer, x: Value, axis: int, *, exclusive: bool, reverse: bool) -> Value:
    """Multiply the entries up to each, without itself if `exclusive`. `reverse` multiplies from each to the end."""
    size = x.type.dims[axis]

    def shifted(v: Value, by: int) -> Value:
        """Shift the entries and fill with ones."""
        dims, by = v.type.dims, min(by, size)
        low, high = (
            tuple(by if i == axis and here else 0 for i in range(len(dims))) for here in (not reverse, reverse)
        )
        kept = cut(w, v, axis, by, size) if reverse else cut(w, v, axis, 0, size - by)
        return w.emit("pad", kept, low=low, high=high, value=1.0)

    y = shifted(x, 1) if exclusive else x
    step = 1
    while step < size:
        y = w.emit("mul", y, shifted(y, step))
        step *= 2
    return y
