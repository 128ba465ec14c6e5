"""Operations that are alike: the blocks of a model that come again and again, such as the layers of a transformer.

In: the operations of a graph in order. Out: a number for each, the same for those that stand at one place of equal
blocks. Operations are equal where kind, types and attributes are, and their operands come from as many operations
before. The longest run of blocks is found first, then those in front of it and behind it. Where there are four blocks
or more, every second one is alike, so that neighbours may differ: a split by columns, then one by rows.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt

from penstock.ir.attrs import Attr
from penstock.ir.graph import Graph

# Attributes that name a variable or a value, and so differ between blocks.
_NAMES = ("var", "of")


def alike_operations(graph: Graph) -> list[int]:
    """Return a number for each operation of a graph, the same for those at one place of equal blocks."""
    makers = {value.name: (i, place) for i, op in enumerate(graph.ops) for place, value in enumerate(op.outs)}
    marks = list[Hashable]()
    for i, op in enumerate(graph.ops):
        # Of what no operation makes, the name counts.
        operands = tuple((i - makers[v.name][0], makers[v.name][1]) if v.name in makers else v.name for v in op.ins)
        types = tuple(value.type for value in (*op.ins, *op.outs))
        attrs = tuple(sorted((key, _hashable(x)) for key, x in op.attrs.items() if key not in _NAMES))
        marks.append((op.kind, types, attrs, operands))
    known: dict[Hashable, int] = {}
    return places_in_blocks([known.setdefault(mark, len(known)) for mark in marks])


def _hashable(attr: Attr) -> str:
    return repr(attr)


def places_in_blocks(marks: Sequence[int]) -> list[int]:
    """Return a number for each element, the same for those at one place of blocks that follow each other."""
    places = list(range(len(marks)))
    ranges, array = [(0, len(marks))], np.array(marks)
    while ranges:
        first, last = ranges.pop()
        period, start, length = _longest(array[first:last])
        if not length:
            continue
        if length >= 3 * period:
            # Two blocks count as one; each still comes twice at least.
            period, length = 2 * period, length - period
        begin, end = first + start, first + start + length + period
        for i in range(begin + period, end):
            places[i] = places[i - period]
        ranges += [(first, begin), (end, last)]
    return places


def _longest(marks: npt.NDArray[np.int64]) -> tuple[int, int, int]:
    """Return the period, the start and the length of the longest run of elements that equal those a period later, of a
    period or more; the shortest such period. The length is 0 where there is none."""
    best = (0, 0, 0)
    for period in range(1, len(marks) // 2 + 1):
        equal = np.concatenate(([False], marks[:-period] == marks[period:], [False]))
        edges = np.flatnonzero(equal[1:] != equal[:-1])
        starts, lengths = edges[::2], edges[1::2] - edges[::2]
        if len(lengths) and (longest := int(lengths.max())) >= period and longest > best[2]:
            best = (period, int(starts[lengths.argmax()]), longest)
    return best
