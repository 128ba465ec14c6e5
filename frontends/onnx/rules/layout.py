"""ONNX operators that move elements: shapes, slices, padding. All shapes are numbers by the time a rule runs.

`Shape` and `Size` give arrays, so a chain of computations on shapes is folded away node by node as it is read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx

from penstock.frontends.formulas.layout import axis_of, cut, cut_negative, reshape, tile, transpose, triangle
from penstock.frontends.onnx.node import MOST_MADE, OnnxNode, Result, Rule
from penstock.frontends.onnx.source import our_dtype
from penstock.frontends.writer import Refused
from penstock.ir.graph import Value
from penstock.ir.types import broadcast_shapes, dtype_of, numpy_dtype


def reshaped(n: OnnxNode, shape: Sequence[int]) -> Result:
    """Reshape operand 0. Write nothing if it has that shape already."""
    return n.tensor(0) if n.type().shape == tuple(shape) else reshape(n, n.value(), shape)


def _reshape(n: OnnxNode) -> Result:
    wanted = list(n.ints(1, "the shape"))
    dims, keep_zero = n.type().dims, n.int_attr("allowzero")
    for i, size in enumerate(wanted):
        if size == 0 and not keep_zero:
            n.require(i < len(dims), f"shape {wanted} copies dimension {i} of a tensor of rank {len(dims)}")
            wanted[i] = dims[i]
    if -1 in wanted:
        i = wanted.index(-1)
        others = math.prod(wanted[:i] + wanted[i + 1 :])
        n.require(-1 not in wanted[i + 1 :] and others > 0, f"shape {wanted} leaves more than one size open")
        wanted[i] = math.prod(dims) // others
    return reshaped(n, wanted)


def _flatten(n: OnnxNode) -> Result:
    dims = n.type().dims
    axis = n.int_attr("axis", 1)
    n.require(-len(dims) <= axis <= len(dims), f"axis {axis} is outside a tensor of rank {len(dims)}")
    axis = axis + len(dims) if axis < 0 else axis
    return reshaped(n, (math.prod(dims[:axis]), math.prod(dims[axis:])))


def _squeeze(n: OnnxNode) -> Result:
    dims = n.type().dims
    axes = (
        {axis_of(n, a, len(dims)) for a in n.ints(1, "the list of axes")}
        if n.has(1)
        else {i for i, s in enumerate(dims) if s == 1}
    )
    n.require(all(dims[a] == 1 for a in axes), f"axes {sorted(axes)} of {n.type()} are not all of size 1")
    return reshaped(n, [size for i, size in enumerate(dims) if i not in axes])


def _unsqueeze(n: OnnxNode) -> Result:
    dims = n.type().dims
    wanted = n.ints(1, "the list of axes")
    axes = {axis_of(n, a, len(dims) + len(wanted)) for a in wanted}
    n.require(len(axes) == len(wanted), f"axes {list(wanted)} name a dimension twice")
    kept = iter(dims)
    return reshaped(n, [1 if i in axes else next(kept) for i in range(len(dims) + len(axes))])


def _transpose(n: OnnxNode) -> Result:
    rank = n.type().rank
    perm = n.ints_attr("perm") or tuple(reversed(range(rank)))
    return n.tensor(0) if list(perm) == list(range(rank)) else transpose(n, n.value(), perm)


def _expand(n: OnnxNode) -> Result:
    shape = broadcast_shapes(n.type().shape, n.ints(1, "the shape"))
    return n.tensor(0) if shape == n.type().shape else n.emit("broadcast", n.value(), shape=shape)


def _concat(n: OnnxNode) -> Result:
    axis = axis_of(n, n.int_attr("axis"), n.type().rank)
    return n.tensor(0) if n.count == 1 else n.emit("concat", *n.values(), axis=axis)


def _split(n: OnnxNode) -> Sequence[Result]:
    x = n.value()
    axis = axis_of(n, n.int_attr("axis"), x.type.rank)
    size, parts = x.type.dims[axis], len(n.proto.output)
    promised = n.int_attr("num_outputs", parts)
    n.require(promised == parts, f"num_outputs is {promised}, but there are {parts} results")
    if n.has(1):
        sizes = n.ints(1, "the list of sizes")
    else:
        each = -(-size // parts)
        sizes = (*(each,) * (parts - 1), size - each * (parts - 1))
    n.require(
        len(sizes) == parts and sum(sizes) == size and min(sizes) >= 0,
        f"sizes {list(sizes)} do not split {size} in {parts}",
    )
    ends = np.cumsum(sizes).tolist()
    return [
        cut(n, x, axis, end - step, end) if name else x
        for step, end, name in zip(sizes, ends, n.proto.output, strict=True)
    ]


def _slice(n: OnnxNode) -> Result:
    x, dims = n.type(), n.type().dims
    operands = n.all_ints(
        {1: "the list of starts", 2: "the list of ends", 3: "the list of axes", 4: "the list of steps"}
    )
    starts, ends = operands[1], operands[2]
    axes, steps = operands.get(3, tuple(range(len(starts)))), operands.get(4, (1,) * len(starts))
    n.require(len(starts) == len(ends) == len(axes) == len(steps), "starts, ends, axes and steps differ in length")
    bounds = [(0, size, 1) for size in dims]
    backward: dict[int, list[int]] = {}
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        axis = axis_of(n, axis, x.rank)
        n.require(step != 0, "a step is 0")
        begin, stop, stride = slice(start, end if step > 0 or end > -(2**31) else None, step).indices(dims[axis])
        if step > 0:
            bounds[axis] = (begin, max(begin, stop), stride)
        else:
            backward[axis] = list(range(dims[axis]))[slice(start, end if end > -(2**31) else None, step)]
    if not backward and all(bound == (0, size, 1) for bound, size in zip(bounds, dims, strict=True)):
        return n.tensor(0)
    y = n.value()
    if any(bound != (0, size, 1) for bound, size in zip(bounds, dims, strict=True)):
        low, high, strides = (tuple(part) for part in zip(*bounds, strict=True))
        y = n.emit("slice", y, start=low, stop=high, step=strides)
    for axis, order in backward.items():  # the IR slices forward only
        y = n.emit("gather", y, np.array(order, np.int64), axis=axis)
    return y


def _pad(n: OnnxNode) -> Result:
    x = n.value()
    dims, mode = x.type.dims, n.text_attr("mode", "constant")
    operands = n.all_ints({1: "the padding", 3: "the list of axes"})
    pads, axes = operands[1], [axis_of(n, a, len(dims)) for a in operands.get(3, range(len(dims)))]
    n.require(len(pads) == 2 * len(axes), f"{len(pads)} paddings do not fit {len(axes)} axes")
    low, high = [0] * len(dims), [0] * len(dims)
    for i, axis in enumerate(axes):
        low[axis], high[axis] = pads[i], pads[i + len(axes)]
    if mode == "constant":
        x, low, high = cut_negative(n, x, low, high)
        if not any(low + high):
            return x
        if n.has(2) and isinstance(n.tensor(2), Value):
            return _filled(n, x, reshape(n, n.value(2), ()), low, high)
        filler = n.constant(2, "the padding value").item() if n.has(2) else 0.0
        return n.emit("pad", x, low=tuple(low), high=tuple(high), value=float(filler))
    n.require(mode in ("reflect", "edge", "wrap"), f"mode={mode} is not known")
    n.require(min(low + high) >= 0, f"negative padding with mode={mode} is not supported")
    for axis, size in enumerate(dims):
        if low[axis] or high[axis]:
            order = np.pad(
                np.arange(n.room(size + low[axis] + high[axis]) - low[axis] - high[axis]),
                (low[axis], high[axis]),
                mode=mode,
            )  # type: ignore[call-overload]
            x = n.emit("gather", x, order.astype(np.int64), axis=axis)
    return x


def _filled(n: OnnxNode, x: Value, filler: Value, low: Sequence[int], high: Sequence[int]) -> Value:
    """Pad x with a number that is computed at run time."""
    inside = n.emit(
        "pad", n.emit("const", value=True, dtype="bool", shape=x.type.dims), low=tuple(low), high=tuple(high)
    )
    return n.emit("where", inside, n.emit("pad", x, low=tuple(low), high=tuple(high)), filler)


def _tile(n: OnnxNode) -> Result:
    repeats = n.ints(1, "the list of repeats")
    return n.tensor(0) if repeats and all(r == 1 for r in repeats) else tile(n, n.value(), repeats)


def _trilu(n: OnnxNode) -> Result:
    x = n.value()
    n.require(x.type.rank >= 2, f"needs at least two dimensions, got {x.type}")
    rows, columns = x.type.dims[-2:]
    upper = n.int_attr("upper", 1)  # column >= row + k, that is not column <= row + k - 1
    if n.has(1) and isinstance(n.tensor(1), Value):
        limited = n.emit(
            "minimum", n.emit("maximum", reshape(n, n.value(1), ()), -rows), columns
        )  # so that no sum overflows
        diagonal: Value | int = n.emit("sub", limited, 1) if upper else limited
    else:
        known = int(n.constant(1, "the diagonal").item()) if n.has(1) else 0
        diagonal = max(-rows, min(columns, known)) - bool(upper)
    keep = triangle(n, rows, columns, diagonal)
    keep = n.emit("not", keep) if upper else keep
    return n.emit("and", keep, x) if x.type.dtype == "bool" else n.emit("where", keep, x, 0)


def _constant(n: OnnxNode) -> Result:
    numbers = {"value_float": np.float32, "value_floats": np.float32, "value_int": np.int64, "value_ints": np.int64}
    for name, dtype in numbers.items():
        if n.given(name):
            return np.array(onnx.helper.get_attribute_value(n.raw_attr(name)), dtype)
    if not n.given("value"):
        raise Refused("holds no tensor of numbers")
    return n.array_attr("value")


def _constant_of_shape(n: OnnxNode) -> Result:
    filler = n.array_attr("value").reshape(-1)[0] if n.given("value") else np.float32(0)
    shape = n.ints(0, "the shape")
    n.require(min(shape, default=0) >= 0, f"sizes {list(shape)} are not all positive or zero")
    if math.prod(shape) > MOST_MADE:
        return n.emit("const", value=filler.item(), dtype=dtype_of(filler.dtype), shape=shape)
    return np.full(shape, filler)


def _shape(n: OnnxNode) -> Result:
    dims = n.type().dims
    start, end = n.int_attr("start"), n.int_attr("end", len(dims))
    return np.array(dims[start:end], np.int64)


def _range(n: OnnxNode) -> Result:
    start, limit, delta = n.constants({0: "the start", 1: "the limit", 2: "the step"}).values()
    n.require(
        start.size == limit.size == delta.size == 1 and bool(delta),
        "start, limit and step have to be one number each, and the step not 0",
    )
    start, limit, delta = (array.reshape(()) for array in (start, limit, delta))
    count = n.room(max(0, math.ceil((limit.item() - start.item()) / delta.item())))
    numbers: np.ndarray = (start + np.arange(count, dtype=start.dtype) * delta).astype(start.dtype)
    return numbers


def _eye_like(n: OnnxNode) -> Result:
    x, k = n.type(), n.int_attr("k")
    n.require(x.rank == 2, f"needs two dimensions, got {x}")
    dtype = our_dtype(n.int_attr("dtype")) if n.given("dtype") else x.dtype
    rows, columns = x.dims
    return np.asarray(np.eye(rows, columns, k), numpy_dtype(dtype))


def _depth_to_space(n: OnnxNode) -> Result:
    x, block, mode = n.value(), n.int_attr("blocksize"), n.text_attr("mode", "DCR")
    n.require(
        x.type.rank == 4 and block > 0 and x.type.dims[1] % (block * block) == 0,
        f"{x.type} does not divide into blocks of {block}",
    )
    n.require(mode in ("DCR", "CRD"), f"mode={mode} is not known")
    batch, channels, height, width = x.type.dims
    depth = channels // (block * block)
    shape = (
        (batch, block, block, depth, height, width) if mode == "DCR" else (batch, depth, block, block, height, width)
    )
    perm = (0, 3, 4, 1, 5, 2) if mode == "DCR" else (0, 1, 4, 2, 5, 3)
    return reshape(n, transpose(n, reshape(n, x, shape), perm), (batch, depth, height * block, width * block))


def _space_to_depth(n: OnnxNode) -> Result:
    x, block, mode = n.value(), n.int_attr("blocksize"), n.text_attr("mode", "DCR")
    n.require(x.type.rank == 4 and block > 0, f"needs four dimensions and a block, got {x.type} and {block}")
    n.require(mode in ("DCR", "CRD"), f"mode={mode} is not known")
    batch, channels, height, width = x.type.dims
    n.require(height % block == 0 and width % block == 0, f"{x.type} does not divide into blocks of {block}")
    parts = reshape(n, x, (batch, channels, height // block, block, width // block, block))
    return reshape(
        n,
        transpose(n, parts, (0, 3, 5, 1, 2, 4) if mode == "DCR" else (0, 1, 3, 5, 2, 4)),
        (batch, channels * block * block, height // block, width // block),
    )


def _center_crop_pad(n: OnnxNode) -> Result:
    x, wanted = n.value(), n.ints(1, "the shape")
    axes = [axis_of(n, a, x.type.rank) for a in n.ints_attr("axes")] or list(range(x.type.rank))
    n.require(len(axes) == len(wanted), f"{len(wanted)} sizes do not fit {len(axes)} axes")
    low, high = [0] * x.type.rank, [0] * x.type.rank
    for axis, size in zip(axes, wanted, strict=True):
        more = size - x.type.dims[axis]
        if more < 0:
            x = cut(n, x, axis, -more // 2, -more // 2 + size)
        else:
            low[axis], high[axis] = more // 2, more - more // 2
    return n.emit("pad", x, low=tuple(low), high=tuple(high)) if any(high) else x if x is not n.value() else n.tensor(0)


RULES: dict[str, Rule] = {
    # known at import
    "Constant": _constant,
    "ConstantOfShape": _constant_of_shape,
    "Shape": _shape,
    "Size": lambda n: np.array(n.type().size, np.int64),
    "Range": _range,
    # the same elements in another shape or order
    "Reshape": _reshape,
    "Flatten": _flatten,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Transpose": _transpose,
    # repeated, cut and joined
    "Expand": _expand,
    "Tile": _tile,
    "Concat": _concat,
    "Split": _split,
    "Slice": _slice,
    "Pad": _pad,
    "Trilu": _trilu,
    "EyeLike": _eye_like,
    "DepthToSpace": _depth_to_space,
    "SpaceToDepth": _space_to_depth,
    "CenterCropPad": _center_crop_pad,
}
