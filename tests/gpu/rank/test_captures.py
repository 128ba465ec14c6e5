"""Calls of stages on a GPU are captured, and give what they give kernel by kernel. Calls that cannot be captured say why. Under the driver of straw a wait or
an allocation during a capture is an error, and a graph notices memory that has become another block."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

FEW, MANY = 5, 9
# The fields of training.Case, and the factor by which the loop of a rank tells its streams less often, at least, counting all that it does for a batch.
CASES: dict[str, tuple[dict[str, Any], float]] = {
    "1f1b": ({"devices": "sm_90,sm_90"}, 2.0),
    "2bw": ({"devices": "sm_90,sm_90", "schedule": "2bw"}, 2.0),
    "libraries in bf16": ({"devices": "sm_90,sm_90", "library": "torch", "precision": "bf16"}, 1.5),
    "replicas": ({"devices": "sm_90,sm_90", "replicas": 2}, 1.5),
}


def test_captured_calls_give_the_same_and_faults_are_noticed(program: Callable[..., Any], tmp_path: Path) -> None:
    said = program("gpu.rank.captured", tmp_path, PENSTOCK_CUDA_GRAPHS="1")
    sound = said["sound"]
    assert (sound["wrong"], sound["report"], sound["reasons"]) == ([], [], {})
    # Two microbatches are in flight, and one more is begun before the results of the oldest are let go.
    assert sound["numbers"] == {"s0.F": 3, "s0.B": 3}
    # Were losses not handed on as copies, each microbatch would have a forward of its own.
    assert said["losses_in_place"]["wrong"] == []
    assert said["losses_in_place"]["numbers"]["s0.F"] > 6
    captured, plain = sound["told"]
    assert captured < plain
    refused = {
        "callback_that_waits": "a wait for a stream during a capture",
        "allocation": "cudaMalloc during a capture",
        "short_of_memory": "are free",
        "memory_that_ends": "out of memory",
    }
    for name, words in refused.items():
        assert said[name]["wrong"] == said[name]["report"] == [], name
        assert words in said[name]["reasons"]["s0.F"], name
        assert said[name]["numbers"] == {"s0.F": 0, "s0.B": 0}, name
    check_memory(said)
    check_torch_afterwards(said)
    assert said["results_in_use"]["wrong"] == ["results differ"]
    for name in ("other_address", "blocks_let_go"):
        assert any(line.startswith("graph:") and "which was freed" in line for line in said[name]["report"]), name


def check_memory(said: dict[str, Any]) -> None:
    """What captured calls keep is what the plan says, and the device gives no more for them. The controls: it gives something, which an account without
    them would not have; and where a plan leaves less, fewer calls are captured."""
    account = said["account"]
    assert account["kept"] == account["planned"]
    assert 0 < account["grown"] <= account["planned"]
    room, none = said["room"], said["no_room"]
    assert room["wrong"] == none["wrong"] == room["report"] == none["report"] == []
    assert room["numbers"] == {"s0.F": 2, "s0.B": 0}
    assert none["numbers"] == {"s0.F": 0, "s0.B": 0}
    assert none["taken"] == 0
    for reasons in (room["reasons"], none["reasons"]):
        assert "for captured calls of the stage" in reasons["s0.F"]


def check_torch_afterwards(said: dict[str, Any]) -> None:
    """Torch's allocator takes no capture for one that still goes on, and no error is left for its next launch."""
    controls = ("allocator_not_told", "other_address", "blocks_let_go")
    assert {
        name: case["unfinished"] for name, case in said.items() if name not in controls and case["unfinished"]
    } == {}
    interrupt = said["interrupt"]
    assert (interrupt["interrupted"], interrupt["times"]) == (True, 1)
    assert (interrupt["wrong"], interrupt["report"], interrupt["reasons"]) == ([], [], {})
    assert interrupt["numbers"] == {"s0.F": 3, "s0.B": 3}
    assert said["allocator_not_told"]["unfinished"] == 1
    # Out of memory, as the driver says it, before and behind.
    assert said["memory_that_ends"]["left"] == [2, 0]


@pytest.mark.slow
@pytest.mark.parametrize("name", list(CASES))
def test_trainings_give_the_same_losses_with_fewer_launches(
    name: str, program: Callable[..., Any], tmp_path: Path
) -> None:
    case, factor = CASES[name]
    cases = json.dumps([{**case, "steps": steps} for steps in (FEW, MANY)])
    captured = program("gpu.straw.training", tmp_path / "captured", cases, devices=2, PENSTOCK_CUDA_GRAPHS="1")
    plain = program("gpu.straw.training", tmp_path / "plain", cases, devices=2)
    for said, other in zip(captured, plain, strict=True):
        assert said["faults"] == other["faults"] == []
        assert said["losses"] == other["losses"]
        assert np.allclose(said["losses"], said["expected"], rtol=2e-2 if "precision" in case else 1e-5)
    ratio = orders(plain) / orders(captured)
    assert ratio > factor
    # Four forwards, four backwards and an update; replicas share the microbatches.
    launched = 4 // case.get("replicas", 1) * 2 + 1
    assert {graphs(captured, device) for device in captured[0]["work"]} == {launched}
    assert {graphs(plain, device) for device in plain[0]["work"]} == {0}


def per_batch(trainings: list[dict[str, Any]], device: str, place: int) -> float:
    few, many = (said["work"][device][place] for said in trainings)
    return float(many - few) / (MANY - FEW)


def orders(trainings: list[dict[str, Any]]) -> float:
    """Return how often ranks tell their streams something, for a batch."""
    return sum(per_batch(trainings, device, 0) for device in trainings[0]["work"])


def graphs(trainings: list[dict[str, Any]], device: str) -> float:
    """Return how many graphs a rank launches for a batch."""
    return per_batch(trainings, device, 1)
