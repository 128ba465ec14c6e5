"""What is searched in haste, where planning takes long: against looking at every plan."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.passes.planner.argue import PlanChange, counterfactuals, plan_chain
from penstock.passes.planner.planner import Planner
from penstock.passes.planner.sparing import closed_up, without_little_help
from penstock.support.errors import DoesNotFit

from .brute import best_of_all
from .test_sets import CASES


def in_haste() -> Iterator[tuple[PlanChange, float]]:
    """Yield the changes that one device less is, and the least step of all plans of the others."""
    for chain, fleet, wanted in CASES[:10]:
        try:
            result = plan_chain(chain, fleet, wanted, explained=False)
        except DoesNotFit:
            continue
        for change in counterfactuals(result):
            if change.devices:
                gone = next(i for i, device in enumerate(fleet.devices) if device.name == change.devices[0])
                rest = fleet.only([i for i in range(4) if i != gone])
                yield change, best_of_all(chain, rest, wanted, wanted.schedules[0])


def outside(changes: list[tuple[PlanChange, float]]) -> int:
    """Count the changes whose two times have the best of all plans not between them."""
    bounded = [(change, best) for change, best in changes if change.bound and change.step is not None]
    assert len(bounded) > 12
    return sum(not change.bound * (1 - 1e-9) <= best <= change.step * (1 + 1e-9) for change, best in bounded)


@pytest.mark.parametrize("place", ["planner._QUICK", "layouts._MOST_PAIRS", "layouts._MOST_SETS"])
def test_the_best_without_a_device_lies_between_the_two_times(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fleets of all choices, of some, and of rows."""
    monkeypatch.setattr(f"penstock.passes.planner.{place}", 2)
    changes = list(in_haste())
    assert not outside(changes)
    close = [change.step <= best * 1.25 for change, best in changes if change.step is not None]
    assert sum(close) > 0.7 * len(close)


def test_control_of_a_bound_that_is_too_high(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search in haste misses the best plan somewhere, and a bound that is one half higher is told."""
    monkeypatch.setattr("penstock.passes.planner.planner._QUICK", 2)
    least = Planner.least
    monkeypatch.setattr(Planner, "least", lambda self, schedule: 1.5 * least(self, schedule))
    assert outside(list(in_haste()))


def test_changes_that_are_searched_in_full_have_no_second_time() -> None:
    for change, best in in_haste():
        assert change.bound == 0
        assert change.step is None or change.step == pytest.approx(best, rel=1e-9)


def test_what_is_left_out_in_haste_is_missed_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a device has to make a plan faster by a tenth, so that small fleets have such devices."""
    monkeypatch.setattr("penstock.passes.planner.planner._QUICK", 2)
    monkeypatch.setattr("penstock.passes.planner.sparing.LITTLE", 0.1)
    left = 0
    for chain, fleet, wanted in CASES:
        planner = Planner(chain, fleet, wanted)
        if (chosen := planner.best(wanted.schedules[0])) is None:
            continue
        kept, told = without_little_help(planner, chosen)
        assert kept.step <= chosen.step * 1.1 ** len(told) * (1 + 1e-9)
        assert len({*chosen.plan.devices} - {*kept.plan.devices}) >= len(told)
        left += len(told)
    assert left


def test_stages_that_close_up_keep_their_order_and_their_devices() -> None:
    for chain, fleet, wanted in CASES[:10]:
        planner = Planner(chain, fleet, wanted)
        best = planner.best(wanted.schedules[0])
        for lost in best.plan.devices if best is not None and len(best.plan.devices) > 1 else ():
            assert best is not None
            if (outcome := closed_up(planner, best.plan, {lost})) is not None:
                devices = [i for i in best.plan.devices if i != lost]
                assert list(outcome.plan.devices) == devices[len(devices) - len(outcome.plan.devices) :]


def test_searches_are_kept_as_far_as_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without room only the search under way is kept, plans are the same, and a planner may forget them all."""
    steps = []
    for room in (10**9, 0):
        monkeypatch.setattr("penstock.passes.planner.planner._KEPT", room)
        for chain, fleet, wanted in CASES[:8]:
            planner = Planner(chain, fleet, wanted)
            outcome = planner.best(wanted.schedules[0])
            steps.append(None if outcome is None else outcome.step)
            assert len(planner._kept) <= (1 if room == 0 else 99)
            planner.forget()
            assert not planner._kept
    assert steps[:8] == steps[8:]
