"""Matrix products of tensors of any rank."""

from __future__ import annotations

from penstock.frontends.writer import Operand, Writer
from penstock.ir.graph import Value

from .layout import reshape


def product(w: Writer, x: Value, y: Value) -> Value:
    """Compute x @ y as NumPy does: a vector on the left is a row, on the right a column."""
    left, right = x.type.rank == 1, y.type.rank == 1
    lhs = reshape(w, x, (1, *x.type.dims)) if left else x
    rhs = reshape(w, y, (*y.type.dims, 1)) if right else y
    matrix = w.emit("matmul", lhs, rhs)
    dims = matrix.type.dims
    return reshape(w, matrix, dims[:-2] + (() if left else dims[-2:-1]) + (() if right else dims[-1:]))


def scaled_sum(w: Writer, y: Value, c: Operand | None, alpha: float, beta: float) -> Value:
    """Compute alpha * y + beta * c."""
    if alpha != 1.0:
        y = w.emit("mul", y, alpha)
    if c is None or beta == 0.0:
        return y
    return w.emit("add", y, c if beta == 1.0 else w.emit("mul", c, beta))
