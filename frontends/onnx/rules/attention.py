"""ONNX operators of attention, and of its replacements in state-space models.

Attention without mask, cap and cache is one operation. Everything else is written as scores, a softmax and a product,
which a pass recognises where it can. A key is hidden where a mask is false, where it is later than the position or
outside the window, and behind the last key. Hidden keys get weight 0 after the softmax, so a row that sees nothing
gives 0 and never nan. Rows of an added mask that are -inf throughout are treated likewise.

LinearAttention is unrolled over its positions, so their number is limited.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from penstock.frontends.formulas.attention import (
    capped,
    hide,
    join_heads,
    linear_attention,
    repeat_heads,
    rotate,
    sees_nothing,
    split_heads,
)
from penstock.frontends.formulas.elementwise import widened
from penstock.frontends.formulas.layout import reshape
from penstock.frontends.onnx.node import OnnxNode, Result, Rule
from penstock.ir.graph import Value

# Positions of LinearAttention, each of which is half a dozen operations.
MOST_POSITIONS = 512


def _allowed(n: OnnxNode, batch: int, rows: int, columns: int, past: int) -> Value | None:
    """Compute which keys each query sees by its position.

    Return bool that broadcasts to [batch, heads, rows, columns], or None if it sees all.
    """
    causal, left, right = (
        n.int_attr("is_causal"),
        n.int_attr("left_window_size", -1),
        n.int_attr("right_window_size", -1),
    )
    keep: Value | None = None
    valid = reshape(n, n.value(6), (batch, 1, 1, 1)) if n.has(6) else None
    if valid is not None:
        keep = n.emit("less", n.emit("iota", dtype="i64", shape=(1, 1, 1, columns), axis=3), valid)
    if not causal and left < 0 and right < 0:
        return keep
    dtype = "i32" if valid is None else "i64"
    lead = (1, 1) if valid is not None else ()
    row = n.emit("iota", dtype=dtype, shape=(*lead, rows, 1), axis=len(lead))
    column = n.emit("iota", dtype=dtype, shape=(*lead, 1, columns), axis=len(lead) + 1)
    if valid is not None:  # the queries are the last of the valid keys
        row = n.emit("add", row, n.emit("sub", valid, rows))
    elif past:
        row = n.emit("add", row, past)
    rules = [n.emit("less_equal", column, row)] if causal else []
    rules += [n.emit("less_equal", row, n.emit("add", column, left))] if left >= 0 else []
    rules += [n.emit("less_equal", column, n.emit("add", row, right))] if right >= 0 else []
    for rule in rules:
        keep = rule if keep is None else n.emit("and", keep, rule)
    return keep


def _mask(n: OnnxNode, columns: int) -> Value:
    """Return the mask with the keys beyond its end hidden."""
    mask = n.value(3)
    short = columns - mask.type.dims[-1]
    n.require(short >= 0, f"mask {mask.type} has more than {columns} columns")
    if not short:
        return mask
    dims = (*mask.type.dims[:-1], short)
    hidden: bool | float = False if mask.type.dtype == "bool" else -math.inf
    filler = n.emit("const", value=hidden, dtype=mask.type.dtype, shape=dims)
    return n.emit("concat", mask, filler, axis=mask.type.rank - 1)


def _attention(n: OnnxNode) -> Sequence[Result]:
    precision, shows = n.int_attr("softmax_precision", 1), n.int_attr("qk_matmul_output_mode")
    n.require(precision in (1, 10, 11, 16), f"softmax_precision={precision} is not known")
    n.require(0 <= shows <= 3, f"qk_matmul_output_mode={shows} is not known")
    q = split_heads(n, n.value(0), n.int_attr("q_num_heads"))
    k, v = (split_heads(n, n.value(i), n.int_attr("kv_num_heads")) for i in (1, 2))
    n.require(n.has(4) == n.has(5), "past keys and values must be given together")
    past = n.type(4).dims[2] if n.has(4) else 0
    if n.has(4):
        k, v = (n.emit("concat", n.value(4 + i), x, axis=2) for i, x in enumerate((k, v)))
    present, heads = (k, v), q.type.dims[1]
    k, v = repeat_heads(n, k, heads), repeat_heads(n, v, heads)
    scale = n.float_attr("scale", 1.0 / math.sqrt(q.type.dims[-1]))
    cap = n.float_attr("softcap")
    batch, _, rows, _ = q.type.dims
    columns = k.type.dims[2]
    scores_wanted = len(n.proto.output) > 3 and bool(n.proto.output[3])
    plain = not n.has(3) and not n.has(6) and not cap and not scores_wanted
    windowed = n.int_attr("left_window_size", -1) >= 0 or n.int_attr("right_window_size", -1) >= 0
    if plain and not windowed and (not n.int_attr("is_causal") or (rows == columns and not past)):
        y = n.emit_all("attention", 3, q, k, v, causal=bool(n.int_attr("is_causal")), scale=scale)[0]
        return (y if n.type().rank == 4 else join_heads(n, y), *present)

    shown = scores = n.emit("mul", n.emit("matmul", q, k, tb=True), scale)
    scores = capped(n, scores, cap)
    shown = scores if shows else shown
    keep = _allowed(n, batch, rows, columns, past)
    dead: Value | None = None
    if n.has(3):
        mask = _mask(n, columns)
        if mask.type.dtype == "bool":
            keep = mask if keep is None else n.emit("and", mask, keep)
        else:
            shown = n.emit("add", scores, mask) if shows == 2 else shown
            dead = sees_nothing(n, mask, n.known(3))
            mask = mask if dead is None else n.emit("where", dead, 0.0, mask)
            scores = n.emit("add", scores, mask)
    if shows == 2 and keep is not None:
        shown = n.emit("where", keep, shown, -math.inf)
    weights = n.emit("softmax", scores if keep is None else hide(n, scores, keep), axis=-1)
    weights = weights if keep is None else n.emit("where", keep, weights, 0.0)
    if dead is not None and shows == 3:
        weights = n.emit("where", dead, 0.0, weights)
    y = n.emit("matmul", weights, v)
    if dead is not None:
        y = n.emit("where", dead, 0.0, y)
    return (y if n.type().rank == 4 else join_heads(n, y), *present, weights if shows == 3 else shown)


def _rotary(n: OnnxNode) -> Result:
    x, heads = n.value(0), n.int_attr("num_heads")
    flat = x.type.rank == 3
    n.require(
        x.type.rank == 4 or (flat and heads > 0),
        f"needs four dimensions, or three and the number of heads, got {x.type}",
    )
    if flat:
        batch, positions, width = x.type.dims
        n.require(width % heads == 0, f"{width} of {x.type} does not divide into {heads} heads")
        turned = reshape(n, x, (batch, positions, heads, width // heads))
    else:
        batch, _, positions, _ = x.type.dims
        turned = x
    count = n.int_attr("rotary_embedding_dim") or turned.type.dims[-1]
    parts = []
    for i in (1, 2):
        part = n.emit("gather", n.value(i), n.value(3), axis=0) if n.has(3) else n.value(i)
        n.require(part.type.rank == 3, f"without position_ids the caches need three dimensions, got {part.type}")
        lead, length, half = part.type.dims
        n.require(2 * half == count, f"{half} entries of the caches do not turn {count} entries in pairs")
        parts.append(reshape(n, part, (lead, length, 1, half) if flat else (lead, 1, length, half)))
    cos, sin = parts
    return reshape(n, rotate(n, turned, cos, sin, bool(n.int_attr("interleaved"))), x.type.dims)


def _linear_attention(n: OnnxNode) -> Sequence[Result]:
    rule = n.text_attr("update_rule", "gated_delta")
    n.ignore("chunk_size")  # changes the speed, not the result
    n.require(rule in ("linear", "gated", "delta", "gated_delta"), f"update_rule={rule} is not known")
    n.require(n.has(4) == ("gated" in rule), f"update_rule={rule} {'needs a' if 'gated' in rule else 'takes no'} decay")
    n.require(n.has(5) == ("delta" in rule), f"update_rule={rule} {'needs a' if 'delta' in rule else 'takes no'} beta")
    dtype, heads, key_heads = n.type().dtype, n.int_attr("q_num_heads"), n.int_attr("kv_num_heads")
    positions = n.type().dims[1]
    n.require(positions <= MOST_POSITIONS, f"{positions} positions are not supported, {MOST_POSITIONS} at most")

    q, k, v = (widened(n, split_heads(n, n.value(i), count)) for i, count in enumerate((heads, key_heads, key_heads)))
    state = widened(n, n.value(3)) if n.has(3) else None
    decay = widened(n, split_heads(n, n.value(4), key_heads)) if n.has(4) else None
    beta = widened(n, split_heads(n, n.value(5), n.type(5).dims[2])) if n.has(5) else None
    scale = n.float_attr("scale") or 1.0 / math.sqrt(k.type.dims[-1])
    y, last = linear_attention(n, q, k, v, state, decay, beta, scale)
    kept = n.type(3).dtype if n.has(3) else dtype
    y, last = (n.cast(x, kind) for x, kind in ((y, dtype), (last, kept)))
    return join_heads(n, y), last


def _causal_conv(n: OnnxNode) -> Sequence[Result]:
    x, w = n.value(0), n.value(1)
    activation = n.text_attr("activation", "none")
    n.require(activation in ("none", "silu", "swish"), f"activation={activation} is not known")
    n.require(x.type.rank == w.type.rank == 3, f"needs three dimensions, got {x.type} and {w.type}")
    _, channels, length = x.type.dims
    before = w.type.dims[2] - 1
    if n.has(3):
        padded = n.emit("concat", n.value(3), x, axis=2) if before else x
    else:
        padded = n.emit("pad", x, low=(0, 0, before), high=(0, 0, 0)) if before else x
    y = n.emit("conv", padded, w, groups=channels)
    if n.has(2):
        y = n.emit("add", y, reshape(n, n.value(2), (1, channels, 1)))
    if activation != "none":
        y = n.emit("mul", y, n.emit("sigmoid", y))
    return y, n.emit("slice", padded, start=(0, 0, length), stop=padded.type.dims, step=(1, 1, 1))


def _swiglu(n: OnnxNode) -> Result:
    a, b = n.value(0), n.value(1)
    n.require(a.type == b.type, f"operands differ: {a.type} and {b.type}")
    alpha = n.float_attr("alpha", 1.0)
    gate = n.emit("sigmoid", a if alpha == 1.0 else n.emit("mul", a, alpha))
    return n.emit("mul", n.emit("mul", a, gate), b)


RULES: dict[str, Rule] = {
    "Attention": _attention,
    "RotaryEmbedding": _rotary,
    "LinearAttention": _linear_attention,
    "CausalConvWithState": _causal_conv,
    "SwiGLU": _swiglu,
}
