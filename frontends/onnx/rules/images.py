"""ONNX operators that resize images and sample them between their entries."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from penstock.frontends.formulas.elementwise import between, widened
from penstock.frontends.formulas.layout import axis_of, concat, cut, reshape, transpose
from penstock.frontends.formulas.resizing import (
    LONGEST_MATRIX,
    Taps,
    cubic_shape,
    cubic_weights,
    linear_weights,
    pick,
    resample,
    smoothing_weights,
    taps_around,
    tent,
)
from penstock.frontends.formulas.sampling import (
    corners_at,
    ends_outside,
    grid_sample,
    images,
    read_between,
    zeros_outside,
)
from penstock.frontends.onnx.node import OnnxNode, Result, Rule
from penstock.ir.graph import Value

from .neural import kernel_of

# ---------------------------------------------------------------------------------------- resizing


def _places(n: OnnxNode, mode: str, size: int, count: int, scale: float, region: tuple[float, float]) -> np.ndarray:
    """Compute the place of each entry of the result between the entries of the operand."""
    n.room(count * min(size, LONGEST_MATRIX))
    y, length = np.arange(count, dtype=np.float64), scale * size
    match mode:
        case "align_corners":
            return y * 0 if length == 1 else y * (size - 1) / (length - 1)
        case "asymmetric":
            return y / scale
        case "half_pixel":
            return (y + 0.5) / scale - 0.5
        case "pytorch_half_pixel":
            return y * 0 - 0.5 if length == 1 else (y + 0.5) / scale - 0.5
        case "half_pixel_symmetric":
            return size / 2 * (1 - count / length) + (y + 0.5) / scale - 0.5
        case "tf_crop_and_resize":
            low, high = region
            inner = (
                y * 0 + (high - low) * (size - 1) / 2 if length == 1 else y * (high - low) * (size - 1) / (length - 1)
            )
            return np.asarray(inner + low * (size - 1))
        case "tf_half_pixel_for_nn":
            return (y + 0.5) / scale
    n.require(False, f"coordinate_transformation_mode={mode} is not known")
    raise AssertionError


def _nearest(n: OnnxNode, at: np.ndarray, size: int, mode: str) -> np.ndarray:
    rounded = {
        "round_prefer_floor": np.ceil(at - 0.5),
        "round_prefer_ceil": np.floor(at + 0.5),
        "floor": np.floor(at),
        "ceil": np.ceil(at),
    }
    n.require(mode in rounded, f"nearest_mode={mode} is not known")
    return np.asarray(np.clip(rounded[mode], 0, size - 1), np.int64)


def _sizes(n: OnnxNode, dims: Sequence[int], axes: Sequence[int]) -> tuple[list[float], list[int]]:
    """Return scale and new size of each of the axes, from the operand that is present: scales or sizes."""
    last = 1 if n.count < 3 else 2
    operands = n.constants({last: "the list of scales", 3: "the list of sizes"})
    scales = operands[last].astype(float).tolist() if last in operands else []
    if scales:
        n.require(len(scales) == len(axes), f"{len(scales)} scales do not fit {len(axes)} axes")
        n.require(min(scales) > 0, f"scales {scales} must be positive")
        return scales, [math.floor(s * dims[a]) for s, a in zip(scales, axes, strict=True)]
    n.require(n.has(3), "neither scales nor sizes are given")
    sizes = list(n.ints(3, "the list of sizes"))
    n.require(len(sizes) == len(axes) and all(dims[a] for a in axes), f"sizes {sizes} do not fit {n.type()}")
    scales = [size / dims[a] for size, a in zip(sizes, axes, strict=True)]
    policy = n.text_attr("keep_aspect_ratio_policy", "stretch")
    n.require(policy in ("stretch", "not_larger", "not_smaller"), f"keep_aspect_ratio_policy={policy} is not known")
    if policy != "stretch":
        scale = (min if policy == "not_larger" else max)(scales)
        scales, sizes = [scale] * len(axes), [math.floor(scale * dims[a] + 0.5) for a in axes]
    return scales, sizes


def _weights(n: OnnxNode, mode: str, at: np.ndarray, scale: float, size: int) -> Taps:
    below = np.ceil(at) - 1  # an entry at the place itself counts as the one above
    ratio, a = at - below, n.float_attr("cubic_coeff_a", -0.75)
    if n.int_attr("antialias"):
        n.room(math.ceil(5 / min(scale, 1.0)) * len(at))
        weights = (
            smoothing_weights(ratio, scale, 1, tent)
            if mode == "linear"
            else smoothing_weights(ratio, scale, 2, cubic_shape(a))
        )
    else:
        weights = linear_weights(ratio) if mode == "linear" else cubic_weights(ratio, a)
    return taps_around(at, weights, size, bool(n.int_attr("exclude_outside")))


def _resize(n: OnnxNode) -> Result:
    x, old = n.value(), n.opset < 11 or n.kind == "Upsample"
    dims, rank = x.type.dims, x.type.rank
    axes = [axis_of(n, a, rank) for a in n.ints_attr("axes")] or list(range(rank))
    scales, sizes = _sizes(n, dims, axes)
    mode, rounding = (
        n.text_attr("mode", "nearest"),
        n.text_attr("nearest_mode", "floor" if old else "round_prefer_floor"),
    )
    places = n.text_attr("coordinate_transformation_mode", "asymmetric" if old else "half_pixel")
    region = (
        n.constant(1, "the region").tolist()
        if places == "tf_crop_and_resize"
        else [0.0] * len(axes) + [1.0] * len(axes)
    )
    n.require(len(region) == 2 * len(axes), f"a region of {len(region)} numbers does not fit {len(axes)} axes")
    outside = n.float_attr("extrapolation_value")
    n.require(mode in ("nearest", "linear", "cubic"), f"mode={mode} is not known")
    n.ignore("antialias", "cubic_coeff_a", "exclude_outside", "keep_aspect_ratio_policy")  # not every mode uses these
    y = x
    for i, (axis, scale, count) in enumerate(zip(axes, scales, sizes, strict=True)):
        size, span = dims[axis], (region[i], region[i + len(axes)])
        if count == size and math.isclose(scale, 1.0) and span == (0.0, 1.0):
            continue
        n.require(size > 0 and count > 0, f"{size} entries cannot be resized to {count}")
        at = _places(n, places, size, count, scale, span)
        missing = (at < 0) | (at > size - 1) if places == "tf_crop_and_resize" else np.zeros(count, bool)
        if mode == "nearest" and not missing.any():
            y = pick(n, y, axis, _nearest(n, at, size, rounding))
            continue
        if mode == "nearest":
            taps = Taps(_nearest(n, at, size, rounding)[:, None], np.ones((count, 1)), np.zeros(count))
        else:
            taps = _weights(n, mode, at, scale, size)
        taps = Taps(taps.places, np.where(missing[:, None], 0.0, taps.weights), np.where(missing, outside, 0.0))
        y = resample(n, y, axis, taps)
    return y if y is not x else n.tensor(0)


# ---------------------------------------------------------------------------------------- sampling


def _grid_sample(n: OnnxNode) -> Result:
    x, grid = n.value(0), n.value(1)
    mode = {"bilinear": "linear", "bicubic": "cubic"}.get(n.text_attr("mode", "linear"), n.text_attr("mode", "linear"))
    dtype = x.type.dtype
    wide = "f64" if "f64" in (dtype, grid.type.dtype) else "f32"
    x, grid = (n.cast(v, wide) for v in (x, grid))
    y = grid_sample(n, x, grid, mode, n.text_attr("padding_mode", "zeros"), bool(n.int_attr("align_corners")))
    return n.cast(y, dtype)


def _affine_grid(n: OnnxNode) -> Result:
    theta, size = n.value(0), n.ints(1, "the size")
    space, corners = size[2:], n.int_attr("align_corners")
    rank = len(space)
    n.require(theta.type.dims == (size[0], rank, rank + 1), f"matrices {theta.type} do not fit size {list(size)}")
    n.room(math.prod(size))
    lines = [np.linspace(-1, 1, m) if corners else (2 * np.arange(m) + 1) / m - 1 for m in space]
    base = np.stack([*reversed(np.meshgrid(*lines, indexing="ij")), np.ones(space)], axis=-1).reshape(-1, rank + 1)
    dtype = np.float64 if theta.type.dtype == "f64" else np.float32
    y = reshape(n, n.emit("matmul", base.astype(dtype), widened(n, theta), tb=True), (size[0], *space, rank))
    return n.cast(y, theta.type.dtype)


def _regions(n: OnnxNode, rois: Value, first: int, count: int, samples: int) -> Value:
    """Compute sample positions along one dimension (0: x, 1: y) of each region, [regions, count, samples]."""
    scale, shift = n.float_attr("spatial_scale", 1.0), 0.0
    half = (
        n.text_attr("coordinate_transformation_mode", "half_pixel" if n.opset >= 16 else "output_half_pixel")
        == "half_pixel"
    )
    shift = 0.5 if half else 0.0

    def bound(i: int) -> Value:
        edge = cut(n, rois, 1, i, i + 1)
        edge = edge if scale == 1.0 else n.emit("mul", edge, scale)
        return n.emit("sub", edge, shift) if shift else edge

    low, high = bound(first), bound(first + 2)
    length = n.emit("sub", high, low)
    length = length if half else n.emit("maximum", length, 1.0)
    steps = ((np.arange(n.room(count * samples)) + 0.5) / (count * samples)).astype(
        np.float64 if rois.type.dtype == "f64" else np.float32
    )
    return n.emit("add", low, n.emit("mul", length, steps.reshape(1, -1)))


def _roi_align(n: OnnxNode) -> Result:
    x, rois, image = n.value(0), n.value(1), n.value(2)
    rows, columns = n.int_attr("output_height", 1), n.int_attr("output_width", 1)
    samples, mode = n.int_attr("sampling_ratio"), n.text_attr("mode", "avg")
    n.require(samples > 0, "sampling_ratio=0 takes a number of samples that depends on the regions at run time")
    n.require(mode in ("avg", "max"), f"mode={mode} is not known")
    count, (height, width) = rois.type.dims[0], x.type.dims[2:]
    y = reshape(n, _regions(n, rois, 1, rows, samples), (count, rows * samples, 1))
    x_at = reshape(n, _regions(n, rois, 0, columns, samples), (count, 1, columns * samples))
    shape = (count, rows * samples, columns * samples)
    places, valid = [], None
    for at, size in ((y, height), (x_at, width)):
        inside = n.emit(
            "and", n.emit("less_equal", n.literal(-1.0, at.type.dtype), at), n.emit("less_equal", at, float(size))
        )
        valid = inside if valid is None else n.emit("and", valid, inside)
        places.append(n.emit("broadcast", between(n, at, 0.0, size - 1.0), shape=shape))
    assert valid is not None
    which = reshape(n, n.cast(image, "i64"), (count, 1, 1))
    keep = reshape(n, valid, (*shape, 1))
    bins = (count, rows, samples, columns, samples, x.type.dims[1])
    if mode == "avg":
        samples_read = n.emit("where", keep, read_between(n, x, which, places, "linear", ends_outside(n)), 0.0)
        total = n.emit("mean", reshape(n, samples_read, bins), axes=(2, 4))
    else:  # the largest share of a single neighbour, not of a weighted sum
        shares = corners_at(n, x, which, places, "linear", ends_outside(n))
        best = shares[0]
        for share in shares[1:]:
            best = n.emit("maximum", best, share)
        total = n.emit("max", reshape(n, n.emit("where", keep, best, 0.0), bins), axes=(2, 4))
    return transpose(n, total, (0, 3, 1, 2))


def _deform_conv(n: OnnxNode) -> Result:
    """Sample the operand for every tap of the kernel at its own place, then multiply with the weights."""
    x, w, offset = n.value(0), n.value(1), n.value(2)
    n.require(x.type.rank == 4, f"needs two spatial dimensions, got {x.type}")
    batch, channels, *_ = x.type.dims
    outs, per_group = w.type.dims[:2]
    kernel = kernel_of(n, w)
    groups, shifts = n.int_attr("group", 1), n.int_attr("offset_group", 1)
    strides, dilations = n.ints_attr("strides") or (1, 1), n.ints_attr("dilations") or (1, 1)
    pads = n.ints_attr("pads") or (0, 0, 0, 0)
    taps, (rows, columns) = math.prod(kernel), offset.type.dims[2:]
    n.require(
        groups > 0 and shifts > 0 and channels % shifts == 0 and outs % groups == 0,
        f"groups do not fit {x.type} and {w.type}",
    )
    n.require(
        per_group * groups == channels,
        f"{x.type} has {channels} channels, the weight {w.type} takes {per_group * groups}",
    )
    n.require(
        offset.type.dims[1] == shifts * taps * 2, f"offsets {offset.type} do not fit {shifts} groups of {taps} places"
    )
    n.room(taps * max(rows, columns))
    size = channels // shifts
    moved = reshape(n, offset, (batch, shifts, taps, 2, rows, columns))
    dtype = np.float64 if x.type.dtype == "f64" else np.float32
    base = []
    for d, count in enumerate((rows, columns)):
        tap = np.arange(taps).reshape(-1, 1, 1) // (kernel[1] if d == 0 else 1) % kernel[d]
        line = np.arange(count).reshape((-1, 1) if d == 0 else (1, -1))
        base.append((tap * dilations[d] + line * strides[d] - pads[d]).astype(dtype))
    parts = []
    for g in range(shifts):
        offsets = cut(n, moved, 1, g, g + 1)
        at = [
            n.emit("add", reshape(n, cut(n, offsets, 3, d, d + 1), (batch, taps, rows, columns)), base[d])
            for d in (0, 1)
        ]
        value = read_between(
            n, cut(n, x, 1, g * size, (g + 1) * size), images(n, batch, 4), at, "linear", zeros_outside(n)
        )
        if n.has(4):
            mask = reshape(n, n.value(4), (batch, shifts, taps, rows, columns))
            value = n.emit("mul", value, reshape(n, cut(n, mask, 1, g, g + 1), (batch, taps, rows, columns, 1)))
        parts.append(transpose(n, value, (0, 4, 1, 2, 3)))
    columns_of = concat(n, parts, 1)
    flat = reshape(n, columns_of, (batch, groups, per_group * taps, rows * columns))
    y = n.emit("matmul", reshape(n, w, (groups, outs // groups, per_group * taps)), flat)
    y = reshape(n, y, (batch, outs, rows, columns))
    return n.emit("add", y, reshape(n, n.value(3), (1, outs, 1, 1))) if n.has(3) else y


RULES: dict[str, Rule] = {
    "Resize": _resize,
    "Upsample": _resize,
    "GridSample": _grid_sample,
    "AffineGrid": _affine_grid,
    "RoiAlign": _roi_align,
    "DeformConv": _deform_conv,
}
