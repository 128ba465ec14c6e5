"""Plans with tensor and data parallel degrees against every plan, and against published profiles."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

from penstock.passes.placement.joint import search, stages
from penstock.passes.placement.joint.options import Choice, choose
from penstock.passes.placement.joint.profiles import (
    JointPlan,
    JointProblem,
    JointStage,
    LayerOption,
    LayerProfile,
    check_plan,
)
from penstock.passes.placement.joint.reading import read_profiles
from penstock.passes.placement.joint.search import plan_jointly
from penstock.passes.placement.workload import load_json
from penstock.support.errors import DoesNotFit, UsageError

from .drawn import draw_joint_problem, try_all_plans

SEEDS = range(200)
# Times per sample of the authors' programme for BERT-32 with 8 GiB a device and 25 GiB/s, by the number of devices.
BERT = {8: 0.16585575, 64: 0.0202005502944787}
PROFILES = Path(os.environ.get("PENSTOCK_PIPER_PROFILES") or "none")


def planned(problem: JointProblem) -> float:
    try:
        plan = plan_jointly(problem)
    except DoesNotFit:
        return inf
    assert plan.value == check_plan(problem, plan.stages)
    assert plan.bound <= plan.value
    return plan.value


def disagreements(seeds: range = SEEDS) -> list[int]:
    """Return the seeds of problems for which the search says something else than all plans do."""
    different = []
    for seed in seeds:
        problem = draw_joint_problem(seed)
        reached, best = planned(problem), try_all_plans(problem)
        if reached != best and not abs(reached - best) <= 1e-6 * best:
            different.append(seed)
    return different


def test_the_plan_is_the_best_of_all_plans() -> None:
    assert disagreements() == []
    allowed = [seed for seed in SEEDS if planned(draw_joint_problem(seed)) < inf]
    assert len(allowed) > len(SEEDS) * 2 / 3, "hardly anything fits: the problems show nothing"


def test_a_search_that_takes_the_fastest_options_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory binds in many problems: without the choice of options the result is another one."""

    def fastest(times: object, memory: object, room: float, enough: float = inf) -> Choice:
        return choose(times, memory, 1e6, enough)  # type: ignore[arg-type]

    monkeypatch.setattr(stages, "choose", fastest)
    with pytest.raises(AssertionError):
        assert disagreements(range(60)) == []


def test_a_search_without_the_sum_of_degrees_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages that are before others keep more microbatches in flight."""
    monkeypatch.setattr(search, "_first", lambda counts, s: min(s, 1))
    with pytest.raises((AssertionError, IndexError)):
        assert disagreements(range(60)) == []


def test_layers_without_options_are_named() -> None:
    problem = draw_joint_problem(3)
    layers = (*problem.layers, LayerProfile("odd", {16: next(iter(problem.layers[0].options.values()))}))
    with pytest.raises(DoesNotFit, match=r"no options with a tensor parallel degree up to \d: odd"):
        plan_jointly(replace(problem, layers=layers))


def test_tables_that_are_too_large_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "_MOST_NUMBERS", 1)
    with pytest.raises(UsageError, match="too many for the search's tables"):
        plan_jointly(draw_joint_problem(3))


def interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: object, within: float, hopeful: bool = False) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(search._Search, "_within", interrupted)


def test_an_interrupt_in_the_first_pass_leaves_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt(monkeypatch)
    for seed in (3, 5, 8, 13):
        problem = replace(draw_joint_problem(seed), memory=1e6)
        plan = plan_jointly(problem)
        assert plan.bound <= try_all_plans(problem) <= plan.value == check_plan(problem, plan.stages) < inf


def chain(layers: int, devices: int, seed: int, parameters: float) -> JointProblem:
    """Draw a long chain without tensor parallelism."""
    rng = random.Random(seed)
    each = tuple(
        LayerProfile(f"layer {v}", {1: (LayerOption("", rng.uniform(1, 2), parameters, 1.0, 1.0, {}, {}),)})
        for v in range(layers)
    )
    return JointProblem(devices, 1e6, 100.0, devices, each, {(v, v + 1): 1.0 for v in range(layers - 1)})


@pytest.mark.parametrize("seed", range(4))
def test_an_early_interrupt_in_a_long_chain_leaves_even_stages(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = chain(60, 8, seed, 1000.0)
    best = plan_jointly(problem)
    interrupt(monkeypatch)
    plan = plan_jointly(problem)
    assert plan.notes == ("interrupted: the best plan until then",)
    assert len(plan.stages) == 8
    assert best.value <= plan.value <= 1.1 * best.value
    # Control: where stages are uneven, or there is one for all devices, it is not.
    monkeypatch.setattr(search, "_BEGUN", 0)
    with pytest.raises(KeyboardInterrupt):
        plan_jointly(problem)
    whole = [JointStage(1, 8, dict.fromkeys(range(60), ""))]
    assert check_plan(problem, whole) > 1.5 * best.value


def test_an_interrupt_keeps_the_best_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = replace(draw_joint_problem(3), memory=1e6)
    asked: list[float] = []

    def interrupted(self: object) -> Iterator[float]:
        asked.append(1.0)
        raise KeyboardInterrupt
        yield 0.0

    monkeypatch.setattr(search._Search, "_questions", interrupted)
    plan = plan_jointly(problem)
    assert asked
    assert plan.notes == ("interrupted: the best plan until then",)
    assert plan.value == check_plan(problem, plan.stages) < inf


def test_where_sets_are_too_many_linear_orders_are_tried() -> None:
    """The value is that of an allowed plan, and the bound is no more than the optimum."""
    tried: list[JointPlan] = []
    for seed in range(60):
        problem = draw_joint_problem(seed)
        best = try_all_plans(problem)
        if best < inf and len(problem.layers) > 2:
            plan = plan_jointly(problem, limit=2)
            tried.append(plan)
            assert plan.bound <= best * (1 + 1e-9)
            assert plan.value >= best * (1 - 1e-9)
            assert plan.notes
            assert plan.value == check_plan(problem, plan.stages)
    assert len(tried) > 10


@pytest.mark.parametrize("devices", BERT)
def test_plans_of_published_profiles_are_those_of_their_authors(devices: int) -> None:
    file = PROFILES / "bert32a100.json"
    if not file.exists():
        pytest.skip("PENSTOCK_PIPER_PROFILES names no folder with bert32a100.json")
    problem = read_profiles(load_json(file)).problem
    plan = plan_jointly(replace(problem, devices=devices, memory=8.0 * 2**30, bandwidth=25.0 * 2**30))
    assert plan.value == pytest.approx(BERT[devices], rel=1e-7)
    assert plan.gap == 0
