"""Updates on another device, in real worker processes: the same numbers, checkpoints both ways, and memory as planned."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from tests.passes.memory.test_offload import let_sets_go
from tests.runtime.job.test_offload import traced
from tests.runtime.job.test_packs import M, same, trained
from tests.runtime.job.test_replicas import batches_of

import penstock as ps
from penstock.backends.bundle.format import open_bundle
from penstock.ir.batch_shares import updating_stages
from penstock.ir.cluster.cluster import Cluster
from penstock.ir.memory.account import first_difference
from penstock.models import write_mlp
from penstock.planning.explain import plan_lines
from penstock.planning.plan_file import load_plan_file
from penstock.planning.replan import replan
from penstock.runtime.telemetry.memory_trace import measured_account, planned_beside, read_trace
from penstock.support.errors import UsageError

UPDATER = "cpu:4"


@pytest.fixture(scope="module")
def mlp(tmp_path_factory):
    return write_mlp(tmp_path_factory.mktemp("updates") / "mlp.onnx", [8, 8, 8, 8, 8, 8], batch=4)


def compiled(path, out, update_on="", backend="numpy", split_at=("fc3.product",), clip=0.5, **options):
    """A bundle of two stages on the first devices of five."""
    training = ps.Training(loss="mse", optimizer=ps.AdamW(lr=0.01), microbatches=M, clip=clip)
    each = options.pop("replicas", 1)
    devices = [[f"cpu:{stage * each + i}" for i in range(each)] for stage in range(2)]
    options |= {"devices": devices, "split_at": list(split_at), "update_on": update_on}
    return ps.compile(ps.plan(ps.from_onnx(path), Cluster.local(5), training, **options), out, backend=backend)


KINDS = {
    "1f1b": {"schedule": "1f1b", "backend": "tvm"},
    "2bw": {"schedule": "2bw", "backend": "tvm"},
    "weight gradients apart": {"schedule": "zb-1f1b", "clip": 0.0},
    "replicas": {"schedule": "2bw", "replicas": 2},
    "packs": {"schedule": "interleaved", "packs": 2, "split_at": ("fc2.product", "fc3.product", "fc4.product")},
    "loss scale": {"schedule": "2bw", "precision": "f16"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_updates_elsewhere_train_bit_for_bit_the_same(mlp, tmp_path, kind):
    """Losses, norms and weights."""
    options = KINDS[kind]
    away = compiled(mlp, tmp_path / "away", UPDATER, **options)
    expected = trained(compiled(mlp, tmp_path / "here", **options))
    same(trained(away), expected)
    module = open_bundle(away).module
    assert module.rank_devices()[-1] == UPDATER
    assert not any(var.role == "state" and var.stage in (0, 1) for var in module.vars.values())
    # The control: an update that forgets its state.
    if kind == "1f1b":
        training = ps.Training(loss="mse", optimizer=ps.SGD(lr=0.01), microbatches=M, clip=0.5)
        plan = ps.plan(ps.from_onnx(mlp), Cluster.local(3), training, update_on="cpu:2", split_at=["fc3.product"])
        assert trained(ps.compile(plan, tmp_path / "sgd", backend="numpy"))[0] != expected[0]


def test_two_devices_share_updates_out_and_agree_on_the_norm(mlp, tmp_path):
    cluster = Cluster.local(4)
    hosts = {"cpu:0": "a", "cpu:1": "b", "cpu:2": "b", "cpu:3": "a"}
    cluster = replace(cluster, devices=tuple(replace(d, host=hosts[d.name]) for d in cluster.devices))
    training = ps.Training(loss="mse", optimizer=ps.AdamW(lr=0.01), microbatches=M, clip=0.5)
    plan = ps.plan(ps.from_onnx(mlp), cluster, training, update_on="cpu:2,cpu:3", split_at=["fc3.product"])
    # On the host of each stage.
    flows = {(edge.src, edge.dst) for edge in plan.module.edges if edge.phase == "U"}
    assert flows == {(2, 1), (3, 0)}
    assert plan.module.rank_devices() == ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]
    plan = ps.plan(ps.from_onnx(mlp), Cluster.local(4), training, update_on="cpu:2,cpu:3", split_at=["fc3.product"])
    same(trained(ps.compile(plan, tmp_path / "two", backend="numpy")), trained(compiled(mlp, tmp_path / "here")))


@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_checkpoints_are_those_of_training_without(mlp, tmp_path, schedule):
    here = compiled(mlp, tmp_path / "here", schedule=schedule)
    away = compiled(mlp, tmp_path / "away", UPDATER, schedule=schedule)
    batches = batches_of(open_bundle(here), 4)
    with ps.open(here, timeout=60) as job:
        expected = [step.losses for step in job.steps(batches)]
    for first, then in ((away, here), (here, away), (away, away)):
        place = tmp_path / f"{first.name}-{then.name}"
        with ps.open(first, timeout=60) as job:
            losses = [step.losses for step in job.steps(batches[:2])]
            job.save(place)
        with ps.open(then, timeout=60, resume=place) as job:
            assert losses + [step.losses for step in job.steps(batches[2:])] == expected
    # The control: two steps of other batches.
    with ps.open(away, timeout=60) as job:
        assert [step.losses for step in job.steps(batches[2:])] != expected[2:]


@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_ranks_hold_what_was_planned(mlp, tmp_path, schedule):
    """Block by block after every action, of the ranks that compute and of the one that updates."""
    away = compiled(mlp, tmp_path / "away", UPDATER, schedule=schedule)
    module, _ = traced(away, tmp_path / "trace.json")
    for rank, trace in enumerate(read_trace(tmp_path / "trace.json")):
        planned, measured = planned_beside(module, rank, trace), measured_account(module, rank, trace)
        assert first_difference(planned, measured) is None
        # The control: an account without one of the blocks.
        assert first_difference(replace(planned, lives=planned.lives[1:]), measured) is not None


def test_evaluations_are_those_of_training_without(mlp, tmp_path):
    rng, held = np.random.default_rng(3), tmp_path / "held.npz"
    np.savez(held, **{name: rng.standard_normal((11, 8), np.float32) for name in ("x", "labels")})
    found = []
    for name, updater in (("here", ""), ("away", UPDATER)):
        with ps.open(compiled(mlp, tmp_path / name, updater), timeout=60, data="synthetic", eval_data=held) as job:
            found.append([])
            for count in (1, 2):
                losses = [step.losses for step in job.steps_from_data(count)]
                found[-1].append((losses, job.evaluate()))
    assert found[0] == found[1]
    # The control: weights of another step.
    assert found[0][0][1].loss != found[0][1][1].loss


def test_plans_name_the_device_and_are_carried_out_again(mlp, tmp_path):
    training = ps.Training(loss="mse", optimizer=ps.AdamW(lr=0.01), microbatches=M)
    plan = ps.plan(ps.from_onnx(mlp), Cluster.local(3), training, update_on="cpu:2", schedule="2bw")
    assert "updates of 2 stages run on cpu:2: 0, 1" in "\n".join(plan_lines(plan))
    facts = plan.as_dict()
    assert facts["update_on"] == "cpu:2"
    assert [stage["devices"] for stage in facts["stages"]] == [["cpu:0"], ["cpu:1"]]
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(facts))
    options, _ = load_plan_file(file, ["cpu:0", "cpu:1", "cpu:2"])
    again = ps.plan(ps.from_onnx(mlp), Cluster.local(3), training, **options)
    assert again.module.schedule == plan.module.schedule


def test_one_error_names_all_that_updates_elsewhere_do_not_go_with(mlp):
    training = ps.Training(loss="mse", optimizer=ps.AdamW(lr=0.01), microbatches=M)
    with pytest.raises(UsageError) as caught:
        ps.plan(ps.from_onnx(mlp), Cluster.local(4), training, update_on="cpu:7", offload="weights", mesh="tp=2")
    for said in ("'cpu:7' is no device", "--offload weights", "--mesh"):
        assert said in str(caught.value)
    with pytest.raises(UsageError, match="state is on devices that update weights of others"):
        ps.plan(ps.from_onnx(mlp), Cluster.local(4), training, update_on="cpu:3", offload="state", stages=2)
    with pytest.raises(UsageError, match="no device is left to compute"):
        ps.plan_best(
            lambda size: ps.from_onnx(mlp), Cluster.local(2), training, batch=16, update_on="cpu:0,cpu:1", zero=1
        )


@pytest.mark.parametrize("what", ["weights", "all"])
def test_weights_do_not_go_elsewhere_where_updates_are(tmp_path, what):
    """The control: without updates elsewhere the same plan has them elsewhere."""
    deep = ps.from_onnx(write_mlp(tmp_path / "deep.onnx", [8] * 9, batch=4))
    training = ps.Training(loss="mse", optimizer=ps.AdamW(lr=0.01), microbatches=4)
    options = {"schedule": "interleaved", "packs": 3, "offload": what, "spill": str(tmp_path)}
    with pytest.raises(UsageError) as caught:
        ps.plan(deep, Cluster.local(3), training, update_on="cpu:2", **options)
    said = f"--offload {what}: gradients that are handed out do not go with their weights"
    assert str(caught.value).startswith("--update-on cpu:2 cannot be:")
    assert str(caught.value).count("--") == 2
    assert said in str(caught.value)
    plan = ps.plan(deep, Cluster.local(2), training, **options)
    assert "w" in {action.item for action in plan.module.schedule.actions()}


def test_what_forwards_saved_is_elsewhere_and_updates_are(mlp, tmp_path, monkeypatch):
    let_sets_go(monkeypatch)
    expected = trained(compiled(mlp, tmp_path / "here", schedule="gpipe"))
    away = compiled(mlp, tmp_path / "away", UPDATER, schedule="gpipe", offload="activations", spill=str(tmp_path))
    same(trained(away), expected)
    module = open_bundle(away).module
    assert any(stage.home for stage in module.stages[:2])
    assert not any(var.home for var in module.vars.values())


@pytest.mark.parametrize(
    ("left", "ranks", "said"),
    [
        (["cpu:0", "cpu:1", UPDATER], ["cpu:0", "cpu:1", UPDATER], "2 stages on cpu:0 cpu:1,"),
        (["cpu:1", UPDATER], ["cpu:1", UPDATER], "1 stage on cpu:1,"),
        (["cpu:0", "cpu:1"], ["cpu:0", "cpu:1"], "updates on the devices of stages"),
        ([UPDATER], [UPDATER], "1 stage on cpu:4,"),
    ],
)
def test_training_goes_on_with_the_devices_that_are_left(mlp, tmp_path, left, ranks, said):
    """Devices that update go on to do that, as long as there are others. A checkpoint loads in the new bundle."""
    before = compiled(mlp, tmp_path / "before", UPDATER)
    assert said in replan(open_bundle(before), left, tmp_path / "after")
    assert open_bundle(tmp_path / "after").module.rank_devices() == ranks
    batches, place = batches_of(open_bundle(before), 4), tmp_path / "checkpoint"
    with ps.open(before, timeout=60) as job:
        list(job.steps(batches[:2]))
        job.save(place)
        expected = [step.losses for step in job.steps(batches[2:])]
    with ps.open(tmp_path / "after", timeout=60, resume=place) as job:
        np.testing.assert_allclose([step.losses for step in job.steps(batches[2:])], expected, rtol=1e-6)
    # The control: training that does not go on from the checkpoint.
    with ps.open(tmp_path / "after", timeout=60) as job:
        assert not np.allclose([step.losses for step in job.steps(batches[2:])], expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("left", "updating"),
    [
        # Cut anew, one of two stages has no weights.
        (["cpu:0", "cpu:1", "cpu:2", "cpu:3"], ["cpu:3"]),
        (["cpu:1", "cpu:2", "cpu:3"], ["cpu:3"]),
        (["cpu:2", "cpu:3"], []),
        # Ranks are in the order of devices, and updates come behind all stages.
        (["cpu:2", "cpu:0", "cpu:3"], ["cpu:3"]),
        (["cpu:3", "cpu:0"], []),
    ],
)
def test_every_device_that_is_left_has_a_rank_in_its_order(mlp, tmp_path, left, updating):
    """Two devices update, both on the host of both stages: each has a stage to update, or computes. The summary names
    those that compute now."""
    training = ps.Training(loss="mse", optimizer=ps.AdamW(lr=0.01), microbatches=M, clip=0.5)
    plan = ps.plan(ps.from_onnx(mlp), Cluster.local(4), training, update_on="cpu:2,cpu:3", split_at=["fc3.product"])
    assert plan.module.rank_devices() == ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]
    before = ps.compile(plan, tmp_path / "before", backend="numpy")
    said = replan(open_bundle(before), left, tmp_path / "after")
    computing = [name for name in ("cpu:2", "cpu:3") if name in left and name not in updating]
    if computing:
        assert f", {' and '.join(computing)} {'compute' + 's' * (len(computing) == 1)} instead of updating" in said
    else:
        assert "instead of updating" not in said
    after = open_bundle(tmp_path / "after")
    assert after.module.rank_devices() == [rank.device for rank in after.manifest.ranks] == left
    assert [name for stage in updating_stages(after.module) for name in after.module.devices_of(stage)] == updating
    batches, place = batches_of(open_bundle(before), 4), tmp_path / "checkpoint"
    with ps.open(before, timeout=60) as job:
        list(job.steps(batches[:2]))
        job.save(place)
        expected = [step.losses for step in job.steps(batches[2:])]
    with ps.open(tmp_path / "after", timeout=60, resume=place) as job:
        np.testing.assert_allclose([step.losses for step in job.steps(batches[2:])], expected, rtol=1e-6)


def test_the_host_of_gpus_updates_their_weights(mlp, tmp_path):
    """Code for such a bundle is made; it is not run here."""
    (cpu,) = Cluster.local(1).devices
    gpus = [replace(cpu, name=f"cuda:{i}", kind="cuda", target="sm_90") for i in range(2)]
    cluster = replace(Cluster.local(1), devices=(gpus[0], cpu, gpus[1]))
    training = ps.Training(loss="mse", optimizer=ps.AdamW(lr=0.01), microbatches=M, clip=0.5)
    plan = ps.plan(ps.from_onnx(mlp), cluster, training, update_on="cpu:0", schedule="2bw")
    assert plan.module.rank_devices() == ["cuda:0", "cuda:1", "cpu:0"]
    ps.compile(plan, tmp_path / "bundle")
    names = sorted(path.name for path in (tmp_path / "bundle" / "stages").iterdir())
    assert [name.split(".")[:2] for name in names[:2]] == [["s0", "sm_90"], ["s1", "sm_90"]]
    assert len(names) == 3
