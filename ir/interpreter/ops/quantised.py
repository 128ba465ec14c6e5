"""NumPy rules for weights of 8 and 4 bits.

With `act=i8` a group of a row of x is rounded to r = round(x * (127 / largest)), half to even, in float32. There
`largest` is the largest absolute value of the group. Sums of r * (q - zero) are whole numbers. Each is multiplied by
the scale of the weight's group and by largest / 127. A group whose largest value is below 2^-120 counts as zeros. One
with nan or infinity gives nan.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .arrays import Array, Rule, Values, check_indices, wide
from .contractions import convolve

LEAST = 2.0**-120


def whole_numbers(q: Array, zeros: Array | None, bits: int, group: int) -> Array:
    """Return q - zero of every element, [rows, groups, group], as 32-bit integers."""
    if bits == 4:
        q = np.stack([q & 15, q >> 4], axis=-1).reshape(*q.shape[:-1], 2 * q.shape[-1])
    numbers = q.astype(np.int32).reshape(q.shape[0], q.shape[-1] // group, group)
    if zeros is not None:
        return np.asarray(numbers - zeros.astype(np.int32)[..., None])
    return numbers - 8 if bits == 4 else numbers


def dequantised(x: Sequence[Array], a: Values, dtype: np.dtype[np.floating]) -> Array:
    """Return the elements of a weight, from (q, scales[, zeros])."""
    numbers = whole_numbers(x[0], x[2] if len(x) > 2 else None, a["bits"], a["group"])
    scaled = numbers.astype(dtype) * x[1].astype(dtype)[..., None]
    return np.asarray(scaled.reshape(len(scaled), scaled.shape[1] * scaled.shape[2]))


def rounded_groups(x: Array, group: int) -> tuple[Array, Array]:
    """Return the groups of rows of x as whole numbers, and the size of a step of each."""
    groups = x.reshape(*x.shape[:-1], x.shape[-1] // group, group)
    largest = np.max(np.abs(groups), axis=-1, initial=0)
    counts = np.isfinite(largest) & (largest >= LEAST)
    factor = np.where(counts, x.dtype.type(127) / np.where(counts, largest, 1), 0).astype(x.dtype)
    numbers = np.rint(np.where(counts[..., None], groups, 0) * factor[..., None]).astype(np.int32)
    return numbers, np.where(np.isfinite(largest), largest / x.dtype.type(127), np.nan).astype(x.dtype)


def _matmul_q(x: Sequence[Array], a: Values) -> tuple[Array, ...]:
    data, q, scales, *zeros = x
    if a["act"] == "f32":
        return (np.matmul(wide(data), wide(dequantised(x[1:], a, data.dtype)).T),)
    numbers, steps = rounded_groups(data, a["group"])
    weights = whole_numbers(q, zeros[0] if zeros else None, a["bits"], a["group"])
    sums = np.einsum("...gi,ngi->...ng", numbers, weights)
    return (np.sum(wide(sums.astype(data.dtype)) * wide(scales.astype(data.dtype)) * wide(steps)[..., None, :], -1),)


def _matmul_bytes(x: Sequence[Array], a: Values) -> tuple[Array, ...]:
    data, weight, zero, zeros = (array.astype(np.int64) for array in x)
    return (np.matmul(data - zero, weight - zeros).astype(np.int32),)


def _conv_bytes(x: Sequence[Array], a: Values) -> tuple[Array, ...]:
    """Add up in 64-bit floats, which hold every sum."""
    data, weight, zero, zeros = (array.astype(np.float64) for array in x)
    less = weight - zeros.reshape(-1, *(1,) * (weight.ndim - 1))
    return (convolve((data - zero, less), a)[0].astype(np.int32),)


def _gather_q(x: Sequence[Array], a: Values) -> tuple[Array, ...]:
    indices, table = x[0], dequantised(x[1:], a, np.dtype(np.float32))
    check_indices("gather index", indices, -len(table), len(table))
    return (table[indices],)


RULES: dict[str, Rule] = {
    "matmul_q": _matmul_q,
    "matmul_bytes": _matmul_bytes,
    "conv_bytes": _conv_bytes,
    "gather_q": _gather_q,
}
