"""The benchmark of chosen plans on drawn clusters: its clusters, its rivals, and its verdict. Nothing is timed."""

from __future__ import annotations

import sys

import pytest
from oracles.repository import BENCHMARKS

sys.path.insert(0, str(BENCHMARKS))

import held_back
from held_back_clusters import CLUSTERS, COUNT, MOST, draw, quotas_in_use

import penstock as ps
from penstock.ir.cluster.cluster import Cluster, Device
from penstock.models import write_mlp


def test_clusters_are_drawn_once_and_are_unequal():
    assert tuple(draw()) == CLUSTERS
    assert len(CLUSTERS) == COUNT
    assert {len(drawn.quotas) for drawn in CLUSTERS} == {2, 3, 4, 5, 6}
    assert all(sum(drawn.quotas) <= MOST and len(set(drawn.quotas)) > 1 for drawn in CLUSTERS)
    cells = held_back.cells()
    assert len({held_back.cell_name(*cell) for cell in cells}) == len(cells) == 3 * COUNT
    # Each model meets clusters of hosts among the first thirty.
    assert {model for drawn, model in cells[:COUNT] if drawn.rate} == set(held_back.MODELS)


def test_clusters_have_the_rates_of_their_quotas():
    rates = {f"{quota:g}": Cluster((Device("one", flops=1e9 * quota),)).to_toml() for quota in quotas_in_use()}
    rates["0"] = Cluster((Device("one", message_overhead=1e-4), Device("two"))).to_toml()
    for drawn in CLUSTERS:
        cluster = drawn.cluster(rates)
        assert [device.flops for device in cluster.devices] == pytest.approx([1e9 * quota for quota in drawn.quotas])
        assert [d.message_overhead for d in cluster.devices] == pytest.approx([1e-4 / quota for quota in drawn.quotas])
        assert tuple(device.quota for device in cluster.devices) == drawn.quotas
        assert len({device.host for device in cluster.devices}) == (len(drawn.quotas) if drawn.rate else 1)


def test_rivals_cut_elsewhere(tmp_path):
    model = ps.from_onnx(write_mlp(tmp_path / "model.onnx", [64] * 7, batch=8))
    cluster = Cluster(tuple(Device(name, flops=speed) for name, speed in (("a", 3e8), ("b", 2e8), ("c", 1e8))))
    chosen = held_back.best(model, 8, cluster, ("1f1b",))
    assert len(chosen.module.stages) > 1

    def products(plan):
        graphs = plan.module.graphs
        return [sum(op.kind == "matmul" for op in graphs[f"s{s.index}.F"].ops) for s in plan.module.stages]

    middle = (len(chosen.module.stages) - 1) // 2
    shifts = {by: held_back.shifted(model, cluster, chosen, by) for by in (-1, 1)}
    assert any(shifts.values())
    for by, moved in shifts.items():
        if moved is None:
            continue
        expected = products(chosen)
        expected[middle] += by
        expected[middle + 1] -= by
        assert products(moved) == expected
        assert held_back.same_program(moved) != held_back.same_program(chosen)
    again = held_back.best(model, 8, cluster, ("1f1b",))
    assert held_back.same_program(again) == held_back.same_program(chosen)


def test_plans_that_share_microbatches_out_otherwise_are_told_apart(tmp_path):
    model = ps.from_onnx(write_mlp(tmp_path / "model.onnx", [8] * 4, batch=4))
    training = ps.Training(loss="cross_entropy", microbatches=4)
    plans = [
        ps.plan(model, Cluster.local(2), training, devices=[["cpu:0", "cpu:1"]], shares=[shares])
        for shares in ((2, 2), (3, 1), (2, 2))
    ]
    first, other, same = map(held_back.same_program, plans)
    assert first == same != other


def row(chosen: float, best: float, predicted: float, peak: int = 100):
    plans = {
        name: {"schedule": "1f1b", "devices": [["d0"]], "predicted": predicted, "seconds": seconds, "steps": [seconds],
               "memory": [90]}
        for name, seconds in ((held_back.CHOSEN, chosen), (held_back.QUICK, chosen), ("rival", best))
    }  # fmt: skip
    return {"cell": "0-mlp", "quotas": [1.0], "rate": 0.0, "plans": plans, "peaks": [peak], "beside": 10}


def test_the_verdict(capsys):
    assert held_back.judge([row(1.0, 0.97, 1.05)]) == 0
    assert "3.1% at worst" in capsys.readouterr().out
    for missed in (row(1.2, 1.0, 1.2), row(1.0, 1.0, 1.3), row(1.0, 1.0, 1.0, peak=120)):
        assert held_back.judge([missed]) == 1


def test_memory_of_replicas_has_more_beside_it():
    """Of a stage on two devices and one on a third; a pack of two stages on one device is one rank."""
    one = row(1.0, 1.0, 1.0)
    one["plans"][held_back.CHOSEN] |= {"devices": [["d0", "d1"], ["d2"]], "memory": [100, 100, 100]}
    one |= {"peaks": [130, 130, 110], "beside": 10, "beside summing": 30}
    assert held_back.figures(one)["memory"] == 1.0
    one["peaks"] = [130, 110, 110]
    assert held_back.figures(one)["memory"] == pytest.approx(130 / 110)
    one["plans"][held_back.CHOSEN] |= {"devices": [["d0"], ["d1"], ["d0"], ["d1"]], "memory": [100, 100]}
    one["peaks"] = [110, 110]
    assert held_back.figures(one)["memory"] == 1.0


def test_predictions_are_scaled_by_the_speed_of_the_machine():
    """At half the speed a step takes twice as long. The control: rates of the other kind were measured at this speed."""
    one = row(2.0, 2.0, 1.0) | {"speeds": {"doctor": [0.5], "quick": [1.0]}}
    found = held_back.figures(one)
    assert (found["predicted"], found["predicted quick"]) == pytest.approx((1.0, 0.5))
    again = held_back.pooled(one, row(2.0, 2.0, 1.0) | {"speeds": {"doctor": [1.0], "quick": [1.0]}})
    assert again["speeds"] == {"doctor": [0.5, 1.0], "quick": [1.0, 1.0]}


def test_a_cell_that_was_run_twice_has_the_steps_of_both():
    old, new = row(1.2, 1.0, 1.0), row(1.0, 1.1, 1.0)
    for one in (old, new):
        # The plan with quick rates is the chosen one, which ran for both.
        one["plans"][held_back.QUICK]["steps"] = []
    both = held_back.pooled(old, new)
    assert both["runs"] == 2
    assert {name: plan["seconds"] for name, plan in both["plans"].items()} == pytest.approx(
        {held_back.CHOSEN: 1.1, held_back.QUICK: 1.1, "rival": 1.05}
    )
    assert both["plans"]["rival"]["steps"] == [1.0, 1.1]
    assert held_back.pooled(both, new)["runs"] == 3
    assert " 2 x2 |" in held_back.markdown(*held_back.table_of([both]))
    new["plans"]["rival"]["devices"] = [["d1"]]
    with pytest.raises(ValueError, match="0-mlp has other plans"):
        held_back.pooled(old, new)
