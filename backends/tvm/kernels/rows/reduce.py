"""Reductions: sum, mean, max, mean squared difference, and the weight gradients of a layer norm; several over the same
axes in one sweep.

In: any set of axes. Out: columns if the last dimension is kept, rows if it is reduced. For columns, blocks of rows are
combined in registers and then added to one row of totals, which stays in the first cache. Where the totals fit, all
rows are combined in registers. For rows, there are some vectors of partial results, folded at the end. Long sums over
few results are cut into parts, which threads share; their number depends on sizes alone, so results do not depend on
the number of threads. `Body.finish` runs on the finished elements, so a gradient is added straight to its variable.

Reductions of one group share the sweep. Elementwise operations that make their operands are computed on the way, and
stored if the group returns them. Sums are taken in many interleaved parts, which also keeps rounding errors small.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from math import prod

from tvm import tirx

from penstock.backends.tvm.kernels.tools.body import EFFECTS, Body, NotOneKernel, parallel_if
from penstock.backends.tvm.kernels.tools.elements import POINTWISE, Index, zero
from penstock.backends.tvm.kernels.tools.emit import SERIAL, VECTOR, Expr, literal
from penstock.backends.tvm.kernels.tools.sweep import SweepOf
from penstock.backends.tvm.kernels.tools.transpose import pieces
from penstock.ir.graph import Op, Value

from .sums import combined, cover, fold, parts_of, reducer_of

# Accumulators that fit into registers, rows that are combined before they are added to a row of totals, and the longest
# such row.
_COLUMN_VECTORS = 8
_BLOCK = 8
_WIDEST = 4096
# Independent accumulators of one sum.
_STREAMS = 4


# A sweep of one kernel's body.
Sweep = SweepOf[Body]


def run_sweep(sweep: Sweep) -> None:
    body = sweep.body
    if body.loops is not None:
        body.loops.reduce(sweep)
        return
    wide = [d for d in range(len(sweep.shape)) if sweep.shape[d] > 1]
    if sweep.kept and wide and wide[-1] not in sweep.axes:
        _columns(sweep)
    else:
        _rows(sweep)


# ---------------------------------------------------------------------------------------- columns


def _columns(sweep: Sweep) -> None:
    body, emit, lanes = sweep.body, sweep.body.emit, sweep.body.lanes
    run = sweep.run_of(sweep.kept, sweep.axes)
    lead = [d for d in sweep.kept if d not in run]
    length, rows, outer = sweep.size(run), sweep.size(sweep.axes), sweep.size(lead)
    parallel = parallel_if(body.machine, prod(sweep.shape))
    vectors = _COLUMN_VECTORS // len(sweep.steps)
    blocks = rows >= 2 * _BLOCK and length > vectors * lanes
    with emit.loop(outer, parallel if outer > 1 else SERIAL, "o") as o, body.point():
        index = sweep.bound(o, lead)
        if blocks:
            widest = _WIDEST // len(sweep.steps)
            for start in range(0, length, widest):
                _row_of_totals(sweep, lead, index, run, start, min(widest, length - start), outer == 1)
            return
        chunk = min(vectors, length // lanes) * lanes
        chunks = length // chunk if chunk else 0
        if chunks:
            with emit.loop(chunks, parallel if outer == 1 else SERIAL, "c") as c, body.point():
                _in_registers(sweep, lead, index, run, c * chunk, chunk)
        done = chunks * chunk
        if done < length:
            with body.point():
                _in_registers(sweep, lead, index, run, literal(done, "i32"), length - done)


def _in_registers(sweep: Sweep, lead: Sequence[int], at: Index, run: Sequence[int], base: Expr, width: int) -> None:
    """Reduce some columns in registers, while the loops run through all rows."""
    body, emit, steps = sweep.body, sweep.body.emit, sweep.steps
    vectors = [(offset, size) for offset, size in cover(width, body.lanes)]
    accs = [[emit.alloc(size, sweep.dtype, "acc") for _, size in vectors] for _ in steps]

    def every(action: Callable[[int, Expr, Expr], None]) -> None:
        for v, (offset, size) in enumerate(vectors):
            with emit.loop(size, VECTOR if size > 1 else SERIAL, "l") as lane, body.point():
                action(v, lane, base + (lane + offset))

    def clear(v: int, lane: Expr, _: Expr) -> None:
        for acc, (start, _combine) in zip(accs, steps, strict=True):
            emit.store(acc[v], literal(start, sweep.dtype), lane)

    every(clear)
    with ExitStack() as stack:
        inner = tuple(stack.enter_context(emit.loop(sweep.shape[a], SERIAL, "r")) for a in sweep.axes)
        stack.enter_context(body.point())

        def step(v: int, lane: Expr, column: Expr) -> None:
            index = sweep.place((lead, at), (sweep.axes, inner), (run, sweep.along(run, column)))
            for acc, (_, combine), x in zip(accs, steps, sweep.element(index), strict=True):
                emit.store(acc[v], combine(tirx.BufferLoad(acc[v], [lane]), x), lane)

        every(step)

    def finish(v: int, lane: Expr, column: Expr) -> None:
        totals = [tirx.BufferLoad(acc[v], [lane]) for acc in accs]
        sweep.result(sweep.kept_index((lead, at), (run, sweep.along(run, column))), totals)

    every(finish)


def _row_of_totals(
    sweep: Sweep, lead: Sequence[int], at: Index, run: Sequence[int], start: int, width: int, shared: bool
) -> None:
    """Reduce many columns into a row of totals in memory, to which blocks of rows are added."""
    body, emit, steps = sweep.body, sweep.body.emit, sweep.steps
    rows = sweep.size(sweep.axes)
    parts = parts_of(rows, prod(sweep.shape)) if shared else 1
    each = rows // parts
    totals = emit.alloc(parts * len(steps) * width, sweep.dtype, "totals")

    def add_rows(first: Expr, count: int, part: Expr, fresh: bool) -> None:
        places = [sweep.bound(first + k, sweep.axes) for k in range(count)]
        for c, _ in pieces(emit, width, body.lanes):
            with body.point():
                operands = []
                for place in places:
                    index = sweep.place(
                        (lead, at), (sweep.axes, place), (run, sweep.along(run, c + start if start else c))
                    )
                    operands.append(list(sweep.element(index)))
                for s, (_, combine) in enumerate(steps):
                    total = combined(body, combine, [x[s] for x in operands])
                    position = (part * len(steps) + s) * width + c
                    if not fresh:
                        total = combine(tirx.BufferLoad(totals, [position]), total)
                    emit.store(totals, total, position)

    with (
        emit.loop(parts, parallel_if(body.machine, prod(sweep.shape)) if parts > 1 else SERIAL, "part") as p,
        body.point(),
    ):
        part = p if isinstance(p, tirx.IntImm) else emit.bind(p, "p")
        first = part * each
        blocks, left = divmod(each, _BLOCK)
        with body.point():
            add_rows(first, _BLOCK, part, True)
        with emit.loop(blocks - 1, SERIAL, "b") as b, body.point():
            add_rows(first + (b + 1) * _BLOCK, _BLOCK, part, False)
        if left:
            with body.point():
                add_rows(first + blocks * _BLOCK, left, part, False)
    for c, _ in pieces(emit, width, body.lanes):
        with body.point():
            results = []
            for s, (_, combine) in enumerate(steps):
                results.append(
                    combined(
                        body,
                        combine,
                        [tirx.BufferLoad(totals, [(q * len(steps) + s) * width + c]) for q in range(parts)],
                    )
                )
            sweep.result(sweep.kept_index((lead, at), (run, sweep.along(run, c + start if start else c))), results)


# ---------------------------------------------------------------------------------------- rows


def _rows(sweep: Sweep) -> None:
    body, emit = sweep.body, sweep.body.emit
    axes, kept = sweep.axes, sweep.kept
    run = sweep.run_of(axes, kept)
    outside = [d for d in axes if d not in run]
    length, around, results, work = sweep.size(run), sweep.size(outside), sweep.size(kept), prod(sweep.shape)
    parallel = parallel_if(body.machine, work)
    if results == 1 and work:
        _in_parts(sweep, run, outside)
        return
    with emit.loop(results, parallel, "o") as o, body.point():
        row = sweep.bound(o, kept)
        totals = _one_row(sweep, (kept, row), outside, None, around, run, zero(), length)
        with body.point():
            sweep.result(row, totals)


def _in_parts(sweep: Sweep, run: Sequence[int], outside: Sequence[int]) -> None:
    """Reduce to one result, from parts that threads share: of the outer dimensions, or of the run if there are none."""
    body, emit, steps = sweep.body, sweep.body.emit, sweep.steps
    length, around, work = sweep.size(run), sweep.size(outside), prod(sweep.shape)
    cut = around if around > 1 else length
    # A part of a run shall be whole vectors.
    parts = parts_of(cut, work) if around > 1 or cut % body.lanes == 0 else 1
    if around == 1 and (cut // parts) % body.lanes:
        parts = 1
    kept = sweep.kept
    row = tuple(zero() for _ in kept)
    partials = emit.alloc(parts * len(steps), sweep.dtype, "parts")
    with emit.loop(parts, parallel_if(body.machine, work) if parts > 1 else SERIAL, "part") as p, body.point():
        first = p * (cut // parts)
        if around > 1:
            totals = _one_row(sweep, (kept, row), outside, first, around // parts, run, zero(), length)
        else:
            totals = _one_row(sweep, (kept, row), outside, None, 1, run, first, length // parts)
        for s, total in enumerate(totals):
            emit.store(partials, total, p * len(steps) + s)
    with body.point():
        values = []
        for s, (_, combine) in enumerate(steps):
            values.append(
                combined(
                    body,
                    combine,
                    [tirx.BufferLoad(partials, [literal(q * len(steps) + s, "i32")]) for q in range(parts)],
                )
            )
        sweep.result(row, values)


def _one_row(
    sweep: Sweep,
    lead: tuple[Sequence[int], Index],
    outside: Sequence[int],
    first: Expr | None,
    around: int,
    run: Sequence[int],
    start: Expr,
    length: int,
) -> list[Expr]:
    """Return the totals of one result: `around` positions of the outer reduced dimensions from `first` on, and a run
    behind each."""
    body, emit, steps, lanes = sweep.body, sweep.body.emit, sweep.steps, sweep.body.lanes
    whole = length // lanes
    streams = min(_STREAMS if len(steps) <= 2 else 2, whole)
    tails = [(whole * lanes + at, size) for at, size in cover(length - whole * lanes, lanes)] if length % lanes else []
    accs = [[emit.alloc(lanes, sweep.dtype, "acc") for _ in range(streams)] for _ in steps]
    ends = [[emit.alloc(size, sweep.dtype, "end") for _, size in tails] for _ in steps]
    for places, (begin, _) in zip([*accs, *ends], [*steps, *steps], strict=True):
        for i, place in enumerate(places):
            size = lanes if places in accs else tails[i][1]
            with emit.loop(size, VECTOR if size > 1 else SERIAL, "l") as lane:
                emit.store(place, literal(begin, sweep.dtype), lane)

    def take(places: Sequence[object], size: int, at: Callable[[Expr], Expr], outer: Index) -> None:
        with emit.loop(size, VECTOR if size > 1 else SERIAL, "l") as lane, body.point():
            index = sweep.place(lead, (outside, outer), (run, sweep.along(run, start + at(lane))))
            for place, (_, combine), x in zip(places, steps, sweep.element(index), strict=True):
                emit.store(place, combine(tirx.BufferLoad(place, [lane]), x), lane)

    with emit.loop(around, SERIAL, "r") as r, body.point(), body.stream():
        outer = sweep.bound(r if first is None else first + r, outside)
        turns = whole // streams if streams else 0
        if turns:
            with emit.loop(turns, SERIAL, "c") as c:
                for s in range(streams):
                    at = (c * streams + s) * lanes
                    take([acc[s] for acc in accs], lanes, lambda lane, at=at: at + lane, outer)  # type: ignore[misc]
        for s in range(whole - turns * streams):
            at = (turns * streams + s) * lanes
            take([acc[s] for acc in accs], lanes, lambda lane, at=at: lane + at, outer)  # type: ignore[misc]
        for i, (at, size) in enumerate(tails):
            take([end[i] for end in ends], size, lambda lane, at=at: lane + at, outer)  # type: ignore[misc]
    totals = []
    for acc, end, (begin, combine) in zip(accs, ends, steps, strict=True):
        values = [fold(emit, sweep.dtype, lanes, combine, acc)] if acc else []
        values += [fold(emit, sweep.dtype, size, combine, [place]) for place, (_, size) in zip(end, tails, strict=True)]
        totals.append(combined(body, combine, values) if values else literal(begin, sweep.dtype))
    return totals


# ---------------------------------------------------------------------------------------- groups


def emit_reductions(body: Body, ops: Sequence[Op]) -> None:
    """Emit reductions over the same axes, with the elementwise operations in front of them and behind."""
    reducers = [reducer_of(body, op) for op in ops]
    first = reducers[0]
    if any((r.shape, r.axes, r.dtype) != (first.shape, first.axes, first.dtype) for r in reducers):
        raise NotOneKernel("reductions over different axes")
    # By name: a device may compute in other element types than the group says.
    names = {v.name for op in ops for v in op.outs}
    mains = [op for op in body.group.ops if any(v.name in names for v in op.outs)]
    behind = body.behind(mains)
    before = [op for op in body.group.ops if op not in mains and op not in behind]
    if any(op.kind not in POINTWISE or op.outs[0].type.dims != first.shape for op in before):
        raise NotOneKernel("what is in front of a reduction is not elementwise")
    computed = [v for op in before for v in op.outs]
    if body.loops is not None and any(v in body.group.outs for v in computed):
        raise NotOneKernel("devices store nothing on the way")

    def element(index: Index) -> list[Expr]:
        operands = [x for r in reducers for x in r.operands(index)]
        values = [(v, body.at(v, index)) for v in computed]
        for v, expr in values:
            body.store_apart(v, expr, index)
        return operands

    def result(index: Index, totals: Sequence[Expr]) -> None:
        remaining = iter(totals)
        results: dict[Value, tuple[Expr, Index]] = {}
        for r in reducers:
            results |= r.results(index, [next(remaining) for _ in r.steps])
        body.finish(results)

    steps = [step for r in reducers for step in r.steps]
    merged = max(body.merged_from(first.shape, before, ops), 0 if _same_places(behind) else len(first.shape) - 1)
    run_sweep(Sweep(body, first.shape, first.axes, first.dtype, steps, element, result, merged))


def _same_places(behind: Iterable[Op]) -> bool:
    """Return whether the epilogue of a reduction reads all operands at the place of the result."""
    for op in behind:
        if op.kind not in EFFECTS and op.kind not in POINTWISE:
            return False
        shape = (op.outs or op.ins)[0].type.dims
        if any(prod(v.type.dims) != 1 and v.type.dims != shape for v in op.ins):
            return False
    return True


def emit_reduction(body: Body, op: Op) -> None:
    emit_reductions(body, [op])
