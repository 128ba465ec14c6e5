"""State, weights and what forwards saved in pinned memory of the host, between their uses by a GPU. Devices are of straw: copies are late until something waits
for them, and memory that is freed cannot be touched."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ..straw.conftest import program_of
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


RESUMED = "chunks, 2bw, a processor beside the GPU"
# Each kind of item in quick tests: state of chunks, saved sets, and weights, of packs in two versions.
QUICK = (RESUMED, "sets", "weights in two versions")


def pair_of(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A training with everything on its GPU, and the same with a part elsewhere."""
    case, kind = CASES[name]
    return case, {**case, "offload": kind}


def resumptions(name: str) -> tuple[dict[str, Any], ...]:
    """A training, the same with a stop half-way, and one that has half the steps."""
    case, kind = CASES[name]
    moved = {**case, "offload": kind}
    return moved, {**moved, "resumed": True}, {**moved, "steps": 2}


def lengths(case: dict[str, Any], kind: str) -> tuple[dict[str, Any], ...]:
    return tuple({**case, "offload": kind, "steps": steps} for steps in (FEW, MANY))


@pytest.fixture(scope="module")
def said_of(straw: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[dict[str, Any]]]:
    """A function that returns what trainings say, of those of the quick tests. One program has run them all: starting one takes longer than a training."""
    cases = [part for name in QUICK for part in pair_of(name)] + [*resumptions(RESUMED), *lengths(*CASES["packs"])]
    distinct = [case for i, case in enumerate(cases) if case not in cases[:i]]
    program = program_of(straw, tmp_path_factory.mktemp("cache"))
    all_said = trained(program, tmp_path_factory.mktemp("homes"), *distinct)
    return lambda *wanted: [all_said[distinct.index(case)] for case in wanted]


@pytest.mark.parametrize("name", QUICK)
def test_what_is_elsewhere_trains_the_same_to_the_last_bit(
    name: str, said_of: Callable[..., list[dict[str, Any]]]
) -> None:
    check_the_same(*said_of(*pair_of(name)))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name not in QUICK])
def test_what_else_is_elsewhere_trains_the_same_to_the_last_bit(name: str, program: Program, tmp_path: Path) -> None:
    check_the_same(*trained(program, tmp_path, *pair_of(name)))


def check_the_same(kept: dict[str, Any], moved: dict[str, Any]) -> None:
    """The plan needs less memory of the GPUs. What they use is not measured: memory of straw is freed when the device gets there, and not for what the rank
    tells it next."""
    assert moved["losses"] == kept["losses"]
    assert not moved["faults"]
    assert moved["copied"]
    assert not kept["copied"]
    peaks, before = ([memory["peak"] for memory in said["memory"].values()] for said in (moved, kept))
    assert sum(peaks) < sum(before)


def check_resumed(whole: dict[str, Any], resumed: dict[str, Any], short: dict[str, Any]) -> None:
    """The control: two steps without a stop have other losses than the last two of four."""
    assert resumed["losses"] == whole["losses"]
    assert len(whole["losses"]) == 4
    assert not resumed["faults"]
    assert short["losses"] != whole["losses"][2:]


def test_a_training_goes_on_from_what_its_homes_saved(said_of: Callable[..., list[dict[str, Any]]]) -> None:
    check_resumed(*said_of(*resumptions(RESUMED)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["weights in two versions", "all of it"])
def test_other_trainings_go_on_from_what_their_homes_saved(name: str, program: Program, tmp_path: Path) -> None:
    check_resumed(*trained(program, tmp_path, *resumptions(name)))


def test_a_rank_waits_once_for_each_batch(said_of: Callable[..., list[dict[str, Any]]]) -> None:
    """As it does without copies: its GPU waits for these by itself."""
    assert most_waits(*said_of(*lengths(*CASES["packs"]))) <= MANY


@pytest.mark.slow
def test_a_rank_waits_once_for_each_batch_of_weights(program: Program, tmp_path: Path) -> None:
    assert most_waits(*trained(program, tmp_path, *lengths(*CASES["weights"]))) <= MANY


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
