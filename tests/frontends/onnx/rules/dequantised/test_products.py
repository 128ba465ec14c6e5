"""Products between DequantizeLinear and QuantizeLinear: exact sums of bytes, onnxruntime's results, and what stays in floats."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from penstock.frontends.onnx import Imported, import_onnx
from penstock.frontends.onnx.rules.dequantised import products

from ...cases import judge, run, write_model

RNG = np.random.default_rng(3)


def whole(*dims: int, kind: str = "int8") -> np.ndarray:
    # onnxruntime adds pairs of products in 16 bits on processors with AVX2 and no VNNI: these fit.
    return RNG.integers(-64, 64, dims).astype(kind)


def scales(count: int) -> np.ndarray:
    return (RNG.random(count) * 0.02 + 0.005).astype(np.float32)


SX, SY = np.float32(0.05), np.float32(0.21)
S3, S4, S6 = scales(3), scales(4), scales(6)
INPUT = "qx = QuantizeLinear(x, sx, zx) fx = DequantizeLinear(qx, sx, zx)"
OUTPUT = "qy = QuantizeLinear(r, sy, zy) y = DequantizeLinear(qy, sy, zy)"
COMMON = {"sx": SX, "sy": SY, "zx": np.uint8(121), "zy": np.uint8(3)}


@dataclass(frozen=True)
class Case:
    """A model between two quantised tensors, and the operation that its product becomes."""

    signature: str
    body: str
    arrays: dict[str, np.ndarray]
    kind: str = "matmul_bytes"


CASES = {
    "matmul": Case(
        "float[5,9] x => float[5,6] y",
        "w = DequantizeLinear<axis = 1>(q, s, z) r = MatMul(fx, w)",
        {"q": whole(9, 6), "s": S6, "z": np.zeros(6, np.int8)},
    ),
    "matmul of three dimensions, one scale": Case(
        "float[2,5,9] x => float[2,5,6] y",
        "w = DequantizeLinear(q, s, z) r = MatMul(fx, w)",
        {"q": whole(9, 6), "s": np.float32(0.01), "z": np.int8(0)},
    ),
    "gemm with a bias of whole numbers": Case(
        "float[5,9] x => float[5,4] y",
        "w = DequantizeLinear<axis = 0>(q, s, z) c = DequantizeLinear<axis = 0>(b, t) r = Gemm<transB = 1>(fx, w, c)",
        {"q": whole(4, 9), "s": S4, "z": np.zeros(4, np.int8), "b": whole(4, kind="int32") * 9, "t": SX * S4},
    ),
    "convolution": Case(
        "float[2,5,7,8] x => float[2,4,7,4] y",
        "w = DequantizeLinear<axis = 0>(q, s, z) c = DequantizeLinear<axis = 0>(b, t) "
        "p = Conv<pads = [1, 1, 1, 1], strides = [1, 2]>(fx, w, c) r = Relu(p)",
        {"q": whole(4, 5, 3, 3), "s": S4, "z": np.zeros(4, np.int8), "b": whole(4, kind="int32") * 9, "t": SX * S4},
        "conv_bytes",
    ),
    "convolution with a bias of floats": Case(
        "float[1,5,9] x => float[1,4,7] y",
        "w = DequantizeLinear<axis = 0>(q, s, z) r = Conv(fx, w, c)",
        {"q": whole(4, 5, 3), "s": S4, "z": np.zeros(4, np.int8), "c": RNG.standard_normal(4).astype(np.float32)},
        "conv_bytes",
    ),
    "depthwise": Case(
        "float[1,3,6,6] x => float[1,3,4,4] y",
        "w = DequantizeLinear<axis = 0>(q, s, z) r = Conv<group = 3>(fx, w)",
        {"q": whole(3, 1, 3, 3), "s": S3, "z": np.zeros(3, np.int8)},
        "conv",
    ),
    "gemm with a factor": Case(
        "float[5,9] x => float[5,6] y",
        "w = DequantizeLinear<axis = 1>(q, s, z) r = Gemm<alpha = 0.5>(fx, w)",
        {"q": whole(9, 6), "s": S6, "z": np.zeros(6, np.int8)},
        "matmul",
    ),
    "weights alone": Case(
        "float[5,9] x => float[5,6] y",
        "w = DequantizeLinear<axis = 1>(q, s, z) r = MatMul(x, w)",
        {"q": whole(9, 6), "s": S6, "z": np.zeros(6, np.int8)},
        "matmul",
    ),
}


def _model(path: Path, case: Case) -> tuple[Path, dict[str, np.ndarray]]:
    ins, outs = case.signature.split("=>")
    text = f"({ins}) => ({outs}) {{ {INPUT} {case.body} {OUTPUT} }}"
    arrays = {name: np.asarray(array) for name, array in {**COMMON, **case.arrays}.items()}
    model = write_model(path, text, 20, arrays)
    dims = [int(n) for n in ins[ins.index("[") + 1 : ins.index("]")].split(",")]
    return model, {"x": (np.random.default_rng(5).standard_normal(dims) * 2).astype(np.float32)}


def _kinds(imported: Imported) -> set[str]:
    return {op.kind for op in imported.module.graphs["main"].ops}


@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_onnxruntime_but_for_a_step(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    path, feeds = _model(tmp_path / "mini.onnx", case)
    imported = import_onnx(path)
    (found,), (expected,) = run(imported, feeds), judge(path, feeds)
    steps = np.rint((found - expected) / SY)
    assert np.abs(steps).max() <= 1
    assert np.count_nonzero(steps) <= 0.05 * steps.size
    assert len(np.unique(expected)) > 8, "the comparison would see little"
    kinds = _kinds(imported)
    assert case.kind in kinds
    assert len(kinds & {"matmul_bytes", "conv_bytes", "matmul", "conv"}) == 1


@pytest.mark.parametrize("name", ["matmul", "convolution"])
def test_a_zero_point_that_is_left_out_is_caught(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, feeds = _model(tmp_path / "mini.onnx", CASES[name])
    bytes_of = products._bytes_of

    def without_zero(*operands: object) -> object:
        source = bytes_of(*operands)  # type: ignore[arg-type]
        return source and (source[0], source[1], source[2] * 0)

    monkeypatch.setattr(products, "_bytes_of", without_zero)
    (found,), (expected,) = run(import_onnx(path), feeds), judge(path, feeds)
    assert np.abs(np.rint((found - expected) / SY)).max() > 1


def test_a_sum_of_bytes_is_exact_where_floats_are_not(tmp_path: Path) -> None:
    """A product of many large numbers ends in a float: it is the nearest one to the exact sum, as sums in f32 are not."""
    terms = 1200
    x = np.full((1, terms), 255, np.uint8)
    x[0, ::2] = 1
    q = np.full((terms, 1), 127, np.int8)
    q[::3] = -126
    text = f"(uint8[1,{terms}] x) => (float[1,1] y) {{ f = DequantizeLinear(x, one) w = DequantizeLinear(q, one) y = MatMul(f, w) }}"
    path = write_model(tmp_path / "mini.onnx", text, 20, {"q": q, "one": np.float32(1)})
    exact = x.astype(np.int64) @ q.astype(np.int64)
    imported = import_onnx(path)
    assert "matmul_bytes" in _kinds(imported)
    np.testing.assert_array_equal(run(imported, {"x": x})[0], exact.astype(np.float32))


def test_a_dequantised_tensor_with_other_readers_stays_beside_its_bytes(tmp_path: Path) -> None:
    text = (
        "(float[4,6] x) => (float[4,6] y) { qx = QuantizeLinear(x, sx, zx) f = DequantizeLinear(qx, sx, zx) "
        "w = DequantizeLinear(q, s, z) p = MatMul(f, w) y = Add(p, f) }"
    )
    arrays = {"q": whole(6, 6), "s": np.float32(0.01), "z": np.int8(0), "sx": SX, "zx": np.uint8(121)}
    path = write_model(tmp_path / "mini.onnx", text, 20, {name: np.asarray(array) for name, array in arrays.items()})
    feeds = {"x": RNG.standard_normal((4, 6)).astype(np.float32)}
    imported = import_onnx(path)
    np.testing.assert_allclose(run(imported, feeds)[0], judge(path, feeds)[0], rtol=1e-5, atol=1e-5)
    assert "matmul_bytes" in _kinds(imported)
