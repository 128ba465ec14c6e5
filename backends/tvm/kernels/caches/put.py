"""Rows stored in a cache, in place.

In: rows, and the flat place of each. Out: a loop over rows, shared by threads; a row is copied in vectors. Places
outside of the cache are skipped, as -1 is: nothing is ever stored where there is no memory. Distinct places need no
order.
"""

from __future__ import annotations

from tvm import tirx

from penstock.backends.tvm.kernels.tools.body import Body, NotOneKernel, parallel_if
from penstock.backends.tvm.kernels.tools.emit import SERIAL
from penstock.ir.graph import Op, slot_of
from penstock.ir.ops import BLOCK


def emit_put(body: Body, op: Op) -> None:
    """Emit the loop over rows."""
    if len(body.group.ops) > 1:
        raise NotOneKernel("rows are stored where places say, nothing can follow in one loop")
    (rows, places), cache = op.ins, op.outs[0]
    slot, emit = slot_of(op), body.emit
    assert slot is not None
    target = body.slot(slot, cache)
    count, heads, size = rows.type.dims
    if not rows.type.size or not cache.type.size:
        return
    with emit.loop(count, parallel_if(body.machine, rows.type.size), "t") as t, body.point():
        place = emit.bind(body.at(places, (t,)), "place")
        inside = tirx.And(place >= 0, place < cache.type.dims[0] * BLOCK)
        with emit.when(inside), emit.loop(heads, SERIAL, "h") as h, body.point():
            for d, _ in emit.spans(size, body.lanes):
                with body.point():
                    emit.store(target, body.at(rows, (t, h, d)), (place * heads + h) * size + d)
