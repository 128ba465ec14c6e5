"""NumPy rules for layout operations, and for the change of a layout over a mesh, which changes no number."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .arrays import Array, Rule, Values


def _slice(x: Sequence[Array], a: Values) -> tuple[Array, ...]:
    return (x[0][tuple(slice(b, e, s) for b, e, s in zip(a["start"], a["stop"], a["step"], strict=True))],)


def _pad(x: Sequence[Array], a: Values) -> tuple[Array, ...]:
    low, high, inner = a["low"], a["high"], a["inner"] or (0,) * x[0].ndim
    spread = [n + i * max(n - 1, 0) for n, i in zip(x[0].shape, inner, strict=True)]
    out = np.full([p + n + q for p, n, q in zip(low, spread, high, strict=True)], a["value"], x[0].dtype)
    out[tuple(slice(p, p + n, i + 1) for p, n, i in zip(low, spread, inner, strict=True))] = x[0]
    return (out,)


RULES: dict[str, Rule] = {
    "reshape": lambda x, a: (x[0].reshape(a["shape"]),),
    "transpose": lambda x, a: (np.transpose(x[0], a["perm"]),),
    "broadcast": lambda x, a: (np.broadcast_to(x[0], a["shape"]),),
    "slice": _slice,
    "pad": _pad,
    "concat": lambda x, a: (np.concatenate(x, a["axis"]),),
    "reshard": lambda x, a: (x[0],),
}
