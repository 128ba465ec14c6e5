"""Widths of layers against all choices."""

from __future__ import annotations

from itertools import product
from math import inf

import numpy as np
import pytest

from penstock.planning.widths.search import WidthCosts, best_widths

WIDTHS, LAYERS = (1, 2, 4, 8), 8
LIMITS = (1.0, 1.25, 1.5, 3.0, inf)
EVERY = np.array(list(product(range(len(WIDTHS)), repeat=LAYERS)))


def drawn(seed: int) -> WidthCosts:
    """Layers of which some scale well, and some lose by sums."""
    draw = np.random.default_rng(seed)
    alone, sums = draw.exponential(1.0, LAYERS), draw.exponential(0.3, LAYERS)
    widths = np.array(WIDTHS)
    seconds = alone[:, None] / widths**0.9 + sums[:, None] * np.log2(widths) * draw.uniform(0.5, 1.5, (LAYERS, 4))
    moves = draw.exponential(0.2, (LAYERS - 1, 4, 4)) * (1 - np.eye(4))
    return WidthCosts(WIDTHS, seconds, moves)


def test_widths_are_the_best_of_all() -> None:
    alone = wrong = 0
    for seed in range(100):
        costs = drawn(seed)
        layers = np.arange(LAYERS)
        total = costs.seconds[layers, EVERY].sum(axis=1)
        total += costs.moves[layers[:-1], EVERY[:, :-1], EVERY[:, 1:]].sum(axis=1)
        used = costs.seconds * np.array(WIDTHS)
        amplified = (used[layers, EVERY] / used[layers, 0]).max(axis=1)
        for limit in LIMITS:
            choice = best_widths(costs, limit)
            best = total[amplified <= limit * (1 + 1e-12)].min()
            assert costs.total(choice) == pytest.approx(best, rel=1e-12)
            assert max(used[i, k] / used[i, 0] for i, k in enumerate(choice)) <= limit * (1 + 1e-9)
            alone += choice == [0] * LAYERS
            # Control: the fastest width of every layer by itself.
            by_itself = np.where(costs.allowed(limit), costs.seconds, inf).argmin(axis=1).tolist()
            wrong += costs.total(by_itself) > best * 1.001
    assert wrong > 100
    assert 100 <= alone < 300


def test_a_layer_without_time_keeps_no_other_from_its_width() -> None:
    seconds = np.array([[4.0, 2.0, 1.0], [0.0, 0.0, 0.0], [4.0, 2.0, 1.0]])
    costs = WidthCosts((1, 2, 4), seconds, np.full((2, 3, 3), 0.1) * (1 - np.eye(3)))
    assert best_widths(costs) == best_widths(costs, 1.0) == [2, 2, 2]
    # Control: with time of its own, it stays on one device.
    costs.seconds[1] = [0.5, 2.0, 2.0]
    assert best_widths(costs) == [2, 0, 2]
