"""Operators of domain com.microsoft that exporters and onnxruntime's optimiser write.

They are activations, normalisations, attention, and fused products. Their meaning is that of onnxruntime on CPUs.
Attention takes no past keys and values: whole sequences, not one token after the other. A mask of numbers hides by
adding `mask_filter_value`, as in onnxruntime, so a row that sees nothing weighs all keys alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.frontends.formulas.attention import capped, hide, join_heads, repeat_heads, rotate, split_heads
from penstock.frontends.formulas.elementwise import between, hard_sigmoid, leaky
from penstock.frontends.formulas.layout import cut, reshape, triangle
from penstock.frontends.formulas.norms import rms_norm
from penstock.frontends.onnx.node import OnnxNode, Result, Rule
from penstock.frontends.quantised.nbits import read_nbits
from penstock.frontends.quantised.weight import QuantisedWeight
from penstock.frontends.writer import Refused
from penstock.ir.graph import Value
from penstock.support.errors import UnsupportedModel

from . import layout, neural

# ---------------------------------------------------------------------------------------- activations and normalisation


def _gelu(approximate: str, biased: bool) -> Rule:
    def rule(n: OnnxNode) -> Result:
        x = n.emit("add", n.value(0), n.value(1)) if biased and n.has(1) else n.value()
        return n.emit("gelu", x, approximate=approximate)

    return rule


def _quick_gelu(n: OnnxNode) -> Result:
    return n.emit("mul", n.value(), n.emit("sigmoid", n.emit("mul", n.value(), n.float_attr("alpha", 1.702))))


def _normalised(n: OnnxNode, x: Value, gamma: Value, beta: Value | None, eps: float) -> Value:
    """Normalise over the last dimension."""
    bias = beta if beta is not None else n.emit("const", value=0.0, dtype=x.type.dtype, shape=gamma.type.dims)
    return n.emit_all("layer_norm", 3, x, gamma, bias, axis=-1, eps=eps)[0]


def _skip_norm(simplified: bool) -> Rule:
    """Make a rule that normalises a sum, which is the fourth result. The second and third are for training."""

    def rule(n: OnnxNode) -> Sequence[Result]:
        n.require(not any(n.proto.output[1:3]), "mean and deviation as results are not supported")
        x, skip, eps = n.value(0), n.value(1), n.float_attr("epsilon", 1e-12 if not simplified else 1e-5)
        bias = 3 if simplified else 4
        total = n.emit("add", x, skip)
        total = n.emit("add", total, n.value(bias)) if n.has(bias) else total
        if simplified:
            y = n.emit("mul", rms_norm(n, total, total.type.rank - 1, eps), n.value(2))
        else:
            y = _normalised(n, total, n.value(2), n.value(3) if n.has(3) else None, eps)
        return y, y, y, total

    return rule


def _embed_norm(n: OnnxNode) -> Sequence[Result]:
    """Look up words, positions and segments, add and normalise them. Count the positions that the mask leaves."""
    ids = n.value(0)
    batch, positions = ids.type.dims
    total = n.emit("gather", n.value(2), ids, axis=0)
    places = n.value(3)
    if n.has(8):
        total = n.emit("add", total, n.emit("gather", places, n.value(8), axis=0))
    else:
        n.require(positions <= places.type.dims[0], f"{positions} positions, but only {places} embeddings")
        total = n.emit("add", total, cut(n, places, 0, 0, positions))
    if n.has(1):
        total = n.emit("add", total, n.emit("gather", n.value(4), n.value(1), axis=0))
    y = _normalised(n, total, n.value(5), n.value(6), n.float_attr("epsilon", 1e-12))
    kind = n.int_attr("mask_index_type")
    n.require(kind in (0, 1), f"mask_index_type={kind} is not supported")
    if n.has(7):
        left = n.emit("sum", n.value(7), axes=(1,))
    else:
        left = n.emit("const", value=0, dtype="i32", shape=(batch,))
    return y, left, total


# ---------------------------------------------------------------------------------------- attention


@dataclass(frozen=True)
class _Scoring:
    """The computation of scores from queries and keys of four dimensions: q k^T * scale, capped, plus `added`.

    `keep` and, with `causal`, the order of positions hide keys.
    """

    scale: float
    added: Sequence[Value]
    causal: bool
    keep: Value | None = None
    cap: float = 0.0


def _weighed(n: OnnxNode, q: Value, k: Value, v: Value, scoring: _Scoring) -> Value:
    """Compute softmax(scores) v, in which hidden keys have weight 0."""
    rows, columns = q.type.dims[2], k.type.dims[2]
    keep, causal = scoring.keep, scoring.causal
    if not scoring.added and keep is None and not scoring.cap and (not causal or rows == columns):
        return n.emit_all("attention", 3, q, k, v, causal=causal, scale=scoring.scale)[0]
    scores = n.emit("mul", n.emit("matmul", q, k, tb=True), scoring.scale)
    scores = capped(n, scores, scoring.cap)
    for bias in scoring.added:
        scores = n.emit("add", scores, bias)
    if causal:
        before = triangle(n, rows, columns, columns - rows)
        keep = before if keep is None else n.emit("and", keep, before)
    if keep is not None:
        scores = hide(n, scores, keep)
    return n.emit("matmul", n.emit("softmax", scores, axis=-1), v)


def _hidden(n: OnnxNode, i: int, dtype: str, rows: int, columns: int, batch: int) -> list[Value]:
    """Compute the numbers that a mask adds to the scores: 0 where the mask is not 0, else the filter value."""
    if not n.has(i):
        n.ignore("mask_filter_value")
        return []
    mask = n.value(i)
    dims = mask.type.dims
    if dims == (batch,):  # the number of keys that are left
        line = n.emit("iota", dtype=mask.type.dtype, shape=(1, 1, 1, columns), axis=3)
        seen = n.emit("less", line, reshape(n, mask, (batch, 1, 1, 1)))
    else:
        shapes = {(batch, columns): (batch, 1, 1, columns), (batch, rows, columns): (batch, 1, rows, columns)}
        n.require(
            dims in shapes,
            f"a mask {mask.type} is not supported, only one number per batch entry, key, or query and key",
        )
        seen = n.emit("less", 0, reshape(n, mask, shapes[dims]))
    filler = n.float_attr("mask_filter_value", -10000.0)
    return [n.emit("where", seen, n.literal(0.0, dtype), n.literal(filler, dtype))]


def _attention(n: OnnxNode) -> Result:
    n.only_first_output()
    n.require(not any(n.has(i) for i in (4, 6)), "past keys and values are not supported")
    n.require(not n.int_attr("do_rotary") and not n.int_attr("past_present_share_buffer"), "do_rotary is not supported")
    x, w, heads = n.value(0), n.value(1), n.int_attr("num_heads")
    batch, positions, _ = x.type.dims
    total = n.emit("matmul", x, w)
    total = n.emit("add", total, n.value(2)) if n.has(2) else total
    width = w.type.dims[1]
    sizes = n.ints_attr("qkv_hidden_sizes") or (width // 3,) * 3
    n.require(
        len(sizes) == 3 and sum(sizes) == width and sizes[0] == sizes[1],
        f"hidden sizes {list(sizes)} do not fit weight {w.type}",
    )
    parts = [cut(n, total, 2, sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(3)]
    q, k, v = (split_heads(n, part, heads) for part in parts)
    scale = n.float_attr("scale") or 1.0 / math.sqrt(q.type.dims[-1])
    added = _hidden(n, 3, x.type.dtype, positions, positions, batch)
    added += [n.value(5)] if n.has(5) else []
    return join_heads(n, _weighed(n, q, k, v, _Scoring(scale, added, bool(n.int_attr("unidirectional")))))


def _multi_head(n: OnnxNode) -> Sequence[Result]:
    n.require(not any(n.has(i) for i in (6, 7, 8, 9)), "past keys and values are not supported")
    n.require(n.has(1) and n.has(2) and n.type().rank == 3, "packed queries, keys and values are not supported")
    heads = n.int_attr("num_heads")
    q, k, v = (n.value(i) for i in range(3))
    if n.has(3):
        bias, ends = n.value(3), (0, q.type.dims[-1], 2 * q.type.dims[-1], n.type(3).dims[0])
        q, k, v = (
            n.emit("add", x, cut(n, bias, 0, ends[i], ends[i + 1])) if x.type.rank == 3 else x
            for i, x in enumerate((q, k, v))
        )
    q, k, v = (split_heads(n, x, heads) for x in (q, k, v))
    batch, _, rows, size = q.type.dims
    added = _hidden(n, 4, q.type.dtype, rows, k.type.dims[2], batch)
    added += [n.value(5)] if n.has(5) else []
    scale = n.float_attr("scale") or 1.0 / math.sqrt(size)
    y = _weighed(n, q, k, v, _Scoring(scale, added, bool(n.int_attr("unidirectional"))))
    return join_heads(n, y), k, v


def _group_query(n: OnnxNode) -> Sequence[Result]:
    """Write GroupQueryAttention over whole sequences from their first position on.

    Its results at positions behind the end of a shorter sequence in the batch are not specified.
    """
    n.require(not any(n.has(i) and n.type(i).size for i in (3, 4)), "past keys and values are not supported")
    n.require(not any(n.has(i) for i in (11, *range(12, n.count))), "sinks and quantised caches are not supported")
    n.require(
        not n.int_attr("smooth_softmax") and not n.int_attr("qk_output"),
        "smooth_softmax and qk_output are not supported",
    )
    heads, key_heads = n.int_attr("num_heads"), n.int_attr("kv_num_heads")
    q = n.value()
    n.require(
        q.type.rank == 3 and heads > 0 and key_heads > 0,
        f"needs three dimensions and the numbers of heads, got {q.type}",
    )
    if n.has(1):
        parts = [q, n.value(1), n.value(2)]
    else:
        size = q.type.dims[2] // (heads + 2 * key_heads)
        ends = (0, heads * size, (heads + key_heads) * size, (heads + 2 * key_heads) * size)
        parts = [cut(n, q, 2, ends[i], ends[i + 1]) for i in range(3)]
    q, k, v = (split_heads(n, x, count) for x, count in zip(parts, (heads, key_heads, key_heads), strict=True))
    rows, columns = q.type.dims[2], k.type.dims[2]
    n.require(rows == columns, f"{rows} queries but {columns} keys")
    interleaved = bool(n.int_attr("rotary_interleaved"))
    if n.int_attr("do_rotary"):
        n.require(not n.has(9), "position_ids are not supported")
        cos, sin = (reshape(n, cut(n, n.value(i), 0, 0, rows), (1, 1, rows, n.type(i).dims[1])) for i in (7, 8))
        q, k = rotate(n, q, cos, sin, interleaved), rotate(n, k, cos, sin, interleaved)
    window, keep = n.int_attr("local_window_size", -1), None
    if window > 0:
        keep = n.emit("not", triangle(n, rows, columns, -window))
    scale = n.float_attr("scale") or 1.0 / math.sqrt(q.type.dims[-1])
    added = [n.value(10)] if n.has(10) else []
    scoring = _Scoring(scale, added, True, keep, n.float_attr("softcap"))
    y = _weighed(n, q, repeat_heads(n, k, heads), repeat_heads(n, v, heads), scoring)
    return join_heads(n, y), k, v


def _rotary(n: OnnxNode) -> Result:
    n.require(
        not n.int_attr("is_packed_batching") and n.float_attr("scale", 1.0) == 1.0,
        "packed batches and a scale are not supported",
    )
    x, heads = n.value(0), n.int_attr("num_heads")
    size = n.int_attr("rotary_embedding_dim")
    positions = x.type.dims[1] if x.type.rank == 3 else x.type.dims[2]
    half = n.type(2).dims[1]
    if x.type.rank == 3 and not heads:
        n.require(not size, "rotary_embedding_dim needs num_heads")
        heads = x.type.dims[2] // (2 * half)
    turned = split_heads(n, x, heads)
    n.require(size in (0, 2 * half), f"rotary_embedding_dim={size} does not fit {half} entries of the caches")
    where = n.value(1)
    if where.type.rank == 1:  # the position of the first entry
        n.require(where.type.size == 1, f"needs one position or one for each entry, got {where.type}")
        where = n.emit(
            "add", n.emit("iota", dtype=where.type.dtype, shape=(1, positions), axis=1), reshape(n, where, ())
        )
    lead = where.type.dims[0]
    cos, sin = (reshape(n, n.emit("gather", n.value(i), where, axis=0), (lead, 1, positions, half)) for i in (2, 3))
    y = rotate(n, turned, cos, sin, bool(n.int_attr("interleaved")))
    return join_heads(n, y) if x.type.rank == 3 else y


# ---------------------------------------------------------------------------------------- products with an epilogue


_ACTIVATIONS: dict[str, tuple[tuple[float, ...], Callable[..., Value]]] = {
    "": ((), lambda n, x: x),
    "Relu": ((), lambda n, x: n.emit("relu", x)),
    "Tanh": ((), lambda n, x: n.emit("tanh", x)),
    "Sigmoid": ((), lambda n, x: n.emit("sigmoid", x)),
    "LeakyRelu": ((0.01,), leaky),
    "HardSigmoid": ((0.2, 0.5), hard_sigmoid),
    "Clip": ((-math.inf, math.inf), between),
}


def _activated(n: OnnxNode, x: Value, numbers: Sequence[float]) -> Value:
    name = n.text_attr("activation")
    n.require(name in _ACTIVATIONS, f"activation={name} is not supported")
    defaults, write = _ACTIVATIONS[name]
    return write(n, x, *numbers[: len(defaults)], *defaults[len(numbers) :])


def _fused_gemm(n: OnnxNode) -> Result:
    y = neural.gemm(n)
    numbers = [n.float_attr(name) for name in ("activation_alpha", "activation_beta") if n.given(name)]
    return _activated(n, y, numbers)


def _fused_conv(n: OnnxNode) -> Result:
    y = neural.conv(n)
    y = n.emit("add", y, n.value(3)) if n.has(3) else y
    return _activated(n, y, n.floats_attr("activation_params"))


def _fused_matmul(n: OnnxNode) -> Result:
    n.require(not n.int_attr("transBatchA") and not n.int_attr("transBatchB"), "transposed batches are not supported")
    x, y = n.value(0), n.value(1)
    n.require(
        x.type.rank >= 2 and y.type.rank >= 2, f"needs at least two dimensions on both sides, got {x.type} and {y.type}"
    )
    product = n.emit("matmul", x, y, ta=bool(n.int_attr("transA")), tb=bool(n.int_attr("transB")))
    alpha = n.float_attr("alpha", 1.0)
    return product if alpha == 1.0 else n.emit("mul", product, alpha)


def _matmul_nbits(n: OnnxNode) -> Result:
    """Multiply by a weight of 8 or 4 bits as it is stored. Level 4 of accuracy, sums of bytes, is a permission."""
    n.ignore("accuracy_level", "weight_prepacked")
    n.require(not n.has(4), "an order of groups (g_idx) is not supported")
    rows, k, bits, block = n.int_attr("N"), n.int_attr("K"), n.int_attr("bits", 4), n.int_attr("block_size")
    n.require(rows > 0 and k > 0 and block > 0, f"N={rows}, K={k}, block_size={block} are no sizes")
    arrays = n.constants({1: "the weight", 2: "its scales", 3: "its zero points"})
    numbers, blocks = arrays[1], -(-k // block)
    n.require(
        numbers.size == rows * blocks * (block * bits // 8),
        f"a weight of {list(numbers.shape)} does not fit N={rows}, K={k}, block_size={block}",
    )
    numbers = numbers.reshape(rows, blocks, -1)

    def read() -> QuantisedWeight:
        return read_nbits(numbers, arrays[2], arrays.get(3), k=k, bits=bits, block=block, where=n.loc)

    try:
        weight = n.once(("nbits", k, bits, block), (1, 2, 3), read)
    except UnsupportedModel as error:
        raise Refused(error.what) from error
    parts = [part for part in (weight.q, weight.scales, weight.zeros) if part is not None]
    operands = [n.literal(part, "f32") for part in parts]
    y = n.emit("matmul_q", n.value(0), *operands, bits=weight.bits, group=weight.group)
    return n.emit("add", y, n.value(5)) if n.has(5) else y


RULES: dict[str, Rule] = {
    "MatMulNBits": _matmul_nbits,
    "Gelu": _gelu("none", False),
    "BiasGelu": _gelu("none", True),
    "FastGelu": _gelu("tanh", True),
    "QuickGelu": _quick_gelu,
    "SkipLayerNormalization": _skip_norm(False),
    "SkipSimplifiedLayerNormalization": _skip_norm(True),
    "EmbedLayerNormalization": _embed_norm,
    "Attention": _attention,
    "MultiHeadAttention": _multi_head,
    "GroupQueryAttention": _group_query,
    "RotaryEmbedding": _rotary,
    "FusedMatMul": _fused_matmul,
    "FusedGemm": _fused_gemm,
    "FusedConv": _fused_conv,
    "Trilu": layout.RULES["Trilu"],
}
