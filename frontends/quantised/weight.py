"""A weight of 8 or 4 bits in the form that `matmul_q` and `gather_q` take, and the steps that readers share.

In: whole numbers of a matrix from 0 on, scales and zeros by groups along its rows. Out: a QuantisedWeight, whose
elements (q - zero) * scale are those of the source, bit by bit. What the form cannot hold is refused with the reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.ir.ops.quantised import GROUPS
from penstock.support.errors import UnsupportedModel

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class QuantisedWeight:
    """A matrix [n, k]: `q` is i8[n, k] or u8[n, k / 2], `scales` and `zeros` have an entry for each group of a row. No
    zeros mean 0 for 8 bits, 8 for 4. With an `order`, column i of the matrix belongs to element order[i] of the other
    operand."""

    q: Array
    scales: Array
    zeros: Array | None
    bits: int
    group: int
    order: Array | None = None


def refuse_unless(condition: bool, what: str, where: str) -> None:
    """Raise UnsupportedModel unless the condition holds."""
    if not condition:
        raise UnsupportedModel(what, where=where)


def weight_of(numbers: Array, scales: Array, zeros: Array | int, bits: int, where: str) -> QuantisedWeight:
    """Return a weight from numbers u8[n, k] below 2^bits, scales [n, groups], and zeros alike or one for all."""
    rows, columns = numbers.shape
    refuse_unless(bits in (4, 8), f"has {bits} bits, only 4 and 8 are read", where)
    groups = scales.shape[-1]
    refuse_unless(
        scales.shape == (rows, groups) and groups > 0 and columns % groups == 0,
        f"{list(scales.shape)} scales do not fit a matrix [{rows}, {columns}]",
        where,
    )
    group = columns // groups
    size = next((size for size in reversed(GROUPS) if group % size == 0), 0)
    refuse_unless(bool(size), f"groups of {group} are not read, only multiples of {GROUPS[0]}", where)
    times = group // size
    kind = np.float16 if scales.dtype == np.float16 else np.float32
    wide = np.repeat(scales.astype(kind), times, 1)
    of_groups = None if np.isscalar(zeros) else np.repeat(np.asarray(zeros).astype(np.int32), times, 1)
    middle = 1 << bits - 1
    if of_groups is None:
        of_groups = np.full(wide.shape, int(zeros), np.int32)
    if bits == 8:
        # Numbers move by 128, so zeros do.
        q, of_groups, middle = (numbers.astype(np.int16) - 128).astype(np.int8), of_groups - 128, 0
    else:
        q = (numbers[:, ::2] | numbers[:, 1::2] << 4).astype(np.uint8)
    if (of_groups == middle).all():
        return QuantisedWeight(q, wide, None, bits, size)
    refuse_unless(
        bool((of_groups >= 0).all() and (of_groups < 256).all()),
        f"has zeros of 8 bits below 128, such as {int(of_groups.min()) + 128}",
        where,
    )
    return QuantisedWeight(q, wide, of_groups.astype(np.uint8), bits, size)


def unpacked(words: Array, bits: int, axis: int) -> Array:
    """Return the numbers of words of 32 bits, the lowest first, along an axis that grows by as many as a word has."""
    count = 32 // bits
    shifts = np.arange(count, dtype=np.uint32) * bits
    parts = (np.ascontiguousarray(words).view(np.uint32)[..., None] >> shifts) & np.uint32((1 << bits) - 1)
    parts = np.moveaxis(parts, -1, axis + 1).astype(np.uint8)
    shape = list(words.shape)
    shape[axis] *= count
    return parts.reshape(shape)
