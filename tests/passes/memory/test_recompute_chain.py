"""The planner on chains, against every subset of elements that could be kept."""

from __future__ import annotations

from itertools import combinations
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.passes.memory import recompute_chain
from penstock.passes.memory.recompute_chain import Element, KeptElements, cheapest

BUDGETS = 20


def cost(chain: list[Element], in_flight: int, kept: tuple[int, ...]) -> tuple[int, float]:
    """Bytes and seconds of a choice, by the definition."""
    runs, run, seconds = [0], 0, 0.0
    for i, element in enumerate(chain):
        if i in kept:
            run = 0
        else:
            run += element.bytes
            seconds += element.seconds
        runs.append(run)
    return in_flight * sum(chain[i].bytes for i in kept) + max(runs), seconds


def everything(chain: list[Element], in_flight: int) -> list[tuple[int, float]]:
    n = len(chain)
    return [cost(chain, in_flight, kept) for size in range(n + 1) for kept in combinations(range(n), size)]


def budgets(costs: list[tuple[int, float]]) -> list[int]:
    """From what nothing fits into to what everything fits into."""
    least, most = min(b for b, _ in costs), max(b for b, _ in costs)
    return [least - 1 + (most - least + 1) * i // (BUDGETS - 1) for i in range(BUDGETS)]


# Seconds are sums of powers of two, so that equal sums are equal numbers in any order.
elements = st.builds(Element, st.integers(0, 40), st.integers(0, 64).map(lambda n: n / 8))
chains = st.lists(elements, min_size=1, max_size=12)


@given(chains, st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_the_cheapest_choice_is_that_of_exhaustive_search(chain: list[Element], in_flight: int) -> None:
    costs = everything(chain, in_flight)
    for budget in budgets(costs):
        fits = [seconds for size, seconds in costs if size <= budget]
        found = cheapest(chain, in_flight, budget)
        if found is None:
            assert not fits
            continue
        assert (found.bytes, found.seconds) == cost(chain, in_flight, found.kept)
        assert found.bytes <= budget
        assert found.seconds == min(fits)


@pytest.mark.parametrize("seed", range(4))
def test_chains_of_twelve(seed: int) -> None:
    """The longest that exhaustive search is asked about: all 4096 choices, at 20 budgets."""
    random = Random(seed)
    chain = [Element(random.randrange(1, 40), float(random.randrange(1, 30))) for _ in range(12)]
    costs = everything(chain, 3)
    for budget in budgets(costs):
        fits = [seconds for size, seconds in costs if size <= budget]
        found = cheapest(chain, 3, budget)
        assert (found.seconds if found else None) == min(fits, default=None)


def greedy(chain: list[Element], in_flight: int, budget: int) -> KeptElements | None:
    """A wrong planner: lets go of the element that is cheapest for its bytes until the rest fits."""
    kept = list(range(len(chain)))
    while kept and cost(chain, in_flight, tuple(kept))[0] > budget:
        kept.remove(min(kept, key=lambda i: chain[i].seconds / max(chain[i].bytes, 1)))
    size, seconds = cost(chain, in_flight, tuple(kept))
    return KeptElements(tuple(kept), size, seconds) if size <= budget else None


def test_a_greedy_planner_is_found_out() -> None:
    """Control: the comparison above tells a planner that is not optimal."""
    chain = [Element(4, 1.0), Element(10, 2.0), Element(3, 1.0), Element(6, 1.0)]
    costs, worse = everything(chain, 2), 0
    for budget in budgets(costs):
        fits = [seconds for size, seconds in costs if size <= budget]
        found = greedy(chain, 2, budget)
        best = cheapest(chain, 2, budget)
        assert (best is None) == (not fits)
        worse += bool(fits) and (found is None or found.seconds > min(fits))
    assert worse


def test_nothing_is_computed_again_where_all_fits() -> None:
    chain = [Element(4, 1.0), Element(10, 2.0)]
    assert cheapest(chain, 3, 42) == KeptElements((0, 1), 42, 0.0)
    found = cheapest(chain, 3, 41)
    assert found is not None
    assert found.seconds > 0


def test_few_combinations_still_give_a_choice_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompute_chain, "WIDTH", 3)
    chain = [Element(3 + i * i % 7, 1.0 + i * 5 % 11) for i in range(10)]
    exact = min(size for size, _ in everything(chain, 2))
    found = cheapest(chain, 2, 2 * exact)
    assert found is not None
    assert found.bytes <= 2 * exact
    assert (found.bytes, found.seconds) == cost(chain, 2, found.kept)
