"""Linear models against onnxruntime, with random attributes; and that the comparison can fail."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.frontends.onnx import import_onnx
from penstock.frontends.onnx.rules.ml import linear
from penstock.frontends.onnx.rules.ml.scores import TRANSFORMS
from penstock.support.errors import UnsupportedModel

from ...cases import compare, run
from .cases import compared_by, features_of, write_node

TYPES = (np.float32, np.float64, np.int32, np.int64)
SEEDS = st.integers(0, 1 << 30)
F32 = np.float32
BOTH = (np.int64, F32)


def _agree(kind: str, x: np.ndarray, outputs: tuple[type, ...], **attributes: Any) -> None:
    with TemporaryDirectory() as folder, np.errstate(all="ignore"):
        path = write_node(Path(folder) / "ml.onnx", kind, {"x": x}, outputs, **attributes)
        compare(path, {"x": x}, 1e-4, compared_by(attributes.get("post_transform", "NONE")))


@settings(max_examples=40, deadline=None)
@given(SEEDS, st.integers(1, 3), st.sampled_from(TRANSFORMS), st.booleans())
def test_regressors(seed: int, targets: int, transform: str, shifted: bool) -> None:
    random = np.random.default_rng(seed)
    x = features_of(random, np.dtype(F32), 5, 3)
    shift = {"intercepts": random.uniform(0, 1, targets).tolist()} if shifted else {}
    weights = (random.standard_normal(targets * 3) / 8).tolist()
    _agree("LinearRegressor", x, (F32,), coefficients=weights, targets=targets, post_transform=transform, **shift)


@pytest.mark.parametrize("dtype", TYPES)
def test_regressors_of_other_types(tmp_path: Path, dtype: type) -> None:
    """By the definition: onnxruntime has it for f32 alone."""
    x = features_of(np.random.default_rng(0), np.dtype(dtype), 5, 3)
    attributes: dict[str, Any] = {"coefficients": [0.5, 2.0, -1.0], "intercepts": [0.25]}
    path = write_node(tmp_path / "ml.onnx", "LinearRegressor", {"x": x}, (F32,), **attributes)
    expected = x.astype(np.float64) @ [[0.5], [2.0], [-1.0]] + 0.25
    np.testing.assert_allclose(run(import_onnx(path), {"x": x})[0], expected, rtol=1e-6)


@settings(max_examples=40, deadline=None)
@given(SEEDS, st.sampled_from(TYPES), st.integers(1, 4), st.sampled_from(TRANSFORMS), st.booleans(), st.booleans())
def test_classifiers(seed: int, dtype: type, targets: int, transform: str, named: bool, vector: bool) -> None:
    """One target is for two labels, or for none that are named."""
    random = np.random.default_rng(seed)
    x = features_of(random, np.dtype(dtype), 5, 3)
    count = targets if targets > 1 else 2 * named
    if targets == 1 and named and transform == "PROBIT":
        transform = "NONE"
    _agree(
        "LinearClassifier",
        x[0] if vector else x,
        BOTH,
        coefficients=(random.standard_normal(targets * 3) / 8).tolist(),
        intercepts=random.uniform(0, 1, targets).tolist(),
        post_transform=transform,
        **({"classlabels_ints": [int(i) for i in random.permutation(9)[:count]]} if count else {}),
    )


def test_zeros_stay_zeros_in_softmax_zero() -> None:
    x = np.array([[0, 1e-7], [0, 5e-8], [0, 2e-7], [1, 0]], F32)
    attributes: dict[str, Any] = {"coefficients": [1.0] * 6, "classlabels_ints": [1, 2, 5]}
    for shift in ([0.0, 0.0, 1.0], [0.0, 2.0, -1.0]):
        _agree("LinearClassifier", x, BOTH, intercepts=shift, post_transform="SOFTMAX_ZERO", **attributes)


@pytest.mark.parametrize("name", ["with_opposite", "transformed", "best_label"])
def test_wrong_scores_are_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = features_of(np.random.default_rng(3), np.dtype(F32), 6, 3)
    two = name == "with_opposite"
    attributes: dict[str, Any] = {
        "coefficients": [0.1, -0.2, 0.3] if two else [0.1, -0.2, 0.3, 0.2, 0.1, 0.1],
        "intercepts": [0.5] if two else [0.5, 0.3],
        "classlabels_ints": [4, 2],
        "post_transform": "LOGISTIC",
    }
    _agree("LinearClassifier", x, BOTH, **attributes)
    right = getattr(linear, name)
    wrong = {
        "with_opposite": lambda n, score, transform: right(n, score, "NONE"),
        "transformed": lambda n, scores, transform: right(n, scores, "SOFTMAX"),
        "best_label": lambda n, scores, labels: right(n, scores, labels[::-1]),
    }
    monkeypatch.setattr(linear, name, wrong[name])
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        _agree("LinearClassifier", x, BOTH, **attributes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"classlabels_strings": ["no", "yes"], "classlabels_ints": []}, "labels that are strings are not supported"),
        ({"intercepts": []}, "intercepts are missing"),
        ({"classlabels_ints": [1, 2, 3]}, "3 labels do not fit one target"),
        ({"post_transform": "PROBIT"}, "PROBIT of one target for two labels"),
        ({"coefficients": [1.0, 2.0]}, "2 coefficients do not fit 1 targets of 3 features"),
        ({"post_transform": "CUBE"}, "post_transform=CUBE"),
    ],
)
def test_what_is_not_supported_says_why(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    attributes = {"coefficients": [0.1, 0.2, 0.3], "intercepts": [0.5], "classlabels_ints": [4, 2], **changes}
    attributes = {name: value for name, value in attributes.items() if value != []}
    path = write_node(tmp_path / "ml.onnx", "LinearClassifier", {"x": np.zeros((2, 3), F32)}, BOTH, **attributes)
    with pytest.raises(UnsupportedModel, match=said):
        import_onnx(path)
