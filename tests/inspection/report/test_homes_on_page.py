"""What ranks have in other spaces, on the page: its facts against the blocks of the program, and in a headless Chromium
the picture, where each block is, and the ways from an item to its copies."""

from __future__ import annotations

import copy
import re
from collections import Counter
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.inspection.test_homes import played
from tests.passes.memory.test_offload import let_sets_go, planned
from tests.passes.memory.test_weights_elsewhere import planned as weights

from penstock.inspection.report.facts import gather
from penstock.inspection.report.material import Material
from penstock.inspection.report.page import render
from penstock.inspection.report.schedule_facts import TICKS
from penstock.ir.graph import Module
from penstock.ir.schedule import Action
from penstock.passes.simulator.forecast import BATCHES
from penstock.planning.predict import predict

from .chromium import Browser


@pytest.fixture(scope="module")
def subjects() -> dict[str, tuple[Module, dict[str, Any]]]:
    """Plans whose weights are elsewhere, and what forwards saved, with the facts of their reports."""
    with pytest.MonkeyPatch.context() as patch:
        let_sets_go(patch)
        modules = {"weights": weights("one device"), "sets": planned("1f1b", "none", "activations")}
    return {name: (module, gather(Material(module), plain=True)) for name, module in modules.items()}


def in_rows(flat: list[Any], width: int) -> list[list[Any]]:
    return [flat[i : i + width] for i in range(0, len(flat), width)]


def actions_of(module: Module, rank: int) -> list[Action]:
    assert module.schedule is not None
    return list(module.schedule.expand(rank, BATCHES))


@pytest.mark.parametrize("name", ["weights", "sets"])
def test_facts_of_homes_are_those_of_the_blocks(subjects: dict[str, tuple[Module, dict[str, Any]]], name: str) -> None:
    """Curves change as they do block by block. What is where at a time adds up to them."""
    module, facts = subjects[name]
    for rank, told in enumerate(facts["memory"]):
        for home in told["homes"]:
            rows = in_rows(home["points"], 3)
            expected = [(alone, there - alone) for there, alone in played(module, rank, actions_of(module, rank))]
            assert [(alone, also) for _, alone, also in rows] == [row for row, _ in groupby(expected)]
            assert home["space"] == "disk"
            times = Counter(time for time, _, _ in rows)
            stays = in_rows(home["stays"], 6)
            for time, alone, _ in rows:
                now = [
                    size
                    for _, _, size, here, begin, end in stays
                    if not here and begin <= time and not 0 <= end <= time
                ]
                assert times[time] > 1 or sum(now) == alone
    assert any(told["homes"] for told in facts["memory"])


@pytest.mark.parametrize("name", ["weights", "sets"])
def test_copies_of_the_schedule_are_those_that_move_something(
    subjects: dict[str, tuple[Module, dict[str, Any]]], name: str
) -> None:
    """What is claimed once more is not copied; each copy lasts until something waits for it."""
    module, facts = subjects[name]
    planned = facts["schedule"]["planned"]
    for rank, flat in zip(planned["ranks"], planned["copies"], strict=True):
        claims, expected = Counter[tuple[int, str]](), []
        for a in actions_of(module, rank):
            key = a.stage, a.item
            if a.kind in ("CI", "L") and a.item and a.item != "a0":
                claims[key] = max(0, claims[key] + (1 if a.kind == "CI" else -1))
            if a.kind == "CO" or (a.kind == "CI" and (a.item == "a0" or claims[key] == 1)):
                expected.append((str(a), a.kind, a.mb, a.item != "a0"))
        rows = in_rows(flat, 6)
        assert [(row[0], facts["schedule"]["kinds"][row[1]], row[2], bool(row[3])) for row in rows] == expected
        assert all(row[4] >= 0 and row[5] >= 0 for row in rows)
    # The schedule is not drained between two copies of an item: the first ends before the second begins.
    lanes = [row for flat in planned["copies"] for row in in_rows(flat, 6) if row[0].endswith(":w")]
    for _, group in groupby(
        sorted(lanes, key=lambda row: (row[0][0], row[1], row[4])), key=lambda row: (row[0][0], row[1])
    ):
        listed = list(group)
        assert all(first[4] + first[5] <= then[4] for first, then in pairwise(listed))


def opened(browser: Browser, facts: dict[str, Any], folder: Path, view: str = "memory") -> None:
    (folder / "index.html").write_text(render(facts), encoding="utf-8")
    browser.open(folder / "index.html", fragment=f"#{view}")


def path_of(browser: Browser, kind: str) -> str:
    return str(browser.js(f"document.querySelector('.area path.fill-{kind}').getAttribute('d')"))


def heights(path: str, count: int) -> list[float]:
    """Where the upper edge of an area stands at each of so many points, which has two corners for each."""
    corners = [tuple(map(float, pair.split(","))) for pair in re.findall(r"[-\d.]+,[-\d.]+", path)]
    return [corners[2 * i][1] for i in range(count)]


def test_the_curve_of_a_home_is_drawn_under_that_of_the_device(
    browser: Browser, subjects: dict[str, tuple[Module, dict[str, Any]]], tmp_path: Path
) -> None:
    """Heights are in proportion to bytes, and both pictures have one axis and one cursor. The controls: other bytes are
    another picture, and a plan without homes has none."""
    _, facts = subjects["sets"]
    opened(browser, facts, tmp_path)
    assert browser.js("[...document.querySelectorAll('.area .home')].map((line) => line.textContent)") == ["in disk"]
    rows = in_rows(facts["memory"][0]["homes"][0]["points"], 3)

    def fits(path: str) -> bool:
        drawn = list(zip(heights(path, len(rows)), (alone + also for _, alone, also in rows), strict=True))
        (low, nothing), (high, most) = max(drawn), min(drawn)
        return all(y == pytest.approx(low - (low - high) * size / most, abs=0.2) for y, size in drawn) and not nothing

    assert fits(path_of(browser, "also"))
    line = "document.querySelector('.area .cursor')"
    assert (
        float(browser.js(f"{line}.getAttribute('y2')"))
        == browser.js("document.querySelector('.area').clientHeight") - 6
    )
    before = [path_of(browser, kind) for kind in ("activations", "also")]
    browser.js("document.querySelector('.area').focus()")
    browser.key("+")
    assert all(path_of(browser, kind) != path for kind, path in zip(("activations", "also"), before, strict=True))
    assert not browser.complaints()
    wrong = copy.deepcopy(facts)
    place = rows.index(max(rows, key=lambda row: row[2]))
    wrong["memory"][0]["homes"][0]["points"][3 * place + 2] //= 2
    opened(browser, wrong, tmp_path)
    assert not fits(path_of(browser, "also"))
    bare = copy.deepcopy(facts)
    for rank in bare["memory"]:
        rank["homes"] = []
    opened(browser, bare, tmp_path)
    assert browser.js("document.querySelector('.area').clientHeight") == 300
    assert browser.js("document.querySelectorAll('.area .home, .area .fill-also, .elsewhere').length") == 0
    assert "at home" not in browser.js("document.querySelector('.moment').innerText")
    assert not browser.complaints()


def test_blocks_that_are_elsewhere_are_told_from_those_on_the_device(
    browser: Browser, subjects: dict[str, tuple[Module, dict[str, Any]]], tmp_path: Path
) -> None:
    """At each of some moments, against the claims of the program until then."""
    module, facts = subjects["weights"]
    (told,) = facts["memory"]
    opened(browser, facts, tmp_path)
    browser.js("document.querySelector('.area').focus()")
    browser.key("Home")
    ends, at = [], 0
    run = facts_of_run(module)
    for point in in_rows(told["points"], 5)[:24]:
        while at < len(run) and run[at][1] <= point[0]:
            ends.append(run[at][0])
            at += 1
        claims = Counter[tuple[int, str]]()
        for a in ends:
            if a.item and a.kind in ("CI", "L"):
                claims[a.stage, a.item] = max(0, claims[a.stage, a.item] + (1 if a.kind == "CI" else -1))
        items = {(stage, item) for stage in range(4) for item in "wo"}
        away = sorted(f"{item} of stage {stage}" for stage, item in items if not claims[stage, item])
        browser.js("document.querySelector('.moment .several button')?.click()")
        rows = browser.js(
            "[...document.querySelectorAll('.moment .tensor')].map((row) => [row.querySelector('code').innerText, "
            "row.querySelector('small').innerText, row.classList.contains('elsewhere')])"
        )
        assert sorted(name for name, _, elsewhere in rows if elsewhere) == away
        assert all((where == "in disk") == elsewhere for _, where, elsewhere in rows)
        here = sorted(f"{item} of stage {stage}" for (stage, item), count in claims.items() if count)
        assert sorted(name for name, _, elsewhere in rows if " of stage " in name and not elsewhere) == here
        browser.key("ArrowRight")


def facts_of_run(module: Module) -> list[tuple[Action, int]]:
    """The actions of rank 0 and the ticks at which they end, by the forecast that the report makes."""
    found = predict(module).forecast.simulated
    return [(action, round(end * TICKS)) for action, _, end in found.timed(0)]


def test_an_item_leads_to_its_copies_and_says_why_it_goes(
    browser: Browser, subjects: dict[str, tuple[Module, dict[str, Any]]], tmp_path: Path
) -> None:
    """By its links to lanes of the schedule, and on by keys. The controls: what the schedule does not have is no link,
    and a plan without homes has no lanes."""
    _, facts = subjects["weights"]
    (home,) = facts["memory"][0]["homes"]
    opened(browser, facts, tmp_path)
    table = "[...document.querySelectorAll('.moment .wide tbody tr')]"
    rows = browser.js(f"{table}.map((row) => [...row.cells].map((cell) => cell.innerText))")
    strings, names = facts["strings"], facts["schedule"]["planned"]["copies"][0][::6]
    assert [[row[0], row[3], *row[5:]] for row in rows] == [
        [strings[item], until, out or "no copy", back] for item, _, _, until, _, out, back in home["absences"]
    ]
    assert {row[4] for row in rows if row[0].startswith("g")} == {"nothing"}
    links = browser.js("[...document.querySelectorAll('.moment .wide button')].map((each) => each.innerText)")
    ways = [name for row in home["absences"] for name in row[5:] if name]
    assert links == [name for name in ways if name in names]
    assert len(links) > 12
    for name in (links[0], links[1], links[-1]):
        browser.js("document.getElementById('tab-memory').click()")
        browser.js(
            f"[...document.querySelectorAll('.moment .wide button')].find((b) => b.innerText === '{name}').click()"
        )
        assert browser.js("document.getElementById('view-schedule').hidden") is False
        assert browser.js("document.querySelector('.gantt .slice.focused').slice.name") == name
        kind = "copy in" if Action.parse(name).kind == "CI" else "copy out"
        tip = browser.js("document.getElementById('tip').innerText")
        assert tip.startswith(f"{name} · {kind}")
        assert "is awaited after" in tip
    lane = [row for row in in_rows(facts["schedule"]["planned"]["copies"][0], 6) if row[1] == kinds(facts, links[-1])]
    place = [row[0] for row in lane].index(links[-1])
    browser.key("ArrowLeft")
    assert browser.js("document.getElementById('tip').innerText").startswith(lane[place - 1][0])
    browser.key("ArrowUp")
    assert not browser.complaints()
    short = copy.deepcopy(facts)
    short["schedule"]["planned"]["copies"] = [[]]
    opened(browser, short, tmp_path)
    assert browser.js("document.querySelectorAll('.moment .wide button').length") == 0
    assert links[0] in browser.js("document.querySelector('.moment .wide').innerText")
    browser.js("document.getElementById('tab-schedule').click()")
    assert "copies in" not in browser.js("document.querySelector('.gantt').textContent")
    assert not browser.complaints()


def kinds(facts: dict[str, Any], name: str) -> int:
    return int(facts["schedule"]["kinds"].index(Action.parse(name).kind))


def test_hostile_names_of_spaces_are_inert(
    browser: Browser, subjects: dict[str, tuple[Module, dict[str, Any]]], tmp_path: Path
) -> None:
    facts = copy.deepcopy(subjects["sets"][1])
    hostile = '<img src=x onerror="window.hacked=1">'
    for rank in facts["memory"]:
        for home in rank["homes"]:
            home["space"] = hostile
    opened(browser, facts, tmp_path)
    assert f"in {hostile}" in browser.js("document.querySelector('.area').textContent")
    assert browser.js("window.hacked") is None
    assert browser.js("document.querySelectorAll('main img').length") == 0
    assert not browser.complaints()
