"""NumPy rules for lookups; an index outside is an error."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .arrays import Array, Rule, Values, check_indices


def _gather(x: Sequence[Array], a: Values) -> tuple[Array, ...]:
    size = x[0].shape[a["axis"]]
    check_indices("gather index", x[1], -size, size)
    return (np.take(x[0], x[1], axis=a["axis"]),)


def _gather_grad(x: Sequence[Array], a: Values) -> tuple[Array, ...]:
    dy, indices = x
    axis = a["axis"] % len(a["shape"])
    check_indices("gather index", indices, -a["shape"][axis], a["shape"][axis])
    out = np.zeros(a["shape"], np.float64)
    front = np.moveaxis(dy, range(axis, axis + indices.ndim), range(indices.ndim))
    np.add.at(np.moveaxis(out, axis, 0), indices, front)
    return (out,)


def _scatter(x: Sequence[Array], a: Values) -> tuple[Array, ...]:
    data, indices, updates = x
    axis = a["axis"] % data.ndim
    check_indices("scatter index", indices, -data.shape[axis], data.shape[axis])
    out = data.copy()
    entries = np.moveaxis(out, axis, 0)
    front = np.moveaxis(updates, range(axis, axis + indices.ndim), range(indices.ndim))
    for at in np.ndindex(indices.shape):
        entries[indices[at]] = entries[indices[at]] + front[at] if a["add"] else front[at]
    return (out,)


RULES: dict[str, Rule] = {
    "gather": _gather,
    "gather_grad": _gather_grad,
    "scatter": _scatter,
}
