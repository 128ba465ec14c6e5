"""What is at home in other spaces, and why it goes there: against the program of a rank, followed by other rules."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.passes.memory.test_offload import planned
from tests.passes.memory.test_weights_elsewhere import planned as weights

from penstock.inspection.memory.curves import Curve, memory_curves
from penstock.inspection.memory.homes import Absence, HomeRoom
from penstock.inspection.views.text import show_memory
from penstock.ir.cluster.spaces import Space
from penstock.ir.graph import Module
from penstock.ir.schedule import Action


def curve_of(module: Module, rank: int = 0) -> tuple[Curve, HomeRoom]:
    curve = memory_curves(module)[rank]
    assert curve.home is not None
    return curve, curve.home


@pytest.mark.parametrize(
    "module", [planned("interleaved", "none", "state"), weights("one device")], ids=["state", "weights"]
)
def test_an_item_is_away_from_its_l_to_its_next_ci(module: Module) -> None:
    curve, home = curve_of(module)
    assert {a.item for a in home.absences} == {a.item for a in module.schedule.actions() if a.kind == "CI"}
    for absence in home.absences:
        gone, times, claims = None, [], 0
        for point in curve.points:
            a = Action.parse(point.action)
            if (a.stage, a.item) != (absence.stage, absence.item):
                continue
            claims += {"L": -1, "CI": 1, "CO": 0}.get(a.kind, 0)
            if a.kind == "L" and not claims:
                gone = point.seconds
            elif a.kind == "CI" and gone is not None and claims == 1:
                times.append(point.seconds - gone)
        assert absence.away == max(times)
        assert Action.parse(absence.until).stage == absence.stage
        assert Action.parse(absence.until).kind in {"o": "U", "g": "B", "w": "FBU"}[absence.item]
    assert [a.bytes for a in home.absences] == sorted((a.bytes for a in home.absences), reverse=True)


def test_a_copy_takes_what_the_way_takes() -> None:
    """Gradients come as zeros. The control: a way with half of the bandwidth."""
    for bandwidth in (1e6, 5e5):
        module = weights("one device")
        space = Space("disk", bandwidth=bandwidth, latency=0.001)
        slow = module.but(cluster=replace(module.cluster, spaces=(space,)))
        for absence in curve_of(slow)[1].absences:
            assert absence.copy == pytest.approx(0.0 if absence.item == "g" else 0.001 + absence.bytes / bandwidth)


def test_saved_sets_are_at_home_from_their_copy_to_their_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.passes.memory.offload._moved_for_nothing", lambda *_: iter(()))
    curve, home = curve_of(planned("1f1b", "none", "activations"))
    size = next(a.bytes for a in home.absences if a.item == "a0")
    away, counts = set[int](), list[int]()
    for point in curve.points:
        a = Action.parse(point.action)
        if a.stage == 0 and a.kind == "CO":
            away.add(a.mb)
        elif a.stage == 0 and a.kind == "B":
            away.discard(a.mb)
        counts.append(size * len(away))
    assert list(home.course) == counts
    assert max(counts) == home.bytes > min(counts) == 0
    assert f"there over the run, most after {curve.points[counts.index(max(counts))].action}" in show_memory([curve])


def test_the_text_says_for_how_long_items_go() -> None:
    curve, home = curve_of(weights("one device"))
    text = show_memory([curve])
    assert "there over the run" not in text
    first = home.absences[0]
    assert f"{first.item} of stage {first.stage}" in text
    assert first.until in text
    many = replace(home, absences=tuple(Absence(i, "o", 64, 0.5, "0U1@2", 0.0) for i in range(14)))
    assert "and 2 items more" in show_memory([replace(curve, home=many)])
    assert "6 actions" in show_memory(
        [replace(curve, timed=False, home=replace(many, absences=(replace(first, away=6.0),)))]
    )
