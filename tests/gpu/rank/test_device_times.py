"""Times of a GPU's actions are those of the GPU, and its memory is reported: two stages that are interpreted on devices of straw, where every computation takes
at least so long."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

SECONDS = 0.004
# Times in traces are rounded to tenths of microseconds.
ROUNDED = 3e-7
Program = Callable[..., dict[str, Any]]


def traced(program: Program, folder: Path, **variables: str) -> dict[str, Any]:
    """Return what a traced training says."""
    return program("gpu.rank.traced", folder, devices=2, STRAW_INTERPRETER="1", STRAW_SECONDS=str(SECONDS), **variables)


def computations(actions: list[list[Any]]) -> list[float]:
    """Return the durations of forward and backward computations."""
    return [seconds for name, _, seconds in actions if name[1] in "FB"]


def test_times_and_memory_are_those_of_the_gpu(program: Program, tmp_path: Path) -> None:
    said = traced(program, tmp_path)
    for actions in said["ranks"]:
        assert len(computations(actions)) == 2 * 2 * 4
        assert min(computations(actions)) >= SECONDS
        # One after the other, as the device does them.
        for (_, begin, seconds), (_, following, _) in pairwise(actions):
            assert begin + seconds <= following + ROUNDED
    # A stage has some of its numbers on its device at any time.
    assert set(said["memory"]) == {"rank0_gpu_bytes", "rank1_gpu_bytes"}
    assert min(said["memory"].values()) > 10_000
    assert said["error"].startswith("DoesNotFit: rank")
    assert "gave no more memory: 1" in said["error"]
    assert "of 195.3 KiB are in use" in said["error"]


@pytest.mark.slow
def test_control_times_of_the_rank_itself_are_noticed(program: Program, tmp_path: Path) -> None:
    """Here events have no times, so that a computation is as long as it took to ask for it."""
    said = traced(program, tmp_path, STRAW_FAULT="clock")
    assert max(seconds for actions in said["ranks"] for seconds in computations(actions)) < SECONDS
