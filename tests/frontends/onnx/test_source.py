"""Files whose nodes are not in order, against onnxruntime on the file or on its ordered form; circles; and a control."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from penstock.frontends.onnx import import_onnx, source
from penstock.frontends.onnx.structure import save_structure
from penstock.support.errors import PenstockError, UsageError

from .cases import compare, draw, judge, run

F32 = np.dtype(np.float32)
HEADER = '<ir_version: 10, opset_import: ["" : 20]> g '
GRAPH = "(float[2,3] x, float[3] w) => (float[2,3] y) { y = Add(c, a) c = Mul(b, a) [named] b = Exp(a) a = Add(x, w) }"
BRANCHES = """(float[2] x, bool c) => (float[2] y) {
  y = If(c)<then_branch = a () => (float[2] t) { t = Neg(h) h = Relu(z) }, else_branch = b () => (float[2] e) { e = Neg(z) }>
  z = Exp(x) }"""
LOOP = """(float[2] x) => (float[2] y) { y = Loop(n, , x)<body = b (int64 i, bool c, float[2] s) => (bool d, float[2] t) {
  t = If(m)<then_branch = p () => (float[2] u) { u = Neg(k) k = Mul(s, x) }, else_branch = q () => (float[2] v) { v = Relu(s) }>
  d = Identity(c) m = Constant<value = bool {1}>() }>
  n = Constant<value = int64 {3}>() }"""
FUNCTION = HEADER.replace('["" : 20]', '["" : 20, "f" : 1]') + (
    '(float[2] x) => (float[2] y) { y = f.twice(x) } <domain: "f", opset_import: ["" : 20]> twice (p) => (q) { q = Neg(h) h = Exp(p) }'
)


def _saved(folder: Path, text: str) -> Path:
    path = folder / "mixed.onnx"
    onnx.save(onnx.parser.parse_model(text if text.startswith("<") else HEADER + text), path)
    return path


def test_nodes_out_of_order_compute_what_onnxruntime_computes(tmp_path: Path) -> None:
    path = _saved(tmp_path, GRAPH)
    imported = compare(path, {"x": draw("x", F32, (2, 3)), "w": draw("w", F32, (3,))})
    assert "warning: nodes that lie before those whose results they take, put in order: 3" in imported.report
    # Nodes without a name go by their place in the file.
    assert [op.loc for op in imported.module.graphs["main"].ops] == ["Add_3", "named", "Mul_1", "Add_0"]


@pytest.mark.parametrize("text", [BRANCHES, LOOP, FUNCTION], ids=["branches", "loop", "function"])
def test_nodes_inside_of_nodes_and_functions_are_ordered(tmp_path: Path, text: str) -> None:
    """Against the structure that the import keeps: onnxruntime itself orders the nodes of the model's graph only."""
    path = _saved(tmp_path, text)
    imported = import_onnx(path)
    feeds = {"x": draw("x", F32, (2,))} | ({"c": np.array(True)} if text is BRANCHES else {})
    with pytest.raises(Exception, match=r"sorted|Error"):
        judge(path, feeds)
    assert imported.structure is not None
    ordered = save_structure(imported.structure, tmp_path, imported.weights)[0]
    onnx.checker.check_model(str(ordered))
    np.testing.assert_allclose(run(imported, feeds)[0], judge(ordered, feeds)[0], rtol=1e-6)


def test_files_in_order_are_not_touched(tmp_path: Path) -> None:
    text = "(float[2] x) => (float[2] y) { a = Exp(x) b = Neg(x) y = Add(a, b) }"
    path = _saved(tmp_path, text)
    file = source.OnnxFile(path)
    assert file.moved == 0
    assert file.model == onnx.load(path)
    assert not any("order" in line for line in import_onnx(path).report)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "(float[2] x) => (float[2] y) { y = Neg(c) [first] a = Add(x, c) b = Exp(a) c = Relu(b) }",
            r"in a circle: Relu_3 \(Relu\), Exp_2 \(Exp\), first \(Add\)$",
        ),
        ("(float[2] x) => (float[2] y) { y = Add(x, y) }", r"in a circle: Add_0 \(Add\)$"),
        (
            "(float[2] x, bool c) => (float[2] y) { y = If(c)<then_branch = a () => (float[2] t) { t = Neg(h) h = Relu(t) }, "
            "else_branch = b () => (float[2] e) { e = Neg(x) }> }",
            r"in a circle: If_0/Neg_0 \(Neg\), If_0/Relu_1 \(Relu\)$",
        ),
        (
            "(float[2] x, bool c) => (float[2] y) { h = Neg(y) y = If(c)<then_branch = a () => (float[2] t) { t = Neg(h) }, "
            "else_branch = b () => (float[2] e) { e = Neg(x) }> }",
            r"in a circle: Neg_0 \(Neg\), If_1 \(If\)$",
        ),
    ],
)
def test_a_circle_names_its_nodes(tmp_path: Path, text: str, said: str) -> None:
    path = _saved(tmp_path, text)
    with pytest.raises(UsageError, match=said):
        import_onnx(path)
    with pytest.raises(Exception, match=r"acyclic|sorted"):
        judge(path, {"x": draw("x", F32, (2,)), "c": np.array(True)})


def test_a_name_that_nobody_makes_stays_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a valid ONNX model"):
        import_onnx(_saved(tmp_path, "(float[2] x) => (float[2] y) { y = Add(h, nobody) h = Exp(x) }"))


def test_without_the_order_the_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _saved(tmp_path, GRAPH)
    monkeypatch.setattr(source, "put_in_order", lambda model, where: 0)
    with pytest.raises(PenstockError, match="topologically sorted"):
        import_onnx(path)
