"""`penstock infer` cuts a file into requests, gives every sample its outputs in order, and says how fast that was. Nothing is asserted of times."""

from __future__ import annotations

import json

import numpy as np
import onnxruntime
import pytest

import penstock as ps
from penstock.commands.parser import main
from penstock.models import write_mlp


@pytest.fixture(scope="module")
def mlp(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mlp")
    path = write_mlp(folder / "m.onnx", (6, 5, 4), None, seed=1)
    plan = ps.plan(ps.from_onnx(path, dims={"batch": 4}), ps.Cluster.local(2))
    return path, ps.compile(plan, folder / "bundle", backend="numpy")


def test_a_file_in_requests_equals_onnxruntime_and_is_measured(mlp, tmp_path, capsys):
    path, bundle = mlp
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (input_,), (output,) = session.get_inputs(), session.get_outputs()
    x = np.random.default_rng(0).standard_normal((23, 6)).astype(np.float32)
    np.savez(tmp_path / "x.npz", **{input_.name: x})
    words = ["--data", str(tmp_path / "x.npz"), "--output", str(tmp_path / "y.npz")]
    assert main(["infer", str(bundle), *words, "--request", "3", "--json"]) == 0
    captured = capsys.readouterr()
    (reference,) = session.run(None, {input_.name: x})
    with np.load(tmp_path / "y.npz") as found:
        np.testing.assert_allclose(found[output.name], reference, rtol=1e-5, atol=1e-6)
    said = json.loads(captured.out)
    assert (said["requests"], said["samples"], said["samples_per_request"], said["microbatch"]) == (8, 23, 3, 4)
    assert said["samples_per_s"] == pytest.approx(23 / said["seconds"])
    assert said["latency_s"].keys() == {"p50", "p90", "p99", "max"}
    assert sorted(said["latency_s"].values()) == list(said["latency_s"].values())
    assert "sample 23/23" in captured.err
    assert "8 requests of 3 samples (throughput): 23 samples in" in captured.err


def test_synthetic_data_one_request_at_a_time(mlp, capsys):
    assert main(["infer", str(mlp[1]), "--data", "synthetic", "--samples", "9", "--mode", "latency"]) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "3 requests of 4 samples (latency): 9 samples in" in captured.err


@pytest.mark.parametrize("mode", ["throughput", "latency"])
def test_one_rank_answers_without_a_worker_as_two_do_with_workers(mode, mlp, tmp_path, capsys, monkeypatch):
    path, several = mlp
    plan = ps.plan(ps.from_onnx(path, dims={"batch": 4}), ps.Cluster.local(1))
    bundle = ps.compile(plan, tmp_path / "bundle", backend="numpy")
    (input_,) = plan.module.data_inputs
    np.savez(tmp_path / "x.npz", **{input_.name: np.random.default_rng(0).standard_normal((23, 6)).astype(np.float32)})
    np.savez(tmp_path / "bad.npz", **{input_.name: np.zeros((4, 7), np.float32)})

    def answers(bundle, name):
        words = ["--mode", mode, "--request", "3", "--json", "--output", str(tmp_path / name)]
        codes = [main(["infer", str(bundle), "--data", str(tmp_path / data), *words]) for data in ("bad.npz", "x.npz")]
        said = capsys.readouterr()
        counts = {key: value for key, value in json.loads(said.out).items() if isinstance(value, int | str)}
        refused = [line for line in said.err.splitlines() if "shape is" in line]
        with np.load(tmp_path / name) as arrays:
            return codes, counts, refused, dict(arrays)

    codes, counts, refused, expected = answers(several, "several.npz")
    assert codes == [2, 0]
    assert refused
    monkeypatch.setattr("penstock.runtime.job.ranks.Workers", lambda *given: pytest.fail("started workers"))
    *others, arrays = answers(bundle, "one.npz")
    assert others == [codes, counts, refused]
    assert arrays.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(arrays[name], array, rtol=1e-5, atol=1e-6)
    # The control: two ranks have workers.
    with pytest.raises(pytest.fail.Exception, match="started workers"):
        answers(several, "none.npz")


def test_what_cannot_be_meant_starts_nothing(mlp, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("penstock.runtime.job.ranks.Workers", lambda *given: pytest.fail("started workers"))
    np.savez(tmp_path / "x.npz", x=np.zeros(3))
    words = ["--data", str(tmp_path / "x.npz"), "--samples", "3", "--output", str(tmp_path / "x.npz" / "y")]
    assert main(["infer", str(mlp[1]), *words]) == 2
    said = capsys.readouterr().err
    assert "cannot write the outputs to" in said
    assert "--samples is for --data synthetic" in said
    assert main(["infer", str(mlp[1]), "--data", str(tmp_path / "x.npz")]) == 2
    assert "add --output, or --json" in capsys.readouterr().err
