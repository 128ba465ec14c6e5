"""What each row of the op table means, in NumPy: `NUMPY[kind](inputs, attrs) -> results`, for every row but the state operations.

`attrs` are complete (see `complete_attrs`). Each function is the definition that kernels are tested against, so it is written to be
obviously right, not to be fast. Arithmetic is done in the element type of the operands, long sums in float64; a result may be wider than
its declared type, and `apply_op` rounds it. Half-precision operands are widened to float32 first, as real kernels do.

Known limits: `div` of the smallest integer by -1 wraps, and integer division by zero gives 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from .errors import VerifyError
from .graph import Attr, Op
from .ops import Window, complete_attrs, reduced_axes, window_of
from .types import FLOATS, TensorType, numpy_dtype

Array = np.ndarray[Any, Any]
Values = Mapping[str, Any]
Index = tuple[Any, ...]
_ALL = slice(None)
Rule = Callable[[Sequence[Array], Values], tuple[Array, ...]]
TYPED, F64 = "typed", "f64"
PRECISIONS = (TYPED, F64)


# ---------------------------------------------------------------------------------------- error function

# W. J. Cody, "Rational Chebyshev approximations for the error function", Mathematics of Computation 23 (1969), pages 631-637:
# numerator and denominator, highest power first, for |x| <= 0.46875, up to 4, and above 4.
_ERF_SMALL = (
    (1.85777706184603153e-1, 3.16112374387056560e0, 1.13864154151050156e2, 3.77485237685302021e2, 3.20937758913846947e3),
    (1.0, 2.36012909523441209e1, 2.44024637934444173e2, 1.28261652607737228e3, 2.84423683343917062e3),
)
# fmt: off
_ERFC_MIDDLE = (
    (2.15311535474403846e-8, 5.64188496988670089e-1, 8.88314979438837594e0, 6.61191906371416295e1, 2.98635138197400131e2,
     8.81952221241769090e2, 1.71204761263407058e3, 2.05107837782607147e3, 1.23033935479799725e3),
    (1.0, 1.57449261107098347e1, 1.17693950891312499e2, 5.37181101862009858e2, 1.62138957456669019e3,
     3.29079923573345963e3, 4.36261909014324716e3, 3.43936767414372164e3, 1.23033935480374942e3),
)
_ERFC_LARGE = (
    (1.63153871373020978e-2, 3.05326634961232344e-1, 3.60344899949804439e-1, 1.25781726111229246e-1,
     1.60837851487422766e-2, 6.58749161529837803e-4),
    (1.0, 2.56852019228982242e0, 1.87295284992346725e0, 5.27905102951428412e-1, 6.05183413124413191e-2, 2.33520497626869185e-3),
)
# fmt: on


def _ratio(coefficients: tuple[tuple[float, ...], tuple[float, ...]], x: Array) -> Array:
    return np.polyval(coefficients[0], x) / np.polyval(coefficients[1], x)


def erf(x: Array) -> Array:
    """The error function in float64, to about one unit in the last place."""
    x = np.asarray(x, np.float64)
    size = np.abs(x)
    small, large = size <= 0.46875, size > 4.0
    near = np.where(small, x, 0.0)
    inside = near * _ratio(_ERF_SMALL, near * near)
    middle = np.exp(-(np.minimum(size, 4.0) ** 2)) * _ratio(_ERFC_MIDDLE, np.minimum(size, 4.0))
    far = np.clip(size, 4.0, 30.0)
    inverse = 1.0 / (far * far)
    tail = np.exp(-far * far) / far * (1.0 / math.sqrt(math.pi) - inverse * _ratio(_ERFC_LARGE, inverse))
    outside = np.copysign(1.0 - np.where(large, tail, middle), x)
    return np.where(np.isnan(x), x, np.where(small, inside, outside))


# ---------------------------------------------------------------------------------------- sources and elementwise


def _const(x: Sequence[Array], a: Values) -> tuple[Array, ...]:
    dtype, shape = numpy_dtype(a["dtype"]), a["shape"]
    if isinstance(a["value"], tuple):
        return (np.array(a["value"], dtype).reshape(shape),)
    return (np.full(shape, a["value"], dtype),)


def _iota(x: Sequence[Array], a: Values) -> tuple[Array, ...]:
    shape = a["shape"]
    axis = a["axis"] % len(shape)
    line = np.arange(shape[axis]).reshape([-1 if i == axis else 1 for i in range(len(shape))])
    return (np.broadcast_to(line, shape).astype(numpy_dtype(a["dtype"])),)


def _map(function: Callable[..., Any]) -> Rule:
    """An elementwise rule; operands broadcast."""
    return lambda x, a: (np.asarray(function(*x)),)


def _sigmoid(x: Array) -> Array:
    decay = np.exp(-np.abs(x))  # never overflows
    return np.asarray(np.where(x >= 0, 1, decay) / (1 + decay))


def _divide(a: Array, b: Array) -> Array:
    if np.issubdtype(a.dtype, np.integer):
        return (a - np.fmod(a, b)) // b
    return a / b


def _cast(x: Sequence[Array], a: Values) -> tuple[Array, ...]:
    return (x[0].astype(numpy_dtype(a["dtype"])),)


_TANH_SLOPE, _TANH_CUBIC = math.sqrt(2 / math.pi), 0.044715


def _gelu_form(a: Values) -> str:
    form = str(a["approximate"])
    if form not in ("none", "tanh"):
        raise VerifyError(f"gelu has no approximation {form!r}, expected none or tanh")
    return form


def _gelu(x: Sequence[Array], a: Values) -> tuple[Array, ...]:
    v = x[0].astype(np.float64)
    if _gelu_form(a) == "tanh":
        return (0.5 * v * (1 + np.tanh(_TANH_SLOPE * (v + _TANH_CUBIC * v**3))),)
    return (0.5 * v * (1 + erf(v / math.sqrt(2))),)


def _gelu_grad(x: Sequence[Array], a: Values) -> tuple[Array, ...]:
    v, dy = x[0].astype(np.float64), x[1]
    if _gelu_form(a) == "tanh":
        t = np.tanh(_TANH_SLOPE * (v + _TANH_CUBIC * v**3))
        slope = 0.5 * (1 + t) + 0.5 * v * (1 - t * t) * _TANH_SLOPE * (1 + 3 * _TANH_CUBIC * v * v)
    else:
        slope = 0.5 * (1 + erf(v / math.sqrt(2))) + v * np.exp(-0.5 * v * v) / math.sqrt(2 * math.pi)
    return (dy * slope,)


# ---------------------------------------------------------------------------------------- layout and reductions


def _slice(x: Sequence[Array], a: Values) -> tuple[Array, ...]:
    return (x[0][tuple(slice(b, e, s) for b, e, s in zip(a["start"], a["stop"], a["step"], strict=True))],)


def _pad(x: Sequence[Array], a: Values) -> tuple[Array, ...]:
    low, high, inner = a["low"], a["high"], a["inner"] or (0,) * x[0].ndim
    spread = [n + i * max(n - 1, 0) for n, i in zip(x[0].shape, inner, strict=True)]
    out = np.full([p + n + q for p, n, q in zip(low, spread, high, strict=True)], a["value"], x[0].dtype)
    out[tuple(slice(p, p + n, i + 1) for p, n, i in zip(low, spread, inner, strict=True))] = x[0]
    return (out,)


def _wide(x: Array) -> Array:
    """float64 for floats: long sums keep their digits whatever the order."""
    return x.astype(np.float64) if np.issubdtype(x.dtype, np.floating) else x


def _reduce(function: Callable[..., Any]) -> Rule:
    def rule(x: Sequence[Array], a: Values) -> tuple[Array, ...]:
        axes = reduced_axes(TensorType("f32", x[0].shape), a["axes"])
        return (np.asarray(function(_wide(x[0]), axis=axes, keepdims=a["keep"])),)

    return rule


def _mean(x: Array, axis: tuple[int, ...], keepdims: bool) -> Array:
    if np.issubdtype(x.dtype, np.integer):
        count = np.array(math.prod(x.shape[i] for i in axis), x.dtype)
        return _divide(np.sum(x, axis=axis, keepdims=keepdims, dtype=x.dtype), count)
    return np.asarray(np.mean(x, axis=axis, keepdims=keepdims))


def _sum(x: Array, axis: tuple[int, ...], keepdims: bool) -> Array:
    return np.sum(x, axis=axis, keepdims=keepdims, dtype=x.dtype)


# ---------------------------------------------------------------------------------------- contractions and windows


def _turned(x: Array, transposed: bool) -> Array:
    return np.swapaxes(x, -1, -2) if transposed else x


def _matmul(x: Sequence[Array], a: Values) -> tuple[Array, ...]:
    return (np.matmul(_turned(x[0], a["ta"]), _turned(x[1], a["tb"])),)


def _positions(window: Window, out_sizes: Sequence[int]) -> Iterator[tuple[Index, Index]]:
    """Every kernel position, as an index into a weight, with the part of the padded input that it meets: one entry per output position."""
    for position in product(*map(range, window.kernel)):
        parts = zip(position, window.dilations, window.strides, out_sizes, strict=True)
        yield (_ALL, _ALL, *position), (_ALL, _ALL, *(slice(k * d, k * d + s * (n - 1) + 1, s) for k, d, s, n in parts))


def _padded(x: Array, window: Window, value: Any) -> Array:
    return np.pad(x, [(0, 0), (0, 0), *zip(window.low, window.high, strict=True)], constant_values=value)


def _inner(padded: Array, window: Window, sizes: Sequence[int]) -> Array:
    return padded[(_ALL, _ALL, *(slice(p, p + n) for p, n in zip(window.low, sizes, strict=True)))]


def _groups(x: Array, axis: int, groups: int) -> list[Array]:
    return np.split(x, groups, axis)


def _conv(x: Sequence[Array], a: Values) -> tuple[Array, ...]:
    window = window_of(a, x[1].shape[2:])
    padded, outs = _padded(x[0], window, 0), window.out_sizes(x[0].shape[2:])
    parts = []
    for data, weight in zip(_groups(padded, 1, a["groups"]), _groups(x[1], 0, a["groups"]), strict=True):
        part = np.zeros((x[0].shape[0], weight.shape[0], *outs), x[0].dtype)
        for position, where in _positions(window, outs):
            part += np.einsum("nc...,oc->no...", data[where], weight[position], optimize=True)
        parts.append(part)
    return (np.concatenate(parts, 1),)


def _conv_grad_input(x: Sequence[Array], a: Values) -> tuple[Array, ...]:
    dy, weights = x
    window, sizes = window_of(a, weights.shape[2:]), a["shape"][2:]
    parts = []
    for grad, weight in zip(_groups(dy, 1, a["groups"]), _groups(weights, 0, a["groups"]), strict=True):
        part = _padded(np.zeros((dy.shape[0], weight.shape[1], *sizes), dy.dtype), window, 0)
        for position, where in _positions(window, dy.shape[2:]):
            part[where] += np.einsum("no...,oc->nc...", grad, weight[position], optimize=True)
        parts.append(_inner(part, window, sizes))
    return (np.concatenate(parts, 1),)


def _conv_grad_weight(x: Sequence[Array], a: Values) -> tuple[Array, ...]:
    data, dy = x
    window = window_of(a, a["shape"][2:])
    spatial = "xyzuvw"[: len(window.kernel)]
    parts = []
    for block, grad in zip(_groups(_padded(data, window, 0), 1, a["groups"]), _groups(dy, 1, a["groups"]), strict=True):
        part = np.zeros((grad.shape[1], *a["shape"][1:]), data.dtype)
        for position, where in _positions(window, dy.shape[2:]):
            part[position] = np.einsum(f"nc{spatial},no{spatial}->oc", block[where], grad, optimize=True)
        parts.append(part)
    return (np.concatenate(parts, 0),)


def _lowest(dtype: np.dtype[Any]) -> Any:
    return -np.inf if np.issubdtype(dtype, np.floating) else np.iinfo(dtype).min


def _max_pool(x: Sequence[Array], a: Values) -> tuple[Array, ...]:
    window = window_of(a, a["window"])
    padded = _padded(x[0], window, _lowest(x[0].dtype))
    return (np.max([padded[where] for _, where in _positions(window, window.out_sizes(x[0].shape[2:]))], axis=0),)


def _max_pool_grad(x: Sequence[Array], a: Values) -> tuple[Array, ...]:
    data, y, dy = x
    window = window_of(a, a["window"])
    padded = _padded(data, window, _lowest(data.dtype))
    grad, free = np.zeros(padded.shape, dy.dtype), np.ones(y.shape, bool)
    for _, where in _positions(window, y.shape[2:]):
        chosen = free & (padded[where] == y)
        grad[where] += np.where(chosen, dy, 0)
        free &= ~chosen
    return (_inner(grad, window, data.shape[2:]),)


def _counts(a: Values, sizes: Sequence[int], dtype: np.dtype[Any]) -> Array:
    """How many elements each window averages over."""
    window = window_of(a, a["window"])
    ones = _padded(np.ones((1, 1, *sizes), dtype), window, 1 if a["include_pad"] else 0)
    return np.asarray(np.sum([ones[where] for _, where in _positions(window, window.out_sizes(sizes))], axis=0))


def _avg_pool(x: Sequence[Array], a: Values) -> tuple[Array, ...]:
    window, data = window_of(a, a["window"]), _wide(x[0])
    padded = _padded(data, window, 0)
    total = np.sum([padded[where] for _, where in _positions(window, window.out_sizes(data.shape[2:]))], axis=0)
    return (_divide(total, _counts(a, data.shape[2:], data.dtype)),)


def _avg_pool_grad(x: Sequence[Array], a: Values) -> tuple[Array, ...]:
    window, sizes = window_of(a, a["window"]), a["shape"][2:]
    share = x[0] / _counts(a, sizes, x[0].dtype)
    grad = _padded(np.zeros(a["shape"], x[0].dtype), window, 0)
    for _, where in _positions(window, x[0].shape[2:]):
        grad[where] += share
    return (_inner(grad, window, sizes),)


def _attention(x: Sequence[Array], a: Values) -> tuple[Array, ...]:
    q, k, v = x
    scores = np.matmul(q, np.swapaxes(k, -1, -2)) * q.dtype.type(a["scale"])
    if a["causal"]:
        rows, columns = np.arange(q.shape[2])[:, None], np.arange(k.shape[2])[None, :]
        scores = np.where(columns > rows, -np.inf, scores).astype(q.dtype)
    return (np.matmul(_softmax(scores, -1), v),)


# ---------------------------------------------------------------------------------------- rows


def _log_sum(x: Array, axis: int) -> Array:
    """log(sum(e^x)) with the axis kept, in float64."""
    top = np.max(x, axis=axis, keepdims=True)
    return np.asarray(np.log(np.sum(np.exp(_wide(x - top)), axis=axis, keepdims=True)) + top)


def _softmax(x: Array, axis: int) -> Array:
    grown = np.exp(x - np.max(x, axis=axis, keepdims=True))
    return np.asarray(grown / np.sum(_wide(grown), axis=axis, keepdims=True).astype(x.dtype))


def _softmax_grad(x: Sequence[Array], a: Values) -> tuple[Array, ...]:
    y, dy = x
    return (y * (dy - np.sum(_wide(dy * y), axis=a["axis"], keepdims=True)),)


def _log_softmax_grad(x: Sequence[Array], a: Values) -> tuple[Array, ...]:
    y, dy = x
    return (dy - np.exp(y) * np.sum(_wide(dy), axis=a["axis"], keepdims=True),)


def _norm_axes(x: Array, a: Values) -> tuple[int, ...]:
    return tuple(range(a["axis"] % x.ndim, x.ndim))


def _layer_norm(x: Sequence[Array], a: Values) -> tuple[Array, ...]:
    data, scale, bias = _wide(x[0]), x[1], x[2]
    axes = _norm_axes(data, a)
    mean = np.mean(data, axis=axes, keepdims=True)
    rstd = 1 / np.sqrt(np.mean((data - mean) ** 2, axis=axes, keepdims=True) + a["eps"])
    return (data - mean) * rstd * scale + bias, mean.reshape(data.shape[: axes[0]]), rstd.reshape(data.shape[: axes[0]])


def _normalized(data: Array, mean: Array, rstd: Array, axes: tuple[int, ...]) -> tuple[Array, Array]:
    """The normalised operand and its rstd, broadcastable to it."""
    shape = mean.shape + (1,) * len(axes)
    return (_wide(data) - mean.reshape(shape)) * rstd.reshape(shape), rstd.reshape(shape)


def _layer_norm_grad(x: Sequence[Array], a: Values) -> tuple[Array, ...]:
    dy, data, scale, mean, rstd = x
    axes = _norm_axes(data, a)
    normal, factor = _normalized(data, mean, rstd, axes)
    g = _wide(dy) * scale
    along = np.mean(g * normal, axis=axes, keepdims=True)
    return (factor * (g - np.mean(g, axis=axes, keepdims=True) - normal * along),)


def _layer_norm_grad_weight(x: Sequence[Array], a: Values) -> tuple[Array, ...]:
    dy, data, mean, rstd = x
    axes = _norm_axes(data, a)
    normal, _ = _normalized(data, mean, rstd, axes)
    rows = tuple(range(axes[0]))
    return np.asarray(np.sum(_wide(dy) * normal, axis=rows)), np.asarray(np.sum(_wide(dy), axis=rows))


def _batch_norm(x: Sequence[Array], a: Values) -> tuple[Array, ...]:
    data = x[0]
    scale, bias, mean, variance = (v.reshape(-1, *(1,) * (data.ndim - 2)) for v in x[1:])
    return ((data - mean) / np.sqrt(variance + data.dtype.type(a["eps"])) * scale + bias,)


# ---------------------------------------------------------------------------------------- indexing and losses


def _check_indices(what: str, indices: Array, low: int, size: int) -> None:
    bad = indices[(indices < low) | (indices >= size)]
    if bad.size:
        raise VerifyError(f"{what} {int(bad.flat[0])} is outside {low}..{size - 1}", hint="look at the data that was fed")


def _gather(x: Sequence[Array], a: Values) -> tuple[Array, ...]:
    size = x[0].shape[a["axis"]]
    _check_indices("gather index", x[1], -size, size)
    return (np.take(x[0], x[1], axis=a["axis"]),)


def _gather_grad(x: Sequence[Array], a: Values) -> tuple[Array, ...]:
    dy, indices = x
    axis = a["axis"] % len(a["shape"])
    _check_indices("gather index", indices, -a["shape"][axis], a["shape"][axis])
    out = np.zeros(a["shape"], np.float64)
    front = np.moveaxis(dy, range(axis, axis + indices.ndim), range(indices.ndim))
    np.add.at(np.moveaxis(out, axis, 0), indices, front)
    return (out,)


def _cross_entropy(x: Sequence[Array], a: Values) -> tuple[Array, ...]:
    logits, labels = x
    _check_indices("label", labels, 0, logits.shape[-1])
    lse = _log_sum(logits, -1)[..., 0]
    chosen = np.take_along_axis(logits, labels[..., None].astype(np.int64), -1)[..., 0]
    return np.asarray(np.mean(lse - chosen)), lse


def _cross_entropy_grad(x: Sequence[Array], a: Values) -> tuple[Array, ...]:
    logits, labels, lse, dloss = x
    grad = np.exp(logits - lse[..., None])
    hit = np.arange(logits.shape[-1]) == labels[..., None]
    return ((grad - hit) * (dloss / max(labels.size, 1)),)


def _mse(x: Sequence[Array], a: Values) -> tuple[Array, ...]:
    return (np.asarray(np.mean(_wide(x[0] - x[1]) ** 2)),)


# ---------------------------------------------------------------------------------------- optimisers


def _sgd(x: Sequence[Array], a: Values) -> tuple[Array, ...]:
    w, g, lr = x
    return (w - lr * (g + a["weight_decay"] * w),)


def _momentum(x: Sequence[Array], a: Values) -> tuple[Array, ...]:
    w, g, m, lr = x
    decayed = g + a["weight_decay"] * w
    m = a["beta"] * m + decayed
    return w - lr * (decayed + a["beta"] * m if a["nesterov"] else m), m


def _adamw(x: Sequence[Array], a: Values) -> tuple[Array, ...]:
    w, g, m, v, c1, c2, lr = x
    m = a["beta1"] * m + (1 - a["beta1"]) * g
    v = a["beta2"] * v + (1 - a["beta2"]) * (g * g)
    return w - lr * (a["weight_decay"] * w) - lr * ((m / c1) / (np.sqrt(v / c2) + a["eps"])), m, v


# ---------------------------------------------------------------------------------------- the table

NUMPY: dict[str, Rule] = {
    # sources
    "const": _const,
    "iota": _iota,
    # elementwise
    "neg": _map(np.negative),
    "abs": _map(np.abs),
    "sign": _map(np.sign),
    "floor": _map(np.floor),
    "exp": _map(np.exp),
    "log": _map(np.log),
    "sqrt": _map(np.sqrt),
    "rsqrt": _map(lambda x: 1 / np.sqrt(x)),
    "sin": _map(np.sin),
    "cos": _map(np.cos),
    "tanh": _map(np.tanh),
    "sigmoid": _map(_sigmoid),
    "erf": _map(erf),
    "relu": _map(lambda x: np.maximum(x, 0)),
    "gelu": _gelu,
    "not": _map(np.logical_not),
    "cast": _cast,
    "add": _map(np.add),
    "sub": _map(np.subtract),
    "mul": _map(np.multiply),
    "div": _map(_divide),
    "pow": _map(np.power),
    "minimum": _map(np.minimum),
    "maximum": _map(np.maximum),
    "equal": _map(np.equal),
    "less": _map(np.less),
    "less_equal": _map(np.less_equal),
    "and": _map(np.logical_and),
    "or": _map(np.logical_or),
    "where": _map(np.where),
    "relu_grad": _map(lambda x, dy: np.where(x > 0, dy, 0)),
    "gelu_grad": _gelu_grad,
    # layout
    "reshape": lambda x, a: (x[0].reshape(a["shape"]),),
    "transpose": lambda x, a: (np.transpose(x[0], a["perm"]),),
    "broadcast": lambda x, a: (np.broadcast_to(x[0], a["shape"]),),
    "slice": _slice,
    "pad": _pad,
    "concat": lambda x, a: (np.concatenate(x, a["axis"]),),
    # reductions
    "sum": _reduce(_sum),
    "mean": _reduce(_mean),
    "max": _reduce(np.max),
    "argmax": lambda x, a: (np.asarray(np.argmax(x[0], axis=a["axis"])),),
    # contractions and windows
    "matmul": _matmul,
    "conv": _conv,
    "conv_grad_input": _conv_grad_input,
    "conv_grad_weight": _conv_grad_weight,
    "attention": _attention,
    "max_pool": _max_pool,
    "max_pool_grad": _max_pool_grad,
    "avg_pool": _avg_pool,
    "avg_pool_grad": _avg_pool_grad,
    # rows
    "softmax": lambda x, a: (_softmax(x[0], a["axis"]),),
    "softmax_grad": _softmax_grad,
    "log_softmax": lambda x, a: (x[0] - _log_sum(x[0], a["axis"]),),
    "log_softmax_grad": _log_softmax_grad,
    "layer_norm": _layer_norm,
    "layer_norm_grad": _layer_norm_grad,
    "layer_norm_grad_weight": _layer_norm_grad_weight,
    "batch_norm": _batch_norm,
    # indexing and losses
    "gather": _gather,
    "gather_grad": _gather_grad,
    "cross_entropy": _cross_entropy,
    "cross_entropy_grad": _cross_entropy_grad,
    "mse": _mse,
    # optimisers
    "sgd": _sgd,
    "momentum": _momentum,
    "adamw": _adamw,
}


def array_dtype(dtype: str, precision: str) -> np.dtype[Any]:
    """The element type that holds `dtype`: under precision f64 every float is float64."""
    return np.dtype(np.float64) if precision == F64 and dtype in FLOATS else numpy_dtype(dtype)


def apply_op(op: Op, inputs: Sequence[Array], precision: str = TYPED) -> tuple[Array, ...]:
    """The results of one pure op, in their declared element types (or float64)."""
    attrs: dict[str, Attr] = complete_attrs(op)
    if precision == F64 and attrs.get("dtype") in FLOATS:
        attrs["dtype"] = "f64"
    halves = [v.type.dtype in ("f16", "bf16") and precision == TYPED for v in op.ins]
    wide = [x.astype(np.float32) if half else x for x, half in zip(inputs, halves, strict=True)]
    with np.errstate(all="ignore"):  # inf and nan are results like any other
        found = NUMPY[op.kind](wide, attrs)
    return tuple(np.asarray(x).astype(array_dtype(v.type.dtype, precision), copy=False) for x, v in zip(found, op.outs, strict=True))


__all__ = ["F64", "NUMPY", "PRECISIONS", "TYPED", "Array", "apply_op", "array_dtype", "erf"]
