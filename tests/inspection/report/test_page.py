"""Tests of the page in a headless Chromium, by pointer and by keys: it loads nothing from elsewhere, and names are only
names."""

from __future__ import annotations

import base64
import colorsys
import copy
import hashlib
import json
import re
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.inspection.report.facts import gather
from penstock.inspection.report.material import Material, RunTrace
from penstock.inspection.report.page import render
from penstock.inspection.report.sharding_facts import sharding_facts
from penstock.ir.cluster.cluster import Device
from penstock.ir.graph import Module, Note
from penstock.models import write_mlp
from penstock.runtime.telemetry.collective_times import CollectiveTotal

from .chromium import Browser, PageError
from .small_plan import Planned

VIEWS = ("overview", "graph", "passes", "placement", "why", "schedule", "memory", "links", "kernels")


@pytest.fixture(scope="module")
def facts(planned: Planned) -> dict[str, Any]:
    return gather(planned.material, plain=True)


@pytest.fixture(scope="module")
def page(facts: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "index.html"
    path.write_text(render(facts), encoding="utf-8")
    return path


def shown(browser: Browser, selector: str) -> str:
    """The text of an element."""
    return str(browser.js(f"document.querySelector({json.dumps(selector)}).innerText"))


def policy_hash(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def test_every_view_opens_without_a_complaint_and_without_a_request(browser: Browser, page: Path) -> None:
    browser.open(page)
    for name in VIEWS:
        browser.js(f"document.getElementById('tab-{name}').click()")
        assert shown(browser, f"#view-{name} h2")
        assert browser.js("document.documentElement.scrollWidth <= innerWidth")
    assert not browser.complaints()
    assert browser.requests() == [page.as_uri()]


def test_the_checks_see_an_error_a_request_and_a_script_that_was_smuggled_in(
    browser: Browser, facts: dict[str, Any], tmp_path: Path
) -> None:
    """The control of the test above; what the policy refuses is also a complaint."""
    text = render(facts)
    (script,) = (part for part in re.findall("<script>(.*?)</script>", text, re.DOTALL) if "\nstartSearch();" in part)
    broken = script.replace("\nstartSearch();", "\nstartSearch(); undefinedName();")
    # The policy names the script by its hash.
    (tmp_path / "error.html").write_text(text.replace(script, broken).replace(policy_hash(script), policy_hash(broken)))
    with pytest.raises(PageError, match="undefinedName is not defined"):
        browser.open(tmp_path / "error.html")
    smuggled = text.replace(
        '<main id="main"', '<img src="picture.png"><script>window.smuggled = 1</script><main id="main"'
    )
    (tmp_path / "smuggled.html").write_text(smuggled)
    browser.open(tmp_path / "smuggled.html")
    assert len([line for line in browser.complaints() if "Content Security Policy" in line]) == 2
    assert browser.js("window.smuggled") is None


def test_search_finds_an_operation_and_tells_its_way_to_the_kernel(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.key("/")
    browser.type("h.1.mlp.gelu")
    assert browser.js("document.querySelectorAll('#found [role=option]').length") > 0
    assert browser.js("document.getElementById('search').getAttribute('aria-expanded')") == "true"
    browser.key("ArrowDown")
    browser.key("ArrowUp")
    browser.key("Enter")
    assert "h.1.mlp.gelu" in shown(browser, "#details")
    for part in ("Source", "Passes", "Stage", "Why there", "Kernel", "Taken by"):
        assert part in shown(browser, "#details .chain")
    assert browser.js("document.querySelectorAll('#view-graph .node.selected').length") == 1
    # From there to the kernel, and back with the keyboard.
    browser.js(
        "[...document.querySelectorAll('#details button.link')].find((b) => /^s\\d\\.F\\/k/.test(b.textContent)).click()"
    )
    assert browser.js("document.getElementById('view-kernels').hidden") is False
    assert ".F/k" in shown(browser, ".kernel-detail h3")
    browser.key("Escape")
    assert browser.js("document.getElementById('details').hidden") is True
    browser.key("/")
    browser.type("no such thing")
    assert "Nothing is called that" in shown(browser, "#found")
    browser.key("Escape")
    assert browser.js("document.getElementById('found').hidden") is True
    assert not browser.complaints()


def test_the_slider_goes_through_the_passes(browser: Browser, page: Path, facts: dict[str, Any]) -> None:
    browser.open(page, fragment="#passes")
    browser.js("document.getElementById('pass').focus()")
    browser.key("Home")
    for number, told in enumerate(facts["passes"]):
        assert shown(browser, ".pass-head h3") == f"{number}. {told['name']}"
        rows = sum(len(part["rows"]) for part in told["parts"] if len(part["rows"]) <= 150)
        lines = browser.js("document.querySelectorAll('.changes .line').length")
        assert lines >= rows
        browser.key("ArrowRight")
    names = [told["name"] for told in facts["passes"]]
    browser.js(f"document.querySelectorAll('.pass-list button')[{names.index('fuse')}].click()")
    browser.js(
        "(() => { const f = document.getElementById('pass-filter'); f.value = 'lm_head'; f.dispatchEvent(new Event('input')) })()"
    )
    lines = browser.js("[...document.querySelectorAll('.changes .line')].map((line) => line.textContent)")
    assert lines
    assert any("kernel=" in line for line in lines)
    assert browser.js("document.querySelectorAll('.changes ins').length") > 0


def test_pointing_at_an_action_follows_its_microbatch(browser: Browser, page: Path, facts: dict[str, Any]) -> None:
    browser.open(page, fragment="#schedule")
    assert browser.js("document.querySelectorAll('.gantt .slice').length") > 20
    browser.point(*browser.middle(".gantt .slice.kind-F"))
    assert browser.js("document.getElementById('tip').hidden") is False
    assert "forward" in shown(browser, "#tip")
    assert "microbatch" in shown(browser, "#tip")
    assert (
        browser.js(
            "[...new Set([...document.querySelectorAll('.gantt .slice.lit')].map((box) => box.slice.number))].length"
        )
        == 1
    )
    ranks = browser.js(
        "[...new Set([...document.querySelectorAll('.gantt .slice.lit')].map((box) => box.slice.rank))].length"
    )
    assert ranks == len(facts["placement"]["ranks"])
    # By keys: along a rank, and to the measured line below it.
    browser.js("document.querySelector('.gantt').focus()")
    browser.key("ArrowRight")
    browser.key("ArrowRight")
    first = shown(browser, "#tip")
    assert "planned" in first
    browser.key("ArrowDown")
    assert "measured" in shown(browser, "#tip")
    assert shown(browser, "#said")
    browser.key("Escape")
    assert browser.js("document.getElementById('tip').hidden") is True


def test_a_trace_with_a_warm_up_opens_where_it_can_be_compared(
    browser: Browser, planned: Planned, tmp_path: Path
) -> None:
    """A first forward that takes longer than all else would be all that one sees from the beginning of batch 0."""
    assert planned.material.trace is not None
    warm = {
        rank: [(a, start + 10.0 * (i > 0), took + 10.0 * (i == 0)) for i, (a, start, took) in enumerate(line)]
        for rank, line in planned.material.trace.actions.items()
    }
    facts = gather(replace(planned.material, trace=RunTrace(warm, {})), plain=True)
    (tmp_path / "warm.html").write_text(render(facts), encoding="utf-8")
    browser.open(tmp_path / "warm.html", fragment="#schedule")
    batch = "document.querySelector('#view-schedule input[type=number]')"
    wide = "[...document.querySelectorAll('.gantt .slice')].filter((box) => +box.getAttribute('height') === 15 && +box.getAttribute('width') > 4).length"
    assert browser.js(f"{batch}.value") == str(facts["schedule"]["measured"]["at"][0]) != "0"
    assert browser.js(wide) >= 2 * facts["schedule"]["microbatches"]
    # The control: from batch 0, the warm-up is one bar.
    browser.js(f"({batch}.value = 0, {batch}.dispatchEvent(new Event('change')))")
    assert browser.js(wide) <= 2
    assert not browser.complaints()


def test_a_run_far_from_its_plan_is_compared_batch_by_batch(browser: Browser, planned: Planned, tmp_path: Path) -> None:
    assert planned.material.trace is not None
    slow = {
        rank: [(a, 20 * start, 20 * took) for a, start, took in line]
        for rank, line in planned.material.trace.actions.items()
    }
    facts = gather(replace(planned.material, trace=RunTrace(slow, {})), plain=True)
    (tmp_path / "slow.html").write_text(render(facts), encoding="utf-8")
    browser.open(tmp_path / "slow.html", fragment="#schedule")
    widths = "((height) => [...document.querySelectorAll('.gantt .slice.kind-B')].filter((box) => +box.getAttribute('height') === height).map((box) => +box.getAttribute('width')).sort((a, b) => b - a)[0])"
    assert browser.js(f"{widths}(24)") == pytest.approx(browser.js(f"{widths}(15)"), rel=0.05)
    # What is told is what was planned.
    took = max(p for _, kind, p, _ in facts["schedule"]["measured"]["compared"] if kind == "B")
    browser.js("document.querySelector('.gantt').focus()")
    for _ in range(20):
        browser.key("ArrowRight")
        if "backward" in shown(browser, "#tip"):
            break
    assert f"{took * 1e6:.1f} µs, planned" in shown(browser, "#tip")
    # The control: at one scale, planned actions are narrow.
    browser.js(
        "[...document.querySelectorAll('#view-schedule .choice input')].find((each) => each.value === 'same').click()"
    )
    assert browser.js(f"{widths}(24)") < browser.js(f"{widths}(15)") / 10
    assert not browser.complaints()


def test_stages_have_other_hues_than_actions(browser: Browser, page: Path) -> None:
    for scheme in ("light", "dark"):
        browser.open(page, scheme=scheme)
        read = "((name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim())"
        stages, kinds = (
            [browser.js(f"{read}('--{name}')") for name in names] for names in ([f"s{i}" for i in range(8)], "fbwup")
        )
        apart = [abs(_hue(a) - _hue(b)) for a in stages for b in kinds] + [
            abs(_hue(a) - _hue(b)) for a, b in combinations(stages, 2)
        ]
        assert min(min(each, 360 - each) for each in apart) > 18


def _hue(colour: str) -> float:
    return 360 * colorsys.rgb_to_hls(*(int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)))[0]


def test_arrows_say_per_what_and_bars_of_a_column_begin_together(
    browser: Browser, page: Path, facts: dict[str, Any]
) -> None:
    browser.open(page)
    sent = [(edge["per"], sum(size for _, _, size in edge["values"])) for edge in facts["links"]["edges"]]
    told = browser.js("[...document.querySelectorAll('#view-overview .flow-text')].map((line) => line.textContent)")
    assert sorted(told) == sorted(f"{_bytes(size)} per {per}" for per, size in sent)
    for name in ("overview", "placement", "kernels"):
        browser.js(f"document.getElementById('tab-{name}').click()")
        starts = f"[...document.querySelectorAll('#view-{name} tbody tr')].map((row) => [...row.querySelectorAll('.meter')].map((bar) => Math.round(bar.getBoundingClientRect().x)))"
        rows = browser.js(starts)
        assert rows
        assert all(row == rows[0] for row in rows)


def test_the_roofline_has_kernels_that_were_timed(
    browser: Browser, page: Path, facts: dict[str, Any], tmp_path: Path
) -> None:
    browser.open(page, fragment="#kernels")
    assert "none of these was timed" in shown(browser, "#view-kernels")
    assert browser.js("document.querySelectorAll('.spot').length") == 0
    work = browser.js(
        "[...document.querySelectorAll('#view-kernels tbody td:nth-child(4)')].map((cell) => cell.textContent)"
    )
    assert work
    assert all(re.fullmatch(r"–|[\d.]{1,4} [kMGT]?FLOP", each) for each in work)
    rows = copy.deepcopy(facts["kernels"]["rows"])
    timed = [row for row in rows if row["flops"] and row["bytes"]][:3]
    for row in timed:
        row["measured"] = 2 * row["roofline"]
    (tmp_path / "timed.html").write_text(
        render(facts | {"kernels": facts["kernels"] | {"rows": rows}}), encoding="utf-8"
    )
    browser.open(tmp_path / "timed.html", fragment="#kernels")
    assert browser.js("document.querySelectorAll('.spot').length") == len(timed)
    assert "3 of" in shown(browser, "#view-kernels .hint")
    assert not browser.complaints()


def test_memory_at_its_peak_is_the_predicted_peak(browser: Browser, page: Path, facts: dict[str, Any]) -> None:
    browser.open(page, fragment="#memory")
    for rank in facts["memory"]:
        browser.js(
            f"(() => {{ const s = document.getElementById('memory-rank'); s.value = {rank['rank']}; s.dispatchEvent(new Event('change')) }})()"
        )
        peak = facts["placement"]["ranks"][rank["rank"]]["peak"]
        assert f": {_bytes(peak)}" in shown(browser, ".moment h3")
        before = shown(browser, ".moment")
        browser.js("document.querySelector('.area').focus()")
        browser.key("Home")
        assert shown(browser, ".moment") != before


def _bytes(count: float) -> str:
    """As the page writes it."""
    if count < 1024:
        return f"{count:.0f} B"
    return _bytes_of(count / 1024, "KiB") if count < 1024**2 else _bytes_of(count / 1024**2, "MiB")


def _bytes_of(count: float, unit: str) -> str:
    return f"{count:.{2 if count < 10 else 1}f} {unit}"


def test_everything_is_reached_by_keys(browser: Browser, page: Path) -> None:
    browser.open(page)
    seen = []
    for _ in range(4):
        browser.key("Tab")
        seen.append(browser.js("document.activeElement.id || document.activeElement.className"))
    assert seen == ["skip", "search", "theme", "tab-overview"]
    assert browser.js("getComputedStyle(document.activeElement).outlineStyle") != "none"
    browser.key("ArrowRight")
    assert browser.js("document.activeElement.id") == "tab-graph"
    assert browser.js("document.getElementById('view-graph').hidden") is False
    browser.js("document.querySelector('.graph').focus()")
    blocks = "document.querySelectorAll('.graph .node').length"
    before = browser.js(blocks)
    for _ in range(20):
        browser.key("ArrowDown")
        if browser.js("document.querySelector('.graph .focused.block:not(.open)') !== null"):
            break
    browser.key("Enter")
    assert browser.js(blocks) > before
    browser.key("Enter")
    assert browser.js(blocks) == before
    shift = "document.querySelector('.graph > g').getAttribute('transform')"
    before = browser.js(shift)
    browser.key("+")
    assert browser.js(shift) != before
    assert not browser.complaints()


def test_light_and_dark_follow_the_system_and_the_switch(browser: Browser, page: Path) -> None:
    colour = "getComputedStyle(document.body).backgroundColor"
    browser.open(page, scheme="light")
    light = browser.js(colour)
    browser.open(page, scheme="dark")
    dark = browser.js(colour)
    assert light != dark
    found = []
    for _ in range(3):
        browser.js("document.getElementById('theme').click()")
        found.append((browser.js("document.getElementById('theme').dataset.theme"), browser.js(colour)))
    assert found == [("light", light), ("dark", dark), ("auto", dark)]


def test_a_phone_shows_every_view_without_scrolling_sideways(browser: Browser, page: Path) -> None:
    browser.open(page, width=390, height=844)
    for name in VIEWS:
        browser.js(f"document.getElementById('tab-{name}').click()")
        assert browser.js("document.documentElement.scrollWidth <= innerWidth"), name
    assert not browser.complaints()


def test_all_views_are_printed(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.call("Emulation.setEmulatedMedia", media="print")
    browser.js("dispatchEvent(new Event('beforeprint'))")
    heights = browser.js("[...document.querySelectorAll('.view')].map((view) => view.getBoundingClientRect().height)")
    browser.call("Emulation.setEmulatedMedia", media="")
    assert len(heights) == len(VIEWS)
    assert min(heights) > 60


HOSTILE = '<img src=x onerror="window.hacked=1"></script><script>window.hacked=2</script>{{data}}&lt;b&gt;\'"`${window.hacked=3}'


def hostile(module: Module) -> Module:
    """The same program with what is dangerous elsewhere in everything that takes any text."""
    graphs = {
        name: replace(
            graph,
            ops=tuple(
                replace(op, loc=f"{HOSTILE}/{op.loc}" if i % 3 == 0 else HOSTILE) for i, op in enumerate(graph.ops)
            ),
        )
        for name, graph in module.graphs.items()
    }
    return module.but(name=HOSTILE, graphs=graphs, notes=(*module.notes, Note("partition", HOSTILE)))


def test_hostile_names_are_inert(browser: Browser, planned: Planned, tmp_path: Path) -> None:
    material = replace(
        planned.material,
        module=hostile(planned.material.module),
        steps=(
            *planned.material.steps[:-1],
            replace(planned.material.steps[-1], call=HOSTILE, module=hostile(planned.material.module)),
        ),
        sources={"s0.F/k0": HOSTILE},
        failure=HOSTILE,
    )
    facts = gather(material, plain=True)
    # Names of values cannot be such text in a file; the page does not rely on it.
    facts["strings"] = [
        f"{text}<img src=x onerror=alert(1)>" if i % 5 == 1 else text
        for i, text in enumerate(copy.copy(facts["strings"]))
    ]
    path = tmp_path / "hostile.html"
    path.write_text(render(facts), encoding="utf-8")
    browser.open(path)
    assert browser.js("document.getElementById('model').textContent") == HOSTILE
    assert browser.js("document.title") == f"{HOSTILE} · Penstock"
    for name in VIEWS:
        browser.js(f"document.getElementById('tab-{name}').click()")
    browser.js("document.getElementById('tab-passes').click()")
    for i in range(len(facts["passes"])):
        browser.js(f"document.querySelectorAll('.pass-list button')[{i}].click()")
    browser.js("document.getElementById('tab-kernels').click()")
    browser.js(
        "[...document.querySelectorAll('#view-kernels button.link')].find((b) => b.textContent.startsWith('s0.F/k0')).click()"
    )
    browser.wait("document.querySelector('.program') !== null")
    assert browser.js("document.querySelector('.program').textContent") == HOSTILE
    browser.js("document.getElementById('search').focus()")
    browser.type("onerror")
    browser.key("Enter")
    assert browser.js("window.hacked") is None
    assert browser.js("document.querySelectorAll('img, main script, aside script').length") == 0
    assert not browser.complaints()
    assert browser.requests() == [path.as_uri()]


def test_layouts_and_collectives_are_tables(browser: Browser, tmp_path: Path) -> None:
    """Of a plan whose tensors are split, and of a run of it; the control is the page of a plan without."""
    model = ps.from_onnx(write_mlp(tmp_path / "mlp.onnx", [8, 16, 8], 4))
    plan = ps.plan(model, ps.Cluster.local(2), mesh="tp=2", shard="preset:megatron")
    run = CollectiveTotal("s0.F", "all_reduce", ("tp",), 3, 3072, 0.5, 0.25)
    facts = gather(Material(plan.module), plain=True)
    facts["sharding"] |= sharding_facts(plan.module, RunTrace({}, {}, [run])) or {}
    (tmp_path / "index.html").write_text(render(facts), encoding="utf-8")
    browser.open(tmp_path / "index.html")
    browser.js("document.getElementById('tab-links').click()")
    text = shown(browser, "#view-links")
    assert all(word in text for word in ("f32[8,16/tp]", "f32[8,8]", "stage 0 (tp=2): cpu:0 cpu:1", "all_reduce"))
    assert all(word in text for word in ("Collectives of the run", "3.00 KiB", "500 ms", "250 ms"))
    assert not browser.complaints()
    whole = ps.plan(model, ps.Cluster.local(1))
    assert gather(Material(whole.module), plain=True)["sharding"] is None


def test_why_this_plan_has_the_figures_of_its_json(browser: Browser, tmp_path: Path) -> None:
    """Of a plan that was searched for; the controls are the page of another figure, and a plan that was given."""
    rates = (("fast", 2e10), ("slow", 1e10), ("snail", 1e5))
    cluster = ps.Cluster(tuple(Device(name, flops=flops, bandwidth=flops) for name, flops in rates))
    write_mlp(tmp_path / "mlp.onnx", [256, 512, 512, 256], batch="batch")
    plan = ps.plan_best(
        lambda size: ps.from_onnx(tmp_path / "mlp.onnx", dims={"batch": size}),
        cluster,
        ps.Training(loss="mse"),
        batch=64,
        sizes=(8, 16),
    )
    written = json.loads(json.dumps(plan.as_dict()))
    facts = gather(Material(plan.module, plan=written), plain=True)
    planner = facts["placement"]["planner"]
    rows = {row["device"]: row for row in planner["devices"]}
    assert rows["fast"]["effect"] in ("helps", "needed")
    assert rows["snail"]["effect"] == "hurts"

    def opened(facts: dict[str, Any]) -> str:
        (tmp_path / "index.html").write_text(render(facts), encoding="utf-8")
        browser.open(tmp_path / "index.html")
        browser.js("document.getElementById('tab-why').click()")
        assert not browser.complaints()
        return shown(browser, "#view-why")

    def cells() -> list[list[str]]:
        lines = "[...document.querySelectorAll('#view-why tbody tr')]"
        return list(browser.js(f"{lines}.map((row) => [...row.cells].map((cell) => cell.innerText))"))

    def found() -> bool:
        told = {row[0]: row for row in cells()}
        figures = {name: [_seconds(row[f"step_{way}_s"]) for way in ("without", "with")] for name, row in rows.items()}
        changes = {
            name: "nothing fits" if step is None else _seconds(step) for name, step in planner["what_if"].items()
        }
        schedules = {kind: _seconds(step) for kind, step in planner["schedules"].items()}
        return (
            all(told[name][3:5] == steps for name, steps in figures.items())
            and all(told[name][1] == step for name, step in changes.items())
            and all(told[kind][2] == step for kind, step in schedules.items())
        )

    text = opened(facts)
    assert found()
    assert "snail would hurt, and is left out" in text
    assert planner["limited_by"] in text
    assert facts["summary"]["bound_by"] in text
    wrong = copy.deepcopy(facts)
    wrong["placement"]["planner"]["devices"][0]["step_without_s"] *= 1.5
    opened(wrong)
    assert not found()
    given = copy.deepcopy(facts)
    given["placement"]["planner"] = None
    text = opened(given)
    assert "given by hand, and nothing was searched" in text
    assert "snail" not in text
    assert not cells()


def _seconds(value: float | None) -> str:
    """Three digits, as the page writes them."""
    if value is None:
        return "–"
    factor, unit = (1, "s") if value >= 1 else (1e3, "ms") if value >= 1e-3 else (1e6, "µs")
    return f"{float(f'{value * factor:.3g}'):#.3g}".rstrip(".") + f" {unit}"
