"""The search for layouts beside looking at all of them, on drawn costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from math import inf

import numpy as np
import pytest

from penstock.planning.layouts.alike import places_in_blocks
from penstock.planning.layouts.search import LayoutCosts, MovedValue, Taker, best_options


def drawn(seed: int) -> LayoutCosts:
    """Costs of up to eight choices with up to four options. Values go to one to three takers, of which some are the
    choice that makes them: blocks that follow each other."""
    draw = np.random.default_rng(seed)
    counts = [int(n) for n in draw.integers(1, 5, int(draw.integers(2, 9)))]
    crossings = []
    for _ in range(int(draw.integers(1, 10))):
        states, needs = (int(n) for n in draw.integers(1, 4, 2))
        maker = int(draw.integers(len(counts)))
        takers = tuple(
            Taker(choice, tuple(draw.integers(0, needs, counts[choice]).tolist()))
            for choice in draw.integers(0, len(counts), int(draw.integers(1, 4))).tolist()
        )
        seconds = draw.uniform(0, 1, (states, needs)) * (draw.uniform(size=(states, needs)) < 0.7)
        crossings.append(MovedValue(maker, tuple(draw.integers(0, states, counts[maker]).tolist()), takers, seconds))
    alone, held = ([draw.uniform(0, 1, n).tolist() for n in counts] for _ in range(2))
    return LayoutCosts(alone, held, crossings)


def every(costs: LayoutCosts) -> list[tuple[int, ...]]:
    return [options for options in product(*map(range, map(len, costs.seconds))) if costs.held(options) <= costs.room]


def least(costs: LayoutCosts, price: Callable[[LayoutCosts, tuple[int, ...]], float]) -> tuple[int, ...]:
    return min(every(costs), key=lambda options: price(costs, options))


def by_taker(costs: LayoutCosts, options: tuple[int, ...]) -> float:
    """Seconds where each taker moves a value for itself."""
    crossings = [replace(crossing, takers=(taker,)) for crossing in costs.crossings for taker in crossing.takers]
    return replace(costs, crossings=crossings).total(options)


def alone(costs: LayoutCosts, options: tuple[int, ...]) -> float:
    return replace(costs, crossings=[]).total(options)


def test_the_programme_finds_the_best_of_all_options() -> None:
    worse = {by_taker: 0, alone: 0}
    for seed in range(200):
        costs = drawn(seed)
        middle = float(np.median([costs.held(options) for options in every(costs)]))
        for room in (inf, middle):
            limited = replace(costs, room=room)
            best = best_options(limited)
            assert best.options is not None
            assert limited.held(best.options) <= room * (1 + 1e-6)
            least_seconds = min(map(limited.total, every(limited)))
            assert limited.total(best.options) == pytest.approx(least_seconds, rel=1e-6, abs=1e-9), seed
            assert best.bound == pytest.approx(least_seconds, rel=1e-5, abs=1e-9)
            for price in worse:
                worse[price] += limited.total(least(limited, price)) > least_seconds * (1 + 1e-6)
    # Controls: what counts no moves, or the same move several times, finds other options.
    assert worse[alone] > 200
    assert worse[by_taker] > 15


def test_nothing_within_too_little_room() -> None:
    costs = drawn(3)
    least_bytes = sum(map(min, costs.nbytes))
    assert best_options(replace(costs, room=least_bytes * 0.99)).options is None
    assert best_options(replace(costs, room=least_bytes * 1.000001)).options is not None


def test_the_same_costs_have_the_same_answer() -> None:
    assert best_options(drawn(5)) == best_options(drawn(5))


@pytest.mark.parametrize(
    ("marks", "expected"),
    [
        ("", []),
        ("abc", [0, 1, 2]),
        ("xabcabcabcy", [0, 1, 2, 3, 1, 2, 3, 1, 2, 3, 10]),
        # Blocks of two kinds, one behind the other; what is left of a block at the end is alike, too.
        ("ababaqrsqrs", [0, 1, 0, 1, 0, 5, 6, 7, 5, 6, 7]),
        ("aaa", [0, 0, 0]),
        # From four blocks on, every second one is alike; their number may be odd.
        ("aaaa", [0, 1, 0, 1]),
        ("xababababay", [0, 1, 2, 3, 4, 1, 2, 3, 4, 1, 10]),
        ("xababababaaby", [0, 1, 2, 3, 4, 1, 2, 3, 4, 1, 10, 11, 12]),
    ],
)
def test_blocks_that_follow_each_other_are_alike(marks: str, expected: list[int]) -> None:
    assert places_in_blocks([ord(mark) for mark in marks]) == expected
