"""The search for the widths of layers: on how many devices each of them computes its part of the samples.

In: for every layer and width the seconds of its computation and its sums, and the seconds of moves between layers of
unlike widths. Out: a width for every layer, with the least sum of seconds. A layer on w devices uses w times its
seconds of them. The limit says how many times more than on one device that may be (the amplification limit of Park et
al., Efficient Strong Scaling Through Burst Parallel Training, 2022).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

# Sums of the same numbers in another order differ in the last digits.
_SLACK = 1 + 1e-12


@dataclass(frozen=True, slots=True, eq=False)
class WidthCosts:
    """The seconds of layers. `widths` are numbers of devices, the first one 1; `seconds[i, k]` those of layer i on
    `widths[k]` devices; `moves[i, k, n]` those in front of layer i + 1, from `widths[k]` to `widths[n]` devices."""

    widths: tuple[int, ...]
    seconds: Array
    moves: Array

    def allowed(self, limit: float = inf) -> npt.NDArray[np.bool_]:
        """Return which widths each layer may have: all of them without a limit, also of what takes no time."""
        if limit == inf:
            return np.ones(self.seconds.shape, np.bool_)
        used = self.seconds * np.array(self.widths)
        allowed: npt.NDArray[np.bool_] = used <= limit * used[:, :1] * _SLACK
        return allowed

    def total(self, choice: list[int]) -> float:
        """Return the seconds of all layers, of which each has the width of this number."""
        layers = range(len(choice))
        moved = sum(float(self.moves[i, choice[i], choice[i + 1]]) for i in layers[:-1])
        return sum(float(self.seconds[i, choice[i]]) for i in layers) + moved


def best_widths(costs: WidthCosts, limit: float = inf) -> list[int]:
    """Return the number of the width of every layer, with the least seconds. A limit is 1 or more, so that one device
    is always allowed."""
    assert limit >= 1
    seconds = np.where(costs.allowed(limit), costs.seconds, np.inf)
    best, came_from = seconds[0], list[npt.NDArray[np.intp]]()
    for spent, moves in zip(seconds[1:], costs.moves, strict=True):
        through = best[:, None] + moves
        came_from.append(through.argmin(axis=0))
        best = through.min(axis=0) + spent
    choice = [int(best.argmin())]
    for back in reversed(came_from):
        choice.append(int(back[choice[-1]]))
    return choice[::-1]
