"""Convolutions and pooling of ATen."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from penstock.frontends.formulas.layout import reshape
from penstock.frontends.formulas.norms import scaled
from penstock.frontends.formulas.resizing import resample, taps_of
from penstock.frontends.formulas.windows import (
    PaddedWindow,
    average,
    largest_places,
    plane_places,
    transposed_sizes,
    window,
)
from penstock.frontends.torch.node import Absent, Result, Rule, TorchNode
from penstock.ir.graph import Value


def _spread(numbers: Sequence[int], r: int, default: int = 1) -> tuple[int, ...]:
    """Expand one number to all spatial dimensions. Return one for each as they are."""
    numbers = tuple(numbers) or (default,)
    return tuple(numbers) * r if len(numbers) == 1 else tuple(numbers)


def _conv(n: TorchNode) -> Result:
    x, w = n.value("input"), n.value("weight")
    r = w.type.rank - 2
    batched = x.type.rank == r + 2
    x = x if batched else reshape(n, x, (1, *x.type.dims))
    strides, dilations = _spread(n.ints("stride"), r), _spread(n.ints("dilation"), r)
    pads, groups = _spread(n.ints("padding"), r, 0), int(n.arg("groups"))
    extra = _spread(n.ints("output_padding"), r, 0)
    if n.arg("transposed"):
        full = transposed_sizes(x.type.dims[2:], w.type.dims[2:], strides, dilations, extra)
        shape = (x.type.dims[0], w.type.dims[1] * groups, *(size - 2 * p for size, p in zip(full, pads, strict=True)))
        y = n.emit(
            "conv_grad_input", x, w, shape=shape, strides=strides, pads=pads + pads, dilations=dilations, groups=groups
        )
    else:
        y = n.emit("conv", x, w, strides=strides, pads=pads + pads, dilations=dilations, groups=groups)
    return _unbatched(n, scaled(n, y, None, n.value("bias") if n.has("bias") else None), batched)


def _window(n: TorchNode, x: Value, r: int) -> PaddedWindow:
    kernel, pads = _spread(n.ints("kernel_size"), r), _spread(n.ints("padding"), r, 0)
    strides, dilations = _spread(n.ints("stride") or kernel, r), _spread(n.ints("dilation"), r)
    return window(x.type.dims[2:], kernel, strides, dilations, pads + pads, bool(n.arg("ceil_mode")))


def _batched(n: TorchNode, r: int) -> tuple[Value, bool]:
    x = n.value()
    return (x, True) if x.type.rank == r + 2 else (reshape(n, x, (1, *x.type.dims)), False)


def _unbatched(n: TorchNode, y: Value, batched: bool) -> Value:
    return y if batched else reshape(n, y, y.type.dims[1:])


def max_pool(r: int) -> Rule:
    def rule(n: TorchNode) -> Result:
        x, batched = _batched(n, r)
        return _largest(n, x, _window(n, x, r), batched)

    return rule


def _largest(n: TorchNode, x: Value, at: PaddedWindow, batched: bool) -> Result:
    """Return the largest entries and, if they are used, their places in the plane of each channel."""
    y = n.emit("max_pool", x, window=at.kernel, **at.attrs)
    if not n.is_used(1):
        return _unbatched(n, y, batched), Absent("nothing asked for the places")
    places = largest_places(n, x, y.type.dims[2:], at, plane_places(x.type.dims[2:]))
    return _unbatched(n, y, batched), _unbatched(n, places, batched)


def avg_pool(r: int) -> Rule:
    def rule(n: TorchNode) -> Result:
        x, batched = _batched(n, r)
        at, fixed = _window(n, x, r), n.arg("divisor_override")
        counted = bool(n.arg("count_include_pad"))
        if not fixed:
            return _unbatched(n, average(n, x, at, counted), batched)
        # Zeros all around, so that every mean is over whole windows.
        x = n.emit("pad", x, low=(0, 0, *at.low), high=(0, 0, *at.high)) if any(at.low + at.high) else x
        y = n.emit("avg_pool", x, window=at.kernel, strides=at.strides, include_pad=False)
        return _unbatched(n, n.emit("mul", y, prod(at.kernel) / fixed), batched)

    return rule


def adaptive_max_pool(r: int) -> Rule:
    def rule(n: TorchNode) -> Result:
        x, batched = _batched(n, r)
        sizes, wanted = x.type.dims[2:], n.ints("output_size")
        even = all(out and size % out == 0 for size, out in zip(sizes, wanted, strict=True))
        n.require(
            even, f"{list(sizes)} does not divide into {list(wanted)} windows of one size, others are not supported"
        )
        kernel = tuple(size // out for size, out in zip(sizes, wanted, strict=True))
        return _largest(n, x, window(sizes, kernel, kernel, (1,) * r, (0,) * 2 * r, False), batched)

    return rule


def adaptive_pool(r: int) -> Rule:
    """Make the rule of an adaptive mean: over equal windows where sizes divide, else by matrices of shares."""

    def rule(n: TorchNode) -> Result:
        x, batched = _batched(n, r)
        sizes, wanted = x.type.dims[2:], n.ints("output_size")
        if all(size % out == 0 for size, out in zip(sizes, wanted, strict=True)):
            kernel = tuple(size // out for size, out in zip(sizes, wanted, strict=True))
            whole = wanted == (1,) * r
            y = (
                n.emit("mean", x, axes=tuple(range(2, r + 2)), keep=True)
                if whole
                else n.emit("avg_pool", x, window=kernel, strides=kernel, include_pad=False)
            )
        else:
            y = x
            for i, (size, out) in enumerate(zip(sizes, wanted, strict=True)):
                shares = torch.nn.functional.adaptive_avg_pool1d(torch.eye(size, dtype=torch.float64)[None], out)[0].T
                y = resample(n, y, 2 + i, taps_of(shares.numpy()))
        return _unbatched(n, y, batched)

    return rule


RULES: dict[str, Rule] = {
    "convolution": _conv,
    "max_pool2d_with_indices": max_pool(2),
    "max_pool3d_with_indices": max_pool(3),
    "adaptive_max_pool2d": adaptive_max_pool(2),
    "adaptive_max_pool3d": adaptive_max_pool(3),
    "avg_pool2d": avg_pool(2),
    "avg_pool3d": avg_pool(3),
    "_adaptive_avg_pool2d": adaptive_pool(2),
    "_adaptive_avg_pool3d": adaptive_pool(3),
}
