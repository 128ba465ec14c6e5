"""A ring of ranks that share the positions of a sequence: which part comes by when, and what it has to do with the
rank's own.

In step i of n, a rank has the keys of the rank i places before it. All ranks run the same operations. What of them
counts is a matter of numbers: of the rank's place, and of the step.

    in order     rank r has part r of n. Where no query looks at later keys, those of a later rank count nothing
    folded       rank r has chunks r and 2n - 1 - r of 2n, an early and a late one. Of the keys of rank j < r both of
                 its chunks see the early one. Of those of rank j > r its late chunk sees both. So every step is
                 two of four pairs of chunks: the late queries with the early keys, and a pair that both have the
                 same side of
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penstock.ir.graph import Value
from penstock.passes.sharding.building import LocalWriter
from penstock.passes.sharding.calls import LocalCall, over
from penstock.passes.sharding.reshard import own_part
from penstock.passes.sharding.strips import number_of_rank

# The dimension of positions of queries, keys, values and results.
POSITIONS = 2
EARLY, LATE = 0, 1
# A side of a folded part: early, late, or the one that a rank looks up.
Side = int | Value


@dataclass(frozen=True)
class KeyMeeting:
    """Queries of a rank that meet keys which come by: the side of each, all without one. `counts` says whether the
    rank looks at these keys; without it, it does."""

    queries: Side | None = None
    keys: Side | None = None
    causal: bool = False
    counts: Value | None = None


class PositionRing:
    """The ranks that share the positions of one operation, as one of them sees them."""

    def __init__(self, b: LocalWriter, call: LocalCall, keys: int) -> None:
        t = call.whole(keys)
        self.b, self.call = b, call
        self.axes = b.present(t.axes_of(POSITIONS))
        self.parts, self.blocks = b.parts(self.axes), t.blocks_of(POSITIONS)
        self.causal = bool(call.attrs["causal"])
        self.folded = self.causal and self.blocks < 0

    def meetings(self, step: int) -> list[KeyMeeting]:
        """Return what a rank computes in a step."""
        if not self.causal or step == 0:
            return [KeyMeeting(causal=self.causal)]
        if not self.folded:
            return [KeyMeeting(counts=self._comes_from_before(step))]
        side = self.b.once(("ring side", self.axes, step), lambda: self._side(step))
        return [KeyMeeting(LATE, EARLY), KeyMeeting(side, side)]

    def passed(self, x: Value) -> Value:
        """Return what the rank before has."""
        return self.b.emit("shift", x, by=1, over=over(self.axes))

    def _comes_from_before(self, step: int) -> Value:
        """Return whether the keys of a step are of a rank before this one."""
        return self.b.once(
            ("ring before", self.axes, step),
            lambda: self.b.emit("less_equal", self.b.number(step, "i64"), self.b.index(self.axes)),
        )

    def _came_from(self, step: int) -> Value:
        """Return the number of the rank whose keys come in a step."""
        ranks = [(rank - step) % self.parts for rank in range(self.parts)]
        return self.b.once(("ring rank", self.axes, step), lambda: number_of_rank(self.b, self.axes, ranks))

    def _side(self, step: int) -> Value:
        early, late = (self.b.number(side, "i64") for side in (EARLY, LATE))
        return self.b.emit("where", self._comes_from_before(step), early, late)

    # ---------------------------------------------------------------------------------------- parts of tensors

    def side_of(self, x: Value, side: Side | None, dim: int = POSITIONS) -> Value:
        """Return one side of a tensor along its positions."""
        if side is None:
            return x
        dims = x.type.dims
        half = dims[dim] // 2
        if isinstance(side, int):
            start = tuple(side * half if i == dim else 0 for i in range(len(dims)))
            stop = tuple((side + 1) * half if i == dim else n for i, n in enumerate(dims))
            return self.b.emit("slice", x, start=start, stop=stop, step=(1,) * len(dims))
        apart = self.b.emit("reshape", x, shape=(*dims[:dim], 2, half, *dims[dim + 1 :]))
        return self.b.emit("gather", apart, side, axis=dim)

    def in_sides(self, x: Value) -> Value:
        """Return a tensor with its sides as a dimension of their own; as it is in a ring that is in order."""
        dims = x.type.dims
        if not self.folded:
            return x
        return self.b.emit("reshape", x, shape=(*dims[:POSITIONS], 2, dims[POSITIONS] // 2, *dims[POSITIONS + 1 :]))

    def placed(self, x: Value, side: Side | None, elsewhere: float) -> Value:
        """Return what was computed for one side, in the form of `in_sides`; the other side has a number."""
        if side is None:
            return self.in_sides(x)
        dims = x.type.dims
        row = self.b.emit("reshape", x, shape=(*dims[:POSITIONS], 1, *dims[POSITIONS:]))
        shape = (2, *(1,) * (len(dims) - POSITIONS))
        sides = self.b.once(
            ("ring sides", len(dims)),
            lambda: self.b.emit("iota", name=self.b.namer.fresh("local.sides"), dtype="i64", shape=shape, axis=0),
        )
        here = self.b.number(side, "i64") if isinstance(side, int) else side
        return self.b.emit("where", self.b.emit("equal", sides, here), row, self.b.number(elsewhere, row.type.dtype))

    def masks(self, operands: Sequence[int], step: int, meeting: KeyMeeting) -> Iterator[Value]:
        """Yield what a mask says of the queries and keys of a meeting. A rank has it for its own queries and all
        keys."""
        for i in operands:
            t, x = self.call.whole(i), self.call.ins[i]
            if t.dims[-1] > 1:
                x = own_part(self.b, x, t.rank - 1, self.axes, self.blocks, self._came_from(step))
                x = self.side_of(x, meeting.keys, t.rank - 1)
            if t.rank > 1 and t.axes_of(t.rank - 2):
                x = self.side_of(x, meeting.queries, t.rank - 2)
            yield x
