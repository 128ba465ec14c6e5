"""Tests of bundles with bounded dimensions: every size up to the bound equals onnxruntime, and nothing is compiled when
they run."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import tensor

import penstock as ps
from penstock.backends.bundle.format import open_bundle
from penstock.backends.bundle.writer import Provenance, write_bundle
from penstock.backends.tvm.compile import pool
from penstock.commands.parser import main
from penstock.ir.graph import Module
from penstock.ir.ladder.ladder import Ladder, Rung, filling, priced_sizes
from penstock.planning.explain import plan_lines
from penstock.planning.predict import predict
from penstock.runtime.job.dispatcher import Serving
from penstock.runtime.job.rungs import LoadedLadder
from penstock.runtime.job.sized_requests import SizedRequests
from penstock.runtime.launch.local import Workers
from penstock.runtime.messages.control import RequestBatch
from penstock.runtime.worker.stage_graphs import ladder_of_ranks
from penstock.support.errors import PenstockError, UnsupportedModel, UsageError

MODEL = """<ir_version: 8, opset_import: ["" : 17]> g (float[batch,seq,8] x, int64[batch,seq] ids)
=> (float[batch,seq,8] y, float[batch,8] m)
<float[8,8] w = {WEIGHTS}, float[5,8] table = {TABLE}, int64[1] last = {1}, float[1] half = {0.5}> {
  e = Gather(table, ids)
  a = Add(x, e)
  q = MatMul(a, w)
  t = Transpose<perm = [0, 2, 1]>(a)
  s = MatMul(q, t)
  p = Softmax<axis = -1>(s)
  h = MatMul(p, a)
  y = Mul(h, half)
  m = ReduceMean<axes = [1], keepdims = 0>(y)
}"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(0)
    numbers = {"WEIGHTS": rng.normal(size=64), "TABLE": rng.normal(size=40)}
    text = MODEL
    for name, array in numbers.items():
        text = text.replace("{" + name + "}", "{" + ", ".join(f"{x:.6f}" for x in array) + "}")
    path = tmp_path_factory.mktemp("model") / "model.onnx"
    onnx.save(onnx.parser.parse_model(text), path)
    return path


def _inputs(batch: int, seq: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(batch * 100 + seq)
    return {
        "x": rng.normal(size=(batch, seq, 8)).astype(np.float32),
        "ids": rng.integers(0, 5, (batch, seq)),
    }


class _Judge:
    def __init__(self, path: Path) -> None:
        self._session = onnxruntime.InferenceSession(path)

    def check(self, outputs: Mapping[str, np.ndarray], inputs: Mapping[str, np.ndarray]) -> None:
        names = [output.name for output in self._session.get_outputs()]
        for name, expected in zip(names, self._session.run(names, dict(inputs)), strict=True):
            assert outputs[name].shape == expected.shape
            np.testing.assert_allclose(outputs[name], expected, rtol=2e-5, atol=1e-5)


def _compiled(path: Path, out: Path, dims: Mapping[str, Any], backend: str = "numpy", devices: int = 1) -> Path:
    plan = ps.plan(ps.from_onnx(path, dims=dims), ps.Cluster.local(threads=[1] * devices))
    return ps.compile(plan, out, backend=backend)


@pytest.fixture(scope="module")
def lengths(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    dims = {"batch": 2, "seq": "<=20:4,8,20"}
    return _compiled(model, tmp_path_factory.mktemp("lengths") / "bundle", dims, "tvm")


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Count what is compiled."""
    made: list[str] = []
    run = pool.WorkerPool.run

    def counting(self: pool.WorkerPool, jobs: Any, *more: Any, **named: Any) -> Any:
        made.extend(str(job) for job in jobs)
        return run(self, jobs, *more, **named)

    monkeypatch.setattr(pool.WorkerPool, "run", counting)
    return made


def test_every_length(model: Path, lengths: Path, no_compiler: list[str]) -> None:
    loaded, judge = ps.load(lengths), _Judge(model)
    assert isinstance(loaded, LoadedLadder)
    for seq in range(1, 21):
        inputs = _inputs(2, seq)
        judge.check(loaded(inputs), inputs)
    assert no_compiler == []


def test_control_compiling_is_counted(
    model: Path, tmp_path: Path, no_compiler: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    _compiled(model, tmp_path / "one", {"batch": 1, "seq": 3}, "tvm")
    assert no_compiler


def test_padding_of_nan_changes_no_bit(lengths: Path) -> None:
    loaded = ps.load(lengths)
    assert isinstance(loaded, LoadedLadder)
    inputs = _inputs(2, 5)
    rung = loaded.at({"seq": 8})
    padded = {
        "x": np.full((2, 8, 8), np.nan, np.float32),
        "ids": np.full((2, 8), 4),
    }
    for name, array in inputs.items():
        padded[name][:, :5] = array
    expected = loaded(inputs)

    got = rung.answer(padded, (tensor(5),))
    np.testing.assert_array_equal(got["y"][:, :5], expected["y"])
    np.testing.assert_array_equal(got["m"], expected["m"])
    # Control: told that all eight are the request's, padding shows.
    assert np.isnan(rung.answer(padded, (tensor(8),))["m"]).all()


def test_every_batch(model: Path, tmp_path: Path) -> None:
    bundle = _compiled(model, tmp_path / "bundle", {"batch": "<=8", "seq": 3})
    loaded, judge = ps.load(bundle), _Judge(model)
    assert isinstance(loaded, LoadedLadder)
    assert [rung.name for rung in loaded.bundle.ladder] == ["1", "2", "4", "8"]
    assert loaded.requests.rows == "batch"
    # Rows do not see each other: more than the bound is cut, too.
    for batch in (*range(1, 10), 19):
        inputs = _inputs(batch, 3)
        judge.check(loaded(inputs), inputs)
    with pytest.raises(UsageError, match="batch is 0, a request has one row at least"):
        loaded(_inputs(0, 3))


def test_both(model: Path, tmp_path: Path) -> None:
    bundle = _compiled(model, tmp_path / "bundle", {"batch": "<=2:1,2", "seq": "<=8:4,8"})
    loaded, judge = ps.load(bundle), _Judge(model)
    for batch in (1, 2, 3):
        for seq in range(1, 9):
            inputs = _inputs(batch, seq)
            judge.check(loaded(inputs), inputs)


class _LastRow(torch.nn.Module):
    """Rows that look at each other, and a result of the last one alone."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(6, 6), torch.nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = torch.relu(self.a(x))
        w = torch.softmax(h @ h.transpose(1, 2), -1) @ h
        return self.b(w[:, -1]), w


@pytest.fixture(scope="module")
def exported() -> tuple[torch.nn.Module, torch.export.ExportedProgram]:
    torch.manual_seed(0)
    module, sizes = _LastRow().eval(), {1: torch.export.Dim("n", min=1, max=64)}
    return module, torch.export.export(module, (torch.randn(2, 5, 6),), dynamic_shapes=(sizes,))


@pytest.mark.parametrize("mesh", ["", "tp=2"])
def test_a_program_of_torch(
    exported: tuple[torch.nn.Module, torch.export.ExportedProgram], tmp_path: Path, mesh: str
) -> None:
    module, program = exported
    cluster = ps.Cluster.local(threads=[1] * (2 if mesh else 1))
    plan = ps.plan(ps.from_torch(program, dims={"x.1": "<=20:4,20"}), cluster, mesh=mesh)
    with ps.open(ps.compile(plan, tmp_path / "bundle", backend="numpy"), timeout=60) as job:
        for n in (1, 3, 4, 17, 20):
            x = torch.randn(2, n, 6)
            outputs = list(job.infer({"x": x}).values())
            for output, expected in zip(outputs, module(x), strict=True):
                np.testing.assert_allclose(output, expected.detach().numpy(), rtol=2e-5, atol=1e-6)
            # Control: the row that the rung has last is another one.
            if n == 3:
                other = module(torch.cat([x, torch.zeros(2, 1, 6)], 1))[0].detach().numpy()
                assert not np.allclose(outputs[0], other, rtol=2e-5, atol=1e-6)


def test_sizes_of_lengths_come_from_predictions(model: Path) -> None:
    plan = ps.plan(ps.from_onnx(model, dims={"batch": 2, "seq": "<=40"}), ps.Cluster.local(threads=[1]))
    assert plan.ladder is not None
    sizes = plan.ladder.sizes_along("seq")
    seconds = {rung.sizes["seq"]: predict(rung.held).step for rung in plan.ladder}
    assert (sizes[0], sizes[-1]) == (8, 40)
    assert any(f"is predicted to take {filling(seconds) - 1:.0%} more time at most" in x for x in plan_lines(plan))
    # The law that chose them, on the predictions at powers of two.
    assert tuple(sizes) == priced_sizes(8, 40, {n: _predicted(model, n) for n in (8, 16, 32, 40)}, 1.1)


def test_plan_prints_sizes_and_the_largest_share_of_padding(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Times between two sizes are numpy's: the size after each is filled up to the next. Few sizes are the control."""
    shares = []
    for bound in ("seq<=40", "seq<=40:8,40"):
        words = ["plan", str(model), "--dim", "batch=512", "--dim", bound, "--devices", "1"]
        assert main([*words, "--json"]) == 0
        rungs = [(row["sizes"]["seq"], row["seconds"]) for row in json.loads(capsys.readouterr().out)["rungs"]]
        sizes, seconds = zip(*rungs, strict=True)
        larger = [b / np.interp(a + 1, sizes, seconds) for a, b in zip(sizes, seconds[1:], strict=False)]
        assert main(words) == 0
        line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("seq up to 40: "))
        shares.append(max(larger) - 1)
        assert line.startswith(f"seq up to 40: {', '.join(map(str, sizes))} (filled up")
        assert line.endswith(f"; from 8 on padding is predicted to take {shares[-1]:.0%} more time at most)")
    assert shares[0] < 0.11 < shares[1]
    assert main(["plan", str(model), "--dim", "batch=2", "--dim", "seq=40", "--devices", "1"]) == 0
    assert "padding" not in capsys.readouterr().out


def _predicted(model: Path, seq: int) -> float:
    bound = f"<=40:{seq},40" if seq < 40 else "<=40:40"
    plan = ps.plan(ps.from_onnx(model, dims={"batch": 2, "seq": bound}), ps.Cluster.local(threads=[1]))
    assert plan.ladder is not None
    return predict(plan.ladder.rungs[0].held).step


def test_inputs_that_do_not_fit(lengths: Path) -> None:
    loaded = ps.load(lengths)
    with pytest.raises(UsageError, match="seq is 21, the bundle was compiled for sizes from 1 to 20"):
        loaded(_inputs(2, 21))
    with pytest.raises(UsageError, match="different sizes along seq: x 5, ids 4"):
        loaded({**_inputs(2, 5), "ids": _inputs(2, 4)["ids"]})
    with pytest.raises(UsageError):
        loaded({"x": _inputs(2, 5)["x"]})
    assert isinstance(loaded, LoadedLadder)
    with pytest.raises(UsageError, match="no rung of seq=5"):
        loaded.at({"seq": 5})


def test_threads(model: Path, lengths: Path) -> None:
    loaded, judge, failed = ps.load(lengths), _Judge(model), list[BaseException]()

    def ask(first: int) -> None:
        try:
            for seq in range(first, 21, 4):
                inputs = _inputs(2, seq)
                judge.check(loaded(inputs), inputs)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed


def test_a_model_that_cannot_be_bounded(tmp_path: Path) -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]> g (float[batch,seq] x) => (float[r,c] y)
    <int64[2] shape = {3, -1}> { y = Reshape(x, shape) }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
    with pytest.raises(UnsupportedModel, match=r"(?s)seq cannot be bounded.*output %y: mixes seq"):
        _compiled(tmp_path / "model.onnx", tmp_path / "bundle", {"batch": 6, "seq": "<=8"})


def test_job_in_this_process(model: Path, lengths: Path) -> None:
    judge = _Judge(model)
    requests = [_inputs(2, seq) for seq in (3, 20, 8, 11)]
    with ps.open(lengths, timeout=60) as job:
        judge.check(job.infer(requests[0]), requests[0])
        futures = [job.submit(request) for request in requests]
        for request, future in zip(requests, futures, strict=True):
            judge.check(future.result(60), request)
        for request, outputs in zip(requests, job.stream(requests), strict=True):
            judge.check(outputs, request)
        with pytest.raises(UsageError, match="seq is 21"):
            job.infer(_inputs(2, 21))


class _Watched:
    """The rungs that ranks were sent, by rank, and the sizes of what they answered. `told` is what the last rank is
    told instead of some rungs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, told: Mapping[str, str] | None = None) -> None:
        self.sent: dict[int, list[str]] = {}
        self.answered: list[str] = []
        send, take = Workers.send, Serving._take

        def sending(workers: Workers, rank: int, message: Any, arrays: Any = None) -> None:
            if isinstance(message, RequestBatch):
                self.sent.setdefault(rank, []).append(message.rung)
                if told is not None and rank == workers.count - 1:
                    message = RequestBatch(message.mb, told.get(message.rung, message.rung))
            send(workers, rank, message, arrays)

        def taking(serving: Serving, message: Any, arrays: Any) -> None:
            self.answered += ["x".join(map(str, array.shape[:2])) for name, array in arrays.items() if name == "y"]
            take(serving, message, arrays)

        monkeypatch.setattr(Workers, "send", sending)
        monkeypatch.setattr(Serving, "_take", taking)


@pytest.fixture(scope="module")
def of_two(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of two ranks; what travels between them has both sizes."""
    imported = ps.from_onnx(model, dims={"batch": "<=4", "seq": "<=8:4,8"})
    plan = ps.plan(imported, ps.Cluster.local(threads=[1, 1]), split_at=["q"])
    assert plan.ladder is not None
    assert len({str(edge.values) for rung in plan.ladder for edge in rung.held.edges}) == 6
    return ps.compile(plan, tmp_path_factory.mktemp("of_two") / "bundle", backend="numpy")


@pytest.mark.parametrize("mode", ["throughput", "latency"])
@pytest.mark.parametrize("shared", ["1", "0"])
def test_ranks_run_requests_at_their_rungs(
    model: Path, of_two: Path, monkeypatch: pytest.MonkeyPatch, shared: str, mode: str
) -> None:
    monkeypatch.setenv("PENSTOCK_SHARED_MEMORY", shared)
    judge, watched, parts = _Judge(model), _Watched(monkeypatch), SizedRequests(open_bundle(of_two))
    with ps.open(of_two, timeout=60, mode=mode) as job:

        @settings(deadline=None, max_examples=5)
        @given(st.lists(st.tuples(st.integers(1, 7), st.integers(1, 8)), min_size=1, max_size=12))
        def check(sizes: list[tuple[int, int]]) -> None:
            watched.sent.clear()
            watched.answered.clear()
            requests = [_inputs(*size) for size in sizes]
            futures = [job.submit(request) for request in requests]
            for request, future in zip(requests, futures, strict=True):
                judge.check(future.result(60), request)
            # Every rank is told the rungs that take the request in the least time, and computes no larger ones.
            wanted = [parts.split({"batch": rows, "seq": length}) for rows, length in sizes]
            rungs = [rung.name for each in wanted for rung, _ in each]
            assert watched.sent == {0: rungs, 1: rungs}
            assert watched.answered == rungs

        check()
        for request, outputs in zip(
            [_inputs(3, 5), _inputs(1, 2)], job.stream([_inputs(3, 5), _inputs(1, 2)]), strict=True
        ):
            judge.check(outputs, request)
        assert watched.answered[-1] == "1x4"


def test_control_a_rung_that_two_microbatches_swap(model: Path, of_two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judge, requests = _Judge(model), [_inputs(1, 8), _inputs(1, 3)]
    _Watched(monkeypatch, told={"1x8": "1x4", "1x4": "1x8"})

    def ask() -> None:
        with ps.open(of_two, timeout=60) as job:
            for request, future in zip(requests, [job.submit(request) for request in requests], strict=True):
                judge.check(future.result(60), request)

    with pytest.raises((AssertionError, PenstockError)):
        ask()


def test_a_rung_on_which_ranks_would_do_something_else(model: Path, tmp_path: Path, of_two: Path) -> None:
    bundle = open_bundle(of_two)
    assert [rung.name for rung in ladder_of_ranks(bundle)] == ["1x4", "1x8", "2x4", "2x8", "4x4", "4x8"]
    rungs = [Rung(rung.sizes, rung.held.but(edges=()) if rung.name == "2x4" else rung.held) for rung in bundle.ladder]
    bundle.__dict__["ladder"] = Ladder(rungs)
    assert [rung.name for rung in ladder_of_ranks(bundle)] == ["1x4", "1x8", "2x8", "4x4", "4x8"]


def test_commands(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle, judge = tmp_path / "bundle", _Judge(model)
    words = ["compile", str(model), "--dim", "batch<=4", "--dim", "seq=3", "-o", str(bundle), "--backend", "numpy"]
    assert main(words) == 0
    assert "batch up to 4: 1, 2, 4 (rows are cut into these sizes)" in capsys.readouterr().out
    inputs = _inputs(7, 3)
    np.savez(tmp_path / "x.npz", **inputs)
    assert main(["infer", str(bundle), "--input", str(tmp_path / "x.npz"), "--output", str(tmp_path / "y.npz")]) == 0
    with np.load(tmp_path / "y.npz") as outputs:
        judge.check(dict(outputs), inputs)
    capsys.readouterr()
    assert main(["verify", str(bundle)]) == 0
    report = capsys.readouterr().out
    assert all(f"batch={size}: y" in report for size in (1, 2, 4))
    assert main(["verify", str(bundle), "--dim", "batch=3"]) == 0
    assert main(["verify", str(bundle), "--dim", "batch=5"]) == 2
    assert main(["verify", str(bundle), "--dim", "seq=3"]) == 2
    assert main(["inspect", str(bundle)]) == 0
    assert main(["inspect", str(bundle), "--memory"]) == 0


def test_a_wrong_rung_is_found(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The control of `verify`: one rung of a bundle computes something else."""
    bundle = tmp_path / "bundle"
    _compiled(model, bundle, {"batch": "<=2", "seq": 3})
    opened = open_bundle(bundle)
    rungs = [Rung(rung.sizes, _halved(rung.held) if rung.name == "1" else rung.held) for rung in opened.ladder]
    ladder = Ladder(rungs)
    files = {0: [bundle / name for name in opened.manifest.files if name.startswith("stages/")]}
    write_bundle(
        tmp_path / "wrong",
        ladder.largest.held,
        files,
        {name: array.copy() for name, array in opened.weights().items()},
        backend="numpy",
        plan=opened.plan,
        provenance=Provenance("", opened.reference),
        ladder=ladder,
    )
    assert main(["verify", str(tmp_path / "wrong")]) == 5
    assert "batch=1: y" in capsys.readouterr().out


def _halved(module: Module) -> Module:
    (graph,) = module.graphs.values()
    ops = [op.with_attrs(value=0.25) if op.kind == "const" and op.attrs["value"] == 0.5 else op for op in graph.ops]
    assert tuple(ops) != graph.ops
    return module.with_graph(replace(graph, ops=tuple(ops)))
