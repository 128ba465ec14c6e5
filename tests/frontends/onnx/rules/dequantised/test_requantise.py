"""QuantizeLinear behind products and sums of bytes: the bytes of onnxruntime but for a step, limits, and what is too large."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from penstock.frontends.onnx import Imported, import_onnx
from penstock.frontends.onnx.rules.dequantised import requantise

from ...cases import judge, run, write_model

RNG = np.random.default_rng(9)
SUM = "fa = DequantizeLinear(a, sa, za) fb = DequantizeLinear(b, sb, zb) {} y = QuantizeLinear(r, sy, zy)"
SCALES = {"sa": np.float32(0.031), "sb": np.float32(0.0173), "za": np.uint8(117), "zb": np.uint8(9)}
PRODUCT = (
    "f = DequantizeLinear(a, sa, za) w = DequantizeLinear(q, sq, zq) r = MatMul(f, w) y = QuantizeLinear(r, sy, zy)"
)


def _compared(
    path: Path, text: str, arrays: dict[str, np.ndarray], names: str
) -> tuple[Imported, np.ndarray, np.ndarray]:
    model = write_model(path, text, 20, {name: np.asarray(array) for name, array in arrays.items()})
    feeds = {name: np.random.default_rng(ord(name)).integers(0, 256, (40, 30)).astype(np.uint8) for name in names}
    imported = import_onnx(model)
    return imported, run(imported, feeds)[0].astype(int), judge(model, feeds)[0].astype(int)


def _sum(path: Path, relu: bool, kind: type = np.uint8) -> tuple[Imported, np.ndarray, np.ndarray]:
    body = SUM.format("p = Add(fa, fb) r = Relu(p)" if relu else "r = Add(fa, fb)")
    out = {np.uint8: "uint8", np.int8: "int8"}[kind]
    arrays = {**SCALES, "sy": np.float32(0.0307), "zy": kind(77)}
    return _compared(path, f"(uint8[40,30] a, uint8[40,30] b) => ({out}[40,30] y) {{ {body} }}", arrays, "ab")


def _kinds(imported: Imported) -> list[str]:
    return [f"{op.kind} {op.outs[0].type.dtype}" for op in imported.module.graphs["main"].ops]


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("kind", [np.uint8, np.int8])
def test_sums_of_two_tensors_are_those_of_onnxruntime_but_for_a_step(tmp_path: Path, relu: bool, kind: type) -> None:
    imported, found, expected = _sum(tmp_path / "mini.onnx", relu, kind)
    assert np.abs(found - expected).max() <= 1
    assert np.count_nonzero(found - expected) <= 0.005 * found.size
    assert (found.min(), found.max()) == (expected.min(), expected.max())
    if relu:
        assert expected.min() == 77
    assert "div f32" not in _kinds(imported)
    assert "maximum i32" in _kinds(imported)


@pytest.mark.parametrize("broken", ["zero points", "relu"])
def test_a_sum_that_is_wrong_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    limited = requantise._limited
    change = {"zero points": lambda zero, relu: (0, relu), "relu": lambda zero, relu: (zero, False)}[broken]

    def wrong(n: object, y: object, zero: int, dtype: str, *, relu: bool) -> object:
        zero, relu = change(zero, relu)
        return limited(n, y, zero, dtype, relu=relu)  # type: ignore[arg-type]

    monkeypatch.setattr(requantise, "_limited", wrong)
    _, found, expected = _sum(tmp_path / "mini.onnx", True)
    assert np.abs(found - expected).max() > 1


@pytest.mark.parametrize(("scale", "limited"), [(1e-3, True), (1e-12, False)])
def test_products_too_large_for_integers_are_limited_as_floats(tmp_path: Path, scale: float, limited: bool) -> None:
    q = RNG.integers(-64, 64, (30, 20)).astype(np.int8)
    arrays = {**SCALES, "q": q, "sq": np.float32(0.01), "zq": np.int8(0), "sy": np.float32(scale), "zy": np.uint8(100)}
    text = f"(uint8[40,30] a) => (uint8[40,20] y) {{ {PRODUCT} }}"
    imported, found, expected = _compared(tmp_path / "mini.onnx", text, arrays, "a")
    assert ("maximum i32" in _kinds(imported)) == limited
    assert np.abs(found - expected).max() <= (1 if limited else 0)
    assert {0, 255} <= set(expected.flat)
