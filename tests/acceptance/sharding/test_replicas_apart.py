"""Replicas that hold parts of variables train as whole ones do, in real processes, and go on from each other's
checkpoints."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import penstock as ps
from penstock.commands.parser import main

STEPS, WIDTH, CLASSES = 4, 8, 4


@cache
def model() -> ps.Model:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH), nn.GELU(), nn.Linear(WIDTH, CLASSES))
    return ps.from_torch(layers, (torch.randn(4, WIDTH),))


def planned(level: int, replicas: int = 2) -> ps.Plan:
    training = ps.Training("cross_entropy", ps.AdamW(lr=1e-2), 2)
    return ps.plan(model(), ps.Cluster.local(replicas), training, replicas=replicas, stages=1, zero=level)


def batches(plan: ps.Plan, first: int, count: int) -> list[dict[str, np.ndarray]]:
    image, labels = plan.module.data_inputs
    feed = []
    for step in range(first, first + count):
        rng = np.random.default_rng(step)
        feed.append({image.name: rng.normal(size=(8, WIDTH)).astype(np.float32)})
        feed[-1][labels.name] = rng.integers(0, CLASSES, 8)
    return feed


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    folder = tmp_path_factory.mktemp("bundles")
    for level in (0, 1, 2, 3):
        ps.compile(planned(level), folder / str(level))
    return {level: folder / str(level) for level in (0, 1, 2, 3)}


def losses(bundle: Path, first: int, count: int, **settings: object) -> list[float]:
    with ps.open(bundle, **settings) as job:  # type: ignore[arg-type]
        return list(job.run(iter(batches(planned(0), first, count))))


def test_two_processes_have_the_losses_of_whole_replicas(bundles: dict[int, Path]) -> None:
    plain = losses(bundles[0], 0, STEPS)
    assert len(set(plain)) == STEPS
    for level in (1, 2, 3):
        assert losses(bundles[level], 0, STEPS) == plain


@pytest.mark.parametrize(("before", "after"), [(1, 0), (0, 1), (1, 3), (3, 1)])
def test_a_checkpoint_goes_on_at_another_level(
    before: int, after: int, bundles: dict[int, Path], tmp_path: Path
) -> None:
    right = losses(bundles[0], 0, STEPS)
    with ps.open(bundles[before]) as job:
        begun = list(job.run(iter(batches(planned(0), 0, 2))))
        saved = job.save(tmp_path)
        weights = {name: np.array(x) for name, x in job.parameters().items()}
    with ps.open(bundles[after], resume=saved) as job:
        for name, array in job.parameters().items():
            np.testing.assert_array_equal(array, weights[name])
        ended = list(job.run(iter(batches(planned(0), 2, STEPS - 2))))
    assert begun + ended == right


def test_a_checkpoint_of_parts_goes_on_with_one_device(bundles: dict[int, Path], tmp_path: Path) -> None:
    ps.compile(planned(0, 1), tmp_path / "one")
    right = losses(bundles[0], 0, STEPS)
    with ps.open(bundles[1]) as job:
        list(job.run(iter(batches(planned(0), 0, 2))))
        saved = job.save(tmp_path / "state")
    ended = losses(tmp_path / "one", 2, STEPS - 2, resume=saved)
    np.testing.assert_allclose(ended, right[2:], rtol=1e-5)


def test_verify_knows_whole_values_of_parts(bundles: dict[int, Path], capsys: pytest.CaptureFixture[str]) -> None:
    for level in (1, 3):
        assert main(["verify", str(bundles[level])]) == 0
    assert "values of 2 ranks in float64 are those of the whole program" in capsys.readouterr().err
