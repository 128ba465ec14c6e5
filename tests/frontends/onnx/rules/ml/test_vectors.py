"""Support vector machines against onnxruntime, with random attributes and all kernels; and that the comparison can fail."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.frontends.onnx import import_onnx
from penstock.frontends.onnx.rules.ml import vectors
from penstock.frontends.onnx.rules.ml.scores import TRANSFORMS
from penstock.support.errors import UnsupportedModel

from ...cases import compare
from .cases import compared_by, write_node

F32 = np.float32
BOTH = (np.int64, F32)
KERNELS = st.sampled_from(["LINEAR", "POLY", "RBF", "SIGMOID"])
SEEDS = st.integers(0, 1 << 30)


def _agree(kind: str, x: np.ndarray, outputs: tuple[type, ...], **attributes: Any) -> None:
    with TemporaryDirectory() as folder, np.errstate(all="ignore"):
        path = write_node(
            Path(folder) / "ml.onnx", kind, {"x": x}, outputs, kernel_params=[0.3, 0.5, 2.0], **attributes
        )
        compare(path, {"x": x}, 1e-4, compared_by(attributes.get("post_transform", "NONE")))


def _numbers(random: np.random.Generator, *shape: int) -> list[float]:
    return random.standard_normal(shape).astype(F32).reshape(-1).tolist()


@settings(max_examples=40, deadline=None)
@given(SEEDS, KERNELS, st.integers(0, 5), st.booleans())
def test_regressors(seed: int, kernel: str, count: int, one_class: bool) -> None:
    """No support vectors make a linear model."""
    random = np.random.default_rng(seed)
    held = {"support_vectors": _numbers(random, count, 3), "n_supports": count} if count else {}
    _agree(
        "SVMRegressor",
        random.standard_normal((6, 3)).astype(F32),
        (F32,),
        coefficients=_numbers(random, count or 3),
        rho=_numbers(random, 1),
        kernel_type=kernel,
        one_class=int(one_class),
        **held,
    )


@settings(max_examples=80, deadline=None)
@given(
    SEEDS,
    KERNELS,
    st.integers(2, 4),
    st.sampled_from(TRANSFORMS),
    st.booleans(),
    st.sampled_from([F32, np.float64, np.int64, np.int32]),
)
def test_classifiers(seed: int, kernel: str, classes: int, transform: str, likely: bool, dtype: type) -> None:
    random = np.random.default_rng(seed)
    sizes = random.integers(1, 4, classes).tolist()
    pairs = classes * (classes - 1) // 2
    if classes == 2 and not likely and transform == "PROBIT":
        transform = "NONE"
    _agree(
        "SVMClassifier",
        (random.standard_normal((6, 3)) * (1 if np.issubdtype(dtype, np.floating) else 2)).astype(dtype),
        BOTH,
        support_vectors=_numbers(random, sum(sizes), 3),
        coefficients=_numbers(random, classes - 1, sum(sizes)),
        vectors_per_class=sizes,
        rho=_numbers(random, pairs),
        classlabels_ints=[int(label) for label in random.permutation(9)[:classes]],
        kernel_type=kernel,
        post_transform=transform,
        **({"prob_a": _numbers(random, pairs), "prob_b": _numbers(random, pairs)} if likely else {}),
    )


@settings(max_examples=40, deadline=None)
@given(SEEDS, st.integers(2, 4), st.sampled_from(TRANSFORMS), st.booleans())
def test_linear_classifiers(seed: int, classes: int, transform: str, positive: bool) -> None:
    random = np.random.default_rng(seed)
    weights = _numbers(random, classes, 3)
    _agree(
        "SVMClassifier",
        random.standard_normal((6, 3)).astype(F32),
        BOTH,
        coefficients=np.abs(weights).tolist() if positive else weights,
        rho=_numbers(random, 1),
        classlabels_ints=[int(label) for label in random.permutation(9)[:classes]],
        kernel_type="LINEAR",
        post_transform=transform,
    )


def test_a_wrong_kernel_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    x = random.standard_normal((6, 3)).astype(F32)
    attributes: dict[str, Any] = {
        "support_vectors": _numbers(random, 2, 3), "n_supports": 2, "coefficients": [1.0, -2.0], "rho": [0.1], "kernel_type": "RBF",
    }  # fmt: skip
    _agree("SVMRegressor", x, (F32,), **attributes)
    right = vectors._distances
    monkeypatch.setattr(vectors, "_distances", lambda n, x, held: n.emit("sqrt", right(n, x, held)))
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        _agree("SVMRegressor", x, (F32,), **attributes)


@pytest.mark.parametrize("classes", [2, 3, 5])
def test_probabilities_take_steps_enough(classes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten steps agree with onnxruntime, which takes as many as it needs. One does not."""
    random = np.random.default_rng(classes)
    pairs = classes * (classes - 1) // 2
    x = (random.standard_normal((200, 3)) * 4).astype(F32)
    attributes: dict[str, Any] = {
        "support_vectors": _numbers(random, classes, 3), "coefficients": _numbers(random, classes - 1, classes),
        "vectors_per_class": [1] * classes, "rho": _numbers(random, pairs), "classlabels_ints": list(range(classes)),
        "kernel_type": "LINEAR", "prob_a": _numbers(random, pairs), "prob_b": _numbers(random, pairs),
    }  # fmt: skip
    _agree("SVMClassifier", x, BOTH, **attributes)
    monkeypatch.setattr(vectors, "_STEPS", 1)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        _agree("SVMClassifier", x, BOTH, **attributes)


def test_distances_of_far_points_lose_nothing() -> None:
    """The squares are so large that f32 would not hold their difference."""
    random = np.random.default_rng(0)
    held = (1e4 + random.integers(0, 4, (3, 3))).astype(F32)
    x = (1e4 + random.integers(0, 4, (6, 3))).astype(F32)
    _agree(
        "SVMRegressor", x, (F32,), support_vectors=held.reshape(-1).tolist(), n_supports=3, coefficients=[1.0, 2.0, 3.0],
        rho=[0.1], kernel_type="RBF",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"classlabels_strings": ["a", "b"], "classlabels_ints": []}, "labels that are strings are not supported"),
        ({"kernel_type": "CUBE"}, "kernel_type=CUBE is not known"),
        ({"support_vectors": [1.0]}, "1 numbers are not 2 support vectors of 3 features"),
        ({"rho": [0.1, 0.2]}, "2 numbers rho do not fit 2 classes"),
        ({"post_transform": "PROBIT"}, "PROBIT"),
        ({"prob_a": [1.0, 2.0], "prob_b": [1.0]}, "2 and 1 numbers do not fit 1 pairs"),
    ],
)  # fmt: skip
def test_what_is_not_supported_says_why(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    attributes = {
        "support_vectors": [1.0] * 6, "coefficients": [1.0, 2.0], "vectors_per_class": [1, 1], "rho": [0.1],
        "classlabels_ints": [4, 2], "kernel_type": "RBF", "kernel_params": [0.3, 0.5, 2.0], **changes,
    }  # fmt: skip
    attributes = {name: value for name, value in attributes.items() if value != []}
    path = write_node(tmp_path / "ml.onnx", "SVMClassifier", {"x": np.zeros((2, 3), F32)}, BOTH, **attributes)
    with pytest.raises(UnsupportedModel, match=said):
        import_onnx(path)
