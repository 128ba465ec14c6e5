"""Tests of bundles that run in the calling process: results are those of onnxruntime and of plain NumPy, inputs that do
not fit are one error, outputs are the caller's, and no process is started."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from oracles.classifier import CLASSES, initial_weights, make_batches

import penstock as ps
from penstock.backends.bundle.signing import KEY_VARIABLE
from penstock.backends.tvm.run import load as run_load
from penstock.models import write_bert, write_cnn, write_mlp
from penstock.runtime.job.in_process import LoadedModel
from penstock.support.errors import DoesNotFit, UsageError, VerifyError

from .held import below

TIMEOUT = 60
WRITERS: dict[str, Callable[[Path], Path]] = {
    "mlp": lambda path: write_mlp(path, [16, 32, 5], batch=4),
    "cnn": lambda path: write_cnn(path, batch=2, size=8),
    "attention": lambda path: write_bert(path, 2, layers=1, width=16, heads=2, vocab=32, positions=8),
}


class Compiled:
    """A model of each kind: its bundle, its session of onnxruntime, and samples."""

    def __init__(self, kind: str, folder: Path) -> None:
        path = WRITERS[kind](folder / "model.onnx")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self.bundle = ps.compile(
            ps.plan(ps.from_onnx(path), ps.Cluster.local(1, threads=[1])), folder / "bundle", jobs=1
        )

    def inputs(self, seed: int) -> dict[str, np.ndarray]:
        random, (one,) = np.random.default_rng(seed), self.session.get_inputs()
        if one.type == "tensor(int64)":
            return {one.name: random.integers(0, 32, one.shape)}
        return {one.name: random.standard_normal(one.shape).astype(np.float32)}

    def expected(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        names = [one.name for one in self.session.get_outputs()]
        return dict(zip(names, self.session.run(names, inputs), strict=True))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Compiled]:
    made: dict[str, Compiled] = {}

    def make(kind: str) -> Compiled:
        if kind not in made:
            made[kind] = Compiled(kind, tmp_path_factory.mktemp(kind))
        return made[kind]

    return make


def agree(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=1e-5)


@pytest.fixture
def model(bundle_of) -> LoadedModel:
    return ps.load(bundle_of(1, "forward", 2).path)


def rows(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, count]).standard_normal((count, 8)).astype(np.float32)


def logits(x: np.ndarray) -> np.ndarray:
    return x @ initial_weights(1)["w0"]


@pytest.mark.parametrize("kind", WRITERS)
def test_outputs_are_those_of_onnxruntime_and_no_process_is_started(kind, compiled):
    case, threads, before = compiled(kind), torch.get_num_threads(), below(os.getpid())
    model = ps.load(case.bundle)
    for seed in range(3):
        inputs = case.inputs(seed)
        ((name, array),) = inputs.items()
        expected = case.expected(inputs)
        tensor = torch.from_numpy(array)
        for given in (inputs, array, [array], tensor, {name: tensor}):
            agree(model(given), expected)
        # The control: other inputs have other outputs.
        with pytest.raises(AssertionError):
            agree(model(case.inputs(seed + 10)), expected)
    assert torch.get_num_threads() == threads
    assert below(os.getpid()) == before


def test_a_job_with_workers_is_noticed(bundle_of):
    """The control of `below`: processes that are started are counted."""
    before = below(os.getpid())
    with ps.open(bundle_of(2, "forward", 2).path, timeout=TIMEOUT):
        assert len(below(os.getpid())) >= len(before) + 2


@pytest.mark.parametrize("count", [1, 3, 4, 5, 8, 11])
def test_any_number_of_samples(model, count):
    x = rows(count)
    found = model({"x": x})["logits"]
    assert found.shape == (count, CLASSES)
    np.testing.assert_allclose(found, logits(x), rtol=1e-5, atol=1e-6)
    # The control: the order of samples counts.
    assert count == 1 or not np.allclose(found, logits(x[::-1]))


def test_arrays_that_cannot_be_used_where_they_lie(compiled):
    case = compiled("mlp")
    model = ps.load(case.bundle)
    inputs = case.inputs(0)
    ((name, array),) = inputs.items()
    fixed = array.copy()
    fixed.flags.writeable = False
    memory = np.zeros(array.nbytes + 1, np.uint8)
    odd = memory[1:].view(np.float32).reshape(array.shape)
    odd[:] = array
    wide = np.zeros((4, 32), np.float32)
    wide[:, ::2] = array
    several = {
        "fixed": fixed,
        "unaligned": odd,
        "steps": wide[:, ::2],
        "backwards": array[::-1, ::-1].copy()[::-1, ::-1],
        "transposed": np.asfortranarray(array),
        "swapped": array.astype(">f4"),
        "with a gradient": torch.from_numpy(array).requires_grad_(),
        "strided": torch.from_numpy(wide)[:, ::2],
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for given in several.values():
            agree(model({name: given}), case.expected(inputs))


@pytest.mark.parametrize("kind", WRITERS)
def test_arrays_become_no_tensors_behind_the_first_call(kind, compiled, monkeypatch):
    case = compiled(kind)
    model = ps.load(case.bundle)
    model(case.inputs(0))

    def refuse(_: object) -> None:
        raise VerifyError("tensors")

    monkeypatch.setattr(model, "_call", refuse)
    for seed in range(3):
        inputs = case.inputs(seed)
        found = model(inputs)
        agree(found, case.expected(inputs))
        assert all(type(array) is np.ndarray and array.flags.writeable for array in found.values())
    # The control: what is a tensor stays one.
    with pytest.raises(VerifyError):
        model({name: torch.from_numpy(array) for name, array in inputs.items()})


def test_inputs_that_do_not_fit_are_one_error(model, compiled):
    good = rows(4)
    for given, said in {
        "name": ({"z": good}, r"x: missing, expected f32\[4,8\].*z: the model has no such input, it has x"),
        "type": ({"x": good.astype(np.float64)}, r"x: element type is f64, expected f32"),
        "shape": ({"x": good[:, :7]}, r"x: shape is \[4, 7\], expected \[4, 8\]"),
        "type and shape": (
            {"x": torch.zeros(4, 7, dtype=torch.float64)},
            r"element type is f64.*shape is \[4, 7\], expected",
        ),
        "no samples": ({"x": good[:0]}, "x: 0 rows"),
        "too many arrays": ([good, good], "has 2 arrays, expected 1, in the order x"),
        "no arrays": ({}, "x: missing"),
        "no array": ({"x": [[1.0], [2.0, 3.0]]}, "x: is no array"),
        "nothing": (None, "expected a dict of arrays"),
    }.values():
        with pytest.raises(UsageError, match=f"(?s){said}"):
            model(given)
    with pytest.raises(UsageError, match="has 2 arrays, expected 1"):
        model(good, good)
    np.testing.assert_allclose(model(good)["logits"], logits(good), rtol=1e-5, atol=1e-6)
    # An index out of range would read memory that belongs to something else.
    case = compiled("attention")
    ((name, tokens),) = case.inputs(0).items()
    tokens[1, 3] = 32
    for given in (tokens, torch.from_numpy(tokens)):
        with pytest.raises(UsageError, match="sample 1 has the value 32, the model takes -32 to 31"):
            ps.load(case.bundle)({name: given})


def test_several_threads_at_once(compiled):
    case = compiled("cnn")
    model = ps.load(case.bundle)
    asked = [case.inputs(seed) for seed in range(8)]
    expected = [case.expected(inputs) for inputs in asked]
    wrong: list[object] = []

    def call(number: int) -> None:
        for i in range(60):
            place = (number + i) % len(asked)
            found = model(asked[place])
            wrong.extend(
                name for name, array in expected[place].items() if not np.allclose(found[name], array, 1e-4, 1e-5)
            )
        answered.append(number)

    answered: list[int] = []
    threads = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
    assert sorted(answered) == [0, 1, 2, 3]
    assert not wrong
    # The control: answers of other requests are others.
    (one, other) = (next(iter(each.values())) for each in expected[:2])
    assert not np.allclose(one, other, 1e-4, 1e-5)


def test_a_model_that_nobody_holds_gives_its_memory_back_at_once(compiled):
    """No collector of cycles has to come by. The control is a model that is held by itself."""
    gc.collect()
    gc.disable()
    try:
        for itself in (False, True):
            model = ps.load(compiled("mlp").bundle)
            model.itself = model if itself else None
            store = weakref.ref(model.store)
            del model
            assert (store() is None) == (not itself)
    finally:
        gc.enable()


def test_one_call_computes_at_a_time(model, monkeypatch):
    """The machine of a stage is not re-entrant: calls take turns. The control counts without the lock."""
    inside, most, call = 0, 0, model._call

    def watched(ins: list[torch.Tensor]) -> list[torch.Tensor]:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        time.sleep(0.02)
        inside -= 1
        return call(ins)

    def ask_together() -> int:
        nonlocal most
        most = 0
        threads = [threading.Thread(target=model, args=(rows(4, i),)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT)
        return most

    monkeypatch.setattr(model, "_call", watched)
    assert ask_together() == 1
    monkeypatch.setattr(model, "_lock", contextlib.nullcontext())
    assert ask_together() > 1


def test_another_number_of_threads_needs_another_process(compiled, monkeypatch):
    """TVM has one number of threads per process: a model says so, a job starts a worker."""
    case = compiled("mlp")
    inputs = case.inputs(0)
    with ps.open(case.bundle, timeout=TIMEOUT) as job:
        assert not job.workers.process_ids()
    monkeypatch.setattr(run_load, "_THREADS", [2])
    with pytest.raises(UsageError, match=r"with 2 threads, 1 were asked for\n.*penstock\.open"):
        ps.load(case.bundle)
    with ps.open(case.bundle, timeout=TIMEOUT) as job:
        assert len(job.workers.process_ids()) == 1
        agree(job.infer(inputs), case.expected(inputs))


def test_bundles_that_one_process_does_not_run(bundle_of, tmp_path):
    with pytest.raises(UsageError, match=r"is for 3 processes.*\n.*penstock\.open"):
        ps.load(bundle_of(3, "forward", 2).path)
    with pytest.raises(UsageError, match=r"is for training.*\n.*penstock\.open"):
        ps.load(bundle_of(1, "1f1b", 2).path)
    with pytest.raises(UsageError, match="is not a bundle directory"):
        ps.load(tmp_path / "nothing")
    broken = tmp_path / "broken"
    shutil.copytree(bundle_of(1, "forward", 2).path, broken)
    weights = broken / "weights" / "s0.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(VerifyError, match=r"is damaged.*\n.*weights/s0\.safetensors: SHA-256"):
        ps.load(broken)


def test_bundles_must_be_signed_where_others_must(bundle_of, tmp_path, monkeypatch):
    key = tmp_path / "key"
    key.write_bytes(b"k" * 32)
    key.chmod(0o600)
    monkeypatch.setenv(KEY_VARIABLE, str(key))
    with pytest.raises(VerifyError, match="sign"):
        ps.load(bundle_of(1, "forward", 2).path)


def test_trained_weights_of_a_checkpoint(bundle_of, tmp_path):
    with ps.open(bundle_of(1, "1f1b", 2).path, timeout=TIMEOUT) as job:
        list(job.run(make_batches(3, 2)))
        job.save(tmp_path / "ckpt")
        trained = job.parameters()["w0"]
    x = rows(4)
    found = ps.load(bundle_of(1, "forward", 2).path, checkpoint=tmp_path / "ckpt")(x)["logits"]
    np.testing.assert_allclose(found, x @ trained, rtol=1e-5, atol=1e-6)
    # The control: the weights of the bundle are others.
    assert not np.allclose(found, logits(x), rtol=1e-3)
    with pytest.raises(UsageError, match="no checkpoint"):
        ps.load(bundle_of(1, "forward", 2).path, checkpoint=tmp_path / "none")


def test_a_job_of_one_rank_starts_no_process_unless_something_asks_for_one(bundle_of):
    bundle, before = bundle_of(1, "forward", 2).path, below(os.getpid())
    given = [rows(count, count) for count in (1, 3, 4, 9)]
    for mode in ("throughput", "latency"):
        with ps.open(bundle, timeout=TIMEOUT, mode=mode) as job:
            futures = [job.submit({"x": x}) for x in given]
            for x, streamed, future in zip(given, job.stream({"x": x} for x in given), futures, strict=True):
                for found in (job.infer({"x": x}), streamed, future.result(TIMEOUT)):
                    np.testing.assert_allclose(found["logits"], logits(x), rtol=1e-5, atol=1e-6)
            assert not np.allclose(job.infer({"x": given[0]})["logits"], logits(given[1][:1]))
            np.testing.assert_array_equal(job.parameters()["w0"], initial_weights(1)["w0"])
            # Those that were ending before may be gone.
            assert not set(below(os.getpid())) - set(before)
            assert not job.workers.process_ids()
            future = job.submit({"x": given[3]})
        # Closing answers what was accepted.
        np.testing.assert_allclose(future.result(0)["logits"], logits(given[3]), rtol=1e-5, atol=1e-6)
        for ask in (job.infer, job.submit):
            with pytest.raises(UsageError, match="the job is closed"):
                ask({"x": given[0]})
    # The control: what needs a worker has one, which computes the same.
    for options in ({"audit": True}, {"pace": {"F": 0.001}}, {"latency": 0.001}):
        with ps.open(bundle, timeout=TIMEOUT, **options) as job:
            assert len(job.workers.process_ids()) == 1
            np.testing.assert_allclose(job.infer({"x": given[3]})["logits"], logits(given[3]), rtol=1e-5, atol=1e-6)


def test_a_job_in_this_process_saves_what_another_loads(bundle_of, tmp_path):
    with ps.open(bundle_of(1, "1f1b", 2).path, timeout=TIMEOUT) as job:
        list(job.run(make_batches(3, 2)))
        job.save(tmp_path / "trained")
        trained = job.parameters()["w0"]
    bundle = bundle_of(1, "forward", 2).path
    with ps.open(bundle, timeout=TIMEOUT, resume=tmp_path / "trained") as job:
        assert not job.workers.process_ids()
        for background in (False, True):
            job.save(tmp_path / "again", background=background)
    x = rows(4)
    for place in ("trained", "again"):
        found = ps.load(bundle, checkpoint=tmp_path / place)(x)["logits"]
        np.testing.assert_allclose(found, x @ trained, rtol=1e-5, atol=1e-6)
    assert not np.allclose(x @ trained, logits(x), rtol=1e-3)


def test_an_error_of_a_computation_ends_the_job(bundle_of, monkeypatch):
    def fail(ins: list[torch.Tensor]) -> list[torch.Tensor]:
        raise MemoryError("std::bad_alloc")

    with pytest.raises(DoesNotFit, match="gave no more memory"), ps.open(bundle_of(1, "forward", 2).path) as job:  # noqa: PT012
        monkeypatch.setattr(job.workers.model, "_call", fail)
        with pytest.raises(DoesNotFit):
            job.infer({"x": rows(4)})
        future = job.submit({"x": rows(4)})
        with pytest.raises(DoesNotFit):
            future.result(TIMEOUT)
        job.submit({"x": rows(4)})
    assert job.workers.ended


def test_random_draws_are_those_of_a_worker(tmp_path):
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Dropout(0.5)).train()
    plan = ps.plan(ps.from_torch(module, (torch.zeros(4, 8),)), ps.Cluster.local(1, threads=[1]))
    assert plan.module.draws
    bundle = ps.compile(plan, tmp_path / "bundle", backend="numpy")
    asked = [{"input": rows(count, count)} for count in (4, 6, 4)]
    with ps.open(bundle, timeout=TIMEOUT, audit=True) as job:
        expected = [job.infer(inputs) for inputs in asked]
    model = ps.load(bundle)
    with ps.open(bundle, timeout=TIMEOUT) as job:
        for ask in (model, job.infer):
            for inputs, one in zip(asked, expected, strict=True):
                agree(ask(inputs), one)
    # The control: the next microbatch draws other numbers.
    with pytest.raises(AssertionError):
        agree(model(asked[0]), expected[0])
