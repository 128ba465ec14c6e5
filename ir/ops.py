"""The op table: every operation of the IR, as data. One row says its family, attributes, type rule, dimension string and cost.

Rules that belong to one concern live beside that concern, as dictionaries keyed by the names of this table: NumPy meaning in
ir/interp.py, gradients in passes/autodiff.py, ONNX in frontends/onnx, kernels in backends/tvm. `penstock ops` prints who has what.

Dimension strings read like einsum: one name per dimension, `...` for any leading dimensions; a plain name may be split over a mesh axis,
`k+` splits into a partial sum, `n^` must stay whole. An empty string means that all dimensions of all operands are the same (after
broadcasting) and any of them may be split.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from .graph import ANNOTATIONS, Attr, Op
from .types import DTYPES, FLOATS, INTS, Dim, TensorType, broadcast_shapes


class Needs(NamedTuple):
    """An attribute without a default, of this Python type."""

    kind: type


Types = Sequence[TensorType]
Values = Mapping[str, Attr]
Infer = Callable[[Types, Values], tuple[TensorType, ...]]
Flops = Callable[[Types, Types, Values], float]


class Cost(NamedTuple):
    """Work of one op: floating-point operations, and bytes read plus written when nothing is fused."""

    flops: float
    bytes: float


@dataclass(frozen=True, slots=True)
class OpDef:
    name: str
    family: str
    arity: tuple[int, int]
    attrs: Mapping[str, Attr | Needs]
    infer: Infer
    dims: str
    flops: Flops
    doc: str
    effect: bool = False


OPS: dict[str, OpDef] = {}

# ---------------------------------------------------------------------------------------- type rules
# Each takes operand types and complete attributes and gives the result types; TypeError says what does not fit.


def _need(condition: bool, message: str) -> None:
    if not condition:
        raise TypeError(message)


def _axis(axis: Attr, rank: int) -> int:
    if not isinstance(axis, int) or not -rank <= axis < rank:
        raise TypeError(f"axis {axis} is outside a tensor of rank {rank}")
    return axis % rank


def ints(attr: Attr) -> tuple[int, ...]:
    """A list-of-integers attribute."""
    _need(isinstance(attr, tuple) and all(type(n) is int for n in attr), f"expected a list of integers, got {attr!r}")
    return attr  # type: ignore[return-value]


def _same(x: Types, a: Values) -> tuple[TensorType, ...]:
    return (x[0].with_shape(x[0].shape),)


def _float(x: Types, a: Values) -> tuple[TensorType, ...]:
    for t in x:
        _need(t.dtype in FLOATS, f"needs a floating-point operand, got {t}")
    return _broadcast(x, a)


def _broadcast(x: Types, a: Values) -> tuple[TensorType, ...]:
    _need(len({t.dtype for t in x}) == 1, f"element types differ: {' and '.join(map(str, x))}")
    return (TensorType(x[0].dtype, broadcast_shapes(*(t.shape for t in x))),)


def _number(x: Types, a: Values) -> tuple[TensorType, ...]:
    _need(all(t.dtype != "bool" for t in x), "is not defined for bool; cast first")
    return _broadcast(x, a)


def _compare(x: Types, a: Values) -> tuple[TensorType, ...]:
    return (_broadcast(x, a)[0].with_dtype("bool"),)


def _logic(x: Types, a: Values) -> tuple[TensorType, ...]:
    _need(all(t.dtype == "bool" for t in x), f"needs bool operands, got {' and '.join(map(str, x))}")
    return _broadcast(x, a)


def _where(x: Types, a: Values) -> tuple[TensorType, ...]:
    _need(x[0].dtype == "bool", f"the condition must be bool, got {x[0]}")
    _need(x[1].dtype == x[2].dtype, f"element types differ: {x[1]} and {x[2]}")
    return (TensorType(x[1].dtype, broadcast_shapes(*(t.shape for t in x))),)


def _dtype(a: Attr) -> str:
    _need(a in DTYPES, f"unknown element type {a!r}, expected one of {', '.join(DTYPES)}")
    return str(a)


def _cast(x: Types, a: Values) -> tuple[TensorType, ...]:
    return (x[0].with_dtype(_dtype(a["dtype"])),)


def _const(x: Types, a: Values) -> tuple[TensorType, ...]:
    shape = ints(a["shape"])
    if isinstance(a["value"], tuple):
        _need(len(a["value"]) == prod(shape), f"{len(a['value'])} values do not fill shape {list(shape)}")
    return (TensorType(_dtype(a["dtype"]), shape),)


def _iota(x: Types, a: Values) -> tuple[TensorType, ...]:
    shape = ints(a["shape"])
    _axis(a["axis"], len(shape))
    return (TensorType(_dtype(a["dtype"]), shape),)


def _reshape(x: Types, a: Values) -> tuple[TensorType, ...]:
    shape = ints(a["shape"])
    _need(prod(shape) == x[0].size, f"{x[0]} has {x[0].size} elements, shape {list(shape)} has {prod(shape)}")
    return (x[0].with_shape(shape),)


def _transpose(x: Types, a: Values) -> tuple[TensorType, ...]:
    perm = ints(a["perm"])
    _need(sorted(perm) == list(range(x[0].rank)), f"perm {list(perm)} is not a permutation of the {x[0].rank} dimensions of {x[0]}")
    return (x[0].with_shape(tuple(x[0].shape[p] for p in perm)),)


def _broadcast_to(x: Types, a: Values) -> tuple[TensorType, ...]:
    shape = ints(a["shape"])
    _need(broadcast_shapes(x[0].shape, shape) == shape, f"{x[0]} does not broadcast to {list(shape)}")
    return (x[0].with_shape(shape),)


def _slice(x: Types, a: Values) -> tuple[TensorType, ...]:
    start, stop, step = ints(a["start"]), ints(a["stop"]), ints(a["step"])
    _need(len(start) == len(stop) == len(step) == x[0].rank, f"start, stop and step need {x[0].rank} entries for {x[0]}")
    for i, (b, e, s, n) in enumerate(zip(start, stop, step, x[0].dims, strict=True)):
        _need(
            0 <= b <= e <= n and s >= 1,
            f"slice {b}:{e}:{s} does not lie in dimension {i} of {x[0]} (0 <= start <= stop <= size, step >= 1)",
        )
    return (x[0].with_shape(tuple(-(-(e - b) // s) for b, e, s in zip(start, stop, step, strict=True))),)


def _pad(x: Types, a: Values) -> tuple[TensorType, ...]:
    low, high, inner = ints(a["low"]), ints(a["high"]), ints(a["inner"]) or (0,) * x[0].rank
    _need(len(low) == len(high) == len(inner) == x[0].rank, f"low, high and inner need {x[0].rank} entries for {x[0]}")
    _need(min((*low, *high, *inner), default=0) >= 0, "padding must not be negative; slice instead")
    sizes = zip(x[0].dims, low, high, inner, strict=True)
    return (x[0].with_shape(tuple(n + p + q + i * max(n - 1, 0) for n, p, q, i in sizes)),)


def _concat(x: Types, a: Values) -> tuple[TensorType, ...]:
    axis = _axis(a["axis"], x[0].rank)
    rests = {(t.dtype, t.shape[:axis] + t.shape[axis + 1 :]) for t in x}
    _need(len(rests) == 1, f"operands differ outside axis {axis}: {' and '.join(map(str, x))}")
    total = sum(t.dims[axis] for t in x)
    return (x[0].with_shape((*x[0].shape[:axis], total, *x[0].shape[axis + 1 :])),)


def reduced_axes(t: TensorType, axes: Attr) -> tuple[int, ...]:
    """The axes of a reduction, sorted and non-negative."""
    found = tuple(sorted(_axis(i, t.rank) for i in ints(axes)))
    _need(len(set(found)) == len(found), f"axes {axes} name a dimension twice")
    return found


def _reduce(x: Types, a: Values) -> tuple[TensorType, ...]:
    _need(x[0].dtype != "bool", "is not defined for bool; cast first")
    axes = reduced_axes(x[0], a["axes"])
    if a["keep"]:
        return (x[0].with_shape(tuple(1 if i in axes else n for i, n in enumerate(x[0].shape))),)
    return (x[0].with_shape(tuple(n for i, n in enumerate(x[0].shape) if i not in axes)),)


def _argmax(x: Types, a: Values) -> tuple[TensorType, ...]:
    axis = _axis(a["axis"], x[0].rank)
    return (TensorType("i64", x[0].shape[:axis] + x[0].shape[axis + 1 :]),)


def _matmul(x: Types, a: Values) -> tuple[TensorType, ...]:
    lhs, rhs = x
    _need(lhs.dtype == rhs.dtype, f"element types differ: {lhs} and {rhs}")
    _need(lhs.rank >= 2 and rhs.rank >= 2, f"needs at least two dimensions on both sides, got {lhs} and {rhs}")
    m, k = lhs.shape[:-3:-1] if a["ta"] else lhs.shape[-2:]
    k2, n = rhs.shape[:-3:-1] if a["tb"] else rhs.shape[-2:]
    _need(k == k2, f"inner sizes differ: {k} of {lhs} and {k2} of {rhs}")
    return (TensorType(lhs.dtype, (*broadcast_shapes(lhs.shape[:-2], rhs.shape[:-2]), m, n)),)


class Window(NamedTuple):
    """Geometry of a sliding window over the spatial dimensions: the same for convolution and pooling."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    low: tuple[int, ...]
    high: tuple[int, ...]
    dilations: tuple[int, ...]

    def out_sizes(self, sizes: Sequence[int]) -> tuple[int, ...]:
        found = []
        for n, k, s, p, q, d in zip(sizes, self.kernel, self.strides, self.low, self.high, self.dilations, strict=True):
            extent = n + p + q - d * (k - 1) - 1
            _need(extent >= 0, f"a window of {d * (k - 1) + 1} does not fit into {n} padded by {p} and {q}")
            found.append(extent // s + 1)
        return tuple(found)


def window_of(a: Values, kernel: tuple[int, ...]) -> Window:
    """The window an op's attributes describe: `pads` is all lows, then all highs, as in ONNX."""
    r = len(kernel)
    strides, dilations, pads = (ints(a[k]) for k in ("strides", "dilations", "pads"))
    strides, dilations, pads = strides or (1,) * r, dilations or (1,) * r, pads or (0,) * 2 * r
    _need(len(strides) == len(dilations) == r and len(pads) == 2 * r, f"strides, dilations and pads do not fit {r} spatial dimensions")
    return Window(kernel, strides, pads[:r], pads[r:], dilations)


def _conv_out(x: TensorType, w: TensorType, a: Values) -> TensorType:
    groups = int(a["groups"])  # type: ignore[arg-type]
    _need(x.rank == w.rank >= 3, f"needs batch, channels and at least one spatial dimension on both sides, got {x} and {w}")
    _need(
        x.dims[1] == w.dims[1] * groups,
        f"{x} has {x.dims[1]} channels, weight {w} in {groups} groups takes {w.dims[1] * groups}",
    )
    _need(w.dims[0] % groups == 0, f"{w.dims[0]} output channels do not divide into {groups} groups")
    return TensorType(x.dtype, (x.shape[0], w.shape[0], *window_of(a, w.dims[2:]).out_sizes(x.dims[2:])))


def _conv(x: Types, a: Values) -> tuple[TensorType, ...]:
    _need(x[0].dtype == x[1].dtype, f"element types differ: {x[0]} and {x[1]}")
    return (_conv_out(x[0], x[1], a),)


def _conv_grad_input(x: Types, a: Values) -> tuple[TensorType, ...]:
    out = x[0].with_shape(ints(a["shape"]))
    expected = _conv_out(out, x[1], a)
    _need(expected.shape == x[0].shape, f"a convolution of {out} with {x[1]} gives {expected}, but the gradient is {x[0]}")
    return (out,)


def _conv_grad_weight(x: Types, a: Values) -> tuple[TensorType, ...]:
    out = x[0].with_shape(ints(a["shape"]))
    expected = _conv_out(x[0], out, a)
    _need(expected.shape == x[1].shape, f"a convolution of {x[0]} with {out} gives {expected}, but the gradient is {x[1]}")
    return (out,)


def _pool(x: Types, a: Values) -> tuple[TensorType, ...]:
    kernel = ints(a["window"])
    _need(x[0].rank == len(kernel) + 2, f"window {list(kernel)} does not fit the spatial dimensions of {x[0]}")
    return (x[0].with_shape((*x[0].shape[:2], *window_of(a, kernel).out_sizes(x[0].dims[2:]))),)


def _max_pool_grad(x: Types, a: Values) -> tuple[TensorType, ...]:
    (y,) = _pool(x[:1], a)
    _need(y == x[1] == x[2], f"pooling {x[0]} gives {y}, but result and gradient are {x[1]} and {x[2]}")
    return (x[0],)


def _avg_pool_grad(x: Types, a: Values) -> tuple[TensorType, ...]:
    out = x[0].with_shape(ints(a["shape"]))
    (y,) = _pool((out,), a)
    _need(y == x[0], f"pooling {out} gives {y}, but the gradient is {x[0]}")
    return (out,)


def _row(x: Types, a: Values) -> tuple[TensorType, ...]:
    _axis(a["axis"], x[0].rank)
    _need(len(set(x)) == 1 and x[0].dtype in FLOATS, f"needs floating-point operands of one type, got {' and '.join(map(str, x))}")
    return (x[0],)


def _norm_parts(x: TensorType, a: Values) -> tuple[TensorType, TensorType]:
    """Types of the statistics and of the weights of a layer norm over dimensions axis and after."""
    axis = _axis(a["axis"], x.rank)
    return x.with_shape(x.shape[:axis]), x.with_shape(x.shape[axis:])


def _layer_norm(x: Types, a: Values) -> tuple[TensorType, ...]:
    stat, weight = _norm_parts(x[0], a)
    _need(x[1] == weight == x[2], f"scale and bias of {x[0]} from axis {a['axis']} must be {weight}, got {x[1]} and {x[2]}")
    return x[0], stat, stat


def _layer_norm_grad(x: Types, a: Values) -> tuple[TensorType, ...]:
    dy, value, scale, mean, rstd = x
    stat, weight = _norm_parts(value, a)
    _need(
        dy == value and scale == weight and mean == stat == rstd,
        f"expected gradient {value}, scale {weight}, mean and rstd {stat}, got {dy}, {scale}, {mean}, {rstd}",
    )
    return (value,)


def _layer_norm_grad_weight(x: Types, a: Values) -> tuple[TensorType, ...]:
    dy, value, mean, rstd = x
    stat, weight = _norm_parts(value, a)
    _need(dy == value and mean == stat == rstd, f"expected gradient {value}, mean and rstd {stat}, got {dy}, {mean}, {rstd}")
    return weight, weight


def _batch_norm(x: Types, a: Values) -> tuple[TensorType, ...]:
    _need(x[0].rank >= 2, f"needs batch and channel dimensions, got {x[0]}")
    for t in x[1:]:
        _need(
            t == x[0].with_shape(x[0].shape[1:2]),
            f"scale, bias, mean and variance of {x[0]} must be {x[0].with_shape(x[0].shape[1:2])}, got {t}",
        )
    return (x[0],)


def _gather(x: Types, a: Values) -> tuple[TensorType, ...]:
    axis = _axis(a["axis"], x[0].rank)
    _need(x[1].dtype in INTS, f"indices must be integers, got {x[1]}")
    return (x[0].with_shape((*x[0].shape[:axis], *x[1].shape, *x[0].shape[axis + 1 :])),)


def _gather_grad(x: Types, a: Values) -> tuple[TensorType, ...]:
    out = x[0].with_shape(ints(a["shape"]))
    (expected,) = _gather((out, x[1]), a)
    _need(expected == x[0], f"gathering {x[1]} from {out} gives {expected}, but the gradient is {x[0]}")
    return (out,)


def _attention(x: Types, a: Values) -> tuple[TensorType, ...]:
    q, k, v = x
    _need(q.rank == k.rank == v.rank == 4, f"needs [batch, heads, positions, size] for q, k and v, got {q}, {k}, {v}")
    _need(
        q.shape[:2] == k.shape[:2] == v.shape[:2] and k.shape[2] == v.shape[2] and q.shape[3] == k.shape[3],
        f"q, k and v do not fit: {q}, {k}, {v}",
    )
    return (q.with_shape((*q.shape[:3], v.shape[3])),)


def _cross_entropy(x: Types, a: Values) -> tuple[TensorType, ...]:
    logits, labels = x[:2]
    _need(logits.dtype in FLOATS and labels.dtype in INTS, f"needs floating-point logits and integer labels, got {logits} and {labels}")
    _need(labels.shape == logits.shape[:-1], f"labels of {logits} must have shape {list(logits.shape[:-1])}, got {labels}")
    return logits.with_shape(()), logits.with_shape(logits.shape[:-1])


def _cross_entropy_grad(x: Types, a: Values) -> tuple[TensorType, ...]:
    loss, lse = _cross_entropy(x, a)
    _need(x[2] == lse and x[3] == loss, f"expected lse {lse} and gradient {loss}, got {x[2]} and {x[3]}")
    return (x[0],)


def _mse(x: Types, a: Values) -> tuple[TensorType, ...]:
    _need(x[0] == x[1] and x[0].dtype in FLOATS, f"prediction and target must have the same floating-point type, got {x[0]} and {x[1]}")
    return (x[0].with_shape(()),)


def _optimizer(states: int, scalars: int) -> Infer:
    def infer(x: Types, a: Values) -> tuple[TensorType, ...]:
        arrays, rest = x[: 2 + states], x[2 + states :]
        _need(len(set(arrays)) == 1, f"weight, gradient and state differ: {' and '.join(map(str, arrays))}")
        _need(len(rest) == scalars and all(t.shape == () for t in rest), f"expected {scalars} scalars, got {', '.join(map(str, rest))}")
        return (x[0],) * (1 + states)

    return infer


def _state(x: Types, a: Values) -> tuple[TensorType, ...]:
    raise AssertionError("state operations take their type from the variable, see infer_op")


# ---------------------------------------------------------------------------------------- cost rules


def _per_element(factor: float) -> Flops:
    return lambda x, y, a: factor * max((t.size for t in (*x, *y)), default=0)


def _free(x: Types, y: Types, a: Values) -> float:
    return 0.0


def _matmul_flops(x: Types, y: Types, a: Values) -> float:
    return 2.0 * y[0].size * x[0].dims[-2 if a["ta"] else -1]


def _conv_flops(x: Types, y: Types, a: Values) -> float:
    return 2.0 * y[0].size * prod(x[1].dims[1:])


def _conv_grad_input_flops(x: Types, y: Types, a: Values) -> float:
    return 2.0 * x[0].size * prod(x[1].dims[1:])


def _conv_grad_weight_flops(x: Types, y: Types, a: Values) -> float:
    return 2.0 * x[1].size * prod(y[0].dims[1:])


def _pool_flops(x: Types, y: Types, a: Values) -> float:
    return float(max(t.size for t in (*x, *y)) * prod(ints(a["window"])))


def _attention_flops(x: Types, y: Types, a: Values) -> float:
    q, k, v = x
    return 2.0 * prod(q.dims[:3]) * k.dims[2] * (q.dims[3] + v.dims[3]) * (0.5 if a["causal"] else 1.0)


# ---------------------------------------------------------------------------------------- the table


def _row_of(
    name: str,
    family: str,
    arity: int | tuple[int, int],
    infer: Infer,
    doc: str,
    *,
    dims: str = "",
    flops: Flops = _free,
    effect: bool = False,
    **attrs: Attr | Needs,
) -> None:
    assert name not in OPS
    OPS[name] = OpDef(name, family, (arity, arity) if isinstance(arity, int) else arity, attrs, infer, dims, flops, doc, effect)


_WINDOW: dict[str, Attr | Needs] = {"strides": (), "pads": (), "dilations": ()}
_POOL: dict[str, Attr | Needs] = {"window": Needs(tuple), **_WINDOW}
_CONV: dict[str, Attr | Needs] = {**_WINDOW, "groups": 1}
ANY = 1 << 16

# fmt: off
# sources
_row_of("const", "source", 0, _const, "`value` in every element, or a list of values in row-major order", value=Needs(object), dtype=Needs(str), shape=())
_row_of("iota", "source", 0, _iota, "0, 1, 2, ... along `axis`", dtype=Needs(str), shape=Needs(tuple), axis=0)

# elementwise, one operand
_row_of("neg", "elementwise", 1, _number, "-x", flops=_per_element(1))
_row_of("abs", "elementwise", 1, _number, "|x|", flops=_per_element(1))
_row_of("sign", "elementwise", 1, _number, "-1, 0 or 1", flops=_per_element(1))
_row_of("floor", "elementwise", 1, _float, "largest integer not above x", flops=_per_element(1))
_row_of("exp", "elementwise", 1, _float, "e^x", flops=_per_element(10))
_row_of("log", "elementwise", 1, _float, "natural logarithm", flops=_per_element(10))
_row_of("sqrt", "elementwise", 1, _float, "square root", flops=_per_element(4))
_row_of("rsqrt", "elementwise", 1, _float, "1 / sqrt(x)", flops=_per_element(5))
_row_of("sin", "elementwise", 1, _float, "sine", flops=_per_element(10))
_row_of("cos", "elementwise", 1, _float, "cosine", flops=_per_element(10))
_row_of("tanh", "elementwise", 1, _float, "hyperbolic tangent", flops=_per_element(12))
_row_of("sigmoid", "elementwise", 1, _float, "1 / (1 + e^-x)", flops=_per_element(12))
_row_of("erf", "elementwise", 1, _float, "error function", flops=_per_element(15))
_row_of("relu", "elementwise", 1, _number, "max(x, 0); its gradient at 0 is 0", flops=_per_element(1))
_row_of("gelu", "elementwise", 1, _float, "x * Phi(x); `approximate=tanh` uses the tanh form", flops=_per_element(16), approximate="none")
_row_of("not", "elementwise", 1, _logic, "logical negation")
_row_of("cast", "elementwise", 1, _cast, "change of element type; float to integer truncates", dtype=Needs(str))

# elementwise, several operands, broadcast as in NumPy
_row_of("add", "elementwise", 2, _number, "a + b", flops=_per_element(1))
_row_of("sub", "elementwise", 2, _number, "a - b", flops=_per_element(1))
_row_of("mul", "elementwise", 2, _number, "a * b", flops=_per_element(1))
_row_of("div", "elementwise", 2, _number, "a / b; integers truncate toward zero", flops=_per_element(1))
_row_of("pow", "elementwise", 2, _float, "a to the power b", flops=_per_element(20))
_row_of("minimum", "elementwise", 2, _number, "the smaller; nan if either is", flops=_per_element(1))
_row_of("maximum", "elementwise", 2, _number, "the larger; nan if either is", flops=_per_element(1))
_row_of("equal", "elementwise", 2, _compare, "a == b")
_row_of("less", "elementwise", 2, _compare, "a < b")
_row_of("less_equal", "elementwise", 2, _compare, "a <= b")
_row_of("and", "elementwise", 2, _logic, "logical and")
_row_of("or", "elementwise", 2, _logic, "logical or")
_row_of("where", "elementwise", 3, _where, "a where the condition holds, else b")

# gradients of elementwise ops that are worth one op: (x, dy)
_row_of("relu_grad", "elementwise", 2, _float, "dy where x > 0, else 0", flops=_per_element(1))
_row_of("gelu_grad", "elementwise", 2, _float, "dy * gelu'(x)", flops=_per_element(24), approximate="none")

# layout
_row_of("reshape", "layout", 1, _reshape, "same elements in row-major order, new shape", shape=Needs(tuple), dims="...^ -> ...^")
_row_of("transpose", "layout", 1, _transpose, "dimension i of the result is dimension perm[i] of the operand", perm=Needs(tuple))
_row_of("broadcast", "layout", 1, _broadcast_to, "repeat along dimensions of size 1 or missing in front", shape=Needs(tuple))
_row_of("slice", "layout", 1, _slice, "start:stop:step in each dimension", start=Needs(tuple), stop=Needs(tuple), step=Needs(tuple), dims="...^ -> ...^")
_row_of("pad", "layout", 1, _pad, "`value` before (low), after (high) and between (inner) the elements of each dimension", low=Needs(tuple), high=Needs(tuple), inner=(), value=0.0, dims="...^ -> ...^")
_row_of("concat", "layout", (1, ANY), _concat, "one after the other along `axis`", axis=Needs(int), dims="...^ -> ...^")

# reductions
_row_of("sum", "reduce", 1, _reduce, "sum over `axes`", axes=Needs(tuple), keep=False, flops=_per_element(1), dims="...+ -> ...")
_row_of("mean", "reduce", 1, _reduce, "mean over `axes`", axes=Needs(tuple), keep=False, flops=_per_element(1), dims="...^ -> ...")
_row_of("max", "reduce", 1, _reduce, "largest over `axes`", axes=Needs(tuple), keep=False, flops=_per_element(1), dims="...^ -> ...")
_row_of("argmax", "reduce", 1, _argmax, "index of the first largest along `axis`", axis=Needs(int), flops=_per_element(1), dims="...^ -> ...")

# contractions
_row_of("matmul", "contract", 2, _matmul, "matrix product over the last two dimensions, operands transposed by ta, tb; leading dimensions broadcast", ta=False, tb=False, flops=_matmul_flops, dims="... m k+, ... k+ n -> ... m n")
_row_of("conv", "contract", 2, _conv, "cross-correlation, x[n,c,...] with w[o,c/groups,...]", flops=_conv_flops, dims="n c+ ...^, o c+ ...^ -> n o ...^", **_CONV)  # type: ignore[arg-type]
_row_of("conv_grad_input", "contract", 2, _conv_grad_input, "gradient of conv for x, from (dy, w); `shape` is x's", flops=_conv_grad_input_flops, shape=Needs(tuple), dims="n o+ ...^, o+ c ...^ -> n c ...^", **_CONV)  # type: ignore[arg-type]
_row_of("conv_grad_weight", "contract", 2, _conv_grad_weight, "gradient of conv for w, from (x, dy); `shape` is w's", flops=_conv_grad_weight_flops, shape=Needs(tuple), dims="n+ c ...^, n+ o ...^ -> o c ...^", **_CONV)  # type: ignore[arg-type]
_row_of("attention", "contract", 3, _attention, "softmax(scale * q k^T) v on [batch, heads, positions, size]; `causal` hides later positions", causal=False, scale=Needs(float), flops=_attention_flops, dims="n h s^ d^, n h t^ d^, n h t^ e -> n h s^ e")

# sliding windows
_row_of("max_pool", "window", 1, _pool, "largest in each window; padding never wins", flops=_pool_flops, dims="n c ...^ -> n c ...^", **_POOL)  # type: ignore[arg-type]
_row_of("max_pool_grad", "window", 3, _max_pool_grad, "from (x, y, dy): dy goes to the first largest of each window", flops=_pool_flops, dims="n c ...^, n c ...^, n c ...^ -> n c ...^", **_POOL)  # type: ignore[arg-type]
_row_of("avg_pool", "window", 1, _pool, "mean of each window; `include_pad` counts padding", flops=_pool_flops, include_pad=False, dims="n c ...^ -> n c ...^", **_POOL)  # type: ignore[arg-type]
_row_of("avg_pool_grad", "window", 1, _avg_pool_grad, "from dy; `shape` is x's", flops=_pool_flops, include_pad=False, shape=Needs(tuple), dims="n c ...^ -> n c ...^", **_POOL)  # type: ignore[arg-type]

# rows
_row_of("softmax", "row", 1, _row, "e^x over its sum along `axis`", axis=-1, flops=_per_element(14), dims="... n^ -> ... n^")
_row_of("softmax_grad", "row", 2, _row, "from (y, dy): y * (dy - sum(dy * y))", axis=-1, flops=_per_element(4), dims="... n^, ... n^ -> ... n^")
_row_of("log_softmax", "row", 1, _row, "logarithm of softmax", axis=-1, flops=_per_element(14), dims="... n^ -> ... n^")
_row_of("log_softmax_grad", "row", 2, _row, "from (y, dy): dy - e^y * sum(dy)", axis=-1, flops=_per_element(14), dims="... n^, ... n^ -> ... n^")
_row_of("layer_norm", "row", 3, _layer_norm, "(x - mean) * rstd * scale + bias over dimensions `axis` and after; also gives mean and rstd", axis=-1, eps=1e-5, flops=_per_element(8), dims="... n^, n^, n^ -> ... n^, ..., ...")
_row_of("layer_norm_grad", "row", 5, _layer_norm_grad, "gradient for x, from (dy, x, scale, mean, rstd)", axis=-1, flops=_per_element(10), dims="... n^, ... n^, n^, ..., ... -> ... n^")
_row_of("layer_norm_grad_weight", "reduce", 4, _layer_norm_grad_weight, "gradients for scale and bias, from (dy, x, mean, rstd)", axis=-1, flops=_per_element(5), dims="...+ n, ...+ n, ...+, ...+ -> n, n")
_row_of("batch_norm", "elementwise", 5, _batch_norm, "(x - mean) / sqrt(var + eps) * scale + bias per channel, from (x, scale, bias, mean, var)", eps=1e-5, flops=_per_element(4), dims="n c ..., c, c, c, c -> n c ...")

# indexing
_row_of("gather", "gather", 2, _gather, "entries of x along `axis` at integer indices; negative ones count from the end", axis=0, dims="r^ ..., i -> i ...")
_row_of("gather_grad", "gather", 2, _gather_grad, "sum of dy into zeros of `shape` at the indices, from (dy, indices)", axis=0, shape=Needs(tuple), flops=_per_element(1), dims="i+ ..., i+ -> r^ ...")

# losses, mean over all rows
_row_of("cross_entropy", "row", 2, _cross_entropy, "mean of lse - logit of the label, from (logits, labels); also gives lse = log(sum(e^logits)) per row", flops=_per_element(14), dims="... n^, ... -> , ...")
_row_of("cross_entropy_grad", "row", 4, _cross_entropy_grad, "gradient for logits, from (logits, labels, lse, dloss)", flops=_per_element(14), dims="... n^, ..., ..., -> ... n^")
_row_of("mse", "reduce", 2, _mse, "mean of the squared difference", flops=_per_element(3), dims="...+, ...+ -> ")

# optimisers: (w, g, state..., scalars...) -> (w, state...)
_row_of("sgd", "optimizer", 3, _optimizer(0, 1), "w - lr * (g + weight_decay * w), from (w, g, lr)", weight_decay=0.0, flops=_per_element(3))
_row_of("momentum", "optimizer", 4, _optimizer(1, 1), "g = g + weight_decay * w; m = beta * m + g; w - lr * m (nesterov: w - lr * (g + beta * m)), from (w, g, m, lr)", beta=0.9, weight_decay=0.0, nesterov=False, flops=_per_element(5))
_row_of("adamw", "optimizer", 7, _optimizer(2, 3), "Adam with decoupled weight decay, from (w, g, m, v, c1, c2, lr), where c1 = 1 - beta1^t and c2 = 1 - beta2^t", beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, flops=_per_element(14))

# state: the only operations with an effect
_row_of("read", "state", 0, _state, "the variable; `version` is mb (the microbatch's own) or latest", var=Needs(str), version="latest", effect=True)
_row_of("write", "state", 1, _state, "the variable's next version", var=Needs(str), effect=True)
_row_of("accum", "state", 1, _state, "add to the variable", var=Needs(str), effect=True)
_row_of("take", "state", 0, _state, "the variable, which is zero afterwards", var=Needs(str), effect=True)
# fmt: on


# ---------------------------------------------------------------------------------------- using the table


def complete_attrs(op: Op) -> dict[str, Attr]:
    """All attributes of an op with defaults filled in, annotations left out; TypeError for a wrong or missing one."""
    row = definition(op.kind)
    for name in op.attrs:
        if name not in row.attrs and name not in ANNOTATIONS:
            raise TypeError(f"{op.kind} has no attribute {name!r}, it has {', '.join(row.attrs) or 'none'}")
    full: dict[str, Attr] = {}
    for name, spec in row.attrs.items():
        if name in op.attrs:
            value, kind = op.attrs[name], spec.kind if isinstance(spec, Needs) else type(spec)
            if kind is float and type(value) is int:
                value = float(value)
            if kind is not object and (type(value) is not kind):
                raise TypeError(f"attribute {name} must be {kind.__name__}, got {value!r}")
            full[name] = value
        elif isinstance(spec, Needs):
            raise TypeError(f"attribute {name} is missing")
        else:
            full[name] = spec
    return full


def definition(kind: str) -> OpDef:
    row = OPS.get(kind)
    if row is None:
        raise TypeError(f"unknown operation {kind!r}; `penstock ops` lists those there are")
    return row


def infer_op(op: Op, var_types: Mapping[str, TensorType]) -> tuple[TensorType, ...]:
    """Result types of an op by its row; TypeError when operands, attributes or variable do not fit."""
    row, attrs = definition(op.kind), complete_attrs(op)
    low, high = row.arity
    if not low <= len(op.ins) <= high:
        raise TypeError(f"takes {low if low == high else f'{low} or more'} operands, got {len(op.ins)}")
    if row.family != "state":
        return row.infer([v.type for v in op.ins], attrs)
    var = str(attrs["var"])
    if var not in var_types:
        raise TypeError(f"no variable @{var} in the module")
    if op.ins and op.ins[0].type != var_types[var]:
        raise TypeError(f"@{var} is {var_types[var]}, the operand is {op.ins[0].type}")
    return (var_types[var],) if op.kind in ("read", "take") else ()


def cost_of(op: Op) -> Cost:
    """Analytic cost of one op on its own. Layout changes and state accesses cost their bytes at most."""
    x, y = [v.type for v in op.ins], [v.type for v in op.outs]
    row = definition(op.kind)
    moved = 0 if row.family in ("state", "source") else sum(t.nbytes for t in (*x, *y))
    return Cost(row.flops(x, y, complete_attrs(op)), moved)


def make(kind: str, ins: Sequence, outs: Sequence[str], loc: str = "", /, **attrs: Attr) -> Op:  # type: ignore[type-arg]
    """An op with its result types inferred; for state operations give the result Value yourself."""
    from .graph import Value

    probe = Op(kind, tuple(ins), (), attrs, loc)
    types = infer_op(probe, {})
    if len(types) != len(outs):
        raise TypeError(f"{kind} gives {len(types)} results, {len(outs)} names were given")
    return Op(kind, probe.ins, tuple(Value(n, t) for n, t in zip(outs, types, strict=True)), attrs, loc)


__all__ = [
    "ANY",
    "OPS",
    "Cost",
    "Dim",
    "Needs",
    "OpDef",
    "Window",
    "complete_attrs",
    "cost_of",
    "definition",
    "infer_op",
    "ints",
    "make",
    "reduced_axes",
    "window_of",
]
