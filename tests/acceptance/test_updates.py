"""Optimisers, groups and schedules of the learning rate in separate processes: two stages do what one does, and both do what the recurrence says."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import penstock as ps
from penstock.backends.bundle.format import open_bundle
from penstock.commands.parser import main
from penstock.ir.interpreter.ops import TYPED
from penstock.ir.interpreter.recurrence import run_recurrence
from penstock.models import write_mlp
from penstock.runtime.job.job import Job

STEPS, ROWS, M, WIDTHS = 8, 4, 2, [6, 16, 12, 5]
GROUPS = (ps.Group("bias", kind="lion", lr=0.05), ps.Group("fc1", weight_decay=0.1), ps.Group("y", kind="adamw"))


def batches() -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(3)
    drawn = [(rng.standard_normal((ROWS * M, WIDTHS[0])), rng.integers(0, WIDTHS[-1], ROWS * M)) for _ in range(STEPS)]
    return [{"x": x.astype(np.float32), "labels": labels} for x, labels in drawn]


def plan_of(folder: Path, stages: int, schedule: str, groups: tuple[ps.Group, ...] = GROUPS) -> ps.Plan:
    model = ps.from_onnx(write_mlp(folder / "mlp.onnx", WIDTHS, None, seed=1), dims={"batch": ROWS})
    rate = ps.Cosine(STEPS, warmup=3, end=0.1)
    training = ps.Training("cross_entropy", ps.Muon(lr=0.05, adamw_lr=0.01), M, rate=rate, groups=groups)
    return ps.plan(model, ps.Cluster.local(stages), training, schedule=schedule)


def trained(
    plan: ps.Plan, folder: Path, backend: str = "numpy"
) -> tuple[list[float], dict[str, np.ndarray], list[float | None]]:
    with Job(open_bundle(ps.compile(plan, folder, backend=backend))) as job:
        steps = list(job.steps(batches()))
        return [loss for step in steps for loss in step.losses], job.parameters(), [step.lr for step in steps]


@pytest.mark.parametrize(("schedule", "delay"), [("1f1b", 0), ("2bw", 1)])
def test_two_stages_update_as_one_does(schedule: str, delay: int, tmp_path: Path) -> None:
    """Muon, adamw and lion side by side under a cosine: bit for bit over stages, and what the recurrence gives."""
    found = {}
    for stages in (1, 2):
        plan = plan_of(tmp_path, stages, schedule)
        found[stages] = trained(plan, tmp_path / str(stages))
    (one, parameters, rates), (two, others, _) = found[1], found[2]
    assert one == two
    assert all(np.array_equal(array, others[name]) for name, array in parameters.items())
    expected = run_recurrence(plan.reference, plan.model.imported.weights, batches(), delay, TYPED).losses
    np.testing.assert_allclose(two, expected, rtol=1e-6)
    falling = [0.1 + 0.9 * (1 + np.cos(np.pi * t / (STEPS - 3))) / 2 for t in range(STEPS - 3)]
    np.testing.assert_allclose(np.array(rates, dtype=float), 0.05 * np.array([1 / 3, 2 / 3, 1.0, *falling]), rtol=1e-12)
    # Control: without one of its groups it is another run.
    without = plan_of(tmp_path, 1, schedule, GROUPS[1:])
    other = run_recurrence(without.reference, without.model.imported.weights, batches(), delay, TYPED).losses
    assert np.abs(np.array(other) / one - 1).max() > 1e-4


def test_compiled_stages_update_as_the_recurrence_says(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, 2, "2bw")
    found, _, _ = trained(plan, tmp_path / "bundle", "tvm")
    expected = run_recurrence(plan.reference, plan.model.imported.weights, batches(), 1).losses
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_frozen_groups_stay_as_they_are(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, 2, "1f1b", (ps.Group("fc", frozen=True),))
    assert not [name for name in plan.module.vars if name.startswith("fc") and name.count(".") > 1]
    _, parameters, _ = trained(plan, tmp_path / "bundle")
    assert sorted(parameters) == ["y.bias", "y.weight"]


@pytest.mark.slow
def test_the_rate_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_mlp(tmp_path / "mlp.onnx", WIDTHS, None, seed=1)

    def call(*words: object) -> int:
        return main([str(word) for word in words])

    words = [
        "compile",
        path,
        "-o",
        tmp_path / "bundle",
        "--dim",
        f"batch={ROWS}",
        "--loss",
        "cross_entropy",
        "--backend",
        "numpy",
    ]
    words += ["--optimizer", "momentum{nesterov=true}", "--lr", "0.5", "--lr-schedule", "step{every=2,factor=0.5}"]
    assert call(*words, "--group", "bias{weight_decay=0.5,lr=2}", "--group", "^y{frozen=true}") == 0
    capsys.readouterr()

    def rates(*more: object) -> list[float]:
        assert call("run", tmp_path / "bundle", "--steps", "4", "--metrics", tmp_path / "m.jsonl", *more) == 0
        return [json.loads(line)["lr"] for line in (tmp_path / "m.jsonl").read_text().splitlines()]

    assert rates() == [0.5, 0.5, 0.25, 0.25]
    assert rates("--lr", "1") == [1.0, 1.0, 0.5, 0.5]
    assert rates("--lr", "1", "--lr-schedule", "linear{steps=4}") == [1.0, 0.75, 0.5, 0.25]
    assert call("run", tmp_path / "bundle", "--lr", "-1", "--lr-schedule", "cosine") == 2
    said = capsys.readouterr().err
    assert "must be 0 or more, got -1.0" in said
    assert "steps is missing" in said
    assert call(*words, "--group", "fc1", "--group", "b{lr=x}") == 2
    said = capsys.readouterr().err
    assert "group 'fc1': nothing is different in it" in said
    assert "group 'b': lr must be a number, got 'x'" in said
    assert call(*words, "--group", "absent{lr=2}") == 2
    assert "'absent' matches no parameter" in capsys.readouterr().err
