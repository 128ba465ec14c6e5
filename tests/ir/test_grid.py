"""Schedules played on paper, against starts and finishes by hand."""

from __future__ import annotations

import pytest

from penstock.ir.grid import Played, message_rules, most_in_flight, play, simulate, time_per_batch
from penstock.ir.schedule import Action, Program, Schedule


def made(microbatches: int, *lists: str) -> Schedule:
    """A schedule by the list that each rank runs once per batch."""
    programs = [Program((), tuple(map(Action.parse, text.split()))) for text in lists]
    return Schedule("mine", microbatches, dict(enumerate(programs)))


def told(played: Played, rank: int) -> str:
    return " ".join(f"{action}:{start:g}-{finish:g}" for action, start, finish in played.ranks[rank])


WIRED = made(1, "0F1@1 0SF1>1 0RB1<1 0B1@1 0P1 0N1 0U1@2", "1RF1<0 1F1@1 1B1@1 1SB1>0 1W1@1 1U1@2")


def test_messages_take_their_time_and_weight_gradients_a_part_of_the_backward() -> None:
    """Stage 0 has no W, so its backward is whole."""
    played = simulate(WIRED, 1, 1, 3, 1, latency=0.5)
    assert told(played, 0) == "0F0@0:0-1 0SF0>1:1-1 0RB0<1:5-5 0B0@0:5-8 0P0:8-8 0N0:8-8 0U0@1:8-8"
    assert told(played, 1) == "1RF0<0:1.5-1.5 1F0@0:1.5-2.5 1B0@0:2.5-4.5 1SB0>0:4.5-4.5 1W0@0:4.5-5.5 1U0@1:5.5-5.5"
    assert (played.finish, played.stuck) == (8, {})
    assert Played({0: []}, {}).finish == 0
    # Without times and latency: 1, 2, 1 and none.
    assert told(simulate(WIRED, 1, first=3), 1) == "1RF3<0:1-1 1F3@3:1-2 1B3@3:2-3 1SB3>0:3-3 1W3@3:3-4 1U3@4:4-4"
    assert time_per_batch(WIRED) == 5
    assert time_per_batch(WIRED, latency=0.5) == 6
    assert play(WIRED.expand_all(1), message_rules(WIRED), lambda action: 1.0).finish == 11


def test_without_messages_stages_wait_for_their_neighbours() -> None:
    unwired = made(1, "0F1 0B1 0U1", "1F1 1B1 1W1 1U1", "2F1 2B1 2U1")
    played = simulate(unwired, 1, 1, 3, 1)
    assert told(played, 0) == "0F0:0-1 0B0:8-11 0U0:11-11"
    assert told(played, 1) == "1F0:1-2 1B0:6-8 1W0:8-9 1U0:9-9"
    assert told(played, 2) == "2F0:2-3 2B0:3-6 2U0:6-6"


@pytest.mark.parametrize("kind", "PNU")
def test_a_sum_begins_when_the_last_rank_is_there_and_goes_on_in_the_background(kind: str) -> None:
    played = simulate(made(3, f"0F3 0B3 0AR1 0D3 0{kind}1", f"0F4 0B4 0F5 0B5 0AR1 0{kind}1"), 1)
    assert told(played, 0) == f"0F0:0-1 0B0:1-3 0AR0:3-3 0D0:3-3 0{kind}0:6-6"
    assert told(played, 1) == f"0F1:0-1 0B1:1-3 0F2:3-4 0B2:4-6 0AR0:6-6 0{kind}0:6-6"


def test_microbatches_in_flight_are_those_between_forward_and_the_end_of_backward() -> None:
    assert most_in_flight(map(Action.parse, ["0F0", "0F1", "0B0", "0F2", "0F3", "0B1", "0U0", "0B2", "0B3"])) == 3
    assert (
        most_in_flight(map(Action.parse, ["0F0", "0F1", "0B0", "0F2", "0B1", "0W0", "0F3", "0W1", "0D1", "0B2", "0W2"]))
        == 3
    )
    assert most_in_flight([]) == 0
