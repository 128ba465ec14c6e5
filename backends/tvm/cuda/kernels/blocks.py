"""Blocks of threads, and the panels of products that they hold in shared memory.

In: the emitter's body, indices, the accessor of an operand. Out: names for indices, a guard around statements, the
loads of a panel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from tvm import tirx

from penstock.backends.tvm.kernels.tools.body import Body
from penstock.backends.tvm.kernels.tools.elements import Index
from penstock.backends.tvm.kernels.tools.emit import Buffer, Expr, dtype_name

from .body import DeviceBody

THREADS = 256
# Blocks that fill a large device.
FULL = 512
# Steps along k of a panel that threads add up by themselves.
PANEL = 16


def bind_index(body: Body, index: Index) -> Index:
    """Return the index with every coordinate computed once."""
    return tuple(i if isinstance(i, tirx.IntImm) else body.emit.bind(i, "o") for i in index)


@contextmanager
def guarded(body: Body, conditions: Sequence[Expr]) -> Iterator[None]:
    """Open a block where all conditions hold, with values of its own."""
    with ExitStack() as stack:
        if conditions:
            stack.enter_context(body.emit.when(tirx.all(*conditions)))
        stack.enter_context(body.point())
        yield


@dataclass(frozen=True)
class Panel:
    """Shared memory [depth, line] for a part of an operand, `tile` wide from `origin` on; `extent` and `k_extent` are
    the operand's sizes."""

    buffer: Buffer
    extent: int
    k_extent: int
    origin: Expr
    tile: int
    line: int
    depth: int
    along_k: bool
    access: Callable[[Expr, Expr], Expr]


def load_panel(body: DeviceBody, panel: Panel, start: Expr, thread: Expr) -> None:
    """Fill a panel from step `start` on, zeros outside the operand. Neighbouring threads read neighbours in memory."""
    emit, tile, depth = body.emit, panel.tile, panel.depth
    with emit.loop(depth * tile // THREADS) as part, body.point():
        number = emit.bind(part * THREADS + thread, "e")
        k, i = (number % depth, number // depth) if panel.along_k else (number // tile, number % tile)
        k, i = emit.bind(k, "k"), emit.bind(i, "i")
        conditions, at_i, at_k = [], emit.bind(panel.origin + i, "at"), emit.bind(start + k, "k")
        if panel.extent % tile:
            conditions.append(at_i < panel.extent)
            at_i = emit.bind(tirx.min(at_i, panel.extent - 1), "at")
        if panel.k_extent % depth:
            conditions.append(at_k < panel.k_extent)
            at_k = emit.bind(tirx.min(at_k, max(panel.k_extent - 1, 0)), "k")
        value = panel.access(at_i, at_k)
        if conditions:
            value = tirx.Select(tirx.all(*conditions), value, tirx.const(0, dtype_name(value)))
        emit.store(panel.buffer, value, k * panel.line + i)
