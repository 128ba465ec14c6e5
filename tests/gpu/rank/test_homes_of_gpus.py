"""State, weights and what forwards saved in pinned memory of the host, between their uses by a GPU. Devices are of straw: copies are late until something waits
for them, and memory that is freed cannot be touched."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .test_host_waits import FEW, MANY, most_waits

Program = Callable[..., Any]
STAGES = {"model": "mlp", "devices": "sm_90,sm_90"}
PACKS = {**STAGES, "schedule": "interleaved", "packs": 3}
CASES = {
    "chunks": (STAGES, "state"),
    "chunks, 2bw, a processor beside the GPU": (
        {**STAGES, "devices": "cpu,sm_90", "schedule": "2bw", "split_at": ["fc7.product"]},
        "state",
    ),
    "packs": (PACKS, "state"),
    "sets": ({**STAGES, "schedule": "gpipe", "microbatches": 12}, "activations"),
    "weights": (PACKS, "weights"),
    "weights in two versions": ({**PACKS, "schedule": "interleaved-2bw"}, "weights"),
    "all of it": ({**PACKS, "microbatches": 8}, "all"),
}


def trained(program: Program, folder: Path, *cases: dict[str, Any], **variables: str) -> list[dict[str, Any]]:
    """Return what trainings say whose stages are interpreted."""
    given = [{"backend": "numpy", **case} for case in cases]
    said: list[dict[str, Any]] = program(
        "gpu.straw.training", folder, json.dumps(given), devices=2, STRAW_INTERPRETER="1", **variables
    )
    return said


@pytest.mark.parametrize("name", CASES)
def test_what_is_elsewhere_trains_the_same_to_the_last_bit(name: str, program: Program, tmp_path: Path) -> None:
    """The plan needs less memory of the GPUs. What they use is not measured: memory of straw is freed when the device gets there, and not for what the rank
    tells it next."""
    case, kind = CASES[name]
    kept, moved = trained(program, tmp_path, case, {**case, "offload": kind})
    assert moved["losses"] == kept["losses"]
    assert not moved["faults"]
    assert moved["copied"]
    assert not kept["copied"]
    peaks, before = ([memory["peak"] for memory in said["memory"].values()] for said in (moved, kept))
    assert sum(peaks) < sum(before)


@pytest.mark.parametrize(
    "name",
    [
        "chunks, 2bw, a processor beside the GPU",
        pytest.param("weights in two versions", marks=pytest.mark.slow),
        pytest.param("all of it", marks=pytest.mark.slow),
    ],
)
def test_a_training_goes_on_from_what_its_homes_saved(name: str, program: Program, tmp_path: Path) -> None:
    """The control: two steps without a stop have other losses than the last two of four."""
    case, kind = CASES[name]
    cases = (
        {**case, "offload": kind},
        {**case, "offload": kind, "resumed": True},
        {**case, "offload": kind, "steps": 2},
    )
    whole, resumed, short = trained(program, tmp_path, *cases)
    assert resumed["losses"] == whole["losses"]
    assert len(whole["losses"]) == 4
    assert not resumed["faults"]
    assert short["losses"] != whole["losses"][2:]


@pytest.mark.parametrize(("case", "kind"), [CASES["packs"], pytest.param(*CASES["weights"], marks=pytest.mark.slow)])
def test_a_rank_waits_once_for_each_batch(case: dict[str, Any], kind: str, program: Program, tmp_path: Path) -> None:
    """As it does without copies: its GPU waits for these by itself."""
    few, many = trained(program, tmp_path, *({**case, "offload": kind, "steps": steps} for steps in (FEW, MANY)))
    assert most_waits(few, many) <= MANY


def test_copies_of_items_and_sets(program: Program) -> None:
    """The host waits only where it reads, and a trace has the copies with the times of the GPU."""
    said = program("gpu.rank.homes", devices=1)
    assert said["worst"] == 0
    # One wait, for the clock of a trace.
    assert said["waits"] == 1
    assert not said["faults"]
    names = [f"0{kind}{turn}:o" for turn in range(5) for kind in ("CI", "CO")]
    names += ["0CO0:a0", "0CO1:a0", "0CI0:a0", "0CO2:a0", "0CI1:a0"]
    assert [copy[0] for copy in said["copies"]] == names
    assert {copy[1] for copy in said["copies"]} == {6016 + 192}
    assert all(seconds >= 0 and waited >= 0 for _, _, seconds, waited in said["copies"])


def test_control_a_copy_that_nothing_waits_for_is_noticed(program: Program) -> None:
    """No stream waits for another one: a copy is of memory that was given back, or not done when it was waited for."""
    with pytest.raises(AssertionError, match="RuntimeError: CUDA error"):
        program("gpu.rank.homes", devices=1, STRAW_FAULT="stream")
