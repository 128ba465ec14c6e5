"""Scattered rows: the gradient of a lookup, and scatter, which write rows to the places that indices name.

In: the gradient of a lookup, or scatter. The gradient adds rows of dy to the rows they came from. Scatter replaces rows
of a copy, or adds to them. A gradient that is fused with an accumulation adds straight to the variable, without a table
of zeros in between. Out: a loop over indices in order, vectorised along the row. Threads share outer dimensions or
ranges of columns, never rows. So the result does not depend on their number, and equal indices need no atomic
additions.
"""

from __future__ import annotations

from math import prod

from tvm import tirx

from penstock.backends.tvm.kernels.tools.body import Body, NotOneKernel, parallel_if
from penstock.backends.tvm.kernels.tools.elements import Index, axis_of, linear, table_row, unravel
from penstock.backends.tvm.kernels.tools.emit import HALVES, SERIAL, literal, load
from penstock.ir.graph import Op, slot_of
from penstock.ir.ops import complete_attrs

from .elementwise import emit_nest


def emit_scatter(body: Body, op: Op) -> None:
    """Emit a copy of x, then row by row the updates, which replace its entries or are added to them."""
    x, indices, updates = op.ins
    y, add = op.outs[0], bool(complete_attrs(op)["add"])
    axis = axis_of(op, y)
    shape, dtype = y.type.dims, y.type.dtype
    if len(body.group.ops) > 1:
        raise NotOneKernel("entries are scattered, nothing can follow in one loop")
    emit, outer, inner, places = body.emit, shape[:axis], shape[axis + 1 :], indices.type.dims
    stored = body.result(y)
    # Sums of 16-bit floats are taken in f32 and rounded once.
    target = emit.alloc(max(y.type.size, 1), dtype, "sums") if add and dtype in HALVES else stored

    def copy(index: Index) -> None:
        with body.point():
            emit.store(target, body.at(x, index), linear(index, shape))

    emit_nest(body, shape, 0 if body.is_stored(x) else max(len(shape) - 1, 0), copy)
    if not updates.type.size:
        return
    threads = parallel_if(body.machine, updates.type.size) if prod(outer) > 1 else SERIAL
    with emit.loop(prod(outer), threads, "o") as o:
        lead = unravel(o, outer)
        with emit.loop(prod(places), SERIAL, "n") as n, body.point():
            at = unravel(n, places)
            row = emit.bind(table_row(body.at(indices, at), shape[axis]), "row")
            for i, _ in emit.spans(prod(inner), body.lanes):
                with body.point():
                    trailing = unravel(i, inner)
                    position = linear((*lead, row, *trailing), shape)
                    value = body.at(updates, (*lead, *at, *trailing))
                    emit.store(target, load(target, position) + value if add else value, position)
    if target is not stored:
        for i, _ in emit.spans(y.type.size, body.lanes):
            emit.store(stored, tirx.BufferLoad(target, [i]), i)


def emit_gather_grad(body: Body, op: Op) -> None:
    dy, indices = op.ins
    table = op.outs[0]
    axis = axis_of(op, table)
    shape, dtype = table.type.dims, table.type.dtype
    outer, inner = shape[:axis], shape[axis + 1 :]
    others = [o for o in body.group.ops if o is not op]
    if others and (len(others) > 1 or others[0].kind != "accum" or body.group.outs):
        raise NotOneKernel("a lookup's gradient can only be stored or accumulated")
    emit, lanes, size = body.emit, body.lanes, table.type.size
    slot = slot_of(others[0]) if others else None
    stored = body.slot(slot, table) if slot is not None else body.result(table)
    # Sums of 16-bit floats are taken in f32 and rounded once.
    target = emit.alloc(max(size, 1), dtype, "sums") if dtype in HALVES else stored
    if slot is None or target is not stored:
        for i, _ in emit.spans(size, lanes, parallel_if(body.machine, size)):
            emit.store(target, literal(0, dtype), i)
    places = indices.type.dims
    with emit.loop(prod(outer), parallel_if(body.machine, dy.type.size) if prod(outer) > 1 else SERIAL, "o") as o:
        lead = unravel(o, outer)
        with emit.loop(prod(places), SERIAL, "n") as n, body.point():
            at = unravel(n, places)
            row = emit.bind(table_row(body.at(indices, at), shape[axis]), "row")
            for i, _ in emit.spans(prod(inner), lanes):
                with body.point():
                    trailing = unravel(i, inner)
                    position = linear((*lead, row, *trailing), shape)
                    value = body.at(dy, (*lead, *at, *trailing))
                    emit.store(target, tirx.BufferLoad(target, [position]) + value, position)
    if target is not stored:
        for i, _ in emit.spans(size, lanes, parallel_if(body.machine, size)):
            total = tirx.BufferLoad(target, [i])
            emit.store(stored, total if slot is None else load(stored, i) + total, i)
