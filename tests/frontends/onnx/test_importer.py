"""What onnxruntime loads though it is odd: declared shapes that are out of date. Against it, each with a control."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from penstock.frontends.onnx import CannotImport, import_onnx
from penstock.support.errors import UnsupportedModel, UsageError

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


# ---------------------------------------------------------------------------------------- opsets


@pytest.mark.parametrize(
    ("opsets", "node"),
    [
        ('"com.microsoft" : 1', "y = com.microsoft.Gelu(x)"),
        ('"com.microsoft" : 1', "h = com.microsoft.Gelu(x) y = Neg(h)"),
        ('"ai.onnx.ml" : 3', "h = Neg(x) y = Relu(h)"),
    ],
)
def test_an_opset_of_another_domain_is_enough(tmp_path: Path, opsets: str, node: str) -> None:
    """Nodes of the default domain are then read in its newest opset, as in onnxruntime."""
    path = _saved(tmp_path, f"(float[2,3] x) => (float[2,3] y) {{ {node} }}", opsets)
    compare(path, {"x": draw("x", F32, (2, 3))})


def test_what_is_not_supported_of_another_domain_is_listed(tmp_path: Path) -> None:
    path = _saved(
        tmp_path,
        '(int64[2] x) => (float[2] y) { h = ai.onnx.ml.LabelEncoder<keys_int64s = [1], values_strings = ["a"]>(x) '
        "[last] y = acme.Turbo(x) }",
        '"ai.onnx.ml" : 3, "acme" : 1',
    )
    with pytest.raises(CannotImport) as caught:
        import_onnx(path)
    assert caught.value.exit_code == 3
    text = str(caught.value)
    assert "LabelEncoder_0 (ai.onnx.ml LabelEncoder): " in text
    assert "last (acme Turbo): operators of domain acme are not supported" in text


def test_a_file_without_any_opset_is_not_valid(tmp_path: Path) -> None:
    path = _saved(tmp_path, "(float[2] x) => (float[2] y) { y = Neg(x) }")
    model = onnx.load(path)
    del model.opset_import[:]
    onnx.save(model, path)
    with pytest.raises(UsageError, match="not a valid ONNX model"):
        import_onnx(path)


@pytest.mark.parametrize(("domain", "version", "only"), [("com.microsoft", 2, "1"), ("ai.onnx.ml", 6, "1 to 5")])
def test_versions_of_other_domains_are_checked(tmp_path: Path, domain: str, version: int, only: str) -> None:
    path = _saved(tmp_path, "(float[2] x) => (float[2] y) { y = Neg(x) }", f'"" : 20, "{domain}" : {version}')
    with pytest.raises(UnsupportedModel, match=f"version {version} of domain {domain} is not supported, only {only}$"):
        import_onnx(path)


# ---------------------------------------------------------------------------------------- the list of what fails


def test_nodes_that_fail_alike_share_a_line(tmp_path: Path) -> None:
    loop = (
        "Loop(n, , x)<body = b (int64 i, bool c, float[2] s) => (bool d, float[2] t) { d = Identity(c) t = Relu(s) }>"
    )
    loops = " ".join(f"l{i} = {loop}" for i in range(19))
    text = f"(float[2] x, int64 n) => (float[2] y) {{ {loops} a = acme.Turn(x) b = acme.Turn(x) y = acme.Twist(a) }}"
    with pytest.raises(CannotImport) as caught:
        import_onnx(_saved(tmp_path, text, '"" : 20, "acme" : 1'))
    rows = [line.strip() for line in caught.value.what.splitlines()]
    assert rows[0].endswith("22 places:")
    assert rows[1].startswith(
        "ai.onnx Loop: 19 nodes (Loop_0, Loop_1, Loop_2, ...): the number of iterations is computed at"
    )
    assert rows[2:] == [
        "acme Turn: 2 nodes (Turn_19, Turn_20): operators of domain acme are not supported",
        "Twist_21 (acme Twist): operators of domain acme are not supported",
    ]
