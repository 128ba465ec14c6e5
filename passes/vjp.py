"""Gradient rules, a dictionary over the op table: `VJP[kind](b, op, *grads)`.

`grads` are the gradients of the results (None where nothing depends on one; an op with one result always gets it). A rule gives one entry
per operand: None for no gradient, else a function that emits the operations and gives the gradient. Only wanted entries are called, so
nothing dead is emitted. A gradient may have the shape of the broadcast result: the caller sums it to the shape of the operand.

Rules refer to forward values freely: the emitter decides what is saved and what is computed again. Where a rule has the choice it takes
the value that others need as well (relu, exp, softmax use their result, not their operand).

Ties: `max`, `minimum` and `maximum` share the gradient evenly among equal elements; relu has gradient 0 at 0; max_pool takes the first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Protocol

from ..ir.errors import UnsupportedModel
from ..ir.graph import Attr, Op, Value
from ..ir.ops import OPS, complete_attrs, ints, reduced_axes

Grad = Callable[[], Value] | None
Rule = Callable[..., Sequence[Grad]]


class Emitter(Protocol):
    """What a rule needs: emit one operation with one result or several, and scalars of a value's element type."""

    def emit(self, kind: str, *ins: Value, **attrs: Attr) -> Value: ...
    def emit_all(self, kind: str, *ins: Value, **attrs: Attr) -> tuple[Value, ...]: ...
    def scalar(self, number: float, like: Value) -> Value: ...


def sum_to(b: Emitter, grad: Value, operand: Value) -> Value:
    """Undo broadcasting: sum over the dimensions that were repeated."""
    shape, target = grad.type.dims, operand.type.dims
    if shape == target:
        return grad
    extra = len(shape) - len(target)
    axes = tuple(i for i, n in enumerate(shape) if i < extra or target[i - extra] != n)
    summed = b.emit("sum", grad, axes=axes) if axes else grad
    return summed if summed.type.dims == target else b.emit("reshape", summed, shape=target)


# ---------------------------------------------------------------------------------------- elementwise


def _unary(rule: Callable[[Emitter, Value, Value, Value], Value]) -> Rule:
    """A rule from (x, y, dy)."""
    return lambda b, op, dy: (lambda: rule(b, op.ins[0], op.outs[0], dy),)


def _scaled(b: Emitter, number: float, x: Value) -> Value:
    return b.emit("mul", x, b.scalar(number, x))


def _rsqrt(b: Emitter, x: Value, y: Value, dy: Value) -> Value:
    cube = b.emit("mul", b.emit("mul", y, y), y)
    return b.emit("mul", _scaled(b, -0.5, dy), cube)


def _one_minus_square(b: Emitter, x: Value, y: Value, dy: Value) -> Value:
    return b.emit("mul", dy, b.emit("sub", b.scalar(1.0, y), b.emit("mul", y, y)))


def _sigmoid(b: Emitter, x: Value, y: Value, dy: Value) -> Value:
    return b.emit("mul", dy, b.emit("mul", y, b.emit("sub", b.scalar(1.0, y), y)))


def _erf(b: Emitter, x: Value, y: Value, dy: Value) -> Value:
    bell = b.emit("exp", b.emit("neg", b.emit("mul", x, x)))
    return b.emit("mul", dy, _scaled(b, 2 / math.sqrt(math.pi), bell))


def _atan(b: Emitter, x: Value, y: Value, dy: Value) -> Value:
    return b.emit("div", dy, b.emit("add", b.emit("mul", x, x), b.scalar(1.0, x)))


def _rem(b: Emitter, op: Op, dy: Value) -> Sequence[Grad]:
    x, divisor = op.ins

    def of_divisor() -> Value:  # less the whole part of the quotient
        quotient = b.emit("div", b.emit("sub", x, op.outs[0]), divisor)
        return b.emit("neg", b.emit("mul", dy, b.emit("round", quotient)))

    return lambda: dy, of_divisor


def _gelu(b: Emitter, op: Op, dy: Value) -> Sequence[Grad]:
    return (lambda: b.emit("gelu_grad", op.ins[0], dy, approximate=complete_attrs(op)["approximate"]),)


def _mul(b: Emitter, op: Op, dy: Value) -> Sequence[Grad]:
    x, y = op.ins
    return lambda: b.emit("mul", dy, y), lambda: b.emit("mul", dy, x)


def _div(b: Emitter, op: Op, dy: Value) -> Sequence[Grad]:
    y, divisor = op.outs[0], op.ins[1]
    return lambda: b.emit("div", dy, divisor), lambda: b.emit("neg", b.emit("div", b.emit("mul", dy, y), divisor))


def _pow(b: Emitter, op: Op, dy: Value) -> Sequence[Grad]:
    (x, power), y = op.ins, op.outs[0]

    def of_base() -> Value:
        lower = b.emit("pow", x, b.emit("sub", power, b.scalar(1.0, power)))
        zero = b.scalar(0.0, dy)  # 0 * x^-1 is 0 also where x is 0
        return b.emit("where", b.emit("equal", power, b.scalar(0.0, power)), zero, b.emit("mul", dy, b.emit("mul", power, lower)))

    def of_power() -> Value:
        zero = b.scalar(0.0, dy)  # the limit of x^p * log(x) at 0
        return b.emit("where", b.emit("equal", x, b.scalar(0.0, x)), zero, b.emit("mul", dy, b.emit("mul", y, b.emit("log", x))))

    return of_base, of_power


def _extremum(b: Emitter, op: Op, dy: Value, loses: Callable[[Value, Value], tuple[Value, Value]]) -> Sequence[Grad]:
    def share(mine: Value, other: Value) -> Value:
        shared = b.emit("where", b.emit("equal", mine, other), _scaled(b, 0.5, dy), dy)
        return b.emit("where", b.emit("less", *loses(mine, other)), b.scalar(0.0, dy), shared)

    x, y = op.ins
    return lambda: share(x, y), lambda: share(y, x)


def _maximum(b: Emitter, op: Op, dy: Value) -> Sequence[Grad]:
    return _extremum(b, op, dy, lambda mine, other: (mine, other))


def _minimum(b: Emitter, op: Op, dy: Value) -> Sequence[Grad]:
    return _extremum(b, op, dy, lambda mine, other: (other, mine))


def _where(b: Emitter, op: Op, dy: Value) -> Sequence[Grad]:
    condition = op.ins[0]
    return (
        None,
        lambda: b.emit("where", condition, dy, b.scalar(0.0, dy)),
        lambda: b.emit("where", condition, b.scalar(0.0, dy), dy),
    )


# ---------------------------------------------------------------------------------------- layout and reductions


def _reshape(b: Emitter, op: Op, dy: Value) -> Sequence[Grad]:
    return (lambda: b.emit("reshape", dy, shape=op.ins[0].type.dims),)


def _transpose(b: Emitter, op: Op, dy: Value) -> Sequence[Grad]:
    perm = ints(op.attrs["perm"])
    return (lambda: b.emit("transpose", dy, perm=tuple(perm.index(i) for i in range(len(perm)))),)


def _slice(b: Emitter, op: Op, dy: Value) -> Sequence[Grad]:
    start, step, sizes = ints(op.attrs["start"]), ints(op.attrs["step"]), op.ins[0].type.dims
    spans = [(n - 1) * s + 1 if n else 0 for n, s in zip(dy.type.dims, step, strict=True)]
    high = tuple(n - a - span for n, a, span in zip(sizes, start, spans, strict=True))
    return (lambda: b.emit("pad", dy, low=start, high=high, inner=tuple(s - 1 for s in step)),)


def _pad(b: Emitter, op: Op, dy: Value) -> Sequence[Grad]:
    a, sizes = complete_attrs(op), dy.type.dims
    stop = tuple(n - q for n, q in zip(sizes, ints(a["high"]), strict=True))
    step = tuple(i + 1 for i in ints(a["inner"]) or (0,) * len(sizes))
    return (lambda: b.emit("slice", dy, start=a["low"], stop=stop, step=step),)


def _concat(b: Emitter, op: Op, dy: Value) -> Sequence[Grad]:
    sizes = dy.type.dims
    axis = int(op.attrs["axis"]) % len(sizes)  # type: ignore[arg-type]
    ends = [0]
    for value in op.ins:
        ends.append(ends[-1] + value.type.dims[axis])

    def part(first: int, last: int) -> Grad:
        start = tuple(first if i == axis else 0 for i in range(len(sizes)))
        stop = tuple(last if i == axis else n for i, n in enumerate(sizes))
        return lambda: b.emit("slice", dy, start=start, stop=stop, step=(1,) * len(sizes))

    return [part(first, last) for first, last in pairwise(ends)]


def _kept(b: Emitter, op: Op, value: Value) -> Value:
    """The result of a reduction, or its gradient, with the reduced dimensions as 1."""
    axes = reduced_axes(op.ins[0].type, op.attrs["axes"])
    shape = tuple(1 if i in axes else n for i, n in enumerate(op.ins[0].type.dims))
    return value if value.type.dims == shape else b.emit("reshape", value, shape=shape)


def _sum(b: Emitter, op: Op, dy: Value) -> Sequence[Grad]:
    return (lambda: b.emit("broadcast", _kept(b, op, dy), shape=op.ins[0].type.dims),)


def _mean(b: Emitter, op: Op, dy: Value) -> Sequence[Grad]:
    share = dy.type.size / max(op.ins[0].type.size, 1)
    return (lambda: b.emit("broadcast", _kept(b, op, _scaled(b, share, dy)), shape=op.ins[0].type.dims),)


def _max(b: Emitter, op: Op, dy: Value) -> Sequence[Grad]:
    x, y = op.ins[0], op.outs[0]

    def grad() -> Value:
        hit = b.emit("cast", b.emit("equal", x, _kept(b, op, y)), dtype=x.type.dtype)
        hits = b.emit("sum", hit, axes=op.attrs["axes"], keep=True)
        return b.emit("mul", hit, b.emit("div", _kept(b, op, dy), hits))

    return (grad,)


# ---------------------------------------------------------------------------------------- contractions and windows


def _matmul(b: Emitter, op: Op, dy: Value) -> Sequence[Grad]:
    (x, w), a = op.ins, complete_attrs(op)
    ta, tb = bool(a["ta"]), bool(a["tb"])

    def of_left() -> Value:
        return b.emit("matmul", w, dy, ta=tb, tb=True) if ta else b.emit("matmul", dy, w, tb=not tb)

    def of_right() -> Value:
        left, grad = x, dy
        if w.type.rank == 2 and not ta and dy.type.rank > 2:  # one product over all rows, not one per batch entry and a sum
            rows = math.prod(x.type.dims[:-1])
            left = b.emit("reshape", x, shape=(rows, x.type.dims[-1]))
            grad = b.emit("reshape", dy, shape=(rows, dy.type.dims[-1]))
        return b.emit("matmul", grad, left, ta=True, tb=ta) if tb else b.emit("matmul", left, grad, ta=not ta)

    return of_left, of_right


def _shared(op: Op) -> dict[str, Attr]:
    """The attributes of an op, without annotations."""
    return {k: v for k, v in op.attrs.items() if k in OPS[op.kind].attrs}


def _conv(b: Emitter, op: Op, dy: Value) -> Sequence[Grad]:
    (x, w), a = op.ins, _shared(op)
    return (
        lambda: b.emit("conv_grad_input", dy, w, shape=x.type.dims, **a),
        lambda: b.emit("conv_grad_weight", x, dy, shape=w.type.dims, **a),
    )


def _conv_grad_input(b: Emitter, op: Op, dx: Value) -> Sequence[Grad]:
    """A transposed convolution: linear in both operands."""
    (g, w), a = op.ins, {k: v for k, v in _shared(op).items() if k != "shape"}
    return (
        lambda: b.emit("conv", dx, w, **a),
        lambda: b.emit("conv_grad_weight", dx, g, shape=w.type.dims, **a),
    )


def _max_pool(b: Emitter, op: Op, dy: Value) -> Sequence[Grad]:
    return (lambda: b.emit("max_pool_grad", op.ins[0], op.outs[0], dy, **_shared(op)),)


def _avg_pool(b: Emitter, op: Op, dy: Value) -> Sequence[Grad]:
    return (lambda: b.emit("avg_pool_grad", dy, shape=op.ins[0].type.dims, **_shared(op)),)


def _attention(b: Emitter, op: Op, dy: Value | None, dtop: Value | None, dtotal: Value | None) -> Sequence[Grad]:
    y, top, total = op.outs
    if dy is None or dtop is not None or dtotal is not None:
        raise UnsupportedModel(
            f"the row statistics of attention %{y.name} have no gradient", where=op.loc, hint="`decompose{keep=[]}` before autodiff"
        )
    q, k, v, *mask = op.ins
    found: list[tuple[Value, ...]] = []

    def of(which: int) -> Grad:
        def grad() -> Value:
            if not found:
                found.append(b.emit_all("attention_grad", dy, q, k, v, y, top, total, *mask, **_shared(op)))
            return found[0][which]

        return grad

    return of(0), of(1), of(2), *(lambda: _attention_mask(b, op, dy) for _ in mask)


def _attention_mask(b: Emitter, op: Op, dy: Value) -> Value:
    """Gradient of what is added to scores: share * (dy v^T - sum(dy * y)), with all scores at once."""
    q, k, v, mask = op.ins
    y, top, total = op.outs
    a = complete_attrs(op)

    def column(value: Value) -> Value:
        return b.emit("reshape", value, shape=(*value.type.dims, 1))

    scores = b.emit("add", _scaled(b, float(a["scale"]), b.emit("matmul", q, k, tb=True)), mask)  # type: ignore[arg-type]
    share = b.emit("div", b.emit("exp", b.emit("sub", scores, column(top))), column(total))
    dot = b.emit("sum", b.emit("mul", dy, y), axes=(3,), keep=True)
    slope = b.emit("mul", share, b.emit("sub", b.emit("matmul", dy, v, tb=True), dot))
    if a["causal"]:
        row = b.emit("iota", dtype="i32", shape=(q.type.dims[2], 1), axis=0)
        column_number = b.emit("iota", dtype="i32", shape=(1, k.type.dims[2]), axis=1)
        slope = b.emit("where", b.emit("less", row, column_number), b.scalar(0.0, slope), slope)
    return slope


# ---------------------------------------------------------------------------------------- rows, indexing, losses


def _from_result(kind: str) -> Rule:
    """Gradient ops that take (y, dy) and the same attributes."""
    return lambda b, op, dy: (lambda: b.emit(kind, op.outs[0], dy, **_shared(op)),)


def _layer_norm(b: Emitter, op: Op, dy: Value | None, dmean: Value | None, drstd: Value | None) -> Sequence[Grad]:
    x, scale, _ = op.ins
    _, mean, rstd = op.outs
    a = complete_attrs(op)
    axis = int(a["axis"]) % x.type.rank  # type: ignore[arg-type]
    ones = (1,) * (x.type.rank - axis)
    count = math.prod(x.type.dims[axis:])
    found: list[tuple[Value, ...]] = []

    def column(value: Value) -> Value:
        return b.emit("reshape", value, shape=(*value.type.dims, *ones))

    def of_weights(which: int) -> Grad:
        def grad() -> Value:
            assert dy is not None
            if not found:
                found.append(b.emit_all("layer_norm_grad_weight", dy, x, mean, rstd, axis=a["axis"]))
            return found[0][which]

        return grad if dy is not None else None

    def of_operand() -> Value:
        parts = []
        if dy is not None:
            parts.append(b.emit("layer_norm_grad", dy, x, scale, mean, rstd, axis=a["axis"]))
        if dmean is not None:
            parts.append(b.emit("broadcast", column(_scaled(b, 1 / count, dmean)), shape=x.type.dims))
        if drstd is not None:
            cube = b.emit("mul", b.emit("mul", rstd, rstd), rstd)
            slope = column(b.emit("mul", _scaled(b, -1 / count, drstd), cube))
            parts.append(b.emit("mul", b.emit("sub", x, column(mean)), slope))
        total = parts[0]
        for part in parts[1:]:
            total = b.emit("add", total, part)
        return total

    return of_operand, of_weights(0), of_weights(1)


def _batch_norm(b: Emitter, op: Op, dy: Value) -> Sequence[Grad]:
    x, scale, _, mean, variance = op.ins
    eps = float(complete_attrs(op)["eps"])  # type: ignore[arg-type]
    shape = (x.type.dims[1], *(1,) * (x.type.rank - 2))
    rows = tuple(i for i in range(x.type.rank) if i != 1)

    def column(value: Value) -> Value:
        return b.emit("reshape", value, shape=shape)

    def rstd() -> Value:
        return b.emit("rsqrt", b.emit("add", variance, b.scalar(eps, variance)))

    def total(value: Value) -> Value:
        return b.emit("sum", value, axes=rows)

    def centred() -> Value:
        return total(b.emit("mul", dy, b.emit("sub", x, column(mean))))

    def of_variance() -> Value:
        r = rstd()
        return b.emit("mul", b.emit("mul", centred(), _scaled(b, -0.5, scale)), b.emit("mul", b.emit("mul", r, r), r))

    return (
        lambda: b.emit("mul", dy, column(b.emit("mul", scale, rstd()))),
        lambda: b.emit("mul", centred(), rstd()),
        lambda: total(dy),
        lambda: b.emit("neg", b.emit("mul", total(dy), b.emit("mul", scale, rstd()))),
        of_variance,
    )


def _gather(b: Emitter, op: Op, dy: Value) -> Sequence[Grad]:
    x, indices = op.ins
    return lambda: b.emit("gather_grad", dy, indices, shape=x.type.dims, **_shared(op)), None


def _scatter(b: Emitter, op: Op, dy: Value) -> Sequence[Grad]:
    """Replaced entries get no gradient; of several replacements of one entry each gets it, as if all had stayed."""
    (_, indices, updates), a = op.ins, complete_attrs(op)
    none = updates.type.dims

    def of_operand() -> Value:
        if a["add"]:
            return dy
        zeros = b.emit("broadcast", b.scalar(0.0, dy), shape=none)
        return b.emit("scatter", dy, indices, zeros, axis=a["axis"])

    return of_operand, None, lambda: b.emit("gather", dy, indices, axis=a["axis"])


def _cumsum(b: Emitter, op: Op, dy: Value) -> Sequence[Grad]:
    a = complete_attrs(op)
    return (lambda: b.emit("cumsum", dy, axis=a["axis"], exclusive=a["exclusive"], reverse=not a["reverse"]),)


def _topk(b: Emitter, op: Op, dy: Value | None, dindices: Value | None) -> Sequence[Grad]:
    x, indices = op.ins[0], op.outs[1]
    axis = int(complete_attrs(op)["axis"]) % x.type.rank  # type: ignore[arg-type]

    def grad() -> Value:
        assert dy is not None
        flat = b.emit("reshape", _positions(b, indices, axis, x.type.dims), shape=(indices.type.size,))
        chosen = b.emit("reshape", dy, shape=(dy.type.size,))
        return b.emit("reshape", b.emit("gather_grad", chosen, flat, shape=(x.type.size,)), shape=x.type.dims)

    return (grad if dy is not None else None,)


def _positions(b: Emitter, indices: Value, axis: int, dims: tuple[int, ...]) -> Value:
    """The row-major positions in a tensor of `dims` of elements with these indices along one axis, and their own along the others."""
    shape = indices.type.dims
    strides = [math.prod(dims[i + 1 :]) for i in range(len(dims))]
    total = indices
    if strides[axis] != 1:
        total = b.emit("mul", indices, b.emit("const", value=strides[axis], dtype="i64"))
    for i, n in enumerate(shape):
        if i == axis or n == 1:
            continue
        line = b.emit("iota", dtype="i64", shape=(n, *(1,) * (len(shape) - 1 - i)), axis=0)
        line = b.emit("mul", line, b.emit("const", value=strides[i], dtype="i64")) if strides[i] != 1 else line
        total = b.emit("add", total, line)
    return total


def _cross_entropy(b: Emitter, op: Op, dloss: Value | None, dlse: Value | None) -> Sequence[Grad]:
    (logits, labels), lse = op.ins, op.outs[1]

    def grad() -> Value:
        parts = []
        if dloss is not None:
            parts.append(b.emit("cross_entropy_grad", logits, labels, lse, dloss))
        if dlse is not None:
            column = (*lse.type.dims, 1)
            chance = b.emit("exp", b.emit("sub", logits, b.emit("reshape", lse, shape=column)))
            parts.append(b.emit("mul", chance, b.emit("reshape", dlse, shape=column)))
        return parts[0] if len(parts) == 1 else b.emit("add", *parts)

    return grad, None


def _mse(b: Emitter, op: Op, dy: Value) -> Sequence[Grad]:
    x, y = op.ins

    def grad(first: Value, second: Value) -> Grad:
        return lambda: b.emit("mul", b.emit("sub", first, second), _scaled(b, 2 / max(x.type.size, 1), dy))

    return grad(x, y), grad(y, x)


# ---------------------------------------------------------------------------------------- the table

VJP: dict[str, Rule] = {
    "neg": _unary(lambda b, x, y, dy: b.emit("neg", dy)),
    "abs": _unary(lambda b, x, y, dy: b.emit("mul", dy, b.emit("sign", x))),
    "exp": _unary(lambda b, x, y, dy: b.emit("mul", dy, y)),
    "log": _unary(lambda b, x, y, dy: b.emit("div", dy, x)),
    "sqrt": _unary(lambda b, x, y, dy: b.emit("div", _scaled(b, 0.5, dy), y)),
    "rsqrt": _unary(_rsqrt),
    "sin": _unary(lambda b, x, y, dy: b.emit("mul", dy, b.emit("cos", x))),
    "atan": _unary(_atan),
    "rem": _rem,
    "cos": _unary(lambda b, x, y, dy: b.emit("neg", b.emit("mul", dy, b.emit("sin", x)))),
    "tanh": _unary(_one_minus_square),
    "sigmoid": _unary(_sigmoid),
    "erf": _unary(_erf),
    "relu": _unary(lambda b, x, y, dy: b.emit("relu_grad", y, dy)),  # y > 0 exactly where x > 0
    "gelu": _gelu,
    "cast": _unary(lambda b, x, y, dy: b.emit("cast", dy, dtype=x.type.dtype)),
    "add": lambda b, op, dy: (lambda: dy, lambda: dy),
    "sub": lambda b, op, dy: (lambda: dy, lambda: b.emit("neg", dy)),
    "mul": _mul,
    "div": _div,
    "pow": _pow,
    "minimum": _minimum,
    "maximum": _maximum,
    "where": _where,
    "reshape": _reshape,
    "transpose": _transpose,
    "broadcast": lambda b, op, dy: (lambda: dy,),  # the caller sums
    "slice": _slice,
    "pad": _pad,
    "concat": _concat,
    "sum": _sum,
    "mean": _mean,
    "max": _max,
    "matmul": _matmul,
    "conv": _conv,
    "conv_grad_input": _conv_grad_input,
    "max_pool": _max_pool,
    "avg_pool": _avg_pool,
    "attention": _attention,
    "softmax": _from_result("softmax_grad"),
    "log_softmax": _from_result("log_softmax_grad"),
    "cumsum": _cumsum,
    "topk": _topk,
    "layer_norm": _layer_norm,
    "batch_norm": _batch_norm,
    "gather": _gather,
    "scatter": _scatter,
    "cross_entropy": _cross_entropy,
    "mse": _mse,
}

# Float operations, or choices made by float values, whose gradient is zero wherever it exists: training through them does nothing.
FLAT = ("floor", "round", "sign", "argmax")
# Gradients end here because the model says so.
STOPS = ("detach",)
