"""Tests of the facts of the report against their sources: memory against the prediction, timelines against the
simulator and a trace, changes against modules."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.commands.parser import main
from penstock.inspection.kernels.kernels import kernel_rows
from penstock.inspection.report.facts import gather
from penstock.inspection.report.material import Material, RunTrace
from penstock.inspection.report.page import page_of, render
from penstock.inspection.report.reading import read_material, trace_of
from penstock.inspection.report.schedule_facts import TICKS
from penstock.inspection.subject import open_subject
from penstock.ir.memory.predict import measure_memory
from penstock.ir.text import print_op
from penstock.planning.predict import predict
from penstock.support.errors import UsageError

from .small_plan import SLOWER, Planned


@pytest.fixture(scope="module")
def facts(planned: Planned) -> dict[str, Any]:
    return gather(planned.material, plain=True)


def in_rows(flat: list[int], width: int) -> list[list[int]]:
    return [flat[i : i + width] for i in range(0, len(flat), width)]


def test_memory_is_what_is_predicted_and_adds_up_at_every_moment(planned: Planned, facts: dict[str, Any]) -> None:
    for rank, expected in measure_memory(planned.plan.module).items():
        found = facts["memory"][rank]
        points = in_rows(found["points"], 5)
        assert sum(found["fixed"].values()) + max(sum(point[1:]) for point in points) == expected.peak
        lives = in_rows(found["lives"], 6)
        for time, activations, boundary, *_ in points[:: max(1, len(points) // 20)]:
            # Of actions that end at the same time only the last can be told by it.
            if sum(point[0] == time for point in points) == 1:
                live = sum(
                    nbytes for _, _, _, nbytes, taken, given in lives if taken <= time and (given < 0 or given > time)
                )
                assert live == activations + boundary


def test_timelines_are_those_of_the_simulator_and_of_the_trace(planned: Planned, facts: dict[str, Any]) -> None:
    found = predict(planned.plan.module).forecast.simulated
    schedule = facts["schedule"]
    for rank in found.lines:
        actions = [(a, s, e) for a, s, e in found.timed(rank) if a.kind != "D"]
        for name, slower in (("planned", 1.0), ("measured", SLOWER)):
            rows = in_rows(schedule[name]["lines"][rank], 6)
            assert [(schedule["kinds"][row[0]], row[1]) for row in rows] == [(a.kind, a.mb) for a, _, _ in actions]
            # A trace has tenths of microseconds of its own.
            expected = [slower * (end - start) * TICKS for _, start, end in actions]
            assert [row[5] for row in rows] == pytest.approx(expected, abs=1.1)
    assert {round(measured / predicted, 2) for _, _, predicted, measured in schedule["measured"]["compared"]} == {
        SLOWER
    }


def steps(times: list[float], sizes: list[int]) -> list[tuple[float, int]]:
    """Where a curve changes: of moments at the same time the last, of equal sizes the first."""
    last = dict(zip(times, sizes, strict=True))
    found: list[tuple[float, int]] = []
    for time, size in last.items():
        if not found or found[-1][1] != size:
            found.append((time, size))
    return found


@pytest.mark.parametrize("late", [0, 40])
def test_measured_memory_lies_on_the_plan_action_by_action(planned: Planned, facts: dict[str, Any], late: int) -> None:
    """A run that holds what is planned, but warms up and is slower, and began `late` batches before: its curve is that of the plan."""
    found = predict(planned.plan.module).forecast.simulated
    per_batch, actions, held = found.schedule.microbatches, {}, {}
    for rank in found.lines:
        line = [timed for timed in found.timed(rank) if timed[0].kind in ("F", "B", "U")]
        warm = line[5][2]

        def real(time: float, warm: float = warm) -> float:
            return 20 * min(time, warm) + SLOWER * max(0.0, time - warm)

        actions[rank] = [(a.shifted(late, per_batch), real(start), real(end) - real(start)) for a, start, end in line]
        points = in_rows(facts["memory"][rank]["points"], 5)
        held[rank] = [(real(time / TICKS), saved + passing) for time, saved, passing, *_ in points]
    told = gather(replace(planned.material, trace=RunTrace(actions, held)), plain=True)["schedule"]["measured"]
    assert told["at"][0] - late == told["at"][1] > 0
    for rank, flat in enumerate(told["held"]):
        points = in_rows(facts["memory"][rank]["points"], 5)
        curve = steps([p[0] for p in points], [p[1] + p[2] for p in points])
        laid = steps(*map(list, zip(*in_rows(flat, 2), strict=True)))
        low, high = flat[0], flat[-2]
        inside = [(time, size) for time, size in curve if low < time < high]
        assert len(inside) > 20
        assert [size for time, size in laid if low < time < high] == [size for _, size in inside]
        assert [time for time, _ in laid if low < time < high] == pytest.approx([time for time, _ in inside], abs=2)
        # The control: at the times of the run it would not.
        assert held[rank][-1][0] * TICKS > 2 * high


def test_every_operation_that_a_pass_made_removed_or_changed_is_told(planned: Planned, facts: dict[str, Any]) -> None:
    strings = facts["strings"]
    modules = [step.module for step in planned.material.steps]
    for (before, after), told in zip(pairwise(_filled(modules)), facts["passes"][1:], strict=True):
        lines = [
            {op.outs[0].name: print_op(op) for g in m.graphs.values() for op in g.ops if op.outs}
            for m in (before, after)
        ]
        expected = {name for name in {*lines[0], *lines[1]} if lines[0].get(name) != lines[1].get(name)}
        found = {strings[name] for part in told["parts"] for row in part["rows"] for name in row[1]}
        assert expected <= found
        assert told["changed"] == (before is not after)


def _filled(modules: list[Any]) -> list[Any]:
    """A pass that changed nothing gives the module that it was given."""
    found: list[Any] = []
    for module in modules:
        found.append(module if module is not None else found[-1])
    return found


def test_graphs_and_kernels_are_those_of_the_module(planned: Planned, facts: dict[str, Any]) -> None:
    module, strings, values = planned.plan.module, facts["strings"], facts["graph"]["values"]
    for graph in facts["graph"]["graphs"]:
        ops = module.graphs[graph["name"]].ops
        assert [strings[row[0]] for row in graph["ops"]] == [op.kind for op in ops]
        for row, op in zip(graph["ops"], ops, strict=True):
            assert [strings[values[v][0]] for v in row[2]] == [v.name for v in op.ins]
    rows = kernel_rows(module)
    assert [(row["graph"], row["names"]) for row in facts["kernels"]["rows"]] == [
        (row.graph, list(row.names)) for row in rows
    ]
    for stage in module.stages:
        assert sum(row["share"] for row in facts["kernels"]["rows"] if row["stage"] == stage.index) == pytest.approx(1)


def test_a_number_that_is_not_finite_is_null(facts: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(
        render({**facts, "links": [np.float64(0.5), math.nan, -math.inf, "</script>", 1]}), encoding="utf-8"
    )
    assert facts_of(tmp_path / "page.html") == json.loads(
        json.dumps({**facts, "links": [0.5, None, None, "</script>", 1]})
    )


def test_the_same_module_has_the_same_page(planned: Planned) -> None:
    assert page_of(planned.material, plain=True) == page_of(planned.material, plain=True)


def test_early_dumps_have_the_sections_that_there_can_be(planned: Planned) -> None:
    """From the imported model on, every module of a pipeline is a page."""
    for step in planned.material.steps:
        if step.module is not None:
            facts = gather(Material(step.module), plain=True)
            assert facts["graph"]["graphs"]
            assert (facts["memory"] is not None) == ("freed" in step.module.facts)
            json.dumps(facts, allow_nan=False)


def test_a_dump_folder_has_its_page_and_can_be_read_again(planned: Planned, tmp_path: Path) -> None:
    read = read_material(open_subject(planned.folder), planned.trace)
    assert [(step.number, step.call, step.module is None) for step in read.steps] == [
        (step.number, step.call, step.module is None) for step in planned.material.steps
    ]
    own, again = (gather(replace(m, sources={}, plan={}), plain=True) for m in (planned.material, read))
    for section in ("summary", "graph", "schedule", "memory", "links"):
        assert own[section] == again[section]
    # Passes as they were in memory, and as parsed from the dump, differ alike.
    assert [p["parts"] for p in own["passes"]] == [p["parts"] for p in again["passes"]]


def test_the_commands_write_pages(planned: Planned, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    last = sorted(planned.folder.glob("*.ir"))[-1]
    page = tmp_path / "page.html"
    assert main(["inspect", str(planned.folder), "--html", str(page), "--trace", str(planned.trace)]) == 0
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert "wrote" in capsys.readouterr().err
    assert main(["inspect", str(last), "--trace", str(planned.trace)]) == 2
    assert main(["inspect", str(last), "--html", str(tmp_path)]) == 2
    # A pass that refuses leaves a page that says so.
    first = next(planned.folder.glob("00_*.ir"))
    assert main(["opt", str(first), "-p", "schedule", "--dump-ir", str(tmp_path / "failed")]) == 2
    assert "needs the fact" in facts_of(tmp_path / "failed" / "index.html")["failure"]
    assert (
        main(["opt", str(first), "-p", "simplify", "--dump-ir", str(tmp_path / "made"), "-o", str(tmp_path / "out.ir")])
        == 0
    )
    assert [step["name"] for step in facts_of(tmp_path / "made" / "index.html")["passes"]] == ["input", "simplify"]


def facts_of(page: Path) -> dict[str, Any]:
    """The facts that a page holds."""
    found = re.search(
        r'<script id="facts" type="application/json">(.*?)</script>', page.read_text(encoding="utf-8"), re.DOTALL
    )
    assert found is not None
    facts: dict[str, Any] = json.loads(found[1])
    return facts


def slice_of(name: str, at: str) -> str:
    return f'{{"traceEvents": [{{"ph": "X", "name": "{name}", "pid": 0, "ts": {at}, "dur": 1}}]}}'


@pytest.mark.parametrize(
    "events",
    ["no JSON", "[]", "{}", '{"traceEvents": []}', slice_of("0F0", "NaN"), slice_of("9F0", "0"), slice_of("<b>", "0")],
)
def test_what_is_no_trace_of_this_program_is_refused(planned: Planned, tmp_path: Path, events: str) -> None:
    (tmp_path / "t.json").write_text(events)
    with pytest.raises(UsageError):
        trace_of(tmp_path / "t.json", planned.plan.module)
