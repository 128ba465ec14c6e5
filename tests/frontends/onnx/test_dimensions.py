"""Tests of symbolic dimensions: names, expressions of others by Python's own arithmetic, and sizes that do not fit."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from penstock.commands.parser import main
from penstock.frontends.expressions import expression_of, with_derived
from penstock.frontends.onnx import CannotImport, import_onnx, open_dimensions
from penstock.support.errors import UsageError

from .cases import compare, draw

F32 = np.dtype(np.float32)


def write(path: Path, nodes: list[onnx.NodeProto], inputs: dict[str, list[str | int]], **weights: np.ndarray) -> Path:
    graph = helper.make_graph(
        nodes,
        "dimensions",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name, dims in inputs.items()],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return path


# ---------------------------------------------------------------------------------------- names that say nothing


@pytest.mark.parametrize("symbol", ["?", "*", "None", ""])
def test_dimensions_without_a_name_are_independent(tmp_path: Path, symbol: str) -> None:
    path = write(tmp_path / "m.onnx", [helper.make_node("Transpose", ["x"], ["y"], perm=[1, 0])], {"x": [symbol] * 2})
    with pytest.raises(UsageError) as caught:
        import_onnx(path)
    assert "dimension 0 is open: --dim x.0=INT" in str(caught.value)
    assert "dimension 1 is open: --dim x.1=INT" in str(caught.value)
    compare(path, {"x": draw("x", F32, (2, 3))}, dims={"x.0": 2, "x.1": 3})
    assert open_dimensions(path, {}, {}) == ("x.0", ["x.1"])


def test_control_one_name_is_one_dimension(tmp_path: Path) -> None:
    path = write(tmp_path / "m.onnx", [helper.make_node("Transpose", ["x"], ["y"], perm=[1, 0])], {"x": ["n", "n"]})
    assert import_onnx(path, dims={"n": 3}).module.inputs[0].type.dims == (3, 3)


# ---------------------------------------------------------------------------------------- expressions

NAMES = ("past", "seq", "batch.size")
PARTS = st.recursive(
    st.sampled_from(NAMES) | st.integers(0, 9).map(str),
    lambda inner: (
        st.tuples(inner, st.sampled_from(["+", "-", "*", " + ", " * "]), inner).map("".join)
        | inner.map(lambda text: f"({text})")
    ),
    max_leaves=6,
)


@given(PARTS, st.tuples(*[st.integers(1, 20)] * 3))
def test_expressions_are_those_of_python(text: str, sizes: tuple[int, int, int]) -> None:
    expression = expression_of(text)
    spelled, known = text, dict(zip(NAMES, sizes, strict=True))
    for name, size in known.items():
        spelled = spelled.replace(name, str(size))
    if any(name in text for name in NAMES) and text not in NAMES:
        assert expression is not None
        assert expression.size(known) == arithmetic(spelled)
    else:
        assert expression is None


def arithmetic(text: str) -> int:
    """Return a sum of products, as Python's parser reads it."""

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.BinOp):
            a, b = value(node.left), value(node.right)
            return a + b if isinstance(node.op, ast.Add) else a - b if isinstance(node.op, ast.Sub) else a * b
        assert isinstance(node, ast.Constant)
        return int(node.value)

    return value(ast.parse(text, mode="eval").body)


@pytest.mark.parametrize("text", ["batch", "2", "a b", "a+", "(a", "a/b", "a++b", "", "a)", "unk__7", "(" * 99 + "a"])
def test_other_text_is_no_expression(text: str) -> None:
    assert expression_of(text) is None


def test_only_known_parts_derive() -> None:
    assert with_derived({"a": 2}, {"a+1", "a+b", "2*a"}) == {"a": 2, "a+1": 3, "2*a": 4}


ADDED = {"x": ["batch", "past"], "z": ["batch", "seq"], "m": ["2*batch", "past + seq"]}
CONCATENATED = [
    helper.make_node("Concat", ["x", "z"], ["a"], axis=1),
    helper.make_node("Concat", ["a", "a"], ["b"], axis=0),
    helper.make_node("Add", ["b", "m"], ["y"]),
]


def test_sizes_follow_from_their_parts(tmp_path: Path) -> None:
    path = write(tmp_path / "m.onnx", CONCATENATED, ADDED)
    arrays = {"x": draw("x", F32, (2, 3)), "z": draw("z", F32, (2, 4)), "m": draw("m", F32, (4, 7))}
    compare(path, arrays, dims={"batch": 2, "past": 3, "seq": 4})
    with pytest.raises(UsageError) as caught:
        import_onnx(path, dims={"batch": 2, "past": 3})
    text = str(caught.value)
    assert "input m, dimension 1 is past + seq: it follows from seq" in text
    assert text.endswith("hint: add --dim seq=INT, or dims={'seq': INT} in Python")
    assert open_dimensions(path, {"past": 3, "seq": 4}, {}) == ("batch", [])


def test_a_size_that_contradicts_its_parts_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "m.onnx", CONCATENATED, ADDED)
    with pytest.raises(UsageError, match=r"--dim past \+ seq=8: it is 7 by past=3, seq=4"):
        import_onnx(path, dims={"batch": 2, "past": 3, "seq": 4, "past + seq": 8})


def test_an_expression_alone_is_given_itself_or_by_its_part(tmp_path: Path) -> None:
    path = write(tmp_path / "m.onnx", [helper.make_node("Neg", ["x"], ["y"])], {"x": ["past+1"]})
    for dims in ({"past+1": 4}, {"past": 3}):
        assert import_onnx(path, dims=dims).module.inputs[0].type.dims == (4,)
    with pytest.raises(UsageError, match=r"dimension past-4 is -1 by past=3: a size must be 1 or more"):
        import_onnx(
            write(tmp_path / "n.onnx", [helper.make_node("Neg", ["x"], ["y"])], {"x": ["past-4"]}), dims={"past": 3}
        )


# ---------------------------------------------------------------------------------------- sizes that do not fit


def positions(path: Path) -> Path:
    """Write a model whose texts have sixteen words: a product, and the addition of what each position has."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], name="project"),
        helper.make_node("Add", ["h", "table"], ["y"], name="place"),
    ]
    random = np.random.default_rng(0)
    weights = {"w": random.random((4, 8), np.float32), "table": random.random((1, 16, 8), np.float32)}
    return write(path, nodes, {"x": ["batch", "words", 4]}, **weights)


def test_a_size_that_contradicts_the_model_is_the_users_mistake(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = positions(tmp_path / "m.onnx")
    with pytest.raises(UsageError) as caught:
        import_onnx(path, dims={"batch": 2, "words": 7})
    text = str(caught.value)
    assert "place (ai.onnx Add)" in text
    assert "words is 7" in text
    assert "--dim words=INT" in text
    assert main(["plan", str(path), "--dim", "batch=2", "--dim", "words=7"]) == 2
    assert "words is 7" in capsys.readouterr().err
    assert import_onnx(path, dims={"batch": 2, "words": 16}).module.outputs  # control: a size that fits


def test_a_reshape_that_does_not_fit_names_the_dimension(tmp_path: Path) -> None:
    nodes = [helper.make_node("Reshape", ["x", "shape"], ["y"], name="fold")]
    path = write(tmp_path / "m.onnx", nodes, {"x": ["n", 3]}, shape=np.array([4, -1]))
    with pytest.raises(UsageError, match=r"fold \(ai.onnx Reshape\).*n is 2"):
        import_onnx(path, dims={"n": 2})


def test_control_what_is_unsupported_stays_so(tmp_path: Path) -> None:
    """A model that contradicts itself for every size, and one with an operator that nobody has beside a wrong size."""
    fixed = write(tmp_path / "fixed.onnx", [helper.make_node("Add", ["x", "w"], ["y"])], {"x": [3]}, w=np.ones(4, F32))
    with pytest.raises((CannotImport, UsageError)) as caught:
        import_onnx(fixed)
    assert "sizes of dimensions" not in str(caught.value)
    path = positions(tmp_path / "both.onnx")
    model = onnx.load(path)
    model.graph.node.append(helper.make_node("NonZero", ["x"], ["nowhere"], name="odd"))
    onnx.save(model, path)
    with pytest.raises(CannotImport, match="place"):
        import_onnx(path, dims={"batch": 2, "words": 7})
