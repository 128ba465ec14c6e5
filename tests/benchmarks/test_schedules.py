"""The benchmark of schedules counts versions in the stores and compares with the right formulas. Nothing is asserted of measured times."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from tests.oracles.repository import BENCHMARKS

from .benchmark_report import run_benchmark

sys.path.append(str(BENCHMARKS))
import schedules
from processes import awake
from schedule_path import longest_path


@pytest.mark.slow
def test_rows_have_their_formulas_and_versions(tmp_path: Path) -> None:
    words = ["--only", "2x2", "--forward", "0.002", "--rounds", "2", "--batches", "3"]
    report, done = run_benchmark("schedules", words, tmp_path)
    lines = report["rows"]
    assert [(x["schedule"], x["live"]) for x in lines] == [("1f1b", 1), ("zb-1f1b", 1), ("2bw", 2)]
    # In forwards: (m+d-1)(tf+tb), m(tf+tb) + (d-1)(tf+tb-2tw), m(tf+tb).
    assert [x["formula"] / 0.002 for x in lines] == pytest.approx([9, 7, 6])
    assert all(len(x["times"]) == 4 for x in lines)
    assert done.stdout.count("\n| ") == 4
    assert "2x2: round 2 of 2" in done.stderr


@pytest.mark.slow
def test_forwards_that_are_computed_again_have_their_formula(tmp_path: Path) -> None:
    """The control takes as long in backwards, on the path to the stage before."""
    words = ["--only", "4x8-again", "--forward", "0.002", "--rounds", "1", "--batches", "3"]
    report, _ = run_benchmark("schedules", words, tmp_path)
    lines = {x["schedule"]: x for x in report["rows"]}
    assert list(lines) == ["1f1b in B", "1f1b again"]
    assert [x["formula"] / 0.002 for x in lines.values()] == pytest.approx([44, 39])


def test_stages_compute_again_what_a_row_is_about(tmp_path: Path) -> None:
    """All but the last, ahead of the receive of the gradient. The control: none in the row beside it."""
    row = next(row for row in schedules.ROWS if row.name == "4x8-again")
    for name in row.schedules:
        folder = tmp_path / name.replace(" ", "-")
        folder.mkdir()
        with schedules.open_job(row, name, folder, {"F": 0.0, "B": 0.0, "W": 0.0}) as job:
            ranks = job.module.schedule.ranks
            again = [sum(a.kind == "R" for a in ranks[rank].batch) for rank in range(4)]
            assert again == ([8, 8, 8, 0] if name.endswith(schedules.AGAIN) else [0] * 4)


def test_a_path_by_hand() -> None:
    """Rank 1 waits for a message; rank 0 has sent it right behind its forward."""
    first = [("0F0@0", 0.0, 1.25), ("0SF0>1", 1.25, 1.5)]
    second = [("1RF0<0", 0.0, 1.75), ("1F0@0", 2.0, 3.0), ("1D0", 3.0, 3.25)]
    parts = longest_path([first, second], [0, 1], {"F": 1.0})
    assert {what: sum(spent) for what, spent in parts.items()} == {
        "given times": 2.0,
        "computations beyond them": 0.25,
        "messages that were waited for": 0.5,
        "between actions": 0.25,
        "updates and drops": 0.25,
    }
    assert sum(map(sum, parts.values())) == 3.25
    assert len(parts["given times"]) == 2
    # The control: a message that has come is nothing that the path goes along.
    late = [second[0], ("1F0@0", 5.0, 6.0)]
    early = [("0F0@0", -3.0, -2.0), ("0SF0>1", -2.0, -1.0)]
    assert "messages that were there" in longest_path([early, late], [0, 1], {"F": 1.0})


def test_cores_are_kept_awake_where_the_system_allows_it() -> None:
    def asks() -> bool:
        files = Path("/proc/self/fd")
        return any(os.readlink(files / number) == "/dev/cpu_dma_latency" for number in os.listdir(files) if
                   (files / number).is_symlink())  # fmt: skip

    with awake() as is_awake:
        assert asks() == is_awake
    assert not asks()
