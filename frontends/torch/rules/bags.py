"""Bags of embeddings: rows of a table, added up or averaged by groups."""

from __future__ import annotations

from itertools import pairwise

import torch

from penstock.frontends.formulas.layout import reshape
from penstock.frontends.torch.node import Absent, KnownElements, Result, Rule, TorchNode
from penstock.ir.graph import Value


def _embedding_bag(n: TorchNode) -> Result:
    """Sum the rows of each bag.

    Bags known to be of one size are summed over a dimension. In other cases each row is added to its bag.
    """
    n.require(not n.arg("scale_grad_by_freq"), "scale_grad_by_freq is not supported")
    mode, pad = int(n.arg("mode")), n.arg("padding_idx", -1)
    n.require(mode in (0, 1), "mode max is not supported")
    weight, indices, offsets = n.value("weight"), n.value("indices"), n.known("offsets")
    dtype = weight.type.dtype
    total, bags = indices.type.size, n.type("offsets").dims[0] - bool(n.arg("include_last_offset"))
    rows = n.emit("gather", weight, reshape(n, indices, (total,)), axis=0)
    if n.has("per_sample_weights"):
        rows = n.emit("mul", rows, reshape(n, n.value("per_sample_weights"), (total, 1)))
    share = None
    if pad >= 0:
        real = reshape(n, n.emit("not", n.emit("equal", reshape(n, indices, (total,)), int(pad))), (total, 1))
        rows, share = n.emit("where", real, rows, 0.0), n.emit("cast", real, dtype=dtype)
    width = weight.type.dims[1]
    bounds = None if offsets is None else [*offsets.tolist()[:bags], total]
    even = bounds is not None and bags > 0 and bounds == list(range(0, total + 1, max(1, total // bags)))

    places = None if even else _bags(n, bounds, bags, total)

    def summed(x: Value, columns: int) -> Value:
        if places is None:
            return n.emit("sum", reshape(n, x, (bags, total // bags, columns)), axes=(1,))
        zeros = n.emit("const", value=0.0, dtype=dtype, shape=(bags, columns))
        return n.emit("scatter", zeros, places, x, axis=0, add=True)

    y = summed(rows, width)
    if mode == 1:
        ones = share if share is not None else n.emit("const", value=1.0, dtype=dtype, shape=(total, 1))
        y = n.emit("div", y, n.emit("maximum", summed(ones, 1), 1.0))
    return y, *(Absent("only the first result of embedding_bag is supported"),) * 3


def _bags(n: TorchNode, bounds: list[int] | None, bags: int, total: int) -> Value:
    """Find the bag of each row: the number of bags that begin at or before it, less one."""
    if bounds is not None:
        sizes = torch.tensor([b - a for a, b in pairwise(bounds)])
        return n.tensor_value(KnownElements(n.fresh("bags"), torch.repeat_interleave(torch.arange(bags), sizes)))
    begins = reshape(n, n.value("offsets", "i64"), (1, n.type("offsets").dims[0]))
    line = n.emit("iota", dtype="i64", shape=(total, 1), axis=0)
    begun = n.emit("sum", n.emit("cast", n.emit("less_equal", begins, line), dtype="i64"), axes=(1,))
    return n.emit("minimum", n.emit("sub", begun, 1), bags - 1)


RULES: dict[str, Rule] = {
    "embedding_bag": _embedding_bag,
    "_embedding_bag": _embedding_bag,
    "embedding_bag.padding_idx": _embedding_bag,
}
