"""Rows for row operations: softmax and norms, which need sums over an axis before their first element is known."""

from __future__ import annotations

from penstock.ir.types import FLOATS, TensorType

from .table import Required, Types, Values, axis_of, integer, need, need_floats, need_numbers, per_element, row


def _row(x: Types, a: Values) -> tuple[TensorType, ...]:
    axis_of(a["axis"], x[0].rank)
    need(
        len(set(x)) == 1 and x[0].dtype in FLOATS,
        f"needs floating-point operands of one type, got {' and '.join(map(str, x))}",
    )
    return (x[0],)


def _cumsum(x: Types, a: Values) -> tuple[TensorType, ...]:
    need_numbers(x)
    axis_of(a["axis"], x[0].rank)
    return (x[0],)


def _topk(x: Types, a: Values) -> tuple[TensorType, ...]:
    need_numbers(x)
    axis, k = axis_of(a["axis"], x[0].rank), integer(a["k"])
    size = x[0].dims[axis]
    need(0 <= k <= size, f"k must lie in 0..{size}, the size of axis {axis} of {x[0]}, got {k}")
    values = x[0].with_shape((*x[0].shape[:axis], k, *x[0].shape[axis + 1 :]))
    return values, values.with_dtype("i64")


def _norm_parts(x: TensorType, a: Values) -> tuple[TensorType, TensorType]:
    """Return the types of the statistics and of the weights of a layer norm over dimensions axis and after."""
    need_floats((x,))
    need(0 not in x.shape[axis_of(a["axis"], x.rank) :], f"there is nothing to normalise from axis {a['axis']} of {x}")
    axis = axis_of(a["axis"], x.rank)
    return x.with_shape(x.shape[:axis]), x.with_shape(x.shape[axis:])


def _layer_norm(x: Types, a: Values) -> tuple[TensorType, ...]:
    stat, weight = _norm_parts(x[0], a)
    need(
        x[1] == weight == x[2],
        f"scale and bias of {x[0]} from axis {a['axis']} must be {weight}, got {x[1]} and {x[2]}",
    )
    return x[0], stat, stat


def _layer_norm_grad(x: Types, a: Values) -> tuple[TensorType, ...]:
    dy, value, scale, mean, rstd = x
    stat, weight = _norm_parts(value, a)
    need(
        dy == value and scale == weight and mean == stat == rstd,
        f"expected gradient {value}, scale {weight}, mean and rstd {stat}, got {dy}, {scale}, {mean}, {rstd}",
    )
    return (value,)


def _layer_norm_grad_weight(x: Types, a: Values) -> tuple[TensorType, ...]:
    dy, value, mean, rstd = x
    stat, weight = _norm_parts(value, a)
    need(
        dy == value and mean == stat == rstd,
        f"expected gradient {value}, mean and rstd {stat}, got {dy}, {mean}, {rstd}",
    )
    return weight, weight


def _batch_norm(x: Types, a: Values) -> tuple[TensorType, ...]:
    need_floats(x)
    need(x[0].rank >= 2, f"needs batch and channel dimensions, got {x[0]}")
    for t in x[1:]:
        need(
            t == x[0].with_shape(x[0].shape[1:2]),
            f"scale, bias, mean and variance of {x[0]} must be {x[0].with_shape(x[0].shape[1:2])}, got {t}",
        )
    return (x[0],)


ROWS = (
    row(
        "softmax",
        "row",
        1,
        _row,
        "e^x over its sum along `axis`",
        axis=-1,
        flops=per_element(14),
        dims="a... n*@axis z... -> a... n z...",
    ),
    row(
        "softmax_grad",
        "row",
        2,
        _row,
        "from (y, dy): y * (dy - sum(dy * y))",
        axis=-1,
        flops=per_element(4),
        dims="a... n*@axis z..., a... n z... -> a... n z... | 1",
    ),
    row(
        "log_softmax",
        "row",
        1,
        _row,
        "logarithm of softmax",
        axis=-1,
        flops=per_element(14),
        dims="a... n*@axis z... -> a... n z...",
    ),
    row(
        "log_softmax_grad",
        "row",
        2,
        _row,
        "from (y, dy): dy - e^y * sum(dy)",
        axis=-1,
        flops=per_element(14),
        dims="a... n*@axis z..., a... n z... -> a... n z... | 1",
    ),
    row(
        "cumsum",
        "row",
        1,
        _cumsum,
        "sum of the elements up to here along `axis`; `exclusive` without the one here, `reverse` from the end",
        axis=Required(int),
        exclusive=False,
        reverse=False,
        flops=per_element(1),
        dims="a... n*@axis z... -> a... n z...",
    ),
    row(
        "topk",
        "row",
        1,
        _topk,
        "the `k` largest (or smallest) along `axis` in order, and their indices; of equal ones the "
        "first comes first, nan is above all",
        k=Required(int),
        axis=-1,
        largest=True,
        flops=per_element(8),
        dims="a... n*@axis z... -> a... k^ z..., a... k^ z...",
    ),
    row(
        "layer_norm",
        "row",
        3,
        _layer_norm,
        "(x - mean) * rstd * scale + bias over dimensions `axis` and after; also gives mean and rstd",
        axis=-1,
        eps=1e-5,
        flops=per_element(8),
        dims="s... n...*@axis, n...*, n...* -> s... n...*, s..., s...",
    ),
    row(
        "layer_norm_grad",
        "row",
        5,
        _layer_norm_grad,
        "gradient for x, from (dy, x, scale, mean, rstd)",
        axis=-1,
        flops=per_element(10),
        dims="s... n...*@axis, s... n...*, n...*, s..., s... -> s... n...* | 0",
    ),
    row(
        "layer_norm_grad_weight",
        "reduce",
        4,
        _layer_norm_grad_weight,
        "gradients for scale and bias, from (dy, x, mean, rstd)",
        axis=-1,
        flops=per_element(5),
        dims="s...+ n...@axis, s...+ n..., s...+, s...+ -> n..., n... | 0",
    ),
    row(
        "batch_norm",
        "elementwise",
        5,
        _batch_norm,
        "(x - mean) / sqrt(var + eps) * scale + bias per channel, from (x, scale, bias, mean, var)",
        eps=1e-5,
        flops=per_element(4),
        dims="n c z..., c, c, c, c -> n c z...",
    ),
)
