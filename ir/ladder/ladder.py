"""The ladder: programs of one model at several sizes, and the choice among them for a request.

In: what stands on each rung, with the sizes it was made for. Out: the smallest rung that holds the sizes of a request
(`fit`), or the rungs that take its rows one after the other (`pieces`), by the time that each takes. `priced_sizes`
chooses rungs for sizes that are filled up: each is predicted to take at most so many times as long as those below it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Generic, TypeVar

Held = TypeVar("Held")


@dataclass(frozen=True)
class Rung(Generic[Held]):
    """A program, and the sizes of bounded dimensions that it was made for."""

    sizes: Mapping[str, int]
    held: Held

    @property
    def name(self) -> str:
        """A name that is part of file names: the sizes in order."""
        return "x".join(map(str, self.sizes.values()))


class Ladder(Generic[Held]):
    """The rungs of a model, the smallest first. Each has sizes of the same dimensions."""

    def __init__(self, rungs: Sequence[Rung[Held]]) -> None:
        self.rungs = tuple(sorted(rungs, key=lambda rung: (prod(rung.sizes.values()), *rung.sizes.values())))
        self.names = tuple(self.rungs[0].sizes)
        self._by_size = {tuple(rung.sizes[name] for name in self.names): rung for rung in self.rungs}
        assert len(self._by_size) == len(self.rungs), "two rungs have the same sizes"

    def __iter__(self) -> Iterator[Rung[Held]]:
        return iter(self.rungs)

    def __len__(self) -> int:
        return len(self.rungs)

    @property
    def most(self) -> dict[str, int]:
        """The largest size of each dimension."""
        return {name: max(rung.sizes[name] for rung in self.rungs) for name in self.names}

    @property
    def largest(self) -> Rung[Held]:
        """The rung that holds every request."""
        return self._by_size[tuple(self.most.values())]

    def at(self, sizes: Mapping[str, int]) -> Rung[Held] | None:
        """Return the rung of exactly these sizes, or None."""
        return self._by_size.get(tuple(sizes.get(name, 0) for name in self.names))

    def fit(self, sizes: Mapping[str, int]) -> Rung[Held] | None:
        """Return the smallest rung that holds these sizes; None if none does."""
        fitting = (rung for rung in self.rungs if all(sizes[name] <= rung.sizes[name] for name in self.names))
        return next(fitting, None)

    def sizes_along(self, name: str) -> list[int]:
        """Return the sizes of rungs along a dimension, in order."""
        return sorted({rung.sizes[name] for rung in self.rungs})


def pieces(count: int, seconds: Mapping[int, float]) -> list[int]:
    """Return the sizes that take so many rows in the least time, the largest first. `seconds` has the time of each
    size. The last one may be larger than what is left for it."""
    return best_pieces(count, seconds)[count]


def best_pieces(most: int, seconds: Mapping[int, float]) -> list[list[int]]:
    """Return `pieces` of every number of rows from 0 to `most`."""
    least = [0.0] + [float("inf")] * most
    first = [0] * (most + 1)
    for n in range(1, most + 1):
        for size, time in sorted(seconds.items()):
            total = time + least[max(n - size, 0)]
            # Of equal times the larger size, which makes fewer calls.
            if total <= least[n]:
                least[n], first[n] = total, size
    chosen: list[list[int]] = [[]]
    for n in range(1, most + 1):
        chosen.append(sorted([first[n], *chosen[max(n - first[n], 0)]], reverse=True))
    return chosen


def grown_sizes(most: int, step: Callable[[int], int]) -> tuple[int, ...]:
    """Return sizes up to `most`: `step` gives the size behind another one, from 0 on."""
    sizes = [step(0)]
    while sizes[-1] < most:
        sizes.append(step(sizes[-1]))
    return (*(size for size in sizes if size < most), most)


def priced_sizes(least: int, most: int, seconds: Mapping[int, float], worst: float) -> tuple[int, ...]:
    """Return sizes from `least` up to `most`, so few that filling up to the next one takes at most `worst` times as
    long. `seconds` are those of some sizes, `least` and `most` among them; between two the time grows evenly. No size
    is more than one and a half times the one before: time that does not grow is a guess. Of all sizes that may follow
    the one of most factors 2 is taken, as kernels like it."""
    sizes = [least]
    while sizes[-1] < most:
        last = sizes[-1]
        limit = worst * _between(seconds, last + 1)
        following = [last + 1]
        while following[-1] < min(most, last + last // 2) and _between(seconds, following[-1] + 1) <= limit:
            following.append(following[-1] + 1)
        sizes.append(most if following[-1] == most else max(following, key=lambda n: (n & -n, n)))
    return tuple(sizes)


def filling(seconds: Mapping[int, float]) -> float:
    """Return how many times as long the size after a rung takes, at most, when it is filled up to the next rung.
    `seconds` are those of the rungs; between two the time grows evenly."""
    sizes = sorted(seconds)
    return max((seconds[b] / _between(seconds, a + 1) for a, b in pairwise(sizes)), default=1.0)


def _between(seconds: Mapping[int, float], size: int) -> float:
    """Return the time of a size between two that are known."""
    above = min(n for n in seconds if n >= size)
    below = max((n for n in seconds if n <= size), default=above)
    share = (size - below) / (above - below) if above > below else 0.0
    return seconds[below] + share * (seconds[above] - seconds[below])
