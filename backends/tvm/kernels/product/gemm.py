"""Matrix products of the graph: which memory the operands are, and whether the batch is one tall product.

In: a matmul operation. Out: a Product, whose loops choose.py chooses: accessors a(batch, i, k) and b(batch, k, j), the
place of results, and the coordinate along which each operand is contiguous. The accessors read through any layout
operation.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import tvm
from tvm import tirx
from tvm.sym.analyzer import Analyzer

from penstock.backends.tvm.kernels.tools.body import Body
from penstock.backends.tvm.kernels.tools.elements import Index, broadcast_index, unravel
from penstock.backends.tvm.kernels.tools.emit import Expr, literal
from penstock.backends.tvm.kernels.tools.product_terms import Product
from penstock.ir.graph import Op, Value
from penstock.ir.ops import complete_attrs

from .choose import emit_product


def contiguous(body: Body, value: Value, index: Callable[[Expr], Index], extent: int) -> bool:
    """Return whether consecutive values of the coordinate read consecutive memory."""
    v = tirx.Var("v", "int32")
    here, there = body.address(value, index(v)), body.address(value, index(v + 1))
    if here is None or there is None:
        return False
    analyzer = Analyzer()
    analyzer.bind(v, tvm.ir.Range(0, max(extent - 1, 1)))
    step = analyzer.simplify(there[1] - here[1])
    return isinstance(step, tirx.IntImm) and int(step.value) == 1


def emit_matmul(body: Body, op: Op) -> None:
    emit_product(body, product_of(body, op))


def product_of(body: Body, op: Op) -> Product:
    """Return what the loops of a product need to know of its operation."""
    attrs = complete_attrs(op)
    lhs, rhs, out = op.ins[0], op.ins[1], op.outs[0]
    *batch, m, n = out.type.dims
    k = lhs.type.dims[-2 if attrs["ta"] else -1]
    lhs_batch, rhs_batch = lhs.type.dims[:-2], rhs.type.dims[:-2]

    def a_index(lead: Index, i: Expr, k: Expr) -> Index:
        return (*broadcast_index(lead, lhs_batch), *((k, i) if attrs["ta"] else (i, k)))

    def b_index(lead: Index, k: Expr, j: Expr) -> Index:
        return (*broadcast_index(lead, rhs_batch), *((j, k) if attrs["tb"] else (k, j)))

    lead = tuple(tirx.Var(f"l{i}", "int32") for i in range(len(batch)))
    fixed = tirx.Var("f", "int32")
    # A common left operand of one row block per batch is one tall product when the right operand is the same for the
    # whole batch.
    product = Product(
        out,
        tuple(batch),
        m,
        n,
        k,
        lambda b, i, k: body.at(lhs, a_index(b, i, k)),
        lambda b, k, j: body.at(rhs, b_index(b, k, j)),
        lambda b, i, j: (*b, i, j),
        contiguous(body, lhs, lambda v: a_index(lead, fixed, v), k),
        contiguous(body, rhs, lambda v: b_index(lead, fixed, v), n),
        k > 1 and contiguous(body, rhs, lambda v: b_index(lead, v, fixed), k),
        m > 1 and contiguous(body, lhs, lambda v: a_index(lead, v, fixed), m),
        lambda b, k, j: body.address(rhs, b_index(b, k, j)),
        op,
        lambda b, i, k: body.address(lhs, a_index(b, i, k)),
    )
    if batch and prod(rhs_batch) == 1 and not attrs["ta"]:
        return _tall(body, op, product, lhs, rhs, a_index, b_index)
    return product


def _tall(
    body: Body,
    op: Op,
    p: Product,
    lhs: Value,
    rhs: Value,
    a_index: Callable[[Index, Expr, Expr], Index],
    b_index: Callable[[Index, Expr, Expr], Index],
) -> Product:
    """Treat batch and rows as one row dimension, where the right operand is the same for all of the batch."""
    shape = (*p.batch, p.m)

    def split(i: Expr) -> tuple[Index, Expr]:
        index = unravel(i, shape)
        return index[:-1], index[-1]

    def a(_: Index, i: Expr, k: Expr) -> Expr:
        lead, row = split(i)
        return body.at(lhs, a_index(lead, row, k))

    def b(_: Index, k: Expr, j: Expr) -> Expr:
        return body.at(rhs, b_index((literal(0, "i32"),) * len(p.batch), k, j))

    def place(_: Index, i: Expr, j: Expr) -> Index:
        lead, row = split(i)
        return (*lead, row, j)

    def b_address(_: Index, k: Expr, j: Expr) -> tuple[Value, Expr] | None:
        return body.address(rhs, b_index((literal(0, "i32"),) * len(p.batch), k, j))

    def a_address(_: Index, i: Expr, k: Expr) -> tuple[Value, Expr] | None:
        lead, row = split(i)
        return body.address(lhs, a_index(lead, row, k))

    sizes = (p.out, (), prod(shape), p.n, p.k)
    return Product(
        *sizes, a, b, place, p.a_along_k, p.b_along_j, p.b_along_k, b_address=b_address, op=op, a_address=a_address
    )
