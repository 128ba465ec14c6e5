"""The benchmark of placement measures what it says: counts of ideals and pairs of its graphs by formula. Nothing is asserted of measured times."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..benchmark_report import run_benchmark


@pytest.mark.slow
def test_graphs_have_the_ideals_they_should(tmp_path: Path) -> None:
    report, done = run_benchmark("placement", ["--only", "wide"], tmp_path)
    (row,) = report
    layers, width = 9, 12
    ideals = layers * (2**width) + 2
    assert (row["ideals"], row["gap"]) == (ideals, 0)
    # In a layer one set of branches holds the other in 3^width of 4^width ways; ideals of different layers always do, and all hold nothing and are in everything.
    within, between = layers * (3**width - 2**width), layers * (layers - 1) // 2 * 4**width
    assert row["pairs"] == within + between + (ideals - 1) + (ideals - 2)
    assert "36k, wide" in done.stdout
