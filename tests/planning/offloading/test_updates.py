"""Plans with updates on devices of their own: by cuts that count what stages then hold, and by the planner."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

import penstock as ps
from penstock.ir.cluster.cluster import Cluster
from penstock.ir.memory.predict import measure_memory
from penstock.models import write_mlp
from penstock.passes.manager import run_passes
from penstock.passes.pipelines import PASSES
from penstock.planning import search
from penstock.support.errors import DoesNotFit

UPDATER = "cpu:3"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return ps.from_onnx(write_mlp(tmp_path_factory.mktemp("updates") / "mlp.onnx", [256] * 7, batch=4))


def training(**settings):
    return ps.Training(loss="mse", optimizer=ps.AdamW(lr=0.01), **settings)


def limited(nbytes):
    """Two devices of so many bytes, and one without a limit."""
    cluster = Cluster.local(3)
    small = [replace(device, spaces=(("ram", nbytes),)) for device in cluster.devices[:2]]
    return replace(cluster, devices=(*small, cluster.devices[2]))


@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_cuts_count_what_goes_and_comes_in_place_of_state(tmp_path, schedule):
    model = ps.from_onnx(write_mlp(tmp_path / "mlp.onnx", [512, *[256] * 5, 1024], batch=4))

    def planned(cluster):
        return ps.plan(model, cluster, training(microbatches=4), update_on="cpu:2", schedule=schedule)

    peaks = [row.peak for row in measure_memory(planned(Cluster.local(3)).module).values()][:2]
    assert max(peaks) > 1.4 * min(peaks)
    plan = planned(limited(int(0.95 * max(peaks))))
    assert "cut so that stages fit into memory" in "\n".join(note.text for note in plan.module.notes)
    # The control: cuts that count state on stages.
    calls = [*plan.calls[[call.name for call in plan.calls].index("partition") :]]
    calls[0] = replace(calls[0], options=replace(calls[0].options, updates_elsewhere=False))
    with pytest.raises(DoesNotFit):
        run_passes(plan.reference, calls, PASSES)


@pytest.mark.parametrize(("schedule", "times"), [("1f1b", 3), ("2bw", 4)])
def test_what_goes_and_comes_takes_more_than_the_state_of_adam(tmp_path, schedule, times):
    """The documents say by how much; a change that needs less memory changes them, and what cuts count. Messages of
    less than a megabyte are held for longer."""
    model = ps.from_onnx(write_mlp(tmp_path / "mlp.onnx", [512] * 9, batch=4))

    def row(**options):
        plan = ps.plan(
            model, Cluster.local(3), training(microbatches=4), schedule=schedule, split_at=["fc5.product"], **options
        )
        return measure_memory(plan.module)[0]

    here, away = row(devices=[["cpu:0"], ["cpu:1"]]), row(update_on="cpu:2")
    assert away.state == 0
    assert here.state == pytest.approx(2 * here.gradients, rel=1e-3)
    assert (away.peak - (here.peak - here.state)) / here.gradients == pytest.approx(times, rel=0.05)


def best(model, cluster, schedules, **options):
    return ps.plan_best(lambda size: model, cluster, training(), batch=32, schedules=schedules, **options)


@pytest.mark.parametrize(("schedule", "replicas"), [("1f1b", 1), ("2bw", 1), ("2bw", 3)])
def test_formulas_count_what_goes_and_comes(tmp_path, schedule, replicas):
    """Within a tenth of the exact count, of which small buffers are a part."""
    model = ps.from_onnx(write_mlp(tmp_path / "mlp.onnx", [512] * 9, batch=4))
    plan = best(model, Cluster.local(4), (schedule,), update_on=UPDATER, replicas=replicas)
    counted, stages = measure_memory(plan.module), plan.search.plan.stages
    weights = [sum(layer.params for layer in plan.search.profile.chain.layers[s.first : s.last]) for s in stages]
    for rank, stage in enumerate(stages):
        by_formula = plan.search.chosen.judged.memory[stage.devices[0]].total - plan.search.result.wanted.base
        exact = counted[rank].peak
        assert by_formula == pytest.approx(exact, rel=0.1)
        # The control: a copy of the weights less.
        assert by_formula - weights[rank] < 0.9 * exact


def test_the_planner_leaves_devices_to_updates(model):
    plan = best(model, Cluster.local(4), ("1f1b", "zb-1f1b"), update_on=UPDATER)
    devices = plan.module.rank_devices()
    assert devices[-1] == UPDATER
    assert UPDATER not in devices[:-1]
    assert plan.as_dict()["update_on"] == UPDATER
    # The same plan by hand.
    facts = plan.as_dict()
    again = ps.plan(
        model,
        Cluster.local(4),
        training(microbatches=facts["microbatches"]),
        schedule=facts["schedule"],
        devices=[stage["devices"] for stage in facts["stages"]],
        split_at=[stage["starts_at"] for stage in facts["stages"][1:]],
        update_on=UPDATER,
    )
    assert again.module.schedule == plan.module.schedule


def test_the_planner_takes_the_schedule_that_is_fastest_with_updates_elsewhere(model):
    """Formulas count no update; the simulation of all does, and 2bw hides a slow one."""
    cluster = Cluster.local(4)
    slow = [replace(d, bandwidth=d.bandwidth / 8) if d.name == UPDATER else d for d in cluster.devices]
    cluster = replace(cluster, devices=tuple(slow))
    steps = {kind: best(model, cluster, (kind,), update_on=UPDATER).predicted.step for kind in ("1f1b", "2bw")}
    assert steps["2bw"] < 0.8 * steps["1f1b"]
    both = best(model, cluster, ("1f1b", "2bw"), update_on=UPDATER)
    assert (both.search.plan.schedule, both.predicted.step) == ("2bw", steps["2bw"])
    # The control: where stages update, the two take about the same.
    here = {kind: best(model, cluster, (kind,)).predicted.step for kind in ("1f1b", "2bw")}
    assert here["2bw"] > 0.8 * here["1f1b"]


def test_plans_with_several_stages_on_a_device_are_carried_out_too(model, monkeypatch):
    carried, plain = [], search._Searching.carried_out

    def recorded(self, plan, profile):
        made = plain(self, plan, profile)
        if self.options.update_on:
            carried.append((plan.schedule, made.predicted.step))
        return made

    ceilings, usual = [], search.pack

    def told(*given):
        ceilings.append(given[-1])
        return usual(*given)

    monkeypatch.setattr(search._Searching, "carried_out", recorded)
    monkeypatch.setattr(search, "pack", told)
    both = best(model, Cluster.local(3), ("1f1b", "interleaved"), update_on="cpu:2", replicas=1)
    assert {schedule for schedule, _ in carried} == {"1f1b", "interleaved"}
    # Those that are slower without updates elsewhere may be faster with them. The control: else they are of no use.
    assert ceilings == [math.inf]
    best(model, Cluster.local(2), ("1f1b", "interleaved"), replicas=1)
    assert 0 < ceilings[-1] < math.inf
    assert both.predicted.step == min(step for _, step in carried)
    # The control: what was not asked for is not tried.
    alone = best(model, Cluster.local(3), ("interleaved",), update_on="cpu:2", replicas=1)
    assert alone.module.schedule.name == alone.search.plan.schedule == "interleaved"
