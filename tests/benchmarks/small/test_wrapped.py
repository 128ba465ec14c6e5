"""The benchmark of weights that come and go, in small, and what its committed run shows. No time that is measured here is
judged."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tests.oracles.repository import BENCHMARKS

from ..benchmark_report import run_benchmark

sys.path.append(str(BENCHMARKS))
import wrapped


def test_the_committed_run_reaches_its_goal() -> None:
    rows = json.loads((BENCHMARKS / "results" / "wrapped.json").read_text())["rows"]
    shapes = [(row["devices"], row["packs"], row["microbatches"], row["schedule"]) for row in rows]
    assert shapes == [(*row[:3], row.schedule) for row in wrapped.ROWS]
    assert all(row["same"] for row in rows)
    assert all(abs(row["predicted"] / row["seconds"] - 1) <= wrapped.WITHIN for row in rows[:-1])
    # Of the same shape, wrap moves a third less.
    moved = {row["schedule"]: row["moved"] for row in rows if row["microbatches"] == 8}
    assert moved["wrap"] < 0.7 * moved["interleaved"]


def test_a_batch_copies_what_its_program_says(tmp_path: Path) -> None:
    """Weights come once: the last two stages are there for their backwards, the first two for the next batch. State
    comes, and both go after the update."""
    planned = wrapped.plan(wrapped.Row(1, 4, 1, 0.01), tmp_path, 64, "weights")
    weights = 4 * 2 * (64 * 64 + 64) * 4
    assert wrapped.copied(planned) == pytest.approx(weights * (1 + 1 + 2 + 2), rel=0.01)
    # In two versions, of which one comes for the update, and the weights of the first stage are still there then.
    twice = wrapped.plan(wrapped.Row(1, 4, 1, 0.01, "interleaved-2bw"), tmp_path, 64, "weights")
    assert weights * (2 + 1 + 1 + 2 + 2 - 1) < wrapped.copied(twice) < weights * (2 + 1 + 1 + 2 + 2)
    # The control: the same program over a disk with a tenth of the bandwidth.
    row = wrapped.Row(1, 4, 1, 0.0001)
    assert wrapped.predicted(planned, row, 1e7) > 5 * wrapped.predicted(planned, row, 1e8)


@pytest.mark.slow
def test_all_rows_are_run_and_their_losses_compared(tmp_path: Path) -> None:
    report, done = run_benchmark("wrapped", ["--width", "64", "--rounds", "1", "--batches", "3"], tmp_path)
    assert len(report["rows"]) == len(wrapped.ROWS)
    assert all(row["same"] and len(row["turns"]) == 1 for row in report["rows"])
    assert done.stdout.count("| the same |") == len(wrapped.ROWS)
