"""Tests of cuts that follow modules and pins, where a bundle is planned for other devices."""

from __future__ import annotations

from pathlib import Path

import pytest

import penstock as ps
from penstock.backends.bundle.format import Bundle, open_bundle
from penstock.ir.cluster.cluster import Cluster
from penstock.models import write_mlp
from penstock.planning.build import build
from penstock.planning.replan import replan
from penstock.support.errors import UsageError

TRAINING = ps.Training(loss="cross_entropy", microbatches=6)


def built(folder: Path, widths: list[int], devices: int, **options: object) -> Bundle:
    model = ps.from_onnx(write_mlp(folder / "model.onnx", widths, 8))
    build(ps.plan(model, Cluster.local(devices), TRAINING, **options), folder / "bundle")
    return open_bundle(folder / "bundle")


def test_pins_stay_where_stages_do(tmp_path: Path) -> None:
    bundle = built(tmp_path, [16] * 5, 4, replicas=2, pin=("fc2=1",))
    assert bundle.module.vars["fc2.weight"].stage == 1
    assert "pins" not in replan(bundle, ["cpu:0", "cpu:1", "cpu:2"], tmp_path / "same")
    assert open_bundle(tmp_path / "same").module.vars["fc2.weight"].stage == 1
    # Control: the stages are others where all devices of one are lost.
    assert ", without pins" in replan(bundle, ["cpu:3"], tmp_path / "other")


def test_stages_are_cut_anywhere_where_modules_are_too_few(tmp_path: Path) -> None:
    bundle = built(tmp_path, [16] * 3, 6, replicas=3, split_by="module")
    assert "cut at any operation" in replan(bundle, ["cpu:3", "cpu:4", "cpu:5"], tmp_path / "three")
    assert "cut at any operation" not in replan(bundle, ["cpu:2", "cpu:3"], tmp_path / "two")


def test_a_search_for_trainings_has_no_schedule_of_inference(tmp_path: Path) -> None:
    model = ps.from_onnx(write_mlp(tmp_path / "model.onnx", [8, 8, 8], 4))
    with pytest.raises(UsageError, match="forward: no schedule of a training"):
        ps.plan_best(lambda size: model, Cluster.local(2), TRAINING, batch=8, sizes=(4,), schedules=("forward",))
