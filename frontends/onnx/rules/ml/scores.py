"""Scores and labels, as onnxruntime's kernels make them of the sums of a linear model, support vectors or trees.

In: sums [rows, classes] in f32. Out: the scores after `post_transform`, and the label of each row. Labels are integers;
those that are strings are refused, as there are no strings here. Parameters of these models are attributes of nodes:
they become constants, and are never trained.
"""

from __future__ import annotations

from math import pi, sqrt

import numpy as np

from penstock.frontends.formulas.layout import reshape
from penstock.frontends.onnx.node import OnnxNode
from penstock.ir.graph import Value

TRANSFORMS = ("NONE", "LOGISTIC", "SOFTMAX", "SOFTMAX_ZERO", "PROBIT")
# Scores that are smaller count as zero in SOFTMAX_ZERO.
_ZERO = 1e-7
# The constant of Winitzki's approximation of the inverse of erf.
_A = 0.147


def rows_of(n: OnnxNode, i: int = 0, dtype: str = "f32") -> Value:
    """Return an operand [rows, features] in an element type. A vector is one row."""
    x = n.value(i)
    n.require(1 <= x.type.rank <= 2, f"needs one or two dimensions, got {x.type}")
    return n.cast(reshape(n, x, (1, x.type.size)) if x.type.rank == 1 else x, dtype)


def transform_of(n: OnnxNode) -> str:
    name = n.text_attr("post_transform", "NONE")
    n.require(name in TRANSFORMS, f"post_transform={name} is not known")
    return name


def transformed(n: OnnxNode, scores: Value, name: str) -> Value:
    """Apply a transform. Of a single score per row, onnxruntime applies PROBIT alone."""
    if scores.type.dims[1] == 1 and name != "PROBIT":
        return scores
    match name:
        case "LOGISTIC":
            return n.emit("sigmoid", scores)
        case "SOFTMAX":
            return n.emit("softmax", scores, axis=-1)
        case "SOFTMAX_ZERO":
            return _softmax_zero(n, scores)
        case "PROBIT":
            return _probit(n, scores)
    return scores


def _softmax_zero(n: OnnxNode, x: Value) -> Value:
    """Compute softmax over the scores that are not zero. Zeros stay zeros."""
    top = n.emit("max", x, axes=(1,), keep=True)
    counts = n.emit("less", n.literal(_ZERO, x.type.dtype), n.emit("abs", x))
    grown = n.emit("exp", n.emit("sub", x, top))
    total = n.emit("sum", n.emit("where", counts, grown, 0.0), axes=(1,), keep=True)
    shrunk = n.emit("mul", x, n.emit("exp", n.emit("neg", top)))
    return n.emit("div", n.emit("where", counts, grown, shrunk), total)


def _probit(n: OnnxNode, p: Value) -> Value:
    """Compute sqrt(2) * erfinv(2 p - 1) by the approximation of onnxruntime."""
    x = n.emit("sub", n.emit("mul", p, 2.0), 1.0)
    log = n.emit("log", n.emit("mul", n.emit("sub", 1.0, x), n.emit("add", x, 1.0)))
    v = n.emit("add", n.emit("mul", log, 0.5), 2.0 / (pi * _A))
    inner = n.emit("sqrt", n.emit("sub", n.emit("mul", v, v), n.emit("mul", log, 1.0 / _A)))
    size = n.emit("mul", n.emit("sqrt", n.emit("sub", inner, v)), sqrt(2.0))
    return n.emit("where", n.emit("less", x, 0.0), n.emit("neg", size), size)


def labels_of(n: OnnxNode, *names: str) -> np.ndarray:
    """Return the integer labels. `names` are the attributes for labels that are strings, then the one for integers."""
    *strings, integers = names
    n.require(
        not any(n.texts_attr(name) for name in strings),
        "labels that are strings are not supported, only integers: number the classes instead",
    )
    return np.array(n.ints_attr(integers), np.int64)


def best_label(n: OnnxNode, scores: Value, labels: np.ndarray) -> Value:
    """Look up the label of the highest score of each row, the first one of equal ones."""
    n.require(len(labels) == scores.type.dims[1], f"{len(labels)} labels do not fit scores {scores.type}")
    return n.emit("gather", labels, n.emit("argmax", scores, axis=1), axis=0)


def chosen(n: OnnxNode, condition: Value, yes: int, no: int) -> Value:
    """Look up one of two labels by a condition per row."""
    return n.emit("where", condition, n.literal(yes, "i64"), n.literal(no, "i64"))


def with_opposite(n: OnnxNode, score: Value, name: str) -> Value:
    """Make two scores of one: 1 - s and s or, for LOGISTIC, those of -s and s."""
    if name == "LOGISTIC":
        return n.emit("sigmoid", n.emit("concat", n.emit("neg", score), score, axis=1))
    return n.emit("concat", n.emit("sub", 1.0, score), score, axis=1)
