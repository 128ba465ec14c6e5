"""Optimal recomputation on a chain: choose the elements to keep between forward and backward, and those to compute
again.

In: a chain and a budget. Out: the cheapest choice.

The model: element i is computed from element i - 1, the first from something that is there anyway. For each microbatch
in flight the kept elements take their bytes. The backward pass walks from the end. When it reaches a run of adjacent
elements that were not kept, it computes all of them again from the kept one in front. They are there at once. So

    memory  = in flight * (bytes of kept elements) + max over runs of (bytes of the run)
    seconds = seconds of all elements not kept

`cheapest` is exact. It is a dynamic programme over the kept elements in order. For each of them as the last one kept so
far, it holds the Pareto front: every combination of (kept bytes, largest run, seconds) that no other beats in all
three. Limit: past WIDTH combinations at one element some are dropped, evenly by kept bytes. The result then still fits,
and may cost more than the best.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

WIDTH = 4096


@dataclass(frozen=True, slots=True)
class Element:
    """One element of the chain: `bytes` while it is kept or computed again, `seconds` to compute it."""

    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class KeptElements:
    """The positions of the kept elements, the bytes at the worst moment, and the seconds of computing the other
    elements again."""

    kept: tuple[int, ...]
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class _Path:
    """A choice up to one kept element. `before` is the path to the kept element in front of it, None at the start."""

    kept: int
    run: int
    seconds: float
    last: int
    before: _Path | None


def cheapest(chain: Sequence[Element], in_flight: int, budget: int) -> KeptElements | None:
    """Return the choice with the fewest seconds among those that fit, of those the one with the fewest bytes; None
    where none fits."""
    sums, times = [0], [0.0]
    for element in chain:
        sums.append(sums[-1] + element.bytes)
        times.append(times[-1] + element.seconds)
    n = len(chain)
    # paths[i] end with element i - 1 kept; entry 0 is the start, entry n + 1 the end, which takes nothing.
    paths: list[list[_Path]] = [[_Path(0, 0, 0.0, -1, None)]]
    for i in range(1, n + 2):
        size = chain[i - 1].bytes if i <= n else 0
        candidates = []
        for j in range(i):
            run, seconds = sums[i - 1] - sums[j], times[i - 1] - times[j]
            for path in paths[j]:
                kept, most = path.kept + size, max(path.run, run)
                if in_flight * kept + most <= budget:
                    candidates.append(_Path(kept, most, path.seconds + seconds, i - 1, path))
        paths.append(_thinned(_undominated(candidates)))
    if not paths[-1]:
        return None
    best = min(paths[-1], key=lambda p: (p.seconds, in_flight * p.kept + p.run))
    chosen: list[int] = []
    step = best.before
    while step is not None and step.before is not None:
        chosen.append(step.last)
        step = step.before
    return KeptElements(tuple(reversed(chosen)), in_flight * best.kept + best.run, best.seconds)


def least_bytes(chain: Sequence[Element], in_flight: int) -> int:
    """Return the smallest budget for which there is a choice."""
    low, high = 0, in_flight * sum(element.bytes for element in chain)
    while low < high:
        middle = (low + high) // 2
        if cheapest(chain, in_flight, middle) is None:
            low = middle + 1
        else:
            high = middle
    return low


def _undominated(paths: Iterable[_Path]) -> list[_Path]:
    """Return the Pareto front, by kept bytes: the paths that no other path beats or equals in all three numbers."""
    result: list[_Path] = []
    # The paths so far keep no more. These are their largest runs, rising, with the fewest seconds for each, falling.
    runs: list[int] = []
    seconds: list[float] = []
    for path in sorted(paths, key=lambda p: (p.kept, p.run, p.seconds)):
        at = bisect_right(runs, path.run)
        if at and seconds[at - 1] <= path.seconds:
            continue
        end = at
        while end < len(runs) and seconds[end] >= path.seconds:
            end += 1
        start = at - 1 if at and runs[at - 1] == path.run else at
        runs[start:end], seconds[start:end] = [path.run], [path.seconds]
        result.append(path)
    return result


def _thinned(paths: list[_Path]) -> list[_Path]:
    if len(paths) <= WIDTH:
        return paths
    return [paths[i * (len(paths) - 1) // (WIDTH - 1)] for i in range(WIDTH)]
