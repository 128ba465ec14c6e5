"""Candidate stages of a joint problem, and what they cost at least.

A candidate is a pair of sets of layers, each closed under successors, of which one holds the other: the stage is the
difference. What leads into the larger set from outside, and what leads into the smaller one, are the borders of the
stage. So tables by set give the bytes of both for each layer and option.

`in_flight_most` answers the question of the search: for how many microbatches in flight can a stage keep what it saved,
and still take no more than a given time?
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf

import numpy as np
import numpy.typing as npt

from penstock.passes.placement.ideals import Ideals, bits

from .options import Choice, Floats, choose
from .profiles import JointProblem

_SAME = 1e-12


@dataclass(frozen=True, slots=True)
class _Degree:
    """Options of all layers under one tensor parallel degree, as tables by layer and option.

    `entering[i]` has the bytes that lead into set i from outside, `leaving[i]` those that lead from outside into it.
    """

    time: Floats
    parameters: Floats
    saved: Floats
    fixed: Floats
    entering: Floats
    leaving: Floats


@dataclass(slots=True)
class _Answers:
    """Facts about a candidate with given degrees: the time of its fastest options, and how many microbatches in
    flight these have room for. `solved` has choices for more."""

    time: float
    most: int
    solved: dict[int, Choice] = field(default_factory=dict)


class StageTables:
    """Costs of all candidates. A candidate is a pair of positions in `sets`: the larger set, and the smaller one."""

    def __init__(self, problem: JointProblem, sets: Ideals) -> None:
        self.problem, self.sets = problem, sets.sets
        self._member = sets.rows().astype(np.float64)
        self._degrees = {t: self._degree(t) for t in problem.tensor_degrees}
        self._answers: dict[tuple[int, int, int, int], _Answers] = {}
        self._room: dict[tuple[int, int, int], int] = {}
        self.uncertain = False

    def _degree(self, t: int) -> _Degree:
        layers = self.problem.layers
        width = max(len(layer.options.get(t, ())) for layer in layers)
        tables = np.full((4, len(layers), width), [[[inf]], [[0.0]], [[0.0]], [[0.0]]])
        borders = np.zeros((2, len(self.sets), len(layers), width))
        for v, layer in enumerate(layers):
            for k, option in enumerate(layer.options.get(t, ())):
                tables[:, v, k] = option.time, option.parameters, option.saved, option.fixed
                for (source, target), moved in self.problem.edges.items():
                    if target == v:
                        borders[0, :, v, k] += (1 - self._member[source]) * (moved + option.incoming.get(source, 0.0))
                    if source == v:
                        borders[1, :, v, k] += self._member[target] * (moved + option.outgoing.get(target, 0.0))
        return _Degree(*tables, *borders)

    @cached_property
    def inside(self) -> npt.NDArray[np.bool_]:
        """The candidates: entry [u, w] says whether set w is a part of set u, and not all of it."""
        common = self._member.T @ self._member
        sizes = self._member.sum(axis=0)
        inside: npt.NDArray[np.bool_] = (common == sizes[None, :]) & (sizes[:, None] > sizes[None, :])
        return inside

    @cached_property
    def work(self) -> Floats:
        """The least time x devices of each set, without transfers."""
        least = np.full(len(self.problem.layers), inf)
        for t, degree in self._degrees.items():
            least = np.minimum(least, t * degree.time.min(axis=1))
        return _finite(least) @ self._member

    def least(self, t: int, d: int) -> Floats:
        """Return a lower bound on the time of every candidate under given degrees, whatever memory says."""
        time, parameters, moved = self._least_parts[t]
        problem = self.problem
        gradients = 4 * (d - 1) / (d * problem.microbatches * problem.bandwidth)
        bound = (time + 2 / problem.bandwidth * moved) / d + gradients * parameters
        return np.where(self.inside & np.isfinite(time), bound, inf)

    @cached_property
    def _least_parts(self) -> dict[int, tuple[Floats, Floats, Floats]]:
        return {t: self._parts(degree) for t, degree in self._degrees.items()}

    def _parts(self, degree: _Degree) -> tuple[Floats, Floats, Floats]:
        """Return the time, the bytes of parameters and of borders that each candidate has at least."""
        there = degree.time < inf
        missing = (~there.any(axis=1)).astype(np.float64) @ self._member
        time, parameters = (
            _finite(np.where(there, table, inf).min(axis=1)) @ self._member
            for table in (degree.time, degree.parameters)
        )
        # A border table is zero for layers outside of its set or, for edges that leave, inside.
        entering = _finite(np.where(there, degree.entering, inf).min(axis=2)) * self._member.T
        leaving = _finite(np.where(there, degree.leaving, inf).min(axis=2)) * (1 - self._member.T)
        moved = entering.sum(axis=1)[:, None] - entering @ self._member + (leaving @ self._member).T
        times = np.where(missing[:, None] > missing[None, :], inf, time[:, None] - time[None, :])
        return times, parameters[:, None] - parameters[None, :], moved

    def tables(self, u: int, w: int, t: int, d: int) -> tuple[list[int], Floats, Floats, Floats]:
        """Return the layers of a candidate, the times of their options, and their bytes for each microbatch in flight
        and beside them."""
        layers = list(bits(self.sets[u] & ~self.sets[w]))
        degree, problem = self._degrees[t], self.problem
        gradients = 4 * (d - 1) / (d * problem.microbatches * problem.bandwidth)
        moved = degree.entering[u, layers] + degree.leaving[w, layers]
        times = degree.time[layers] / d + gradients * degree.parameters[layers] + 2 / (d * problem.bandwidth) * moved
        return layers, times, degree.saved[layers], degree.fixed[layers]

    def room_for(self, u: int, w: int, t: int) -> int:
        """Return the most microbatches in flight that a stage has room for, up to all of a batch."""
        most = self._room.get((u, w, t))
        if most is None:
            layers = list(bits(self.sets[u] & ~self.sets[w]))
            degree, room = self._degrees[t], self.problem.memory * (1 + _SAME)
            there, saved, fixed = degree.time[layers] < inf, degree.saved[layers], degree.fixed[layers]
            most, high = 0, self.problem.microbatches
            while most < high:
                middle = (most + high + 1) // 2
                smallest = float(np.where(there, saved * middle + fixed, inf).min(axis=1).sum())
                most, high = (middle, high) if smallest <= room else (most, middle - 1)
            self._room[u, w, t] = most
        return most

    def in_flight_most(self, u: int, w: int, t: int, d: int, most: int, within: float, hopeful: bool) -> int:
        """Return the most microbatches in flight with which a stage takes no more than a time, if it has room for them.

        Where a choice of options is not known exactly, `hopeful` says whether its bound counts, or what was reached.
        """
        if within == inf:
            return most
        answers = self._answers.get((u, w, t, d))
        if answers is None:
            answers = self._answers[u, w, t, d] = self._fastest(u, w, t, d)
        if answers.time > within * (1 + _SAME):
            return 0
        low, high = min(answers.most, most), most
        if low == high:
            return high
        _, times, saved, fixed = self.tables(u, w, t, d)
        while low < high:
            middle = (low + high + 1) // 2
            choice = answers.solved.get(middle)
            if choice is None or choice.least <= within < choice.time:
                choice = choose(times, saved * middle + fixed, self.problem.memory, within)
                answers.solved[middle] = choice
            self.uncertain |= choice.least <= within * (1 + _SAME) < choice.time
            if (choice.least if hopeful else choice.time) <= within * (1 + _SAME):
                low = middle
            else:
                high = middle - 1
        return low

    def _fastest(self, u: int, w: int, t: int, d: int) -> _Answers:
        _, times, saved, fixed = self.tables(u, w, t, d)
        rows = np.arange(len(times))
        fastest = np.where(times == times.min(axis=1, keepdims=True), saved + fixed, inf).argmin(axis=1)
        each, beside = float(saved[rows, fastest].sum()), float(fixed[rows, fastest].sum())
        room = self.problem.memory * (1 + _SAME) - beside
        most = 0 if room < 0 else self.problem.microbatches if each <= 0 else int(room // each)
        return _Answers(float(times[rows, fastest].sum()), most)

    def chosen(self, u: int, w: int, t: int, d: int, in_flight: int) -> dict[int, str]:
        """Return the best options of a stage, by layer."""
        layers, times, saved, fixed = self.tables(u, w, t, d)
        picks = choose(times, saved * in_flight + fixed, self.problem.memory).picks
        assert picks is not None, "the stage does not fit, and the search took it"
        options = (self.problem.layers[layer].options[t] for layer in layers)
        return {layer: each[pick].name for layer, each, pick in zip(layers, options, picks, strict=True)}


def _finite(table: Floats) -> Floats:
    """Return a table with zeros in place of what is missing."""
    return np.where(np.isfinite(table), table, 0.0)


def neighbours(problem: JointProblem) -> tuple[list[set[int]], list[set[int]]]:
    """Return the layers right after each one, and right before it."""
    after: list[set[int]] = [set() for _ in problem.layers]
    before: list[set[int]] = [set() for _ in problem.layers]
    for source, target in problem.edges:
        after[source].add(target)
        before[target].add(source)
    return after, before


def sets_along(lines: Sequence[Sequence[int]], layers: int) -> Ideals:
    """Return the sets that several linear orders pass through, smaller ones first."""
    sets = {0}
    for line in lines:
        held = 0
        for layer in line:
            held |= 1 << layer
            sets.add(held)
    ordered = sorted(sets, key=lambda each: (each.bit_count(), each))
    return Ideals(layers, tuple(ordered), ())
