"""Trainings whose tensors are split over devices: saved, resumed under other meshes, with the losses of one device,
whatever the mesh; and a trace has their collectives.

The oracle is the whole module on one device, and for what goes on elsewhere, the run that was not interrupted.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
from oracles.sharding.local_modules import local_mlp

import penstock as ps
from penstock.backends.bundle.writer import Provenance, write_bundle
from penstock.backends.interface import CompileOptions
from penstock.backends.registry import backend_of
from penstock.ir.collective_calls import calls_of
from penstock.runtime.checkpoint.format import read_index
from penstock.runtime.job.job import Job
from penstock.runtime.telemetry.trace import write_trace

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


def bundle_of_local(case, folder, backend="numpy", module=None):
    module = module or case.local
    stages = [stage.index for stage in module.stages]
    names = backend_of(backend).compile_stages(module, stages, folder / "code", CompileOptions(jobs=1))
    files = {stage: [folder / "code" / name for name in of_stage] for stage, of_stage in names.items()}
    weights = {name: array.astype(np.float32) for name, array in case.weights.items()}
    return write_bundle(folder / "bundle", module, files, weights, backend=backend, plan={}).path


def losses_of(path, case):
    """The losses of three steps."""
    with ps.open(path, timeout=60) as job:
        return [job.step({"x": batch["x"].astype(np.float32), "labels": batch["labels"]}) for batch in case.batches(3)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The losses of one device."""
    case = local_mlp(tp=1)
    return losses_of(bundle_of_local(case, tmp_path_factory.mktemp("alone")), case)


@pytest.mark.parametrize(
    ("stages", "dp", "tp", "backend"),
    [
        (1, 1, 2, "tvm"),
        (1, 1, 3, "numpy"),
        (1, 2, 2, "numpy"),
        pytest.param(2, 1, 2, "tvm", marks=pytest.mark.slow),
        pytest.param(2, 2, 2, "numpy", marks=pytest.mark.slow),
    ],
)
def test_a_split_model_trains_as_on_one_device(stages, dp, tp, backend, alone, tmp_path):
    case = local_mlp(stages=stages, dp=dp, tp=tp)
    losses = losses_of(bundle_of_local(case, tmp_path, backend), case)
    np.testing.assert_allclose(losses, alone, rtol=1e-5)


def test_a_sum_that_is_left_out_trains_otherwise(alone, tmp_path):
    """The control."""
    case = local_mlp(tp=2)
    graph = case.local.stage_graph(0, "F")
    first = calls_of(graph)[0].op
    ops = tuple(op.with_attrs(by="max") if op is first else op for op in graph.ops)
    wrong = case.local.with_graph(type(graph)(graph.name, graph.ins, graph.outs, ops, graph.saved))
    losses = losses_of(bundle_of_local(case, tmp_path, module=wrong), case)
    assert not np.allclose(losses, alone, rtol=1e-3)


def test_a_trace_has_a_row_of_collectives(tmp_path):
    done = [[("0F3, %y = all_reduce(%p, over=tp) #0", 1.0, 1.5, 2.0)], []]
    write_trace(tmp_path / "trace.json", [[("0F3", 0.5, 2.5)], [("0F3", 0.5, 2.5)]], collectives=done)
    entries = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    row = [entry for entry in entries if entry.get("tid") == 1]
    assert [entry["ph"] for entry in row] == ["M", "b", "e"]
    assert {entry["pid"] for entry in row} == {0}
    assert row[1]["name"] == done[0][0][0]
    assert (row[1]["ts"], row[2]["ts"], row[1]["args"]["waited us"]) == (5e5, 15e5, 5e5)
