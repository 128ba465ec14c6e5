"""Rows for sources and elementwise operations: operands broadcast as in NumPy."""

from __future__ import annotations

from math import prod

from penstock.ir.types import INTS, ITEM_BYTES, TensorType, broadcast_shapes

from .table import (
    Required,
    Types,
    Values,
    axis_of,
    broadcast,
    dtype_of,
    ints,
    need,
    need_floats,
    need_numbers,
    per_element,
    row,
)


def _const(x: Types, a: Values) -> tuple[TensorType, ...]:
    shape = ints(a["shape"])
    if isinstance(a["value"], tuple):
        need(len(a["value"]) == prod(shape), f"{len(a['value'])} values do not fill shape {list(shape)}")
    return (TensorType(dtype_of(a["dtype"]), shape),)


def _iota(x: Types, a: Values) -> tuple[TensorType, ...]:
    shape = ints(a["shape"])
    axis_of(a["axis"], len(shape))
    result = TensorType(dtype_of(a["dtype"]), shape)
    need_numbers([result])
    return (result,)


def _float(x: Types, a: Values) -> tuple[TensorType, ...]:
    need_floats(x)
    return broadcast(x, a)


def _gelu(x: Types, a: Values) -> tuple[TensorType, ...]:
    need(a["approximate"] in ("none", "tanh"), f"attribute approximate must be none or tanh, got {a['approximate']!r}")
    return _float(x, a)


def _number(x: Types, a: Values) -> tuple[TensorType, ...]:
    need_numbers(x)
    return broadcast(x, a)


def _compare(x: Types, a: Values) -> tuple[TensorType, ...]:
    return (broadcast(x, a)[0].with_dtype("bool"),)


def _logic(x: Types, a: Values) -> tuple[TensorType, ...]:
    need(all(t.dtype == "bool" for t in x), f"needs bool operands, got {' and '.join(map(str, x))}")
    return broadcast(x, a)


def _where(x: Types, a: Values) -> tuple[TensorType, ...]:
    need(x[0].dtype == "bool", f"the condition must be bool, got {x[0]}")
    need(x[1].dtype == x[2].dtype, f"element types differ: {x[1]} and {x[2]}")
    return (TensorType(x[1].dtype, broadcast_shapes(*(t.shape for t in x))),)


def _cast(x: Types, a: Values) -> tuple[TensorType, ...]:
    return (x[0].with_dtype(dtype_of(a["dtype"])),)


def _bits(x: Types, a: Values) -> tuple[TensorType, ...]:
    need(all(t.dtype in INTS for t in x), f"needs integer operands, got {' and '.join(map(str, x))}")
    return broadcast(x, a)


def _bitcast(x: Types, a: Values) -> tuple[TensorType, ...]:
    result = x[0].with_dtype(dtype_of(a["dtype"]))
    need_numbers([x[0], result])
    need(ITEM_BYTES[result.dtype] == ITEM_BYTES[x[0].dtype], f"{x[0].dtype} and {result.dtype} differ in width")
    return (result,)


ROWS = (
    # sources
    row(
        "const",
        "source",
        0,
        _const,
        "`value` in every element, or a list of values in row-major order",
        value=Required(object),
        dtype=Required(str),
        shape=(),
    ),
    row("iota", "source", 0, _iota, "0, 1, 2, ... along `axis`", dtype=Required(str), shape=Required(tuple), axis=0),
    # elementwise, one operand
    row("neg", "elementwise", 1, _number, "-x", flops=per_element(1), dims="| 0"),
    row("abs", "elementwise", 1, _number, "|x|", flops=per_element(1)),
    row("sign", "elementwise", 1, _number, "-1, 0 or 1", flops=per_element(1)),
    row("floor", "elementwise", 1, _float, "largest integer not above x", flops=per_element(1)),
    row("round", "elementwise", 1, _float, "nearest integer, of two the even one", flops=per_element(1)),
    row("exp", "elementwise", 1, _float, "e^x", flops=per_element(10)),
    row("log", "elementwise", 1, _float, "natural logarithm", flops=per_element(10)),
    row("sqrt", "elementwise", 1, _float, "square root", flops=per_element(4)),
    row("rsqrt", "elementwise", 1, _float, "1 / sqrt(x)", flops=per_element(5)),
    row("sin", "elementwise", 1, _float, "sine", flops=per_element(10)),
    row("cos", "elementwise", 1, _float, "cosine", flops=per_element(10)),
    row("atan", "elementwise", 1, _float, "inverse tangent", flops=per_element(15)),
    row("tanh", "elementwise", 1, _float, "hyperbolic tangent", flops=per_element(12)),
    row("sigmoid", "elementwise", 1, _float, "1 / (1 + e^-x)", flops=per_element(12)),
    row("erf", "elementwise", 1, _float, "error function", flops=per_element(15)),
    row("relu", "elementwise", 1, _number, "max(x, 0); its gradient at 0 is 0", flops=per_element(1)),
    row(
        "gelu",
        "elementwise",
        1,
        _gelu,
        "x * Phi(x); `approximate=tanh` uses the tanh form",
        flops=per_element(16),
        approximate="none",
    ),
    row("detach", "elementwise", 1, _float, "x; gradients stop here", dims="| 0"),
    row("not", "elementwise", 1, _logic, "logical negation"),
    row("cast", "elementwise", 1, _cast, "change of element type; float to integer truncates", dtype=Required(str)),
    row(
        "bitcast",
        "elementwise",
        1,
        _bitcast,
        "the same bits as another element type of the same width",
        dtype=Required(str),
    ),
    # elementwise, several operands, broadcast as in NumPy
    row("add", "elementwise", 2, _number, "a + b", flops=per_element(1), dims="| 0+1"),
    row("sub", "elementwise", 2, _number, "a - b", flops=per_element(1), dims="| 0+1"),
    row("mul", "elementwise", 2, _number, "a * b", flops=per_element(1), dims="| 0 1"),
    row("div", "elementwise", 2, _number, "a / b; integers truncate toward zero", flops=per_element(1), dims="| 0"),
    row(
        "rem",
        "elementwise",
        2,
        _number,
        "what a / b, truncated toward zero, leaves of a; exact, with the sign of a; of integers over 0 all of a",
        flops=per_element(4),
    ),
    row("pow", "elementwise", 2, _float, "a to the power b", flops=per_element(20)),
    row("minimum", "elementwise", 2, _number, "the smaller; nan if either is", flops=per_element(1)),
    row("maximum", "elementwise", 2, _number, "the larger; nan if either is", flops=per_element(1)),
    row("equal", "elementwise", 2, _compare, "a == b"),
    row("less", "elementwise", 2, _compare, "a < b"),
    row("less_equal", "elementwise", 2, _compare, "a <= b"),
    row("and", "elementwise", 2, _logic, "logical and"),
    row("or", "elementwise", 2, _logic, "logical or"),
    row("bit_and", "elementwise", 2, _bits, "bits set in both", flops=per_element(1)),
    row("bit_or", "elementwise", 2, _bits, "bits set in either", flops=per_element(1)),
    row("bit_xor", "elementwise", 2, _bits, "bits set in one of both", flops=per_element(1)),
    row(
        "shift_left",
        "elementwise",
        2,
        _bits,
        "a with its bits moved up by b; those past the end are lost, all of them if b is negative",
        flops=per_element(1),
    ),
    row(
        "shift_right",
        "elementwise",
        2,
        _bits,
        "a with its bits moved down by b, all of them if b is negative; the sign moves in from above",
        flops=per_element(1),
    ),
    row("where", "elementwise", 3, _where, "a where the condition holds, else b", dims="| 1+2"),
    # gradients of elementwise ops that are worth one op: (x, dy)
    row("relu_grad", "elementwise", 2, _float, "dy where x > 0, else 0", flops=per_element(1), dims="| 1"),
    row("gelu_grad", "elementwise", 2, _gelu, "dy * gelu'(x)", flops=per_element(24), approximate="none", dims="| 1"),
)
