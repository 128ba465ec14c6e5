"""The combination of what the threads of a block have: sums, largest elements and the like.

In: a number of each thread, in a register. Out: the results, in memory of the block or in registers.

Where all threads of a warp have parts of one result, they exchange registers: after five steps each of them has what
the warp has. What the warps have goes through shared memory, behind one barrier. Else the numbers go to shared memory,
and each step halves them. Numbers are combined in an order that depends on the number of threads only.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx

from penstock.backends.tvm.kernels.rows.sums import Combine
from penstock.backends.tvm.kernels.tools.elements import zero
from penstock.backends.tvm.kernels.tools.emit import Buffer, Expr

from .body import DeviceBody
from .threads import WARP

Steps = Sequence[tuple[float, Combine]]

# Types of registers that threads of a warp exchange.
_EXCHANGED = ("float32", "int32")


def fold_threads(
    body: DeviceBody, totals: Sequence[Buffer], dtype: str, steps: Steps, thread: Expr, width: int, groups: int
) -> list[Buffer]:
    """Combine the values of the threads of a block: afterwards the first `width` places of the buffers have the
    results. Warps of one line exchange registers, and only what they have goes to shared memory."""
    emit = body.emit
    if width == 1 and groups >= WARP and str(totals[0].dtype) in _EXCHANGED:
        return _fold_warps(body, totals, dtype, steps, thread, groups)
    shared = [emit.shared(width * groups, dtype, "fold") for _ in totals]
    for buffer, total in zip(shared, totals, strict=True):
        emit.store(buffer, emit.load(total, zero()), thread)
    emit.barrier()
    half = groups
    while half > 1:
        half //= 2
        with emit.when(thread < half * width):
            for buffer, (_, combine) in zip(shared, steps, strict=True):
                emit.store(buffer, combine(emit.load(buffer, thread), emit.load(buffer, thread + half * width)), thread)
        emit.barrier()
    return shared


def _fold_warps(
    body: DeviceBody, totals: Sequence[Buffer], dtype: str, steps: Steps, thread: Expr, groups: int
) -> list[Buffer]:
    """Combine the values of whole warps of threads; every thread has the results, in registers."""
    emit = body.emit
    others = [emit.alloc(1, dtype, "other") for _ in totals]

    def fold_warp(size: int) -> None:
        while size > 1:
            size //= 2
            for total, other in zip(totals, others, strict=True):
                emit.exchange(other, total, size)
            for total, other, (_, combine) in zip(totals, others, steps, strict=True):
                emit.store(total, combine(emit.load(total, zero()), emit.load(other, zero())), zero())

    fold_warp(WARP)
    warps = groups // WARP
    if warps == 1:
        return list(totals)
    shared = [emit.shared(warps, dtype, "fold") for _ in totals]
    with emit.when(tirx.EQ(thread % WARP, 0)):
        for buffer, total in zip(shared, totals, strict=True):
            emit.store(buffer, emit.load(total, zero()), thread // WARP)
    emit.barrier()
    for buffer, total in zip(shared, totals, strict=True):
        emit.store(total, emit.load(buffer, thread % warps), zero())
    fold_warp(warps)
    return list(totals)
