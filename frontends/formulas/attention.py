"""Attention and what stands around it: heads, rotation by position, linear attention, and what masks hide."""

from __future__ import annotations

import numpy as np

from penstock.frontends.writer import Writer
from penstock.ir.graph import Value

from .layout import cut, expand, reshape, transpose


def split_heads(w: Writer, x: Value, heads: int) -> Value:
    """[batch, positions, heads * size] as [batch, heads, positions, size]."""
    if x.type.rank == 4:
        return x
    w.require(x.type.rank == 3 and heads > 0, f"needs four dimensions, or three and the number of heads, got {x.type}")
    batch, positions, width = x.type.dims
    w.require(width % heads == 0, f"{width} of {x.type} does not divide into {heads} heads")
    return transpose(w, reshape(w, x, (batch, positions, heads, width // heads)), (0, 2, 1, 3))


def join_heads(w: Writer, x: Value) -> Value:
    """[batch, heads, positions, size] as [batch, positions, heads * size]."""
    batch, heads, positions, size = x.type.dims
    return reshape(w, transpose(w, x, (0, 2, 1, 3)), (batch, positions, heads * size))


def repeat_heads(w: Writer, x: Value, heads: int) -> Value:
    """Each key and value head serves a group of query heads."""
    batch, own, positions, size = x.type.dims
    w.require(own > 0 and heads % own == 0, f"{heads} query heads do not divide into {own} key heads")
    if heads == own:
        return x
    spread = expand(w, reshape(w, x, (batch, own, 1, positions, size)), (batch, own, heads // own, positions, size))
    return reshape(w, spread, (batch, heads, positions, size))


def rotate(w: Writer, x: Value, cos: Value, sin: Value, interleaved: bool) -> Value:
    """The first entries of each row turned, pair by pair; a pair is an entry and its neighbour (interleaved), or the one half the width
    further. cos and sin broadcast to half of what is turned; what lies behind stays as it is."""
    dims, last = x.type.dims, x.type.rank - 1
    half = cos.type.dims[-1]
    w.require(
        sin.type == cos.type and 0 < 2 * half <= dims[-1],
        f"cosines {cos.type} and sines {sin.type} do not fit {x.type}",
    )
    turned = cut(w, x, last, 0, 2 * half)
    if interleaved:
        pairs = reshape(w, turned, (*dims[:-1], half, 2))
        left, right = (reshape(w, cut(w, pairs, last + 1, i, i + 1), (*dims[:-1], half)) for i in (0, 1))
    else:
        left, right = cut(w, turned, last, 0, half), cut(w, turned, last, half, 2 * half)
    real = w.emit("sub", w.emit("mul", left, cos), w.emit("mul", right, sin))
    imaginary = w.emit("add", w.emit("mul", left, sin), w.emit("mul", right, cos))
    if interleaved:
        parts = [reshape(w, part, (*dims[:-1], half, 1)) for part in (real, imaginary)]
        y = reshape(w, w.emit("concat", *parts, axis=last + 1), (*dims[:-1], 2 * half))
    else:
        y = w.emit("concat", real, imaginary, axis=last)
    return y if 2 * half == dims[-1] else w.emit("concat", y, cut(w, x, last, 2 * half, dims[-1]), axis=last)


def linear_attention(
    w: Writer, q: Value, k: Value, v: Value, state: Value | None, decay: Value | None, beta: Value | None, scale: float
) -> tuple[Value, Value]:
    """Attention without a softmax, one position after the other: S = e^decay * S, v = beta * (v - k S), S = S + k^T v, y = scale * q S.

    All on [batch, heads, positions, ...]; decay has 1 or k's size entries per position, beta one. Gives y and the last S."""
    batch, heads, positions, size = k.type.dims
    width = v.type.dims[-1]

    def at(x: Value, i: int) -> Value:
        return cut(w, x, 2, i, i + 1)

    outs: list[Value] = []
    for i in range(positions):
        if state is not None and decay is not None:
            now = at(decay, i)
            state = w.emit("mul", state, w.emit("exp", reshape(w, now, (*now.type.dims[:2], now.type.dims[3], 1))))
        key, value = at(k, i), at(v, i)
        if beta is not None:
            value = value if state is None else w.emit("sub", value, w.emit("matmul", key, state))
            value = w.emit("mul", value, at(beta, i))
        written = w.emit("matmul", key, value, ta=True)
        state = written if state is None else w.emit("add", state, written)
        seen = repeat_heads(w, state, q.type.dims[1])
        outs.append(w.emit("mul", w.emit("matmul", at(q, i), seen), scale))
    if state is None:
        state = w.emit("const", value=0.0, dtype=k.type.dtype, shape=(batch, heads, size, width))
    if not outs:
        return w.emit("const", value=0.0, dtype=k.type.dtype, shape=(batch, q.type.dims[1], 0, width)), state
    return outs[0] if len(outs) == 1 else w.emit("concat", *outs, axis=2), state


def capped(w: Writer, scores: Value, cap: float) -> Value:
    """cap * tanh(scores / cap); 0: as they are."""
    return w.emit("mul", w.emit("tanh", w.emit("div", scores, cap)), cap) if cap else scores


def hide(w: Writer, scores: Value, seen: Value) -> Value:
    """Scores so low where nothing is seen that a softmax leaves nothing of them, but finite: a row that sees
    nothing weighs all alike, and has no nan."""
    return w.emit("where", seen, scores, _lowest(scores))


def at_least_finite(w: Writer, scores: Value) -> Value:
    """The same for scores to which a mask was added that hides by -inf."""
    return w.emit("maximum", scores, _lowest(scores))


def _lowest(scores: Value) -> float:
    return -65504.0 if scores.type.dtype == "f16" else -3e38


def sees_nothing(w: Writer, mask: Value, known: np.ndarray | None) -> Value | None:
    """For a mask of scores (bool: what is seen; numbers: added, -inf hides): whether a row sees nothing at all, [..., rows, 1]; None where
    `known` elements of it say that every row sees something."""
    if known is not None and bool((known if known.dtype == bool else known != -np.inf).any(-1).all()):
        return None
    seen = mask if mask.type.dtype == "bool" else w.emit("not", w.emit("equal", mask, -np.inf))
    count = w.emit("sum", w.emit("cast", seen, dtype="i32"), axes=(mask.type.rank - 1,), keep=True)
    return w.emit("equal", count, 0)
