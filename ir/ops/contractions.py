"""Rows for contractions: products summed over shared dimensions."""

from __future__ import annotations

from math import prod

from penstock.ir.attrs import Attr
from penstock.ir.types import Dim, TensorType, broadcast_shapes

from .table import Required, Types, Values, integer, ints, need, need_floats, need_numbers, row, same_dtype
from .windows import WINDOW, window_of


def _matmul(x: Types, a: Values) -> tuple[TensorType, ...]:
    lhs, rhs = x
    need_numbers(x)
    same_dtype(x)
    need(lhs.rank >= 2 and rhs.rank >= 2, f"needs at least two dimensions on both sides, got {lhs} and {rhs}")
    m, k = lhs.shape[:-3:-1] if a["ta"] else lhs.shape[-2:]
    k2, n = rhs.shape[:-3:-1] if a["tb"] else rhs.shape[-2:]
    need(k == k2, f"inner sizes differ: {k} of {lhs} and {k2} of {rhs}")
    return (TensorType(lhs.dtype, (*broadcast_shapes(lhs.shape[:-2], rhs.shape[:-2]), m, n)),)


def _conv_out(x: TensorType, w: TensorType, a: Values) -> TensorType:
    need_floats((x, w))
    same_dtype((x, w))
    return TensorType(x.dtype, convolved(x, w, a))


def convolved(x: TensorType, w: TensorType, a: Values) -> tuple[Dim, ...]:
    """Return the shape of a convolution of x by w."""
    groups = integer(a["groups"])
    need(groups >= 1, f"groups must be 1 or more, got {groups}")
    need(
        x.rank == w.rank >= 3,
        f"needs batch, channels and at least one spatial dimension on both sides, got {x} and {w}",
    )
    need(
        x.dims[1] == w.dims[1] * groups,
        f"{x} has {x.dims[1]} channels, weight {w} in {groups} groups takes {w.dims[1] * groups}",
    )
    need(w.dims[0] % groups == 0, f"{w.dims[0]} output channels do not divide into {groups} groups")
    return (x.shape[0], w.shape[0], *window_of(a, w.dims[2:]).out_sizes(x.dims[2:]))


def _conv(x: Types, a: Values) -> tuple[TensorType, ...]:
    return (_conv_out(x[0], x[1], a),)


def _conv_grad_input(x: Types, a: Values) -> tuple[TensorType, ...]:
    out = x[0].with_shape(ints(a["shape"]))
    expected = _conv_out(out, x[1], a)
    need(
        expected.shape == x[0].shape, f"a convolution of {out} with {x[1]} gives {expected}, but the gradient is {x[0]}"
    )
    return (out,)


def _conv_grad_weight(x: Types, a: Values) -> tuple[TensorType, ...]:
    same_dtype(x)
    out = x[0].with_shape(ints(a["shape"]))
    expected = _conv_out(x[0], out, a)
    need(
        expected.shape == x[1].shape, f"a convolution of {x[0]} with {out} gives {expected}, but the gradient is {x[1]}"
    )
    return (out,)


def _attention(x: Types, a: Values) -> tuple[TensorType, ...]:
    q, k, v, *mask = x
    need_floats((q, k, v))
    same_dtype((q, k, v))
    need(q.rank == k.rank == v.rank == 4, f"needs [batch, heads, positions, size] for q, k and v, got {q}, {k}, {v}")
    need(
        q.shape[:2] == k.shape[:2] == v.shape[:2] and k.shape[2] == v.shape[2] and q.shape[3] == k.shape[3],
        f"q, k and v do not fit: {q}, {k}, {v}",
    )
    need(
        0 not in (*q.shape[2:], *k.shape[2:], *v.shape[2:]),
        f"positions and sizes must not be empty, got {q}, {k} and {v}",
    )
    scores = (*q.shape[:3], k.shape[2])
    for m in mask:
        need(m.dtype in ("bool", q.dtype), f"the mask must be bool or {q.dtype}, got {m}")
        need(
            m.rank <= 4 and broadcast_shapes(m.shape, scores) == scores,
            f"mask {m} does not broadcast to scores {list(scores)}",
        )
    row = TensorType(q.dtype if q.dtype == "f64" else "f32", q.shape[:3])
    return q.with_shape((*q.shape[:3], v.shape[3])), row, row


def _attention_grad(x: Types, a: Values) -> tuple[TensorType, ...]:
    dy, q, k, v, y, top, total, *mask = x
    expected = _attention((q, k, v, *mask), a)
    need(dy == y == expected[0], f"attention gives {expected[0]}, but result and gradient are {y} and {dy}")
    need(top == total == expected[1], f"expected row statistics {expected[1]}, got {top} and {total}")
    return q, k, v


def _matmul_flops(x: Types, y: Types, a: Values) -> float:
    return 2.0 * y[0].size * x[0].dims[-2 if a["ta"] else -1]


def _conv_flops(x: Types, y: Types, a: Values) -> float:
    return 2.0 * y[0].size * prod(x[1].dims[1:])


def _conv_grad_input_flops(x: Types, y: Types, a: Values) -> float:
    return 2.0 * x[0].size * prod(x[1].dims[1:])


def _conv_grad_weight_flops(x: Types, y: Types, a: Values) -> float:
    return 2.0 * x[1].size * prod(y[0].dims[1:])


def _seen(q: TensorType, k: TensorType, a: Values) -> float:
    """Count the scores of attention that are looked at."""
    return prod(q.dims[:3]) * k.dims[2] * (0.5 if a["causal"] else 1.0)


def _attention_flops(x: Types, y: Types, a: Values) -> float:
    q, k, v = x[:3]
    return 2.0 * _seen(q, k, a) * (q.dims[3] + v.dims[3])


def _attention_grad_flops(x: Types, y: Types, a: Values) -> float:
    """Count the operations of the scores again, their gradient, and three products with them."""
    q, k, v = y
    return 2.0 * _seen(q, k, a) * (3 * q.dims[3] + 2 * v.dims[3])


_CONV: dict[str, Attr | Required] = {**WINDOW, "groups": 1}

ROWS = (
    row(
        "matmul",
        "contract",
        2,
        _matmul,
        "matrix product over the last two dimensions, operands transposed by ta, tb; leading dimensions broadcast",
        ta=False,
        tb=False,
        flops=_matmul_flops,
        dims="... m k+ ~ta, ... k+ n ~tb -> ... m n | 0 1",
    ),
    row(
        "conv",
        "contract",
        2,
        _conv,
        "cross-correlation, x[n,c,...] with w[o,c/groups,...]",
        flops=_conv_flops,
        dims="n (g c+) y...*, (g o) c+ k...^ -> n (g o) y...* | 0 1",
        **_CONV,  # type: ignore[arg-type]
    ),
    row(
        "conv_grad_input",
        "contract",
        2,
        _conv_grad_input,
        "gradient of conv for x, from (dy, w); `shape` is x's",
        flops=_conv_grad_input_flops,
        shape=Required(tuple),
        dims="n (g o+) y...*, (g o+) c k...^ -> n (g c) y...* | 0 1",
        **_CONV,  # type: ignore[arg-type]
    ),
    row(
        "conv_grad_weight",
        "contract",
        2,
        _conv_grad_weight,
        "gradient of conv for w, from (x, dy); `shape` is w's",
        flops=_conv_grad_weight_flops,
        shape=Required(tuple),
        dims="n+ (g c) y...*+, n+ (g o) y...*+ -> (g o) c k...^ | 0 1",
        **_CONV,  # type: ignore[arg-type]
    ),
    row(
        "attention",
        "contract",
        (3, 4),
        _attention,
        "softmax(scale * q k^T) v on [batch, heads, positions, size]; `causal` looks at no later "
        "position; the optional mask is added to the scores, or (bool) where false hides by the "
        "lowest finite score; also gives per row the largest score and the sum of e^(score - largest)",
        causal=False,
        scale=Required(float),
        flops=_attention_flops,
        dims="b h s*= d^, b h s*= d^, b h s*= e^ -> b h s*= e^, b h s*=, b h s*=",
    ),
    row(
        "attention_grad",
        "contract",
        (7, 8),
        _attention_grad,
        "gradients for q, k and v, from (dy, q, k, v, y, largest, sum) and the mask, if any",
        causal=False,
        scale=Required(float),
        flops=_attention_grad_flops,
        dims="b h s*= e^, b h s*= d^, b h s*= d^, b h s*= e^, b h s*= e^, b h s*=, b h s*= "
        "-> b h s*= d^, b h s*= d^, b h s*= e^",
    ),
)
