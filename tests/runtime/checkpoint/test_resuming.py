"""A checkpoint of one plan goes on under any other: parameters bit for bit, losses those of the recurrence in float64."""

from __future__ import annotations

import hashlib
import shutil

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles.chain import Recurrence, chain_bundle
from oracles.classifier import classifier, make_batches
from safetensors.numpy import load_file, save_file

from penstock.runtime.checkpoint import format as checkpoints
from penstock.runtime.checkpoint import saving
from penstock.runtime.checkpoint.finding import find_checkpoint
from penstock.runtime.data.samples import FileSamples, SyntheticSamples
from penstock.runtime.job.job import Job
from penstock.runtime.messages.control import DataSpec

TIMEOUT, SAMPLES, SEED = 30, 70, 5
MODULES = [classifier(1, "1f1b", m) for m in range(1, 6)]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A file of samples, and the order in which a shuffled run reads them."""
    path = tmp_path_factory.mktemp("data") / "data.npz"
    random = np.random.default_rng(1)
    arrays = {"x": random.standard_normal((SAMPLES, 8)).astype(np.float32), "labels": random.integers(0, 5, SAMPLES)}
    np.savez(path, **arrays)
    order = np.concatenate([np.random.default_rng([SEED, epoch]).permutation(SAMPLES) for epoch in range(4)])
    return DataSpec(str(path), shuffle=True, seed=SEED), {name: array[order] for name, array in arrays.items()}


def train(bundle, spec, steps, resume=None, save=None):
    """Losses, and the parameters before and after."""
    with Job(bundle, timeout=TIMEOUT, data=spec, resume=resume) as job:
        before = job.parameters()
        losses = [step.loss for step in job.steps_from_data(steps)]
        job.save(save)
        return losses, before, job.parameters(), job.warnings


def equal(one, other):
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


# Ranks, schedule, microbatches, their rows, steps; then which weights the oracle takes: delay, and the oldest version there is.
PLANS = [
    (4, "2bw", 4, 4, 3, 1, 0),
    (2, "1f1b", 2, 8, 2, 0, 0),
    (1, "1f1b", 3, 5, 1, 0, 0),
    (4, "2bw", 4, 4, 3, 1, 6),
    (2, "eager-2bw", 3, 4, 2, 1, 0),
]


def test_a_checkpoint_goes_on_under_any_other_plan(tmp_path, data):
    """From 4 ranks with the delay to 2 and 1 without and back, with other numbers and sizes of microbatches: what was read is not read again."""
    spec, stream = data
    recurrence, position, last, resume = Recurrence(), 0, None, None
    told = []
    for number, (ranks, kind, m, rows, steps, delay, first) in enumerate(PLANS):
        bundle = chain_bundle(tmp_path / str(number), ranks, kind, m, rows)
        found, before, after, warnings = train(bundle, spec, steps, resume, tmp_path / "ckpt")
        size = m * rows
        batches = [
            {n: a[position + i * size : position + (i + 1) * size] for n, a in stream.items()} for i in range(steps)
        ]
        # The control: a recurrence that still had the version before, where it was not saved, gives another loss.
        other = list(recurrence.copy().train(batches, delay, 0)) if first else []
        np.testing.assert_allclose(found, list(recurrence.train(batches, delay, first)), rtol=1e-6)
        assert not other or abs(found[0] / other[0] - 1) > 1e-4
        assert last is None or equal(before, last)
        position, last, resume = position + steps * size, after, tmp_path / "ckpt"
        told.append([w for w in warnings if "schedule" in w])
        assert checkpoints.read_index(find_checkpoint(resume)).samples == position
    assert [bool(t) for t in told] == [False, True, False, True, False]
    assert "gradients are no longer an update late" in told[1][0]
    assert "the first two batches see its newest" in told[3][0]


@pytest.mark.slow
def test_compiled_plans_go_on_with_the_same_loss(tmp_path):
    """From 4 ranks under 2bw to 2 and 1 without a delay and back: microbatches of 64 to 512 samples, a loss of the same samples, the same weights."""
    samples, random = 512, np.random.default_rng(3)
    arrays = {
        "x": random.standard_normal((8 * samples, 8)).astype(np.float32),
        "labels": random.integers(0, 8, 8 * samples),
    }
    np.savez(tmp_path / "data.npz", **arrays)
    spec = DataSpec(str(tmp_path / "data.npz"))
    plans = {"many": (4, "2bw", 8), "two": (2, "1f1b", 2), "one": (1, "1f1b", 1), "late": (1, "2bw", 2)}
    bundles = {n: chain_bundle(tmp_path / n, *plan, samples // plan[2], backend="tvm") for n, plan in plans.items()}

    def expected(position, tensors):
        h = torch.tensor(arrays["x"][position : position + samples], dtype=torch.float64)
        for i in range(4):
            h = torch.relu(h @ torch.tensor(tensors[f"w{i}"], dtype=torch.float64))
        return float(
            torch.nn.functional.cross_entropy(h, torch.tensor(arrays["labels"][position : position + samples]))
        )

    def go_on(place, names, position, tensors):
        """The next loss under every plan, and the parameters that each of them begins with."""
        for name in names:
            with Job(bundles[name], timeout=TIMEOUT, data=spec, resume=place) as job:
                assert equal(job.parameters(), newest)
                assert next(iter(list(job.steps_from_data(1)))).loss == pytest.approx(
                    expected(position, tensors), rel=1e-6, abs=0
                )

    _, _, newest, _ = train(bundles["many"], spec, 3, save=tmp_path / "first")
    place = find_checkpoint(tmp_path / "first")
    older = {n: t for file in sorted(place.glob("*.older.safetensors")) for n, t in load_file(file).items()}
    go_on(place, ["two", "one"], 3 * samples, newest)
    go_on(place, ["many", "late"], 3 * samples, older)
    # The control: the two versions are told apart.
    assert abs(expected(3 * samples, older) / expected(3 * samples, newest) - 1) > 1e-4
    _, _, newest, _ = train(bundles["one"], spec, 1, place, tmp_path / "second")
    go_on(find_checkpoint(tmp_path / "second"), ["many", "two", "one"], 4 * samples, newest)


@pytest.mark.slow
def test_an_older_version_that_is_another_changes_the_loss(tmp_path, data):
    """The control of keeping both versions: with the newest in place of the older one a resumed run computes something else."""
    spec, _ = data
    bundle = chain_bundle(tmp_path / "bundle", 2, "2bw")
    train(bundle, spec, 3, save=tmp_path / "ckpt")
    changed = shutil.copytree(tmp_path / "ckpt" / "step-000003", tmp_path / "changed" / "step-000003")
    index = checkpoints.read_index(changed)
    files = dict(index.files)
    for older in [name for name in files if ".older" in name]:
        newest = load_file(changed / older.replace(".older", ""))
        save_file({name: newest[name] for name in load_file(changed / older)}, changed / older)
        content = (changed / older).read_bytes()
        files[older] = msgspec.structs.replace(
            files[older], sha256=hashlib.sha256(content).hexdigest(), size=len(content)
        )
    saving.write_index(changed, msgspec.structs.replace(index, files=files))
    as_it_was, _, _, _ = train(bundle, spec, 1, tmp_path / "ckpt" / "step-000003", tmp_path / "one")
    as_changed, _, _, _ = train(bundle, spec, 1, changed, tmp_path / "two")
    assert abs(as_it_was[0] / as_changed[0] - 1) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [("2bw", 2, 3), ("1f1b", 3, 1), ("eager-2bw", 3, 2), ("zb-1f1b", 2, 3)],
)
def test_resuming_with_other_stages(tmp_path, kind, before, after):
    batches = [batch | {"labels": batch["labels"] % 8} for batch in make_batches(6, 4)]
    with Job(chain_bundle(tmp_path / "before", before, kind), timeout=TIMEOUT) as job:
        list(job.run(batches[:3]))
        job.save(tmp_path / "ckpt")
        expected = list(job.run(batches[3:]))
    bundle = chain_bundle(tmp_path / "after", after, kind)
    with Job(bundle, timeout=TIMEOUT, resume=tmp_path / "ckpt") as job:
        found = list(job.run(batches[3:]))
        fresh = job.steps_done
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert fresh == 6
    # The control: without the checkpoint these batches give other losses.
    with Job(bundle, timeout=TIMEOUT) as job:
        assert not np.allclose(list(job.run(batches[3:])), expected, rtol=1e-4)


@given(st.integers(0, 300), st.integers(1, 5), st.integers(0, 40), st.booleans())
def test_samples_follow_the_offset(data, samples, m, step, shuffle):
    """Microbatch k of any number and size begins where the training stands: at sample k·b + offset."""
    spec = msgspec.structs.replace(data[0], shuffle=shuffle)
    module = MODULES[m - 1]
    rows = module.inputs[0].type.dims[0]
    offset = samples - step * m * rows
    read = FileSamples(module, spec, ["labels"], offset=offset)
    whole = FileSamples(module, spec, ["labels"])
    stream = np.concatenate([whole.microbatch(mb, "labels") for mb in range(samples // rows + m + 2)])
    found = np.concatenate([read.microbatch(step * m + i, "labels") for i in range(m)])
    np.testing.assert_array_equal(found, stream[samples : samples + m * rows])
    noise, same = SyntheticSamples(module, 1, offset), SyntheticSamples(module, 1)
    np.testing.assert_array_equal(noise.microbatch(step * m, "x"), same.microbatch(samples // rows, "x"))
