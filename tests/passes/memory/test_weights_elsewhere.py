"""Weights and gradients that are elsewhere while a rank computes other stages: the same numbers in a store of two
levels, the bytes that move, the programs that the verifier refuses, and memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
from tests.oracles.drawn_chains import chain_model
from tests.passes.memory.test_offload import WIDTHS, edited, same, trained

from penstock.ir.cluster.cluster import Cluster
from penstock.ir.cluster.spaces import Space
from penstock.ir.graph import Module
from penstock.ir.memory.items import home_bytes, stage_images
from penstock.ir.memory.predict import measure_memory
from penstock.ir.schedule import Action
from penstock.ir.text import parse_module, print_module
from penstock.ir.verify.verifier import verify
from penstock.passes.manager import run_passes
from penstock.passes.pipelines import PASSES, PipelineOptions, training_pipeline
from penstock.support.errors import DoesNotFit, UsageError, VerifyError

M = 4
# Devices, stages of each, and what else is asked for.
CASES = {
    "one device": (1, 4, {}),
    "two devices": (2, 4, {}),
    "clipped": (1, 4, {"guard": {"clip": 0.5}}),
    "made again": (2, 4, {"recompute": "all"}),
    "wrapped": (2, 4, {"schedule": "wrap"}),
    "wrapped, clipped": (2, 4, {"schedule": "wrap", "guard": {"clip": 0.5}}),
    "wrapped, all of it": (2, 4, {"schedule": "wrap", "offload": "all"}),
    # Nothing stands between the updates at the end.
    "without state": (1, 4, {"optimizer": {"kind": "sgd", "lr": 0.1}}),
    "without state, clipped": (2, 4, {"optimizer": {"kind": "sgd", "lr": 0.1}, "guard": {"clip": 0.5}}),
}


@cache
def planned(case: str, offload: str = "weights", memory: int = 0, m: int = M) -> Module:
    devices, packs, settings = CASES[case]
    cluster = replace(Cluster.local(devices), spaces=(Space("disk"),))
    if memory:
        cluster = replace(cluster, devices=tuple(replace(d, spaces=(("ram", memory),)) for d in cluster.devices))
    settings = {**settings}
    optimizer = settings.pop("optimizer", {"kind": "adamw", "lr": 0.1})
    defaults = {"schedule": "interleaved", "recompute": "none", "offload": offload}
    options = PipelineOptions(
        microbatches=m, packs=packs, **{**defaults, **settings, **({"offload": "none"} if offload == "none" else {})}
    )
    every = 8 // (devices * packs)
    cuts = tuple(f"layer{i}" for i in range(every, 8, every))
    calls = training_pipeline(optimizer, {"split_at": cuts}, options)
    return run_passes(chain_model(WIDTHS, [], rows=2).but(cluster=cluster), calls, PASSES)


@pytest.mark.parametrize("case", CASES)
def test_numbers_are_the_same_bit_for_bit(case: str) -> None:
    module = planned(case)
    verify(module)
    assert parse_module(print_module(module)) == module
    assert {a.item for a in module.schedule.actions() if a.item} >= {"w", "g"}
    assert same(trained(module), trained(planned(case, "none")))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("schedule", ["interleaved", "wrap"])
@pytest.mark.parametrize(("packs", "m"), [(3, 1), (4, 1), (3, 2), (4, 6)])
@pytest.mark.parametrize("guard", [{}, {"clip": 0.5}], ids=["", "clipped"])
def test_every_program_is_legal(optimizer: str, schedule: str, packs: int, m: int, guard: dict) -> None:
    """With one microbatch and few stages updates stand close to each other."""
    for devices in (1, 2):
        widths = [6] * (devices * packs + 1)
        options = PipelineOptions(
            schedule=schedule, microbatches=m, packs=packs, offload="weights", recompute="none", guard=guard
        )
        cuts = tuple(f"layer{i}" for i in range(1, devices * packs))
        calls = training_pipeline({"kind": optimizer, "lr": 0.1}, {"split_at": cuts}, options)
        cluster = replace(Cluster.local(devices), spaces=(Space("disk"),))
        verify(run_passes(chain_model(widths, [], rows=2).but(cluster=cluster), calls, PASSES))


def test_all_that_may_be_elsewhere_is() -> None:
    module = planned("two devices", "all")
    verify(module)
    assert {a.item for a in module.schedule.actions() if a.item} >= {"o", "w", "g"}
    assert same(trained(module), trained(planned("two devices", "none")))


def moved_weights(module: Module, rank: int) -> tuple[int, list[int]]:
    """The bytes of weights that a batch moves, the third of five, and those of the weights of each stage of the rank."""
    sizes = {stage: stage_images(module, stage)["w"].nbytes for stage in module.rank_packs()[rank]}
    moved, here = 0, Counter[int]()
    for a in module.schedule.expand(rank, 5):
        if a.item == "w":
            here[a.stage] += {"CI": 1, "CO": 0, "L": -1}[a.kind]
            copied = a.kind == "CO" or (a.kind == "CI" and here[a.stage] == 1)
            moved += sizes[a.stage] if copied and a.mb == 3 else 0
    return moved, list(sizes.values())


def test_a_batch_moves_weights_three_times_where_a_stage_runs_all_microbatches_at_once() -> None:
    """In for F, in for B, out after U; but for the last two stages of the rank, which are still there for their B, and
    the first two, which are there for the next batch."""
    for case, m in (("two devices", 2), ("two devices", 3), ("one device", 1)):
        moved, sizes = moved_weights(planned(case, m=m), 0)
        assert moved == 3 * sum(sizes) - sum(sizes[:2]) - sum(sizes[-2:])


def test_weights_move_as_often_for_any_number_of_microbatches_under_wrap() -> None:
    """Three times, but for the first two stages and the last two. The control: in groups all come once more for each further one, as
    forwards of a stage meet the backwards of another group."""
    for m in (2, 4, 8, 12, 32):
        for rank in (0, 1):
            moved, sizes = moved_weights(planned("wrapped", m=m), rank)
            assert moved == 3 * sum(sizes) - sum(sizes[:2]) - sum(sizes[-2:])
    for case, group in (("one device", 1), ("two devices", 2)):
        moved, sizes = zip(*(moved_weights(planned(case, m=m), 0) for m in (8, 16, 24)), strict=True)
        assert [more - less for less, more in pairwise(moved)] == [8 // group * sum(sizes[0])] * 2


def test_two_stages_have_their_weights_on_the_device_at_once() -> None:
    module, whole = planned("two devices"), planned("two devices", "none")
    for rank, row in measure_memory(module).items():
        here, most = Counter[int](), 0
        for a in module.schedule.expand(rank, 3):
            if a.item == "w" and a.kind in ("CI", "L"):
                here[a.stage] += 1 if a.kind == "CI" else -1
                most = max(most, len(+here))
        assert (most, +here) == (2, Counter())
        assert row.peak < measure_memory(whole)[rank].peak
        stored = [image.stored for s in module.rank_packs()[rank] for image in stage_images(module, s).values()]
        assert home_bytes(module)["disk", "localhost"][rank] == sum(stored)
        assert all(stage_images(module, s)["g"].stored == 0 for s in module.rank_packs()[rank])


# ------------------------------------------------------------------------------------------------ refused programs


def change(kind: str, item: str, put: Callable[[Action], Iterable[Action]]) -> Callable[[Module], Module]:
    def rule(_: int, a: Action) -> Iterable[Action]:
        return put(a) if (a.kind, a.item, a.stage) == (kind, item, 1) else (a,)

    return lambda module: edited(module, rule)


def early(module: Module) -> Module:
    """L of gradients stands in front of their update."""

    def rule(_: int, a: Action) -> Iterable[Action]:
        if (a.kind, a.item, a.stage) == ("L", "g", 1):
            return ()
        return (Action("L", 1, a.mb, item="g"), a) if (a.kind, a.stage) == ("U", 1) else (a,)

    return edited(module, rule)


REFUSED = {
    "a CI left out": (change("CI", "w", lambda a: ()), r"takes @.*, which is at home in disk \(no 1CI\d:w before\)"),
    "a CO left out": (change("CO", "w", lambda a: ()), r"lets go of the only copy of @.*, which 1U.* changed"),
    "L before its CO": (
        change("CO", "w", lambda a: (a._replace(kind="L"), a)),
        r"lets go of the only copy of @.*, which 1U.* changed",
    ),
    "gradients left out": (change("CI", "g", lambda a: ()), r"takes @.*, which is at home .*no 1CI\d:g before"),
    "gradients lost": (early, r"lets go of the only copy of @.*, which 1B.* changed"),
    "gradients copied": (change("L", "g", lambda a: (a._replace(kind="CO"), a)), "gradients have no copy at home"),
    "never let go of": (change("L", "w", lambda a: ()), "never lets go of w of stage 1, which it brought"),
    "let go of once too often": (change("L", "w", lambda a: (a, a)), "lets go of @.*, which is not on the device"),
    "brought once too often": (change("CI", "w", lambda a: (a, a)), "never lets go of w of stage 1, which it brought"),
    "gradients brought twice": (change("CI", "g", lambda a: (a, a)), "brings what is on the device since step"),
}


@pytest.mark.parametrize("how", REFUSED)
def test_the_verifier_refuses(how: str) -> None:
    edit, message = REFUSED[how]
    with pytest.raises(VerifyError, match=message):
        verify(edit(planned("one device")))


@pytest.mark.parametrize("how", ["a CI left out", "a CO left out", "gradients left out", "gradients lost"])
def test_the_interpreter_shows_it_as_well(how: str) -> None:
    assert not same(trained(REFUSED[how][0](planned("one device"))), trained(planned("one device", "none")))


def test_one_byte_less_is_refused() -> None:
    peak = max(row.peak for row in measure_memory(planned("two devices")).values())
    verify(planned("two devices", memory=peak))
    with pytest.raises(DoesNotFit, match="at the worst moment"):
        planned("two devices", memory=peak - 1)


def test_a_device_with_few_stages_is_refused(monkeypatch) -> None:
    monkeypatch.setitem(CASES, "few", (2, 2, {}))
    with pytest.raises(UsageError, match="it takes three stages or more"):
        planned("few")


def waits_at_once(module: Module) -> list[str]:
    """The copies of state that are waited for with no computation since they began, CI at its U and CO at its L, but for
    the end of the run."""
    begun, listed = {}, []
    for action in module.schedule.expand(0, 3):
        waited = {"U": "CI", "L": "CO"}.get(action.kind)
        if waited and (kind := (waited, action.stage)) in begun and (action.item == "o" or action.kind == "U"):
            listed += [str(action)] if not begun.pop(kind) and action.mb < 2 else []
        if action.kind in ("F", "B", "U"):
            begun = dict.fromkeys(begun, True)
        elif action.item == "o" and action.kind in ("CI", "CO"):
            begun[action.kind, action.stage] = False
    return listed


def test_state_comes_and_goes_behind_computations_where_one_alone_is_between_updates(monkeypatch) -> None:
    """With one microbatch. A device without room for two states has one, and waits for copies out."""
    monkeypatch.setattr("penstock.passes.memory.offload.with_weights_that_stay", lambda module: module)
    ahead = planned("one device", m=1)
    peak = measure_memory(ahead)[0].peak
    assert not waits_at_once(ahead)
    assert planned("one device", memory=peak, m=1).schedule == ahead.schedule
    tight = planned("one device", memory=peak - 1, m=1)
    assert waits_at_once(tight)
    (small,), (large,) = (measure_memory(module).values() for module in (tight, ahead))
    assert large.state - small.state == max(stage_images(ahead, s)["o"].nbytes for s in ahead.rank_packs()[0])
    assert small.peak < large.peak
    for module in (ahead, tight):
        verify(module)
        assert same(trained(module, 1), trained(planned("one device", "none", m=1), 1))
