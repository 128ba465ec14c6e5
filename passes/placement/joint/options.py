"""The choice of an option for each layer of a stage: the least time among those whose bytes fit.

This is a knapsack problem. Its linear relaxation starts from the fastest options, and gives up time where a byte costs
least of it. That is a bound. With its last step taken whole it is a choice, often the best. Where the two leave a
question open, all choices are extended layer by layer. A choice is left out where another one dominates it, or where
the relaxation of the remaining layers rules it out. Layers that are alike make few different ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Positions = npt.NDArray[np.intp]

# More choices than these are not told apart; what the relaxation says stands then.
_MOST_CHOICES = 50_000
_SAME = 1e-12


@dataclass(frozen=True, slots=True)
class Choice:
    """An option for each layer, with the sum of their times. No choice that fits takes less than `least`."""

    least: float
    time: float
    picks: Positions | None = None


NOTHING_FITS = Choice(inf, inf)


@dataclass(frozen=True, slots=True)
class _Steps:
    """Changes of options that free memory, those that cost the least time per byte first: each goes on from the one
    before it of the same layer."""

    layer: Positions
    option: Positions
    time: Floats
    freed: Floats

    def without(self, layers: Positions) -> _Steps:
        keep = ~np.isin(self.layer, layers)
        return _Steps(self.layer[keep], self.option[keep], self.time[keep], self.freed[keep])

    def least(self, need: Floats) -> Floats:
        """Return the least times that free so many bytes, with the last step taken in part; infinite where all steps
        free less."""
        freed = np.concatenate(([0.0], np.cumsum(self.freed)))
        times = np.interp(need, freed, np.concatenate(([0.0], np.cumsum(self.time))))
        return np.where(need > freed[-1] * (1 + _SAME), inf, times)


def choose(times: Floats, memory: Floats, room: float, enough: float | None = None) -> Choice:
    """Choose an option for each layer, a row of both tables. Options that are not there take infinite time.

    The choice is the best one. Given `enough`, it need only be within that, or be known to be beyond it.
    """
    rows = np.arange(len(times))
    fastest = np.where(times == times.min(axis=1, keepdims=True), memory, inf).argmin(axis=1)
    time, need = float(times[rows, fastest].sum()), float(memory[rows, fastest].sum()) - room
    if need <= room * _SAME:
        return Choice(time, time, fastest)
    if float(np.where(times < inf, memory, inf).min(axis=1).sum()) > room * (1 + _SAME):
        return NOTHING_FITS
    steps = _steps(times, memory, fastest)
    least = time + float(steps.least(np.array([need]))[0])
    picks = _rounded(times, memory, fastest, steps, need)
    reached = float(times[rows, picks].sum())
    answered = enough is not None and (reached <= enough or least > enough)
    if answered or reached <= least * (1 + _SAME):
        return Choice(least, reached, picks)
    return _searched(times, memory, room, steps, Choice(least, reached, picks))


def _steps(times: Floats, memory: Floats, fastest: Positions) -> _Steps:
    """Return the steps of all layers: the lower hull of the times and bytes of each."""
    at, layers = fastest, np.arange(len(times))
    rounds = []
    while len(layers):
        freed = memory[layers, at][:, None] - memory[layers]
        cost = times[layers] - times[layers, at][:, None]
        rates = np.where((freed > 0) & (cost < inf), cost, inf) / np.where(freed > 0, freed, 1.0)
        least = rates.min(axis=1)
        # Of equal rates the longest step, so that none of it is left.
        option = np.where(rates == least[:, None], freed, -inf).argmax(axis=1)
        there = np.flatnonzero(least < inf)
        layers, at = layers[there], option[there]
        rounds.append((least[there], layers, at, cost[there, at], freed[there, at]))
        more = (memory[layers] < memory[layers, at][:, None]) & (times[layers] < inf)
        layers, at = layers[more.any(axis=1)], at[more.any(axis=1)]
    rate, layer, option, time, freed = (np.concatenate(column) for column in zip(*rounds, strict=True))
    order = np.argsort(rate, kind="stable")
    return _Steps(layer[order], option[order], time[order], freed[order])


def _rounded(times: Floats, memory: Floats, fastest: Positions, steps: _Steps, need: float) -> Positions:
    """Take whole steps until enough is freed; in place of the last one, the cheapest change that frees the others."""
    picks = fastest.copy()
    for layer, option, freed in zip(steps.layer, steps.option, steps.freed, strict=True):
        if freed >= need:
            rows = np.arange(len(times))[:, None]
            saves = memory[rows, picks[:, None]] - memory
            costs = np.where(saves >= need, times - times[rows, picks[:, None]], inf)
            layer, option = np.unravel_index(int(costs.argmin()), costs.shape)
            need = 0.0
        else:
            need -= freed
        picks[layer] = option
        if need <= 0:
            break
    return picks


def _searched(times: Floats, memory: Floats, room: float, steps: _Steps, known: Choice) -> Choice:
    """Extend choices layer by layer. Return the best one, or the known one where they are too many."""
    open_layers = np.unique(steps.layer)
    assert known.picks is not None
    closed = np.setdiff1d(np.arange(len(times)), open_layers)
    fastest = np.where(times == times.min(axis=1, keepdims=True), memory, inf).argmin(axis=1)
    base = fastest.copy()
    time = np.array([times[closed, base[closed]].sum()])
    held = np.array([memory[closed, base[closed]].sum()])
    history: list[tuple[Positions, Positions]] = []
    for done, layer in enumerate(open_layers):
        there = np.flatnonzero(times[layer] < inf)
        origin = np.repeat(np.arange(len(time)), len(there))
        option = np.tile(there, len(time))
        time, held = time[origin] + times[layer, option], held[origin] + memory[layer, option]
        others = open_layers[done + 1 :]
        quick = float(times[others, fastest[others]].sum())
        need = held + float(memory[others, fastest[others]].sum()) - room * (1 + _SAME)
        after = steps.without(open_layers[: done + 1])
        promising = time + quick + after.least(np.maximum(need, 0.0)) < known.time
        kept = _undominated(time, held, np.flatnonzero(promising))
        if not len(kept):
            return Choice(known.time, known.time, known.picks)
        if len(kept) > _MOST_CHOICES:
            return known
        time, held = time[kept], held[kept]
        history.append((origin[kept], option[kept]))
    best = int(time.argmin())
    reached, picks = float(time[best]), base
    for layer, (origin, option) in zip(open_layers[::-1], reversed(history), strict=True):
        picks[layer] = option[best]
        best = int(origin[best])
    return Choice(reached, reached, picks)


def _undominated(time: Floats, held: Floats, among: Positions) -> Positions:
    """Return those of some choices that no other one beats in both time and bytes, one of each that are equal."""
    order = among[np.lexsort((time[among], held[among]))]
    lowest = np.minimum.accumulate(time[order])
    keep = np.ones(len(order), bool)
    keep[1:] = time[order][1:] < lowest[:-1]
    return order[keep]
