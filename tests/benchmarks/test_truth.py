"""The benchmark of predictions: its configurations, what it predicts from, and its verdict. Nothing is asserted of measured times."""

from __future__ import annotations

import sys

import pytest
from oracles.repository import BENCHMARKS

sys.path.insert(0, str(BENCHMARKS))

import truth
import truth_plans
from truth_machines import Configuration

import penstock as ps
from penstock.backends.bundle.format import open_bundle
from penstock.models import write_mlp

LOOPBACK = {"message": 0.0, "latency": 0.0, "writing": 0.0, "bandwidth": 1e12, "buffer": 0.0, "memory": 0.0}


def test_configurations_are_different_and_many():
    names = [configuration.name for configuration in truth.CONFIGURATIONS]
    assert len(set(names)) == len(names) >= 20
    assert {c.stages for c in truth.CONFIGURATIONS} == {1, 2, 3}
    for configuration in truth.CONFIGURATIONS:
        assert all(len(given) in (0, configuration.stages) for given in (configuration.threads, configuration.quotas))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    folder = tmp_path_factory.mktemp("truth")
    model = ps.from_onnx(write_mlp(folder / "model.onnx", [8, 8, 8, 8], batch=4))
    training = ps.Training(loss="cross_entropy", optimizer=ps.SGD(lr=0.1), microbatches=4)
    products = [op.outs[0].name for op in model.module.graphs["main"].ops if op.kind == "matmul"]
    plan = ps.plan(model, ps.Cluster.local(3), training, split_at=products[1:])
    return open_bundle(ps.compile(plan, folder / "bundle", backend="numpy"))


@pytest.mark.parametrize(
    ("changes", "speeds"), [({}, (1, 1, 1)), ({"one_core": True}, (1, 1, 1)), ({"quotas": (1.0, 1.0, 0.5)}, (1, 1, 2))]
)
def test_predictions_share_the_cores_there_are(bundle, changes, speeds, monkeypatch):
    """Three equal ranks: (m + d - 1)(tf + tb) with a core each, 3 m (tf + tb) on one core, and the slowest rank's m (tf + tb) and two more with a quota."""
    monkeypatch.setattr(truth, "usable_cores", lambda: 3)
    alone = [{"F": 1.0 * s, "B": 2.0 * s} for s in speeds]
    configuration = Configuration("mlp", 3, "1f1b", **changes)
    found = truth.predict(configuration, bundle, alone, (1.0,), LOOPBACK)["step_s"]
    assert found == pytest.approx({"one_core": 36, "quotas": 30}.get(next(iter(changes), ""), 18), abs=0.1)


def test_two_cores_for_three_ranks_cost_more_than_three(bundle, monkeypatch):
    alone = [{"F": 1.0, "B": 2.0}] * 3
    configuration = Configuration("mlp", 3, "1f1b")
    step = {}
    for cores in (2, 3):
        monkeypatch.setattr(truth, "usable_cores", lambda cores=cores: cores)
        step[cores] = truth.predict(configuration, bundle, alone, (1.0,), LOOPBACK)["step_s"]
    # Three ranks of twelve seconds each, on two cores.
    assert step[3] == pytest.approx(18)
    assert 18.1 < step[2] <= 36


def test_the_verdict_is_of_the_worst():
    rows = [
        {"ratio": ratio, "memory": [{"ratio": 1.0}, {"ratio": memory}]}
        for ratio, memory in ((1.05, 1.0), (0.9, 0.95), (1.0, 1.02))
    ]
    assert truth.verdict(rows) == pytest.approx({"median": 0.05, "worst": 0.1, "memory": 0.05})


def test_plans_are_all_cuts_in_both_orders(tmp_path):
    model = ps.from_onnx(write_mlp(tmp_path / "model.onnx", [16] * 9, batch=4))
    listed = list(truth_plans.candidates(model))
    assert len({candidate.name for candidate in listed}) == len(listed) == 2 * (1 + 2 * 7 + 2)
    rows = [
        {"name": c.name, "schedule": c.schedule, "cut": c.cut, "told": "a>b", "seconds": 2.0 + i, "predicted": 3.0}
        for i, c in enumerate(listed)
    ]
    assert truth_plans.landings(rows) == {"1f1b": 18 / 2, "2bw": 35 / 19}
    assert "| 2bw | planner's: a>b | 17 of 17 | 35000.0 | 1.842 | 3000.0 |" in truth_plans.table(rows)
