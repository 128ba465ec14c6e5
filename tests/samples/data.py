"""The contents of operands: each function draws an array of a type from a generator."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from penstock.ir.types import FLOATS, INTS, ITEM_BYTES, UNSIGNED, TensorType, numpy_dtype

HALF = ("f16", "bf16")
SINGLE = ("f32",)
NUMBERS = (*FLOATS, *INTS)

Array = np.ndarray
Draw = Callable[[np.random.Generator, TensorType], Array]


def normal(rng: np.random.Generator, t: TensorType) -> Array:
    """What most operations take: normal floats, small integers with repetitions, bools."""
    if t.dtype == "bool":
        drawn = rng.random(t.dims) > 0.5
    elif t.dtype in FLOATS:
        drawn = rng.standard_normal(t.dims)
    else:
        drawn = rng.integers(0 if t.dtype in UNSIGNED else -4, 5, t.dims)
    return np.asarray(drawn).astype(numpy_dtype(t.dtype))


def positive(rng: np.random.Generator, t: TensorType) -> Array:
    """At least 0.1, or 1 for integers."""
    if t.dtype in FLOATS:
        return np.asarray(np.abs(rng.standard_normal(t.dims)) + 0.1).astype(numpy_dtype(t.dtype))
    return np.asarray(rng.integers(1, 6, t.dims)).astype(numpy_dtype(t.dtype))


def fraction(rng: np.random.Generator, t: TensorType) -> Array:
    """Between 0.1 and 0.9: what 1 - beta^t may be."""
    return np.asarray(rng.uniform(0.1, 0.9, t.dims)).astype(numpy_dtype(t.dtype))


def any_number(rng: np.random.Generator, t: TensorType) -> Array:
    """Any integer that the type holds."""
    limits = np.iinfo(numpy_dtype(t.dtype))
    return np.asarray(rng.integers(limits.min, limits.max, t.dims, endpoint=True)).astype(numpy_dtype(t.dtype))


def ties(rng: np.random.Generator, t: TensorType) -> Array:
    """Few different values."""
    return np.asarray(rng.integers(0, 3, t.dims)).astype(numpy_dtype(t.dtype))


def nasty(rng: np.random.Generator, t: TensorType) -> Array:
    """Ties, infinities, both zeros and some nan."""
    values = np.array([0.0, -0.0, 1.0, -2.5, 1.0, np.inf, -np.inf, 3.0, -1e-3, np.nan])
    return rng.choice(values, t.dims).astype(numpy_dtype(t.dtype))


def halves(rng: np.random.Generator, t: TensorType) -> Array:
    """Whole numbers, those in the middle between two, and their neighbours."""
    near = np.asarray(rng.integers(-9, 9, t.dims) / 2).astype(numpy_dtype(t.dtype))
    return np.where(rng.random(t.dims) < 0.3, np.nextafter(near, near.dtype.type(100)), near).astype(near.dtype)


def patterns(rng: np.random.Generator, t: TensorType) -> Array:
    """The bits of normal floats, as integers."""
    floats = {2: "f16", 4: "f32", 8: "f64"}
    drawn = rng.standard_normal(t.dims).astype(numpy_dtype(floats[ITEM_BYTES[t.dtype]]))
    return drawn.view(numpy_dtype(t.dtype))


def shift(rng: np.random.Generator, t: TensorType) -> Array:
    """By how many bits, also by all and by more."""
    return np.asarray(rng.integers(0, 8 * ITEM_BYTES[t.dtype] + 3, t.dims)).astype(numpy_dtype(t.dtype))


def shift_either_way(rng: np.random.Generator, t: TensorType) -> Array:
    """Also by less than nothing, which moves everything out."""
    return np.asarray(rng.integers(-3, 4, t.dims)).astype(numpy_dtype(t.dtype))


def huge(rng: np.random.Generator, t: TensorType) -> Array:
    """Where exponentials overflow unless the largest is taken off first."""
    return np.asarray(rng.standard_normal(t.dims) * 300).astype(numpy_dtype(t.dtype))


def wrapping(rng: np.random.Generator, t: TensorType) -> Array:
    """The ends of an integer type, and what divides them badly."""
    limits = np.iinfo(numpy_dtype(t.dtype))
    return rng.choice(
        np.array([limits.min, limits.max, 0, 1, 7] + ([-1, -7] if limits.min else [3]), limits.dtype), t.dims
    )


def index(size: int) -> Draw:
    """Positions in a dimension, also counted from the end."""

    def draw(rng: np.random.Generator, t: TensorType) -> Array:
        low = 0 if t.dtype in UNSIGNED else -size
        return np.asarray(rng.integers(low, size, t.dims)).astype(numpy_dtype(t.dtype))

    return draw


def label(size: int) -> Draw:
    return lambda rng, t: np.asarray(rng.integers(0, size, t.dims)).astype(numpy_dtype(t.dtype))


def pieces(rng: np.random.Generator, t: TensorType) -> Array:
    """Rows of a learning rate: one starts every ten steps, all shapes come by, the last one never starts."""
    starts = 10.0 * np.arange(t.dims[0])
    starts[1:][-1:] = 1e18
    shapes = (np.arange(t.dims[0]) + rng.integers(0, 3)) % 3
    columns = (
        starts,
        rng.integers(1, 12, t.dims[0]),
        rng.uniform(0, 2, t.dims[0]),
        rng.uniform(0, 2, t.dims[0]),
        shapes,
    )
    return np.stack(columns, axis=1).astype(np.float64)


def at_step(number: float) -> Draw:
    return lambda rng, t: np.full(t.dims, number, numpy_dtype(t.dtype))


def temperatures(rng: np.random.Generator, t: TensorType) -> Array:
    """None, small ones and large ones."""
    return rng.choice(np.array([0.0, 0.25, 1.0, 3.0]), t.dims).astype(numpy_dtype(t.dtype))


def few(rng: np.random.Generator, t: TensorType) -> Array:
    """How many of the largest: all, one, some, more than there are."""
    return rng.choice(np.array([0, 1, 5, 1000]), t.dims).astype(numpy_dtype(t.dtype))


def shares(rng: np.random.Generator, t: TensorType) -> Array:
    """Shares of a whole, also none of it, and all of it."""
    return rng.choice(np.array([0.0, 0.3, 0.9, 1.0]), t.dims).astype(numpy_dtype(t.dtype))
