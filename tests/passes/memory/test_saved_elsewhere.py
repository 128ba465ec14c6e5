"""What forwards saved, in another memory space until the backward: the same numbers in a store of two levels, the
programs that the verifier refuses, and what is on the device at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import pairwise

import pytest
from tests.oracles.drawn_chains import chain_model
from tests.passes.memory.test_offload import (
    CASES,
    DEEP,
    WIDTHS,
    M,
    compiled,
    edited,
    let_sets_go,
    planned,
    same,
    trained,
)

from penstock.ir.cluster.cluster import Cluster
from penstock.ir.cluster.spaces import Space
from penstock.ir.graph import Module
from penstock.ir.memory.items import home_bytes
from penstock.ir.memory.predict import measure_memory, memory_curve, planned_account
from penstock.ir.memory.saved_sets import most_sets_at_home, moves_saved, saved_set
from penstock.ir.schedule import Action
from penstock.ir.text import parse_module, print_module
from penstock.ir.verify.verifier import verify
from penstock.passes.manager import run_passes
from penstock.passes.memory.offload import OffloadOptions, offload
from penstock.passes.pipelines import PASSES, PipelineOptions, training_pipeline
from penstock.support.errors import DoesNotFit, UsageError, VerifyError

# Stages of these have microbatches that wait for their backward while three others are computed.
WAITING = {**CASES, "gpipe": ("gpipe", 4, 1)}
del WAITING["1f1b"]


def away(case: str, what: str = "activations", **options) -> Module:
    return planned(case, "none", what, **options)


@pytest.fixture(autouse=True)
def gpipe(monkeypatch):
    monkeypatch.setitem(CASES, "gpipe", ("gpipe", 4, 1))
    let_sets_go(monkeypatch)


@pytest.mark.parametrize("case", ["1f1b", *WAITING])
def test_numbers_are_the_same_bit_for_bit(case: str) -> None:
    module = away(case)
    verify(module)
    assert parse_module(print_module(module)) == module
    assert {a.kind for a in module.schedule.actions() if moves_saved(a)} == {"CO", "L", "CI"}
    assert same(trained(module), trained(planned(case, "none", "none")))


def test_both_state_and_saved_sets_are_elsewhere() -> None:
    module = away("interleaved", "both")
    verify(module)
    assert {a.item for a in module.schedule.actions() if a.item} == {"o", "a0"}
    assert same(trained(module), trained(compiled("interleaved")))


@pytest.mark.parametrize("case", ["1f1b", *WAITING])
def test_sets_go_by_their_next_use(case: str) -> None:
    """Against a list of all computations of a run: those that wait during three go, behind their forward. They are away
    until one computation before their backward, and all others stay."""
    module = away(case)
    for rank in module.schedule.ranks:
        actions = list(module.schedule.expand(rank, 4))
        computed = [a for a in actions if a.kind in "FBWUPN"]
        at = {(a.kind, a.stage, a.mb): i for i, a in enumerate(computed)}
        moves = {(a.kind, a.stage, a.mb): i for i, a in enumerate(actions) if moves_saved(a)}
        place = {(a.kind, a.stage, a.mb): i for i, a in enumerate(actions)}
        moved = {(stage, mb) for kind, stage, mb in moves if kind == "CO"}
        for kind, stage, mb in at:
            if kind == "F" and module.stages[stage].home:
                # All of a number in their batch are moved, or none.
                alike = [n for k, s, n in at if (k, s, n % M) == (kind, stage, mb % M)]
                waits = [at["B", stage, n] - at["F", stage, n] - 1 for n in alike if n < 3 * M]
                assert ((stage, mb) in moved) == (min(waits) >= 3)
            # In the drain of a run the computation of a later batch is not there.
            if kind == "B" and (stage, mb) in moved and mb < 3 * M:
                before = computed[at["B", stage, mb] - 1]
                assert moves["CI", stage, mb] < place[before.kind, before.stage, before.mb]


def test_few_sets_are_on_the_device_however_many_are_in_flight() -> None:
    module, whole = away("gpipe"), planned("gpipe", "none", "none")
    account = planned_account(module, 0, [(0, 3)])
    saved = saved_set(module, 0)
    assert saved is not None
    back = [life for life in account.lives if set(life.names) == set(saved.values) and len(life.names) > 1]
    assert all(account.actions[life.taken_at].kind == "CI" for life in back)
    assert {life.nbytes for life in back} <= {saved.nbytes}
    assert measure_memory(module)[0].activations < measure_memory(whole)[0].activations


# ------------------------------------------------------------------------------------------------ refused programs


def change(kind: str, put: Callable[[Action], Iterable[Action]]) -> Callable[[Module], Module]:
    def rule(_: int, a: Action) -> Iterable[Action]:
        return put(a) if moves_saved(a) and a.kind == kind and a.stage == 0 else (a,)

    return lambda module: edited(module, rule)


def before_its_forward(module: Module) -> Module:
    def rule(_: int, a: Action) -> Iterable[Action]:
        if moves_saved(a) and a.kind == "CO":
            return ()
        return (Action("CO", 0, a.mb, item="a0"), a) if (a.kind, a.stage) == ("F", 0) else (a,)

    return edited(module, rule)


def at_once(module: Module) -> Module:
    """L stands in front of its CO."""
    rows = {"CO": lambda a: (a._replace(kind="L"), a), "L": lambda a: ()}
    return edited(module, lambda _, a: rows[a.kind](a) if moves_saved(a) and a.kind in rows else (a,))


def behind_its_backward(module: Module) -> Module:
    """All moves of a set stand where it was taken."""

    def rule(_: int, a: Action) -> Iterable[Action]:
        if moves_saved(a) and a.stage == 0:
            return ()
        moves = (Action(kind, 0, a.mb, item="a0") for kind in ("CO", "L", "CI"))
        return (a, *moves) if (a.kind, a.stage) == ("B", 0) else (a,)

    return edited(module, rule)


REFUSED = {
    "a CI left out": (change("CI", lambda a: ()), r"takes %.* of microbatch \d+, .*disk \(no 0CI\d+:a0 before\)"),
    "a CO left out": (change("CO", lambda a: ()), r"lets go of the only copy of what 0F\d+ saved \(no 0CO\d+:a0 "),
    "a CO before its F": (before_its_forward, r"copies what microbatch \d+ has not saved \(comes before 0F\d+\)"),
    "L before its CO": (at_once, r"lets go of the only copy of what 0F\d+ saved"),
    "brought twice": (change("CI", lambda a: (a, a)), r"brings what is on the device of microbatch"),
    "copied twice": (change("CO", lambda a: (a, a)), r"copies what is at home already of microbatch"),
    "moved when it was taken": (behind_its_backward, r"copies what a computation of microbatch \d+ has taken"),
    "never let go of": (change("L", lambda a: ()), r"brings what is on the device of microbatch"),
    "of another stage": (change("CI", lambda a: (a._replace(stage=3),)), "runs stages 0, 3, expected one"),
}


@pytest.mark.parametrize("how", REFUSED)
def test_the_verifier_refuses(how: str) -> None:
    edit, message = REFUSED[how]
    with pytest.raises(VerifyError, match=message):
        verify(edit(away("1f1b")))


@pytest.mark.parametrize("how", ["a CI left out", "L before its CO", "a CO before its F"])
def test_the_interpreter_refuses_it_as_well(how: str) -> None:
    with pytest.raises(VerifyError, match="does not hold"):
        trained(REFUSED[how][0](away("1f1b")))


def test_what_gains_nothing_is_refused() -> None:
    options = PipelineOptions(schedule="1f1b", microbatches=1, offload="activations")
    calls = training_pipeline({"kind": "sgd", "lr": 0.1}, {"split_at": DEEP}, options)
    cluster = replace(Cluster.local(4), spaces=(Space("disk"),))
    with pytest.raises(UsageError, match="no stage saves what it alone takes for a microbatch that waits"):
        run_passes(chain_model(WIDTHS, [], rows=2).but(cluster=cluster), calls, PASSES)
    with pytest.raises(UsageError, match="unknown 'data', expected one of state, activations, both"):
        offload(planned("1f1b", "none", "none"), OffloadOptions(what="data"))
    with pytest.raises(UsageError, match="as the rest is made again: nothing would be gained"):
        planned("1f1b", "all", "activations")
    module = away("1f1b")
    nothing = tuple(replace(stage, home="disk") for stage in module.stages)
    with pytest.raises(VerifyError, match="reaches no memory space 'tape'"):
        verify(module.but(stages=tuple(replace(stage, home="tape") for stage in nothing)))


# ------------------------------------------------------------------------------------------------ memory


def test_one_byte_less_is_refused() -> None:
    peak = max(row.peak for row in measure_memory(away("gpipe")).values())
    verify(away("gpipe", memory=peak))
    with pytest.raises(DoesNotFit, match="at the worst moment"):
        away("gpipe", memory=peak - 1)


def test_a_space_has_room_for_the_sets_that_are_away_at_once() -> None:
    module = away("1f1b")
    saved, schedule = saved_set(module, 0), module.schedule
    assert saved is not None
    held = home_bytes(module)["disk", "localhost"]
    assert held[0] == saved.nbytes * most_sets_at_home(schedule.expand(0, 3), 0, saved.users)
    verify(away("1f1b", space=Space("disk", bytes=sum(held.values()))))
    with pytest.raises(DoesNotFit, match="space disk: is home to"):
        away("1f1b", space=Space("disk", bytes=sum(held.values()) - 1))


def test_a_home_is_free_behind_the_first_computation_that_takes_the_set() -> None:
    """Where the backward takes nothing of it, and the gradients of weights all, that is the latter."""
    words = "0CO0:a0 0CO1:a0 0B0 0CO2:a0 0W0 0B1 0CO3:a0 0W1"
    actions = [Action.parse(word) for word in words.split()]
    assert most_sets_at_home(actions, 0, {"B", "W"}) == 2
    assert most_sets_at_home(actions, 0, {"W"}) == 3


def test_live_bytes_fall_when_a_set_goes() -> None:
    module = away("gpipe")
    saved = saved_set(module, 0)
    assert saved is not None
    points = [(action, live) for action, live, _ in memory_curve(module, 0, 3)]
    size = sum(v.type.nbytes for v in saved.values.values())
    changes = {"L": -size, "CI": saved.nbytes, "CO": 0}
    for (_, before), (action, live) in pairwise(points):
        if moves_saved(action):
            assert live - before == changes[action.kind]
