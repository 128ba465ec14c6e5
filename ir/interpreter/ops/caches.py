"""NumPy rules for caches: attention over blocks, the choice of a word, and the rows that `put` stores."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.ir.ops.caches import (
    BLOCK,
    LOWEST_EXPONENT,
    STEP_BITS,
    TOP_BITS,
    WEIGHT_POLYNOMIAL,
)

from .arrays import Array, Rule, Values, wide
from .draws import philox


def with_rows(cache: Array, rows: Array, places: Array) -> Array:
    """Return a copy of a cache with rows at flat places; -1 is skipped. Places must be distinct and inside."""
    kept = places >= 0
    chosen = places[kept]
    total = cache.shape[0] * cache.shape[1]
    if np.any(places < -1) or np.any(chosen >= total):
        raise ValueError(f"places must lie in -1..{total - 1}, got {places.tolist()}")
    if len(np.unique(chosen)) < len(chosen):
        raise ValueError(f"places must be distinct, got {places.tolist()}")
    filled = cache.copy()
    filled.reshape(total, *cache.shape[2:])[chosen] = rows[kept].astype(cache.dtype)
    return filled


def _check_sequences(rows: int, blocks: int, starts: Array, lengths: Array, table: Array) -> None:
    counts = np.diff(starts)
    if starts[0] != 0 or np.any(counts < 0) or starts[-1] > rows:
        raise ValueError(f"starts must rise from 0 to at most {rows}, got {starts.tolist()}")
    if np.any(counts > lengths) or np.any(lengths > table.shape[1] * BLOCK):
        raise ValueError(
            f"lengths {lengths.tolist()} must hold the new rows, {counts.tolist()}, and fit {table.shape[1]} blocks"
        )
    for line, length in zip(table, lengths.tolist(), strict=True):
        used = line[: -(-length // BLOCK)]
        if np.any(used < 0) or np.any(used >= blocks):
            raise ValueError(f"blocks of a sequence must lie in 0..{blocks - 1}, got {used.tolist()}")


def _attend(x: Sequence[Array], a: Values) -> tuple[Array, ...]:
    q, keys, values, starts, lengths, table = x
    result = np.zeros_like(q)
    if not len(lengths):
        return (result,)
    _check_sequences(len(q), len(keys), starts, lengths, table)
    group = q.shape[1] // keys.shape[2]
    for s, length in enumerate(lengths.tolist()):
        first, last = int(starts[s]), int(starts[s + 1])
        if first == last:
            continue
        # The positions in order, each head of the cache for its group of heads of the queries.
        used = table[s, : -(-length // BLOCK)]
        k, v = (np.repeat(c[used].reshape(-1, *c.shape[2:])[:length], group, axis=1) for c in (keys, values))
        scores = np.einsum("thd,phd->htp", wide(q[first:last]), wide(k)) * a["scale"]
        if a["cap"]:
            scores = a["cap"] * np.tanh(scores / a["cap"])
        here = np.arange(length - (last - first), length)[:, None]
        there = np.arange(length)[None, :]
        hidden = there > here
        if a["window"]:
            hidden |= here - there >= a["window"]
        scores = np.where(hidden, -np.inf, scores)
        grown = np.exp(scores - scores.max(-1, keepdims=True))
        shares = grown / grown.sum(-1, keepdims=True)
        result[first:last] = np.einsum("htp,phd->thd", shares, wide(v))
    return (result,)


def weights_of(logits: Array, largest: Array, temperature: Array) -> Array:
    """Return the weights of logits as whole numbers of i64, 2^40 for the largest. Only operations of f32 that have one
    result everywhere, and whole numbers, come before the draw."""
    rate = np.float32(np.log2(np.e)) / temperature.astype(np.float32)
    down = np.minimum((largest - logits) * rate, np.float32(LOWEST_EXPONENT))
    # Of equal infinities the difference is nan.
    down = np.where(logits == largest, np.float32(0), down)
    steps = (down * np.float32(1 << STEP_BITS)).astype(np.int32).astype(np.int64)
    part = steps & ((1 << STEP_BITS) - 1)
    weight = np.full_like(steps, WEIGHT_POLYNOMIAL[0])
    for coefficient in WEIGHT_POLYNOMIAL[1:]:
        weight = ((weight * part) >> STEP_BITS) + coefficient
    weight = (weight << (TOP_BITS - 30)) >> (steps >> STEP_BITS)
    return np.where(down >= LOWEST_EXPONENT, 0, weight)


def _share(total: Array, share: Array | np.int64, bits: int) -> Array:
    """Return total * share / 2^bits, rounded down, where the product is beyond 64 bits."""
    low = (1 << bits) - 1
    return np.asarray((total >> bits) * share + (((total & low) * share) >> bits))


def _kept(logits: Array, weights: Array, top_k: int, top_p: float) -> Array:
    """Return which words may be drawn. Equal logits are kept or dropped together."""
    kept = np.ones(len(logits), bool)
    if 0 < top_k < len(logits):
        kept = logits >= np.sort(logits)[-top_k]
    if top_p < 1:
        wanted = _share(np.sum(weights[kept]), np.int64(np.float32(max(top_p, 0.0)) * np.float32(1 << 24)), 24)
        order = np.argsort(-logits, kind="stable")
        order = order[kept[order]]
        enough = int(np.argmax(np.cumsum(weights[order]) >= wanted))
        kept &= logits >= logits[order[enough]]
    return kept


def _pick(x: Sequence[Array], a: Values) -> tuple[Array, ...]:
    logits, draws, temperature, top_k, top_p = x
    logits = np.where(np.isnan(logits), -np.inf, logits).astype(np.float32)
    picked = np.argmax(logits, axis=-1).astype(np.int64) if len(logits) else np.zeros(0, np.int64)
    for s in range(len(logits)):
        if not temperature[s] > 0:
            continue
        weights = weights_of(logits[s], logits[s].max(), temperature[s])
        kept = _kept(logits[s], weights, int(top_k[s]), float(top_p[s]))
        seed, position = draws[s].astype(np.uint64)
        word, _ = philox(position & np.uint64(0xFFFFFFFF), seed >> np.uint64(32), seed & np.uint64(0xFFFFFFFF))
        sums = np.cumsum(np.where(kept, weights, 0))
        picked[s] = np.argmax(sums > _share(sums[-1], word.astype(np.int64), 32))
    return (picked,)


RULES: dict[str, Rule] = {"attend": _attend, "pick": _pick}
