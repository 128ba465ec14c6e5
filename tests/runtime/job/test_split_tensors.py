"""Trainings whose tensors are split over devices: saved, resumed under other meshes, with the losses of one device.

The oracle is the whole module on one device, and for what goes on elsewhere, the run that was not interrupted.
"""

from __future__ import annotations

import numpy as np
import pytest
from oracles.sharding.local_modules import local_mlp

from penstock.backends.bundle.writer import Provenance, write_bundle
from penstock.backends.registry import backend_of
from penstock.runtime.checkpoint.format import read_index
from penstock.runtime.job.job import Job

TIMEOUT, STEPS, MORE = 60, 3, 5


def bundle_of_case(case, folder):
    """Write a bundle of a module in local form for the back end in NumPy."""
    module, files = case.local, {}
    for stage in module.stages:
        (folder / str(stage.index)).mkdir(parents=True)
        names = backend_of("numpy").compile_stages(module, [stage.index], folder / str(stage.index))[stage.index]
        files[stage.index] = [folder / str(stage.index) / name for name in names]
    weights = {name: array.astype(np.float32) for name, array in case.weights.items()}
    return write_bundle(
        folder / "bundle", module, files, weights, backend="numpy", plan={}, provenance=Provenance("0" * 64)
    )


def as_fed(batches):
    return [{name: a.astype(np.float32) if a.dtype == np.float64 else a for name, a in b.items()} for b in batches]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Train two stages x tp=2 for some steps, save, and go on."""
    folder = tmp_path_factory.mktemp("trained")
    case = local_mlp("1f1b", 2, 1, 2)
    batches = as_fed(case.batches(STEPS + MORE))
    with Job(bundle_of_case(case, folder), timeout=TIMEOUT) as job:
        losses = list(job.run(batches[:STEPS]))
        place = job.save(folder / "ckpt")
        saved = job.parameters()
        losses += list(job.run(batches[STEPS:]))
    return batches, losses, place, saved


# Stages, and the sizes of dp and tp.
MESHES = {
    "one device": (1, 1, 1),
    "tp=4": (1, 1, 4),
    "tp=3": (1, 1, 3),
    "dp=4": (1, 4, 1),
    "four stages": (4, 1, 1),
    "dp=2 x tp=2": (1, 2, 2),
    "two stages, tp=2": (2, 1, 2),
}


@pytest.mark.parametrize("name", MESHES)
def test_a_run_goes_on_under_another_mesh(trained, tmp_path, name):
    batches, losses, place, saved = trained
    bundle = bundle_of_case(local_mlp("1f1b", *MESHES[name]), tmp_path)
    with Job(bundle, timeout=TIMEOUT, resume=place) as job:
        held = job.parameters()
        assert held.keys() == saved.keys()
        for tensor, array in held.items():
            assert array.tobytes() == saved[tensor].tobytes(), tensor
        again = list(job.run(batches[STEPS:]))
    if name == "two stages, tp=2":
        assert again == losses[STEPS:]
    np.testing.assert_allclose(again, losses[STEPS:], rtol=1e-6)
    # The control: another state gives other losses by far.
    assert not np.allclose(again, losses[:MORE], rtol=1e-3)


def test_it_trains_as_one_device_does(trained, tmp_path):
    """The control: what was learnt until the checkpoint shows, so another state gives other losses."""
    batches, losses, place, _ = trained
    assert read_index(place).format == 3
    bundle = bundle_of_case(local_mlp("1f1b", 1, 1, 1), tmp_path)
    with Job(bundle, timeout=TIMEOUT) as job:
        alone = list(job.run(batches))
    np.testing.assert_allclose(losses, alone, rtol=1e-5)
    with Job(bundle, timeout=TIMEOUT) as job:
        forgetful = list(job.run(batches[STEPS:]))
    assert not np.allclose(forgetful, losses[STEPS:], rtol=1e-3)
