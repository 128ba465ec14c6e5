"""Operators of a turn, which no file has: attention over caches, and the choice of tokens.

    Attend(q, k, v, cos, sin, places, starts, lengths, table)   `put` of keys and values, and `attend`
    Pick(logits, draws, temperature, top_k, top_p)              `pick`

Each attention gets two variables of role `cache`, `layers.N.keys` and `layers.N.values`.
"""

from __future__ import annotations

import math

from penstock.frontends.formulas.attention import rotate
from penstock.frontends.formulas.layout import cut, reshape, transpose
from penstock.frontends.onnx.node import OnnxNode, Result, Rule
from penstock.ir.graph import Value
from penstock.ir.ops.caches import BLOCK


def _rows(n: OnnxNode, x: Value, heads: int, written: bool) -> Value:
    """Turn [1, rows, heads * size] or [1, heads, rows, size] into [rows, heads, size].

    What is `written` out has heads in front, also without the dimension of sequences.
    """
    dims = x.type.dims
    if written and x.type.rank == 3:
        x = reshape(n, x, (1, *dims))
        dims = x.type.dims
    n.require(x.type.rank in (3, 4) and dims[0] == 1, f"queries, keys and values must be of one sequence, got {x.type}")
    if x.type.rank == 4:
        n.require(dims[1] == heads, f"{x.type} has not {heads} heads")
        return reshape(n, transpose(n, x, (0, 2, 1, 3)), (dims[2], heads, dims[3]))
    n.require(dims[2] % heads == 0, f"{dims[2]} of {x.type} does not divide into {heads} heads")
    return reshape(n, x, (dims[1], heads, dims[2] // heads))


def _turned(n: OnnxNode, x: Value, interleaved: bool) -> Value:
    if not n.has(3):
        return x
    cos, sin = (reshape(n, n.value(i), (x.type.dims[0], 1, n.type(i).dims[1])) for i in (3, 4))
    return rotate(n, x, cos, sin, interleaved)


def _attend(n: OnnxNode) -> Result:
    heads, key_heads = n.int_attr("heads"), n.int_attr("key_heads")
    layer, blocks, interleaved = n.int_attr("layer"), n.int_attr("blocks"), bool(n.int_attr("interleaved"))
    packed = n.value()
    n.require(packed.type.dtype == "f32", f"attention over caches is in f32, got {packed.type}")
    parts = [packed, n.value(1), n.value(2)] if n.has(1) else []
    if not parts:
        each = packed.type.dims[-1] // (heads + 2 * key_heads)
        ends = [0, heads * each, (heads + key_heads) * each, (heads + 2 * key_heads) * each]
        n.require(packed.type.rank == 3 and ends[3] == packed.type.dims[2], f"{packed.type} holds no whole heads")
        parts = [cut(n, packed, 2, ends[i], ends[i + 1]) for i in range(3)]
    counts = (heads, key_heads, key_heads)
    written, rank = bool(n.int_attr("written")), packed.type.rank
    q, k, v = (_rows(n, part, count, written) for part, count in zip(parts, counts, strict=True))
    q, k = _turned(n, q, interleaved), _turned(n, k, interleaved)
    size = n.int_attr("size") or q.type.dims[2]
    n.require(q.type.dims[2] == size, f"{packed.type} holds heads of {q.type.dims[2]}, those of the past have {size}")
    places, starts, lengths, table = (n.value(i) for i in range(5, 9))
    cache = n.text_attr("cache")
    keys, values = (
        n.put(rows, places, n.cache(f"layers.{layer}.{what}", cache, (blocks, BLOCK, *rows.type.dims[1:])))
        for what, rows in (("keys", k), ("values", v))
    )
    scale = n.float_attr("scale") or 1.0 / math.sqrt(q.type.dims[-1])
    window, cap = n.int_attr("window"), n.float_attr("cap")
    y = n.emit("attend", q, keys, values, starts, lengths, table, scale=scale, window=window, cap=cap)
    if written:
        y = transpose(n, y, (1, 0, 2))
        return y if rank == 3 else reshape(n, y, (1, *y.type.dims))
    return reshape(n, y, (1, y.type.dims[0], heads * size))


def _pick(n: OnnxNode) -> Result:
    return n.emit("pick", *(n.value(i) for i in range(5)))


RULES: dict[str, Rule] = {"Attend": _attend, "Pick": _pick}
