"""A resumed run computes bit for bit what an uninterrupted one does; torn checkpoints are refused by name and never replace whole ones."""

from __future__ import annotations

import json
import shutil

import msgspec
import numpy as np
import pytest
from oracles.classifier import classifier, make_batches, train_plainly
from safetensors.numpy import load_file

import penstock as ps
from penstock.models import write_mlp
from penstock.runtime.checkpoint import format as checkpoints
from penstock.runtime.checkpoint import resuming
from penstock.runtime.checkpoint.finding import find_checkpoint
from penstock.runtime.checkpoint.stored_tiles import files_for
from penstock.runtime.job.job import Job
from penstock.runtime.job.run import run_bundle
from penstock.runtime.messages.control import DataSpec
from penstock.support.errors import PenstockError, UsageError, VerifyError

TIMEOUT = 20


@pytest.fixture(scope="module")
def saved(bundle_of, tmp_path_factory):
    """A 2bw run of 7 steps, with checkpoints after 3, 6 and 7; its directory, data and losses."""
    folder = tmp_path_factory.mktemp("saved")
    np.savez(folder / "data.npz", **{n: np.concatenate([b[n] for b in make_batches(5, 2)]) for n in ("x", "labels")})
    options = {
        "data": str(folder / "data.npz"),
        "shuffle": True,
        "seed": 5,
        "timeout": TIMEOUT,
        "metrics": folder / "m.jsonl",
    }
    summary = run_bundle(
        bundle_of(2, "2bw", 2).path, steps=7, checkpoint=folder / "ckpt", checkpoint_every=3, **options
    )
    return folder / "ckpt", options, summary.losses


def test_what_is_written(saved):
    root, _, _ = saved
    assert sorted(p.name for p in root.iterdir()) == ["latest", "step-000003", "step-000006", "step-000007"]
    assert (root / "latest").read_text() == "step-000007\n"
    index = checkpoints.read_index(root / "step-000003")
    assert (index.step, index.schedule, index.microbatches) == (3, "2bw", 2)
    newest, older = (
        load_file(root / "step-000003" / name) for name in ("rank0.safetensors", "rank0.older.safetensors")
    )
    assert newest.keys() == {"w0", "w0.momentum", "step"}
    assert older.keys() == {"w0"}
    assert not np.array_equal(newest["w0"], older["w0"])
    assert [index.files[name].version for name in ("rank0.safetensors", "rank0.older.safetensors")] == [3, 2]


def test_resumed_2bw_is_bitwise_equal(bundle_of, saved):
    root, options, losses = saved
    again = run_bundle(bundle_of(2, "2bw", 2).path, steps=4, resume=root / "step-000003", **options)
    assert again.first_step == 3
    assert again.losses == losses[3:]
    records = [json.loads(line) for line in options["metrics"].read_text().splitlines()]
    assert [r["loss"] for r in records] == losses
    assert [r["step"] for r in records] == list(range(7))


def test_draining_to_save_changes_nothing(bundle_of, saved):
    _, options, losses = saved
    whole = run_bundle(bundle_of(2, "2bw", 2).path, steps=7, **options | {"metrics": None})
    assert whole.losses == losses


def test_without_the_older_version_the_trajectory_would_differ(saved):
    """The control of the claim that both versions must be saved: one version is another recurrence."""
    batches = make_batches(6, 2)
    assert train_plainly(2, batches, 2, 1)[4:] != train_plainly(2, batches, 2, 0)[4:]


def test_resumed_1f1b_is_bitwise_equal(bundle_of, tmp_path):
    batches = make_batches(6, 3)
    with Job(bundle_of(3, "1f1b", 3), timeout=TIMEOUT) as job:
        losses = list(job.run(batches[:4]))
        place = job.save(tmp_path)
        losses += list(job.run(batches[4:]))
        parameters = job.parameters()
    assert sorted(p.name for p in place.iterdir()) == [
        "index.json",
        "index.sha256",
        "rank0.safetensors",
        "rank1.safetensors",
        "rank2.safetensors",
    ]
    with Job(bundle_of(3, "1f1b", 3), timeout=TIMEOUT, resume=tmp_path) as job:
        assert job.steps_done == 4
        assert list(job.run(batches[4:])) == losses[4:]
        for name, array in job.parameters().items():
            np.testing.assert_array_equal(array, parameters[name])


def test_tensors_are_found_by_name_over_all_files(saved):
    """A bundle that has all variables on other stages finds them as well."""
    index = checkpoints.read_index(saved[0] / "step-000003")
    names = {"w0", "w1", "w1.momentum", "other"}
    wanted = dict.fromkeys(names)
    assert {key: set(held) for key, held in files_for(index.files, wanted, 3).items()} == {
        "rank0.safetensors": {"w0"},
        "rank1.safetensors": {"w1", "w1.momentum"},
    }
    assert {key: set(held) for key, held in files_for(index.files, wanted, 2).items()} == {
        "rank0.older.safetensors": {"w0"},
        "rank1.older.safetensors": {"w1"},
    }


def check_all(path):
    place = find_checkpoint(path)
    index = checkpoints.read_index(place)
    for file in index.files:
        checkpoints.check_file(place, index, file)


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove"])
def test_damaged_files_are_refused_by_name(saved, tmp_path, damage):
    whole = saved[0] / "step-000006"
    for name in sorted(p.name for p in whole.iterdir()):
        copy = tmp_path / "copy"
        shutil.copytree(whole, copy)
        data = bytearray((copy / name).read_bytes())
        data[len(data) // 2] ^= 1
        if damage == "remove":
            (copy / name).unlink()
        else:
            (copy / name).write_bytes(data if damage == "flip" else data[:-1])
        with pytest.raises((VerifyError, UsageError)) as caught:
            check_all(copy)
        assert name in str(caught.value)
        shutil.rmtree(copy)


def test_a_worker_refuses_a_damaged_file(bundle_of, saved, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(saved[0] / "step-000006", copy)
    data = bytearray((copy / "rank1.older.safetensors").read_bytes())
    data[-3] ^= 4
    (copy / "rank1.older.safetensors").write_bytes(data)
    with pytest.raises(VerifyError, match=r"rank1\.older\.safetensors: SHA-256 is"):
        Job(bundle_of(2, "2bw", 2), timeout=TIMEOUT, resume=copy)


def test_what_does_not_fit_is_refused_and_what_differs_is_told(saved):
    root, options, _ = saved
    index = checkpoints.read_index(root / "step-000003")
    same = DataSpec(options["data"], True, 5)
    assert resuming.check_resume(index, classifier(2, "2bw", 2), same, "here") == []
    (difference,) = resuming.check_resume(index, classifier(2, "2bw", 2), DataSpec(), "here")
    assert "the data is now synthetic with seed 0, the checkpoint was trained on" in difference
    with pytest.raises(VerifyError) as caught:
        resuming.check_resume(index, classifier(3, "1f1b", 4), None, "here")
    for message in (
        "w1: the bundle has f32[8,8], the checkpoint f32[8,5]",
        "w2: the bundle has f32[8,5], the checkpoint nothing",
    ):
        assert message in str(caught.value)
    told = resuming.check_resume(index, classifier(2, "1f1b", 4), None, "here")
    assert told == [
        "the checkpoint is of schedule 2bw, the bundle has 1f1b: training goes on from its newest weights, gradients are no longer an update late",
        "the checkpoint is of 2 microbatches per batch, the bundle has 4: batches of 16 samples go on from sample 24",
    ]
    # Of another source by its hash nothing else is said, unless all fits; of the same one a few variables are named.
    other = msgspec.structs.replace(index, source_hash="5" * 64, bundle="mine")
    for source in ("5" * 64, "7" * 64):
        with pytest.raises(VerifyError) as caught:
            resuming.check_resume(other, classifier(3, "1f1b", 4), None, "here", source)
        assert ("w1: the bundle has" in str(caught.value)) == (source == "5" * 64)
    assert f"of another model: of {index.module} with hash {'5' * 16}, the bundle is of" in str(caught.value)
    assert f"with hash {'7' * 16}\n  hint: its bundle was mine" in str(caught.value)
    assert resuming.check_resume(other, classifier(2, "2bw", 2), same, "here", "5" * 64) == []
    (warning,) = resuming.check_resume(other, classifier(2, "2bw", 2), same, "here", "7" * 64)
    assert "of another model" in warning
    assert "its variables fit" in warning
    (file,) = (name for name in index.files if name == "rank0.safetensors")
    many = msgspec.structs.replace(index.files[file], tensors={f"extra{i}": "f32[2]" for i in range(70)})
    with pytest.raises(VerifyError) as caught:
        resuming.check_resume(
            msgspec.structs.replace(index, files=index.files | {"more": many}), classifier(2, "2bw", 2), None, "here"
        )
    assert len(str(caught.value).splitlines()) == 11
    assert "and 62 more such variables" in str(caught.value)
    old = msgspec.structs.replace(index, format=1, samples=None)
    assert resuming.check_resume(old, classifier(2, "2bw", 2), None, "here") == []
    with pytest.raises(VerifyError, match="checkpoints of format 1 do not say how many samples were read"):
        resuming.check_resume(old, classifier(2, "2bw", 4), None, "here")


def test_finding_checkpoints(saved, tmp_path):
    root, _, _ = saved
    assert find_checkpoint(root) == root / "step-000007"
    assert find_checkpoint(root / "step-000003") == root / "step-000003"
    # The pointer stands for the directory; what only looks like a checkpoint is answered with what there is.
    assert find_checkpoint(root / "latest") == root / "step-000007"
    for given, told in (
        ("step-7", "nothing is there"),
        ("newest", "nothing is there"),
        ("latest/step-7", "nothing is there"),
    ):
        with pytest.raises(UsageError, match=told) as caught:
            find_checkpoint(root / given)
        known = f"{root} stands for its newest checkpoint; it has step-000007, step-000006, step-000003"
        assert caught.value.hint == ("give a directory that --checkpoint wrote" if "/" in given else known)
    with pytest.raises(UsageError, match="is a part of a checkpoint") as caught:
        find_checkpoint(root / "step-000003" / "index.json")
    assert caught.value.hint.endswith(str(root / "step-000003"))
    with pytest.raises(UsageError, match="there is no checkpoint: neither"):
        find_checkpoint(tmp_path)
    (tmp_path / "latest").write_text("../../etc\n")
    with pytest.raises(VerifyError, match="which is not a checkpoint here"):
        find_checkpoint(tmp_path)


def test_a_save_that_fails_leaves_the_old_checkpoint(bundle_of, tmp_path):
    batches = make_batches(2, 2)
    blocked = tmp_path / "file"
    blocked.write_text("")
    job = Job(bundle_of(2, "2bw", 2), timeout=5)
    job.step(batches[0])
    first = job.save(tmp_path / "ckpt")
    job.step(batches[1])
    with pytest.raises(PenstockError, match="cannot write the checkpoint") as caught:
        job.save(blocked)
    job.abort()
    assert caught.value.exit_code == 1
    assert str(blocked) in caught.value.where
    assert (tmp_path / "ckpt" / "latest").read_text() == "step-000001\n"
    assert checkpoints.read_index(first).step == 1
    assert sorted(p.name for p in (tmp_path / "ckpt").iterdir()) == ["latest", "step-000001"]


def _frozen_plan(folder, name, *, flag=None, group=None, schedule="2bw"):
    """A bundle of one model, with parameters frozen in one way or the other."""
    path = write_mlp(folder / "frozen.onnx", [8, 16, 16, 4], None, seed=2)
    model = ps.from_onnx(path, dims={"batch": 4}, frozen=flag)
    groups = (ps.Group(group, frozen=True),) if group else ()
    training = ps.Training(loss="cross_entropy", optimizer=ps.AdamW(lr=0.01), microbatches=2, groups=groups)
    plan = ps.plan(model, ps.Cluster.local(2), training, schedule=schedule)
    return ps.compile(plan, folder / name, backend="numpy")


def test_training_goes_on_with_parameters_that_are_frozen_now(tmp_path):
    """A group keeps what a checkpoint has of them, though it had two versions; a constant cannot, and is refused."""
    with ps.open(_frozen_plan(tmp_path, "all"), data="synthetic") as job:
        list(job.steps_from_data(3))
        job.save(tmp_path / "ckpt")
        trained = job.parameters()
    with ps.open(_frozen_plan(tmp_path, "some", group="fc1"), data="synthetic", resume=tmp_path / "ckpt") as job:
        list(job.steps_from_data(2))
        job.save(tmp_path / "later")
    later = {
        name: array
        for path in (tmp_path / "later").glob("step-*/rank?.safetensors")
        for name, array in load_file(path).items()
    }
    for name, array in trained.items():
        assert np.array_equal(later[name], array) == name.startswith("fc1")
    with pytest.raises(
        VerifyError,
        match=r"fc1.bias: the bundle has no such variable(.|\n)*a small one that is frozen by --frozen is a constant",
    ):
        ps.open(_frozen_plan(tmp_path, "flag", flag="fc1"), data="synthetic", resume=tmp_path / "ckpt")
