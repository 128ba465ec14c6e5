"""Rules for one element of a result: the meaning of elementwise, layout and lookup operations at one index.

In: an operation, a function that reads operand k at an index, and the index of the wanted element (one expression per
dimension). Out: one expression per result. POINTWISE operations read their operands at the same index (after
broadcasting); INDEXED ones compute the index they read. Layout operations are therefore free wherever they are read
through these rules instead of being stored.

Rounding: 16-bit floats are f32 here (see emit.py). An operation's result is not rounded before it is stored, so fusing
never rounds more often, nor less accurately, than the operations one by one; only `cast`, constants and `iota` are
rounded where they stand, because the graph asks for exactly that number.

Limits: integer division by zero and lookups outside a table are the caller's error; lookups are clamped, so they never
read foreign memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from math import prod

from tvm import tirx

from penstock.ir.attrs import Attr
from penstock.ir.graph import Op, Value
from penstock.ir.ops import complete_attrs, integer, ints
from penstock.ir.training.rates import COSINE, STEP

from .arithmetic import (
    absolute,
    bitcast,
    convert,
    divide,
    equal,
    guarded_shift,
    negate,
    number_like,
    relu,
    remainder_of,
    sign,
    subtract,
    unfolded,
)
from .draws import random, random_key
from .emit import Emitter, Expr, dtype_name, rounded_literal
from .functions import Functions

Index = tuple[Expr, ...]
Read = Callable[[int, Index], Expr]
Attrs = Mapping[str, Attr]


_ZERO = tirx.IntImm("int32", 0)


def zero() -> Expr:
    """Return index 0, always the same object, so that indices can be compared by identity."""
    return _ZERO


def number(attr: Attr) -> float:
    """Return a number attribute."""
    assert isinstance(attr, int | float), attr
    return float(attr)


def axis_of(op: Op, value: Value) -> int:
    """Return the `axis` attribute of an operation, as a non-negative dimension of `value`."""
    axis = complete_attrs(op)["axis"]
    assert isinstance(axis, int), axis
    return axis % value.type.rank


def _sgd(f: Functions, a: Attrs, w: Expr, g: Expr, lr: Expr) -> tuple[Expr, ...]:
    decay = number(a["weight_decay"])
    return (w - lr * (g + number_like(w, decay) * w if decay else g),)


def _momentum(f: Functions, a: Attrs, w: Expr, g: Expr, m: Expr, lr: Expr) -> tuple[Expr, ...]:
    beta, decay = number_like(w, number(a["beta"])), number(a["weight_decay"])
    g = f.bind(g + number_like(w, decay) * w) if decay else g
    m = f.bind(beta * m + g)
    return (w - lr * (g + beta * m) if a["nesterov"] else w - lr * m), m


def _adamw(f: Functions, a: Attrs, w: Expr, g: Expr, m: Expr, v: Expr, *factors: Expr) -> tuple[Expr, ...]:
    # The bias corrections of both moments, and the learning rate.
    c1, c2, lr = factors
    beta1, beta2, decay = number(a["beta1"]), number(a["beta2"]), number(a["weight_decay"])
    m = f.bind(number_like(w, beta1) * m + number_like(w, 1 - beta1) * g)
    v = f.bind(number_like(w, beta2) * v + number_like(w, 1 - beta2) * g * g)
    kept = w - lr * number_like(w, decay) * w if decay else w
    # lr * (m / c1) / (sqrt(v / c2) + eps), with one division per element: these take longer than memory does.
    step = f.emit.bind_outside(lr / c1, (lr, c1))
    scale = f.emit.bind_outside(number_like(c2, 1) / tirx.sqrt(c2), (c2,))
    return kept - step * m / (tirx.sqrt(v) * scale + number_like(w, number(a["eps"]))), m, v


# kind -> (functions, attributes, operands) -> results
POINTWISE: dict[str, Callable[..., Expr | tuple[Expr, ...]]] = {
    "neg": lambda f, a, x: negate(x),
    "abs": lambda f, a, x: absolute(x),
    "sign": lambda f, a, x: sign(x),
    "floor": lambda f, a, x: tirx.floor(x),
    "round": lambda f, a, x: tirx.nearbyint(x),
    "exp": lambda f, a, x: f.exp(x),
    "log": lambda f, a, x: f.log(x),
    "sqrt": lambda f, a, x: f.sqrt(x),
    "rsqrt": lambda f, a, x: f.rsqrt(x),
    "sin": lambda f, a, x: f.sin(x),
    "cos": lambda f, a, x: f.cos(x),
    "atan": lambda f, a, x: f.atan(x),
    "tanh": lambda f, a, x: f.tanh(x),
    "sigmoid": lambda f, a, x: f.sigmoid(x),
    "erf": lambda f, a, x: f.erf(x),
    "relu": lambda f, a, x: relu(x),
    "gelu": lambda f, a, x: f.gelu(x, str(a["approximate"])),
    "detach": lambda f, a, x: x,
    "not": lambda f, a, x: tirx.Not(x),
    "cast": lambda f, a, x: convert(f, x, str(a["dtype"])),
    "add": lambda f, a, x, y: x + y,
    "sub": lambda f, a, x, y: subtract(x, y),
    "mul": lambda f, a, x, y: x * y,
    "div": lambda f, a, x, y: divide(f, x, y),
    "rem": lambda f, a, x, y: remainder_of(f, x, y),
    "pow": lambda f, a, x, y: f.pow(x, y),
    "minimum": lambda f, a, x, y: f.smaller(x, y),
    "maximum": lambda f, a, x, y: f.larger(x, y),
    "equal": lambda f, a, x, y: equal(x, y),
    "less": lambda f, a, x, y: x < y if not dtype_name(x).startswith("bool") else tirx.And(tirx.Not(x), y),
    "less_equal": lambda f, a, x, y: x <= y if not dtype_name(x).startswith("bool") else tirx.Or(tirx.Not(x), y),
    "and": lambda f, a, x, y: tirx.And(x, y),
    "or": lambda f, a, x, y: tirx.Or(x, y),
    "bit_and": lambda f, a, x, y: tirx.bitwise_and(x, y),
    "bit_or": lambda f, a, x, y: tirx.bitwise_or(x, y),
    "bit_xor": lambda f, a, x, y: tirx.bitwise_xor(x, y),
    "shift_left": lambda f, a, x, y: guarded_shift(x, y, x << y, number_like(x, 0)),
    "shift_right": lambda f, a, x, y: guarded_shift(
        x,
        y,
        x >> y,
        number_like(x, 0)
        if dtype_name(x)[0] == "u"
        else tirx.Select(x < number_like(x, 0), number_like(x, -1), number_like(x, 0)),
    ),
    "random_key": lambda f, a, x: random_key(f, x, a["number"], a["seed"]),
    "random": lambda f, a, place, key: random(f, place, key),
    "where": lambda f, a, c, x, y: tirx.Select(c, x, y),
    "relu_grad": lambda f, a, x, dy: tirx.Select(x > number_like(x, 0), dy, number_like(dy, 0)),
    "gelu_grad": lambda f, a, x, dy: dy * f.gelu_slope(x, str(a["approximate"])),
    "sgd": _sgd,
    "momentum": _momentum,
    "adamw": _adamw,
}


# ---------------------------------------------------------------------------------------- indices


def broadcast_index(index: Index, shape: Sequence[int]) -> Index:
    """Return the index of an operand of `shape` that belongs to element `index` of a result it broadcasts to."""
    if not shape:
        return ()
    return tuple(zero() if n == 1 else i for i, n in zip(index[-len(shape) :], shape, strict=True))


def linear(index: Index, shape: Sequence[int]) -> Expr:
    """Return the row-major position of an index."""
    position: Expr = zero()
    for i, n in zip(index, shape, strict=True):
        position = position * n + i if n != 1 else position
    return position


def unravel(position: Expr, shape: Sequence[int]) -> Index:
    """Return the index at a row-major position; zeros for an empty shape."""
    if 0 in shape:
        return tuple(zero() for _ in shape)
    index: list[Expr] = []
    stride = prod(shape)
    for axis, n in enumerate(shape):
        stride //= n
        part = position // stride if stride > 1 else position
        # The first coordinate that is not 1 cannot wrap round.
        index.append(zero() if n == 1 else part % n if any(m != 1 for m in shape[:axis]) else part)
    return tuple(index)


def bound_index(emit: Emitter, position: Expr, shape: Sequence[int], name: str = "o") -> Index:
    """Return the index at a row-major position, with every coordinate computed once."""
    return tuple(i if isinstance(i, tirx.IntImm) else emit.bind(i, name) for i in unravel(position, shape))


def reshape_index(index: Index, shape: Sequence[int], target: Sequence[int]) -> Index:
    """Return the index in `target` of the element that has `index` in `shape`: dimensions that both have in common are
    passed through."""
    coordinates: list[Expr] = []
    i = j = 0
    while i < len(shape) or j < len(target):
        a, b, size_a, size_b = i, j, 1, 1
        while (i == a and i < len(shape)) or (j == b and j < len(target)) or size_a != size_b:
            if i < len(shape) and (size_a <= size_b or j == len(target)):
                size_a, i = size_a * shape[i], i + 1
            else:
                size_b, j = size_b * target[j], j + 1
        coordinates += unravel(linear(index[a:i], shape[a:i]), target[b:j])
    return tuple(coordinates)


def _reshape(f: Functions, op: Op, read: Read, index: Index) -> Expr:
    return read(0, reshape_index(index, op.outs[0].type.dims, op.ins[0].type.dims))


def _transpose(f: Functions, op: Op, read: Read, index: Index) -> Expr:
    source: list[Expr] = [zero()] * len(index)
    for i, p in enumerate(ints(op.attrs["perm"])):
        source[p] = index[i]
    return read(0, tuple(source))


def _broadcast(f: Functions, op: Op, read: Read, index: Index) -> Expr:
    return read(0, broadcast_index(index, op.ins[0].type.dims))


def _slice(f: Functions, op: Op, read: Read, index: Index) -> Expr:
    start, step = ints(op.attrs["start"]), ints(op.attrs["step"])
    return read(0, tuple(i * s + b if s != 1 or b else i for i, b, s in zip(index, start, step, strict=True)))


def _clamped(i: Expr, n: int) -> Expr:
    return tirx.max(tirx.min(i, n - 1), 0)


def _pad(f: Functions, op: Op, read: Read, index: Index) -> Expr:
    a = complete_attrs(op)
    x, y = op.ins[0].type, op.outs[0].type
    inner = ints(a["inner"]) or (0,) * x.rank
    inside: list[Expr] = []
    source: list[Expr] = []
    if x.size == 0:
        return rounded_literal(a["value"], x.dtype)  # type: ignore[arg-type]
    for i, n, m, low, gap in zip(index, x.dims, y.dims, ints(a["low"]), inner, strict=True):
        if n == m:
            source.append(i)
            continue
        place = i - low if low else i
        if gap:
            inside.append(tirx.EQ(tirx.floormod(place, gap + 1), 0))
            place = tirx.floordiv(place, gap + 1)
        inside += [place >= 0, place < n]
        source.append(_clamped(place, n))
    value = read(0, tuple(source))
    if not inside:
        return value
    return tirx.Select(tirx.all(*inside), value, rounded_literal(a["value"], x.dtype))  # type: ignore[arg-type]


def _concat(f: Functions, op: Op, read: Read, index: Index) -> Expr:
    axis = axis_of(op, op.outs[0])
    parts: list[tuple[int, Expr]] = []
    start = 0
    for k, v in enumerate(op.ins):
        n = v.type.dims[axis]
        if n:
            place = _clamped(index[axis] - start, n)
            parts.append((start, read(k, (*index[:axis], place, *index[axis + 1 :]))))
        start += n
    value = parts[0][1]
    for start, part in parts[1:]:
        value = tirx.Select(index[axis] >= start, part, value)
    return value


def _iota(f: Functions, op: Op, read: Read, index: Index) -> Expr:
    axis = axis_of(op, op.outs[0])
    return convert(f, index[axis], str(op.attrs["dtype"]))


def _const(f: Functions, op: Op, read: Read, index: Index) -> Expr:
    constant = rounded_literal(op.attrs["value"], str(op.attrs["dtype"]))  # type: ignore[arg-type]
    return (
        constant
        if not isinstance(constant, tirx.FloatImm) or (constant.value and math.isfinite(constant.value))
        else unfolded(constant)
    )


def table_row(at: Expr, rows: int) -> Expr:
    """Return a lookup position within the table; negative ones count from the end."""
    at = tirx.Cast("int32", at) if dtype_name(at) != "int32" else at
    return _clamped(tirx.Select(at < 0, at + rows, at), rows)


def _gather(f: Functions, op: Op, read: Read, index: Index) -> Expr:
    axis = axis_of(op, op.ins[0])
    places = op.ins[1].type.rank
    at = table_row(read(1, index[axis : axis + places]), op.ins[0].type.dims[axis])
    return read(0, (*index[:axis], at, *index[axis + places :]))


def _gather_q(f: Functions, op: Op, read: Read, index: Index) -> Expr:
    """Return an element of a row of 8 or 4 bits: the whole number less its zero, times the scale of its group."""
    a = complete_attrs(op)
    row, k = table_row(read(0, index[:-1]), op.ins[1].type.dims[0]), index[-1]
    group = k // integer(a["group"])
    if a["bits"] == 4:
        byte = tirx.Cast("int32", read(1, (row, k // 2)))
        number = tirx.bitwise_and(byte >> (k % 2 * 4), tirx.IntImm("int32", 15))
    else:
        number = tirx.Cast("int32", read(1, (row, k)))
    if len(op.ins) > 3:
        number = number - tirx.Cast("int32", read(3, (row, group)))
    elif a["bits"] == 4:
        number = number - 8
    return tirx.Cast("float32", number) * read(2, (row, group))


def _ramp(f: Functions, op: Op, read: Read, index: Index) -> Expr:
    """Choose the columns of the row in force, then compute the curve once."""
    step = read(1, ())
    start, length, first, last, shape = f.row_in_force(
        op.ins[0].type.dims, lambda r, c: read(0, (r, c)), lambda begin: begin <= step
    )
    first, last, shape = f.bind(first), f.bind(last), f.bind(shape)
    done = f.bind((step - start) / length)
    part = f.bind(
        tirx.Select(
            done < number_like(done, 0),
            number_like(done, 0),
            tirx.Select(done > number_like(done, 1), number_like(done, 1), done),
        )
    )
    line = first + (last - first) * part
    wave = last + (first - last) * (number_like(part, 1) + f.cos(part * number_like(part, math.pi))) / number_like(
        part, 2
    )
    stairs = first * f.pow(last, tirx.floor(done))
    curve = tirx.Select(tirx.EQ(shape, number_like(shape, COSINE)), wave, line)
    return tirx.Select(tirx.EQ(shape, number_like(shape, STEP)), stairs, curve)


def _batch_norm(f: Functions, op: Op, read: Read, index: Index) -> Expr:
    x, channel = read(0, index), (index[1],)
    scale, bias, mean, variance = (read(k, channel) for k in (1, 2, 3, 4))
    eps = number_like(x, number(complete_attrs(op)["eps"]))
    return (x - mean) / tirx.sqrt(variance + eps) * scale + bias


def _cross_entropy_grad(f: Functions, op: Op, read: Read, index: Index) -> Expr:
    logits = op.ins[0].type
    row, column = index[:-1], index[-1]
    x, lse, seed = read(0, index), read(2, row), read(3, ())
    label = table_row(read(1, row), logits.dims[-1])
    hit = tirx.Select(tirx.EQ(column, label), number_like(x, 1), number_like(x, 0))
    return (f.exp_down(x - lse) - hit) * (seed * number_like(x, 1 / math.prod(logits.dims[:-1])))


INDEXED: dict[str, Callable[[Functions, Op, Read, Index], Expr]] = {
    "reshape": _reshape,
    "transpose": _transpose,
    "broadcast": _broadcast,
    "slice": _slice,
    "pad": _pad,
    "concat": _concat,
    "iota": _iota,
    "const": _const,
    "gather": _gather,
    "gather_q": _gather_q,
    "ramp": _ramp,
    "batch_norm": _batch_norm,
    "cross_entropy_grad": _cross_entropy_grad,
}


def forward_index(op: Op, index: Index) -> Index:
    """Return the index in the result of a reshape or transpose of the element at `index` of its operand."""
    if op.kind == "transpose":
        return tuple(index[p] for p in ints(op.attrs["perm"]))
    assert op.kind == "reshape", op.kind
    return reshape_index(index, op.ins[0].type.dims, op.outs[0].type.dims)


def _same_bits(f: Functions, op: Op, read: Read, index: Index) -> Expr:
    return bitcast(f, read(0, index), op.ins[0].type.dtype, str(op.attrs["dtype"]))


INDEXED["bitcast"] = _same_bits


def element(f: Functions, op: Op, read: Read, index: Index) -> tuple[Expr, ...]:
    """Return all results of an operation at one index."""
    if op.kind in INDEXED:
        return (INDEXED[op.kind](f, op, read, index),)
    attrs = complete_attrs(op)
    # Without broadcasting the very same index: values are remembered by it.
    shape = op.outs[0].type.shape
    operands = [
        read(k, index if v.type.shape == shape else broadcast_index(index, v.type.dims)) for k, v in enumerate(op.ins)
    ]
    result = POINTWISE[op.kind](f, attrs, *operands)
    return result if isinstance(result, tuple) else (result,)


def has_element_rule(kind: str) -> bool:
    return kind in POINTWISE or kind in INDEXED
