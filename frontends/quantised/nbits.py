"""Weights of com.microsoft's MatMulNBits: blocks along the sum, the low half of a byte first."""

from __future__ import annotations

import numpy as np

from .weight import Array, QuantisedWeight, refuse_unless, weight_of


def read_nbits(
    b: Array, scales: Array, zeros: Array | None, *, k: int, bits: int, block: int, where: str = "MatMulNBits"
) -> QuantisedWeight:
    """Return a weight from the operands `B` u8[n, blocks, block * bits / 8], `scales` and `zero_points`, with the
    attributes K, bits and block_size. Zeros in the element type of the scales are read where they are whole numbers."""
    refuse_unless(bits in (4, 8), f"has {bits} bits, only 4 and 8 are read", where)
    blocks = -(-k // block)
    rows = b.shape[0]
    refuse_unless(
        b.dtype == np.uint8 and b.shape == (rows, blocks, block * bits // 8),
        f"B is {b.dtype}{list(b.shape)}, expected u8[n, {blocks}, {block * bits // 8}]",
        where,
    )
    refuse_unless(k % block == 0, f"{k} elements of a row do not divide into blocks of {block}", where)
    refuse_unless(scales.size == rows * blocks, f"{list(scales.shape)} scales for {rows} rows of {blocks}", where)
    flat = b.reshape(rows, -1)
    numbers = flat if bits == 8 else np.stack([flat & 15, flat >> 4], -1).reshape(rows, k)
    of_groups: Array | int = 1 << bits - 1
    if zeros is not None:
        of_groups = _zeros_of(zeros, rows, blocks, bits, where)
    return weight_of(numbers, scales.reshape(rows, blocks), of_groups, bits, where)


def _zeros_of(zeros: Array, rows: int, blocks: int, bits: int, where: str) -> Array:
    if zeros.dtype != np.uint8:
        whole = np.rint(zeros.astype(np.float32))
        refuse_unless(
            zeros.size == rows * blocks and bool((whole == zeros).all()), "has zeros that are no whole numbers", where
        )
        return whole.reshape(rows, blocks).astype(np.int32)
    packed = -(-blocks * bits // 8)
    refuse_unless(zeros.size == rows * packed, f"{list(zeros.shape)} zero points for {rows} rows of {blocks}", where)
    flat = zeros.reshape(rows, packed)
    if bits == 4:
        flat = np.stack([flat & 15, flat >> 4], -1).reshape(rows, 2 * packed)[:, :blocks]
    return flat.astype(np.int32)
