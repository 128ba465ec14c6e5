"""The rounds of a collective: the block that each member of a group sends to each other one, and the result of all.

In: the operand of one member as a NumPy array, the blocks of the members that it hears from. Out: blocks, and the
filled result. Nothing here knows how blocks travel.

Sums are added in the order of the group, in the element type of the operands; half precision in float32. So all members
get the same bits, and those of the interpreter. Every round has blocks of one size, so that a receiver knows
it. A collective has one round; a large all_reduce has two (ir/collective_calls.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Protocol

import numpy as np

from penstock.ir.collective_calls import CollectiveCall, JointSum, goes_by_parts, kept_slices
from penstock.ir.ops import integer
from penstock.ir.types import numpy_dtype, part_size

Array = np.ndarray


class Round(Protocol):
    """One exchange of blocks. Members are named by their places in the group."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a block."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The element type of a block."""

    @property
    def receivers(self) -> tuple[int, ...]:
        """The members that this one sends to."""

    @property
    def sources(self) -> tuple[int, ...]:
        """The members that this one hears from."""

    @property
    def alike(self) -> bool:
        """Say whether all receivers get one block."""

    @property
    def lent(self) -> bool:
        """Say whether the operand itself is the block: it lies where the others can read it, and stays as it is until
        they have."""

    def fill(self, block: Array, x: Array, out: Array, member: int) -> None:
        """Write the block for a member."""

    def take(self, x: Array, out: Array, blocks: Mapping[int, Array]) -> None:
        """Write what the blocks of all sources, and the own operand, make."""


def nbytes_of(turn: Round) -> int:
    """Return the bytes of one block."""
    return int(np.prod(turn.shape, dtype=np.int64)) * turn.dtype.itemsize


class _Whole:
    """Every member sends all that it has to every other one."""

    alike, lent = True, False

    def __init__(self, call: CollectiveCall, members: int, place: int) -> None:
        x = call.op.ins[0].type
        self.shape, self.dtype, self.place, self.members = x.dims, numpy_dtype(x.dtype), place, members
        self.receivers = self.sources = _others(members, place)

    def fill(self, block: Array, x: Array, out: Array, member: int) -> None:
        np.copyto(block, x)

    def _all(self, own: Array, blocks: Mapping[int, Array]) -> list[Array]:
        return [own if i == self.place else blocks[i] for i in range(self.members)]


class ReduceWhole(_Whole):
    """An all_reduce of whole operands."""

    def __init__(self, call: CollectiveCall, members: int, place: int) -> None:
        super().__init__(call, members, place)
        self.by = str(call.attrs["by"])

    def take(self, x: Array, out: Array, blocks: Mapping[int, Array]) -> None:
        reduce_into(out, self._all(x, blocks), self.by)


class Gather(_Whole):
    """An all_gather."""

    def __init__(self, call: CollectiveCall, members: int, place: int) -> None:
        super().__init__(call, members, place)
        self.axis = integer(call.attrs["axis"]) % len(self.shape)
        self.blocks = integer(call.attrs["blocks"])

    def take(self, x: Array, out: Array, blocks: Mapping[int, Array]) -> None:
        for i, part in enumerate(self._all(x, blocks)):
            join(out, part, self.axis, i, self.blocks)


class ScatterFlat:
    """The first round of a large all_reduce: each member adds up its part of all elements."""

    alike, lent = False, False

    def __init__(self, call: CollectiveCall, members: int, place: int) -> None:
        x = call.op.ins[0].type
        self.size, self.part = x.size, part_size(x.size, members)
        self.shape, self.dtype, self.place, self.members = (self.part,), numpy_dtype(x.dtype), place, members
        self.receivers = self.sources = _others(members, place)
        self.by = str(call.attrs["by"])

    def fill(self, block: Array, x: Array, out: Array, member: int) -> None:
        part = self.own(x, member)
        block[: part.size] = part
        block[part.size :] = 0

    def own(self, x: Array, member: int) -> Array:
        """Return the part of a member, which is shorter at the end."""
        return x.reshape(-1)[member * self.part : (member + 1) * self.part]

    def take(self, x: Array, out: Array, blocks: Mapping[int, Array]) -> None:
        operand, result = self.own(x, self.place), self.own(out, self.place)
        parts = [operand if i == self.place else blocks[i][: operand.size] for i in range(self.members)]
        reduce_into(result, parts, self.by)


class GatherFlat:
    """The second round of a large all_reduce: each member sends its part of the sum."""

    alike, lent = True, False

    def __init__(self, first: ScatterFlat) -> None:
        self.first, self.shape, self.dtype = first, first.shape, first.dtype
        self.receivers, self.sources = first.receivers, first.sources

    def fill(self, block: Array, x: Array, out: Array, member: int) -> None:
        part = self.first.own(out, self.first.place)
        block[: part.size] = part
        block[part.size :] = 0

    def take(self, x: Array, out: Array, blocks: Mapping[int, Array]) -> None:
        for i, block in blocks.items():
            part = self.first.own(out, i)
            part[...] = block[: part.size]


class _Cut:
    """Every member sends another part of its operand to every other one."""

    alike, lent = False, False

    def __init__(self, call: CollectiveCall, members: int, place: int, axis: int, blocks: int) -> None:
        x = call.op.ins[0].type
        self.axis, self.blocks = axis % x.rank, blocks
        size = part_size(x.dims[self.axis], members, blocks)
        self.shape = (*x.dims[: self.axis], size, *x.dims[self.axis + 1 :])
        self.dtype, self.place, self.members = numpy_dtype(x.dtype), place, members
        self.receivers = self.sources = _others(members, place)

    def fill(self, block: Array, x: Array, out: Array, member: int) -> None:
        cut(block, x, self.axis, self.members, member, self.blocks)

    def _all(self, x: Array, blocks: Mapping[int, Array]) -> list[Array]:
        mine = self._own(x)
        return [mine if i == self.place else blocks[i] for i in range(self.members)]

    def _own(self, x: Array) -> Array:
        """Return the own part of the operand: where it lies, if that is in one piece."""
        first, size = self.place * self.shape[self.axis], self.shape[self.axis]
        if self.blocks == 1 and first + size <= x.shape[self.axis]:
            part: Array = x[(*(slice(None),) * self.axis, slice(first, first + size))]
            return part
        mine = np.empty(self.shape, self.dtype)
        cut(mine, x, self.axis, self.members, self.place, self.blocks)
        return mine


class Scatter(_Cut):
    """A reduce_scatter."""

    def __init__(self, call: CollectiveCall, members: int, place: int) -> None:
        super().__init__(call, members, place, integer(call.attrs["axis"]), integer(call.attrs["blocks"]))

    def take(self, x: Array, out: Array, blocks: Mapping[int, Array]) -> None:
        reduce_into(out, self._all(x, blocks), "sum")


class Swap(_Cut):
    """An all_to_all."""

    def __init__(self, call: CollectiveCall, members: int, place: int) -> None:
        super().__init__(call, members, place, integer(call.attrs["split"]), 1)
        self.join = integer(call.attrs["join"]) % len(self.shape)

    def take(self, x: Array, out: Array, blocks: Mapping[int, Array]) -> None:
        for i, part in enumerate(self._all(x, blocks)):
            join(out, part, self.join, i, 1)


class Shift:
    """Every member sends all that it has to one other."""

    alike, lent = True, False

    def __init__(self, call: CollectiveCall, members: int, place: int) -> None:
        x, by = call.op.ins[0].type, integer(call.attrs["by"]) % members
        self.shape, self.dtype = x.dims, numpy_dtype(x.dtype)
        self.receivers = ((place + by) % members,) if by else ()
        self.sources = ((place - by) % members,) if by else ()

    def fill(self, block: Array, x: Array, out: Array, member: int) -> None:
        np.copyto(block, x)

    def take(self, x: Array, out: Array, blocks: Mapping[int, Array]) -> None:
        np.copyto(out, blocks[self.sources[0]] if self.sources else x)


class KeepParts:
    """AR of gradients of which each member keeps its part of the sum. Operand and result are one array, in which the
    gradients lie one behind the other. The parts of a member are its block; or all gradients are the block of every
    member, where these are lent."""

    def __init__(self, call: JointSum, members: int, place: int, lent: bool) -> None:
        self.alike = self.lent = lent
        self.dtype, self.place, self.members = numpy_dtype(call.op.ins[0].type.dtype), place, members
        self.receivers = self.sources = _others(members, place)
        # For each gradient: where it lies, its sizes, and the parts of all members in it; and where parts begin.
        self._gradients = [
            (slice(first, first + t.size), t.dims, [kept_slices(one, i, members) for i in range(members)])
            for one, first, t in zip(call.calls, call.places, call.types.values(), strict=False)
        ]
        self._starts = tuple(accumulate((one.op.outs[0].type.size for one in call.calls), initial=0))
        self.shape = (call.places[-1] if lent else self._starts[-1],)

    def fill(self, block: Array, x: Array, out: Array, member: int) -> None:
        for mine, start in zip(self.parts(x, member), self._starts, strict=False):
            block[start : start + size_of(mine)].reshape(mine.shape)[...] = mine

    def parts(self, x: Any, member: int) -> list[Any]:
        """Return the parts of a member in an array of all gradients, NumPy's or torch's."""
        return [x[where].reshape(dims)[slices[member]] for where, dims, slices in self._gradients]

    def in_block(self, block: Any, like: Sequence[Any]) -> list[Any]:
        """Return the parts of this member in its block, in the shape of its own ones."""
        return [
            block[start : start + size_of(mine)].reshape(mine.shape)
            for mine, start in zip(like, self._starts, strict=False)
        ]

    def take(self, x: Array, out: Array, blocks: Mapping[int, Array]) -> None:
        mine = self.parts(x, self.place)
        theirs = {
            i: self.parts(block, self.place) if self.lent else self.in_block(block, mine) for i, block in blocks.items()
        }
        for number, (operand, total) in enumerate(zip(mine, self.parts(out, self.place), strict=True)):
            # The sum is written over the own operand, which is read late where it is not among the first two.
            kept = operand.copy() if self.place > 1 else operand
            reduce_into(total, [kept if i == self.place else theirs[i][number] for i in range(self.members)], "sum")


def size_of(part: Any) -> int:
    """Return the elements of an array, NumPy's or torch's."""
    return int(np.prod(part.shape, dtype=np.int64))


def rounds_of(call: CollectiveCall, members: int, place: int, lent: bool = False) -> tuple[Round, ...]:
    """Return the rounds of a collective for one member of a group. `lent` operands are read by the others where they
    lie."""
    if isinstance(call, JointSum):
        return (KeepParts(call, members, place, lent),)
    if goes_by_parts(call.op, members):
        first = ScatterFlat(call, members, place)
        return first, GatherFlat(first)
    return (_ROUNDS[call.op.kind](call, members, place),)


_ROUNDS: dict[str, Callable[[CollectiveCall, int, int], Round]] = {
    "all_reduce": ReduceWhole,
    "all_gather": Gather,
    "reduce_scatter": Scatter,
    "all_to_all": Swap,
    "shift": Shift,
}


def _others(members: int, place: int) -> tuple[int, ...]:
    """Return the other members, beginning with the next: so not all of them send to one member first."""
    return tuple((place + i) % members for i in range(1, members))


# ------------------------------------------------------------------------------------------------ arithmetic


def reduce_into(out: Array, xs: Sequence[Array], by: str) -> None:
    """Write the sum, or the largest, of arrays, in their order."""
    combine = np.add if by == "sum" else np.maximum
    half = out.dtype.itemsize == 2 and out.dtype.kind not in "iu"
    if len(xs) == 1:
        np.copyto(out, xs[0])
    elif half:
        total = xs[0].astype(np.float32)
        for x in xs[1:]:
            combine(total, x.astype(np.float32), out=total)
        out[...] = total.astype(out.dtype)
    else:
        combine(xs[0], xs[1], out=out)
        for x in xs[2:]:
            combine(out, x, out=out)


def _pieces(axis: int, each: int, local: int, index: int, blocks: int) -> list[tuple[tuple[slice, ...], ...]]:
    """Return where a part lies in the whole, and in itself, block by block. Both have `blocks` blocks along the axis,
    of `each` and `local` elements."""
    first, last = (min(index * local + end, each) for end in (0, local))
    before = (slice(None),) * axis
    return [
        ((*before, slice(b * each + first, b * each + last)), (*before, slice(b * local, b * local + last - first)))
        for b in range(blocks)
    ]


def cut(part: Any, x: Any, axis: int, parts: int, index: int, blocks: int) -> None:
    """Write one of the parts of a tensor along an axis; zeros beyond the tensor. Arrays are NumPy's or torch's."""
    each = x.shape[axis] // blocks
    local = part_size(each, parts)
    if (index + 1) * local > each:
        part[...] = 0
    for there, here in _pieces(axis, each, local, index, blocks):
        part[here] = x[there]


def join(whole: Any, part: Any, axis: int, index: int, blocks: int) -> None:
    """Write a part of a tensor to its place in the whole; what it has beyond the tensor is left out."""
    each, local = whole.shape[axis] // blocks, part.shape[axis] // blocks
    for there, here in _pieces(axis, each, local, index, blocks):
        whole[there] = part[here]
