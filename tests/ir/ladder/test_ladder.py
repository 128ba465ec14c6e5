"""Tests of bounds and ladders: their texts, the smallest rung that fits, and the cheapest way to make a number of
rows, against all ways."""

from __future__ import annotations

from itertools import combinations_with_replacement, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.ir.ladder.bounds import Bound, Bounded, parse_bound, parse_bounded
from penstock.ir.ladder.ladder import Ladder, Rung, filling, grown_sizes, pieces, priced_sizes
from penstock.ir.text import parse_module, print_module
from penstock.support.errors import ParseError

TEXT = """module @toy {
  input %ids : i64[1,16]
  input %size.seq : i64[]
  output %y
  bound seq 16 : %ids[1], %y[1]
  bound batch 1 rows : %ids[0], %y[0]
  graph @main(%ids : i64[1,16]) {
    %y : i64[1,16] = neg(%ids)
    return %y
  }
}
"""


def test_text() -> None:
    module = parse_module(TEXT)
    assert print_module(module) == TEXT
    assert [value.name for value in module.data_inputs] == ["ids"]
    with pytest.raises(ParseError, match="bound NAME SIZE"):
        parse_module(TEXT.replace("bound seq 16 :", "bound seq :"))


@pytest.mark.parametrize("text", ["<=512", "<=512:64,128,512"])
def test_bounds_as_text(text: str) -> None:
    assert str(parse_bound(text)) == text


@pytest.mark.parametrize("text", ["512", "<512", "<=0", "<=512:64", "<=8:0,8", "<=x"])
def test_bad_bounds(text: str) -> None:
    with pytest.raises(ValueError, match="bound"):
        parse_bound(text)


def test_bounded_line() -> None:
    line = Bounded("seq", 4, True, (("x.1", 0), ("y", 2)))
    assert parse_bounded(str(line)) == line
    assert line.dims_of("y") == (2,)


def test_fit() -> None:
    ladder = Ladder([Rung({"b": b, "s": s}, b * s) for b in (1, 4) for s in (8, 16, 32)])
    assert ladder.largest.sizes == {"b": 4, "s": 32}
    for b in range(1, 5):
        for s in range(1, 33):
            rung = ladder.fit({"b": b, "s": s})
            assert rung is not None
            holding = [r.held for r in ladder if r.sizes["b"] >= b and r.sizes["s"] >= s]
            assert rung.held == min(holding)
    assert ladder.fit({"b": 5, "s": 1}) is None
    assert ladder.at({"b": 2, "s": 8}) is None


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 12), st.dictionaries(st.sampled_from([2, 3, 5, 8]), st.floats(0.5, 9.0), max_size=3))
def test_pieces(count: int, more: dict[int, float]) -> None:
    seconds = {1: 1.0, **more}
    chosen = pieces(count, seconds)
    ways = [way for n in range(1, count + 1) for way in combinations_with_replacement(sorted(seconds), n)]
    holding = [way for way in ways if sum(way) >= count]
    assert sum(chosen) >= count
    assert sum(seconds[n] for n in chosen) == pytest.approx(min(sum(seconds[n] for n in way) for way in holding))
    # The last piece alone may have rows left over.
    assert sum(chosen[:-1]) < count


def test_control_largest_first_is_not_always_best() -> None:
    seconds = {1: 1.0, 3: 1.1, 4: 2.5}
    assert pieces(6, seconds) == [3, 3]


def test_grown_ends_at_the_bound() -> None:
    assert grown_sizes(20, lambda n: n + 8) == (8, 16, 20)
    assert grown_sizes(1, lambda n: max(2 * n, 1)) == (1,)
    assert Bound(8, (4, 8, 4)).sizes == (4, 8)


def _time(size: int, knots: dict[int, float]) -> float:
    """The judge's own interpolation."""
    return float(np.interp(size, sorted(knots), [knots[n] for n in sorted(knots)]))


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 12),
    st.lists(st.tuples(st.integers(1, 40), st.floats(0.0, 3.0)), min_size=1, max_size=4),
    st.floats(1.02, 1.5),
)
def test_priced_sizes(least: int, steps: list[tuple[int, float]], worst: float) -> None:
    knots, size, time = {least: 1.0}, least, 1.0
    for more, slope in steps:
        size, time = size + more, time + more * slope
        knots[size] = time
    sizes = priced_sizes(least, size, knots, worst)
    assert (sizes[0], sizes[-1], list(sizes)) == (least, size, sorted(set(sizes)))
    for n in range(least, size + 1):
        rung = min(m for m in sizes if m >= n)
        # A rung is its own, or the one after its neighbour, or takes at most so many times as long.
        assert rung == n or _time(rung, knots) <= worst * _time(n, knots) * (1 + 1e-9)
    assert all(b <= max(a + 1, a + a // 2) for a, b in pairwise(sizes))
    times = {n: _time(n, knots) for n in sizes}
    ratios = [times[b] / _time(a + 1, times) for a, b in pairwise(sizes)]
    assert filling(times) == pytest.approx(max(ratios, default=1.0))


def test_priced_sizes_of_a_known_price() -> None:
    # Reading takes as long as eight rows; from there on each row costs the same.
    knots = {8: 8.0, 16: 16.0, 32: 32.0}
    assert priced_sizes(8, 32, knots, 1.1) == (8, 9, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 32)
    assert priced_sizes(8, 32, {8: 8.0, 32: 8.0}, 1.1) == (8, 12, 16, 24, 32)
    # Control: sizes that double leave out what the law asks for.
    assert filling({8: 8.0, 16: 16.0, 32: 32.0}) == pytest.approx(32 / 17)
