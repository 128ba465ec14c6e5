"""Ways between layouts: as cheap as an exhaustive search over all layouts finds, and never dearer than a fixed order."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import permutations, product
from math import inf, prod
from random import Random

import pytest

from penstock.ir.sharding import paths
from penstock.ir.sharding.paths import COLLECTIVE, moves
from penstock.ir.types import TensorType
from penstock.support.errors import VerifyError

SIZES = {"a": 2, "b": 4, "c": 2}
SHAPE = (2**10, 2**9)


def layouts(axes: tuple[str, ...], rank: int) -> list[TensorType]:
    """Return every layout over some axes: each splits a dimension, in any order, leaves a sum, or neither."""
    listed = set[TensorType]()
    for order in permutations(axes):
        for places in product(range(-2, rank), repeat=len(axes)):
            split = [tuple(a for a, at in zip(order, places, strict=True) if at == dim) for dim in range(rank)]
            partial = [a for a, at in zip(order, places, strict=True) if at == -2]
            listed.add(TensorType("f32", SHAPE[:rank]).laid(split, partial))
    return sorted(listed, key=str)


def share(t: TensorType) -> float:
    return t.nbytes / prod(SIZES[a] for axes in t.axes for a in axes)


def step(before: TensorType, after: TensorType, sliced: Collection[str] = "abc") -> float:
    """Return the cost of a single change from one layout to another, written without the moves of the search. Dimensions
    are sliced along some axes alone."""
    dims = range(before.rank)
    changed = [i for i in dims if before.axes_of(i) != after.axes_of(i)]
    summed = [a for a in before.partial if a not in after.partial]
    if set(after.partial) - set(before.partial) or len(changed) > 2:
        return inf
    k = prod(SIZES[a] for a in summed)
    if not changed:
        return share(before) * 2 * (k - 1) / k + COLLECTIVE if summed else inf
    if len(changed) == 2:
        for taker, giver in (changed, changed[::-1]):
            over = after.axes_of(taker)[len(before.axes_of(taker)) :]
            whole = (*after.axes_of(giver), *over) == before.axes_of(giver)
            if not summed and over and whole and (*before.axes_of(taker), *over) == after.axes_of(taker):
                n = prod(SIZES[a] for a in over)
                return share(before) * (n - 1) / n + COLLECTIVE
        return inf
    old, new = before.axes_of(changed[0]), after.axes_of(changed[0])
    if new[: len(old)] == old:
        over = new[len(old) :]
        if not summed:
            return 0.0 if set(over) <= set(sliced) else inf
        return share(before) * (k - 1) / k + COLLECTIVE if over == tuple(summed) and len(over) == 1 else inf
    if old[: len(new)] == new and not summed:
        return share(before) * (prod(SIZES[a] for a in old[len(new) :]) - 1) + COLLECTIVE
    return inf


def cheapest(every: list[TensorType], goal: TensorType) -> dict[TensorType, float]:
    """Return the least cost from all layouts to one, by going over all single changes until nothing gets less."""
    cost = dict.fromkeys(every, inf) | {goal: 0.0}
    sliced = [axis for axes in goal.axes for axis in axes]
    edges = [(x, y, c) for x in every for y in every if x != y and (c := step(x, y, sliced)) < inf]
    while True:
        less = False
        for x, y, c in edges:
            if cost[y] + c < cost[x] - 1e-6:
                cost[x], less = cost[y] + c, True
        if not less:
            return cost


def cost_of(before: TensorType, after: TensorType) -> float:
    return sum(move.sent + (COLLECTIVE if move.sent else 0) for move in moves(before, after, SIZES))


def test_no_way_is_cheaper_than_the_one_that_is_taken() -> None:
    """All pairs of layouts of a matrix over two axes are searched exhaustively."""
    every = layouts(("a", "b"), 2)
    for after in every:
        least = cheapest(every, after)
        for before in every:
            if set(after.partial) <= set(before.partial):
                assert cost_of(before, after) == pytest.approx(least[before]), f"{before} to {after}"
            else:
                with pytest.raises(VerifyError):
                    moves(before, after, SIZES)


def in_order(before: TensorType, after: TensorType) -> float:
    """Return the cost of sums first, then changes of place, gathers, and parts: each done where it can be at once."""
    at, cost, rank = before, 0.0, before.rank

    def go(to: TensorType) -> None:
        nonlocal at, cost
        cost, at = cost + (step(at, to) if to != at else 0.0), to

    for axis in [a for a in at.partial if a not in after.partial]:
        left = tuple(a for a in at.partial if a != axis)
        dim = next((i for i in range(rank) if after.axes_of(i)[: len(at.axes_of(i)) + 1] == (*at.axes_of(i), axis)), -1)
        go(at.laid([(*at.axes_of(i), axis) if i == dim else at.axes_of(i) for i in range(rank)], left))
    for join, split in product(range(rank), repeat=2):
        axes = at.axes_of(join)
        if join != split and axes and after.axes_of(split) == axes and not at.axes_of(split):
            go(at.laid([() if i == join else axes if i == split else at.axes_of(i) for i in range(rank)], at.partial))
    for dim in range(rank):
        axes, wanted = at.axes_of(dim), after.axes_of(dim)
        kept = next((i for i, pair in enumerate(zip(axes, wanted, strict=False)) if pair[0] != pair[1]), None)
        kept = min(len(axes), len(wanted)) if kept is None else kept
        go(at.laid([axes[:kept] if i == dim else at.axes_of(i) for i in range(rank)], at.partial))
    for dim in range(rank):
        go(at.laid([after.axes_of(i) if i <= dim else at.axes_of(i) for i in range(rank)], at.partial))
    assert at == after
    return cost


def drawn(random: Random, summed: tuple[str, ...] = ("a", "b", "c")) -> TensorType:
    """Draw a layout of three axes over two dimensions."""
    split: list[list[str]] = [[], []]
    partial = []
    for axis in random.sample("abc", 3):
        where = random.randrange(-2, 2)
        if where >= 0:
            split[where].append(axis)
        elif where == -2 and axis in summed:
            partial.append(axis)
    return TensorType("f32", SHAPE).laid([tuple(axes) for axes in split], partial)


def test_two_thousand_ways_cost_at_most_those_in_a_fixed_order() -> None:
    random, cheaper = Random(0), 0
    for _ in range(2000):
        before = drawn(random)
        after = drawn(random, before.partial)
        ours, theirs = cost_of(before, after), in_order(before, after)
        assert ours <= theirs + 1e-6, f"{before} to {after}"
        cheaper += ours < theirs - 1e-6
    assert cheaper > 200


def away(at: TensorType, goal: TensorType) -> int:
    """Return how far a layout is from another: 2 for each axis at a wrong place, 1 for each that is still to be split."""
    count = 2 * len(set(at.partial) - set(goal.partial))
    for dim in range(at.rank):
        have, wanted = at.axes_of(dim), goal.axes_of(dim)
        right = next((i for i, pair in enumerate(zip(have, wanted, strict=False)) if pair[0] != pair[1]), None)
        right = min(len(have), len(wanted)) if right is None else right
        count += 2 * (len(have) - right)
    there = {*at.partial, *(axis for axes in at.axes for axis in axes)}
    return count + sum(axis not in there for axes in goal.axes for axis in axes)


def greedy(before: TensorType, after: TensorType, every: list[TensorType]) -> float:
    """Return the cost of a greedy search: of all single changes that come nearer it takes the one that costs least for
    each step nearer."""
    at, cost = before, 0.0
    sliced = tuple(axis for axes in after.axes for axis in axes)
    while at != after:
        here = away(at, after)
        nearer = [
            (step(at, to, sliced) / (here - left), left, str(to), to)
            for to in every
            if (left := away(to, after)) < here
        ]
        to = min(nearer)[3]
        cost, at = cost + step(at, to, sliced), to
    return cost


def test_two_thousand_ways_cost_at_most_those_of_a_greedy_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control is the search's own way without a search, which the greedy one often undercuts."""
    random, every, cheaper = Random(2), layouts(("a", "b", "c"), 2), 0
    pairs = [(one, drawn(random, one.partial)) for one in (drawn(random) for _ in range(2000))]
    theirs = [greedy(*pair, every) for pair in pairs]
    for pair, other in zip(pairs, theirs, strict=True):
        assert cost_of(*pair) <= other + 1e-6, f"{pair[0]} to {pair[1]}"
        cheaper += cost_of(*pair) < other - 1e-6
    assert cheaper > 900
    monkeypatch.setattr(paths, "SEARCHED", 0)
    paths._moves.cache_clear()
    assert any(cost_of(*pair) > other + 1e-6 for pair, other in zip(pairs, theirs, strict=True))
    paths._moves.cache_clear()


def test_control_a_search_without_changes_of_place_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths._Search, "_swaps", lambda self, at: ())
    paths._moves.cache_clear()
    try:
        with pytest.raises(AssertionError):
            test_no_way_is_cheaper_than_the_one_that_is_taken()
    finally:
        paths._moves.cache_clear()


@pytest.mark.parametrize(
    ("before", "after", "kinds"),
    [
        ("[/a,_]+b", "[/a,/b]", ["reduce_scatter"]),
        ("[/a,_]", "[_,/b]", ["part", "all_gather"]),
        ("[/a/b,_]", "[_,/a/b]", ["all_to_all"]),
        ("[_,_]+a+b", "[_,_]", ["all_reduce"]),
        ("[_,_]+a", "[/b,_]", ["part", "all_reduce"]),
    ],
)
def test_moves_come_in_the_cheapest_order(before: str, after: str, kinds: list[str]) -> None:
    def read(text: str) -> TensorType:
        dims, *partial = text.split("+")
        axes = [tuple(part.split("/")[1:]) for part in dims.strip("[]").split(",")]
        return TensorType("f32", SHAPE).laid(axes, partial)

    assert [move.kind for move in moves(read(before), read(after), SIZES)] == kinds


def test_a_dimension_of_one_element_is_no_place_to_rest() -> None:
    """Each rank would have the whole of its part: bytes are those that a device holds, padding included."""
    t = TensorType("f32", (1, 4096, 768))
    before, after = t.laid([(), ("b",), ("a",)]), t.laid([(), ("a",), ("b",)])
    way = moves(before, after, SIZES)
    assert all(not move.after.axes_of(0) for move in way)
    at = [before, *(move.after for move in way)]
    assert max(layout.local(SIZES).nbytes for layout in at) <= 4 * t.nbytes // 8


def test_searches_end_with_many_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six axes over four dimensions have more layouts than can be searched."""
    sizes = dict.fromkeys("abcdef", 2)
    t = TensorType("f32", (64,) * 4)
    before = t.laid([("a", "b"), ("c",), (), ("d",)], ("e", "f"))
    after = t.laid([(), ("b", "d"), ("a", "c", "e"), ()])
    searched = []
    kept = paths._Search.from_layout

    def counted(self: paths._Search, at: TensorType) -> Iterator[paths.Move]:
        searched.append(at)
        return kept(self, at)

    monkeypatch.setattr(paths._Search, "from_layout", counted)
    paths._moves.cache_clear()
    way = moves(before, after, sizes)
    assert len(searched) <= paths.SEARCHED
    assert way[-1].after == after
    paths._moves.cache_clear()


def test_the_plain_way_leads_everywhere_and_is_never_cheaper(monkeypatch: pytest.MonkeyPatch) -> None:
    random, dearer = Random(1), 0
    pairs = [(one, drawn(random, one.partial)) for one in (drawn(random) for _ in range(100))]
    searched = [cost_of(*pair) for pair in pairs]
    monkeypatch.setattr(paths, "SEARCHED", 0)
    paths._moves.cache_clear()
    for pair, least in zip(pairs, searched, strict=True):
        assert moves(*pair, SIZES)[-1:] == () if pair[0] == pair[1] else moves(*pair, SIZES)[-1].after == pair[1]
        dearer += cost_of(*pair) > least + 1e-6
        assert cost_of(*pair) >= least - 1e-6
    paths._moves.cache_clear()
    assert dearer > 20
