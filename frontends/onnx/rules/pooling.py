"""ONNX operators over windows: pooling by maxima (with their places), means and norms; MaxUnpool; and Col2Im."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from penstock.frontends.formulas.elementwise import power, root
from penstock.frontends.formulas.layout import cut, reshape
from penstock.frontends.formulas.windows import PaddedWindow, average, largest_places, plane_places
from penstock.frontends.onnx.node import OnnxNode, Result, Rule
from penstock.ir.graph import Value

from .neural import window_of


def _max_pool(n: OnnxNode) -> Result | Sequence[Result]:
    by_column = n.int_attr("storage_order")  # concerns the second result
    x, kernel = n.value(), n.ints_attr("kernel_shape")
    at = window_of(n, kernel)
    y = n.emit("max_pool", x, window=kernel, **at.attrs)
    return y if n.wanted == 1 else (y, _places(n, x, y, at, bool(by_column)))


def _places(n: OnnxNode, x: Value, y: Value, at: PaddedWindow, by_column: bool) -> Value:
    """Find the place in the whole tensor of the first largest entry of each window.

    `by_column` counts the first spatial dimension fastest.
    """
    space, r = x.type.dims[2:], len(at.kernel)
    weights = tuple(prod(space[:i]) for i in range(r)) if by_column else plane_places(space)
    within = largest_places(n, x, y.type.dims[2:], at, weights)
    channels = n.emit("iota", dtype="i64", shape=(prod(x.type.dims[:2]),), axis=0)
    return n.emit("add", within, n.emit("mul", reshape(n, channels, (*x.type.dims[:2], *(1,) * r)), prod(space)))


def _average_pool(n: OnnxNode) -> Result:
    return average(n, n.value(), window_of(n, n.ints_attr("kernel_shape")), bool(n.int_attr("count_include_pad")))


def _over_space(kind: str) -> Rule:
    return lambda n: n.emit(kind, n.value(), axes=tuple(range(2, n.type().rank)), keep=True)


def _max_unpool(n: OnnxNode) -> Result:
    x, places, kernel = n.value(0), n.value(1), n.ints_attr("kernel_shape")
    r = len(kernel)
    strides, pads = n.ints_attr("strides") or (1,) * r, n.ints_attr("pads") or (0,) * 2 * r
    n.require(x.type.rank == r + 2 and len(strides) == r and len(pads) == 2 * r, f"attributes do not fit {x.type}")
    sizes = [
        (m - 1) * s - p - q + k
        for m, s, p, q, k in zip(x.type.dims[2:], strides, pads[:r], pads[r:], kernel, strict=True)
    ]
    least = (*x.type.dims[:2], *sizes)
    zeros = n.emit("const", value=0.0, dtype=x.type.dtype, shape=(prod(least),))
    y = reshape(
        n, n.emit("scatter", zeros, reshape(n, places, (x.type.size,)), reshape(n, x, (x.type.size,)), axis=0), least
    )
    if not n.has(2):
        return y
    wanted = n.ints(2, "the shape")
    n.require(
        len(wanted) == len(least) and all(a >= b for a, b in zip(wanted, least, strict=True)),
        f"shape {list(wanted)} is smaller than {y.type}",
    )
    return n.emit("pad", y, low=(0,) * len(least), high=tuple(a - b for a, b in zip(wanted, least, strict=True)))


def _lp_pool(n: OnnxNode) -> Result:
    p, kernel = n.int_attr("p", 2), n.ints_attr("kernel_shape")
    n.require(p > 0, f"p={p} must be positive")
    powers = power(n, n.emit("abs", n.value()), float(p))
    mean = n.emit("avg_pool", powers, window=kernel, include_pad=True, **window_of(n, kernel).attrs)
    return root(n, n.emit("mul", mean, float(prod(kernel))), float(p))


def _global_lp_pool(n: OnnxNode) -> Result:
    p, x = n.int_attr("p", 2), n.value()
    n.require(p > 0, f"p={p} must be positive")
    total = n.emit("sum", power(n, n.emit("abs", x), float(p)), axes=tuple(range(2, x.type.rank)), keep=True)
    return root(n, total, float(p))


def _col2im(n: OnnxNode) -> Result:
    """Add up the entries of every tap of the block in their places."""
    x, space, block = n.value(), n.ints(1, "the shape"), n.ints(2, "the block")
    r = len(space)
    dilations, strides, pads = (
        n.ints_attr("dilations") or (1,) * r,
        n.ints_attr("strides") or (1,) * r,
        n.ints_attr("pads") or (0,) * 2 * r,
    )
    n.require(
        len(block) == len(dilations) == len(strides) == r and len(pads) == 2 * r,
        f"attributes do not fit {r} dimensions",
    )
    full = [size + pads[i] + pads[i + r] for i, size in enumerate(space)]
    counts = [(f - d * (k - 1) - 1) // s + 1 for f, d, k, s in zip(full, dilations, block, strides, strict=True)]
    batch, width, length = x.type.dims
    taps = prod(block)
    n.require(
        width % taps == 0 and length == prod(counts), f"{x.type} does not hold {prod(counts)} blocks of {list(block)}"
    )
    parts = reshape(n, x, (batch, width // taps, taps, *counts))
    total: Value | None = None
    for i, tap in enumerate(np.ndindex(*block)):
        part = reshape(n, cut(n, parts, 2, i, i + 1), (batch, width // taps, *counts))
        low = [t * d for t, d in zip(tap, dilations, strict=True)]
        high = [f - b - (c - 1) * s - 1 for f, b, c, s in zip(full, low, counts, strides, strict=True)]
        spread = n.emit("pad", part, low=(0, 0, *low), high=(0, 0, *high), inner=(0, 0, *(s - 1 for s in strides)))
        total = spread if total is None else n.emit("add", total, spread)
    assert total is not None
    for i, size in enumerate(space):
        total = cut(n, total, i + 2, pads[i], pads[i] + size)
    return total


RULES: dict[str, Rule] = {
    "AveragePool": _average_pool,
    "GlobalAveragePool": _over_space("mean"),
    "GlobalMaxPool": _over_space("max"),
    "MaxPool": _max_pool,
    "MaxUnpool": _max_unpool,
    "LpPool": _lp_pool,
    "GlobalLpPool": _global_lp_pool,
    "Col2Im": _col2im,
}
