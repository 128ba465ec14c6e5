"""Blocks turned in registers, and short vectors for remainders.

In: where the rows of a square block start in memory. Out: its columns, as vector expressions, by log2(lanes) rounds of exchanging halves between
pairs of rows; `pieces` covers an extent with vectors, and what is left with shorter ones, down to single elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tvm import tirx

from .emit import SERIAL, TVM_DTYPES, VECTOR, Buffer, Emitter, Expr


def transpose_block(emit: Emitter, dtype: str, lanes: int, columns: int, row: Callable[[int], tuple[Buffer, Expr]]) -> list[Expr]:
    """The first `columns` columns of a block of `lanes` rows of `lanes` elements; `row(i)` says where row i starts."""

    def named(value: Expr) -> Expr:
        buffer = tirx.decl_buffer((lanes,), TVM_DTYPES[dtype], name=emit.fresh("v"))
        emit.add(tirx.AllocBuffer(buffer))
        emit.add(tirx.BufferStore(buffer, value, [tirx.Ramp(0, 1, lanes)]))
        return tirx.BufferLoad(buffer, [tirx.Ramp(0, 1, lanes)])

    def pick(a: Expr, b: Expr, lanes_of: list[int]) -> Expr:
        indices: list[Any] = [tirx.IntImm("int32", k) for k in lanes_of]
        return named(tirx.Shuffle([a, b], indices))

    current = []
    for i in range(lanes):
        buffer, start = row(i)
        current.append(named(tirx.BufferLoad(buffer, [tirx.Ramp(start, 1, lanes)])))
    step = lanes // 2
    while step:
        exchanged = list(current)
        for i in range(lanes):
            if not i & step:
                a, b = current[i], current[i | step]
                exchanged[i] = pick(a, b, [j if not j & step else lanes + (j ^ step) for j in range(lanes)])
                exchanged[i | step] = pick(a, b, [j | step if not j & step else lanes + j for j in range(lanes)])
        current = exchanged
        step //= 2
    return current[:columns]


def pieces(emit: Emitter, extent: int, lanes: int) -> Iterator[tuple[Expr, Expr]]:
    """Cover 0 .. extent-1 with vectors and, behind the last whole one, halves, quarters ... of one: yields (index, lane) like Emitter.spans."""
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
