"""The rule of scaled_dot_product_attention: one operation of the IR for operands of any rank and any mask."""

from __future__ import annotations

from math import prod, sqrt

from penstock.frontends.formulas.attention import at_least_finite, hide, repeat_heads, sees_nothing
from penstock.frontends.formulas.draws import dropout
from penstock.frontends.formulas.layout import expand, reshape, triangle
from penstock.frontends.torch.arrays import array_of
from penstock.frontends.torch.node import Result, Rule, TorchNode
from penstock.ir.graph import Value
from penstock.ir.types import broadcast_shapes


def _four(n: TorchNode, x: Value, lead: tuple[int, ...]) -> Value:
    """Reshape to [batch, heads, positions, size], with `lead` as the dimensions before the last two."""
    x = expand(n, x, (*lead, *x.type.dims[-2:]))
    front = (
        lead if len(lead) == 2 else (1, *lead) if len(lead) == 1 else (prod(lead[:-1]), lead[-1]) if lead else (1, 1)
    )
    return reshape(n, x, (*front, *x.type.dims[-2:]))


def _four_mask(n: TorchNode, mask: Value, lead: tuple[int, ...]) -> Value:
    """Reshape the mask so that it broadcasts to the scores of four dimensions."""
    dims = (1,) * (len(lead) + 2 - mask.type.rank) + mask.type.dims
    if len(lead) <= 2:
        return reshape(n, mask, (1,) * (4 - len(dims)) + dims)
    rows = dims[-2:]
    if prod(dims[:-2]) == 1:
        return reshape(n, mask, (1, 1, *rows))
    return reshape(n, expand(n, reshape(n, mask, dims), (*lead, *rows)), (prod(lead[:-1]), lead[-1], *rows))


def _attention(n: TorchNode) -> Result:
    q, k, v = (n.value(name) for name in ("query", "key", "value"))
    if n.arg("enable_gqa"):
        heads = q.type.dims[-3]
        k, v = (repeat_heads(n, x, heads) if x.type.rank == 4 else _repeat(n, x, heads) for x in (k, v))
    shape = broadcast_shapes(*(x.type.shape[:-2] for x in (q, k, v)))
    lead = tuple(int(size) for size in shape)
    rows, columns = q.type.dims[-2], k.type.dims[-2]
    scale = float(n.arg("scale", 1.0 / sqrt(q.type.dims[-1])))
    causal = bool(n.arg("is_causal"))
    parts = [_four(n, x, lead) for x in (q, k, v)]
    empty: Value | None = None
    if causal and rows != columns:
        parts.append(reshape(n, triangle(n, rows, columns), (1, 1, rows, columns)))
        causal = False
    elif n.has("attn_mask"):
        known = n.known("attn_mask")
        dtype = "bool" if n.type("attn_mask").dtype == "bool" else q.type.dtype
        mask = _four_mask(n, n.value("attn_mask", dtype), lead)
        parts.append(mask)
        empty = sees_nothing(n, mask, None if known is None else array_of(known))
    p = float(n.arg("dropout_p", 0.0))
    y = _dropped(n, parts, causal, scale, p) if p else n.emit_all("attention", 3, *parts, causal=causal, scale=scale)[0]
    if empty is not None:  # torch gives zeros to a row that sees no key, and no gradients to hidden keys
        y = n.emit("where", empty, 0.0, y)
    return reshape(n, y, (*lead, rows, v.type.dims[-1]))


def _dropped(n: TorchNode, parts: list[Value], causal: bool, scale: float, p: float) -> Value:
    """Write attention with dropout of the weights, for which all weights have to be computed."""
    q, k, v, *masks = parts
    if causal:
        masks.append(triangle(n, q.type.dims[2], k.type.dims[2]))
    scores = n.emit("mul", n.emit("matmul", q, k, tb=True), scale)
    for mask in masks:
        scores = hide(n, scores, mask) if mask.type.dtype == "bool" else at_least_finite(n, n.emit("add", scores, mask))
    weights, _ = dropout(n, n.emit("softmax", scores, axis=-1), p)
    return n.emit("matmul", weights, v)


def _repeat(n: TorchNode, x: Value, heads: int) -> Value:
    four = reshape(n, x, (prod(x.type.dims[:-3]), *x.type.dims[-3:]))
    return reshape(n, repeat_heads(n, four, heads), (*x.type.dims[:-3], heads, *x.type.dims[-2:]))


RULES: dict[str, Rule] = {"scaled_dot_product_attention": _attention}
