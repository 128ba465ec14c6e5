"""The cheapest way from one layout of a tensor to another: which collectives, in which order.

In: two layouts of a tensor, and the sizes of the mesh's axes. Out: the moves between them that cost least: bytes that a
device sends, and COLLECTIVE bytes for each that sends any. A move changes one thing:

    all_reduce      adds partial sums up, over one or more axes
    reduce_scatter  adds them up over an axis that then splits a dimension
    all_to_all      takes the last axes of a dimension to the end of those of another
    all_gather      the last axes of a dimension split it no more
    part            a dimension is split further, which moves nothing

All layouts that moves lead to are searched. So a tensor may be sliced before it is gathered, and an axis may rest on a
third dimension while two others change places. Parts of a part have to be equal: a dimension with axes takes more, or
gives some away and keeps others, only where its size divides.

With many axes there are more layouts than can be searched. After SEARCHED of them the way is a plain one: sums are
added up, dimensions that lie otherwise are gathered, and each rank takes its part of these.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import combinations, count
from math import prod
from typing import NamedTuple

from penstock.ir.types import TensorType
from penstock.support.errors import VerifyError

# What a collective counts beside its bytes: what a link sends while one begins. Ranks of a host send more in that time
# (docs/results.md), hosts in a usual network less.
COLLECTIVE = 2**16
# The layouts from which a search goes on, at most.
SEARCHED = 4096
# What a move counts in any case, so that of equally cheap ways the one with fewer moves is taken.
_MOVE = 2**-20

_Sizes = tuple[tuple[str, int], ...]
_Candidate = tuple[str, tuple[str, ...], int, int, TensorType]


class Move(NamedTuple):
    """A move and the axes that it goes over. `dim` is split or gathered, and an all_to_all joins `join`. `after` is the
    layout of the whole tensor behind it, and `sent` are the bytes that a device sends."""

    kind: str
    over: tuple[str, ...]
    dim: int
    join: int
    after: TensorType
    sent: float


def moves(before: TensorType, after: TensorType, sizes: Mapping[str, int]) -> tuple[Move, ...]:
    """Return the cheapest moves from one layout to another. Raise VerifyError where there are none."""
    return _moves(before, after, tuple(sorted(sizes.items())))


def moved_bytes(before: TensorType, after: TensorType, sizes: Mapping[str, int]) -> float:
    """Return the bytes that a device sends on the cheapest way from one layout to another."""
    return 0.0 if before == after else sum(move.sent for move in moves(before, after, sizes))


@lru_cache(maxsize=65536)
def _moves(before: TensorType, after: TensorType, sizes: _Sizes) -> tuple[Move, ...]:
    search = _Search(after, dict(sizes))
    number = count()
    waiting: list[tuple[float, int, TensorType]] = [(0.0, next(number), before)]
    reached: dict[TensorType, tuple[float, Move | None, TensorType]] = {before: (0.0, None, before)}
    done: set[TensorType] = set()
    while waiting:
        cost, _, at = heapq.heappop(waiting)
        if at == after:
            return tuple(_way(reached, at))
        if at in done:
            continue
        if len(done) == SEARCHED:
            return tuple(search.plain_way(before))
        done.add(at)
        for move in search.from_layout(at):
            total = cost + move.sent + (COLLECTIVE if move.sent else 0) + _MOVE
            known = reached.get(move.after)
            if known is None or total < known[0]:
                reached[move.after] = (total, move, at)
                heapq.heappush(waiting, (total, next(number), move.after))
    raise VerifyError(f"there is no way from {before} to {after}")


def _way(reached: Mapping[TensorType, tuple[float, Move | None, TensorType]], at: TensorType) -> list[Move]:
    way: list[Move] = []
    while (move := reached[at][1]) is not None:
        way.append(move)
        at = reached[at][2]
    return way[::-1]


class _Search:
    """The moves that lead on from a layout, on the way to another."""

    def __init__(self, goal: TensorType, sizes: Mapping[str, int]) -> None:
        self.goal, self.sizes = goal, sizes

    def from_layout(self, at: TensorType) -> Iterator[Move]:
        """Yield the moves from a layout, in the order in which equally cheap ones are taken."""
        for kind, over, dim, join, after in (*self._sums(at), *self._swaps(at), *self._gathers(at), *self._parts(at)):
            yield Move(kind, over, dim, join, after, self._sent(kind, over, at))

    def plain_way(self, at: TensorType) -> Iterator[Move]:
        """Yield moves that lead to the layout that is wanted, whatever they cost."""
        while at != self.goal:
            kind, over, dim, after = self._plain_step(at)
            yield Move(kind, over, dim, dim, after, self._sent(kind, over, at))
            at = after

    def _plain_step(self, at: TensorType) -> tuple[str, tuple[str, ...], int, TensorType]:
        left = tuple(axis for axis in at.partial if axis not in self.goal.partial)
        if left:
            partial = tuple(axis for axis in at.partial if axis in self.goal.partial)
            return "all_reduce", left, 0, at.laid(at.axes, partial, at.blocks)
        for dim in range(at.rank):
            if at.axes_of(dim) and (at.axes_of(dim), at.blocks_of(dim)) != self._wanted(dim):
                return "all_gather", at.axes_of(dim), dim, self._with(at, dim, (), 1)
        for dim in range(at.rank):
            axes, blocks = self._wanted(dim)
            if at.axes_of(dim) != axes:
                return "part", axes, dim, self._with(at, dim, axes, blocks)
        raise VerifyError(f"there is no way from {at} to {self.goal}")

    def _wanted(self, dim: int) -> tuple[tuple[str, ...], int]:
        return self.goal.axes_of(dim), self.goal.blocks_of(dim)

    def _sent(self, kind: str, over: tuple[str, ...], at: TensorType) -> float:
        n = self._count(over)
        share = at.local(self.sizes).nbytes
        per_share = {
            "all_reduce": 2 * (n - 1) / n,
            "reduce_scatter": (n - 1) / n,
            "all_to_all": (n - 1) / n,
            "all_gather": n - 1,
            "part": 0.0,
        }
        return share * per_share[kind]

    def _count(self, axes: tuple[str, ...]) -> int:
        return prod(self.sizes.get(axis, 1) for axis in axes)

    def _sums(self, at: TensorType) -> Iterator[_Candidate]:
        left = tuple(axis for axis in at.partial if axis not in self.goal.partial)
        for axis in left:
            for dim in range(at.rank):
                if (laid := self._split(at, dim, (axis,))) is not None:
                    partial = tuple(a for a in at.partial if a != axis)
                    yield "reduce_scatter", (axis,), dim, dim, laid.laid(laid.axes, partial, laid.blocks)
        for number in range(len(left), 0, -1):
            for over in combinations(left, number):
                partial = tuple(a for a in at.partial if a not in over)
                yield "all_reduce", over, 0, 0, at.laid(at.axes, partial, at.blocks)

    def _swaps(self, at: TensorType) -> Iterator[_Candidate]:
        for join in range(at.rank):
            axes = at.axes_of(join)
            for kept in range(len(axes)):
                left = self._gathered(at, join, kept) if at.blocks_of(join) == 1 else None
                for dim in range(at.rank) if left is not None else ():
                    if dim == join or at.blocks_of(dim) != 1 or (not at.axes_of(dim) and self.goal.blocks_of(dim) != 1):
                        continue
                    assert left is not None
                    if (after := self._split(left, dim, axes[kept:])) is not None:
                        yield "all_to_all", axes[kept:], dim, join, after

    def _gathers(self, at: TensorType) -> Iterator[_Candidate]:
        for dim in range(at.rank):
            axes = at.axes_of(dim)
            for kept in range(len(axes)):
                if (after := self._gathered(at, dim, kept)) is not None:
                    yield "all_gather", axes[kept:], dim, dim, after

    def _parts(self, at: TensorType) -> Iterator[_Candidate]:
        """Yield what is sliced further, by axes of the layout that is wanted: what ranks along others have is not known
        to be the same."""
        free = {axis for axes in self.goal.axes for axis in axes} - set(at.every_axis)
        for dim in range(at.rank):
            further = self.goal.axes_of(dim)[len(at.axes_of(dim)) :] if self._leads_on(at, dim) else ()
            wanted = [further[:n] for n in range(len(further), 0, -1) if free.issuperset(further[:n])]
            others = [(axis,) for axis in sorted(free) if (axis,) not in wanted]
            for over in (*wanted, *others):
                if (after := self._split(at, dim, over)) is not None:
                    yield "part", over, dim, dim, after

    def _leads_on(self, at: TensorType, dim: int) -> bool:
        """Return whether a dimension has the first of the axes that it has in the layout that is wanted."""
        axes = at.axes_of(dim)
        return self.goal.axes_of(dim)[: len(axes)] == axes

    def _split(self, at: TensorType, dim: int, over: tuple[str, ...]) -> TensorType | None:
        """Return the layout with a dimension split further; None where its parts have no equal parts."""
        axes, blocks = at.axes_of(dim), at.blocks_of(dim) if at.axes_of(dim) else self.goal.blocks_of(dim)
        whole = (*axes, *over)
        return self._with(at, dim, whole, blocks) if not axes or self._even(at, dim, whole, blocks) else None

    def _gathered(self, at: TensorType, dim: int, kept: int) -> TensorType | None:
        """Return the layout with the last axes of a dimension gone; None where equal parts are not what they leave."""
        axes, blocks = at.axes_of(dim), at.blocks_of(dim)
        return self._with(at, dim, axes[:kept], blocks) if not kept or self._even(at, dim, axes, blocks) else None

    def _even(self, at: TensorType, dim: int, axes: tuple[str, ...], blocks: int) -> bool:
        return at.dims[dim] % (self._count(axes) * blocks) == 0

    @staticmethod
    def _with(at: TensorType, dim: int, axes: tuple[str, ...], blocks: int) -> TensorType:
        every = [axes if i == dim else at.axes_of(i) for i in range(at.rank)]
        return at.laid(every, at.partial, [blocks if i == dim else at.blocks_of(i) for i in range(at.rank)])
