"""Verdicts on models whose results rounding moves: what is right passes, what is wrong fails, and the rest is told so."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx.parser
import onnxruntime
import pytest

from penstock.backends.bundle.tensor_file import write_tensors
from penstock.commands.parser import main
from penstock.planning.model import from_onnx
from penstock.support.errors import VerifyError
from penstock.verification import checks
from penstock.verification.roundings import Distance
from penstock.verification.verdicts import FAILED, OK, UNTOLD, Comparison, report

from .families import write_family


def written(folder: Path, text: str) -> Path:
    path = folder / "m.onnx"
    path.write_bytes(onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> {text}').SerializeToString())
    return path


# Large terms that cancel: they are exact, as is their sum in float64, but not as onnxruntime adds them up.
CANCELLING = """m (float[4, 1000] x) => (float[4, 1] y) <float large = {1048576}> {
    a = Mul(x, large)  b = Neg(a)  c = Concat<axis = 1>(a, x, b)  ones = Constant<value_ints = [1]>()
    y = ReduceSum(c, ones) }"""


def verified(path: Path, *more: str) -> int:
    return main(["verify", str(path), "--backend", "numpy", *more])


def with_other_weights(path: Path, patch: pytest.MonkeyPatch, name: str, factor: float) -> None:
    """Let the import read another first number of a weight than the file has."""
    model = from_onnx(path)
    array = model.imported.weights[name].copy()
    array.reshape(-1)[0] *= factor
    wrong = replace(model, imported=replace(model.imported, weights={**model.imported.weights, name: array}))
    patch.setattr(checks, "from_onnx", lambda *given, **named: wrong)


@pytest.mark.parametrize(
    ("family", "weight", "factor", "verdict"),
    [
        ("bytes", "head.weight", -3.0, "ok"),
        ("cancelling", "onnx::MatMul_10", -3.0, "ok"),
        ("iterated", "map.weight", -3.0, "ok"),
        ("positions", "rate", -3.0, "ok"),
        ("narrow", "inner.weight", -300.0, "cannot tell"),
    ],
)
def test_what_rounding_does_is_no_fault(
    family: str,
    weight: str,
    factor: float,
    verdict: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """onnxruntime is off by more than 1e-5 of float64 in each. The control is an import with one other weight."""
    path, _ = write_family(family, 0, tmp_path)
    assert verified(path) == 0
    told = capsys.readouterr()
    assert re.search(rf"interpreter: \S+ +\S+e-0[2-5] +\S+ +{verdict}\n", told.out)
    assert ("cannot tell on these inputs" in told.out) == (verdict == "cannot tell")
    assert verified(path, "--bisect", "--repro", "none") == 0
    names = [name for name in from_onnx(path).imported.weights if from_onnx(path).module.vars[name].type.dtype == "f32"]
    with_other_weights(path, monkeypatch, weight if weight in names else names[0], factor)
    capsys.readouterr()
    assert verified(path) == 5
    assert "FAILED" in capsys.readouterr().out


def test_bisect_does_not_blame_the_import_for_sums_that_cancel(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """onnxruntime itself is the one that is far from float64. The control is an import that adds something else."""
    path = written(tmp_path, CANCELLING)
    x = np.random.default_rng(0).standard_normal((4, 1000)).astype(np.float32)
    np.savez(tmp_path / "x.npz", x=x)
    of_onnxruntime = onnxruntime.InferenceSession(path).run(None, {"x": x})[0]
    assert checks.relative_error(of_onnxruntime, x.astype(np.float64).sum(1, keepdims=True)) > 1e-4
    assert verified(path, "--bisect", "--repro", "none") == 0
    assert verified(path, "--bisect", "--repro", "none", "--data", str(tmp_path / "x.npz")) == 0
    assert verified(path) == 0
    from penstock.frontends.onnx.table import RULES

    capsys.readouterr()
    monkeypatch.setitem(RULES, "Neg", lambda n: n.emit("neg", n.emit("mul", n.value(), 1.01)))
    assert verified(path, "--bisect", "--repro", "none") == 5
    assert "first wrong: the import" in capsys.readouterr().out


def test_nothing_finite_is_nothing_to_tell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The logarithm of what is negative. With other inputs it can be told; one that is not finite elsewhere is wrong."""
    path = written(tmp_path, "m (float[4] x) => (float[4] y) { p = Abs(x)  n = Neg(p)  y = Log(n) }")
    assert verified(path) == 0
    assert "no element of them is finite" in capsys.readouterr().out
    assert verified(path, "--bisect", "--repro", "none") == 0
    assert "cannot tell on these inputs: no element of %y of microbatch 0 is finite" in capsys.readouterr().out
    path = written(tmp_path, "m (float[4] x) => (float[4] y) { y = Reciprocal(x) }")
    np.savez(tmp_path / "x.npz", x=np.array([0.5, 1, 2, 4], np.float32))
    assert verified(path, "--data", str(tmp_path / "x.npz")) == 0
    assert "cannot tell" not in capsys.readouterr().out


def test_a_wrong_import_that_rounding_moves_more_than_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Columns are standardised. An import that takes almost nothing for their scale leaves but roundings, of which the
    outputs say nothing; a value before them does. The control is the right import."""
    path = written(
        tmp_path,
        """m (float[8, 16] x) => (float[8, 16] y) <float[16] w = {2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3}, float c = {100}> {
            t = Mul(x, w)  u = Add(t, c)  ones = Constant<value_ints = [1]>()  m = ReduceMean<axes = [1]>(u)
            d = Sub(u, m)  q = Mul(d, d)  v = ReduceMean<axes = [1]>(q)  s = Sqrt(v)  y = Div(d, s) }""",
    )
    assert verified(path) == 0
    assert "cannot tell" not in capsys.readouterr().out
    model = from_onnx(path)
    assert list(model.imported.weights) == ["w"]
    weights = {"w": model.imported.weights["w"][::-1] * np.float32(1e-6)}
    wrong = replace(model, imported=replace(model.imported, weights=weights))
    monkeypatch.setattr(checks, "from_onnx", lambda *given, **named: wrong)
    assert verified(path) == 5
    assert "interpreter: y: %t on the way to it is off by" in capsys.readouterr().out


def test_verdicts_and_their_words(capsys: pytest.CaptureFixture[str]) -> None:
    small, large = Distance(1e-4, 1e-5), Distance(0.3, 0.1)
    right = Comparison("right", small, 1e-5, limit=Distance(2e-4, 2e-5))
    wrong = Comparison("wrong", small, 1e-5, limit=Distance(2e-4, 5e-6))
    untold = Comparison("untold", small, 1e-5, limit=large)
    near = Comparison("near", Distance(1e-6, 1e-7), 1e-5)
    assert [row.verdict for row in (right, wrong, untold, near)] == [OK, FAILED, UNTOLD, OK]
    assert report([right, untold, near]) == 0
    told = capsys.readouterr().out
    assert (
        "cannot tell on these inputs: 1 of 3 comparisons (untold), as rounding alone may change them by 1.0e-01" in told
    )
    assert "--data FILE" in told
    with pytest.raises(VerifyError, match="1 of 2 comparisons are off by more than is allowed: wrong"):
        report([right, wrong])
    assert "too many elements are off" in capsys.readouterr().out
    # A result is wrong in whatever company, and nan is never right.
    with pytest.raises(VerifyError):
        report([untold, wrong])
    assert Comparison("nan", Distance(float("nan"), float("nan")), 1e-5, limit=large).verdict == FAILED
    assert Comparison("elsewhere finite", Distance(float("inf"), float("inf")), 1e-5, limit=large).verdict == FAILED


# ------------------------------------------------------------------------------------------------ data


def test_data_of_every_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The errors of a run with data are those of onnxruntime for the same arrays: with other arrays there are others."""
    path = written(tmp_path, "m (float[4, 3] x, float[4, 3] b) => (float[4, 3] y) { t = Mul(x, b)  y = Sin(t) }")
    source = np.random.default_rng(0)
    arrays = {name: 10 * source.random((4, 3)).astype(np.float32) for name in "xb"}
    np.savez(tmp_path / "d.npz", **arrays)
    (tmp_path / "folder").mkdir()
    for name, array in arrays.items():
        np.save(tmp_path / "folder" / f"{name}.npy", array)
    write_tensors(tmp_path / "d.safetensors", arrays)
    write_tensors(tmp_path / "repro.safetensors", {f"%{name}": array[None] for name, array in arrays.items()})
    np.savez(tmp_path / "more.npz", **{name: np.concatenate([array, array + 1]) for name, array in arrays.items()})
    exact = np.sin(arrays["x"].astype(np.float64) * arrays["b"])
    rounded = onnxruntime.InferenceSession(path).run(None, arrays)[0]
    expected = f"{checks.relative_error(rounded, exact):.2e}"
    named = ",".join(f"{name}={tmp_path / 'folder' / name}.npy" for name in "xb")
    for data in ("d.npz", "folder", "d.safetensors", "repro.safetensors", "more.npz", named):
        assert verified(path, "--data", data if "=" in data else str(tmp_path / data)) == 0
        assert f"interpreter: y  {expected}" in capsys.readouterr().out
    assert verified(path) == 0
    assert expected not in capsys.readouterr().out
    np.savez(tmp_path / "bad.npz", x=arrays["x"], c=arrays["b"])
    assert verified(path, "--data", str(tmp_path / "bad.npz")) == 2
    told = capsys.readouterr().err
    assert "b: missing" in told
    assert "c: the model has no such input" in told


def test_data_of_a_bundle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The mean squared error of given inputs and targets, by NumPy. The control is a run with drawn ones."""
    path = written(tmp_path, "m (float[2, 3] x) => (float[2, 3] y) <float[3, 3] w = {1, 2, 3, 4, 5, 6, 7, 8, 9}> { y = MatMul(x, w) }")  # fmt: skip
    assert main(["compile", str(path), "--loss", "mse", "--backend", "numpy", "-o", str(tmp_path / "b")]) == 0
    x, w = np.ones((2, 3), np.float32), np.arange(1, 10, dtype=np.float32).reshape(3, 3)
    names = [v.name for v in checks.open_bundle(tmp_path / "b").module.data_inputs]
    np.savez(tmp_path / "d.npz", **{name: x if name == "x" else np.zeros((2, 3), np.float32) for name in names})
    capsys.readouterr()
    assert main(["verify", str(tmp_path / "b"), "--steps", "1", "--data", str(tmp_path / "d.npz")]) == 0
    loss = f"loss {np.square(x @ w).mean():.6f}"
    assert loss in capsys.readouterr().out
    assert main(["verify", str(tmp_path / "b"), "--steps", "1"]) == 0
    assert loss not in capsys.readouterr().out
