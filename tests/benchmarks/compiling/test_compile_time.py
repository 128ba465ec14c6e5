"""The benchmark of compile times tells cold from warm, and its phases add up."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..benchmark_report import run_benchmark

SMALL = "--layers 2 --width 32 --heads 2 --vocab 64 --positions 16 --microbatches 2"


@pytest.mark.slow
def test_cold_and_warm_are_what_they_say(tmp_path: Path) -> None:
    report, _ = run_benchmark("compile_time", [*SMALL.split(), "--tvm", "--run"], tmp_path)
    # What TVM makes of the same file computes the same.
    assert report["inference"]["tvm"]["error"] < 1e-5
    assert all(row["seconds"] > 0 for row in report["inference"].values())
    states = report["states"]
    (cold,), (kernels,), (warm,) = (states[name] for name in ("cold", "kernels", "warm"))
    compiled, of, count, *_ = cold["found"].split()
    assert (compiled, of) == (count, "of")
    assert kernels["found"] == f"0 of {count} kernels compiled"
    assert warm["found"] == "libraries found"
    # The control: only where kernels or libraries are missing does it take time to make them.
    assert cold["kernels"] > 0
    assert (warm["kernels"], warm["link"]) == (0, 0)
    phases = ("import", "frontend", "passes", "lowering", "kernels", "link", "bundle")
    for row in (cold, kernels, warm):
        assert row["total"] == pytest.approx(sum(row[phase] for phase in phases))


@pytest.mark.slow
def test_passes_that_split_tensors_have_their_share(tmp_path: Path) -> None:
    """The two passes take some of the time of all passes. Control: where nothing is split they take none."""
    split = ["--schedule", "1f1b", "--mesh", "tp=2", "--shard", "preset:megatron"]
    rows = [
        run_benchmark("compile_time", [*SMALL.split(), *words], tmp_path)[0]["states"]["warm"][0]
        for words in (split, [])
    ]
    assert 0 < rows[0]["splitting"] < rows[0]["passes"]
    assert rows[1]["splitting"] == 0
