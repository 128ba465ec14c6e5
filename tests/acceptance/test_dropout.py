"""Training with dropout, stages in real processes, against torch with the same masks: whatever the stages, the schedule and the interruptions."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from oracles.drawn import drawn
from torch import Tensor, nn

import penstock as ps
from penstock.passes.schedules.schedule import SCHEDULES
from penstock.runtime.job.run import run_bundle

ROWS, BATCHES, RATE, TIMEOUT = 6, 6, 0.2, 60


class Network(nn.Module):
    """Three uses of one module of dropout, on both sides of any cut."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(12, 33), nn.Linear(33, 20), nn.Linear(20, 5)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(self.dropout(x)))
        return self.third(self.dropout(torch.tanh(self.second(self.dropout(x)))))


def network() -> Network:
    torch.manual_seed(5)
    return Network().train()


def batches(microbatches: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(3)
    rows = ROWS * microbatches
    return [
        {"x": rng.standard_normal((rows, 12)).astype(np.float32), "labels": rng.integers(0, 5, rows)}
        for _ in range(BATCHES)
    ]


def by_torch(microbatches: int, delay: int, seed: int) -> list[float]:
    """The loss of every microbatch: W(t + 1) = W(t) - rate * g(W(t - delay)), in float64."""
    model = network().double()
    versions = [[p.detach().clone() for p in model.parameters()]]
    losses = []
    with drawn(seed) as draws:
        for t, batch in enumerate(batches(microbatches)):
            for p, old in zip(model.parameters(), versions[max(t - delay, 0)], strict=True):
                p.data, p.grad = old.clone(), None
            for k in range(microbatches):
                draws.begin(t * microbatches + k)
                rows = slice(k * ROWS, (k + 1) * ROWS)
                loss = nn.functional.cross_entropy(
                    model(torch.tensor(batch["x"][rows]).double()), torch.tensor(batch["labels"][rows])
                )
                (loss / microbatches).backward()
                losses.append(float(loss.detach()))
            versions.append([old - RATE * p.grad for old, p in zip(versions[-1], model.parameters(), strict=True)])
    return losses


@cache
def imported() -> ps.Model:
    return ps.from_torch(network(), (torch.zeros(ROWS, 12),))


def bundle(folder: Path, stages: int, schedule: str, microbatches: int, seed: int = 0, backend: str = "tvm") -> Path:
    training = ps.Training(loss="cross_entropy", optimizer=ps.SGD(lr=RATE), microbatches=microbatches, seed=seed)
    plan = ps.plan(
        imported(), ps.Cluster.local(stages), training, stages=stages, schedule=schedule, microbatches=microbatches
    )
    return ps.compile(plan, folder / "bundle", backend=backend)


def trained(made: Path, microbatches: int) -> list[float]:
    with ps.open(made, timeout=TIMEOUT) as job:
        return [loss for step in job.steps(batches(microbatches)) for loss in step.losses]


# Schedules decide when masks are drawn, the backend with which bits: compiled stages in half of the cases, in all of them among the slow tests.
CASES = [
    (1, "1f1b", 2, 0),
    (2, "1f1b", 3, 0),
    (2, "2bw", 2, 7),
    (3, "gpipe", 2, 2**32 - 1),
    (3, "zb-1f1b", 3, 0),
    (2, "eager-2bw", 2, 7),
]
LATER = [CASES[1], CASES[4], CASES[5]]
BACKED = [pytest.param(*case, "tvm", marks=pytest.mark.slow if case in LATER else ()) for case in CASES] + [
    (*case, "numpy") for case in LATER
]


@pytest.mark.parametrize(("stages", "schedule", "microbatches", "seed", "backend"), BACKED)
def test_the_masks_are_the_same_for_all(
    stages: int, schedule: str, microbatches: int, seed: int, backend: str, tmp_path: Path
) -> None:
    found = trained(bundle(tmp_path, stages, schedule, microbatches, seed, backend), microbatches)
    delay = SCHEDULES[schedule].delay
    np.testing.assert_allclose(found, by_torch(microbatches, delay, seed), rtol=1e-5)
    assert not np.allclose(found, by_torch(microbatches, delay, seed ^ 1), rtol=1e-3), (
        "control: other masks give other losses"
    )


def test_masks_go_on_where_training_was_interrupted(tmp_path: Path) -> None:
    made = bundle(tmp_path, 2, "1f1b", 2, backend="numpy")
    whole = trained(made, 2)
    with ps.open(made, timeout=TIMEOUT) as job:
        losses = [loss for step in job.steps(batches(2)[:3]) for loss in step.losses]
        place = job.save(tmp_path / "checkpoint")
    with ps.open(made, timeout=TIMEOUT, resume=place) as job:
        losses += [loss for step in job.steps(batches(2)[3:]) for loss in step.losses]
    assert losses == whole


@pytest.mark.slow
def test_masks_go_on_under_another_plan(tmp_path: Path) -> None:
    """Other stages, schedule, number of microbatches and seed: masks are those of the checkpoint's seed and of the place in the data."""
    stream = {name: np.concatenate([batch[name] for batch in batches(4)[:3]]) for name in ("x", "labels")}
    halves = [{name: array[k * 2 * ROWS : (k + 1) * 2 * ROWS] for name, array in stream.items()} for k in range(6)]
    with ps.open(bundle(tmp_path / "four", 2, "1f1b", 4, seed=7, backend="numpy"), timeout=TIMEOUT) as job:
        losses = [loss for step in job.steps(batches(4)[:1]) for loss in step.losses]
        place = job.save(tmp_path / "checkpoint")
    with ps.open(
        bundle(tmp_path / "two", 1, "gpipe", 2, seed=3, backend="numpy"), timeout=TIMEOUT, resume=place
    ) as job:
        losses += [loss for step in job.steps(halves[2:4]) for loss in step.losses]
        place = job.save(tmp_path / "checkpoint")
        assert any(
            "random draws go on with seed 7 of the checkpoint, not with 3" in warning for warning in job.warnings
        )
    with ps.open(
        bundle(tmp_path / "again", 3, "1f1b", 2, seed=7, backend="numpy"), timeout=TIMEOUT, resume=place
    ) as job:
        losses += [loss for step in job.steps(halves[4:]) for loss in step.losses]
        assert not any("seed" in warning for warning in job.warnings)

    def judged(seed: int, numbers: list[int]) -> list[float]:
        model = network().double()
        found: list[float] = []
        with drawn(seed) as draws:
            for step in ([0, 1, 2, 3], [4, 5], [6, 7], [8, 9], [10, 11]):
                model.zero_grad()
                for k in step:
                    draws.begin(numbers[k])
                    rows = slice(k * ROWS, (k + 1) * ROWS)
                    outputs = model(torch.tensor(stream["x"][rows]).double())
                    loss = nn.functional.cross_entropy(outputs, torch.tensor(stream["labels"][rows]))
                    (loss / len(step)).backward()
                    found.append(float(loss.detach()))
                with torch.no_grad():
                    for p in model.parameters():
                        p -= RATE * p.grad
        return found

    np.testing.assert_allclose(losses, judged(7, list(range(12))), rtol=1e-5)
    counted_by_steps = [0, 1, 2, 3, 2, 3, 4, 5, 6, 7, 8, 9]
    assert not np.allclose(losses, judged(7, counted_by_steps), rtol=1e-3), (
        "control: masks of other numbers give other losses"
    )
    assert not np.allclose(losses[4:], judged(3, list(range(12)))[4:], rtol=1e-3), (
        "control: and so do those of the compiled seed"
    )


def test_data_give_no_numbers_of_microbatches(tmp_path: Path) -> None:
    """Neither files nor noise have to know of them; what bundles are verified with has them, too."""
    made = bundle(tmp_path, 2, "1f1b", 2, backend="numpy")
    whole = trained(made, 2)
    arrays = {name: np.concatenate([batch[name] for batch in batches(2)]) for name in ("x", "labels")}
    np.savez(tmp_path / "data.npz", **arrays)
    done = run_bundle(made, data=str(tmp_path / "data.npz"), steps=BATCHES, timeout=TIMEOUT)
    assert done.losses == [float(np.mean(pair)) for pair in np.array(whole).reshape(-1, 2)]
