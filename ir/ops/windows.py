"""Sliding windows over the spatial dimensions: their geometry, for convolution and pooling, and the rows of pooling."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from penstock.ir.attrs import Attr
from penstock.ir.types import TensorType

from .table import Required, Types, Values, ints, need, need_floats, need_numbers, row


class Window(NamedTuple):
    """Geometry of a sliding window over the spatial dimensions: the same for convolution and pooling."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    low: tuple[int, ...]
    high: tuple[int, ...]
    dilations: tuple[int, ...]

    def out_sizes(self, sizes: Sequence[int]) -> tuple[int, ...]:
        extents = []
        for n, k, s, p, q, d in zip(sizes, self.kernel, self.strides, self.low, self.high, self.dilations, strict=True):
            extent = n + p + q - d * (k - 1) - 1
            need(extent >= 0, f"a window of {d * (k - 1) + 1} does not fit into {n} padded by {p} and {q}")
            extents.append(extent // s + 1)
        return tuple(extents)


def window_of(a: Values, kernel: tuple[int, ...]) -> Window:
    """Return the window that an op's attributes describe: `pads` is all lows, then all highs, as in ONNX."""
    r = len(kernel)
    strides, dilations, pads = (ints(a[k]) for k in ("strides", "dilations", "pads"))
    strides, dilations, pads = strides or (1,) * r, dilations or (1,) * r, pads or (0,) * 2 * r
    need(
        len(strides) == len(dilations) == r and len(pads) == 2 * r,
        f"strides, dilations and pads do not fit {r} spatial dimensions",
    )
    need(min(kernel) >= 1, f"a window must have 1 or more positions in each dimension, got {list(kernel)}")
    need(
        min(strides) >= 1 and min(dilations) >= 1,
        f"strides and dilations must be 1 or more, got {list(strides)} and {list(dilations)}",
    )
    need(min(pads) >= 0, f"padding must not be negative, got {list(pads)}")
    return Window(kernel, strides, pads[:r], pads[r:], dilations)


def _pool(x: Types, a: Values) -> tuple[TensorType, ...]:
    kernel = ints(a["window"])
    need(x[0].rank == len(kernel) + 2, f"window {list(kernel)} does not fit the spatial dimensions of {x[0]}")
    return (x[0].with_shape((*x[0].shape[:2], *window_of(a, kernel).out_sizes(x[0].dims[2:]))),)


def _max_pool(x: Types, a: Values) -> tuple[TensorType, ...]:
    need_numbers(x)
    return _pool(x, a)


def _avg_pool(x: Types, a: Values) -> tuple[TensorType, ...]:
    need_floats(x)
    return _pool(x, a)


def _max_pool_grad(x: Types, a: Values) -> tuple[TensorType, ...]:
    need_floats(x)
    (y,) = _pool(x[:1], a)
    need(y == x[1] == x[2], f"pooling {x[0]} gives {y}, but result and gradient are {x[1]} and {x[2]}")
    return (x[0],)


def _avg_pool_grad(x: Types, a: Values) -> tuple[TensorType, ...]:
    out = x[0].with_shape(ints(a["shape"]))
    (y,) = _avg_pool((out,), a)
    need(y == x[0], f"pooling {out} gives {y}, but the gradient is {x[0]}")
    return (out,)


def _pool_flops(x: Types, y: Types, a: Values) -> float:
    return float(max(t.size for t in (*x, *y)) * prod(ints(a["window"])))


WINDOW: dict[str, Attr | Required] = {"strides": (), "pads": (), "dilations": ()}
_POOL: dict[str, Attr | Required] = {"window": Required(tuple), **WINDOW}

ROWS = (
    row(
        "max_pool",
        "window",
        1,
        _max_pool,
        "largest in each window; padding never wins",
        flops=_pool_flops,
        dims="n c y...* -> n c y...*",
        **_POOL,  # type: ignore[arg-type]
    ),
    row(
        "max_pool_grad",
        "window",
        3,
        _max_pool_grad,
        "from (x, y, dy): dy goes to the first largest of each window",
        flops=_pool_flops,
        dims="n c y...*, n c y...*, n c y...* -> n c y...* | 2",
        **_POOL,  # type: ignore[arg-type]
    ),
    row(
        "avg_pool",
        "window",
        1,
        _avg_pool,
        "mean of each window; `include_pad` counts padding",
        flops=_pool_flops,
        include_pad=False,
        dims="n c y...* -> n c y...* | 0",
        **_POOL,  # type: ignore[arg-type]
    ),
    row(
        "avg_pool_grad",
        "window",
        1,
        _avg_pool_grad,
        "from dy; `shape` is x's",
        flops=_pool_flops,
        include_pad=False,
        shape=Required(tuple),
        dims="n c y...* -> n c y...* | 0",
        **_POOL,  # type: ignore[arg-type]
    ),
)
