"""Plans with several stages on a device beside those with one on each: the faster one is taken, as carried out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.commands.parser import main
from penstock.ir.cluster.cluster import Cluster, Device, LinkClass
from penstock.ir.schedule_names import ALL_SYNCHRONOUS, DELAYED, PACKED
from penstock.models import write_mlp
from penstock.planning import search as searching
from penstock.planning.explain import argument
from penstock.planning.plan_file import load_plan_file
from penstock.support.errors import UsageError


def cluster(bandwidth: float) -> Cluster:
    devices = (Device("a", host="x", flops=2e7), Device("b", host="y", flops=1.5e7))
    return Cluster(devices, classes=(LinkClass("other-host", bandwidth, 1e-5),))


SLOW, FAST = cluster(1e6), cluster(1e9)


def best(path: Path, where: Cluster, **options: Any) -> ps.Plan:
    model = ps.from_onnx(write_mlp(path / "model.onnx", [64] * 9, batch=16))
    training = ps.Training(loss="cross_entropy", microbatches=4)
    return ps.plan_best(lambda size: model, where, training, batch=64, explained=False, shard="none", **options)


def schedule_of(plan: ps.Plan) -> str:
    assert plan.module.schedule is not None
    return plan.module.schedule.name


def test_packs_are_taken_where_they_are_faster_as_carried_out(tmp_path: Path) -> None:
    plan, alone = best(tmp_path, SLOW), best(tmp_path, SLOW, schedules=("1f1b", "zb-1f1b"))
    assert schedule_of(plan) in PACKED
    assert plan.predicted.step < alone.predicted.step * (1 - searching.WORTH)
    assert plan.search is not None
    assert plan.search.taken is not None


def test_late_gradients_of_packs_are_told(tmp_path: Path) -> None:
    """The control: interleaved has none."""
    for kind, late in (("interleaved-2bw", True), ("interleaved", False)):
        plan = best(tmp_path, SLOW, schedules=(kind,))
        assert schedule_of(plan) == kind
        assert plan.search is not None
        said = [line for line in argument(plan.search) if "one update late" in line]
        assert [f"under {kind}" in line for line in said] == [True] * late


def test_packs_that_were_simulated_too_fast_are_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulation of layers says a tenth of what they take, where they are worth little. The control is the test above."""
    usual = searching.pack

    def hopeful(*arguments: Any) -> Any:
        return {kind: replace(one, step=one.step / 10) for kind, one in usual(*arguments).items()}

    monkeypatch.setattr(searching, "pack", hopeful)
    assert schedule_of(best(tmp_path, SLOW)) in PACKED
    synchronous = tuple(kind for kind in PACKED if kind in ALL_SYNCHRONOUS)
    plan, packed = best(tmp_path, FAST), best(tmp_path, FAST, schedules=synchronous)
    assert schedule_of(plan) not in PACKED
    assert packed.predicted.step > plan.predicted.step * (1 - searching.WORTH)
    assert plan.search is not None
    assert plan.search.taken is None
    (reason,) = (reason for kind, reason in plan.search.refused.items() if kind in PACKED)
    assert "one stage on each device" in reason
    assert any("it was refused: with all passes it takes" in line for line in argument(plan.search))


@pytest.mark.parametrize("kind", PACKED)
def test_a_plan_of_a_schedule_of_packs_has_several_stages_on_a_device(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With one on each there is no plan, whose file could not be read, but one error. The control: what it says to use
    is a plan, and reading its file gives the same one."""
    model, file = str(write_mlp(tmp_path / "model.onnx", [8] * 9, batch=4)), tmp_path / "plan.json"
    words = ["plan", model, "--devices", "2", "--loss", "mse", "--microbatches", "4"]
    for packs in ((), ("--packs", "1")):
        assert main([*words, "--schedule", kind, *packs, "--json"]) == 2
        said = capsys.readouterr()
        single = "2bw" if kind in DELAYED else "1f1b"
        assert f"schedule {kind} runs several stages on each device, here each has one" in said.err
        assert f"use {single}, or put several stages on each, such as --packs 2" in said.err
        assert not said.out
    for instead in (["--schedule", single], ["--schedule", kind, "--packs", "2"]):
        assert main([*words, *instead, "--json"]) == 0
        file.write_text(capsys.readouterr().out)
        assert main(["plan", model, "--devices", "2", "--loss", "mse", "--plan", str(file), "--json"]) == 0
        again, first = json.loads(capsys.readouterr().out), json.loads(file.read_text())
        assert {key: again[key] for key in ("schedule", "stages")} == {
            key: first[key] for key in ("schedule", "stages")
        }


def test_a_file_with_one_stage_on_a_device_names_another_schedule(tmp_path: Path) -> None:
    stages = [{"devices": ["cpu:0"]}, {"devices": ["cpu:1"], "starts_at": "fc2"}]
    file = tmp_path / "plan.json"
    for kind, single in (("interleaved", "1f1b"), ("interleaved-2bw", "2bw")):
        file.write_text(json.dumps({"schedule": kind, "microbatches": 4, "stages": stages}))
        with pytest.raises(UsageError, match=f"schedule {kind} runs several stages .* use {single}"):
            load_plan_file(file, ["cpu:0", "cpu:1"])
        file.write_text(json.dumps({"schedule": single, "microbatches": 4, "stages": stages}))
        assert load_plan_file(file, ["cpu:0", "cpu:1"])[0]["schedule"] == single
