"""Trainings by ranks in processes of their own, with stages on devices of straw, against the interpreter: the same losses, no fault, and no block left
behind by a step."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

FEW, MANY = 2, 7
TOLERANCE = {"f32": 1e-5, "bf16": 2e-2}
# The fields of training.Case.
CASES = {
    "processor and GPU, 2bw": {"devices": "cpu,sm_90", "schedule": "2bw"},
    "GPU and processor, 1f1b": {"devices": "sm_90,cpu"},
    "two stages on one GPU, 1f1b": {"devices": "sm_90,sm_90", "shared": True},
    "two GPUs, 2bw": {"devices": "sm_90,sm_90", "schedule": "2bw"},
    "replicas on two GPUs": {"devices": "sm_90,sm_90", "replicas": 2},
    "two GPUs, bf16": {"devices": "sm_90,sm_90", "precision": "bf16"},
    "processor and GPU, products on tensor cores": {"model": "wide gpt", "precision": "bf16"},
    "convolutions on processor and GPU, 1f1b": {"model": "cnn"},
    "convolutions on GPU and processor, 2bw": {"model": "cnn", "devices": "sm_90,cpu", "schedule": "2bw"},
    "attention and products of torch, 1f1b": {"library": "torch"},
    "attention and products of torch in bf16": {"library": "torch", "precision": "bf16"},
    "convolutions of torch on two GPUs": {"model": "cnn", "devices": "sm_90,sm_90", "library": "torch"},
    "state in memory of the host": {"model": "mlp", "devices": "sm_90", "offload": "state"},
    "weights and saved sets in memory of the host": {
        "model": "mlp",
        "devices": "sm_90,sm_90",
        "schedule": "interleaved",
        "packs": 3,
        "microbatches": 8,
        "offload": "all",
    },
}


QUICK = next(iter(CASES))


@pytest.mark.parametrize(
    ("name", "lengths"),
    [(QUICK, (FEW,)), *(pytest.param(name, (FEW, MANY), marks=pytest.mark.slow) for name in CASES)],
)
def test_a_device_of_straw_trains_like_the_interpreter(
    name: str, lengths: tuple[int, ...], program: Callable[..., Any], tmp_path: Path
) -> None:
    case = CASES[name]
    cases = [{**case, "steps": steps} for steps in lengths]
    trainings = program("gpu.straw.training", tmp_path, json.dumps(cases), devices=2)
    for said in trainings:
        assert said["faults"] == []
        assert np.allclose(said["losses"], said["expected"], rtol=TOLERANCE[case.get("precision", "f32")])
        # One rank for each GPU; two of one GPU have one entry.
        gpus = 1 if case.get("shared") else case.get("devices", "cpu,sm_90").count("sm_90")
        assert len(said["ends"]) == gpus
        assert all(tasks > own + others > 0 for own, others, tasks, _ in said["ends"].values())
    # A block for each step would be left behind by something that is not let go of.
    few, many = ({device: end[-1] for device, end in said["ends"].items()} for said in (trainings[0], trainings[-1]))
    assert all(many[device] - few[device] < MANY - FEW for device in few)
