"""Tests of the learning rate of a run: that of the option, else that of the checkpoint, else that of the module."""

from __future__ import annotations

import json

import numpy as np
import pytest
from oracles.classifier import classifier, make_batches

import penstock as ps
from penstock.backends.bundle.format import open_bundle
from penstock.ir.training.rates import CURVE, LR, Constant, Cosine, Linear
from penstock.models import write_mlp
from penstock.runtime.checkpoint import format as checkpoints
from penstock.runtime.checkpoint.finding import find_checkpoint
from penstock.runtime.job.job import Job
from penstock.runtime.job.run import run_bundle
from penstock.runtime.state.settings import learning_rate, settings_for_run, settings_of
from penstock.support.errors import UsageError

TIMEOUT = 20
COMPILED = {LR: (0.1,), CURVE: Constant().table()}


def test_what_counts():
    module = classifier(2, "1f1b", 2)
    assert settings_of(module) == COMPILED
    assert settings_for_run(module, None, None, None) == (COMPILED, [])
    assert settings_for_run(module, COMPILED, None, None) == (COMPILED, [])
    saved = {LR: (0.3,), CURVE: Linear(8).table()}
    tables, (warning,) = settings_for_run(module, saved, None, None)
    assert tables == saved
    assert "@lr and @lr.curve go on as in the checkpoint" in warning
    tables, (warning,) = settings_for_run(module, saved, 0.5, None)
    assert tables == {**saved, LR: (0.5,)}
    assert "@lr.curve go on" in warning
    assert settings_for_run(module, saved, 0.5, "constant") == ({LR: (0.5,), CURVE: Constant().table()}, [])
    assert settings_for_run(module, None, None, Cosine(8)) == ({LR: (0.1,), CURVE: Cosine(8).table()}, [])


def test_what_is_refused():
    with pytest.raises(UsageError) as caught:
        settings_for_run(classifier(2, "forward", 1), None, -1.0, "cosine")
    for said in ("must be 0 or more, got -1.0", "steps is missing", "does not train"):
        assert said in str(caught.value)


def test_the_rate_of_a_module_that_does_not_train():
    assert learning_rate(settings_of(classifier(2, "forward", 1)), 3) is None


@pytest.mark.slow
def test_a_run_may_have_its_own_rate_and_a_resumed_one_keeps_it(bundle_of, tmp_path):
    """Against Python's formula for what is reported, and against runs with constants for what is computed."""
    bundle, rate = bundle_of(2, "1f1b", 2), Linear(4, end=0.5)
    np.savez(tmp_path / "data.npz", **{n: np.concatenate([b[n] for b in make_batches(6, 2)]) for n in ("x", "labels")})
    options = {"data": str(tmp_path / "data.npz"), "timeout": TIMEOUT, "progress": False}

    def run(name, steps, **given):
        losses = run_bundle(bundle.path, steps=steps, metrics=tmp_path / name, **options, **given).losses
        return losses, [json.loads(line)["lr"] for line in (tmp_path / name).read_text().splitlines()]

    expected = [0.2 * (1 - 0.5 * min(t / 4, 1)) for t in range(6)]
    whole, rates = run("whole", 6, lr=0.2, rate=rate)
    np.testing.assert_allclose(rates, expected, rtol=1e-12)
    first, _ = run("first", 3, lr=0.2, rate=str(rate), checkpoint=tmp_path / "ckpt")
    assert checkpoints.read_index(tmp_path / "ckpt" / "step-000003").tables == {LR: (0.2,), CURVE: rate.table()}
    rest, rates = run("rest", 3, resume=tmp_path / "ckpt")
    np.testing.assert_allclose(rates, expected[3:], rtol=1e-12)
    assert first + rest == whole
    # Controls: another rate is another run, and the compiled one comes back when it is asked for.
    other, rates = run("other", 3, resume=tmp_path / "ckpt", lr=0.1, rate="constant")
    assert rates == pytest.approx([0.1] * 3)
    assert other[0] == rest[0]
    assert other[1:] != rest[1:]


def test_a_job_of_python_takes_a_rate(bundle_of):
    batches = make_batches(3, 2)
    with Job(bundle_of(2, "1f1b", 2), timeout=TIMEOUT, lr=0.0) as job:
        before = job.parameters()
        steps = list(job.steps(batches))
        after = job.parameters()
    assert [step.lr for step in steps] == [0.0] * 3
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_factors_of_groups_are_those_of_the_bundle(tmp_path):
    """The first factor of the checkpoint's bundle is another group's in the bundle that goes on: steps are as long as the groups there say."""
    rows, m = 4, 2
    model = ps.from_onnx(write_mlp(tmp_path / "mlp.onnx", [6, 8, 5], None, seed=1), dims={"batch": rows})
    last = ps.Group("^y.weight", lr=0.1)

    def compiled(name, *groups):
        training = ps.Training("cross_entropy", ps.SGD(lr=0.1), m, groups=groups)
        return open_bundle(ps.compile(ps.plan(model, ps.Cluster.local(1), training), tmp_path / name, backend="numpy"))

    first, other = compiled("first", last), compiled("other", ps.Group("^fc1.weight", lr=10.0), last)
    assert (settings_of(first.module)["lr.factor"], settings_of(other.module)["lr.factor"]) == ((0.1,), (10.0,))
    rng = np.random.default_rng(0)
    batch = {"x": rng.standard_normal((rows * m, 6)).astype(np.float32), "labels": rng.integers(0, 5, rows * m)}
    with Job(first, timeout=TIMEOUT, lr=0.2) as job:
        list(job.steps([batch]))
        job.save(tmp_path / "ckpt")
    assert checkpoints.read_index(find_checkpoint(tmp_path / "ckpt")).tables["lr.factor"] == (0.1,)

    def moved(bundle):
        with Job(bundle, timeout=TIMEOUT, resume=tmp_path / "ckpt") as job:
            before = job.parameters()
            (step,) = job.steps([batch])
            after = job.parameters()
        assert step.lr == 0.2
        (warning,) = [text for text in job.warnings if "@lr" in text]
        assert warning.startswith("@lr go on as in the checkpoint")
        return {name: after[name].astype(np.float64) - before[name] for name in before}

    one, two = moved(first), moved(other)
    assert np.abs(one["fc1.weight"]).max() > 1e-4
    for name, distance in one.items():
        np.testing.assert_allclose(two[name], distance * (10 if name == "fc1.weight" else 1), rtol=1e-3, atol=1e-6)
