"""Stored transpositions, by squares that are transposed in registers.

In: a group that is one transpose of a stored value, and moves its last dimension. Out: loops over squares, whose rows
along the last dimension of the operand become rows along the last one of the result. The remainder at an end is done by
a square that overlaps the one before.

The loops visit squares along the rows of the result, in strips of four beside each other. So whole cache lines of both
are used while they are near. The next squares are prefetched, because the operand is read across its pages, where the
processor does not look ahead.

Limit: where a dimension has fewer than four elements, and for bools, `emit_turn` leaves the work to the loops of
elementwise.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from tvm import tirx

from penstock.backends.tvm.kernels.tools.body import Body, parallel_if
from penstock.backends.tvm.kernels.tools.elements import unravel, zero
from penstock.backends.tvm.kernels.tools.emit import Expr
from penstock.backends.tvm.kernels.tools.transpose import turn_rows
from penstock.ir.graph import Op
from penstock.ir.ops import ints
from penstock.ir.types import numpy_dtype

_LEAST, _MOST = 4, 16
# Squares beside each other in a strip, and how many squares ahead are prefetched.
_STRIP, _AHEAD = 4, 1
_FLOAT_BYTES = 4


@dataclass(frozen=True)
class Turn:
    """A transposition with dimensions that stay together taken as one. `down` is the dimension of the operand that
    comes last in the result, `across` its own last one; the rest are outer dimensions, as (size, step in the operand,
    step in the result)."""

    outer: tuple[tuple[int, int, int], ...]
    down: tuple[int, int]
    across: tuple[int, int]
    size: int


def merged(dims: Sequence[int], perm: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the same transposition without dimensions of size 1, and with those that stay neighbours taken as one."""
    order = [p for p in perm if dims[p] != 1]
    runs: list[list[int]] = []
    for p in order:
        if runs and all(dims[k] == 1 for k in range(runs[-1][-1] + 1, p)) and p > runs[-1][-1]:
            runs[-1].append(p)
        else:
            runs.append([p])
    by_place = sorted(range(len(runs)), key=lambda r: runs[r][0])
    return tuple(prod(dims[p] for p in runs[r]) for r in by_place), tuple(by_place.index(r) for r in range(len(runs)))


def _steps(dims: Sequence[int]) -> list[int]:
    return [prod(dims[i + 1 :]) for i in range(len(dims))]


def turn_of(op: Op) -> Turn | None:
    """Describe a transpose by squares; None if its last dimension stays, or nothing moves."""
    dims, perm = merged(op.ins[0].type.dims, ints(op.attrs["perm"]))
    if len(dims) < 2 or perm[-1] == len(dims) - 1:
        return None
    read, written = _steps(dims), _steps([dims[p] for p in perm])
    last, down = len(dims) - 1, perm[-1]
    outer = tuple((dims[p], read[p], written[i]) for i, p in enumerate(perm) if p not in (last, down))
    return Turn(outer, (dims[down], read[down]), (dims[last], written[perm.index(last)]), prod(dims))


def square(body: Body, op: Op, turn: Turn) -> int:
    """Return the rows of a square: as many as a vector holds, at most 16, or fewer where a dimension is shorter."""
    dtype = op.ins[0].type.dtype
    if dtype == "bool":
        return 0
    lanes = min(body.lanes * _FLOAT_BYTES // numpy_dtype(dtype).itemsize, _MOST)
    while lanes > min(turn.down[0], turn.across[0]):
        lanes //= 2
    return lanes if lanes >= _LEAST else 0


def emit_turn(body: Body, op: Op) -> bool:
    """Emit a transpose by squares; return False if it cannot be done so."""
    turn = turn_of(op)
    if turn is None or not body.is_stored(op.ins[0]) or not (lanes := square(body, op, turn)):
        return False
    emit = body.emit
    source, _ = body.memory((op.ins[0], zero()))
    target = body.result(op.outs[0])
    (height, step), (width, jump) = turn.down, turn.across
    squares = -(-width // lanes)
    strips = -(-squares // _STRIP)
    sizes = tuple(n for n, _, _ in turn.outer)

    def one(read: Expr, written: Expr) -> None:
        for k in range(lanes):
            emit.prefetch(source, read + (k + _AHEAD * lanes) * step, written=False)
        rows = [tirx.BufferLoad(source, [tirx.Ramp(read + k * step, 1, lanes)]) for k in range(lanes)]
        for k, column in enumerate(turn_rows(emit, str(source.dtype), lanes, lanes, rows)):
            emit.add(tirx.BufferStore(target, column, [tirx.Ramp(written + k * jump, 1, lanes)]))

    with emit.loop(prod(sizes) * strips, parallel_if(body.machine, turn.size), "o") as at:
        place = unravel(at, (*sizes, strips))
        read0 = sum((i * r for i, (_, r, _) in zip(place, turn.outer, strict=False)), start=zero())
        written0 = sum((i * w for i, (_, _, w) in zip(place, turn.outer, strict=False)), start=zero())
        beside = _STRIP if squares % _STRIP == 0 else emit.bind(tirx.min(squares - place[-1] * _STRIP, _STRIP))
        with emit.loop(-(-height // lanes), name="d") as down, emit.loop(beside, name="a") as part:
            i = emit.bind(tirx.min(down * lanes, height - lanes))
            j = emit.bind(tirx.min((place[-1] * _STRIP + part) * lanes, width - lanes))
            one(emit.bind(read0 + i * step + j), emit.bind(written0 + j * jump + i))
    return True
