"""ATen operations that create, move, cut and join elements. All sizes are numbers."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import torch

from penstock.frontends.formulas.layout import (
    axis_of,
    concat,
    cut,
    cut_negative,
    entry,
    expand,
    reshape,
    tile,
    transpose,
)
from penstock.frontends.torch.node import Result, Rule, TorchNode
from penstock.ir.graph import Value
from penstock.ir.types import FLOATS, broadcast_shapes

# ---------------------------------------------------------------------------------------- the same elements


def reshaped(n: TorchNode, shape: Sequence[int]) -> Result:
    """Reshape `self`. Write nothing if it has that shape already."""
    return n.arg("self") if n.type().shape == tuple(shape) else reshape(n, n.value(), shape)


def _view(n: TorchNode) -> Result:
    wanted = list(n.ints("size"))
    if -1 in wanted:
        others = prod(size for size in wanted if size != -1)
        wanted[wanted.index(-1)] = n.type().size // others if others else 0
    return reshaped(n, wanted)


def _unsqueeze(n: TorchNode) -> Result:
    dims = n.type().dims
    axis = axis_of(n, n.arg("dim"), len(dims) + 1)
    return reshaped(n, (*dims[:axis], 1, *dims[axis:]))


def _squeeze(n: TorchNode) -> Result:
    dims = n.type().dims
    axes = {axis_of(n, a, len(dims)) for a in n.ints("dim")}
    return reshaped(n, [size for i, size in enumerate(dims) if size != 1 or i not in axes])


def _permute(n: TorchNode) -> Result:
    rank = n.type().rank
    perm = [axis_of(n, a, rank) for a in n.ints("dims")]
    return n.arg("self") if perm == list(range(rank)) else transpose(n, n.value(), perm)


def _cast(n: TorchNode) -> Result:
    n.ignore("dtype", "copy")
    dtype = n.dtype
    if n.type().dtype == dtype:
        return n.arg("self")
    x = n.value()
    if dtype == "bool":
        return n.emit("not", n.emit("equal", x, 0))
    return n.emit("cast", x, dtype=dtype)


def _copy(n: TorchNode) -> Result:
    return expand(n, n.value("src", n.dtype), n.type().dims)


def _detach(n: TorchNode) -> Result:
    """Write `detach` only where a gradient would pass: behind a parameter that is trained."""
    return n.emit("detach", n.value()) if n.is_trained() and n.dtype in FLOATS else n.arg("self")


# ---------------------------------------------------------------------------------------- constants


def filled(value: float | None = None) -> Rule:
    """Make the rule of a constant of one value: `value`, or if it is None the call's."""

    def rule(n: TorchNode) -> Result:
        n.ignore("dtype", "physical_layout", "stride")
        dims = n.ints("size") if n.has("size") else n.type().dims
        filler, dtype = n.arg("fill_value") if value is None else value, n.dtype
        n.require(isinstance(filler, bool | int | float), f"cannot be filled with {filler!r}")
        number = float(filler) if dtype in FLOATS else bool(filler) if dtype == "bool" else int(filler)
        return n.emit("const", value=number, dtype=dtype, shape=dims)

    return rule


def _arange(n: TorchNode) -> Result:
    n.ignore("dtype")
    start, end, step = n.arg("start", 0), n.arg("end"), n.arg("step", 1)
    dtype = n.dtype
    count = max(0, -int(-(end - start) // step))
    n.require(dtype != "bool", "is not supported on bools")
    line = n.emit("iota", dtype=dtype, shape=(count,), axis=0)
    line = line if step == 1 else n.emit("mul", line, step)
    return line if start == 0 else n.emit("add", line, start)


# ---------------------------------------------------------------------------------------- repeated, cut and joined


def _expand(n: TorchNode) -> Result:
    n.ignore("implicit")
    dims, size = n.type().dims, n.ints("size")
    behind = (1,) * (len(size) - len(dims)) + dims
    shape = tuple(old if s == -1 else s for s, old in zip(size, behind, strict=True))
    n.require(broadcast_shapes(dims, shape) == shape, f"{n.type()} does not broadcast to {list(shape)}")
    return n.arg("self") if shape == dims else expand(n, n.value(), shape)


def _repeat(n: TorchNode) -> Result:
    repeats = n.ints("repeats")
    x = n.value()
    x = reshape(n, x, (1,) * (len(repeats) - x.type.rank) + x.type.dims)
    return tile(n, x, repeats)


def _cat(n: TorchNode) -> Result:
    dtype = n.dtype
    parts = [
        v for v in n.values("tensors", dtype) if v.type.dims != (0,)
    ]  # torch skips such empty tensors, whatever the shape of the others
    n.require(bool(parts), "there is nothing to join")
    axis = axis_of(n, n.arg("dim"), parts[0].type.rank)
    return concat(n, parts, axis)


def _split(n: TorchNode) -> Result:
    x = n.value()
    axis = axis_of(n, n.arg("dim"), x.type.rank)
    ends = np.cumsum(n.ints("split_sizes")).tolist()
    return [cut(n, x, axis, start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def _bounds(n: TorchNode, size: int) -> tuple[int, int, int]:
    return slice(n.arg("start"), n.arg("end"), n.arg("step", 1)).indices(size)


def _slice(n: TorchNode) -> Result:
    dims = n.type().dims
    axis = axis_of(n, n.arg("dim"), len(dims))
    start, stop, step = _bounds(n, dims[axis])
    if (start, stop, step) == (0, dims[axis], 1):
        return n.arg("self")
    starts, stops, steps = [0] * len(dims), list(dims), [1] * len(dims)
    starts[axis], stops[axis], steps[axis] = start, max(start, stop), step
    return n.emit("slice", n.value(), start=tuple(starts), stop=tuple(stops), step=tuple(steps))


def _select(n: TorchNode) -> Result:
    x = n.value()
    return entry(n, x, axis_of(n, n.arg("dim"), x.type.rank), n.arg("index"))


def put_into(n: TorchNode, x: Value, src: Value, axis: int, start: int, stop: int, step: int) -> Value:
    """Replace start:stop:step of x along one axis."""
    dims = x.type.dims
    count = len(range(start, stop, step))
    src = expand(n, src, (*dims[:axis], count, *dims[axis + 1 :]))
    if step == 1:
        parts = [cut(n, x, axis, 0, start), src, cut(n, x, axis, stop, dims[axis])]
        kept = [p for p in parts if p.type.dims[axis]]
        return concat(n, kept, axis) if kept else x
    places = np.arange(start, stop, step, dtype=np.int64)
    return n.emit("scatter", x, places, src, axis=axis) if count else x


def _slice_scatter(n: TorchNode) -> Result:
    x = n.value()
    axis = axis_of(n, n.arg("dim"), x.type.rank)
    start, stop, step = _bounds(n, x.type.dims[axis])
    return put_into(n, x, n.value("src", x.type.dtype), axis, start, max(start, stop), step)


def _pad(n: TorchNode) -> Result:
    x = n.value()
    pads, rank = n.ints("pad"), x.type.rank
    low, high = [0] * rank, [0] * rank
    for i in range(len(pads) // 2):  # the last dimension first
        low[rank - 1 - i], high[rank - 1 - i] = pads[2 * i], pads[2 * i + 1]
    x, low, high = cut_negative(n, x, low, high)
    return (
        n.emit("pad", x, low=tuple(low), high=tuple(high), value=float(n.arg("value", 0.0))) if any(low + high) else x
    )


def _flip(n: TorchNode) -> Result:
    x = n.value()
    for axis in n.ints("dims"):
        axis = axis_of(n, axis, x.type.rank)
        x = n.emit("gather", x, np.arange(x.type.dims[axis])[::-1].copy(), axis=axis) if x.type.rank else x
    return x


def at_places(n: TorchNode, places: torch.Tensor) -> Result:
    """Return the elements of `self` at these row-major positions."""
    x = n.value()
    return n.emit("gather", reshape(n, x, (x.type.size,)), places.contiguous().numpy(), axis=0)


def _strided(n: TorchNode) -> Result:
    """Write as_strided by the place of each of the operand's elements in torch's memory."""
    meta = n.meta("self")
    numbers = (*meta.shape, *meta.stride(), meta.storage_offset())
    n.require(all(isinstance(x, int) for x in numbers), "is not supported on symbolic sizes")
    size, stride, offset = n.ints("size"), n.ints("stride"), int(n.arg("storage_offset", meta.storage_offset()))
    memory = torch.full(
        (1 + max(_last(meta.shape, meta.stride(), meta.storage_offset()), _last(size, stride, offset)),), -1
    )
    memory.as_strided(meta.shape, meta.stride(), meta.storage_offset()).copy_(
        torch.arange(meta.numel()).reshape(meta.shape)
    )
    places = memory.as_strided(size, stride, offset)
    n.require(bool((places >= 0).all()), "reaches elements of the memory that are not the operand's")
    if torch.equal(places.flatten(), torch.arange(meta.numel())):
        return reshaped(n, size)
    return at_places(n, places)


def _last(size: Sequence[int], stride: Sequence[int], offset: int) -> int:
    """Return the last place in memory."""
    return offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True) if n > 0)


def moved(*names: str) -> Rule:
    """Make the rule of an operation that only moves elements.

    Applied to positions, it shows the origin of each element.
    """

    def rule(n: TorchNode) -> Result:
        x = n.type()
        args = [n.arg(name) for name in names]
        return at_places(n, n.target(torch.arange(x.size).reshape(x.dims), *args))  # type: ignore[operator]

    return rule


def _pixel_shuffle(n: TorchNode) -> Result:
    x, f = n.value(), int(n.arg("upscale_factor"))
    *lead, c, h, w = x.type.dims
    r = len(lead)
    split = reshape(n, x, (*lead, c // (f * f), f, f, h, w))
    return reshape(
        n, transpose(n, split, [*range(r), r, r + 3, r + 1, r + 4, r + 2]), (*lead, c // (f * f), h * f, w * f)
    )


def _size(n: TorchNode) -> Result:
    dims = n.type().dims
    return dims[axis_of(n, n.arg("dim"), len(dims))]


RULES: dict[str, Rule] = {
    # numbers
    "sym_size.int": _size,
    # the same elements
    "view": _view,
    "unsqueeze": _unsqueeze,
    "squeeze.dims": _squeeze,
    "permute": _permute,
    "alias": lambda n: n.arg("self"),
    "clone": lambda n: n.arg("self"),
    "detach": _detach,
    "_to_copy": _cast,
    "copy": _copy,
    # constants
    "full": filled(),
    "full_like": filled(),
    "empty.memory_format": filled(0.0),
    "empty_permuted": filled(0.0),
    "empty_strided": filled(0.0),
    "arange.start_step": _arange,
    # repeated, cut and joined
    "expand": _expand,
    "repeat": _repeat,
    "cat": _cat,
    "split_with_sizes": _split,
    "slice.Tensor": _slice,
    "select.int": _select,
    "slice_scatter": _slice_scatter,
    "constant_pad_nd": _pad,
    "flip": _flip,
    "roll": moved("shifts", "dims"),
    "diagonal": moved("offset", "dim1", "dim2"),
    "as_strided": _strided,
    "unfold": moved("dimension", "size", "step"),
    "pixel_shuffle": _pixel_shuffle,
}
