"""The formulas of the rows of the table of schedules, against the programs they speak of."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.ir.grid import most_in_flight
from penstock.ir.schedule import Action, Schedule
from penstock.passes.schedules.dealing import Shares, deal, forwards_ahead
from penstock.passes.schedules.kind import backwards, forwards, pairs
from penstock.passes.schedules.schedule import SCHEDULES, build_schedule

TRAINING = [kind for kind, row in SCHEDULES.items() if row.trains]
# Batches after which a schedule that never drains has as much in flight as it ever has.
BATCHES = 6


def held(found: Schedule) -> list[int]:
    """Count the microbatches in flight on every rank in the program that runs."""
    return [most_in_flight(found.expand(rank, BATCHES)) for rank in range(len(found.ranks))]


def predicted(kind: str, shares: Shares) -> list[int]:
    """Return what the row says of every rank: in flight, or 0 where it says that the share is too small."""
    row, counts, earlier = SCHEDULES[kind], [], 0
    for ahead, stage in zip(forwards_ahead([deal(share) for share in shares]), shares, strict=True):
        for forward, share in zip(ahead, stage, strict=True):
            warm = row.warm_up(forward)
            fits = share >= row.least_share(warm)
            counts.append(row.in_flight(share, warm, earlier, len(stage)) if fits else 0)
        earlier += len(stage)
    return counts


@pytest.mark.parametrize("kind", TRAINING)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(stages=st.integers(1, 6), microbatches=st.integers(1, 16))
def test_in_flight_of_single_devices_is_that_of_the_program(kind: str, stages: int, microbatches: int) -> None:
    shares = [(microbatches,)] * stages
    counted = held(build_schedule(kind, stages, microbatches, shares))
    for found, expected in zip(counted, predicted(kind, shares), strict=True):
        assert expected in (0, found)


@pytest.mark.parametrize("kind", [kind for kind in TRAINING if not SCHEDULES[kind].splits])
@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data(), microbatches=st.integers(2, 16))
def test_in_flight_of_replicas_is_never_more_than_the_row_says(
    kind: str, data: st.DataObject, microbatches: int
) -> None:
    """Hold the bound for unequal shares, too; schedules whose weight gradients run apart give an estimate there."""
    split = st.integers(1, microbatches - 1).map(lambda first: (first, microbatches - first))
    shares = data.draw(st.lists(st.one_of(st.just((microbatches,)), split), min_size=1, max_size=4))
    counted = held(build_schedule(kind, len(shares), microbatches, shares))
    for found, expected in zip(counted, predicted(kind, shares), strict=True):
        assert not expected or found <= expected


@pytest.mark.parametrize("kind", TRAINING)
def test_one_microbatch_less_in_flight_would_be_wrong(kind: str) -> None:
    """The control: the same comparison with a row that promises less."""
    shares = [(8,)] * 3
    counted = held(build_schedule(kind, 3, 8, shares))
    assert counted == predicted(kind, shares)
    assert counted != [count - 1 for count in predicted(kind, shares)]


@pytest.mark.parametrize("kind", SCHEDULES)
def test_the_fewest_microbatches(kind: str) -> None:
    """The papers: a schedule without drains needs its warm-up in every batch, one with W apart one more than that."""
    fewest = {"2bw": [1, 1, 4], "eager-2bw": [1, 1, 4], "zb-1f1b": [1, 2, 5]}.get(kind, [1, 1, 1])
    assert [SCHEDULES[kind].least_share(warm) for warm in (0, 1, 4)] == fewest


def test_what_follows_from_delay_and_split() -> None:
    found = {
        kind: (row.versions, row.gradient_copies(1), row.gradient_copies(2), row.recomputes, row.fills_whole)
        for kind, row in SCHEDULES.items()
    }
    assert found == {
        "1f1b": (1, 1, 1, True, True),
        "gpipe": (1, 1, 1, True, True),
        "2bw": (2, 1, 2, True, False),
        "eager-2bw": (2, 1, 2, True, False),
        "zb-1f1b": (1, 1, 1, False, False),
        "forward": (1, 1, 1, False, True),
    }


def test_runs_of_actions() -> None:
    def text(actions: Iterable[Action]) -> str:
        return " ".join(f"{a.kind}{a.stage}.{a.mb}" for a in actions)

    assert text(forwards(2, 3, 2)) == "F2.3 F2.4"
    assert text(backwards(2, 3, 2)) == "B2.3 B2.4"
    assert text(pairs(2, 5, 3, 2)) == "F2.5 B2.3 F2.6 B2.4"
    assert text(forwards(0, 3, 0)) == text(pairs(0, 3, 3, 0)) == ""
