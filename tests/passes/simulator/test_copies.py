"""Copies between memory spaces in a simulation, against times that were worked out by hand."""

from __future__ import annotations

from functools import partial

import pytest

from penstock.ir.schedule import COPIES
from penstock.passes.simulator.machine import Copy, Route, SimulatedMachine
from penstock.passes.simulator.simulate import simulate

from .hand_written import lasting, nothing, when, written

SECONDS = lasting(F=1.0, U=1.0)
PROGRAM = "0CI1:o 0F1 0U1 0CO1:o 0L1:o"


def over(shares, nbytes=3.0, users=frozenset({"U"}), latency=0.0):
    return SimulatedMachine(copied=lambda rank, action: Copy(Route(shares(rank, action), latency), nbytes, users))


def own(rank, action):
    return ((f"{rank}{action.kind}", 1.0),)


def test_a_copy_goes_on_while_others_compute_and_its_user_waits() -> None:
    found = simulate(written(1, r0=PROGRAM), 1, SECONDS, nothing, over(own, latency=0.5))
    assert when(found, 0) == {
        "0CI0:o": (0, 0),
        "0F0": (0, 1),
        "0U0": (3.5, 4.5),
        "0CO0:o": (4.5, 4.5),
        "0L0:o": (8.0, 8.0),
    }
    assert found.critical_path["copying on rank 0"] == pytest.approx(7)
    # The control: nobody touches what is copied in.
    assert when(simulate(written(1, r0=PROGRAM), 1, SECONDS, nothing, over(own, users=frozenset())), 0)["0U0"] == (1, 2)


def test_what_has_come_is_not_waited_for() -> None:
    found = simulate(written(1, r0=PROGRAM), 1, SECONDS, nothing, over(own, nbytes=0.5))
    assert when(found, 0)["0U0"] == (1, 2)
    assert when(found, 0)["0L0:o"] == (2.5, 2.5)


def test_ranks_share_the_way_to_a_space_and_directions_do_not() -> None:
    schedule = written(1, r0=PROGRAM, r1=" ".join("1" + action[1:] for action in PROGRAM.split()))
    alone, shared = (
        simulate(schedule, 1, SECONDS, nothing, over(shares))
        for shares in (own, lambda rank, action: ((action.kind, 1.0),))
    )
    assert [when(found, 1)["1U0"] for found in (alone, shared)] == [(3, 4), (6, 7)]
    assert [when(found, 1)["1L0:o"][0] for found in (alone, shared)] == [7, 13]


def test_a_lane_copies_one_item_after_the_other() -> None:
    both = "0CI1:o 1CI1:o 0F1 1F1 0U1 1U1 0CO1:o 1CO1:o 0L1:o 1L1:o"
    found = when(simulate(written(1, r0=both), 1, SECONDS, nothing, over(lambda rank, a: ((a.kind, 1.0),))), 0)
    assert (found["0U0"], found["1U0"]) == ((3, 4), (6, 7))
    assert (found["0L0:o"][0], found["1L0:o"][0]) == (10, 13)


def test_the_machine_of_a_module_copies_what_the_image_has() -> None:
    from tests.passes.memory.test_offload import moved

    from penstock.ir.memory.items import stage_images
    from penstock.passes.simulator.copies import copies_of

    module = moved("interleaved")
    copied = partial(copies_of(module), 0)
    assert module.schedule is not None
    for action in (a for a in module.schedule.ranks[0].batch if a.kind in COPIES):
        image, way = (
            stage_images(module, action.stage)["o"],
            {"CI": "disk>localhost", "CO": "localhost>disk"}[action.kind],
        )
        assert copied(action) == Copy(Route(((way, 1e9),), 1e-4), image.nbytes, frozenset({"U"}))


def test_a_backward_waits_for_the_set_of_its_own_microbatch() -> None:
    sets = "0F2 0CO2:a0 0F3 0L2:a0 0CO3:a0 0L3:a0 0CI2:a0 0CI3:a0 0B2 0B3 0U1"
    found = when(simulate(written(2, r0=sets), 1, lasting(F=1.0, B=1.0, U=1.0), nothing, over(own, users={"B"})), 0)
    assert [found[f"0L{mb}:a0"][0] for mb in (0, 1)] == [4, 7]
    assert [found[f"0B{mb}"] for mb in (0, 1)] == [(10, 11), (13, 14)]


def test_computations_wait_for_the_weights_that_they_read() -> None:
    """With one version of them, whichever a computation names. The control: an item that no computation touches."""
    one = "0CI1:w 0F1@0 0B1@0 0U1@2 0CO1:w 0L1:w"
    times = lasting(F=1.0, B=1.0, U=1.0)
    found = when(simulate(written(1, r0=one), 2, times, nothing, over(own, users=frozenset("FBU"))), 0)
    assert (found["0F0@0"], found["0U0@1"], found["0L0:w"]) == ((3, 4), (5, 6), (9, 9))
    assert found["0F1@0"] == (12, 13)
    assert when(simulate(written(1, r0=one), 1, times, nothing, over(own, users=frozenset())), 0)["0F0@0"] == (0, 1)


TWO = "0CI1@0:w 0B1@0 0L1@0:w 0CI1@1:w 0CI1@2:w 0U1@2 0L1@1:w 0CO1@2:w 0CI2@2:w 0L1@2:w 0F2@2 0L2@2:w"


def test_versions_are_waited_for_each_by_itself() -> None:
    """Nothing moves for the version that an update makes, nor for what is there already, and a claim that is not the
    last one ends at once. A batch later the numbers are others. The control: computations that touch nothing."""
    times, users = lasting(F=1.0, B=1.0, U=1.0), frozenset("FBU")
    machine = over(own, users=users)
    found = when(simulate(written(1, r0=TWO), 3, times, nothing, machine), 0)
    # 0 reads version 0 twice: as batch 0, and for its update.
    assert (found["0B0@0"], found["0U0@1"]) == ((3, 4), (7, 8))
    assert found["0L0@1:w"] == (8, 8)
    assert found["0F1@1"] == (8, 9)
    # The last claim waits until version 1 is at home.
    assert found["0CI1@0:w"] == (11, 11)
    assert (found["0B1@0"], found["0U1@2"]) == ((14, 15), (18, 19))
    free = when(simulate(written(1, r0=TWO), 3, times, nothing, over(own, users=frozenset())), 0)
    assert (free["0B0@0"], free["0U0@1"]) == ((0, 1), (1, 2))
