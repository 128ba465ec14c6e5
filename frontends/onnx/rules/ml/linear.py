"""Linear models of domain ai.onnx.ml: sums of weighted features, and the labels and scores that follow from them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.frontends.onnx.node import OnnxNode, Result, Rule
from penstock.ir.graph import Value

from .scores import best_label, chosen, labels_of, rows_of, transform_of, transformed, with_opposite


def _sums(n: OnnxNode, targets: int, intercepts: np.ndarray, dtype: str = "f32") -> Value:
    x = rows_of(n, 0, dtype)
    weights = n.float_array("coefficients")
    n.require(
        targets > 0 and len(weights) == targets * x.type.dims[1],
        f"{len(weights)} coefficients do not fit {targets} targets of {x.type.dims[1]} features",
    )
    n.require(len(intercepts) in (0, targets), f"{len(intercepts)} intercepts do not fit {targets} targets")
    y = n.emit("matmul", x, weights.reshape(targets, -1).astype(_numpy(dtype)), tb=True)
    return n.emit("add", y, intercepts.astype(_numpy(dtype))) if len(intercepts) else y


def _numpy(dtype: str) -> type[np.float32] | type[np.float64]:
    return np.float64 if dtype == "f64" else np.float32


def _regressor(n: OnnxNode) -> Result:
    dtype = "f64" if n.type().dtype == "f64" else "f32"
    name = transform_of(n)
    y = _sums(n, n.int_attr("targets", 1), n.float_array("intercepts"), dtype)
    return transformed(n, n.cast(y, "f32"), name)


def _classifier(n: OnnxNode) -> Sequence[Result]:
    """Write LinearClassifier, which has one target per intercept. One target for two labels is the second one's."""
    n.ignore("multi_class")  # onnxruntime does not read it either
    intercepts, name = n.float_array("intercepts"), transform_of(n)
    labels = labels_of(n, "classlabels_strings", "classlabels_ints")
    n.require(len(intercepts) > 0, "intercepts are missing")
    scores = _sums(n, len(intercepts), intercepts)
    if len(intercepts) > 1:
        return best_label(n, scores, labels), transformed(n, scores, name)
    n.require(len(labels) in (0, 2), f"{len(labels)} labels do not fit one target")
    n.require(len(labels) == 0 or name != "PROBIT", "PROBIT of one target for two labels is not supported")
    no, yes = labels.tolist() or (0, 1)
    label = chosen(n, n.emit("less", 0.0, n.emit("max", scores, axes=(1,), keep=False)), yes, no)
    return label, with_opposite(n, scores, name) if len(labels) else transformed(n, scores, name)


RULES: dict[str, Rule] = {"LinearRegressor": _regressor, "LinearClassifier": _classifier}
