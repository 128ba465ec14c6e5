"""The proof that a part of a decoder is attention, and the numbers that it has: scale, cap and window.

In: the part as a graph, whose inputs are queries, new keys, new values, past keys and past values. It is interpreted in
float64. With values that are 1 at one key and 0 at all others it gives the share of that key. The logarithms of the
shares of a row differ by as much as its scores do. These have to be products of queries and keys times one number, and
a row has to see the keys up to its own, or the last of these.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.frontends.writer import Refused
from penstock.ir.graph import Graph
from penstock.ir.interpreter.graphs import run_graph
from penstock.ir.interpreter.ops import F64
from penstock.ir.interpreter.store import DictStore

from .interface import HeadShapes
from .lengths import LengthSample

# Shares below this are those of hidden keys.
_HIDDEN = 1e-200
_LARGE = 100.0
_NEAR = 1e-5
_SEED = 11


@dataclass(frozen=True)
class Region:
    """A part of a decoder for one number of past and new tokens, with the tensors that it reads. `numbers` are the
    single ones that it knows."""

    graph: Graph
    weights: Mapping[str, np.ndarray]
    shapes: HeadShapes
    sample: LengthSample
    numbers: tuple[float, ...]

    def form(self) -> str:
        """Return what the part computes, without names: equal for layers that are alike."""
        numbers = {value: i for i, value in enumerate(self.graph.ins)}
        rows = []
        for op in self.graph.ops:
            held = {n: v for n, v in op.attrs.items() if n != "var"}
            if op.kind == "read":
                held["elements"] = hashlib.sha256(np.asarray(self.weights[op.var]).tobytes()).hexdigest()
            rows.append(f"{op.kind} {[numbers[v] for v in op.ins]} {sorted(held.items())} {[v.type for v in op.outs]}")
            numbers.update((value, len(numbers)) for value in op.outs)
        return "\n".join([str([v.type for v in self.graph.ins]), *rows, str([numbers[v] for v in self.graph.outs])])

    @property
    def keys(self) -> int:
        """The number of past and new keys."""
        return self.sample.past + self.sample.tokens

    def __call__(self, queries: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
        """Compute the result: [heads, tokens, size of values]. Keys and values are [heads, all, size]."""
        past, heads = self.sample.past, self.shapes.heads
        queries = queries if self.shapes.merged else queries[None]
        ins = [queries, keys[None, :, past:], values[None, :, past:], keys[None, :, :past], values[None, :, :past]]
        (result,) = run_graph(self.graph, ins, DictStore(dict(self.weights)), precision=F64)
        return np.asarray(result, np.float64).reshape(heads, self.sample.tokens, self.shapes.value_size)

    def shares(self, queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Return the share of each key for each row: [heads, tokens, keys]."""
        shapes, parts = self.shapes, []
        for first in range(0, self.keys, shapes.value_size):
            values = np.zeros((shapes.key_heads, self.keys, shapes.value_size))
            count = min(shapes.value_size, self.keys - first)
            values[:, first + np.arange(count), np.arange(count)] = 1.0
            parts.append(self(queries, keys, values)[..., :count])
        return np.concatenate(parts, axis=-1)


def read_scores(regions: Sequence[Region]) -> tuple[float, float, int]:
    """Return scale, cap and window of an attention. Raise Refused where a region is something else."""
    seen = [_read(region) for region in regions]
    scales, caps, windows = zip(*seen, strict=True)
    if not np.allclose(scales, scales[0], rtol=_NEAR) or len(set(caps)) > 1:
        raise Refused("scores are scaled by numbers that depend on the length of the past")
    limited = {window for window in windows if window}
    if len(limited) > 1:
        raise Refused(f"a row sees {' and '.join(map(str, sorted(limited)))} keys, depending on the length of the past")
    return scales[0], caps[0], limited.pop() if limited else 0


def visible_keys(region: Region) -> int:
    """Return how many keys the last row sees. Raise Refused where these are not the last ones."""
    shapes = region.shapes
    queries, keys = np.zeros(shapes.of_new(1)[0][-3:]), np.zeros((shapes.key_heads, region.keys, shapes.size))
    values = np.zeros((shapes.key_heads, region.keys, shapes.value_size))
    values[:, -1] = 1.0
    share = float(region(queries, keys, values).min())
    count = round(1 / share) if share > 0 else 0
    values[:, region.keys - count :] = 1.0
    if count == 0 or not np.allclose(region(queries, keys, values), 1.0):
        raise Refused(f"for {region.keys} keys, some before the last hidden one are visible")
    return count


def check_scores(region: Region, scale: float, cap: float, window: int) -> None:
    """Compare a region with attention of these numbers. Raise Refused where it is another one."""
    queries, keys, values = _drawn(region)
    sample, each = region.sample, region.shapes.heads // region.shapes.key_heads
    scores = _capped(scale * (queries @ np.repeat(keys, each, axis=0).transpose(0, 2, 1)), cap)
    scores = np.where(_seen(sample, window), scores, -np.inf)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    expected = shares / shares.sum(-1, keepdims=True) @ np.repeat(values, each, axis=0)
    if not np.allclose(region(queries, keys, values), expected, _NEAR, _NEAR):
        raise Refused(f"for {region.keys} keys it sees other ones, or scales otherwise, than for few")


def _drawn(region: Region) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return drawn queries, keys and values."""
    draw, shapes = np.random.default_rng(_SEED), region.shapes
    queries = draw.standard_normal((shapes.heads, region.sample.tokens, shapes.size))
    keys = draw.standard_normal((shapes.key_heads, region.keys, shapes.size))
    return queries, keys, draw.standard_normal((shapes.key_heads, region.keys, shapes.value_size))


def _seen(sample: LengthSample, window: int) -> np.ndarray:
    """Return which keys each row sees: those up to its own, or the last of these."""
    at = np.arange(sample.past, sample.past + sample.tokens)[:, None]
    key = np.arange(sample.past + sample.tokens)
    seen: np.ndarray = (key <= at) & ((key > at - window) if window else True)
    return seen


def _read(region: Region) -> tuple[float, float, int]:
    queries, keys, values = _drawn(region)
    each = region.shapes.heads // region.shapes.key_heads
    products = queries @ np.repeat(keys, each, axis=0).transpose(0, 2, 1)
    shares = region.shares(queries, keys)
    window = _window(shares > _HIDDEN, region.sample)
    # Scores as large as those of no model, where a cap would show.
    estimate = _fitted(_scores(shares), products, shares > _HIDDEN, 0.0)
    factor = _LARGE / max(abs(estimate) * float(np.abs(products).max()), 1e-300)
    both = np.stack([shares, region.shares(factor * queries, keys)])
    scale, cap = _scale_of(both, np.stack([products, factor * products]), region.numbers)
    mixed = shares @ np.repeat(values, each, axis=0)
    if not np.allclose(both.sum(-1), 1.0) or not np.allclose(region(queries, keys, values), mixed, _NEAR, _NEAR):
        raise Refused("its result is no sum of values by shares of their keys that add up to 1")
    return scale, cap, window


def _window(visible: np.ndarray, sample: LengthSample) -> int:
    """Return how many keys rows see at most, 0 where they see all up to their own."""
    for window in (0, int(visible.sum(-1).max())):
        if np.array_equal(visible, np.broadcast_to(_seen(sample, window), visible.shape)):
            return window
    raise Refused("rows see other keys than those up to their own, or the last of these")


def _scale_of(shares: np.ndarray, products: np.ndarray, numbers: Sequence[float]) -> tuple[float, float]:
    """Return the number by which products are scores, and the cap of scores, 0 if there is none."""
    visible = shares > _HIDDEN
    scores = _scores(shares)
    products = np.where(visible, products, 0.0)
    for cap in (0.0, *sorted({n for n in numbers if n > 1})):
        scale = _fitted(scores, products, visible, cap)
        expected = _centred(_capped(scale * products, cap), visible)
        if np.allclose(scores, expected, rtol=_NEAR, atol=_NEAR) and scale > 0:
            return scale, cap
    raise Refused("scores are no multiple of the products of queries and keys, such as with a bias for each distance")


def _scores(shares: np.ndarray) -> np.ndarray:
    """Return the scores of visible keys, less their mean in each row."""
    visible = shares > _HIDDEN
    return _centred(np.log(np.where(visible, shares, 1.0)), visible)


def _fitted(scores: np.ndarray, products: np.ndarray, visible: np.ndarray, cap: float) -> float:
    """Return the scale that fits best; with a cap by steps of Newton's method from a small one."""
    centred = _centred(products, visible)
    scale = float((centred * scores).sum() / max((centred**2).sum(), 1e-300))
    for _ in range(30 if cap else 0):
        # The derivative of the capped scores by the scale.
        slope = _centred(products * (1 - np.tanh(scale * products / cap) ** 2), visible)
        error = scores - _centred(_capped(scale * products, cap), visible)
        scale += float((slope * error).sum() / max((slope**2).sum(), 1e-300))
    return scale


def _capped(scores: np.ndarray, cap: float) -> np.ndarray:
    return cap * np.tanh(scores / cap) if cap else scores


def _centred(scores: np.ndarray, visible: np.ndarray) -> np.ndarray:
    """Return scores less the mean of the visible ones of their row, and 0 for those that are hidden."""
    known = np.where(visible, scores, 0.0)
    mean = known.sum(-1, keepdims=True) / np.maximum(visible.sum(-1, keepdims=True), 1)
    return np.where(visible, known - mean, 0.0)
