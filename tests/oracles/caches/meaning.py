"""The meaning of the rows about caches, in torch and in Python's whole numbers; it shares nothing with the NumPy rules."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    starts: Tensor,
    lengths: Tensor,
    table: Tensor,
    *,
    scale: float,
    window: int,
    cap: float,
) -> Tensor:
    """Return torch's own attention of every row alone, over its positions gathered one by one."""
    result = torch.zeros_like(q)
    for s in range(len(lengths)):
        first, last, length = int(starts[s]), int(starts[s + 1]), int(lengths[s])
        for row in range(first, last):
            here = length - (last - row)
            seen = range(max(0, here - window + 1) if window else 0, here + 1)
            places = [(int(table[s, p // 16]), p % 16) for p in seen]
            k, v = (torch.stack([c[b, r] for b, r in places], 1) for c in (keys, values))
            group = q.shape[1] // k.shape[0]
            for head in range(q.shape[1]):
                scores = (k[head // group] @ q[row, head]) * scale
                scores = cap * torch.tanh(scores / cap) if cap else scores
                result[row, head] = torch.softmax(scores, 0) @ v[head // group]
    return result


def pick(logits: Tensor, draws: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Return the words by shares in exact fractions of the weights' whole numbers, walked in the order of size."""
    picked = []
    for row, (seed, position), heat, count, share in zip(
        torch.nan_to_num(logits, -torch.inf, torch.inf, -torch.inf).tolist(),
        draws.tolist(),
        temperature.tolist(),
        top_k.tolist(),
        top_p.tolist(),
        strict=True,
    ):
        largest = max(row)
        if heat <= 0:
            picked.append(row.index(largest))
            continue
        weights = [_weight(x, largest, heat) for x in row]
        limit = sorted(row, reverse=True)[count - 1] if 0 < count < len(row) else -math.inf
        if share < 1:
            kept = sorted((x for x in row if x >= limit), reverse=True)
            sums, total = 0, sum(w for x, w in zip(row, weights, strict=True) if x >= limit)
            for x in kept:
                sums += _weight(x, largest, heat)
                if sums >= total * Fraction(int(share * 2**24), 2**24) // 1:
                    limit = x
                    break
        weights = [w if x >= limit else 0 for x, w in zip(row, weights, strict=True)]
        drawn = Fraction(_philox_word(position % 2**32, seed % 2**64 >> 32, seed % 2**32), 2**32) * sum(weights) // 1
        sums = 0
        for word, weight in enumerate(weights):
            sums += weight
            if sums > drawn:
                picked.append(word)
                break
    return torch.tensor(picked, dtype=torch.int64)


def _weight(x: float, largest: float, temperature: float) -> int:
    """Return 2^40 * e^((x - largest) / temperature) in the steps that the row states, in Python's whole numbers."""
    f = np.float32
    with np.errstate(all="ignore"):
        down = f(0) if x == largest else (f(largest) - f(x)) * (f(math.log2(math.e)) / f(temperature))
    if down >= 40:
        return 0
    steps = int(down * f(2**20))
    part, weight = steps % 2**20, -1078399
    for coefficient in (10034814, -59495443, 257928751, -744260871, 1073741824):
        weight = (weight * part >> 20) + coefficient
    return (weight << 10) >> (steps >> 20)


def _philox_word(first: int, second: int, key: int) -> int:
    for turn in range(10):
        product = first * 0xD256D193
        first = (product >> 32) ^ ((key + turn * 0x9E3779B9) % 2**32) ^ second
        second = product % 2**32
    return first
