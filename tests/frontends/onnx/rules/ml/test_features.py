"""Operators that prepare features against onnxruntime, with random attributes; and that the comparison can fail."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.frontends.onnx import import_onnx, table
from penstock.support.errors import UnsupportedModel

from ...cases import compare, run
from .cases import features_of, write_node

TYPES = (np.float32, np.float64, np.int32, np.int64)
SEEDS = st.integers(0, 1 << 30)
F32 = np.float32


def _agree(kind: str, feeds: dict[str, np.ndarray], dtype: type = F32, **attributes: Any) -> None:
    with TemporaryDirectory() as folder:
        compare(write_node(Path(folder) / "ml.onnx", kind, feeds, (dtype,), **attributes), feeds)


def _computed(folder: Path, kind: str, feeds: dict[str, np.ndarray], dtype: type, **attributes: Any) -> np.ndarray:
    return run(import_onnx(write_node(folder / "ml.onnx", kind, feeds, (dtype,), **attributes)), feeds)[0]


def _drawn(seed: int, dtype: type, vector: bool = False) -> tuple[np.random.Generator, dict[str, np.ndarray]]:
    random = np.random.default_rng(seed)
    x = features_of(random, np.dtype(dtype), int(random.integers(1, 6)), int(random.integers(1, 5)))
    x[-1] *= random.integers(2)
    return random, {"x": x[0] if vector else x}


@settings(max_examples=30, deadline=None)
@given(SEEDS, st.sampled_from(TYPES), st.booleans(), st.booleans())
def test_scaler(seed: int, dtype: type, vector: bool, single: bool) -> None:
    random, feeds = _drawn(seed, dtype, vector)
    count = 1 if single else feeds["x"].shape[-1]
    _agree("Scaler", feeds, offset=random.standard_normal(count).tolist(), scale=random.standard_normal(count).tolist())


@settings(max_examples=40, deadline=None)
@given(SEEDS, st.sampled_from(TYPES), st.sampled_from(["MAX", "L1", "L2"]), st.booleans())
def test_normalizer(seed: int, dtype: type, norm: str, vector: bool) -> None:
    _agree("Normalizer", _drawn(seed, dtype, vector)[1], norm=norm)


@settings(max_examples=20, deadline=None)
@given(SEEDS, st.sampled_from(TYPES), st.booleans())
def test_array_feature_extractor(seed: int, dtype: type, vector: bool) -> None:
    random, feeds = _drawn(seed, dtype, vector)
    indices = random.integers(0, feeds["x"].shape[-1], (1, int(random.integers(1, 5))))
    _agree("ArrayFeatureExtractor", {**feeds, "i": indices}, dtype)


@settings(max_examples=30, deadline=None)
@given(SEEDS, st.sampled_from(TYPES), st.integers(1, 3))
def test_feature_vectorizer(seed: int, dtype: type, count: int) -> None:
    random = np.random.default_rng(seed)
    rows = int(random.integers(1, 5))
    feeds = {f"x{i}": features_of(random, np.dtype(dtype), rows, int(random.integers(1, 5))) for i in range(count)}
    _agree("FeatureVectorizer", feeds, inputdimensions=random.integers(1, 6, count).tolist())


@settings(max_examples=20, deadline=None)
@given(SEEDS, st.sampled_from([-1.5, 0.0, 0.1, 2.0]))
def test_binarizer(seed: int, threshold: float) -> None:
    _agree("Binarizer", _drawn(seed, F32)[1], threshold=threshold)


def test_binarizer_of_other_types(tmp_path: Path) -> None:
    """By the definition: onnxruntime has it for f32 alone."""
    for dtype in TYPES:
        x = features_of(np.random.default_rng(0), np.dtype(dtype), 4, 3)
        found = _computed(tmp_path, "Binarizer", {"x": x}, dtype, threshold=0.5)
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, x > 0.5)


@settings(max_examples=30, deadline=None)
@given(SEEDS, st.sampled_from([F32, np.int64]), st.booleans(), st.booleans())
def test_imputer(seed: int, dtype: type, single: bool, odd: bool) -> None:
    random, feeds = _drawn(seed, dtype)
    count = 1 if single else feeds["x"].shape[-1]
    if dtype == np.int64:
        values = random.integers(-9, 9, count).tolist()
        _agree("Imputer", feeds, dtype, imputed_value_int64s=values, replaced_value_int64=int(random.integers(-3, 3)))
        return
    feeds["x"][random.random(feeds["x"].shape) < 0.3] = np.nan
    replaced = float("nan") if odd else float(random.integers(-3, 3))
    _agree("Imputer", feeds, imputed_value_floats=random.standard_normal(count).tolist(), replaced_value_float=replaced)


def test_imputer_of_other_types(tmp_path: Path) -> None:
    """By the definition: onnxruntime has it for f32 and i64 alone."""
    x = np.array([[1.0, np.nan], [0.0, np.nan]])
    found = _computed(
        tmp_path, "Imputer", {"x": x}, np.float64, imputed_value_floats=[5.0, 6.0], replaced_value_float=float("nan")
    )
    np.testing.assert_array_equal(found, [[1, 6], [0, 6]])
    x = np.array([[1, 0], [0, 3]], np.int32)
    found = _computed(tmp_path, "Imputer", {"x": x}, np.int32, imputed_value_int64s=[5], replaced_value_int64=0)
    np.testing.assert_array_equal(found, [[1, 5], [5, 3]])


def test_a_wrong_norm_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    feeds = {"x": np.array([[3.0, -4.0]], F32)}
    _agree("Normalizer", feeds, norm="L1")
    monkeypatch.setitem(
        table.OTHERS["ai.onnx.ml"], "Normalizer", lambda n: (n.ignore("norm"), n.emit("div", n.value(), 5.0))[1]
    )
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        _agree("Normalizer", feeds, norm="L1")


@pytest.mark.parametrize(
    ("kind", "attributes", "said"),
    [
        ("Scaler", {"offset": [1.0, 2.0], "scale": [1.0, 2.0]}, "2 offsets and 2 scales do not fit 3 features"),
        ("Scaler", {}, "0 offsets"),
        ("Normalizer", {"norm": "L3"}, "norm=L3 is not known"),
        ("FeatureVectorizer", {"inputdimensions": [3, 3]}, "inputdimensions has 2 entries for 1 operands"),
        ("Imputer", {"imputed_value_floats": [1.0, 2.0]}, "2 values do not fit"),
    ],
)
def test_what_does_not_fit_says_why(tmp_path: Path, kind: str, attributes: dict[str, Any], said: str) -> None:
    path = write_node(tmp_path / "ml.onnx", kind, {"x": np.zeros((2, 3), F32)}, (F32,), **attributes)
    with pytest.raises(UnsupportedModel, match=said):
        import_onnx(path)
