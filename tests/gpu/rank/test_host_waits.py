"""A rank with a GPU waits for it once for each batch. Stages are interpreted on devices of straw, whose copies are late until the host waits, and which count
how often it does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

FEW, MANY = 3, 8
Program = Callable[..., Any]
CASES = {
    "two stages, 1f1b": {"devices": "sm_90,sm_90"},
    "two stages, 2bw": {"devices": "sm_90,sm_90", "schedule": "2bw"},
    "four stages, 1f1b": {"devices": "sm_90,sm_90,sm_90,sm_90"},
    "four stages, 2bw": {"devices": "sm_90,sm_90,sm_90,sm_90", "schedule": "2bw"},
    "processor and GPU, 2bw": {"devices": "cpu,sm_90", "schedule": "2bw"},
    "GPU and processor, 1f1b": {"devices": "sm_90,cpu"},
    "replicas": {"devices": "sm_90,sm_90", "replicas": 2},
}


def trained(program: Program, folder: Path, *cases: dict[str, Any], **variables: str) -> list[dict[str, Any]]:
    """Return what a training says of each case."""
    given = [{"backend": "numpy", **case} for case in cases]
    said: list[dict[str, Any]] = program(
        "gpu.straw.training", folder, json.dumps(given), devices=4, STRAW_INTERPRETER="1", **variables
    )
    return said


def most_waits(few: dict[str, Any], many: dict[str, Any]) -> int:
    """Return the most waits of a rank's loop that a training of MANY batches has beyond one of FEW. Both begin with the
    same ones. A batch needs none where another thread waited for the GPU behind it, so those of FEW may be no more, and
    MANY are allowed. With two for each batch they are 2 (MANY - FEW), which is more."""
    assert few["ends"].keys() == many["ends"].keys()
    return max(many["ends"][device][0] - waits for device, (waits, *_) in few["ends"].items())


@pytest.mark.parametrize("names", [list(CASES)[:1], pytest.param(list(CASES)[1:], marks=pytest.mark.slow)])
def test_a_rank_waits_for_its_gpu_once_a_batch(names: list[str], program: Program, tmp_path: Path) -> None:
    cases = [{**CASES[name], "steps": steps} for name in names for steps in (FEW, MANY)]
    trainings = trained(program, tmp_path, *cases)
    for case, said in zip(cases, trainings, strict=True):
        assert said["faults"] == [], case
        assert np.allclose(said["losses"], said["expected"], rtol=1e-5), case
        # One rank for each GPU.
        assert len(said["ends"]) == case["devices"].count("sm_90"), case
    for name, few, many in zip(names, trainings[::2], trainings[1::2], strict=True):
        assert most_waits(few, many) <= MANY, name
        # Nothing is left behind on a GPU, however many batches there were.
        assert {d: end[-1] for d, end in few["ends"].items()} == {d: end[-1] for d, end in many["ends"].items()}, name


def test_control_a_rank_that_reads_a_result_is_noticed(program: Program, tmp_path: Path) -> None:
    case = CASES["two stages, 1f1b"]
    few, many = trained(program, tmp_path, {**case, "steps": FEW}, {**case, "steps": MANY}, STRAW_FAULT="item")
    assert np.allclose(many["losses"], many["expected"], rtol=1e-5)
    assert most_waits(few, many) > MANY


@pytest.mark.parametrize("fault", ["host", "stream"])
def test_control_a_missing_wait_is_noticed(fault: str, program: Program, tmp_path: Path) -> None:
    """`host`: a thread sends without waiting for the copy. `stream`: no stream waits for another one."""
    (said,) = trained(program, tmp_path, CASES["two stages, 1f1b"], STRAW_FAULT=fault, PENSTOCK_IPC="0")
    # Poison is NaN, which metrics write as a word.
    assert not np.allclose([float(x) for x in said["losses"]], said["expected"], rtol=1e-4)


@pytest.mark.slow
def test_control_shared_memory_that_is_not_pinned_is_noticed(program: Program, tmp_path: Path) -> None:
    """A GPU copies from memory that its rank shares with a processor's. Here CUDA pins none of it."""
    case = CASES["GPU and processor, 1f1b"]
    cases = [{**case, "steps": FEW}, {**case, "steps": MANY}]
    few, many = trained(program, tmp_path, *cases, STRAW_FAULT="unpinned")
    assert np.allclose(many["losses"], many["expected"], rtol=1e-5)
    assert most_waits(few, many) > MANY
    # The control of the control: over sockets no memory is shared.
    few, many = trained(program, tmp_path / "sockets", *cases, STRAW_FAULT="unpinned", PENSTOCK_SHARED_MEMORY="0")
    assert np.allclose(many["losses"], many["expected"], rtol=1e-5)
    assert most_waits(few, many) <= MANY


@pytest.mark.parametrize("beside", [0, 1 << 16])
def test_copies_to_and_from_a_device_need_no_wait(beside: int, program: Program) -> None:
    said = program("gpu.rank.copies", beside)
    assert said == {"worst": 0.0, "waits": 0, "faults": []}


def test_control_copies_beside_computations_that_nothing_waits_for_are_noticed(program: Program) -> None:
    assert program("gpu.rank.copies", 0, STRAW_FAULT="stream")["worst"] > 0
