"""Encoders of numbers against onnxruntime; what takes strings or makes maps; and that the comparison can fail."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper

from penstock.frontends.onnx import CannotImport, import_onnx, table
from penstock.frontends.onnx.rules.ml import encoders
from penstock.support.errors import UnsupportedModel

from ...cases import compare, judge, run
from .cases import write_node

F32 = np.float32
X = np.array([[1, -2, 3], [0, 5, 9]])


def _agree(kind: str, x: np.ndarray, dtype: type, opset: int, **attributes: Any) -> None:
    with TemporaryDirectory() as folder:
        compare(write_node(Path(folder) / "ml.onnx", kind, {"x": x}, (dtype,), opset, **attributes), {"x": x})


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 1 << 30),
    st.sampled_from(["int64s", "floats"]),
    st.sampled_from(["int64s", "floats"]),
    st.sampled_from([2, 4]),
)
def test_label_encoder(seed: int, keys: str, values: str, opset: int) -> None:
    """The first one of equal keys counts. What is no key gives the default."""
    random = np.random.default_rng(seed)
    types = {"int64s": np.int64, "floats": F32}
    count = int(random.integers(1, 6))
    known = random.integers(-4, 5, count).astype(types[keys])
    attributes = {
        f"keys_{keys}": known.tolist(),
        f"values_{values}": random.integers(-9, 9, count).astype(types[values]).tolist(),
        **({"default_float": 0.25, "default_int64": 77} if random.random() < 0.5 else {}),
    }
    x = random.integers(-4, 5, (3, 4)).astype(types[keys])
    _agree("LabelEncoder", x, types[values], opset, **attributes)


@pytest.mark.parametrize("opset", [2, 4])
def test_nan_is_a_key_in_newer_versions(opset: int) -> None:
    x = np.array([1.0, np.nan, 2.0], F32)
    _agree("LabelEncoder", x, np.int64, opset, keys_floats=[1.0, float("nan")], values_int64s=[1, 2])


def test_label_encoder_of_tensors() -> None:
    tensors = {"keys_tensor": [1, 3], "values_tensor": [1.0, 2.0], "default_tensor": [9.0]}
    _agree(
        "LabelEncoder", X, np.float64, 4, **{name: numpy_helper.from_array(np.array(x)) for name, x in tensors.items()}
    )


@pytest.mark.parametrize("dtype", [F32, np.float64, np.int64])
def test_one_hot_encoder(dtype: type) -> None:
    _agree("OneHotEncoder", X.astype(dtype), F32, 3, cats_int64s=[1, 3, 5, 0])


def test_a_wrong_match_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    _agree("OneHotEncoder", X, F32, 3, cats_int64s=[1, 3])
    right = encoders._matches
    monkeypatch.setattr(encoders, "_matches", lambda n, x, keys: right(n, x, keys[::-1].copy()))
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        _agree("OneHotEncoder", X, F32, 3, cats_int64s=[1, 3])


@pytest.mark.parametrize(
    ("kind", "attributes", "said"),
    [
        ("LabelEncoder", {"keys_int64s": [1], "values_strings": ["a"]}, "strings are not supported"),
        ("LabelEncoder", {"keys_int64s": [1], "values_int64s": [1, 2]}, "1 keys do not fit 2 values"),
        ("OneHotEncoder", {"cats_strings": ["a"]}, "strings are not supported"),
        ("OneHotEncoder", {"cats_int64s": [1], "zeros": 0}, "zeros=0"),
        ("CategoryMapper", {"cats_int64s": [1], "cats_strings": ["a"]}, "there are no strings here"),
    ],
)
def test_what_is_not_supported_says_why(tmp_path: Path, kind: str, attributes: dict[str, Any], said: str) -> None:
    path = write_node(tmp_path / "ml.onnx", kind, {"x": X}, (np.int64,), **attributes)
    with pytest.raises(UnsupportedModel, match=said):
        import_onnx(path)


def _with_maps(path: Path) -> Path:
    """Write a classifier whose probabilities become maps, as converters of scikit-learn write them."""
    nodes = [
        helper.make_node(
            "LinearClassifier", ["x"], ["label", "scores"], domain="ai.onnx.ml", coefficients=[0.1, 0.2, 0.3, 0.3, 0.2, 0.1],
            intercepts=[0.5, 0.4], classlabels_ints=[3, 7], post_transform="SOFTMAX",
        ),
        helper.make_node("ZipMap", ["scores"], ["maps"], name="last", domain="ai.onnx.ml", classlabels_int64s=[3, 7]),
    ]  # fmt: skip
    maps = onnx.ValueInfoProto(name="maps")
    entry = maps.type.sequence_type.elem_type.map_type
    entry.key_type = onnx.TensorProto.INT64
    entry.value_type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    outputs = [helper.make_tensor_value_info("label", onnx.TensorProto.INT64, [2]), maps]
    inputs = [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [2, 3])]
    graph = helper.make_graph(nodes, "maps", inputs, outputs)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("ai.onnx.ml", 3)], ir_version=10), path)
    return path


def test_maps_at_the_end_are_left_out_as_the_error_says(tmp_path: Path) -> None:
    path = _with_maps(tmp_path / "maps.onnx")
    with pytest.raises(CannotImport, match=r"last \(ai.onnx.ml ZipMap\): .*make scores, .* an output") as caught:
        import_onnx(path)
    assert caught.value.exit_code == 3
    assert len(caught.value.what.splitlines()) == 2
    model = onnx.load(path)
    del model.graph.node[1], model.graph.output[1]
    model.graph.output.append(helper.make_tensor_value_info("scores", onnx.TensorProto.FLOAT, [2, 2]))
    onnx.save(model, tmp_path / "tensors.onnx")
    feeds = {"x": X.astype(F32)}
    label, scores = run(import_onnx(tmp_path / "tensors.onnx"), feeds)
    judged, maps = judge(path, feeds)
    np.testing.assert_array_equal(label, judged)
    np.testing.assert_allclose(scores, [[row[3], row[7]] for row in maps], rtol=1e-5)


def test_reasons_are_of_operators_that_have_no_rule() -> None:
    assert not set(table.WITHOUT_RULE) & set(table.OTHERS["ai.onnx.ml"])
    schemas = {s.name for s in onnx.defs.get_all_schemas() if s.domain == "ai.onnx.ml"}
    older = {"TreeEnsembleRegressor", "TreeEnsembleClassifier"}  # deprecated since version 5
    assert schemas | older == set(table.WITHOUT_RULE) | set(table.OTHERS["ai.onnx.ml"])
