"""Training in real processes equals plain training by the recurrence; versions are v(k); two buffers are enough."""

from __future__ import annotations

import json

import numpy as np
import pytest
from oracles.classifier import CLASSES, ROWS, initial_weights, make_batches, train_plainly

from penstock.passes.schedules.schedule import SCHEDULES
from penstock.runtime.job.job import Job
from penstock.runtime.job.job import open as open_job
from penstock.runtime.job.run import run_bundle
from penstock.runtime.launch import local as launch
from penstock.runtime.messages.control import DataSpec
from penstock.support.errors import UsageError, VerifyError

STEPS = 6
TIMEOUT = 20


def losses_of(job, batches):
    return [loss for step in job.steps(batches) for loss in step.losses]


@pytest.mark.parametrize(
    ("stages", "kind", "m"),
    [
        (1, "1f1b", 2),
        (2, "1f1b", 2),
        (4, "gpipe", 4),
        (2, "2bw", 1),
        (2, "2bw", 4),
        (4, "2bw", 3),
        (3, "eager-2bw", 4),
        (3, "zb-1f1b", 4),
    ],
)
def test_every_microbatch_loss_and_every_version(bundle_of, stages, kind, m):
    batches, delay = make_batches(STEPS, m), SCHEDULES[kind].delay
    with open_job(bundle_of(stages, kind, m).path, timeout=TIMEOUT, audit=True) as job:
        found = losses_of(job, batches)
        audits = job.audit()
        parameters = job.parameters()
    np.testing.assert_allclose(found, train_plainly(stages, batches, m, delay), rtol=1e-5)
    # The control: the other delay is another trajectory.
    assert not np.allclose(found, train_plainly(stages, batches, m, 1 - delay), rtol=1e-5)
    for stage, audit in enumerate(audits):
        assert set(audit.live_versions.values()) == set(audit.buffers.values()) == {1 + delay}
        used = [(e.stage, e.mb, e.phase, e.version) for e in audit.log if e.phase != "U"]
        phases = "FBW" if SCHEDULES[kind].splits and stage else "FB"
        assert sorted(used) == sorted(
            (stage, k, phase, max(k // m - delay, 0)) for k in range(STEPS * m) for phase in phases
        )
        assert [(e.mb, e.version) for e in audit.log if e.phase == "U"] == [(t, t + 1) for t in range(STEPS)]
    assert parameters.keys() == initial_weights(stages).keys()


def test_without_retirement_three_buffers_are_seen(bundle_of):
    bundle, batches = bundle_of(2, "2bw", 4), make_batches(STEPS, 4)
    with Job(bundle, timeout=TIMEOUT, retire=False) as job:
        found = losses_of(job, batches)
        audits = job.audit()
    assert all(count >= 3 for audit in audits for count in (*audit.live_versions.values(), *audit.buffers.values()))
    np.testing.assert_allclose(found, train_plainly(2, batches, 4, 1), rtol=1e-5)


def test_memory_and_sockets_carry_the_same(bundle_of, monkeypatch):
    """Also where only some of the ranks share memory."""
    bundle, batches = bundle_of(3, "2bw", 2), make_batches(STEPS, 2)
    with Job(bundle, timeout=TIMEOUT) as job:
        shared = losses_of(job, batches)
    monkeypatch.setenv("PENSTOCK_SHARED_MEMORY", "0")
    with Job(bundle, timeout=TIMEOUT) as job:
        assert losses_of(job, batches) == shared
    # The last of the three goes its own way.
    fork = launch.fork_rank

    def started(rank, backend, environment):
        return fork(rank, backend, environment | {"PENSTOCK_SHARED_MEMORY": str(int(rank.rank != 2))})

    monkeypatch.setattr(launch, "fork_rank", started)
    with Job(bundle, timeout=TIMEOUT) as job:
        assert losses_of(job, batches) == shared


@pytest.mark.parametrize("kind", ["2bw", pytest.param("1f1b", marks=pytest.mark.slow)])
def test_steps_one_by_one_and_from_a_stream_and_from_a_file_are_the_same(bundle_of, kind, tmp_path):
    bundle, batches = bundle_of(2, kind, 2), make_batches(5, 2)
    path = tmp_path / "data.npz"
    np.savez(path, **{name: np.concatenate([b[name] for b in batches]) for name in batches[0]})
    with Job(bundle, timeout=TIMEOUT, data=DataSpec(str(path))) as job:
        one_by_one = [job.step(batch) for batch in batches]
        # The data's place counts on with the steps: five more wrap round to the first sample.
        again = [step.loss for step in job.steps_from_data(5)]
    with Job(bundle, timeout=TIMEOUT) as job:
        stream = list(job.run(iter(batches)))
        more = list(job.run(batches))
    assert stream == one_by_one
    assert again == more
    assert again != stream


def test_leaving_a_stream_early_and_errors_in_it(bundle_of):
    bundle, batches = bundle_of(2, "2bw", 2), make_batches(8, 2)
    expected = train_plainly(2, batches, 2, 1)

    def broken():
        yield from batches[:2]
        raise RuntimeError("the reader broke")

    with open_job(bundle.path, timeout=TIMEOUT) as job:
        for loss in job.run(batches):
            assert loss == pytest.approx(np.mean(expected[:2]), rel=1e-5)
            break
        handed_over = job.steps_done
        assert 1 <= handed_over <= 4
        with pytest.raises(UsageError, match="labels: missing"):
            job.step({"x": batches[0]["x"]})
        assert job.steps_done == handed_over
        with pytest.raises(RuntimeError, match="the reader broke"):
            list(job.run(broken()))
        assert job.steps_done == handed_over + 2
        stream = job.run(batches)
        next(stream)
        with pytest.raises(UsageError, match="still running"):
            job.parameters()
        stream.close()
        with pytest.raises(UsageError, match="is for training"):
            job.infer({"x": batches[0]["x"]})
    with pytest.raises(UsageError, match="closed"):
        job.step(batches[0])


def test_inference(bundle_of):
    weights = list(initial_weights(3).values())
    with open_job(bundle_of(3, "forward", 2).path, timeout=TIMEOUT) as job:
        for count in (1, 8, 11):
            x = np.random.default_rng(count).standard_normal((count, 8)).astype(np.float32)
            found = job.infer({"x": x})
            assert found["logits"].shape == (count, CLASSES)
            expected = np.maximum(np.maximum(x @ weights[0], 0) @ weights[1], 0) @ weights[2]
            np.testing.assert_allclose(found["logits"], expected, rtol=1e-5, atol=1e-6)
        with pytest.raises(UsageError, match="is for inference"):
            job.step({"x": x})
        with pytest.raises(UsageError, match="x: missing"):
            job.infer({"y": x})


def test_run_bundle_writes_metrics_and_a_trace(bundle_of, tmp_path, capfd):
    bundle = bundle_of(2, "2bw", 4)
    summary = run_bundle(bundle.path, steps=4, metrics=tmp_path / "m.jsonl", trace=tmp_path / "t.json", timeout=TIMEOUT)
    *records, last = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    # One message each way for each microbatch.
    assert (last["step"], last["messages"]) == (3, 2 * 4 * 4)
    assert 0 <= last["waited_s"] <= last["messages_s"]
    assert last["hidden"] == pytest.approx(1 - last["waited_s"] / last["messages_s"], abs=2e-2)
    assert [r["step"] for r in records] == [0, 1, 2, 3]
    assert [r["loss"] for r in records] == summary.losses
    for record in records:
        assert list(record) == ["step", "loss", "lr", "samples", "step_s", "samples_per_s", "grad_norm"]
        assert (record["samples"], record["grad_norm"]) == (ROWS * 4, None)
        assert record["lr"] == pytest.approx(0.1)
        assert record["samples_per_s"] == pytest.approx(record["samples"] / record["step_s"], rel=0.01)
    captured = capfd.readouterr()
    assert captured.out == ""
    assert f"step 4/4  loss {summary.losses[-1]:.4f}" in captured.err
    assert "messages: 32, " in captured.err
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    for rank in range(2):
        named = [e["name"] for e in events if e["pid"] == rank and e["ph"] == "X"]
        assert named == [str(a) for a in bundle.module.schedule.expand(rank, 4)]
    assert all(peak > 10**7 for peak in summary.peak_bytes)


def test_data_that_does_not_fit_starts_nothing(bundle_of, tmp_path, monkeypatch):
    np.savez(tmp_path / "bad.npz", x=np.zeros((3, 3)))
    monkeypatch.setattr("penstock.runtime.job.ranks.Workers", lambda *given: pytest.fail("started workers"))
    with pytest.raises(UsageError, match="labels: missing"):
        run_bundle(bundle_of(2, "2bw", 4).path, data=str(tmp_path / "bad.npz"))
    with pytest.raises(UsageError, match="--checkpoint-every needs --checkpoint"):
        run_bundle(bundle_of(2, "2bw", 4).path, checkpoint_every=3)
    (tmp_path / "bundle").mkdir()
    with pytest.raises(VerifyError, match=r"manifest\.json: missing"):
        run_bundle(tmp_path / "bundle")


@pytest.mark.parametrize("stages", [1, 2])
def test_values_out_of_range_end_the_job_with_their_place(bundle_of, tmp_path, stages):
    bundle, batches = bundle_of(stages, "1f1b", 2), make_batches(4, 2)
    batches[2]["labels"] = np.full_like(batches[2]["labels"], 7)
    path = tmp_path / "data.npz"
    np.savez(path, **{name: np.concatenate([b[name] for b in batches]) for name in batches[0]})
    with pytest.raises(
        UsageError, match=f"labels: sample {2 * ROWS * 2} has the value 7, the model takes 0 to 4"
    ) as caught:
        run_bundle(bundle.path, data=str(path), steps=4, timeout=TIMEOUT, metrics=tmp_path / "m.jsonl", progress=False)
    assert str(caught.value).startswith(f"rank {stages - 1}, stage {stages - 1}, action {stages - 1}F4")
    assert str(path) in str(caught.value)
    # What came before is there, and nothing was computed from the bad batch.
    # With two ranks the last one may read the bad batch before the first one ends step 1.
    done = [json.loads(line)["step"] for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert done == [0, 1] or (stages == 2 and done == [0])
    with open_job(bundle.path, timeout=TIMEOUT) as job:
        with pytest.raises(UsageError, match="batch 2: does not fit the model:\n  - labels: sample 0 has the value 7"):
            list(job.run(batches))
        assert job.steps_done == 2
        assert job.step(batches[3]) > 0
