"""The benchmark of plans on teams: who is told to be slower than another, and which plans run once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from oracles.repository import BENCHMARKS

sys.path.insert(0, str(BENCHMARKS))

import chosen_teams

import penstock as ps
from penstock.ir.cluster.cluster import Cluster
from penstock.models import write_mlp


def row(chosen: float, team: float) -> dict[str, object]:
    return {
        "model": "mlp",
        "ways": {
            chosen_teams.CHOSEN: {"plan": "1f1b of 1: cpu:0", "predicted": 1.0, "seconds": chosen},
            "teams": {"plan": "1f1b of 1: cpu:0+cpu:1 tp=2", "predicted": 0.5, "seconds": team},
        },
    }


def test_a_chosen_plan_may_be_a_twentieth_slower(capsys: pytest.CaptureFixture[str]) -> None:
    assert chosen_teams.judge([row(1.0, 0.96)]) == 0
    assert "| mlp | teams | 1f1b of 1: cpu:0+cpu:1 tp=2 | 960.00 | 0.96 | 0.52 |" in capsys.readouterr().out
    assert chosen_teams.judge([row(1.0, 2.0), row(1.0, 0.94)]) == 1


def test_plans_that_read_alike_but_run_otherwise_are_told_apart(tmp_path: Path) -> None:
    model = ps.from_onnx(write_mlp(tmp_path / "model.onnx", [8, 8, 8, 8, 8], batch=4))
    training = ps.Training(loss="cross_entropy", microbatches=2)
    plans = [
        ps.plan(model, Cluster.local(2), training, devices=[["cpu:0"], ["cpu:1"]], split_at=[at])
        for at in ("fc2.product", "fc3.product", "fc2.product")
    ]
    assert len({chosen_teams.text_of(plan) for plan in plans}) == 1
    programs = [chosen_teams.program_of(plan) for plan in plans]
    assert programs[0] == programs[2] != programs[1]
