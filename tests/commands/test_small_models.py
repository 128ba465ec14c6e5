"""The command line over small models: settings of files, 16 bits, inference, and what is refused before any work."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from safetensors.numpy import load_file

from penstock.models import write_gpt, write_mlp

from .calls import call


def test_training_settings_come_from_a_file_and_flags_win(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_mlp(tmp_path / "m.onnx", [4, 8, 3], 2)
    (tmp_path / "t.toml").write_text(
        'loss = "cross_entropy"\nmicrobatches = 2\n[optimizer]\nkind = "momentum"\nlr = 0.5\n'
    )
    assert call("plan", tmp_path / "m.onnx", "--train", tmp_path / "t.toml", "--lr", "0.25", "--json") == 0
    pipeline = json.loads(capsys.readouterr().out)["pipeline"]
    assert "kind=momentum,lr=0.25" in pipeline
    assert "autodiff{microbatches=2}" in pipeline


def test_the_loss_of_a_flag_is_enough_beside_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_mlp(tmp_path / "m.onnx", [4, 8, 3], 2)
    (tmp_path / "t.toml").write_text("microbatches = 2\n")
    assert call("plan", tmp_path / "m.onnx", "--train", tmp_path / "t.toml", "--json") == 2
    assert "loss is missing" in capsys.readouterr().err
    assert call("plan", tmp_path / "m.onnx", "--train", tmp_path / "t.toml", "--loss", "mse", "--json") == 0
    assert "autodiff{microbatches=2}" in json.loads(capsys.readouterr().out)["pipeline"]


def test_a_bundle_in_bf16_trains_and_keeps_f32_masters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "compile",
        write_gpt(tmp_path / "gpt.onnx", layers=2, width=16, heads=2, vocab=20, positions=6),
        "--devices",
        "2",
        "--dim",
        "batch=2",
        "--loss",
        "cross_entropy",
        "--backend",
        "numpy",
    ]
    assert call(*words, "--schedule", "2bw", "--microbatches", "2", "--precision", "bf16", "-o", tmp_path / "low") == 0
    capsys.readouterr()
    assert call("inspect", tmp_path / "low") == 0
    edges = [line for line in capsys.readouterr().out.splitlines() if line[1:2] == ">"]
    assert edges
    assert all(" bf16[" in line and " f32[" not in line for line in edges)
    assert call("verify", tmp_path / "low", "--steps", "2") == 0
    said = capsys.readouterr()
    assert "unit roundoff" in said.err
    # Control: held to the tolerance of f32, the same losses do not pass.
    assert call("verify", tmp_path / "low", "--steps", "2", "--tolerance", "1e-7") == 5
    assert call("run", tmp_path / "low", "--steps", "2", "--checkpoint", tmp_path / "ckpt") == 0
    files = (tmp_path / "ckpt" / "step-000002").glob("*.safetensors")
    kept = {name: array.dtype for file in files for name, array in load_file(file).items()}
    assert {"wte.weight", "lm_head.weight", "h.0.ln_1.bias"} < set(kept)
    assert {dtype for name, dtype in kept.items() if name not in ("causal", "step")} == {np.dtype(np.float32)}


def test_f16_trains_and_infers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_mlp(tmp_path / "m.onnx", [4, 8, 3], batch=2)
    assert (
        call(
            "compile",
            tmp_path / "m.onnx",
            "--loss",
            "cross_entropy",
            "--precision",
            "f16",
            "--backend",
            "numpy",
            "-o",
            tmp_path / "t",
        )
        == 0
    )
    assert call("run", tmp_path / "t", "--steps", "3", "--metrics", tmp_path / "m.jsonl") == 0
    steps = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert [type(step["grad_norm"]) for step in steps] == [float] * 3
    capsys.readouterr()
    assert call("compile", tmp_path / "m.onnx", "--precision", "f16", "--backend", "numpy", "-o", tmp_path / "b") == 0
    assert call("verify", tmp_path / "b") == 0
    np.savez(tmp_path / "x.npz", x=np.ones((2, 4), np.float32))
    assert call("infer", tmp_path / "b", "--input", tmp_path / "x.npz", "--output", tmp_path / "y.npz") == 0
    assert np.load(tmp_path / "y.npz")["y"].dtype == np.float32


def test_a_forward_bundle_infers(tmp_path: Path) -> None:
    import onnxruntime

    import penstock as ps

    write_mlp(tmp_path / "m.onnx", [4, 8, 3], 2)
    assert call("compile", tmp_path / "m.onnx", "-o", tmp_path / "b", "--devices", "2", "--backend", "numpy") == 0
    x = np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32)
    with ps.open(tmp_path / "b") as job:
        found = job.infer({"x": x})["y"]
    np.savez(tmp_path / "x.npz", x=x)
    assert call("infer", tmp_path / "b", "--input", tmp_path / "x.npz", "--output", tmp_path / "y.npz") == 0
    np.testing.assert_array_equal(np.load(tmp_path / "y.npz")["y"], found)
    np.savez(tmp_path / "z.npz", z=x)
    assert call("infer", tmp_path / "b", "--input", tmp_path / "z.npz", "--output", tmp_path / "y.npz") == 2
    assert (tmp_path / "y.npz").stat().st_size > 0, "what was there stays when the work fails"
    assert call("infer", tmp_path / "b", "--input", tmp_path / "z.npz", "--output", tmp_path / "new.npz") == 2
    assert not (tmp_path / "new.npz").exists()
    session = onnxruntime.InferenceSession(str(tmp_path / "m.onnx"), providers=["CPUExecutionProvider"])
    expected = np.concatenate([session.run(None, {"x": x[i : i + 2]})[0] for i in (0, 2, 4)])
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_all_unsupported_nodes_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nodes = [
        helper.make_node("NonZero", ["x"], ["a"], name="first"),
        helper.make_node("Relu", ["x"], ["b"], name="fine"),
        helper.make_node("Unique", ["b"], ["c"], name="second"),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 2])
    outs = [
        helper.make_tensor_value_info("a", TensorProto.INT64, ["r", "n"]),
        helper.make_tensor_value_info("c", TensorProto.FLOAT, ["u"]),
    ]
    model = helper.make_model(
        helper.make_graph(nodes, "g", [x], outs), opset_imports=[helper.make_opsetid("", 20)], ir_version=10
    )
    onnx.save_model(model, str(tmp_path / "m.onnx"))
    assert call("compile", tmp_path / "m.onnx", "-o", tmp_path / "b") == 3
    message = capsys.readouterr().err
    for part in ("first", "NonZero", "second", "Unique"):
        assert part in message
    assert "fine" not in message
    assert not (tmp_path / "b").exists()


def test_an_output_that_cannot_be_written_is_noticed_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    np.savez(tmp_path / "x.npz", x=np.zeros((2, 4), np.float32))
    monkeypatch.setattr("penstock.runtime.job.job.open", lambda *given, **named: pytest.fail("the work began"))
    for output in (tmp_path / "x.npz" / "y.npz", tmp_path):
        assert call("infer", tmp_path / "b", "--input", tmp_path / "x.npz", "--output", output) == 2
        assert "cannot write the outputs" in capsys.readouterr().err


@pytest.mark.parametrize("seed", ["-1", "x", str(2**63), "1.5"])
@pytest.mark.parametrize("command", ["run", "verify"])
def test_a_seed_out_of_range_is_refused(command: str, seed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(command, "bundle", f"--seed={seed}") == 2
    assert "expected a whole number from 0" in capsys.readouterr().err
