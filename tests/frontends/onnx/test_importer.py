"""What onnxruntime loads though it is odd: declared shapes that are out of date. Against it, each with a control."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from penstock.frontends.onnx import CannotImport, import_onnx

from .cases import compare, draw, judge

F32 = np.dtype(np.float32)


def _saved(folder: Path, text: str, opsets: str = '"" : 20') -> Path:
    path = folder / "odd.onnx"
    onnx.save(onnx.parser.parse_model(f"<ir_version: 10, opset_import: [{opsets}]> g {text}"), path)
    return path


# ---------------------------------------------------------------------------------------- declared shapes


@pytest.mark.parametrize("declared", ["[3]", "[2,1]", "[]", "[1,2,3]"])
def test_an_output_shape_that_is_out_of_date_is_a_warning(tmp_path: Path, declared: str) -> None:
    declared = "" if declared == "[]" else declared
    path = _saved(tmp_path, f"(float[2] x) => (float{declared} y, float[2] z) {{ y = Neg(x) z = Exp(x) }}")
    imported = compare(path, {"x": draw("x", F32, (2,))})
    warnings = [line for line in imported.report if line.startswith("warning: ")]
    assert warnings == [
        f"warning: output y comes out as f32[2], but the model says f32{declared or '[]'}, which is out of date"
    ]


def test_shapes_in_between_may_be_out_of_date(tmp_path: Path) -> None:
    body = "{ h = Relu(x) y = If(c)<then_branch = a () => (float[2] t) <float[7] u> { u = Exp(h) t = Neg(u) }, else_branch = b () => (float[2] e) { e = Exp(h) }> }"
    path = _saved(tmp_path, f"(float[2] x, bool c) => (float[2] y) <float[9,9] h> {body}")
    for value in (True, False):
        imported = compare(path, {"x": draw("x", F32, (2,)), "c": np.array(value)})
    assert not [line for line in imported.report if line.startswith("warning: ")]


def test_an_element_type_that_is_wrong_is_an_error_in_both(tmp_path: Path) -> None:
    path = _saved(tmp_path, "(float[2] x) => (double[2] y) { y = Neg(x) }")
    with pytest.raises(CannotImport, match=r"comes out as f32\[2\], but the model says f64\[2\]"):
        import_onnx(path)
    with pytest.raises(Exception, match="Type Error"):
        judge(path, {"x": draw("x", F32, (2,))})
