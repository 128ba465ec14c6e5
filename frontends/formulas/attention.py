"""Parts of attention: heads, masks and rotation by position; and linear attention."""

from __future__ import annotations

import numpy as np

from penstock.frontends.writer import Writer
from penstock.ir.graph import Value

from .layout import concat, cut, expand, reshape, transpose


def split_heads(w: Writer, x: Value, heads: int) -> Value:
    """Turn [batch, positions, heads * size] into [batch, heads, positions, size]."""
    if x.type.rank == 4:
        return x
    w.require(x.type.rank == 3 and heads > 0, f"needs four dimensions, or three and the number of heads, got {x.type}")
    batch, positions, width = x.type.dims
    w.require(width % heads == 0, f"{width} of {x.type} does not divide into {heads} heads")
    return transpose(w, reshape(w, x, (batch, positions, heads, width // heads)), (0, 2, 1, 3))


def join_heads(w: Writer, x: Value) -> Value:
    """Turn [batch, heads, positions, size] into [batch, positions, heads * size]."""
    batch, heads, positions, size = x.type.dims
    return reshape(w, transpose(w, x, (0, 2, 1, 3)), (batch, positions, heads * size))


def repeat_heads(w: Writer, x: Value, heads: int) -> Value:
    """Repeat each key or value head for the group of query heads that it serves."""
    batch, key_heads, positions, size = x.type.dims
    w.require(key_heads > 0 and heads % key_heads == 0, f"{heads} query heads do not divide into {key_heads} key heads")
    if heads == key_heads:
        return x
    spread = expand(
        w,
        reshape(w, x, (batch, key_heads, 1, positions, size)),
        (batch, key_heads, heads // key_heads, positions, size),
    )
    return reshape(w, spread, (batch, heads, positions, size))


def rotate(w: Writer, x: Value, cos: Value, sin: Value, interleaved: bool) -> Value:
    """Rotate the first entries of each row pair by pair.

    The partner of an entry is its neighbour (interleaved) or the entry half the width further. cos and sin broadcast to
    half of the rotated entries. The entries after these stay as they are.
    """
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
    """Attend without a softmax, one position after the other.

    S = e^decay * S, v = beta * (v - k S), S = S + k^T v, y = scale * q S. All operands are [batch, heads, positions,
    ...]. decay has 1 or k's size entries per position, beta one. Return y and the last S.
    """
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
    return concat(w, outs, 2), state


def capped(w: Writer, scores: Value, cap: float) -> Value:
    """Compute cap * tanh(scores / cap). A cap of 0 leaves the scores as they are."""
    return w.emit("mul", w.emit("tanh", w.emit("div", scores, cap)), cap) if cap else scores


def hide(w: Writer, scores: Value, seen: Value) -> Value:
    """Replace scores by a finite number so low that a softmax gives them weight 0, except where `seen` holds.

    A row that sees nothing weighs all keys alike and has no nan.
    """
    return w.emit("where", seen, scores, _lowest(scores))


def at_least_finite(w: Writer, scores: Value) -> Value:
    """Hide positions, as `hide` does, in scores to which a mask with -inf was added."""
    return w.emit("maximum", scores, _lowest(scores))


def _lowest(scores: Value) -> float:
    return -65504.0 if scores.type.dtype == "f16" else -3e38


def sees_nothing(w: Writer, mask: Value, known: np.ndarray | None) -> Value | None:
    """Find the rows of a mask that see nothing, as bool[..., rows, 1].

    A bool mask is true for keys that are seen. A mask of numbers is added to the scores and hides by -inf. Return None
    if the elements `known` of the mask say that every row sees a key.
    """
    if known is not None and bool((known if known.dtype == bool else known != -np.inf).any(-1).all()):
        return None
    seen = mask if mask.type.dtype == "bool" else w.emit("not", w.emit("equal", mask, -np.inf))
    count = w.emit("sum", w.emit("cast", seen, dtype="i32"), axes=(mask.type.rank - 1,), keep=True)
    return w.emit("equal", count, 0)
