"""What is at home in other spaces, and why it goes there: against the program of a rank, followed by other rules."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
from tests.passes.memory.test_offload import edited, let_sets_go, planned
from tests.passes.memory.test_weights_elsewhere import planned as weights
from tests.passes.memory.test_weights_in_versions import planned as versions

from penstock.inspection.memory.curves import Curve, memory_curves
from penstock.inspection.memory.homes import Absence, HomePoint, HomeRoom
from penstock.inspection.views.plain import as_json
from penstock.inspection.views.text import show_memory
from penstock.ir.cluster.spaces import Space
from penstock.ir.graph import Module
from penstock.ir.schedule import Action


def curve_of(module: Module, rank: int = 0) -> tuple[Curve, HomeRoom]:
    curve = memory_curves(module)[rank]
    (home,) = curve.homes
    return curve, home


def case(name: str) -> Module:
    return {
        "state": lambda: planned("interleaved", "none", "state"),
        "sets": lambda: planned("1f1b", "none", "activations"),
        "weights": lambda: weights("one device"),
        "all of it": lambda: weights("wrapped, all of it"),
        "two versions": lambda: versions("all of it"),
    }[name]()


CASES = ("state", "sets", "weights", "all of it", "two versions")


def padded(sizes: Iterator[int]) -> int:
    return sum(-(-size // 64) * 64 for size in sizes)


def sizes_at_home(module: Module, rank: int) -> dict[tuple[int, str], tuple[int, int]]:
    """The bytes of each item of a rank at home, and its versions: from the variables, and from what forwards save."""
    found = {}
    for stage in module.rank_packs()[rank]:
        for item, role in (("w", "param"), ("o", "state")):
            items = [v for v in module.vars.values() if (v.stage, v.role) == (stage, role) and v.home]
            if items:
                found[stage, item] = padded(v.type.nbytes for v in items), max(v.versions for v in items)
        forward = module.graphs.get(f"s{stage}.F")
        if forward is not None and module.stages[stage].home:
            kept = {*forward.ins, *forward.outs}
            found[stage, "a0"] = padded(v.type.nbytes for v in forward.saved if v not in kept), 0
    return found


def played(module: Module, rank: int, actions: list[Action]) -> list[tuple[int, int]]:
    """The bytes at home after each action, and those there alone: by the blocks that are in each place, one by one."""
    sizes, device, points = sizes_at_home(module, rank), Counter[tuple[int, str, int | None]](), []
    home = {(*key, 0 if count == 2 else None) for key, (_, count) in sizes.items() if count}
    for a in actions:
        block = a.stage, a.item, a.mb if a.item == "a0" else a.version
        if a.kind == "CO":
            home.add(block)
            if a.version is not None:
                home.discard((a.stage, a.item, a.version - 2))
        elif a.item and a.kind in ("CI", "L"):
            device[block] = max(0, device[block] + (1 if a.kind == "CI" else -1))
        elif a.kind == "F":
            device[a.stage, "a0", a.mb] = 1
        elif a.kind in ("R", "B"):
            home.discard((a.stage, "a0", a.mb))
        there = [(sizes[key[:2]][0], key) for key in home]
        points.append((sum(size for size, _ in there), sum(size for size, key in there if not device[key])))
    return points


def bytes_of(home: HomeRoom) -> list[tuple[int, int]]:
    return [(point.there, point.alone) for point in home.points]


@pytest.mark.parametrize("name", CASES)
def test_the_curve_of_a_home_is_that_of_its_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the same actions as the curve of the device, of all ranks. The control: a copy out that is left out."""
    let_sets_go(monkeypatch)
    module, moving = case(name), 0
    for rank, curve in enumerate(memory_curves(module)):
        for home in curve.homes:
            assert [p.action for p in home.points] == [p.action for p in curve.points]
            assert [p.seconds for p in home.points] == [p.seconds for p in curve.points]
            expected = played(module, rank, [Action.parse(p.action) for p in curve.points])
            assert bytes_of(home) == expected
            assert max(there for there, _ in expected) == home.bytes
            moving += len({alone for _, alone in expected}) > 1
    assert moving
    if item := {"sets": "a0", "two versions": "w"}.get(name):
        short = edited(module, lambda _, a: () if a.kind == "CO" and a.item == item else (a,))
        changed, whole = (
            [(p.action, p.there) for curve in memory_curves(m) for home in curve.homes for p in home.points]
            for m in (short, module)
        )
        rest = [row for row in whole if not (Action.parse(row[0]).kind == "CO" and row[0].endswith(item))]
        assert [action for action, _ in changed] == [action for action, _ in rest]
        assert changed != rest


@pytest.mark.parametrize("name", ["state", "weights", "two versions"])
def test_stays_are_the_bytes_that_are_there_alone_and_on_the_device(name: str) -> None:
    """At each moment at which no two actions end, beside what the player has in each place."""
    module = case(name)
    curve, home = curve_of(module)
    actions = [Action.parse(point.action) for point in curve.points]
    times = Counter(point.seconds for point in home.points)
    device, held = Counter[tuple[int, str, int | None]](), 0
    sizes = sizes_at_home(module, 0)
    for a, point in zip(actions, home.points, strict=True):
        if a.item in ("w", "o") and a.kind in ("CI", "L"):
            block = a.stage, a.item, a.version
            device[block] = max(0, device[block] + (1 if a.kind == "CI" else -1))
        if times[point.seconds] > 1 or not point.seconds:
            continue
        now = [s for s in home.stays if s.begin <= point.seconds and (s.end is None or s.end > point.seconds)]
        assert sum(s.bytes for s in now if not s.here) == point.alone
        expected = sum(sizes[key[:2]][0] for key, count in device.items() if count)
        assert sum(s.bytes for s in now if s.here and s.item != "g") == expected
        held += 1
    assert held > 10


def test_the_device_and_the_home_have_all_state_between_them() -> None:
    """At the end as much as a plan with all of it on the device; without the home less. After an update its state is on
    the device, and all other state is not."""
    kept, module = planned("interleaved", "none", "none"), planned("interleaved", "none", "state")
    curve, home = curve_of(module)
    sizes = [v.type.nbytes for v in module.vars.values() if v.home and v.stage in module.rank_packs()[0]]
    gaps = padded(iter(sizes)) - sum(sizes)
    whole = memory_curves(kept)[0].points
    assert whole[-1].live + gaps == curve.points[-1].live + home.points[-1].alone
    assert whole[-1].live > curve.points[-1].live
    ends = [i for i, point in enumerate(curve.points) if Action.parse(point.action).kind == "U"]
    total = padded(iter(sizes))
    for i in ends:
        stage = Action.parse(curve.points[i].action).stage
        here = sizes_at_home(module, 0)[stage, "o"][0]
        assert home.points[i].there == total
        assert home.points[i].alone == total - here


def test_a_rank_has_a_curve_for_each_space() -> None:
    """Two stages of a rank have state in a space of their own each: together they are as in one."""
    module = planned("interleaved", "none", "state")
    first, second = module.rank_packs()[0]
    assert module.cluster is not None
    spaces = (Space("disk"), Space("ssd"))
    apart = {name: replace(v, home="ssd") if v.home and v.stage == second else v for name, v in module.vars.items()}
    both = module.but(vars=apart, cluster=replace(module.cluster, spaces=spaces))
    curve, (home,) = memory_curves(both)[0], memory_curves(module)[0].homes
    assert [room.space for room in curve.homes] == ["disk", "ssd"]
    assert [{stay.stage for stay in room.stays} for room in curve.homes] == [{first}, {second}]
    for field in ("bytes", "moved_per_batch"):
        assert sum(getattr(room, field) for room in curve.homes) == getattr(home, field)
    together = zip(*(bytes_of(room) for room in curve.homes), strict=True)
    assert [tuple(map(sum, zip(*rows, strict=True))) for rows in together] == bytes_of(home)
    text = show_memory([curve])
    assert "rank 0, disk: there over" in text
    assert "rank 0, ssd: there over" in text


@pytest.mark.parametrize(
    "module", [planned("interleaved", "none", "state"), weights("one device")], ids=["state", "weights"]
)
def test_an_item_is_away_from_its_l_to_its_next_ci(module: Module) -> None:
    curve, home = curve_of(module)
    assert {a.item for a in home.absences} == {a.item for a in module.schedule.actions() if a.kind == "CI"}
    for absence in home.absences:
        gone, out, times, claims = None, "", [], 0
        for point in curve.points:
            a = Action.parse(point.action)
            if (a.stage, a.item) != (absence.stage, absence.item):
                continue
            claims += {"L": -1, "CI": 1, "CO": 0}.get(a.kind, 0)
            if a.kind == "CO":
                out = point.action
            elif a.kind == "L" and not claims:
                gone = point.seconds
            elif a.kind == "CI" and claims == 1:
                if gone is not None:
                    times.append((point.seconds - gone, out, point.action))
                out = ""
        longest = max(time for time, _, _ in times)
        assert absence.away == longest
        assert (longest, absence.out, absence.back) in times
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
    let_sets_go(monkeypatch)
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
    assert [point.there for point in home.points] == counts
    assert max(counts) == home.bytes > min(counts) == 0
    assert (
        f", most at {curve.points[counts.index(max(counts))].action} after " in show_memory([curve]).split("disk:")[1]
    )


def plotted(text: str, head: str) -> list[str]:
    """The rows of a curve in text, without their labels."""
    lines = text.splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith(head))
    return [line.split("┤")[1] for line in lines[begin + 1 : begin + 5]]


def test_curves_in_text_are_under_each_other_at_the_same_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell of the home is full where bytes are there alone, shaded where they are on the device as well, at the times
    of its points. The control: the curve of a home that is empty."""
    let_sets_go(monkeypatch)
    curve, home = curve_of(planned("1f1b", "none", "activations"))
    text = show_memory([curve])
    assert text.index("rank 0, stage 0 on cpu:0: live") < text.index("rank 0, disk: there")
    (*_, top), lowest = plotted(text, "rank 0, disk")[::-1], plotted(text, "rank 0, disk")[-1].ljust(88)
    end = curve.points[-1].seconds
    for column in range(88):
        begins, ends = column / 88 * end, (column + 1) / 88 * end
        inside = [
            p
            for p, after in zip(home.points, home.points[1:], strict=False)
            if p.seconds < ends and after.seconds > begins
        ]
        alone, there = max((p.alone for p in inside), default=0), max((p.there for p in inside), default=0)
        assert lowest[column] == ("█" if alone else "░" if there else " ") or not inside
    assert "░" in top
    assert "█" not in top
    empty = replace(home, points=tuple(HomePoint(p.seconds, p.action, 0, 0) for p in home.points))
    bare = show_memory([replace(curve, homes=(empty,))])
    assert not any(row for row in plotted(bare, "rank 0, disk"))
    assert plotted(bare, "rank 0, stage 0") == plotted(text, "rank 0, stage 0")


def test_the_text_says_for_how_long_items_go() -> None:
    curve, home = curve_of(weights("one device"))
    text = show_memory([curve])
    first = home.absences[0]
    row = next(line for line in text.splitlines() if line.startswith(f"{first.item} of stage {first.stage} "))
    assert all(f" {word} " in row for word in (first.out, first.back, first.until))
    assert "no copy" in text
    many = replace(home, absences=tuple(Absence(i, "o", 64, 0.5, "0U1@2", 0.0, "", "0CI1:o") for i in range(14)))
    assert "and 2 items more" in show_memory([replace(curve, homes=(many,))])
    assert "6 actions" in show_memory(
        [replace(curve, timed=False, homes=(replace(many, absences=(replace(first, away=6.0),)),))]
    )


def test_json_has_the_points_of_each_home() -> None:
    """The control: a plan with all of it on the device."""
    curve, home = curve_of(weights("one device"))
    (told,) = json.loads(as_json([curve]))
    assert [(p["action"], p["seconds"]) for p in told["homes"][0]["points"]] == [
        (p["action"], p["seconds"]) for p in told["points"]
    ]
    assert [(p["there"], p["alone"]) for p in told["homes"][0]["points"]] == bytes_of(home)
    (kept,) = json.loads(as_json(memory_curves(weights("one device", "none"))))
    assert kept["homes"] == []
