"""Schedules as grids of text, against grids by hand, and the rows of copies against the programs that they are of."""

from __future__ import annotations

import pytest
from tests.ir.test_grid import WIRED, made
from tests.passes.memory.test_offload import planned
from tests.passes.memory.test_weights_elsewhere import planned as weights

from penstock.inspection.views.schedule_grid import copies, format_grid
from penstock.ir.grid import simulate
from penstock.ir.schedule import Action


def test_the_grid_shows_versions_and_what_is_done_once_per_batch() -> None:
    assert format_grid(WIRED, 2).splitlines() == [
        "rank 0 | F0@0 .    .    B0@0      =,P0,N0,U0@1 F1@1 .    .    B1@1      =,P1,N1,U1@2",
        "rank 1 | .    F0@0 B0@0 W0@0,U0@1 .            .    F1@1 B1@1 W1@1,U1@2 .",
        "10 units of time, 40% idle",
    ]
    summed = format_grid(made(2, "0F2 0B2 0AR1 0U1", "0F3 0B3 0AR1 0U1"), 1)
    assert summed.splitlines() == ["rank 0 | F0 B0 =,AR0,U0", "rank 1 | F1 B1 =,AR0,U0", "3 units of time, 0% idle"]
    assert format_grid(made(1, ""), 1).splitlines() == ["rank 0 | ", "0 units of time, 0% idle"]


def test_what_stands_before_everything_else_has_no_place_in_the_grid() -> None:
    assert format_grid(made(1, "0P1 0F1 0B1", "0N1 0F1 0B1"), 1).splitlines()[0] == "rank 0 | F0 B0 ="


def test_a_wide_grid_goes_on_below() -> None:
    """The first four columns take 33 places, and no column more than 23."""
    below = [
        "rank 0 | F0@0 .    .    B0@0",
        "rank 1 | .    F0@0 B0@0 W0@0,U0@1",
        "",
        "rank 0 | =,P0,N0,U0@1 F1@1 .",
        "rank 1 | .            .    F1@1",
        "",
        "rank 0 | .    B1@1",
        "rank 1 | B1@1 W1@1,U1@2",
        "",
        "rank 0 | =,P1,N1,U1@2",
        "rank 1 | .",
        "10 units of time, 40% idle",
    ]
    assert format_grid(WIRED, 2, width=33).splitlines() == below
    assert format_grid(WIRED, 2, width=32).splitlines()[0] == "rank 0 | F0@0 .    ."
    for width, pieces in ((1, 10), (200, 1)):
        lines = format_grid(WIRED, 2, width=width).splitlines()
        assert sum(line.startswith("rank 0") for line in lines) == pieces


MOVING = made(2, "0CI1:o 0F2 0F3 0CO2:a0 0B3 0L2:a0 0CI2:a0 0B2 0U1 0CO1:o 0L1:o")


def test_copies_have_rows_in_which_they_last_until_something_waits_for_them() -> None:
    """State comes while everything else is computed, and is waited for at once as it goes. The control: a program in
    which nothing is copied has no such rows."""
    assert format_grid(MOVING, 1).splitlines() == [
        "rank 0 | F0    F1 B1     = B0      =,U0",
        "    in | CI0:o =  =      = CI0:a0! =",
        "   out | .     .  CO0:a0 = .       CO0:o!",
        "6 units of time, 0% idle",
    ]
    plain = made(2, "0F2 0F3 0B3 0B2 0U1")
    assert format_grid(plain, 1).splitlines() == ["rank 0 | F0 F1 B1 = B0 =,U0", "6 units of time, 0% idle"]


@pytest.mark.parametrize("case", ["interleaved", "one device", "interleaved-2bw"])
def test_every_copy_of_a_program_stands_in_its_row(case: str) -> None:
    """From its action to what waits for it, by the program itself: L for CO, the update for state that comes."""
    module = planned(case, "none", "state")
    text, played = format_grid(module.schedule, 2), simulate(module.schedule, 2)
    for line in played.ranks.values():
        shown = list(copies(line))
        assert [copy.action for copy in shown] == [a for a, *_ in line if a.kind in ("CI", "CO")]
        for copy in shown:
            later = [(a, start) for a, start, _ in line[[a for a, *_ in line].index(copy.action) :]]
            wanted = ("L", "o", copy.action.stage) if copy.action.kind == "CO" else ("U", "", copy.action.stage)
            assert copy.awaited == next(t for a, t in later if (a.kind, a.item, a.stage) == wanted)
            assert str(copy.action)[1:] in text


def test_the_version_that_comes_is_the_one_that_is_read() -> None:
    line = simulate(made(2, "0CI1@0:w 0F2@0 0CI1@1:w 0F3@0 0B2@0 0B3@0 0U1@2 0L1@0:w 0L1@1:w"), 2).ranks[0]
    awaited = {str(copy.action): copy.awaited for copy in copies(line)}
    update = next(start for action, start, _ in line if action == Action.parse("0U1@2"))
    assert awaited["0CI1@1:w"] == update
    assert awaited["0CI1@0:w"] < update


def test_what_is_claimed_once_more_is_not_copied() -> None:
    """Weights that a batch ends with are there for the next one: a copy of them out is waited for when they go."""
    module = weights("one device")
    line = simulate(module.schedule, 3).ranks[0]
    shown = [copy.action for copy in copies(line) if copy.action.item == "w"]
    claimed = [action for action, _, _ in line if (action.kind, action.item) == ("CI", "w")]
    came = [action for action in shown if action.kind == "CI"]
    # Two stages of each batch but the first.
    assert len(claimed) - len(came) == 2 * 2
    assert {action.stage for action in claimed[-3:]} - {action.stage for action in came if action.mb == 2} <= {0, 1}
    (out,) = (copy for copy in copies(line) if str(copy.action) == "0CO1:w")
    goes = [start for action, start, _ in line if (action.kind, action.item, action.stage) == ("L", "w", 0)]
    assert out.awaited in goes
    assert out.awaited > out.begins
