"""Rows for weights of 8 and 4 bits by groups along a row of the weight, each with a scale; and for products of bytes.

An element stands for (q - zero) * scale of its group. Eight bits are `i8`, with the zero 0 unless `zeros` are given.
Four bits are halves of an `u8`: the low half is the even element, the zero is 8. Zeros are `u8` for both.
"""

from __future__ import annotations

from math import prod

from penstock.ir.types import INTS, TensorType

from .contractions import convolved
from .table import Required, Types, Values, integer, need, row
from .windows import WINDOW

GROUPS = (32, 64, 128)
# How `act` treats the other operand: as it is, or rounded to 8 bits by groups.
ACTS = ("f32", "i8")


def columns_of(q: TensorType, bits: int) -> int:
    """Return the elements of a row of a quantised weight."""
    return q.dims[-1] * (8 // bits)


def _weight(q: TensorType, x: Types, a: Values) -> int:
    """Check a quantised weight with its scales and zeros, and return the elements of a row."""
    bits, group = integer(a["bits"]), integer(a["group"])
    need(bits in (4, 8), f"bits must be 4 or 8, got {bits}")
    need(group in GROUPS, f"group must be one of {', '.join(map(str, GROUPS))}, got {group}")
    kind = "i8" if bits == 8 else "u8"
    need(q.rank == 2 and q.dtype == kind, f"a weight of {bits} bits must be {kind} with two dimensions, got {q}")
    columns = columns_of(q, bits)
    need(columns % group == 0, f"{columns} elements of a row do not divide into groups of {group}")
    scales, *zeros = x
    expected = (q.dims[0], columns // group)
    need(
        scales.dtype in ("f16", "f32") and scales.dims == expected,
        f"scales must be f16 or f32{list(expected)}, got {scales}",
    )
    for z in zeros:
        need(z.dtype == "u8" and z.dims == expected, f"zeros must be u8{list(expected)}, got {z}")
    return columns


def _matmul_q(x: Types, a: Values) -> tuple[TensorType, ...]:
    need(a["act"] in ACTS, f"act must be one of {', '.join(ACTS)}, got {a['act']!r}")
    need(x[0].dtype in ("f32", "f16", "bf16"), f"needs an operand of f32, f16 or bf16, got {x[0]}")
    columns = _weight(x[1], x[2:], a)
    need(x[0].rank >= 1 and x[0].dims[-1] == columns, f"{x[0]} does not fit a weight with rows of {columns} elements")
    return (x[0].with_shape((*x[0].shape[:-1], x[1].shape[0])),)


def _gather_q(x: Types, a: Values) -> tuple[TensorType, ...]:
    columns = _weight(x[1], x[2:], a)
    need(x[0].dtype in INTS, f"indices must be integers, got {x[0]}")
    need(x[1].shape[0] != 0 or 0 in x[0].shape, f"there are no entries in {x[1]}")
    return (TensorType("f32", (*x[0].shape, columns)),)


# The most terms whose sum fits into 32 bits, whatever the bytes are.
MOST_TERMS = ((1 << 31) - 1) // (255 * 255)


def _matmul_bytes(x: Types, a: Values) -> tuple[TensorType, ...]:
    data, weight, zero, zeros = x
    for t in (data, weight):
        need(t.dtype in ("i8", "u8"), f"needs whole numbers of 8 bits, got {t}")
    need(weight.rank == 2, f"the right operand must have two dimensions, got {weight}")
    need(data.rank >= 1 and data.dims[-1] == weight.dims[0], f"{data} does not fit {weight}")
    need(data.dims[-1] <= MOST_TERMS, f"{data.dims[-1]} terms may exceed 32 bits: at most {MOST_TERMS}")
    need(zero == TensorType(data.dtype, ()), f"the zero point of {data} must be one {data.dtype}, got {zero}")
    expected = TensorType(weight.dtype, (weight.shape[1],))
    need(zeros == expected, f"the zero points of {weight} must be {expected}, got {zeros}")
    return (TensorType("i32", (*data.shape[:-1], weight.shape[1])),)


def _conv_bytes(x: Types, a: Values) -> tuple[TensorType, ...]:
    data, weight, zero, zeros = x
    for t in (data, weight):
        need(t.dtype in ("i8", "u8"), f"needs whole numbers of 8 bits, got {t}")
    dims = convolved(data, weight, a)
    terms = prod(weight.dims[1:])
    need(terms <= MOST_TERMS, f"{terms} terms may exceed 32 bits: at most {MOST_TERMS}")
    need(zero == TensorType(data.dtype, ()), f"the zero point of {data} must be one {data.dtype}, got {zero}")
    expected = TensorType(weight.dtype, (weight.shape[0],))
    need(zeros == expected, f"the zero points of {weight} must be {expected}, got {zeros}")
    return (TensorType("i32", dims),)


def _conv_flops(x: Types, y: Types, a: Values) -> float:
    return 2.0 * y[0].size * prod(x[1].dims[1:])


def _flops(x: Types, y: Types, a: Values) -> float:
    return 2.0 * y[0].size * x[0].dims[-1]


ROWS = (
    row(
        "matmul_q",
        "contract",
        (3, 4),
        _matmul_q,
        "x times the transpose of a weight of 8 or 4 bits, from (x, q, scales[, zeros]) by groups; with `act=i8` each "
        "group of a row of x is rounded to x * 127 / largest first",
        bits=Required(int),
        group=Required(int),
        act="f32",
        flops=_flops,
    ),
    row(
        "matmul_bytes",
        "contract",
        4,
        _matmul_bytes,
        "exact sums of (x - zero) * (weight - zeros) along k in 32 bits, from (x [..., k], weight [k, n], zero, "
        "zeros [n]), bytes with or without sign",
        # Terms stay whole: zeros that fill a part up would count as numbers less their zero points.
        dims="a... k^, k^ n, , n -> a... n",
        flops=_flops,
    ),
    row(
        "conv_bytes",
        "contract",
        4,
        _conv_bytes,
        "exact sums of (x - zero) * (w - zeros) of a convolution in 32 bits, from (x[n,c,...], w[o,c/groups,...], "
        "zero, zeros [o]), bytes with or without sign; padding is zero points",
        flops=_conv_flops,
        dims="n c^ y...^, o^ c^ k...^, , o^ -> n o^ y...^",
        groups=1,
        **WINDOW,  # type: ignore[arg-type]
    ),
    row(
        "gather_q",
        "gather",
        (3, 4),
        _gather_q,
        "rows of a weight of 8 or 4 bits at integer indices, from (indices, q, scales[, zeros]); negative ones count "
        "from the end",
        bits=Required(int),
        group=Required(int),
    ),
)
