"""A reduction sweep: a shape, the axes it is reduced over, and how its elements are combined.

In: the operands of all reductions at an index, and what takes their totals. Out: index arithmetic over kept and reduced
dimensions, for the loops of rows/reduce.py and of other devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Generic, Protocol, TypeVar

from .elements import Index, bound_index, zero
from .emit import Emitter, Expr

Combine = Callable[[Expr, Expr], Expr]


class HasEmitter(Protocol):
    """The part of a kernel's body that index arithmetic needs."""

    @property
    def emit(self) -> Emitter: ...


B_co = TypeVar("B_co", bound=HasEmitter, covariant=True)


@dataclass(frozen=True)
class SweepOf(Generic[B_co]):
    """One sweep over a shape, which reduces it: `element` gives the operands of all steps at an index of `shape`,
    `result` takes their totals at an index over the kept dimensions. `steps` are (start value, combination)."""

    body: B_co
    shape: tuple[int, ...]
    axes: tuple[int, ...]
    dtype: str
    steps: Sequence[tuple[float, Combine]]
    element: Callable[[Index], Sequence[Expr]]
    result: Callable[[Index, Sequence[Expr]], None]
    # The first dimension of those at the end that may be indexed by one running coordinate.
    merged: int

    @property
    def kept(self) -> list[int]:
        return [d for d in range(len(self.shape)) if d not in self.axes]

    def size(self, dims: Iterable[int]) -> int:
        return prod(self.shape[d] for d in dims)

    def dims(self, dims: Iterable[int]) -> list[int]:
        return [self.shape[d] for d in dims]

    def run_of(self, dims: Sequence[int], other_dims: Sequence[int]) -> list[int]:
        """Return the trailing run of `dims`, last in memory, that one coordinate can run through."""
        last = max((d for d in other_dims if self.shape[d] > 1), default=-1)
        run = [d for d in dims if d > last]
        whole = [d for d in run if d >= self.merged]
        if self.size(whole) > 1:
            return whole
        wide = [d for d in run if self.shape[d] > 1]
        return run[run.index(wide[-1]) :] if wide else run[-1:]

    def along(self, run: Sequence[int], position: Expr) -> Index:
        """Return the coordinates of a position in a run: the last one that is not 1 has it all."""
        at = max((i for i, d in enumerate(run) if self.shape[d] != 1), default=len(run) - 1)
        return tuple(position if i == at else zero() for i in range(len(run)))

    def place(self, *groups: tuple[Sequence[int], Sequence[Expr]]) -> Index:
        return index_over(self.shape, groups)

    def kept_index(self, *groups: tuple[Sequence[int], Sequence[Expr]]) -> Index:
        whole = self.place(*groups)
        return tuple(whole[d] for d in self.kept)

    def bound(self, position: Expr, dims: Sequence[int]) -> Index:
        return bound_index(self.body.emit, position, self.dims(dims))


def index_over(shape: tuple[int, ...], groups: Sequence[tuple[Sequence[int], Sequence[Expr]]]) -> Index:
    """Return an index into `shape` from the coordinates of groups of dimensions; the remaining coordinates are 0."""
    index: list[Expr] = [zero()] * len(shape)
    for dims, part in groups:
        for d, i in zip(dims, part, strict=True):
            index[d] = i
    return tuple(index)
