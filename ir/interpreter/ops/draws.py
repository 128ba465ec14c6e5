"""NumPy rules for random numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.ir.ops.draws import MULTIPLIER, ROUNDS, STEP

from .arrays import Array, Rule, Values

_WORD, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


def philox(first: Array, second: Array, key: Array) -> tuple[Array, Array]:
    """Compute Philox 2x32-10: two words from a counter of two words and a key of one, all of them in u64."""
    for _ in range(ROUNDS):
        product = first * np.uint64(MULTIPLIER)
        first, second = (product >> _HALF) ^ key ^ second, product & _WORD
        key = (key + np.uint64(STEP)) & _WORD
    return first, second


def _words(x: Array) -> tuple[Array, Array]:
    """Return the lower and the upper word of an i64."""
    bits = np.asarray(x).astype(np.int64).astype(np.uint64)
    return bits & _WORD, bits >> _HALF


def _key(x: Sequence[Array], a: Values) -> tuple[Array, ...]:
    low, high = _words(x[0])
    first, second = philox(low, high ^ np.uint64(a["seed"]), np.full_like(low, a["number"]))
    return (np.asarray((second << _HALF) | first).astype(np.int64),)


def _random(x: Sequence[Array], a: Values) -> tuple[Array, ...]:
    low, high = _words(x[1])
    first, _ = philox(*np.broadcast_arrays(x[0].astype(np.uint64), high, low))
    return ((first >> np.uint64(8)).astype(np.float32) * np.float32(2**-24),)


RULES: dict[str, Rule] = {"random_key": _key, "random": _random}
