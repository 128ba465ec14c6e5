"""Own forms of convolutions, pools and their gradients, split along their spatial dimensions.

Row u of the result, of a window of k rows, reads the input rows u * stride - low + dilation * (0 .. k - 1). A rank that
computes rows from u0 on takes input rows from u0 * stride - low on, those of its neighbours among them (strips.py).
Outside of the image they are zero, or the lowest number of a maximum, and the local operation has no padding there.

A gradient for the input is turned round. A rank takes the rows of the result whose windows meet its own input rows,
computes the gradient of all input rows of these windows, and cuts its own out. Rows that the result does not have count
zero. A gradient for the weight is the sum over the rank's own rows of the result, which all ranks add up.

A mean counts what is inside of the image. The local one counts the whole window, so its rows are multiplied by
window / count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.ir.graph import Value
from penstock.ir.ops import Window, integer, ints, window_of
from penstock.ir.types import TensorType

from .building import LocalWriter
from .calls import Form, LocalCall, lowest_of
from .strips import Needed, SplitLine, cut_at, rows


@dataclass(frozen=True)
class _Side:
    """One spatial dimension that is split, of the input and of the output of a window."""

    i: int
    image: SplitLine
    result: SplitLine
    size: int
    stride: int
    low: int
    reach: int

    def inputs(self, firsts: Sequence[int], count: int, matter: Sequence[int], fill: float) -> Needed:
        """Return the input rows of `count` output rows from `firsts` on, of which only some `matter`."""
        starts = tuple(u * self.stride - self.low for u in firsts)
        ends = tuple(start + self.rows_of(n) for start, n in zip(starts, matter, strict=True))
        return Needed(starts, self.rows_of(count), ends, fill)

    def rows_of(self, count: int) -> int:
        """Return how many input rows so many windows span."""
        return (count - 1) * self.stride + self.reach if count else 0

    @property
    def own(self) -> tuple[int, ...]:
        """The first output row of every rank."""
        return tuple(rank * self.result.part for rank in range(self.result.parts))

    @property
    def held(self) -> tuple[int, ...]:
        """The number of output rows that every rank has."""
        part, whole = self.result.part, self.result.whole
        return tuple(max(0, min(part, whole - first)) for first in self.own)

    def meeting(self) -> tuple[tuple[int, ...], int]:
        """Return the first output row whose window every rank takes to cover its own input rows, and their number."""
        firsts, count = [], 1
        for rank in range(self.image.parts):
            y = rank * self.image.part
            last = y + self.image.part - 1
            first = min(-(-(y + self.low - self.reach + 1) // self.stride), (y + self.low) // self.stride)
            start = first * self.stride - self.low
            covering = -(-(last + 1 - start - self.reach) // self.stride) + 1
            firsts.append(first)
            count = max(count, (last + self.low) // self.stride - first + 1, covering)
        return tuple(firsts), count

    def counts(self, firsts: Sequence[int], count: int) -> list[float]:
        """Return window / count for the output rows of every rank, one rank behind the other."""
        factors = []
        dilation = (self.reach - 1) // (self.size - 1) if self.size > 1 else 1
        for u in (first + i for first in firsts for i in range(count)):
            start = u * self.stride - self.low
            inside = sum(0 <= start + dilation * tap < self.image.whole for tap in range(self.size))
            factors.append(self.size / inside if inside and 0 <= u < self.result.whole else 1.0)
        return factors


class _Windows:
    """A convolution or pool that is made local: its window, and its split spatial dimensions."""

    def __init__(self, b: LocalWriter, call: LocalCall, image: TensorType, result: TensorType, kernel: Sequence[int]):
        self.b, self.call = b, call
        self.window: Window = window_of(call.attrs, tuple(kernel))
        self.sides = tuple(self._sides(image, result))

    def _sides(self, image: TensorType, result: TensorType) -> Iterator[_Side]:
        w = self.window
        local_image, local_result = (t.local(self.b.sizes).dims for t in (image, result))
        for i, size in enumerate(w.kernel):
            dim = i + 2
            axes = self.b.present(image.axes_of(dim))
            if not axes:
                continue
            of_image, of_result = (
                SplitLine(dim, axes, t.dims[dim], self.b.parts(axes), local[dim])
                for t, local in ((image, local_image), (result, local_result))
            )
            yield _Side(i, of_image, of_result, size, w.strides[i], w.low[i], w.dilations[i] * (size - 1) + 1)

    def inputs(self, x: Value, fill: float, all_matter: bool = False) -> Value:
        """Return the input rows of this rank's own output rows."""
        for side in self.sides:
            count = side.result.part
            matter = [count] * side.result.parts if all_matter else side.held
            x = rows(self.b, x, side.image, side.inputs(side.own, count, matter, fill))
        return x

    def met_outputs(self, dy: Value, fill: float | None = 0.0) -> Value:
        """Return the output rows whose windows meet this rank's own input rows."""
        for side in self.sides:
            dy = rows(self.b, dy, side.result, Needed.alike(*side.meeting(), fill))
        return dy

    def met_inputs(self, x: Value, fill: float) -> Value:
        """Return all input rows of the output rows that meet this rank's own input rows."""
        for side in self.sides:
            firsts, count = side.meeting()
            x = rows(self.b, x, side.image, side.inputs(firsts, count, [count] * len(firsts), fill))
        return x

    def own_inputs(self, dx: Value) -> Value:
        """Return this rank's own rows of what was computed for all input rows of the output rows that meet them."""
        for side in self.sides:
            firsts, _ = side.meeting()
            offsets = [rank * side.image.part - (u * side.stride - side.low) for rank, u in enumerate(firsts)]
            dx = cut_at(self.b, dx, side.image, offsets, side.image.part)
        return dx

    def met_shape(self, local: Sequence[int]) -> tuple[int, ...]:
        """Return a local shape with all input rows of the output rows that meet this rank's own."""
        shape = list(local)
        for side in self.sides:
            shape[side.image.dim] = side.rows_of(side.meeting()[1])
        return tuple(shape)

    def attrs(self) -> dict[str, Any]:
        """Return the attributes of the local operation: without padding along dimensions that are split."""
        low, high = list(self.window.low), list(self.window.high)
        for side in self.sides:
            low[side.i] = high[side.i] = 0
        attrs = {key: self.call.attrs[key] for key in ("window", "include_pad") if key in self.call.attrs}
        return {
            **attrs,
            "strides": self.window.strides,
            "dilations": self.window.dilations,
            "pads": (*low, *high),
        }

    def counted(self, y: Value, met: bool = False) -> Value:
        """Return means, or gradients of means, of the whole window as those of what is inside of the image."""
        for side in () if self.call.attrs["include_pad"] else self.sides:
            firsts, count = side.meeting() if met else (side.own, side.result.part)
            factors = side.counts(firsts, count)
            if all(factor == 1.0 for factor in factors):
                continue
            shape = (side.result.parts, count)
            name = self.b.namer.fresh("local.counts")
            table = self.b.emit("const", name=name, dtype=y.type.dtype, value=tuple(factors), shape=shape)
            mine = self.b.emit("gather", table, self.b.index(side.result.axes), axis=0)
            column = tuple(count if i == side.result.dim else 1 for i in range(y.type.rank))
            y = self.b.emit("mul", y, self.b.emit("reshape", mine, shape=column))
        return y


def _groups(call: LocalCall, channels: int, each: int) -> int:
    """Return the groups of a convolution on this rank, whose weight takes `each` of its input channels."""
    return channels // each if each else integer(call.attrs["groups"])


def _conv(b: LocalWriter, call: LocalCall) -> list[Value]:
    (x, w), (image, weight) = call.ins, (call.whole(0), call.whole(1))
    windows = _Windows(b, call, image, call.op.outs[0].type, weight.dims[2:])
    x = windows.inputs(x, 0.0)
    return [b.emit("conv", x, w, groups=_groups(call, x.type.dims[1], w.type.dims[1]), **windows.attrs())]


def _conv_grad_input(b: LocalWriter, call: LocalCall) -> list[Value]:
    dy, w = call.ins
    image = call.op.outs[0].type
    windows = _Windows(b, call, image, call.whole(0), call.whole(1).dims[2:])
    shape = windows.met_shape(image.local(b.sizes).dims)
    groups = _groups(call, shape[1], w.type.dims[1])
    dy = windows.met_outputs(dy)
    return [windows.own_inputs(b.emit("conv_grad_input", dy, w, shape=shape, groups=groups, **windows.attrs()))]


def _conv_grad_weight(b: LocalWriter, call: LocalCall) -> list[Value]:
    """Write the sum over this rank's output rows. What is no output row is zero, beside input rows that are finite."""
    (x, dy), weight = call.ins, call.op.outs[0].type
    windows = _Windows(b, call, call.whole(0), call.whole(1), weight.dims[2:])
    shape = weight.local(b.sizes).dims
    x = windows.inputs(x, 0.0, all_matter=True)
    for side in windows.sides:
        line = side.result
        dy = rows(b, dy, line, Needed.alike(side.own, line.part, 0.0))
    groups = _groups(call, x.type.dims[1], shape[1])
    return [b.emit("conv_grad_weight", x, dy, shape=shape, groups=groups, **windows.attrs())]


def _pool_windows(b: LocalWriter, call: LocalCall, image: TensorType, result: TensorType) -> _Windows:
    return _Windows(b, call, image, result, ints(call.attrs["window"]))


def _max_pool(b: LocalWriter, call: LocalCall) -> list[Value]:
    windows = _pool_windows(b, call, call.whole(0), call.op.outs[0].type)
    x = windows.inputs(call.ins[0], lowest_of(call.ins[0].type.dtype))
    return [b.emit("max_pool", x, **windows.attrs())]


def _max_pool_grad(b: LocalWriter, call: LocalCall) -> list[Value]:
    x, y, dy = call.ins
    windows = _pool_windows(b, call, call.whole(0), call.whole(1))
    x = windows.met_inputs(x, lowest_of(x.type.dtype))
    y, dy = windows.met_outputs(y, None), windows.met_outputs(dy)
    return [windows.own_inputs(b.emit("max_pool_grad", x, y, dy, **windows.attrs()))]


def _avg_pool(b: LocalWriter, call: LocalCall) -> list[Value]:
    windows = _pool_windows(b, call, call.whole(0), call.op.outs[0].type)
    return [windows.counted(b.emit("avg_pool", windows.inputs(call.ins[0], 0.0), **windows.attrs()))]


def _avg_pool_grad(b: LocalWriter, call: LocalCall) -> list[Value]:
    image = call.op.outs[0].type
    windows = _pool_windows(b, call, image, call.whole(0))
    dy = windows.counted(windows.met_outputs(call.ins[0]), met=True)
    shape = windows.met_shape(image.local(b.sizes).dims)
    return [windows.own_inputs(b.emit("avg_pool_grad", dy, shape=shape, **windows.attrs()))]


HALOS: dict[str, Form] = {
    "conv": _conv,
    "conv_grad_input": _conv_grad_input,
    "conv_grad_weight": _conv_grad_weight,
    "max_pool": _max_pool,
    "max_pool_grad": _max_pool_grad,
    "avg_pool": _avg_pool,
    "avg_pool_grad": _avg_pool_grad,
}
