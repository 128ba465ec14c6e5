"""Images sampled between their entries, at places that are computed at run time.

Each sample is a weighted sum over neighbours. Each neighbour is one lookup of all channels, so the image and the places
have gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from math import prod

from penstock.frontends.writer import Writer
from penstock.ir.graph import Value

from .elementwise import between
from .layout import reshape, transpose

# Maps an index, a whole number in floating point, to the index to read and whether it counts (None: always).
Border = Callable[[Value, int], tuple[Value, Value | None]]

_CUBIC = -0.75


def reflected(w: Writer, x: Value, low: float, high: float) -> Value:
    """Reflect x at both ends until it lies between them."""
    span = high - low
    if span <= 0:
        return w.emit("const", value=low, dtype=x.type.dtype, shape=x.type.dims)
    distance = w.emit("abs", w.emit("sub", x, low))
    turns = w.emit("floor", w.emit("div", distance, span))
    offset = w.emit("sub", distance, w.emit("mul", turns, span))
    halves = w.emit("mul", turns, 0.5)
    even = w.emit("equal", w.emit("floor", halves), halves)
    return w.emit("where", even, w.emit("add", offset, low), w.emit("sub", high, offset))


def zeros_outside(w: Writer) -> Border:
    def rule(index: Value, size: int) -> tuple[Value, Value | None]:
        inside = w.emit("and", w.emit("less_equal", w.literal(0, index.type.dtype), index), w.emit("less", index, size))
        return between(w, index, 0, size - 1), inside

    return rule


def ends_outside(w: Writer) -> Border:
    return lambda index, size: (between(w, index, 0, size - 1), None)


def reflections_outside(w: Writer, corners: bool) -> Border:
    def rule(index: Value, size: int) -> tuple[Value, Value | None]:
        low, high = (0.0, size - 1.0) if corners else (-0.5, size - 0.5)
        return between(w, reflected(w, index, low, high), 0, size - 1), None

    return rule


def neighbours(w: Writer, at: Value, mode: str) -> list[tuple[Value, Value | None]]:
    """Return the indices around places along one dimension, as whole numbers, and their weights (None: one)."""
    if mode == "nearest":
        return [(w.emit("round", at), None)]
    base = w.emit("floor", at)
    up = w.emit("sub", at, base)
    down = w.emit("sub", w.literal(1.0, at.type.dtype), up)
    if mode == "linear":
        return [(base, down), (w.emit("add", base, 1.0), up)]

    def near(x: Value) -> Value:
        inner = w.emit("sub", w.emit("mul", x, _CUBIC + 2), _CUBIC + 3)
        return w.emit("add", w.emit("mul", w.emit("mul", inner, x), x), 1.0)

    def far(x: Value) -> Value:  # for 1 + x
        y = w.emit("add", x, 1.0)
        inner = w.emit("add", w.emit("mul", w.emit("sub", w.emit("mul", y, _CUBIC), 5 * _CUBIC), y), 8 * _CUBIC)
        return w.emit("sub", w.emit("mul", inner, y), 4 * _CUBIC)

    weights = (far(up), near(up), near(down), far(down))
    return [
        (base if d == 0 else w.emit("add", base, float(d)), weight)
        for d, weight in zip((-1, 0, 1, 2), weights, strict=True)
    ]


def corners_at(w: Writer, x: Value, image: Value, at: Sequence[Value], mode: str, border: Border) -> list[Value]:
    """Compute the share of each neighbour in the result, as [..., channels].

    x is [batch, channels, space ...]. `image` (i64) is the entry of the batch to read, `at` a place along each spatial
    dimension.
    """
    batch, channels, *space = x.type.dims
    w.require(len(at) == len(space), f"{len(at)} coordinates do not fit {x.type}")
    table = reshape(w, transpose(w, x, (0, *range(2, len(space) + 2), 1)), (batch * prod(space), channels))
    lines: list[list[tuple[Value, Value | None]]] = []
    for i, (place, size) in enumerate(zip(at, space, strict=True)):
        line: list[tuple[Value, Value | None]] = []
        for index, weight in neighbours(w, place, mode):
            where, inside = border(index, size)
            position = w.emit("cast", where, dtype="i64")
            stride = prod(space[i + 1 :])
            position = position if stride == 1 else w.emit("mul", position, stride)
            if inside is not None:
                weight = (
                    w.emit("cast", inside, dtype=x.type.dtype)
                    if weight is None
                    else w.emit("where", inside, weight, 0.0)
                )
            line.append((position, weight))
        lines.append(line)
    start = w.emit("mul", image, prod(space))
    shares: list[Value] = []
    for corner in product(*lines):
        position, weight = start, None
        for part, factor in corner:
            position = w.emit("add", position, part)
            weight = factor if weight is None else weight if factor is None else w.emit("mul", weight, factor)
        value = w.emit("gather", table, position, axis=0)
        if weight is not None:
            value = w.emit("mul", value, reshape(w, weight, (*weight.type.dims, 1)))
        shares.append(value)
    return shares


def read_between(w: Writer, x: Value, image: Value, at: Sequence[Value], mode: str, border: Border) -> Value:
    """Sample x at the places, as [..., channels]."""
    total, *parts = corners_at(w, x, image, at, mode, border)
    for part in parts:
        total = w.emit("add", total, part)
    return total


def images(w: Writer, batch: int, rank: int) -> Value:
    """Number the entries of the batch along the first of `rank` dimensions: each of them reads its own image."""
    return w.emit("iota", dtype="i64", shape=(batch, *(1,) * (rank - 1)), axis=0)


def grid_sample(w: Writer, x: Value, grid: Value, mode: str, padding: str, corners: bool) -> Value:
    """Sample x [batch, channels, space ...] at the places in grid [batch, out ..., dimensions].

    Coordinates are from -1 to 1, the last dimension first.
    """
    space, out = x.type.dims[2:], grid.type.dims[1:-1]
    rank = len(space)
    w.require(
        grid.type.dims[-1] == rank and grid.type.dims[0] == x.type.dims[0],
        f"the grid {grid.type} does not fit {x.type}",
    )
    w.require(mode in ("nearest", "linear", "cubic"), f"mode={mode} is not known")
    w.require(padding in ("zeros", "border", "reflection"), f"padding_mode={padding} is not known")
    at: list[Value] = []
    for i, size in enumerate(space):
        starts = (*(0,) * (rank + 1), rank - 1 - i)
        part = w.emit("slice", grid, start=starts, stop=(*grid.type.dims[:-1], rank - i), step=(1,) * (rank + 2))
        place = reshape(w, part, (x.type.dims[0], *out))
        slope, shift = ((size - 1) / 2, (size - 1) / 2) if corners else (size / 2, (size - 1) / 2)
        place = w.emit("add", w.emit("mul", place, slope), shift)
        if mode == "nearest":
            place = w.emit("round", place)
        if padding == "border":
            place = between(w, place, 0, size - 1)
        elif padding == "reflection":
            low, high = (0.0, size - 1.0) if corners else (-0.5, size - 0.5)
            inside = w.emit(
                "and", w.emit("less_equal", w.literal(low, place.type.dtype), place), w.emit("less_equal", place, high)
            )
            place = w.emit("where", inside, place, reflected(w, place, low, high))
        at.append(place)
    border = {"zeros": zeros_outside(w), "border": ends_outside(w), "reflection": reflections_outside(w, corners)}[
        padding
    ]
    y = read_between(w, x, images(w, x.type.dims[0], rank + 1), at, mode, border)
    return transpose(w, y, (0, rank + 1, *range(1, rank + 1)))
