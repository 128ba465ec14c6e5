"""Own forms of attention and its gradient, where ranks share the positions of a sequence.

Each rank has its own queries, and keys and values go round (ring.py). Attention gives, for each row, the largest score
and the sum of e^(score - largest) beside the result. So the results of two sets of keys make that of both:

    largest = max(a.largest, b.largest)         weight of each = its sum * e^(its largest - largest)
    result  = (a.result * a.weight + b.result * b.weight) / (a.weight + b.weight)

Keys that count nothing have -inf for their largest score.

The gradient needs largest and sum of all keys, which the forward has kept. With these, what keys of one rank add is the
same operation on them. Gradients of keys and values go round as well: they begin at the rank behind their own, gain at
each rank, and come home in the last step. Queries that do not look at keys have inf for their largest score there, so
that every share is zero.

A shift is written before the computation that it is to hide behind. Numbers of 16 bits are added up in f32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.ir.graph import Value
from penstock.passes.sharding.building import LocalWriter
from penstock.passes.sharding.calls import Form, LocalCall, narrowed, widened

from .ring import KeyMeeting, PositionRing


@dataclass(frozen=True)
class _Rows:
    """The result of attention to some keys: results times the sum of shares, and the statistics of each row."""

    summed: Value
    largest: Value
    total: Value


def _written(form: Form) -> Form:
    """Return a form whose values are called after the result of its operation."""

    def write(b: LocalWriter, call: LocalCall) -> Sequence[Value]:
        with b.named_after(call.op.outs[0].name):
            return form(b, call)

    return write


def _attention(b: LocalWriter, call: LocalCall) -> list[Value]:
    ring = PositionRing(b, call, keys=1)
    q, k, v = call.ins[:3]
    rows: _Rows | None = None
    for step in range(ring.parts):
        following = (ring.passed(k), ring.passed(v)) if step + 1 < ring.parts else (k, v)
        met = [_met(b, ring, step, meeting, (q, k, v)) for meeting in ring.meetings(step)]
        rows = _merged(b, met if rows is None else [rows, *met])
        k, v = following
    assert rows is not None
    y = b.emit("div", rows.summed, _column(b, rows.total))
    results = (y, rows.largest, rows.total)
    return [_as(b, narrowed(b, x, o.type.dtype), o.type.local(b.sizes).dims) for x, o in _with(results, call)]


def _met(
    b: LocalWriter, ring: PositionRing, step: int, meeting: KeyMeeting, operands: tuple[Value, Value, Value]
) -> _Rows:
    """Write the attention of one meeting."""
    q, k, v = operands
    ins = (ring.side_of(q, meeting.queries), *(ring.side_of(x, meeting.keys) for x in (k, v)))
    masks = ring.masks(range(3, len(ring.call.ins)), step, meeting)
    y, largest, total = b.emit_all("attention", *ins, *masks, **_attrs(ring, meeting), count=3)
    if meeting.counts is not None:
        largest = b.emit("where", meeting.counts, largest, b.number(float("-inf"), largest.type.dtype))
    summed = b.emit("mul", widened(b, y), _column(b, total))
    return _Rows(
        ring.placed(summed, meeting.queries, 0.0),
        ring.placed(largest, meeting.queries, float("-inf")),
        ring.placed(total, meeting.queries, 0.0),
    )


def _merged(b: LocalWriter, parts: Sequence[_Rows]) -> _Rows:
    """Return what several sets of keys make together."""
    if len(parts) == 1:
        return parts[0]
    largest = parts[0].largest
    for rows in parts[1:]:
        largest = b.emit("maximum", largest, rows.largest)
    factors = [b.emit("exp", b.emit("sub", rows.largest, largest)) for rows in parts]
    summed = [b.emit("mul", rows.summed, _column(b, factor)) for rows, factor in zip(parts, factors, strict=True)]
    totals = [b.emit("mul", rows.total, factor) for rows, factor in zip(parts, factors, strict=True)]
    return _Rows(_added(b, summed), largest, _added(b, totals))


def _added(b: LocalWriter, terms: Sequence[Value]) -> Value:
    total = terms[0]
    for term in terms[1:]:
        total = b.emit("add", total, term)
    return total


def _column(b: LocalWriter, statistic: Value) -> Value:
    """Return a number per row as a column beside the rows."""
    return b.emit("reshape", statistic, shape=(*statistic.type.dims, 1))


def _as(b: LocalWriter, x: Value, shape: tuple[int, ...]) -> Value:
    return x if x.type.dims == shape else b.emit("reshape", x, shape=shape)


def _with(results: Sequence[Value], call: LocalCall) -> list[tuple[Value, Value]]:
    return list(zip(results, call.op.outs, strict=True))


def _attrs(ring: PositionRing, meeting: KeyMeeting) -> dict[str, float | bool]:
    return {"scale": float(str(ring.call.attrs["scale"])), "causal": meeting.causal}


# ------------------------------------------------------------------------------------------------ the gradient


def _attention_grad(b: LocalWriter, call: LocalCall) -> list[Value]:
    ring = PositionRing(b, call, keys=2)
    k, v = call.ins[2:4]
    of_own_keys: list[Value] = []
    travelling: list[Value] = []
    queries: Value | None = None
    for step in range(ring.parts):
        following = (ring.passed(k), ring.passed(v)) if step + 1 < ring.parts else (k, v)
        arriving = [ring.passed(x) for x in travelling]
        dq, *gradients = _gradients(b, ring, step, (k, v))
        queries = dq if queries is None else b.emit("add", queries, dq)
        if step == 0:
            of_own_keys = gradients
        else:
            travelling = [
                _added(b, [x, *a]) for x, *a in zip(gradients, *([arriving] if arriving else []), strict=True)
            ]
        k, v = following
    assert queries is not None
    home = (
        [b.emit("add", x, ring.passed(a)) for x, a in zip(of_own_keys, travelling, strict=True)]
        if travelling
        else of_own_keys
    )
    results = (queries, *home)
    return [_as(b, narrowed(b, x, o.type.dtype), o.type.local(b.sizes).dims) for x, o in _with(results, call)]


def _gradients(b: LocalWriter, ring: PositionRing, step: int, came: tuple[Value, Value]) -> list[Value]:
    """Return what the keys that came add to the gradients of queries, keys and values, in sides."""
    sums: list[list[Value]] = [[], [], []]
    for meeting in ring.meetings(step):
        dy, q, y, top, total = (ring.side_of(ring.call.ins[i], meeting.queries) for i in (0, 1, 4, 5, 6))
        k, v = (ring.side_of(x, meeting.keys) for x in came)
        if meeting.counts is not None:
            top = b.emit("where", meeting.counts, top, b.number(float("inf"), top.type.dtype))
        masks = ring.masks(range(7, len(ring.call.ins)), step, meeting)
        results = b.emit_all("attention_grad", dy, q, k, v, y, top, total, *masks, **_attrs(ring, meeting), count=3)
        sides = (meeting.queries, meeting.keys, meeting.keys)
        for terms, x, side in zip(sums, results, sides, strict=True):
            terms.append(ring.placed(widened(b, x), side, 0.0))
    return [_added(b, terms) for terms in sums]


RINGS: dict[str, Form] = {"attention": _written(_attention), "attention_grad": _written(_attention_grad)}
