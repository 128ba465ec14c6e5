"""The order by need against a check of every pair, over random graphs; that little is moved; and circles."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.frontends.order import NeedCircle, order_by_need


def _broken(order: list[int], needs: list[set[str]], makes: list[list[str]]) -> bool:
    """Say by brute force that some node lies before a maker of what it needs."""
    place = {number: i for i, number in enumerate(order)}
    return any(place[a] < place[b] for a, names in enumerate(needs) for b in range(len(needs)) if names & {*makes[b]})


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.integers(0, 1 << 30))
def test_every_node_is_behind_what_it_needs(count: int, seed: int) -> None:
    chance = random.Random(seed)
    needs = [{f"v{j}" for j in range(i) if chance.random() < 0.3} | {"elsewhere"} for i in range(count)]
    makes = [[f"v{i}"] for i in range(count)]
    assert order_by_need(needs, makes) == list(range(count))  # what is in order stays
    mixed = chance.sample(range(count), count)
    needs, makes = [needs[i] for i in mixed], [makes[i] for i in mixed]
    order = order_by_need(needs, makes)
    assert sorted(order) == list(range(count))
    assert not _broken(order, needs, makes)
    if order != list(range(count)):
        assert _broken(list(range(count)), needs, makes)  # nothing was moved without a reason


def test_only_what_is_lacking_is_fetched() -> None:
    needs, makes = [set(), {"d"}, set(), set()], [["a"], ["b"], ["c"], ["d"]]
    assert order_by_need(needs, makes) == [0, 3, 1, 2]


def test_a_long_chain_backwards() -> None:
    count = 20_000
    order = order_by_need([{f"v{i + 1}"} for i in range(count)], [[f"v{i}"] for i in range(count)])
    assert order == list(reversed(range(count)))


@pytest.mark.parametrize(("needs", "numbers"), [([{"c"}, {"a"}, {"b"}, set()], (0, 2, 1)), ([{"a"}], (0,))])
def test_a_circle_is_named(needs: list[set[str]], numbers: tuple[int, ...]) -> None:
    with pytest.raises(NeedCircle) as caught:
        order_by_need(needs, [[name] for name in "abcd"[: len(needs)]])
    assert caught.value.numbers == numbers
