"""Transposition of blocks in registers, and short vectors for remainders.

In: where the rows of a square block start in memory. Out: its columns, as vector expressions, by log2(lanes) rounds of
exchanging halves between pairs of rows; `pieces` covers an extent with vectors, and what is left with shorter ones,
down to single elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tvm import tirx

from .emit import SERIAL, TVM_DTYPES, VECTOR, Buffer, Emitter, Expr, load


def transpose_block(
    emit: Emitter, dtype: str, lanes: int, columns: int, source: Buffer, starts: Sequence[Expr]
) -> list[Expr]:
    """Return the first `columns` columns of a square block: `lanes` rows of `lanes` elements of `source`, which start
    at `starts`."""
    if str(source.dtype) != TVM_DTYPES[dtype]:
        source, starts = _widened(emit, dtype, lanes, source, starts)
    return turn_rows(
        emit,
        TVM_DTYPES[dtype],
        lanes,
        columns,
        [tirx.BufferLoad(source, [tirx.Ramp(start, 1, lanes)]) for start in starts],
    )


def turn_rows(emit: Emitter, name: str, lanes: int, columns: int, rows: Sequence[Expr]) -> list[Expr]:
    """Return the first `columns` columns of a square block given as vectors of one of TVM's types."""

    # Two arrays per round: one would not be below 1024 bytes, and one per row makes the compiler slow.
    half = max(lanes // 2, 1)

    def keep(values: Sequence[Expr]) -> list[Expr]:
        kept = []
        buffer: Buffer | None = None
        for i, value in enumerate(values):
            if buffer is None or i % half == 0:
                buffer = emit.scratch(half * lanes, name, "v")
            place = tirx.Ramp(i % half * lanes, 1, lanes)
            emit.add(tirx.BufferStore(buffer, value, [place]))
            kept.append(tirx.BufferLoad(buffer, [place]))
        return kept

    def pick(a: Expr, b: Expr, lanes_of: list[int]) -> Expr:
        indices: list[Any] = [tirx.IntImm("int32", k) for k in lanes_of]
        return tirx.Shuffle([a, b], indices)

    current = keep(rows)
    step = lanes // 2
    while step:
        exchanged = list(current)
        for i in range(lanes):
            if not i & step:
                a, b = current[i], current[i | step]
                exchanged[i] = pick(a, b, [j if not j & step else lanes + (j ^ step) for j in range(lanes)])
                exchanged[i | step] = pick(a, b, [j | step if not j & step else lanes + j for j in range(lanes)])
        current = keep(exchanged)
        step //= 2
    return current[:columns]


def _widened(
    emit: Emitter, dtype: str, lanes: int, source: Buffer, starts: Sequence[Expr]
) -> tuple[Buffer, list[Expr]]:
    """Copy rows of 16-bit floats to rows of the element type that is computed in."""
    copy = emit.alloc(len(starts) * lanes, dtype, "w")
    for row, start in enumerate(starts):
        with emit.loop(lanes, VECTOR, "l") as lane:
            emit.store(copy, load(source, start + lane), lane + row * lanes)
    return copy, [tirx.IntImm("int32", row * lanes) for row in range(len(starts))]


def separate_pairs(
    emit: Emitter, lanes: int, source: tuple[Buffer, Expr], targets: Sequence[tuple[Buffer, Expr]]
) -> None:
    """Store the elements of two neighbouring vectors at even places to the first target, those at odd places to the
    second."""
    buffer, start = source
    both = [tirx.BufferLoad(buffer, [tirx.Ramp(start + k * lanes, 1, lanes)]) for k in (0, 1)]
    for odd, (target, place) in enumerate(targets):
        indices: list[Any] = [tirx.IntImm("int32", 2 * k + odd) for k in range(lanes)]
        emit.add(tirx.BufferStore(target, tirx.Shuffle(both, indices), [tirx.Ramp(place, 1, lanes)]))


def pieces(emit: Emitter, extent: int, lanes: int) -> Iterator[tuple[Expr, Expr]]:
    """Cover 0 .. extent-1 with vectors and, behind the last whole one, halves, quarters ... of one:
    yields (index, lane) like Emitter.spans."""
    whole = extent // lanes
    if whole:
        with emit.loop(whole, SERIAL, "p") as outer, emit.loop(lanes, VECTOR, "l") as lane:
            yield (outer * lanes + lane if whole > 1 else lane), lane
    done, size = whole * lanes, lanes // 2
    while done < extent:
        if size > 1 and extent - done >= size:
            with emit.loop(size, VECTOR, "l") as lane:
                yield (lane + done if done else lane), lane
            done += size
        elif size <= 1:
            yield tirx.IntImm("int32", done), tirx.IntImm("int32", 0)
            done += 1
        size = max(size // 2, 1)
