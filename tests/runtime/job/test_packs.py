"""Ranks that run several stages, in real worker processes: the numbers of a device per stage, checkpoints both ways, and
what happens to a run that loses one."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
from tests.passes.memory.test_offload import let_sets_go
from tests.runtime.job.test_replicas import batches_of

import penstock as ps
from penstock.backends.bundle.format import open_bundle
from penstock.ir.cluster.cluster import Cluster
from penstock.models import write_mlp
from penstock.planning.replan import replan
from penstock.runtime.job.job import Job
from penstock.runtime.job.run import run_bundle
from penstock.runtime.launch.failures import place
from penstock.support.errors import PeerLost, VerifyError
from penstock.verification.checks import delay_of

M = 4


@pytest.fixture(scope="module")
def mlp(tmp_path_factory):
    return write_mlp(tmp_path_factory.mktemp("packs") / "mlp.onnx", [8, 8, 8, 8, 8, 8], batch=4)


def compiled(path, out, schedule, devices, packs=1, backend="numpy", **options):
    training = ps.Training(loss="mse", optimizer=ps.AdamW(lr=0.01), microbatches=M, clip=0.5)
    split_at = [f"fc{i}.product" for i in range(2, devices * packs + 1)]
    cluster = Cluster.local(devices)
    plan = ps.plan(ps.from_onnx(path), cluster, training, schedule=schedule, packs=packs, split_at=split_at, **options)
    return ps.compile(plan, out, backend=backend)


def trained(path, count=4, **options):
    with ps.open(path, timeout=60, **options) as job:
        steps = list(job.steps(batches_of(job.bundle, count)))
        return [s.losses for s in steps], [s.grad_norm for s in steps], job.parameters()


def same(one, other):
    assert one[:2] == other[:2]
    assert all(np.array_equal(array, other[2][name]) for name, array in one[2].items())


@pytest.mark.parametrize(
    ("schedule", "single"),
    [("interleaved", "1f1b"), ("zb-v", "1f1b"), ("interleaved-2bw", "2bw"), ("wrap", "1f1b"), ("wrap-2bw", "2bw")],
)
def test_packs_train_as_a_device_per_stage_does(mlp, tmp_path, schedule, single):
    whole = trained(compiled(mlp, tmp_path / "whole", single, 4))
    packed = compiled(mlp, tmp_path / "packs", schedule, 2, 2)
    same(trained(packed), whole)
    assert delay_of(open_bundle(packed).module) == (single == "2bw")


@pytest.mark.parametrize("schedule", ["interleaved", "zb-v"])
def test_what_packs_compute_again_is_what_it_was(mlp, tmp_path, schedule):
    """In processes, by compiled code, with weight gradients apart or not; checkpoints know nothing of it."""
    whole = compiled(mlp, tmp_path / "whole", schedule, 2, 2, "tvm")
    again = compiled(mlp, tmp_path / "again", schedule, 2, 2, "tvm", recompute="all")
    kinds = {action.kind for action in open_bundle(again).module.schedule.actions()}
    assert "R" in kinds
    assert ("W" in kinds) == (schedule == "zb-v")
    same(trained(again), trained(whole))


def test_packs_train_over_gloo(mlp, tmp_path, monkeypatch):
    whole = trained(compiled(mlp, tmp_path / "whole", "1f1b", 4), 2)
    monkeypatch.setenv("PENSTOCK_SHARED_MEMORY", "0")
    same(trained(compiled(mlp, tmp_path / "packs", "interleaved", 2, 2), 2), whole)
    # The control: updates that are one batch late.
    assert trained(compiled(mlp, tmp_path / "late", "2bw", 4), 2)[0] != whole[0]


@pytest.mark.parametrize(
    ("schedule", "single"), [("interleaved", "1f1b"), ("zb-v", "1f1b"), ("interleaved-2bw", "2bw")]
)
def test_packs_are_evaluated_between_steps_as_a_device_per_stage_is(mlp, tmp_path, monkeypatch, schedule, single):
    rng, held = np.random.default_rng(3), tmp_path / "held.npz"
    # Not whole microbatches: 11 samples are two of 4, one of 2 and one of 1.
    np.savez(held, **{name: rng.standard_normal((11, 8), np.float32) for name in ("x", "labels")})
    whole = compiled(mlp, tmp_path / "whole", single, 4)
    packed = compiled(mlp, tmp_path / "packs", schedule, 2, 2)

    def evaluated(path):
        found = []
        with ps.open(path, timeout=60, data="synthetic", eval_data=held) as job:
            for count in (1, 2):
                losses = [step.losses for step in job.steps_from_data(count)]
                found.append((losses, job.evaluate()))
        return found

    expected = evaluated(whole)
    assert expected[0][1].loss != expected[1][1].loss  # the control: weights of another step
    assert evaluated(packed) == expected
    monkeypatch.setenv("PENSTOCK_SHARED_MEMORY", "0")
    assert evaluated(packed) == expected


@pytest.mark.parametrize(("schedule", "single"), [("zb-v", "1f1b"), ("interleaved-2bw", "2bw")])
def test_checkpoints_of_packs_and_of_single_stages_load_in_each_other(mlp, tmp_path, schedule, single):
    whole = compiled(mlp, tmp_path / "whole", single, 4)
    packed = compiled(mlp, tmp_path / "packs", schedule, 2, 2)
    batches = batches_of(open_bundle(whole), 4)
    with ps.open(whole, timeout=60) as job:
        expected = [step.losses for step in job.steps(batches)]
    for first, then in ((packed, whole), (whole, packed)):
        place = tmp_path / f"from-{first.name}"
        with ps.open(first, timeout=60) as job:
            losses = [step.losses for step in job.steps(batches[:2])]
            job.save(place)
        with ps.open(then, timeout=60, resume=place) as job:
            assert losses + [step.losses for step in job.steps(batches[2:])] == expected


def test_a_rank_of_packs_that_is_killed_ends_the_run(mlp, tmp_path):
    packed = compiled(mlp, tmp_path / "packs", "interleaved", 2, 2)
    killed = r"rank 1 \(stages 1 3, process \d+ on "
    with pytest.raises(PeerLost, match=killed), ps.open(packed, timeout=60) as job:  # noqa: PT012
        for number, _ in enumerate(job.steps(batches_of(job.bundle, 6))):
            if number == 1:
                os.kill(job.workers.process_ids()[1], signal.SIGKILL)


def test_an_error_names_the_stage_of_its_action(mlp, tmp_path):
    """The loss is on stage 3. The rank's first stage is 1, which an error names that has no action."""
    packed = compiled(mlp, tmp_path / "packs", "interleaved", 2, 2)
    with Job(open_bundle(packed), timeout=60, nan="stop") as job:
        (batch,) = batches_of(job.bundle, 1)
        spoiled = {name: np.full_like(array, np.nan) for name, array in batch.items()}
        with pytest.raises(VerifyError, match="step 0 has a loss nan") as caught:
            list(job.steps([spoiled]))
    assert caught.value.where.startswith("rank 1, stage 3, action 3U")
    assert place(1, [1, 3], "loading") == "rank 1, stages 1 3, loading"


@pytest.mark.parametrize(("schedule", "single"), [("interleaved", "1f1b"), ("interleaved-2bw", "2bw")])
def test_state_stays_elsewhere_on_fewer_devices(tmp_path, schedule, single):
    """Of packs that become one stage on each device, under a schedule of the same delay: state then goes in chunks."""
    training = ps.Training(loss="mse", optimizer=ps.AdamW(lr=0.01), microbatches=16)
    model = ps.from_onnx(write_mlp(tmp_path / "deep.onnx", [8] * 9, batch=4))
    options = {"schedule": schedule, "packs": 2, "offload": "state", "spill": str(tmp_path)}
    path = ps.compile(ps.plan(model, Cluster.local(4), training, **options), tmp_path / "four", backend="numpy")
    replan(open_bundle(path), ["cpu:0", "cpu:2", "cpu:3"], tmp_path / "three")
    three = open_bundle(tmp_path / "three")
    assert three.plan["offload"] == "state"
    assert three.module.schedule.name == single
    assert "c0" in {action.item for action in three.module.schedule.actions()}
    ran = [run_bundle(one, steps=2, progress=False, timeout=60).losses for one in (path, tmp_path / "three")]
    assert ran[0] == pytest.approx(ran[1], rel=1e-6)


def test_state_stays_elsewhere_where_saved_sets_cannot(tmp_path, monkeypatch):
    """On one device each forward is followed by its backward at once: nothing is away between them."""
    let_sets_go(monkeypatch)
    training = ps.Training(loss="mse", optimizer=ps.AdamW(lr=0.01), microbatches=6)
    model = ps.from_onnx(write_mlp(tmp_path / "deep.onnx", [8] * 17, batch=4))
    plan = ps.plan(model, Cluster.local(4), training, offload="both", spill=str(tmp_path))
    path = ps.compile(plan, tmp_path / "four", backend="numpy")
    replan(open_bundle(path), ["cpu:0"], tmp_path / "one")
    one = open_bundle(tmp_path / "one")
    assert one.plan["offload"] == "state"
    assert {action.item[0] for action in one.module.schedule.actions() if action.item} == {"c"}
    ran = [run_bundle(each, steps=2, progress=False, timeout=60).losses for each in (path, tmp_path / "one")]
    assert ran[0] == pytest.approx(ran[1], rel=1e-6)


def test_microbatches_that_cannot_be_dealt_to_fewer_devices_go_through_one_stage_each(tmp_path):
    """Sixteen make equal groups for four devices, and none for three."""
    training = ps.Training(loss="mse", optimizer=ps.AdamW(lr=0.01), microbatches=16)
    model = ps.from_onnx(write_mlp(tmp_path / "deep.onnx", [8] * 9, batch=4))
    plan = ps.plan(model, Cluster.local(4), training, schedule="interleaved", packs=2)
    path = ps.compile(plan, tmp_path / "four", backend="numpy")
    said = replan(open_bundle(path), ["cpu:0", "cpu:2", "cpu:3"], tmp_path / "three")
    assert said.startswith("3 stages on cpu:0 cpu:2 cpu:3, schedule 1f1b with 16 microbatches, as interleaved cannot")
    ran = [run_bundle(one, steps=2, progress=False, timeout=60).losses for one in (path, tmp_path / "three")]
    assert ran[0] == pytest.approx(ran[1], rel=1e-6)


@pytest.mark.parametrize("schedule", ["interleaved", "zb-v"])
def test_a_checkpoint_of_packs_goes_on_with_fewer_devices(mlp, tmp_path, schedule):
    """Three devices of two stages each, of which one is lost: the losses are those of a run that nobody left."""
    training = ps.Training(loss="mse", optimizer=ps.AdamW(lr=0.01), microbatches=6)
    model = ps.from_onnx(write_mlp(tmp_path / "deep.onnx", [8] * 9, batch=4))
    plan = ps.plan(model, Cluster.local(3), training, schedule=schedule, packs=2)
    path = ps.compile(plan, tmp_path / "three", backend="numpy")
    said = replan(open_bundle(path), ["cpu:0", "cpu:2"], tmp_path / "two")
    assert said == f"2 stages on each of cpu:0 cpu:2, schedule {schedule} with 6 microbatches"
    assert open_bundle(tmp_path / "two").world_size == 2
    run_bundle(path, steps=2, checkpoint=tmp_path / "ckpt", checkpoint_every=2, progress=False, timeout=60)
    resumed = run_bundle(tmp_path / "two", steps=3, resume=tmp_path / "ckpt/step-000002", progress=False, timeout=60)
    whole = run_bundle(path, steps=5, progress=False, timeout=60)
    assert resumed.losses == pytest.approx(whole.losses[2:], rel=1e-6)
    # The control: a run that begins anew.
    assert resumed.losses != pytest.approx(whole.losses[:3], rel=1e-3)
