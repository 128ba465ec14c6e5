"""Kernel generators for GPUs: one TIR function with its launches for one group of operations.

In: a group, as for CPUs. Out: a Kernel. Formulas come from kernels/ (elements, rows, windows, reduce), loops from
loops.py. This file has what a GPU does otherwise: scattered rows, sums and order along an axis, the gradient of a
maximum, the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from math import prod

from tvm import tirx

from penstock.backends.tvm import kernels
from penstock.backends.tvm.kernels import emit_group
from penstock.backends.tvm.kernels.conv import windows
from penstock.backends.tvm.kernels.elementwise import elementwise
from penstock.backends.tvm.kernels.elementwise.elementwise import emit_nest
from penstock.backends.tvm.kernels.rows import rows, select
from penstock.backends.tvm.kernels.rows.sums import add
from penstock.backends.tvm.kernels.tools.body import Fusion, GeneratedKernel, NotOneKernel
from penstock.backends.tvm.kernels.tools.elements import (
    INDEXED,
    POINTWISE,
    Index,
    axis_of,
    linear,
    table_row,
    unravel,
    zero,
)
from penstock.backends.tvm.kernels.tools.emit import Buffer, Expr, cast, ceil_div, literal
from penstock.backends.tvm.target import TargetMachine
from penstock.ir.graph import Op, Value, slot_of
from penstock.ir.ops import complete_attrs, ints, window_of
from penstock.ir.types import FLOATS
from penstock.support.errors import UnsupportedModel

from . import caches, quantised, sorting
from .attention import emit_attention, emit_attention_grad
from .blocks import THREADS, bind_index
from .body import DeviceBody
from .library import library_call
from .loops import DeviceLoops, reduce_lines

# ---------------------------------------------------------------------------------------- lookups


def emit_gather_grad(body: DeviceBody, op: Op) -> None:
    """Emit the gradient of a lookup, without atomic additions. Equal indices form a chain in the order of their
    positions; the first of each chain adds up the rows of dy of all of them. Finding the next equal index compares each
    with each, so many indices are sorted instead (sorting.py)."""
    dy, indices = op.ins
    table = op.outs[0]
    axis = axis_of(op, table)
    shape = table.type.dims
    followers = [o for o in body.group.ops if o.kind != "gather_grad"]
    if followers and (len(followers) > 1 or followers[0].kind != "accum" or body.group.outs):
        raise NotOneKernel("a lookup's gradient can only be stored or accumulated")
    emit = body.emit
    if followers:
        slot = slot_of(followers[0])
        assert slot is not None
        target = body.slot(slot, table)
    else:
        target = body.result(table)
        if table.type.size:
            with emit.launch(ceil_div(table.type.size, THREADS), THREADS) as (block, thread):
                position = emit.bind(block * THREADS + thread, "i")
                with emit.when(position < table.type.size):
                    emit.store(target, literal(0, table.type.dtype), position)
    if dy.type.size:
        _add_rows(body, target, dy, indices, axis, shape)


def emit_scatter(body: DeviceBody, op: Op) -> None:
    """Emit a copy of x; then each chain of equal indices adds its rows up, or the last of them replaces the entry."""
    x, indices, updates = op.ins
    y, axis = op.outs[0], axis_of(op, op.outs[0])
    if len(body.group.ops) > 1:
        raise NotOneKernel("entries are scattered, nothing can follow in one launch")
    shape, target, emit = y.type.dims, body.result(y), body.emit

    def copy(index: Index) -> None:
        with body.point():
            emit.store(target, body.at(x, index), linear(index, shape))

    emit_nest(body, shape, max(len(shape) - 1, 0), copy)
    if not updates.type.size:
        return
    if complete_attrs(op)["add"]:
        _add_rows(body, target, updates, indices, axis, shape)
        return
    outer, inner, places = shape[:axis], shape[axis + 1 :], indices.type.dims
    count, run = prod(places), prod(inner)
    row, after, _ = _chains(body, indices, shape[axis])
    total = prod(outer) * count * run
    with emit.launch(ceil_div(total, THREADS), THREADS) as (block, thread):
        position = emit.bind(block * THREADS + thread, "i")
        with emit.when(position < total), body.point():
            lead = bind_index(body, unravel(position // (count * run) if prod(outer) > 1 else zero(), outer))
            n = emit.bind(position // run % count, "n")
            with emit.when(tirx.EQ(emit.load(after, n), count)):
                tail = bind_index(body, unravel(position % run if run > 1 else zero(), inner))
                value = body.at(updates, (*lead, *bind_index(body, unravel(n, places)), *tail))
                emit.store(target, value, linear((*lead, emit.load(row, n), *tail), shape))


def _chains(body: DeviceBody, indices: Value, size: int) -> tuple[Buffer, Buffer, Buffer]:
    """Emit equal indices as chains. Each position gets its index, the next position with an equal index, and a flag if
    it is the first of its chain. Where there is no next position, the number of positions stands for it."""
    emit, places = body.emit, indices.type.dims
    count = prod(places)
    row = emit.workspace(count, "i32", "row")
    with emit.launch(ceil_div(count, THREADS), THREADS) as (block, thread):
        n = emit.bind(block * THREADS + thread, "n")
        with emit.when(n < count), body.point():
            emit.store(row, table_row(body.at(indices, unravel(n, places)), size), n)
    after, first = emit.workspace(count, "i32", "after"), emit.workspace(count, "i32", "first")
    with emit.launch(ceil_div(count, THREADS), THREADS) as (block, thread):
        n = emit.bind(block * THREADS + thread, "n")
        with emit.when(n < count):
            index = emit.bind(emit.load(row, n), "own")
            following, leads = emit.alloc(1, "i32", "following"), emit.alloc(1, "i32", "leads")
            emit.store(following, literal(count, "i32"), zero())
            emit.store(leads, literal(1, "i32"), zero())
            with emit.loop(count) as back:
                other = emit.bind(count - 1 - back, "m")
                equal = emit.bind(tirx.EQ(emit.load(row, other), index))
                emit.store(
                    following, tirx.Select(tirx.all(equal, other > n), other, emit.load(following, zero())), zero()
                )
                emit.store(
                    leads, tirx.Select(tirx.all(equal, other < n), literal(0, "i32"), emit.load(leads, zero())), zero()
                )
            emit.store(after, emit.load(following, zero()), n)
            emit.store(first, emit.load(leads, zero()), n)
    return row, after, first


def _add_rows(body: DeviceBody, target: Buffer, dy: Value, indices: Value, axis: int, shape: tuple[int, ...]) -> None:
    """Emit the addition of entries along an axis to those that indices name. Many indices are sorted; of few, the first
    of each chain adds up all of it."""
    if indices.type.size >= sorting.SORTED_FROM:
        sorting.add_sorted_rows(body, target, dy, indices, axis, shape)
        return
    emit, dtype = body.emit, dy.type.dtype
    outer, inner, places = shape[:axis], shape[axis + 1 :], indices.type.dims
    count, run = prod(places), prod(inner)
    row, after, first = _chains(body, indices, shape[axis])
    lines = ceil_div(run, THREADS)
    with emit.launch(prod(outer) * count * lines, THREADS) as (block, thread):
        line = emit.bind(block // lines if lines > 1 else block, "line")
        column = emit.bind((block % lines) * THREADS + thread if lines > 1 else thread, "column")
        lead = bind_index(body, unravel(line // count if prod(outer) > 1 else zero(), outer))
        n = emit.bind(line % count, "n")
        with emit.when(tirx.all(column < run, emit.load(first, n) > 0)):
            tail = bind_index(body, unravel(column, inner))
            total, place = emit.alloc(1, dtype, "total"), emit.alloc(1, "i32", "place")
            emit.store(total, literal(0, dtype), zero())
            emit.store(place, n, zero())
            with emit.repeat(emit.load(place, zero()) < count), body.point():
                at = bind_index(body, unravel(emit.load(place, zero()), places))
                emit.store(total, emit.load(total, zero()) + body.at(dy, (*lead, *at, *tail)), zero())
                emit.store(place, emit.load(after, emit.load(place, zero())), zero())
            position = emit.bind(linear((*lead, emit.load(row, n), *tail), shape), "p")
            emit.store(target, emit.load(target, position) + emit.load(total, zero()), position)


# ---------------------------------------------------------------------------------------- along an axis


def emit_cumsum(body: DeviceBody, op: Op) -> None:
    """Emit running sums: a thread per row goes along it. Limit: along the last dimension neighbouring threads read far
    apart."""
    x, y = op.ins[0], op.outs[0]
    a, axis, dims, dtype = complete_attrs(op), axis_of(op, x), x.type.dims, x.type.dtype
    outer, inner, size = dims[:axis], dims[axis + 1 :], dims[axis]
    emit = body.emit

    def row(index: Index) -> None:
        lead, tail = index[: len(outer)], index[len(outer) :]
        total = emit.alloc(1, dtype, "total")
        emit.store(total, literal(0, dtype), zero())
        with emit.loop(size) as c, body.point():
            place = (*lead, size - 1 - c if a["reverse"] else c, *tail)
            before = emit.bind(emit.load(total, zero()))
            after = emit.bind(before + body.at(x, place))
            emit.store(total, after, zero())
            body.finish({y: (before if a["exclusive"] else after, place)})

    emit_nest(body, outer + inner, len(outer + inner), row)


def emit_topk(body: DeviceBody, op: Op) -> None:
    """Emit the k largest: a thread per element counts how many of its row come before it, which gives its position.
    Limit: that is every two elements of a row."""
    x, (values, indices) = op.ins[0], op.outs
    a, axis, dims = complete_attrs(op), axis_of(op, x), x.type.dims
    count, largest = a["k"], bool(a["largest"])
    emit = body.emit

    def element(index: Index) -> None:
        coordinate, key = index[axis], select.order_key(body, body.at(x, index), largest)
        rank = emit.alloc(1, "i32", "rank")
        emit.store(rank, literal(0, "i32"), zero())
        key = emit.bind(key)
        with emit.loop(dims[axis]) as c, body.point():
            other = emit.bind(select.order_key(body, body.at(x, (*index[:axis], c, *index[axis + 1 :])), largest))
            before = tirx.Or(other > key, tirx.And(tirx.EQ(other, key), c < coordinate))
            emit.store(
                rank, emit.load(rank, zero()) + tirx.Select(before, literal(1, "i32"), literal(0, "i32")), zero()
            )
        place = emit.bind(emit.load(rank, zero()), "place")
        with emit.when(place < count), body.point():
            target = (*index[:axis], place, *index[axis + 1 :])
            body.finish({values: (body.at(x, index), target), indices: (cast(coordinate, "i64"), target)})

    emit_nest(body, dims, len(dims), element)


# ---------------------------------------------------------------------------------------- windows


def emit_max_pool_grad(body: DeviceBody, op: Op) -> None:
    """Emit the gradient of a maximum element by element: for every window it lies in, whether it is the first that
    equals the maximum. Nothing is scattered."""
    x, y, dy = op.ins
    dx = op.outs[0]
    attrs = complete_attrs(op)
    kernel, dtype, sizes, outs = ints(attrs["window"]), x.type.dtype, x.type.dims[2:], y.type.dims[2:]
    window = window_of(attrs, kernel)
    emit = body.emit

    def hits(lead: Index, out: Index, tap: Index) -> Expr:
        """Return whether a tap of a window lies inside and holds its maximum."""
        place, inside = windows.inside_of(windows.window_positions(window, out, tap), sizes)
        value, top = body.at(x, (*lead, *place)), body.at(y, (*lead, *out))
        same = tirx.Or(tirx.EQ(value, top), tirx.isnan(value)) if dtype in FLOATS else tirx.EQ(value, top)
        return emit.bind(tirx.all(*inside, same))

    def point(index: Index) -> None:
        with body.point():
            total = emit.alloc(1, dtype, "total")
            emit.store(total, literal(0, dtype), zero())
            with ExitStack() as stack:
                tap = tuple(stack.enter_context(emit.loop(k, name="t")) for k in kernel)
                stack.enter_context(body.point())
                out, conditions = windows.windows_of(window, index[2:], tap, outs)
                out = bind_index(body, out)
                reached = emit.bind(tirx.all(*conditions, hits(index[:2], out, tap)))
                stack.enter_context(emit.when(reached))
                stack.enter_context(body.point())
                earlier = emit.alloc(1, "i32", "earlier")
                emit.store(earlier, literal(0, "i32"), zero())
                with emit.loop(prod(kernel), name="s") as s, body.point():
                    before = tirx.all(s < linear(tap, kernel), hits(index[:2], out, unravel(s, kernel)))
                    emit.store(earlier, tirx.Select(before, literal(1, "i32"), emit.load(earlier, zero())), zero())
                share = tirx.Select(emit.load(earlier, zero()) > 0, literal(0, dtype), body.at(dy, (*index[:2], *out)))
                emit.store(total, emit.load(total, zero()) + share, zero())
            body.finish({dx: (emit.bind(emit.load(total, zero())), index)})

    emit_nest(body, dx.type.dims, dx.type.rank - 1, point)


# ---------------------------------------------------------------------------------------- the loss


def emit_cross_entropy(body: DeviceBody, op: Op) -> None:
    """Emit the loss: a launch over rows, which leaves one loss per row, and one that adds these up."""
    logits, labels = op.ins
    loss, lse_out = op.outs
    dtype, shape = logits.type.dtype, logits.type.dims
    emit, count = body.emit, prod(shape[:-1])
    losses = emit.workspace(max(count, 1), dtype, "losses")
    lines = rows.rows_of(body, shape, len(shape) - 1, len(shape), [logits])

    def one_row() -> None:
        top, total = lines.top_and_total(dtype, lambda c: body.at(logits, lines.index(c)))
        lse = emit.bind(body.functions.log(total) + top, "lse")
        body.store_apart(lse_out, lse, lines.row)
        with body.one_thread():
            label = emit.bind(table_row(body.at(labels, lines.row), shape[-1]), "label")
            emit.store(losses, lse - body.at(logits, (*lines.row, label)), linear(lines.row, shape[:-1]))

    lines.each(one_row)

    def result(_: Expr, totals: Sequence[Expr]) -> None:
        body.finish({loss: (totals[0] * literal(1 / max(count, 1), dtype), ())})

    reduce_lines(body, 1, count, False, dtype, [(0, add)], lambda _, r: [emit.load(losses, r)], result)


# ---------------------------------------------------------------------------------------- the table

# Every other operation has the generator for CPUs, with the loops of DeviceLoops.
MAIN: dict[str, Callable[[DeviceBody, Op], None]] = {
    **kernels.MAIN,
    "attention": emit_attention,
    "attention_grad": emit_attention_grad,
    "matmul_q": quantised.emit_matmul_q,
    "matmul_bytes": quantised.emit_matmul_bytes,
    "conv_bytes": quantised.emit_conv_bytes,
    "conv": windows.emit_conv,
    "conv_grad_input": windows.emit_conv_grad_input,
    "conv_grad_weight": windows.emit_conv_grad_weight,
    "max_pool_grad": emit_max_pool_grad,
    "avg_pool_grad": windows.emit_avg_pool_grad,
    "cross_entropy": emit_cross_entropy,
    "gather_grad": emit_gather_grad,
    "scatter": emit_scatter,
    "cumsum": emit_cumsum,
    "topk": emit_topk,
    "put": caches.emit_put,
    "attend": caches.emit_attend,
    "pick": caches.emit_pick,
}


# Operations that have a kernel for GPUs.
KINDS = frozenset((*POINTWISE, *INDEXED, *MAIN))


def generate(group: Fusion, machine: TargetMachine) -> GeneratedKernel:
    """Generate the kernel of a group; NotOneKernel when it needs several."""
    if any(op.attrs.get("library") for op in group.ops):
        return _promised_call(group)
    body = _empty(group, machine)
    emit_group(body, dict.fromkeys(MAIN, _emit_main))
    return body.kernel()


def _promised_call(group: Fusion) -> GeneratedKernel:
    """Return the call of a library that an annotation promises. No kernel takes its place: it would be several times
    slower, without a word."""
    try:
        return library_call(group)
    except NotOneKernel as refusal:
        if len(group.ops) > 1:
            raise
        op = group.ops[0]
        raise UnsupportedModel(
            f"{op.kind} %{op.outs[0].name} is promised to {op.attrs['library']}, and cannot go there: {refusal}",
            where=op.loc,
            hint="`libraries` runs before `fuse`; `--cuda-libraries none` uses Penstock's own kernels",
        ) from refusal


def _emit_main(body: DeviceBody, op: Op) -> None:
    MAIN[op.kind](body, body.widened(op))


def generate_effect(group: Fusion, machine: TargetMachine) -> GeneratedKernel:
    """Generate the kernel of a state operation on its own."""
    body = _empty(group, machine)
    elementwise.emit_effect(body, group.ops[0])
    return body.kernel()


def _empty(group: Fusion, machine: TargetMachine) -> DeviceBody:
    body = DeviceBody(group, machine)
    body.loops = DeviceLoops()
    return body
