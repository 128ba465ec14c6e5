"""ONNX operators over windows: pooling with places, by norms and back, blocks as columns, and normalisation by neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, floor, inf, prod

import numpy as np

from penstock.ir.graph import Value
from penstock.ir.types import FLOATS

from ..formulas.elementwise import power, root
from ..formulas.indexing import lowest_of
from ..formulas.layout import axis_of, cut, reshape
from .neural import window_attrs
from .node import Node, Result, Rule


def _max_pool(n: Node) -> Result | Sequence[Result]:
    by_column = n.int_attr("storage_order")  # speaks of the second result
    x, kernel = n.value(), n.ints_attr("kernel_shape")
    window = window_attrs(n, kernel)
    y = n.emit("max_pool", x, window=kernel, **window)
    return y if n.wanted == 1 else (y, _places(n, x, y, kernel, window, bool(by_column)))


def _places(n: Node, x: Value, y: Value, kernel: Sequence[int], window: dict[str, tuple[int, ...]], by_column: bool) -> Value:
    """Where in the whole tensor the first largest entry of each window stands: tap by tap the largest so far and its place."""
    space, out, r = x.type.dims[2:], y.type.dims[2:], len(kernel)
    pads, strides, dilations = window["pads"], window["strides"], window["dilations"]
    dtype = x.type.dtype
    lowest = -inf if dtype in FLOATS else lowest_of(dtype)
    padded = n.emit("pad", x, low=(0, 0, *pads[:r]), high=(0, 0, *pads[r:]), value=float(lowest)) if any(pads) else x
    n.require(not any(pads) or dtype not in ("i64", "u64"), f"places in padded windows of {dtype} are not supported")
    weights = [prod(space[:i]) if by_column else prod(space[i + 1 :]) for i in range(r)]
    line = n.emit("iota", dtype="i64", shape=(x.type.dims[0], 1, *(1,) * r), axis=0)
    start = n.emit(
        "mul",
        n.emit("add", n.emit("mul", line, x.type.dims[1]), n.emit("iota", dtype="i64", shape=(x.type.dims[1], *(1,) * r), axis=0)),
        prod(space),
    )
    for i in range(r):
        step = np.arange(out[i]) * (strides[i] * weights[i])
        start = n.emit("add", start, step.reshape((-1, *(1,) * (r - 1 - i))))
    best: Value | None = None
    place: Value | None = None
    for tap in np.ndindex(*kernel):
        begin = [t * d for t, d in zip(tap, dilations, strict=True)]
        stop = tuple(b + (m - 1) * s + 1 for b, m, s in zip(begin, out, strides, strict=True))
        value = n.emit("slice", padded, start=(0, 0, *begin), stop=(*x.type.dims[:2], *stop), step=(1, 1, *strides))
        offset = sum((b - p) * weight for b, p, weight in zip(begin, pads[:r], weights, strict=True))
        here = n.emit("add", start, offset)
        if best is None or place is None:
            best, place = value, here
        else:
            larger = n.emit("less", best, value)
            best, place = n.emit("where", larger, value, best), n.emit("where", larger, here, place)
    assert place is not None
    return place if place.type.dims == y.type.dims else n.emit("broadcast", place, shape=y.type.dims)


def _max_unpool(n: Node) -> Result:
    x, places, kernel = n.value(0), n.value(1), n.ints_attr("kernel_shape")
    r = len(kernel)
    strides, pads = n.ints_attr("strides") or (1,) * r, n.ints_attr("pads") or (0,) * 2 * r
    n.require(x.type.rank == r + 2 and len(strides) == r and len(pads) == 2 * r, f"attributes do not fit {x.type}")
    sizes = [(m - 1) * s - p - q + k for m, s, p, q, k in zip(x.type.dims[2:], strides, pads[:r], pads[r:], kernel, strict=True)]
    own = (*x.type.dims[:2], *sizes)
    zeros = n.emit("const", value=0.0, dtype=x.type.dtype, shape=(prod(own),))
    y = reshape(n, n.emit("scatter", zeros, reshape(n, places, (x.type.size,)), reshape(n, x, (x.type.size,)), axis=0), own)
    if not n.has(2):
        return y
    wanted = n.ints(2, "the shape")
    n.require(
        len(wanted) == len(own) and all(a >= b for a, b in zip(wanted, own, strict=True)), f"shape {list(wanted)} is smaller than {y.type}"
    )
    return n.emit("pad", y, low=(0,) * len(own), high=tuple(a - b for a, b in zip(wanted, own, strict=True)))


def _lp_pool(n: Node) -> Result:
    p, kernel = n.int_attr("p", 2), n.ints_attr("kernel_shape")
    n.require(p > 0, f"p={p} must be positive")
    powers = power(n, n.emit("abs", n.value()), float(p))
    mean = n.emit("avg_pool", powers, window=kernel, include_pad=True, **window_attrs(n, kernel))
    return root(n, n.emit("mul", mean, float(prod(kernel))), float(p))


def _global_lp_pool(n: Node) -> Result:
    p, x = n.int_attr("p", 2), n.value()
    n.require(p > 0, f"p={p} must be positive")
    total = n.emit("sum", power(n, n.emit("abs", x), float(p)), axes=tuple(range(2, x.type.rank)), keep=True)
    return root(n, total, float(p))


def _col2im(n: Node) -> Result:
    """Every tap of the block is put back in its place, and all are added up."""
    x, space, block = n.value(), n.ints(1, "the shape"), n.ints(2, "the block")
    r = len(space)
    dilations, strides, pads = n.ints_attr("dilations") or (1,) * r, n.ints_attr("strides") or (1,) * r, n.ints_attr("pads") or (0,) * 2 * r
    n.require(len(block) == len(dilations) == len(strides) == r and len(pads) == 2 * r, f"attributes do not fit {r} dimensions")
    full = [size + pads[i] + pads[i + r] for i, size in enumerate(space)]
    counts = [(f - d * (k - 1) - 1) // s + 1 for f, d, k, s in zip(full, dilations, block, strides, strict=True)]
    batch, width, length = x.type.dims
    taps = prod(block)
    n.require(width % taps == 0 and length == prod(counts), f"{x.type} does not hold {prod(counts)} blocks of {list(block)}")
    parts = reshape(n, x, (batch, width // taps, taps, *counts))
    total: Value | None = None
    for i, tap in enumerate(np.ndindex(*block)):
        one = reshape(n, cut(n, parts, 2, i, i + 1), (batch, width // taps, *counts))
        low = [t * d for t, d in zip(tap, dilations, strict=True)]
        high = [f - b - (c - 1) * s - 1 for f, b, c, s in zip(full, low, counts, strides, strict=True)]
        spread = n.emit("pad", one, low=(0, 0, *low), high=(0, 0, *high), inner=(0, 0, *(s - 1 for s in strides)))
        total = spread if total is None else n.emit("add", total, spread)
    assert total is not None
    for i, size in enumerate(space):
        total = cut(n, total, i + 2, pads[i], pads[i] + size)
    return total


def _local_response(n: Node) -> Result:
    x, size = n.value(), n.int_attr("size")
    n.require(size > 0 and x.type.rank >= 3, f"size={size} channels of {x.type}")
    batch, channels = x.type.dims[:2]
    lines = reshape(n, n.emit("mul", x, x), (batch, 1, channels, prod(x.type.dims[2:])))
    low, high = floor((size - 1) / 2), ceil((size - 1) / 2)
    mean = n.emit("avg_pool", lines, window=(size, 1), strides=(1, 1), pads=(low, 0, high, 0), include_pad=True)
    total = n.emit("add", n.emit("mul", reshape(n, mean, x.type.dims), n.float_attr("alpha", 1e-4)), n.float_attr("bias", 1.0))
    return n.emit("mul", x, power(n, total, -n.float_attr("beta", 0.75)))


def _lp_normalization(n: Node) -> Result:
    x, p = n.value(), n.int_attr("p", 2)
    n.require(p in (1, 2), f"p={p} is not known, only 1 and 2")
    axis = axis_of(n, n.int_attr("axis", -1), x.type.rank)
    total = n.emit("sum", n.emit("abs", x) if p == 1 else n.emit("mul", x, x), axes=(axis,), keep=True)
    nothing = n.emit("equal", total, 0.0)
    safe = n.emit("where", nothing, n.literal(1.0, x.type.dtype), total)
    # What has no length stays 0: x is 0 there.
    return n.emit("div", x, n.emit("sqrt", safe) if p == 2 else safe)


def _mean_variance(n: Node) -> Result:
    x = n.value()
    axes = tuple(sorted(axis_of(n, a, x.type.rank) for a in n.ints_attr("axes") or (0, 2, 3)))
    centred = n.emit("sub", x, n.emit("mean", x, axes=axes, keep=True))
    variance = n.emit("mean", n.emit("mul", centred, centred), axes=axes, keep=True)
    return n.emit("div", centred, n.emit("add", root(n, variance), 1e-9))


RULES: dict[str, Rule] = {
    "MaxPool": _max_pool,
    "MaxUnpool": _max_unpool,
    "LpPool": _lp_pool,
    "GlobalLpPool": _global_lp_pool,
    "Col2Im": _col2im,
    "LRN": _local_response,
    "LpNormalization": _lp_normalization,
    "MeanVarianceNormalization": _mean_variance,
}
