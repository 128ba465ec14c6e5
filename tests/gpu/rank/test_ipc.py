"""GPUs of one host write to each other's memory: stages that are interpreted on devices of straw, in processes that share memory and events as CUDA's do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.runtime.group.group import ends_among
from penstock.runtime.group.reach import GpuReach, reach_from, reach_of
from penstock.support.errors import UsageError

Program = Callable[..., Any]


def trained(program: Program, folder: Path, *cases: dict[str, Any], **variables: str) -> list[dict[str, Any]]:
    """Return what a training says of each case."""
    given = json.dumps([{"backend": "numpy", "devices": "sm_90,sm_90", **case} for case in cases])
    said: list[dict[str, Any]] = program(
        "gpu.straw.training", folder, given, devices=2, STRAW_INTERPRETER="1", **variables
    )
    return said


def test_stages_of_a_host_train_like_the_interpreter(program: Program, tmp_path: Path) -> None:
    for said in trained(program, tmp_path, {}, {"schedule": "2bw"}, {"shared": True}):
        assert said["faults"] == []
        assert np.allclose(said["losses"], said["expected"], rtol=1e-5)


def test_control_a_gpu_that_does_not_wait_for_the_other_is_noticed(program: Program, tmp_path: Path) -> None:
    (said,) = trained(program, tmp_path / "wrong", {}, STRAW_FAULT="process")
    assert not np.allclose([float(x) for x in said["losses"]], said["expected"], rtol=1e-4)
    # The control of the control: without it, the same fault changes nothing.
    (said,) = trained(program, tmp_path / "off", {}, STRAW_FAULT="process", PENSTOCK_IPC="0")
    assert np.allclose(said["losses"], said["expected"], rtol=1e-5)


def test_a_gpu_writes_to_those_of_its_host_that_it_reaches() -> None:
    first, second = GpuReach("host", "a", ("a", "b")), GpuReach("host", "b", ("b",))
    assert first.writes_to(second)
    assert first.writes_to(first)
    # One way only, not to another host, and not where the host's memory is not to be shared.
    assert not second.writes_to(first)
    assert not first.writes_to(second._replace(host="other"))
    assert not first._replace(host="").writes_to(second._replace(host=""))
    assert not GpuReach().writes_to(first)
    assert not first.writes_to(GpuReach())
    assert reach_from(first.text()) == first


def test_processors_reach_nothing_and_the_setting_is_checked() -> None:
    assert reach_of(torch.device("cpu"), {}) == reach_of(torch.device("cuda", 0), {"PENSTOCK_IPC": "0"}) == GpuReach()
    with pytest.raises(UsageError, match="PENSTOCK_IPC must be 0 or 1, got 'no'"):
        reach_of(torch.device("cpu"), {"PENSTOCK_IPC": "no"})


def test_both_ranks_of_a_channel_have_an_end_of_it() -> None:
    channels = {(0, "SF", 1), (1, "SB", 0), (1, "SF", 2)}
    assert ends_among(channels, 0) == {("SF", 1), ("RB", 1)}
    assert ends_among(channels, 1) == {("RF", 0), ("SB", 0), ("SF", 2)}
    assert ends_among(channels, 3) == set()
