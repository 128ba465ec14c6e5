"""Elements that move between DequantizeLinear and QuantizeLinear: bytes move, and every number is that of floats."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from penstock.frontends.onnx import Imported, import_onnx
from penstock.frontends.onnx.rules.dequantised import moves

from ...cases import judge, run, write_model

RNG = np.random.default_rng(7)
INPUT = "qx = QuantizeLinear(x, s, z) fx = DequantizeLinear(qx, s, z)"
COMMON = {"s": np.float32(0.0371), "z": np.uint8(121)}


@dataclass(frozen=True)
class Case:
    """A model, the operations that it becomes with the types of their operands."""

    text: str
    dims: tuple[int, ...]
    arrays: dict[str, np.ndarray]
    kinds: frozenset[tuple[str, str]]


CASES = {
    "maxima": Case(
        f"(float[1,3,9,9] x) => (float[1,3,5,5] y) {{ {INPUT} m = MaxPool<kernel_shape = [3, 3], strides = [2, 2], "
        "pads = [1, 1, 1, 1]>(fx) qm = QuantizeLinear(m, s, z) y = DequantizeLinear(qm, s, z) }",
        (1, 3, 9, 9),
        {},
        frozenset({("max_pool", "u8")}),
    ),
    "a lookup in a table of bytes": Case(
        "(float[3,6] x, int64[3] rows) => (float[3,6] y) { t = DequantizeLinear(table, s, zt) g = Gather(t, rows) y = Add(g, x) }",
        (3, 6),
        {
            "table": RNG.integers(-128, 128, (90, 6)).astype(np.int8),
            "zt": np.int8(-3),
        },
        frozenset({("gather", "i8")}),
    ),
    "layouts between equal steps": Case(
        f"(float[2,6,4] x) => (float[6,8] y) {{ {INPUT} r = Transpose<perm = [1, 0, 2]>(fx) qr = QuantizeLinear(r, s, z) "
        "fr = DequantizeLinear(qr, s, z) t = Reshape(fr, shape) qt = QuantizeLinear(t, s, z) "
        "y = DequantizeLinear(qt, s, z) }",
        (2, 6, 4),
        {"shape": np.array([6, 8])},
        frozenset({("transpose", "f32"), ("reshape", "f32")}),
    ),
    "layouts between unequal steps": Case(
        f"(float[2,6,4] x) => (float[6,2,4] y) {{ {INPUT} r = Transpose<perm = [1, 0, 2]>(fx) "
        "qr = QuantizeLinear(r, other, z) y = DequantizeLinear(qr, other, z) }",
        (2, 6, 4),
        {"other": np.float32(0.0372)},
        frozenset({("transpose", "f32")}),
    ),
    "an unequal zero point": Case(
        f"(float[2,6] x) => (uint8[2,6] y) {{ {INPUT} y = QuantizeLinear(fx, s, other) }}",
        (2, 6),
        {"other": np.uint8(122)},
        frozenset({("div", "f32")}),
    ),
}


def _run(path: Path, case: Case) -> tuple[Imported, np.ndarray, np.ndarray]:
    arrays = {name: np.asarray(array) for name, array in {**COMMON, **case.arrays}.items()}
    model = write_model(path, case.text, 20, arrays)
    feeds = {"x": (np.random.default_rng(5).standard_normal(case.dims) * 3).astype(np.float32)}
    if "rows" in case.text:
        feeds["rows"] = np.array([89, 7, 7])
    imported = import_onnx(model)
    return imported, run(imported, feeds)[0], judge(model, feeds)[0]


def _count(imported: Imported, kind: str) -> int:
    return sum(op.kind == kind for op in imported.module.graphs["main"].ops)


@pytest.mark.parametrize("name", CASES)
def test_results_are_bitwise_those_of_onnxruntime(tmp_path: Path, name: str) -> None:
    imported, found, expected = _run(tmp_path / "mini.onnx", CASES[name])
    np.testing.assert_array_equal(found, expected)
    assert len(np.unique(expected)) > 5, "the comparison would see little"
    kinds = {(op.kind, op.ins[0].type.dtype) for op in imported.module.graphs["main"].ops if op.ins}
    assert CASES[name].kinds <= kinds


def test_equal_steps_are_taken_once(tmp_path: Path) -> None:
    equal, _, _ = _run(tmp_path / "equal.onnx", CASES["layouts between equal steps"])
    unequal, _, _ = _run(tmp_path / "unequal.onnx", CASES["layouts between unequal steps"])
    assert (_count(equal, "round"), _count(unequal, "round")) == (1, 2)


@pytest.mark.parametrize("scale", [np.float32(1e-40), np.float32(3e38)])
def test_scales_that_lose_numbers_are_kept_as_they_are(tmp_path: Path, scale: np.float32) -> None:
    text = "(uint8[300] x) => (uint8[300] y) { f = DequantizeLinear(x, s, z) y = QuantizeLinear(f, s, z) }"
    path = write_model(tmp_path / "mini.onnx", text, 20, {"s": np.asarray(scale), "z": np.asarray(np.uint8(3))})
    assert _count(import_onnx(path), "round") == 1


def test_floats_of_16_bits_lose_numbers_and_are_kept(tmp_path: Path) -> None:
    text = (
        "(uint16[300] x) => (uint16[300] y, float[300] f) { h = DequantizeLinear<output_dtype = 10>(x, s, z) "
        "y = QuantizeLinear<precision = 1>(h, s, z) f = DequantizeLinear(x, s, z) }"
    )
    arrays = {"s": np.asarray(np.float32(0.3)), "z": np.asarray(np.uint16(0))}
    imported = import_onnx(write_model(tmp_path / "mini.onnx", text, 23, arrays))
    x = np.arange(9000, 9300).astype(np.uint16)
    again, floats = run(imported, {"x": x})
    assert not np.array_equal(again, x)
    np.testing.assert_array_equal(floats, x.astype(np.float32) * np.float32(0.3))


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int16, np.uint16])
def test_every_number_comes_back_from_its_float(kind: type) -> None:
    numbers = np.arange(np.iinfo(kind).min, np.iinfo(kind).max + 1).astype(np.float32)
    for scale in np.exp(np.random.default_rng(1).uniform(-80, 76, 200)).astype(np.float32):
        np.testing.assert_array_equal(np.rint(numbers * scale / scale), numbers)


def test_a_zero_point_that_is_not_compared_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moves, "_is_same", lambda one, other: True)
    _, found, expected = _run(tmp_path / "mini.onnx", CASES["an unequal zero point"])
    assert np.abs(found.astype(int) - expected).max() == 1
