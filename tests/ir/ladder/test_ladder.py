"""Tests of bounds and ladders: their texts, the smallest rung that fits, and the cheapest way to make a number of
rows, against all ways."""

from __future__ import annotations

from itertools import combinations_with_replacement

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.ir.ladder.bounds import Bound, Bounded, parse_bound, parse_bounded
from penstock.ir.ladder.ladder import Ladder, Rung, grown_sizes, pieces
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
