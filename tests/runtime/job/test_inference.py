"""Tests of requests through real stages: results of all callers and sizes are those of plain NumPy and of onnxruntime.
An error stays with its request."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import CancelledError

import numpy as np
import onnxruntime
import pytest
from oracles.classifier import CLASSES, initial_weights

import penstock as ps
from penstock.models import write_mlp
from penstock.runtime.job.job import open as open_job
from penstock.support.errors import PeerLost, PenstockError, QueueFull, UsageError

TIMEOUT = 20


def rows(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, count]).standard_normal((count, 8)).astype(np.float32)


def expected(x: np.ndarray, stages: int) -> np.ndarray:
    for i, w in enumerate(initial_weights(stages).values()):
        x = np.maximum(x @ w, 0) if i < stages - 1 else x @ w
    return x


def check(found: dict[str, np.ndarray], x: np.ndarray, stages: int) -> None:
    assert found["logits"].shape == (len(x), CLASSES)
    np.testing.assert_allclose(found["logits"], expected(x, stages), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", ["throughput", "latency"])
def test_requests_of_all_sizes_in_order_from_one_thread_and_from_many(bundle_of, mode):
    stages, sizes = 3, (1, 11, 4, 2, 3, 8, 1, 1, 25, 5)
    given = [rows(count, i) for i, count in enumerate(sizes)]
    with open_job(bundle_of(stages, "forward", 2).path, timeout=TIMEOUT, mode=mode, queue=3) as job:
        found = list(job.stream({"x": x} for x in given))
        assert len(found) == len(given)
        for one, x in zip(found, given, strict=True):
            check(one, x, stages)
        # The control: rows of another request are others.
        assert not np.allclose(found[6]["logits"], found[7]["logits"])

        def ask(number: int) -> None:
            for i in range(4):
                x = rows(1 + (number + i) % 7, 100 * number + i)
                check(job.submit({"x": x}).result(TIMEOUT), x, stages)
            answered.append(number)

        answered: list[int] = []
        threads = [threading.Thread(target=ask, args=(number,)) for number in range(5)]
        for thread in threads:
            thread.start()
        # Another command empties the pipeline in between; nobody notices.
        assert job.audit()
        for thread in threads:
            thread.join(TIMEOUT)
        assert sorted(answered) == [0, 1, 2, 3, 4]
        # The arrays may be used again at once.
        buffer = rows(5)
        future = job.submit({"x": buffer})
        x = buffer.copy()
        buffer[:] = 0
        check(future.result(TIMEOUT), x, stages)


def test_a_bad_request_has_its_own_error(bundle_of):
    good, bad = rows(3), rows(3).astype(np.float64)
    with open_job(bundle_of(2, "forward", 1).path, timeout=TIMEOUT) as job:
        futures = [job.submit({"x": good})]
        with pytest.raises(UsageError, match="request: does not fit the model:\n  - x: element type is f64"):
            job.submit({"x": bad})
        futures.append(job.submit({"x": good + 1}))
        check(futures[1].result(TIMEOUT), good + 1, 2)
        check(futures[0].result(TIMEOUT), good, 2)
        stream = job.stream([{"x": good}, {"x": good * 2}, {"x": bad}, {"x": good}])
        check(next(stream), good, 2)
        check(next(stream), good * 2, 2)
        with pytest.raises(UsageError, match="request 2: does not fit"):
            next(stream)

        def broken():
            yield {"x": good}
            raise RuntimeError("the reader broke")

        stream = job.stream(broken())
        check(next(stream), good, 2)
        with pytest.raises(RuntimeError, match="the reader broke"):
            next(stream)
        for wrong in ({"x": good}, 3, None):
            with pytest.raises(UsageError, match="expected requests"):
                next(job.stream(wrong))
        check(job.infer({"x": good}), good, 2)
        last = job.submit({"x": good})
    # Closing answers what was accepted.
    check(last.result(0), good, 2)
    with pytest.raises(UsageError, match="closed"):
        job.submit({"x": good})


def test_a_full_queue_pushes_back_and_waiting_requests_can_be_cancelled(bundle_of):
    x = rows(4)
    with open_job(bundle_of(2, "forward", 1).path, timeout=TIMEOUT, mode="latency", queue=2, pace={"F": 0.3}) as job:
        first = job.submit({"x": x})
        while not first.running():
            time.sleep(0.01)
        second, third = job.submit({"x": x}), job.submit({"x": x + 1})
        with pytest.raises(QueueFull, match=r"no room within 0\.01 s") as caught:
            job.submit({"x": x}, timeout=0.01)
        assert caught.value.exit_code == 6
        assert second.cancel()
        fourth = job.submit({"x": x + 2})  # there is room again
        assert not first.cancel()  # it is under way
        for future, given in ((first, x), (third, x + 1), (fourth, x + 2)):
            check(future.result(TIMEOUT), given, 2)
        with pytest.raises(CancelledError):
            second.result(0)
        # A callback runs on the thread that moves requests: it must not wait for room.
        errors: list[BaseException] = []

        def again(_: object) -> None:
            try:
                for _ in range(3):
                    job.submit({"x": x})
            except PenstockError as error:
                errors.append(error)

        job.submit({"x": x}).add_done_callback(again)
        for _ in range(100):
            time.sleep(0.05)
            if errors:
                break
        assert isinstance(errors[0], QueueFull)


def test_options_that_mean_nothing(bundle_of, monkeypatch):
    monkeypatch.setattr("penstock.runtime.job.ranks.Workers", lambda *given: pytest.fail("started workers"))
    with pytest.raises(
        UsageError, match=r"one of throughput, latency, got 'fast'; the queue must hold 1 to 1000000 requests, got 0"
    ):
        open_job(bundle_of(2, "forward", 1).path, mode="fast", queue=0)


def test_after_a_workers_death_every_request_has_the_error(bundle_of):
    x = rows(40)
    job = open_job(bundle_of(2, "forward", 1).path, timeout=TIMEOUT, pace={"F": 0.1})
    with pytest.raises(PeerLost, match=r"rank 1 .*was killed by SIGKILL"), job:  # noqa: PT012
        futures = [job.submit({"x": x}) for _ in range(3)]
        while not futures[0].running():
            time.sleep(0.01)
        os.kill(job.workers.process_ids()[1], signal.SIGKILL)
        for future in futures:
            with pytest.raises(PeerLost, match=r"rank 1 .*was killed by SIGKILL"):
                future.result(TIMEOUT)
        with pytest.raises(PeerLost):
            job.submit({"x": x})
        futures[0].result(0)
    assert job.workers.ended


def test_leaving_with_an_error_ends_what_is_under_way(bundle_of):
    job = open_job(bundle_of(2, "forward", 1).path, timeout=TIMEOUT, pace={"F": 0.1})
    with pytest.raises(ZeroDivisionError), job:  # noqa: PT012
        future = job.submit({"x": rows(400)})
        raise ZeroDivisionError
    with pytest.raises(PenstockError, match="ended before the request was answered"):
        future.result(TIMEOUT)


def test_four_stages_with_devices_that_share_them_equal_onnxruntime(tmp_path):
    path = write_mlp(tmp_path / "m.onnx", (6,) * 5, None, seed=1)
    model = ps.from_onnx(path, dims={"batch": 2})
    products = [op.outs[0].name for op in model.module.graphs["main"].ops if op.kind == "matmul"]
    devices = [("cpu:0", "cpu:1"), ("cpu:2",), ("cpu:3",), ("cpu:4",)]
    plan = ps.plan(model, ps.Cluster.local(5), devices=devices, split_at=products[1:], microbatches=3)
    bundle = ps.compile(plan, tmp_path / "bundle")
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (input_,), (output,) = session.get_inputs(), session.get_outputs()
    given = [
        np.random.default_rng(i).standard_normal((count, 6)).astype(np.float32)
        for i, count in enumerate((1, 7, 2, 13, 1, 1, 4))
    ]
    with ps.open(bundle, timeout=TIMEOUT) as job:
        for found, x in zip(job.stream({input_.name: x} for x in given), given, strict=True):
            (reference,) = session.run(None, {input_.name: x})
            np.testing.assert_allclose(found[output.name], reference, rtol=1e-4, atol=1e-5)
