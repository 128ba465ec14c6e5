"""Elementwise groups: any chain of elementwise, layout and lookup operations over one loop nest.

In: a group whose operations all have an element rule. Out: loops over the largest result, vectorised along its last
dimension, or along as many trailing dimensions as all operands run through in step. In the second case the remainder is
at most one vector per such run. Limit: a transposition of the last dimension that is fused with other operations reads
lane by lane. Alone it goes through squares (turn.py).
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from penstock.backends.tvm.kernels.tools.body import EFFECTS, Body, NotOneKernel, parallel_if
from penstock.backends.tvm.kernels.tools.elements import Index, axis_of, bound_index, has_element_rule, zero
from penstock.backends.tvm.kernels.tools.emit import PARALLEL, Expr
from penstock.ir.graph import Op, Value

from .turn import emit_turn

# A block of a long vector loop: what one thread takes at a time.
_BLOCK = 64


def root_of(body: Body) -> Op:
    """Return the operation whose result the loops run over: the first of the largest."""
    root: Op | None = None
    for op in body.group.ops:
        if op.kind in EFFECTS:
            continue
        if not has_element_rule(op.kind):
            raise NotOneKernel(f"{op.kind} is not an elementwise operation")
        if root is None or op.outs[0].type.size > root.outs[0].type.size:
            root = op
    if root is None:
        raise NotOneKernel("nothing to compute")
    return root


def emit_elementwise(body: Body) -> None:
    only = body.group.ops[0]
    if len(body.group.ops) == 1 and only.kind == "transpose" and body.loops is None and emit_turn(body, only):
        return
    root = root_of(body)
    shape = root.outs[0].type.dims
    if body.loops is None:
        _read_numbers(body)
    emit_nest(body, shape, body.merged_from(shape, body.group.ops), lambda index: _point(body, root, index))


def emit_effect(body: Body, op: Op) -> None:
    """Emit a state operation on its own: add to a variable, overwrite it, or leave zeros in it."""
    value = (op.ins or op.outs)[0]
    dims = value.type.dims
    plain = body.is_stored(value)

    def point(index: Index) -> None:
        with body.point():
            body.finish({value: (body.at(value, index), index)})

    emit_nest(body, dims, 0 if plain else max(len(dims) - 1, 0), point)


def _read_numbers(body: Body) -> None:
    """Read operands of one element in front of all loops. In them LLVM does not see that no store changes these."""
    for op in body.group.ops:
        for value in op.ins:
            if not value.type.dims and value not in body.group.homes and body.is_stored(value):
                body.at(value, ())


def _point(body: Body, root: Op, index: Index) -> None:
    with body.point():
        body.finish({v: (body.at(v, index), index) for v in root.outs})


def emit_nest(body: Body, shape: tuple[int, ...], merged: int, point: Callable[[Index], None]) -> None:
    """Emit loops over `shape`; dimensions from `merged` on are one run, whose position is given as the coordinate of
    the last dimension of the run that is not 1: coordinates of dimensions of size 1 are never looked at."""
    if body.loops is not None:
        body.loops.nest(body, shape, merged, point)
        return
    outer, run = shape[:merged], prod(shape[merged:])
    if run == 0 or prod(outer) == 0:
        return
    total = prod(outer) * run
    with body.stream():
        _nest(body, shape, merged, point, outer, run, total)


def _nest(
    body: Body,
    shape: tuple[int, ...],
    merged: int,
    point: Callable[[Index], None],
    outer: tuple[int, ...],
    run: int,
    total: int,
) -> None:
    emit, lanes = body.emit, body.lanes

    def index_of(lead: tuple[Expr, ...], position: Expr) -> Index:
        return (*lead, *run_index(shape[merged:], position))

    if prod(outer) == 1:
        block = _BLOCK * lanes
        lead = (zero(),) * merged
        blocks = run // block if total >= body.machine.serial_below else 0
        if blocks:
            with emit.loop(blocks, PARALLEL) as o:
                for i, _ in emit.spans(block, lanes):
                    point(index_of(lead, o * block + i))
        done = blocks * block
        for i, _ in emit.spans(run - done, lanes):
            point(index_of(lead, i + done if done else i))
        return
    with emit.loop(prod(outer), parallel_if(body.machine, total)) as o:
        lead = bound_index(emit, o, outer)
        for i, _ in emit.spans(run, lanes):
            point(index_of(lead, i))


def run_index(run: tuple[int, ...], position: Expr) -> Index:
    """Return the index in a run of dimensions of its element at `position`."""
    at = max((i for i, n in enumerate(run) if n != 1), default=len(run) - 1)
    return tuple(position if i == at else zero() for i in range(len(run)))


def emit_concat(body: Body) -> None:
    """Emit a concatenation: every operand is copied to its place, in its own loops."""
    op = next(o for o in body.group.ops if o.kind == "concat")
    axis = axis_of(op, op.outs[0])
    start = 0
    for value in op.ins:
        _copy_part(body, op, value, axis, start)
        start += value.type.dims[axis]


def _copy_part(body: Body, op: Op, value: Value, axis: int, start: int) -> None:
    dims = value.type.dims
    # From the axis on, a part is one run, here and in the result.
    merged = axis if len(body.group.ops) == 1 and body.is_stored(value) else max(len(dims) - 1, 0)

    def point(index: Index) -> None:
        with body.point():
            place = (*index[:axis], index[axis] + start if start else index[axis], *index[axis + 1 :])
            body.finish({op.outs[0]: (body.at(value, index), place)})

    emit_nest(body, dims, merged, point)
