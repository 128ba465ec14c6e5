"""ATen operations that compute distances between rows: of every pair, or of one tensor's pairs in order.

Gradients are torch's: 0 where a distance is 0. For the largest difference (p infinite) all of it goes to each of those
that are equally large. Differences are computed one by one. The distances of many rows with p = 2 come from one matrix
product, as in torch, and are as inexact where they are small.
"""

from __future__ import annotations

from math import inf, isinf

import numpy as np

from penstock.frontends.formulas.elementwise import positive, root
from penstock.frontends.formulas.layout import reshape, transpose
from penstock.frontends.torch.node import Result, Rule, TorchNode
from penstock.ir.graph import Value
from penstock.ir.types import FLOATS

from .reductions import length


def _between(n: TorchNode, x: Value, y: Value, order: float) -> Value:
    """Compute the norms of x - y over the last dimension."""
    n.require(x.type.dtype in FLOATS, f"needs floating-point operands, got {x.type}")
    difference = n.emit("sub", x, y)
    axis = difference.type.rank - 1
    if not isinf(order):
        return length(n, difference, (axis,), False, order)
    size = n.emit("abs", difference)
    largest = n.emit("max", n.emit("detach", size), axes=(axis,), keep=True)
    among = n.emit("and", n.emit("equal", size, largest), n.emit("less", largest, inf))
    # A sum of zeros, whose gradient reaches all elements as large as the largest.
    shares = n.emit("where", among, n.emit("sub", size, n.emit("detach", size)), 0.0)
    return n.emit("add", reshape(n, largest, largest.type.dims[:-1]), n.emit("sum", shares, axes=(axis,)))


def _of_pairs(n: TorchNode) -> Result:
    n.ignore("compute_mode")  # changes the method, not the result
    x, y = n.value("x1"), n.value("x2")
    x = reshape(n, x, (*x.type.dims[:-1], 1, x.type.dims[-1]))
    y = reshape(n, y, (*y.type.dims[:-2], 1, *y.type.dims[-2:]))
    return _between(n, x, y, float(n.arg("p")))


def _within(n: TorchNode) -> Result:
    x = n.value()
    first, second = np.triu_indices(x.type.dims[0], 1)
    left, right = (n.emit("gather", x, places.astype(np.int64), axis=0) for places in (first, second))
    return _between(n, left, right, float(n.arg("p")))


def _euclidean(n: TorchNode) -> Result:
    """Compute the root of x . x - 2 * x . y + y . y, at least 0."""
    x, y = n.value("x1"), n.value("x2")
    rank = y.type.rank
    products = n.emit("matmul", n.emit("mul", x, -2.0), y, tb=True)
    squares, other_squares = (n.emit("sum", n.emit("mul", v, v), axes=(v.type.rank - 1,), keep=True) for v in (x, y))
    other_squares = transpose(n, other_squares, [*range(rank - 2), rank - 1, rank - 2])
    return root(n, positive(n, n.emit("add", n.emit("add", products, squares), other_squares)))


RULES: dict[str, Rule] = {
    "_cdist_forward": _of_pairs,
    "_pdist_forward": _within,
    "_euclidean_dist": _euclidean,
}
