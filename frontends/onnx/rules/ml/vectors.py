"""Support vector machines of domain ai.onnx.ml, as onnxruntime computes them.

A kernel compares each row with each support vector, and weights join what comes out. A classifier does so for every
pair of classes: each pair votes for one of its two, and the label is that of the class with the most votes. Without
support vectors the models are linear.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from penstock.frontends.formulas.elementwise import power
from penstock.frontends.formulas.layout import cut, reshape
from penstock.frontends.onnx.node import OnnxNode, Result, Rule
from penstock.ir.graph import Value

from .scores import best_label, labels_of, rows_of, transform_of, transformed, with_opposite

_KERNELS = ("LINEAR", "POLY", "RBF", "SIGMOID")
# Probabilities of one class of a pair are kept this far from 0 and 1.
_LEAST = 1e-7
# Probabilities of classes: the error at which a row stops, times their number. Rows stop after five steps at most in
# practice; onnxruntime ends after 100.
_AGREES, _STEPS, _MOST_LIKELY = 0.005, 10, 64


def _kernel(n: OnnxNode, x: Value, count: int) -> Value:
    """Compare rows with `count` support vectors: [rows, vectors]."""
    kind, numbers = n.text_attr("kernel_type", "LINEAR"), n.floats_attr("kernel_params") or (0.0, 0.0, 0.0)
    n.require(kind in _KERNELS, f"kernel_type={kind} is not known")
    n.require(len(numbers) == 3, f"kernel_params has {len(numbers)} numbers, expected 3")
    gamma, shift, degree = numbers
    vectors, features = n.float_array("support_vectors"), x.type.dims[1]
    n.require(
        len(vectors) == count * features,
        f"{len(vectors)} numbers are not {count} support vectors of {features} features",
    )
    vectors = vectors.reshape(count, features)
    if kind == "RBF":
        return n.emit("exp", n.emit("mul", _distances(n, x, vectors), -gamma))
    product = n.emit("matmul", x, vectors, tb=True)
    if kind == "LINEAR":
        return product
    shifted = n.emit("add", n.emit("mul", product, gamma), shift)
    return power(n, shifted, degree) if kind == "POLY" else n.emit("tanh", shifted)


def _distances(n: OnnxNode, x: Value, vectors: np.ndarray) -> Value:
    """Compute squared distances by products, in f64, where nothing is lost to cancellation."""
    wide, others = n.cast(x, "f64"), vectors.astype(np.float64)
    squares = n.emit("sum", n.emit("mul", wide, wide), axes=(1,), keep=True)
    both = n.emit("mul", n.emit("matmul", wide, others, tb=True), 2.0)
    total = n.emit("sub", n.emit("add", squares, (others * others).sum(1)), both)
    return n.cast(n.emit("maximum", total, 0.0), "f32")


def _linear(n: OnnxNode, x: Value, count: int) -> Value:
    weights, rho, features = n.float_array("coefficients"), n.float_array("rho"), x.type.dims[1]
    n.ignore("kernel_type", "kernel_params")
    n.require(
        len(weights) == count * features, f"{len(weights)} coefficients do not fit {count} of {features} features"
    )
    n.require(len(rho) > 0, "rho is missing")
    return n.emit("add", n.emit("matmul", x, weights.reshape(count, features), tb=True), float(rho[0]))


def _regressor(n: OnnxNode) -> Result:
    n.ignore("post_transform")  # onnxruntime does not read it either
    x, count = rows_of(n), n.int_attr("n_supports")
    if count > 0:
        weights, rho = n.float_array("coefficients"), n.float_array("rho")
        n.require(
            len(weights) == count and len(rho) > 0, f"{len(weights)} coefficients do not fit {count} support vectors"
        )
        y = n.emit("add", n.emit("matmul", _kernel(n, x, count), weights.reshape(count, 1)), float(rho[0]))
    else:
        y = _linear(n, x, 1)
    if n.int_attr("one_class"):
        return n.emit("where", n.emit("less", 0.0, y), n.literal(1.0, "f32"), n.literal(-1.0, "f32"))
    return y


def _pairs(n: OnnxNode, x: Value, sizes: Sequence[int]) -> Value:
    """Compute the score of every pair of classes: [rows, pairs]. It is positive for the first one."""
    count, classes, ends = sum(sizes), len(sizes), np.cumsum([0, *sizes])
    weights, rho = n.float_array("coefficients"), n.float_array("rho")
    pairs = list(combinations(range(classes), 2))
    n.require(
        len(weights) == (classes - 1) * count and len(rho) == len(pairs),
        f"{len(weights)} coefficients and {len(rho)} numbers rho do not fit {classes} classes of {count} vectors",
    )
    weights = weights.reshape(classes - 1, count)
    n.room(max(count, classes) * len(pairs))
    table = np.zeros((count, len(pairs)), np.float32)
    for column, (first, second) in enumerate(pairs):
        for mine, other in ((first, second - 1), (second, first)):
            vectors = slice(ends[mine], ends[mine + 1])
            table[vectors, column] = weights[other, vectors]
    return n.emit("add", n.emit("matmul", _kernel(n, x, count), table), rho)


def _elected(n: OnnxNode, scores: Value, labels: np.ndarray) -> Value:
    """Look up the label of the class that the most pairs vote for."""
    pairs = list(combinations(range(len(labels)), 2))
    won, lost = (np.zeros((len(pairs), len(labels)), np.float32) for _ in range(2))
    for row, (first, second) in enumerate(pairs):
        won[row, first] = lost[row, second] = 1.0
    votes = n.cast(n.emit("less", 0.0, scores), "f32")
    others = n.emit("matmul", n.emit("sub", 1.0, votes), lost)
    return best_label(n, n.emit("add", n.emit("matmul", votes, won), others), labels)


def _probabilities(n: OnnxNode, scores: Value, classes: int) -> Value:
    """Compute the probabilities of the classes that agree best with those of the pairs, as libsvm does.

    A step improves the classes one after the other. Rows that agree well enough keep what they have.
    """
    pairs = list(combinations(range(classes), 2))
    a, b = n.float_array("prob_a"), n.float_array("prob_b")
    n.require(len(a) == len(b) == len(pairs), f"{len(a)} and {len(b)} numbers do not fit {len(pairs)} pairs of classes")
    n.require(classes <= _MOST_LIKELY, f"probabilities of more than {_MOST_LIKELY} classes are not supported")
    first = n.emit("sigmoid", n.emit("neg", n.emit("add", n.emit("mul", scores, a), b)))
    first = n.emit("minimum", n.emit("maximum", first, _LEAST), 1.0 - _LEAST)
    matrix = _disagreement(n, first, n.emit("sub", 1.0, first), pairs, classes)
    rows = scores.type.dims[0]
    p = n.emit("const", value=1.0 / classes, dtype="f32", shape=(rows, classes))
    for _ in range(_STEPS):
        slope = n.emit("sum", n.emit("mul", matrix, reshape(n, p, (rows, 1, classes))), axes=(2,), keep=False)
        total = n.emit("sum", n.emit("mul", p, slope), axes=(1,), keep=True)
        error = n.emit("max", n.emit("abs", n.emit("sub", slope, total)), axes=(1,), keep=True)
        goes_on = n.emit("less_equal", n.literal(_AGREES / classes, "f32"), error)
        p = n.emit("where", goes_on, _improved(n, matrix, p, slope, total), p)
    return p


def _disagreement(n: OnnxNode, first: Value, second: Value, pairs: list[tuple[int, int]], classes: int) -> Value:
    """Compute the matrices whose quadratic forms say how far probabilities disagree with the pairs."""
    mine, other = (np.zeros((len(pairs), classes), np.float32) for _ in range(2))
    places = np.diag(len(pairs) + np.arange(classes))
    for row, (i, j) in enumerate(pairs):
        mine[row, i] = other[row, j] = 1.0
        places[i, j] = places[j, i] = row
    squares = [n.emit("matmul", n.emit("mul", x, x), table) for x, table in ((second, mine), (first, other))]
    entries = n.emit("concat", n.emit("neg", n.emit("mul", first, second)), n.emit("add", *squares), axis=1)
    return n.emit("gather", entries, places.astype(np.int64), axis=1)


def _improved(n: OnnxNode, matrix: Value, p: Value, slope: Value, total: Value) -> Value:
    """Take one step: choose the best probability of each class in turn, and scale all to the sum of 1."""
    rows, classes = p.type.dims
    for i in range(classes):
        row = reshape(n, cut(n, matrix, 1, i, i + 1), (rows, classes))
        bend, here = cut(n, row, 1, i, i + 1), cut(n, slope, 1, i, i + 1)
        change = n.emit("div", n.emit("sub", total, here), bend)
        scale = n.emit("add", change, 1.0)
        bent = n.emit("add", n.emit("mul", change, bend), n.emit("mul", here, 2.0))
        total = n.emit("div", n.emit("add", total, n.emit("mul", change, bent)), n.emit("mul", scale, scale))
        slope = n.emit("div", n.emit("add", slope, n.emit("mul", change, row)), scale)
        p = n.emit("div", n.emit("add", p, n.emit("mul", change, np.eye(classes, dtype=np.float32)[i : i + 1])), scale)
    return p


def _classifier(n: OnnxNode) -> Sequence[Result]:
    x, name, sizes = rows_of(n), transform_of(n), n.ints_attr("vectors_per_class")
    labels = labels_of(n, "classlabels_strings", "classlabels_ints")
    n.require(len(labels) > 1, "needs two labels or more")
    if not sum(sizes):
        n.ignore("prob_a", "prob_b")
        scores = _linear(n, x, len(labels))
        return _label_of_linear(n, scores, labels), transformed(n, scores, name)
    n.require(len(sizes) == len(labels), f"{len(labels)} labels do not fit {len(sizes)} classes")
    n.require(min(sizes) >= 0, "a class has fewer than no support vectors")
    scores = _pairs(n, x, sizes)
    label = _elected(n, scores, labels)
    if len(n.float_array("prob_a")) and len(n.float_array("prob_b")):
        return label, transformed(n, _probabilities(n, scores, len(labels)), name)
    if len(labels) > 2:
        return label, transformed(n, scores, name)
    n.require(name != "PROBIT", "PROBIT of the score of two classes is not supported")
    if name != "NONE":
        return label, with_opposite(n, scores, name)
    return label, n.emit("concat", n.emit("neg", scores), scores, axis=1)


def _label_of_linear(n: OnnxNode, scores: Value, labels: np.ndarray) -> Value:
    """Look up the label of the highest score. Of two labels, a high enough score of either class means the second."""
    best = best_label(n, scores, labels)
    if len(labels) > 2:
        return best
    top = reshape(n, n.emit("max", scores, axes=(1,), keep=False), (scores.type.dims[0],))
    if (n.float_array("coefficients") >= 0).all():
        high = n.emit("less_equal", n.literal(0.5, "f32"), top)
    else:
        high = n.emit("less", 0.0, top)
    return n.emit("where", high, n.literal(int(labels[1]), "i64"), best)


RULES: dict[str, Rule] = {"SVMRegressor": _regressor, "SVMClassifier": _classifier}
