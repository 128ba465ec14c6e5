"""Reshards as collectives: how a tensor comes from one layout over a mesh into another.

In: a local value and its whole type in both layouts. Out: local operations. Sums over axes that split a dimension
afterwards become reduce_scatters, others all_reduces; an axis that moves from one dimension to another becomes an
all_to_all; dimensions that are split no more are gathered, and new splits take a part of what the rank has, which
moves nothing.
"""

from __future__ import annotations

from penstock.ir.graph import Value
from penstock.ir.types import TensorType, part_size
from penstock.support.errors import VerifyError

from .building import LocalWriter


def resharded(b: LocalWriter, x: Value, before: TensorType, after: TensorType, name: str) -> Value:
    """Write what brings a local value from one layout to another; the result gets the name."""
    steps = _Steps(b, x, before, after)
    steps.run()
    return _named(b, steps.value, name)


def _named(b: LocalWriter, value: Value, name: str) -> Value:
    """Return the value under a name: its operation was just written, or it gets a view of its own."""
    if b.ops and b.ops[-1].outs == (value,):
        last = b.ops.pop()
        named = Value(name, value.type)
        b.put(last.renamed({value: named}))
        return named
    return b.emit("reshape", value, name=name, shape=value.type.dims)


class _Steps:
    """The way from one layout to another: `at` is the type of the whole tensor so far."""

    def __init__(self, b: LocalWriter, x: Value, before: TensorType, after: TensorType) -> None:
        self.b, self.value, self.at, self.after = b, x, before, after

    def run(self) -> None:
        self._sum()
        self._move()
        self._gather()
        self._part()
        if self.at != self.after:
            raise VerifyError(f"there is no way from {self.at} to {self.after}", where=f"%{self.value.name}")

    def _lay(self, dim: int, axes: tuple[str, ...], blocks: int = 1, partial: tuple[str, ...] | None = None) -> None:
        t = self.at
        every = [axes if i == dim else t.axes_of(i) for i in range(t.rank)]
        blocked = [blocks if i == dim else t.blocks_of(i) for i in range(t.rank)]
        self.at = t.laid(every, t.partial if partial is None else partial, blocked)

    def _sum(self) -> None:
        """Add partial sums up: scattered where an axis comes last on a dimension that it does not split yet."""
        for axis in [a for a in self.at.partial if a not in self.after.partial]:
            dim = next((i for i in range(self.at.rank) if axis in self.after.axes_of(i)), None)
            behind = tuple(a for a in self.at.partial if a != axis)
            if dim is None or (*self.at.axes_of(dim), axis) != self.after.axes_of(dim)[: len(self.at.axes_of(dim)) + 1]:
                continue
            blocks = self.after.blocks_of(dim)
            if self.at.axes_of(dim) and (blocks != self.at.blocks_of(dim) or not self._even(dim)):
                continue
            if self.b.present((axis,)):
                self.value = self.b.emit(
                    "reduce_scatter", self.value, axis=dim, over=axis, parts=self.b.sizes[axis], blocks=blocks
                )
            self._lay(dim, (*self.at.axes_of(dim), axis), blocks, behind)
        left = tuple(a for a in self.at.partial if a not in self.after.partial)
        if left:
            if over := self.b.present(left):
                self.value = self.b.emit("all_reduce", self.value, over=_over(over))
            self.at = self.at.laid(self.at.axes, [a for a in self.at.partial if a not in left], self.at.blocks)

    def _even(self, dim: int) -> bool:
        """Return whether the parts of a dimension are equal in both layouts."""
        return all(t.dims[dim] % (self.b.parts(t.axes_of(dim)) * t.blocks_of(dim)) == 0 for t in (self.at, self.after))

    def _move(self) -> None:
        """Move an axis that alone splits one dimension, and shall alone split another."""
        for join in range(self.at.rank):
            axes = self.at.axes_of(join)
            split = next((i for i in range(self.at.rank) if axes and self.after.axes_of(i) == axes), join)
            plain = self.at.blocks_of(join) == 1 == self.after.blocks_of(split)
            if split == join or self.at.axes_of(split) or self.after.axes_of(join) or not plain:
                continue
            if over := self.b.present(axes):
                whole, parts = self.at.dims[join], self.b.parts(axes)
                self.value = self.b.emit(
                    "all_to_all", self.value, split=split, join=join, over=_over(over), parts=parts, size=whole
                )
            self._lay(join, ())
            self._lay(split, axes)

    def _gather(self) -> None:
        """Gather what is not split any more, from the last axis on."""
        for dim in range(self.at.rank):
            axes, wanted = self.at.axes_of(dim), self.after.axes_of(dim)
            kept = 0
            if self.at.blocks_of(dim) == self.after.blocks_of(dim) and self._even(dim):
                while kept < min(len(axes), len(wanted)) and axes[kept] == wanted[kept]:
                    kept += 1
            elif axes == wanted and self.at.blocks_of(dim) == self.after.blocks_of(dim):
                kept = len(axes)
            if kept == len(axes):
                continue
            blocks = self.at.blocks_of(dim)
            if over := self.b.present(axes[kept:]):
                size = part_size(self.at.dims[dim], self.b.parts(axes[:kept]), blocks)
                self.value = self.b.emit("all_gather", self.value, axis=dim, over=_over(over), size=size, blocks=blocks)
            self._lay(dim, axes[:kept], blocks)

    def _part(self) -> None:
        """Take this rank's part along dimensions that are split further."""
        for dim in range(self.at.rank):
            axes, wanted, blocks = self.at.axes_of(dim), self.after.axes_of(dim), self.after.blocks_of(dim)
            if axes == wanted or wanted[: len(axes)] != axes:
                continue
            if over := self.b.present(wanted[len(axes) :]):
                self.value = own_part(self.b, self.value, dim, over, blocks)
            self._lay(dim, wanted, blocks)


def own_part(b: LocalWriter, x: Value, dim: int, axes: tuple[str, ...], blocks: int = 1) -> Value:
    """Write what takes this rank's part of a tensor along a dimension, of each block: zero where there is nothing."""
    shape, parts = x.type.dims, b.parts(axes)
    each = shape[dim] // blocks
    size = part_size(each, parts)
    if blocks > 1:
        x = b.emit("reshape", x, shape=(*shape[:dim], blocks, each, *shape[dim + 1 :]))
        dim += 1
    lead, behind = x.type.dims[:dim], x.type.dims[dim + 1 :]
    if size * parts != each:
        high = tuple(size * parts - each if i == dim else 0 for i in range(x.type.rank))
        x = b.emit("pad", x, low=(0,) * x.type.rank, high=high)
    apart = b.emit("reshape", x, shape=(*lead, parts, size, *behind))
    mine = b.emit("gather", apart, b.index(axes), axis=dim)
    if blocks > 1:
        mine = b.emit("reshape", mine, shape=(*lead[:-1], blocks * size, *behind))
    return mine


def _over(axes: tuple[str, ...]) -> str | tuple[str, ...]:
    return axes[0] if len(axes) == 1 else axes
