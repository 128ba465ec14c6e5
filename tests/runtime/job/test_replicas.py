"""Stages on several devices in real worker processes: what they compute is what one device per stage computes."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

import penstock as ps
from penstock.backends.bundle.format import open_bundle
from penstock.backends.bundle.writer import write_bundle
from penstock.ir.cluster.cluster import Cluster, Device
from penstock.ir.schedule import Program, Schedule
from penstock.models import write_gpt, write_mlp
from penstock.runtime.job.run import run_bundle
from penstock.support.errors import PeerLost

M, STEPS = 4, 6
EQUAL = ()
UNEQUAL = ((3, 1), (1, 3))


@pytest.fixture(scope="module")
def mlp(tmp_path_factory):
    return write_mlp(tmp_path_factory.mktemp("replicas") / "mlp.onnx", [16, 32, 32, 8], batch=4)


def compiled(path, out, schedule="1f1b", replicas=2, shares=EQUAL, stages=2, backend="numpy", **training):
    settings = {"loss": "mse", "optimizer": ps.Momentum(lr=0.05), "microbatches": M} | training
    cluster = Cluster(tuple(Device(f"cpu:{i}") for i in range(stages * replicas)))
    split_at = ["fc2.product"] if path.name == "mlp.onnx" else []
    options = {"schedule": schedule, "stages": stages, "replicas": replicas, "shares": shares, "split_at": split_at}
    plan = ps.plan(ps.from_onnx(path), cluster, ps.Training(**settings), **options)
    return ps.compile(plan, out, backend=backend)


def batches_of(bundle, count=STEPS):
    rng = np.random.default_rng(0)
    found = []
    for _ in range(count):
        batch = {}
        for value in bundle.module.data_inputs:
            dims = (value.type.dims[0] * M, *value.type.dims[1:])
            integer = value.type.dtype.startswith("i")
            batch[value.name] = rng.integers(0, 8, dims) if integer else rng.normal(size=dims).astype(np.float32)
        found.append(batch)
    return found


def trained(path):
    """Losses of all microbatches, norms and weights after some steps."""
    with ps.open(path, timeout=60) as job:
        steps = list(job.steps(batches_of(job.bundle)))
        return np.array([s.losses for s in steps]), [s.grad_norm for s in steps], job.parameters()


@pytest.fixture(scope="module")
def alone(mlp, tmp_path_factory):
    """What the same training gives with one device per stage, once for each kind of it."""
    known = {}

    def run(schedule, **options):
        key = (schedule, *options.items())
        if key not in known:
            known[key] = trained(
                compiled(mlp, tmp_path_factory.mktemp("alone") / "bundle", schedule, replicas=1, **options)
            )
        return known[key]

    return run


def agree(found, expected):
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6, atol=1e-6)
    assert found[2].keys() == expected[2].keys()
    for name, array in expected[2].items():
        np.testing.assert_allclose(found[2][name], array, rtol=1e-6, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("schedule", "backend"),
    [("2bw", "tvm"), *(pytest.param("1f1b", backend, marks=pytest.mark.slow) for backend in ("numpy", "tvm"))],
)
def test_two_stages_of_two_devices_equal_two_of_one(mlp, alone, tmp_path, schedule, backend):
    """With equal shares and with unequal ones, which differ from stage to stage."""
    expected = alone(schedule, backend=backend)
    agree(trained(compiled(mlp, tmp_path / "equal", schedule, backend=backend)), expected)
    agree(trained(compiled(mlp, tmp_path / "unequal", schedule, shares=UNEQUAL, backend=backend)), expected)


def test_a_batch_that_is_not_shared_out_gives_another_result(mlp, alone, tmp_path):
    """The control: ranks that do not sum up train on a part of the batch each, and end elsewhere."""
    bundle = open_bundle(compiled(mlp, tmp_path / "sums"))
    found = bundle.module.schedule
    programs = {rank: Program(p.start, tuple(a for a in p.batch if a.kind != "AR")) for rank, p in found.ranks.items()}
    module = bundle.module.but(schedule=Schedule(found.name, found.microbatches, programs))
    weights = {name: array for name, array in ps.from_onnx(mlp).imported.weights.items() if name in module.vars}
    without = write_bundle(tmp_path / "without", module, {}, weights, backend="numpy", plan={}).path
    with pytest.raises(AssertionError):
        agree(trained(without), alone("1f1b", backend="numpy"))


@pytest.mark.parametrize(
    "schedule", ["1f1b", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("eager-2bw", "zb-1f1b", "gpipe"))]
)
def test_clipping_sees_the_gradient_of_the_whole_batch(mlp, alone, tmp_path, schedule):
    expected = alone(schedule, clip=0.05)
    # Of four microbatches eager-2bw cannot have as many in hand as a rank that runs one of them asks for.
    shares = ((2, 2), (2, 2) if schedule == "eager-2bw" else (3, 1))
    found = trained(compiled(mlp, tmp_path / "two", schedule, shares=shares, clip=0.05))
    agree(found, expected)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-6)
    assert min(expected[1]) > 0.05


@pytest.mark.parametrize("schedule", ["2bw", pytest.param("1f1b", marks=pytest.mark.slow)])
def test_a_tied_parameter(tmp_path, schedule):
    """Embedding and head share their weights on two stages: their parts are summed over ranks, then over stages."""
    gpt = write_gpt(tmp_path / "gpt.onnx", layers=2, width=16, heads=2, vocab=24, positions=8, batch=2)
    options = {"loss": "cross_entropy", "optimizer": ps.SGD(lr=0.1)}
    expected = trained(compiled(gpt, tmp_path / "one", schedule, replicas=1, **options))
    agree(trained(compiled(gpt, tmp_path / "two", schedule, **options)), expected)


@pytest.mark.parametrize(
    ("schedule", "devices"),
    [
        ("1f1b", [["cpu:0", "cpu:1", "cpu:3"], ["cpu:2"]]),
        ("2bw", [["cpu:3"], ["cpu:0", "cpu:2"]]),
        pytest.param("2bw", [["cpu:0", "cpu:1", "cpu:3"], ["cpu:2"]], marks=pytest.mark.slow),
        pytest.param("1f1b", [["cpu:3"], ["cpu:0", "cpu:2"]], marks=pytest.mark.slow),
    ],
)
def test_numbers_of_devices_may_differ_from_stage_to_stage(mlp, alone, tmp_path, schedule, devices):
    cluster = Cluster(tuple(Device(f"cpu:{i}") for i in range(4)))
    training = ps.Training(loss="mse", optimizer=ps.Momentum(lr=0.05), microbatches=M)
    plan = ps.plan(ps.from_onnx(mlp), cluster, training, schedule=schedule, devices=devices, split_at=["fc2.product"])
    agree(trained(ps.compile(plan, tmp_path / "several", backend="numpy")), alone(schedule, backend="numpy"))


def test_faster_devices_take_more_microbatches(mlp):
    cluster = Cluster((Device("cpu:0", flops=3e10), Device("cpu:1", flops=1e10), Device("cpu:2")))
    training = ps.Training(loss="mse", optimizer=ps.SGD(lr=0.1), microbatches=8)
    plan = ps.plan(ps.from_onnx(mlp), cluster, training, devices=[["cpu:0", "cpu:1"], ["cpu:2"]])
    assert [s["shares"] for s in plan.as_dict()["stages"]] == [[6, 2], [8]]


def test_inference_is_shared_out(mlp, tmp_path):
    def outputs(replicas):
        cluster = Cluster(tuple(Device(f"cpu:{i}") for i in range(2 * replicas)))
        plan = ps.plan(
            ps.from_onnx(mlp), cluster, stages=2, replicas=replicas, microbatches=3, split_at=["fc2.product"]
        )
        with ps.open(ps.compile(plan, tmp_path / f"infer{replicas}", backend="numpy")) as job:
            inputs = {job.module.data_inputs[0].name: np.random.default_rng(1).normal(size=(50, 16)).astype(np.float32)}
            return job.infer(inputs)

    expected = outputs(1)
    for name, array in outputs(2).items():
        np.testing.assert_array_equal(array, expected[name])


@pytest.mark.parametrize("schedule", ["2bw", pytest.param("1f1b", marks=pytest.mark.slow)])
def test_a_checkpoint_is_written_once_per_stage_and_fits_other_numbers_of_devices(mlp, tmp_path, schedule):
    two, one = (compiled(mlp, tmp_path / f"bundle{n}", schedule, replicas=n) for n in (2, 1))
    whole = run_bundle(one, steps=4, progress=False)
    run_bundle(two, steps=2, checkpoint=tmp_path / "ckpt", progress=False)
    assert sorted(p.name for p in (tmp_path / "ckpt/step-000002").glob("*.safetensors") if "older" not in p.name) == [
        "rank0.safetensors",
        "rank2.safetensors",
    ]
    for path in (one, two):
        resumed = run_bundle(path, steps=2, resume=tmp_path / "ckpt", progress=False)
        np.testing.assert_allclose(resumed.losses, whole.losses[2:], rtol=1e-6)


@pytest.mark.slow
def test_under_torchrun(mlp, tmp_path):
    """Rank 0 collects the losses of all ranks of the last stage."""
    path = compiled(mlp, tmp_path / "bundle", shares=UNEQUAL)
    expected = run_bundle(path, steps=3, progress=False)
    metrics = tmp_path / "metrics.jsonl"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "4",
        "--no-python",
        sys.executable,
        "-m",
        "penstock",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    options = ["--standalone"]
    done = subprocess.run(
        [*command[:3], *options, *command[3:], "run", str(path), "--steps", "3", "--metrics", str(metrics)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line)["loss"] for line in metrics.read_text().splitlines()]
    np.testing.assert_allclose(found, expected.losses, rtol=1e-6)


def test_a_lost_rank_is_named_by_those_who_sum_with_it(mlp, tmp_path):
    path = compiled(mlp, tmp_path / "bundle")
    with ps.open(path, timeout=20) as job:
        losses = job.run(batches_of(job.bundle, 50))
        next(losses)
        os.kill(job.workers.process_ids()[1], 9)
        with pytest.raises(PeerLost, match=r"rank 1 \(stage 0, process \d+ on [^)]+\) was killed by SIGKILL"):
            list(losses)
