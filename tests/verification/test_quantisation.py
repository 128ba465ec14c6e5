"""Quantised results: their steps are named, numbers half-way between two are no fault, and a shifted zero point is one."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
from onnx import numpy_helper

from penstock.commands.parser import main
from penstock.planning.model import Model, from_onnx
from penstock.verification import checks
from penstock.verification.quantisation import step_values, told_steps

# The means of four numbers with one scale often lie half-way between two steps: the order of the sum decides.
POOL = """<ir_version: 8, opset_import: ["" : 17]> pool (float[2, 8, 14, 14] x) => (float[2, 8, 7, 7] y)
<float s = {0.0157}, uint8 z = {121}> {
    a = QuantizeLinear(x, s, z)  b = DequantizeLinear(a, s, z)
    c = AveragePool<kernel_shape = [2, 2], strides = [2, 2]>(b)
    d = QuantizeLinear(c, s, z)  y = DequantizeLinear(d, s, z)
}"""

# A number with a scale and 127.5 more of these scales: always half-way between two steps. Both terms are bytes times a
# factor, 1 and 0.5, as onnxruntime's optimiser and the import compute them. In floats the number 1 is rounded first.
SUM = """<ir_version: 8, opset_import: ["" : 17]> sum (float[8, 96] x) => (float[8, 96] y)
<float s = {0.007843137718737125}, uint8 z = {128}, uint8 none = {0},
 float one = {1.0}, float u = {0.003921568859368563}> {
    a = QuantizeLinear(x, s, z)  b = DequantizeLinear(a, s, z)
    c = QuantizeLinear(one, u, none)  d = DequantizeLinear(c, u, none)
    e = Add(b, d)  f = QuantizeLinear(e, s, none)  y = DequantizeLinear(f, s, none)
}"""


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    path = tmp_path / "pool.onnx"
    path.write_bytes(onnx.parser.parse_model(POOL).SerializeToString())
    return path


def shifted(path: Path) -> Path:
    """Write the same model with another zero point at its end: all results are a step off."""
    model = onnx.load(path)
    model.graph.initializer.append(numpy_helper.from_array(np.uint8(122), "other"))
    model.graph.node[3].input[2] = "other"
    target = path.with_name("shifted.onnx")
    onnx.save(model, target)
    return target


def test_half_way_numbers_are_no_fault(
    pool: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """onnxruntime says how many elements differ from float64. The control is an import of the shifted model, where as
    large a difference is in all elements."""
    for seed in range(5):
        words = ["verify", str(pool), "--backend", "numpy", "--seed", str(seed)]
        assert main(words) == 0
        told = capsys.readouterr().out
        many = int(re.search(r"interpreter: y: differs by one step of quantisation, 0\.016, in (\d+) of 784 elements", told)[1])  # type: ignore[index]  # fmt: skip
        assert 1 <= many <= 200
        assert "cannot tell" not in told
        wrong = from_onnx(shifted(pool))
        with monkeypatch.context() as patch:
            patch.setattr(checks, "from_onnx", lambda *given, wrong=wrong, **named: wrong)
            assert main(words) == 5
        told = capsys.readouterr().out
        assert "too many elements are off" in told
        assert re.search(r"interpreter: y +\S+ +\S+ +FAILED", told)
        assert main([*words, "--bisect", "--repro", "none"]) == 0
        capsys.readouterr()


def test_sums_that_all_fall_to_one_side_are_those_of_the_optimiser(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No noise moves bytes times 1. The control is an import with another zero point, which neither run gives."""
    path = tmp_path / "sum.onnx"
    path.write_bytes(onnx.parser.parse_model(SUM).SerializeToString())
    words = ["verify", str(path), "--backend", "numpy"]
    assert main(words) == 0
    told = capsys.readouterr().out
    assert "as onnxruntime with its optimiser; differs by one step of quantisation" in told
    assert main([*words, "--bisect", "--repro", "none"]) == 0
    assert "the import rounds as onnxruntime" in capsys.readouterr().out
    other = tmp_path / "other.onnx"
    text = SUM.replace("QuantizeLinear(x, s, z)", "QuantizeLinear(x, s, more)").replace(
        "float one", "uint8 more = {129}, float one"
    )
    other.write_bytes(onnx.parser.parse_model(text).SerializeToString())
    wrong = from_onnx(other)
    monkeypatch.setattr(checks, "from_onnx", lambda *given, **named: wrong)
    assert main(words) == 5
    assert re.search(r"interpreter: y +\S+ +(\S+ +)?FAILED", capsys.readouterr().out)


def test_the_judge_is_onnxruntime_without_its_optimiser(pool: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its fusions compute a mean of integers, and differ by a step from its own results without them."""
    x = np.random.default_rng(0).standard_normal((2, 8, 14, 14)).astype(np.float32)
    np.savez(pool.with_name("x.npz"), x=x)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    plain, fused = (
        onnxruntime.InferenceSession(pool, given).run(None, {"x": x})[0]
        for given in (options, onnxruntime.SessionOptions())
    )
    many = int((np.abs(plain - fused) > 0.01).sum())
    assert many
    assert main(["verify", str(pool), "--backend", "numpy", "--data", str(pool.with_name("x.npz"))]) == 0
    assert (
        f"onnxruntime with its optimiser differs by one step of quantisation, 0.016, in {many} of 784"
        in capsys.readouterr().err
    )


def test_steps_are_counted() -> None:
    exact = np.zeros((4, 5))
    other = exact.copy()
    other[1, 2], other[3, 4] = 0.25, -0.5
    assert (
        told_steps(other, exact, np.array(0.25))
        == "differs by up to 2 steps of quantisation, 0.25, in 2 of 20 elements"
    )
    assert (
        told_steps(other[:2], exact[:2], np.array(0.25))
        == "differs by one step of quantisation, 0.25, in 1 of 10 elements"
    )
    assert told_steps(exact, exact, np.array(0.25)) == ""
    # The controls: what is not whole steps apart, has another shape, or no steps.
    assert told_steps(other + 0.1, exact, np.array(0.25)) == ""
    assert told_steps(other[:3], exact, np.array(0.25)) == ""
    assert told_steps(other, exact, np.zeros(())) == ""


def test_results_in_steps_are_known(tmp_path: Path) -> None:
    def steps(body: str, kind: str) -> list[object]:
        text = f"""<ir_version: 8, opset_import: ["" : 17]> m (float[4, 6] x) => ({kind} y)
            <float s = {{0.5}}, uint8 z = {{3}}> {{ {body} }}"""
        path = tmp_path / "m.onnx"
        path.write_bytes(onnx.parser.parse_model(text).SerializeToString())
        model: Model = from_onnx(path)
        return [None if v is None else v.type.dims for v in step_values(model.module.graphs["main"]).values()]

    assert steps("q = QuantizeLinear(x, s, z)  d = DequantizeLinear(q, s, z)  y = Transpose(d)", "float[6, 4]") == [()]
    assert steps("y = QuantizeLinear(x, s, z)", "uint8[4, 6]") == [None]
    assert steps("q = QuantizeLinear(x, s, z)  d = DequantizeLinear(q, s, z)  y = Tanh(d)", "float[4, 6]") == []
    assert steps("y = Mul(x, s)", "float[4, 6]") == []
