"""Sliding windows over the spatial dimensions: their geometry, their means, and the places of their largest entries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from penstock.frontends.writer import Writer
from penstock.ir.graph import Value

from .elementwise import limits_of


@dataclass(frozen=True)
class PaddedWindow:
    """The geometry of sliding windows, with one number per dimension.

    `pads` lists the padding before each dimension, then that after each. `over` is how far the last window reaches past
    the padding.
    """

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads: tuple[int, ...]
    over: tuple[int, ...]

    @property
    def low(self) -> tuple[int, ...]:
        return self.pads[: len(self.kernel)]

    @property
    def high(self) -> tuple[int, ...]:
        """The padding after each dimension, including `over`."""
        return tuple(p + o for p, o in zip(self.pads[len(self.kernel) :], self.over, strict=True))

    @property
    def attrs(self) -> dict[str, tuple[int, ...]]:
        """The attributes of an operation of the IR, except for the kernel."""
        return {"strides": self.strides, "pads": self.low + self.high, "dilations": self.dilations}


def window(
    sizes: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
    pads: Sequence[int],
    round_up: bool,
) -> PaddedWindow:
    """Compute the windows over dimensions of these sizes.

    `round_up` adds a window where the last would leave entries out, unless it started in the padding.
    """
    r = len(kernel)
    over = [0] * r
    for i in range(r if round_up else 0):
        room = sizes[i] + pads[i] + pads[i + r] - reach(kernel[i], dilations[i])
        count = -(-room // strides[i]) + 1
        if (count - 1) * strides[i] >= sizes[i] + pads[i]:
            count -= 1
        over[i] = max(0, (count - 1) * strides[i] - room)
    return PaddedWindow(tuple(kernel), tuple(strides), tuple(dilations), tuple(pads), tuple(over))


def reach(kernel: int, dilation: int) -> int:
    """Return the number of entries that a window spans."""
    return dilation * (kernel - 1) + 1


def transposed_sizes(
    sizes: Sequence[int], kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int], extra: Sequence[int]
) -> tuple[int, ...]:
    """Compute the operand sizes of a convolution whose result has `sizes`, with the padding included.

    No window reaches the `extra` entries at the end.
    """
    geometry = zip(sizes, kernel, strides, dilations, extra, strict=True)
    return tuple((size - 1) * s + reach(k, d) + e for size, k, s, d, e in geometry)


def average(w: Writer, x: Value, at: PaddedWindow, counted: bool) -> Value:
    """Compute the mean of each window. `counted` includes the zeros of the padding, but never those of rounding up."""
    pads = at.attrs["pads"]
    if counted and any(at.over):  # the padding becomes zeros of the tensor
        x = w.emit("pad", x, low=(0, 0, *at.low), high=(0, 0, *at.pads[len(at.kernel) :])) if any(at.pads) else x
        pads, counted = (0,) * len(at.kernel) + at.over, False
    return w.emit(
        "avg_pool", x, window=at.kernel, strides=at.strides, pads=pads, dilations=at.dilations, include_pad=counted
    )


def largest_places(w: Writer, x: Value, out: Sequence[int], at: PaddedWindow, weights: Sequence[int]) -> Value:
    """Compute i64[batch, channels, *out]: the place of the first largest entry of each window.

    A place is counted within its channel by the weight of each dimension. The loop over taps keeps the largest entry so
    far and its place.
    """
    r, dtype = len(at.kernel), x.type.dtype
    padded = x
    if any(at.low + at.high):
        w.require(dtype not in ("i64", "u64"), f"places in padded windows of {dtype} are not supported")
        padded = w.emit("pad", x, low=(0, 0, *at.low), high=(0, 0, *at.high), value=float(limits_of(dtype)[0]))
    start = w.emit("const", value=0, dtype="i64", shape=(1,) * r)
    for i in range(r):
        step = np.arange(out[i]) * (at.strides[i] * weights[i])
        start = w.emit("add", start, step.reshape((-1, *(1,) * (r - 1 - i))))
    best: Value | None = None
    place = start
    for tap in np.ndindex(*at.kernel):
        begin = [t * d for t, d in zip(tap, at.dilations, strict=True)]
        stop = tuple(b + (m - 1) * s + 1 for b, m, s in zip(begin, out, at.strides, strict=True))
        value = w.emit("slice", padded, start=(0, 0, *begin), stop=(*x.type.dims[:2], *stop), step=(1, 1, *at.strides))
        here = w.emit("add", start, sum((b - p) * weight for b, p, weight in zip(begin, at.low, weights, strict=True)))
        if best is None:
            best, place = value, here
        else:
            larger = w.emit("less", best, value)
            best, place = w.emit("where", larger, value, best), w.emit("where", larger, here, place)
    whole = (*x.type.dims[:2], *out)
    return place if place.type.dims == whole else w.emit("broadcast", place, shape=whole)


def plane_places(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the weight of each dimension in row-major places."""
    return tuple(prod(sizes[i + 1 :]) for i in range(len(sizes)))
