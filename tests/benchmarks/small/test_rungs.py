"""What `benchmarks/rungs.py` says of every size follows from the times of rungs alone."""

from __future__ import annotations

import sys

from oracles.repository import BENCHMARKS

sys.path.append(str(BENCHMARKS))

from rungs import steps_of, table_of_steps


def test_lengths_are_bounded_by_the_rung_before() -> None:
    steps = steps_of({8: 10.0, 9: 10.5, 12: 11.0, 16: 13.0}, rows=False)
    ranges = [(step["first"], step["last"]) for step in steps]
    assert ranges == [(8, 8), (9, 9), (10, 12), (13, 16)]
    # 13 to 16 miss the goal by the bound: 13 / 11. A rung itself is not filled up.
    assert [step["floor_s"] for step in steps] == [10.0, 10.5, 10.5, 11.0]
    _, lines = table_of_steps([{"model": "m", "error": 1e-6, "compiled": 0, **step} for step in steps])
    assert lines == [("m", "8 to 16", "4", "5 of 9", "1.182 (13 to 16)", "1.0e-06", "0")]


def test_rows_are_bounded_by_the_best_row() -> None:
    steps = steps_of({1: 1.2, 2: 2.0, 3: 3.2, 4: 4.0}, rows=True)
    assert [step["floor_s"] for step in steps] == [1.0, 2.0, 3.0, 4.0]
    _, lines = table_of_steps([{"model": "m", "error": 1e-6, "compiled": 0, **step} for step in steps])
    assert lines == [("m", "1 to 4", "4", "3 of 4", "1.200 (1 to 1)", "1.0e-06", "0")]
