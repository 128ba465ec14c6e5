"""Rows for weights of 8 and 4 bits: integers by groups along a row of the weight, each group with a scale.

An element stands for (q - zero) * scale of its group. Eight bits are `i8`, with the zero 0 unless `zeros` are given.
Four bits are halves of an `u8`: the low half is the even element, the zero is 8. Zeros are `u8` for both.
"""

from __future__ import annotations

from penstock.ir.types import INTS, TensorType

from .table import Required, Types, Values, integer, need, row

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
