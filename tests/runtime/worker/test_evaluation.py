"""The loss of an evaluation is that of the newest weights, every sample counted once; the training knows nothing of it."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.classifier import CLASSES, WIDTH, classifier

import penstock as ps
from penstock.models import write_mlp
from penstock.runtime.data.samples import data_spec
from penstock.runtime.job.job import open as open_job
from penstock.runtime.job.run import run_bundle
from penstock.runtime.worker.evaluation import Portion, count_evaluation, mean_loss, portions
from penstock.support.errors import UsageError

from ..launch.torchrun import torchrun

TIMEOUT = 20


def write(path, count, seed):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((count, WIDTH)).astype(np.float32)
    np.savez(path, x=x, labels=rng.integers(0, CLASSES, count))
    return path, dict(np.load(path))


def plain_loss(weights, arrays):
    """Of relu(... relu(x w0) ...) wn, in float64."""
    h = arrays["x"].astype(np.float64)
    for i, w in enumerate(weights):
        h = h @ w if i + 1 == len(weights) else np.maximum(h @ w, 0)
    p = np.exp(h - h.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    return float(-np.log(p[np.arange(len(h)), arrays["labels"]]).mean())


@given(samples=st.integers(1, 300), size=st.integers(1, 64))
@settings(max_examples=100, deadline=None)
def test_portions_hold_every_sample_once_and_their_mean_is_that_of_all(samples, size):
    cut, values = portions(samples, size), np.random.default_rng(samples).standard_normal(samples)
    assert [i for first, number in cut for i in range(first, first + number)] == list(range(samples))
    assert all(size % number == 0 for _, number in cut)
    filled = {
        i: float(np.tile(values[p.first : p.first + p.number], size // p.number).mean()) for i, p in enumerate(cut)
    }
    assert mean_loss(samples, size, filled) == pytest.approx(values.mean(), abs=1e-12)
    if samples % size:  # control: a plain mean over microbatches is another number
        assert Portion(0, size) not in cut or float(np.mean(list(filled.values()))) != pytest.approx(
            values.mean(), abs=1e-12
        )


@pytest.mark.parametrize(
    ("stages", "kind", "m"),
    [
        (3, "2bw", 2),
        (3, "zb-1f1b", 4),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, "1f1b", 2), (2, "2bw", 4))),
    ],
)
def test_the_newest_weights_are_evaluated_and_training_stays_bit_for_bit(bundle_of, tmp_path, stages, kind, m):
    path = bundle_of(stages, kind, m).path
    data, _ = write(tmp_path / "train.npz", 50, 1)
    held, arrays = write(tmp_path / "eval.npz", 11, 2)
    found = []
    with open_job(path, timeout=TIMEOUT, data=data, eval_data=held, shuffle=True) as job:
        losses = []
        for count in (2, 1, 3):
            losses += [step.losses for step in job.steps_from_data(count)]
            found.append(job.evaluate())
            weights = job.parameters()
            assert found[-1].samples == 11
            assert found[-1].loss == pytest.approx(
                plain_loss([weights[f"w{i}"] for i in range(stages)], arrays), rel=1e-5
            )
        assert job.evaluate() == found[-1]
    assert len({evaluation.loss for evaluation in found}) == 3
    with open_job(path, timeout=TIMEOUT, data=data, shuffle=True) as job:
        assert [step.losses for step in job.steps_from_data(6)] == losses
        for name, array in job.parameters().items():
            np.testing.assert_array_equal(array, weights[name])
        with pytest.raises(UsageError, match="no samples to evaluate on"):
            job.evaluate()


def test_rows_of_metrics_alone_and_under_torchrun(bundle_of, tmp_path):
    path, rows = str(bundle_of(2, "2bw", 2).path), {}
    held, _ = write(tmp_path / "eval.npz", 7, 2)
    options = {"steps": 5, "eval_data": str(held), "eval_every": 2, "timeout": TIMEOUT}
    run_bundle(path, metrics=tmp_path / "local", progress=False, log=[f"prometheus:{tmp_path}/local.prom"], **options)
    run_bundle(path, metrics=tmp_path / "plain", progress=False, steps=5, timeout=TIMEOUT)
    code, log = torchrun(
        tmp_path, 2, path=path, metrics=str(tmp_path / "joined"), log=[f"prometheus:{tmp_path}/joined.prom"], **options
    )
    assert code == 0, log
    for name in ("local", "plain", "joined"):
        rows[name] = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
    assert [(r["step"], "eval_loss" in r) for r in rows["local"]] == [
        (0, 0),
        (1, 0),
        (1, 1),
        (2, 0),
        (3, 0),
        (3, 1),
        (4, 0),
        (4, 1),
    ]
    evaluations = {
        name: [(r["step"], r["eval_loss"], r["eval_samples"]) for r in rows[name] if "eval_loss" in r] for name in rows
    }
    assert evaluations["local"] == evaluations["joined"]
    assert evaluations["plain"] == []
    for name in ("local", "joined"):
        step, evaluation = rows[name][-2:]
        lines = (tmp_path / f"{name}.prom").read_text().splitlines()
        assert {
            f"penstock_loss {step['loss']!r}",
            f"penstock_eval_loss {evaluation['eval_loss']!r}",
            "penstock_step 4.0",
        } <= set(lines)
    assert [r["loss"] for r in rows["local"] if "loss" in r] == [r["loss"] for r in rows["plain"]]
    assert len({loss for _, loss, _ in evaluations["local"]}) == 3


def test_replicas_share_portions_out(tmp_path):
    model = ps.from_onnx(write_mlp(tmp_path / "mlp.onnx", [WIDTH, 6, CLASSES], None, seed=1), dims={"batch": 4})
    training = ps.Training("cross_entropy", ps.SGD(lr=0.1), 4)
    held, _ = write(tmp_path / "eval.npz", 30, 2)
    found = []
    for replicas in (1, 2):
        plan = ps.plan(model, ps.Cluster.local(2 * replicas), training, stages=2, replicas=replicas)
        with open_job(
            ps.compile(plan, tmp_path / f"b{replicas}", backend="numpy"),
            timeout=TIMEOUT,
            data="synthetic",
            eval_data=held,
        ) as job:
            list(job.steps_from_data(2))
            found.append(job.evaluate().loss)
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_what_cannot_be_evaluated_is_refused(bundle_of, tmp_path, monkeypatch):
    monkeypatch.setattr("penstock.runtime.job.ranks.Workers", lambda *given: pytest.fail("started workers"))
    held, _ = write(tmp_path / "eval.npz", 7, 2)
    path = bundle_of(2, "2bw", 2).path
    with pytest.raises(UsageError, match="noise is nothing to evaluate on"):
        open_job(path, eval_data="synthetic")
    np.savez(tmp_path / "bad.npz", x=np.zeros((3, WIDTH), np.float32))
    with pytest.raises(UsageError, match="labels: missing"):
        open_job(path, eval_data=tmp_path / "bad.npz")
    with pytest.raises(UsageError, match="is for inference"):
        open_job(bundle_of(3, "forward", 2).path, eval_data=held)
    with pytest.raises(UsageError, match="--eval-every needs --eval-data"):
        run_bundle(path, eval_every=2)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "    %m : f32[4,8] = read(@mean)\n    %n : f32[4,8] = add(%x, %m)\n    write(%n, @mean)",
            "changes what it has stored",
        ),
        (None, "draws random numbers"),
    ],
)
def test_a_forward_that_depends_on_more_is_refused(tmp_path, line, said):
    from penstock.ir.text import parse_module, print_module

    text = print_module(classifier(2, "1f1b", 2))
    head = next(x for x in text.splitlines() if "graph @s0.F(" in x)
    if line is None:
        text = text.replace(head, head.replace("(", "(%microbatch.number : i64[], ", 1), 1)
    else:
        text = text.replace(head, f"{head}\n{line}", 1).replace(
            "  var @w0 ", "  var @mean : f32[4,8] stage 0 buffer\n  var @w0 ", 1
        )
    held, _ = write(tmp_path / "eval.npz", 7, 2)
    count_evaluation(classifier(2, "1f1b", 2), data_spec(held, False, 0), {})
    with pytest.raises(UsageError, match=said):
        count_evaluation(parse_module(text, "x.ir"), data_spec(held, False, 0), {})
