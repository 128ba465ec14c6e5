"""Ensembles of trees of domain ai.onnx.ml: a walk through tables by gathers, all rows and trees at once.

Every step looks up the feature and the number of the present nodes, compares, and looks up the next nodes. The weights
of the leaves are then summed, averaged, or their smallest or largest taken. Classifiers mean what onnxruntime's kernels
compute: with weights for one of two classes, the other class has the opposite score. With weights for both, the label
is 1 where the second score is above 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import numpy as np

from penstock.frontends.formulas.elementwise import widened
from penstock.frontends.formulas.layout import reshape
from penstock.frontends.formulas.scans import flipped
from penstock.frontends.onnx.node import OnnxNode, Result, Rule
from penstock.ir.graph import Value
from penstock.ir.types import FLOATS, dtype_of

from .scores import TRANSFORMS, best_label, chosen, labels_of, rows_of, transform_of, transformed, with_opposite
from .tables import EQUAL, LESS, Forest, classic_forest, newest_forest

_AGGREGATES = ("AVERAGE", "SUM", "MIN", "MAX")


def _operand(n: OnnxNode, forest: Forest) -> Value:
    """Return the features in the type that they are compared in: f64 if they or the trees are."""
    x = rows_of(n, 0, "f64" if _double(n) or forest.split.dtype == np.float64 else "f32")
    most = forest.feature.max(initial=0)
    n.require(forest.feature.min(initial=0) >= 0 and most < x.type.dims[1], f"feature {most} is not one of {x.type}")
    return x


def _double(n: OnnxNode) -> bool:
    return n.type().dtype == "f64"


def _leaves(n: OnnxNode, x: Value, forest: Forest) -> Value:
    """Walk from the roots. Return the number of each row's leaf in each tree."""
    rows, features = x.type.dims
    flat = reshape(n, x, (rows * features,))
    start = n.emit("iota", dtype="i64", shape=(rows, 1), axis=0)
    start = n.emit("mul", start, features) if features != 1 else start
    tables = {
        name: _table(n, getattr(forest, name)) for name in ("feature", "split", "mode", "first", "second", "missing")
    }
    at = n.literal(forest.roots.reshape(1, -1), "i64")
    for _ in range(forest.depth):
        place = n.emit("add", start, n.emit("gather", tables["feature"], at, axis=0))
        value = n.emit("gather", flat, place, axis=0)
        holds = _compared(n, value, n.emit("gather", tables["split"], at, axis=0), at, forest, tables)
        ways = [n.emit("gather", tables[name], at, axis=0) for name in ("first", "second")]
        at = n.emit("where", holds, *ways)
    at = n.emit("broadcast", at, shape=(rows, len(forest.roots))) if at.type.dims[0] != rows else at
    return n.emit("sub", at, forest.inner) if forest.inner else at


def _table(n: OnnxNode, array: np.ndarray) -> Value:
    array = array.astype(np.uint8) if array.dtype == np.bool_ else array
    return n.literal(array, dtype_of(array.dtype))


def _compared(n: OnnxNode, value: Value, split: Value, at: Value, forest: Forest, tables: dict[str, Value]) -> Value:
    """Compare as the present nodes say. Only comparisons that some node makes are written."""
    modes = np.unique(forest.mode[: forest.inner]).tolist()
    kinds = {mode: "equal" if mode == EQUAL else "less" if mode == LESS else "less_equal" for mode in modes}
    mine = n.emit("gather", tables["mode"], at, axis=0) if len(modes) > 1 else None
    holds = n.emit(kinds[modes[0]], value, split)
    for mode in modes[1:]:
        assert mine is not None
        holds = n.emit("where", n.emit("equal", mine, mode), n.emit(kinds[mode], value, split), holds)
    if forest.missing.any():
        goes = n.emit("less", 0, n.emit("gather", tables["missing"], at, axis=0))
        odd = n.emit("not", n.emit("equal", value, value))
        holds = n.emit("or", holds, n.emit("and", odd, goes))
    return holds


def _gathered(n: OnnxNode, table: np.ndarray, leaves: Value) -> Value:
    """Look up a row of each leaf: [rows, trees, targets]."""
    return n.emit("gather", _table(n, table), leaves, axis=0)


def _weighed(n: OnnxNode, forest: Forest, leaves: Value) -> Value | None:
    """Compute which targets have a weight in some tree, [rows, targets]. None if all have one in any case."""
    if _always_weighed(forest).all():
        return None
    marks = _gathered(n, forest.weighed.astype(np.float32), leaves)
    return n.emit("less", 0.0, n.emit("max", marks, axes=(1,), keep=False))


def _or_nothing(n: OnnxNode, forest: Forest, leaves: Value, sums: Value) -> Value:
    """Replace by 0 what is said of targets without any weight. Their base value does not count either."""
    some = _weighed(n, forest, leaves)
    return sums if some is None else n.emit("where", some, sums, 0.0)


def _always_weighed(forest: Forest) -> np.ndarray:
    """Say of each target whether some tree has a weight for it in every leaf."""
    always = np.zeros(forest.weights.shape[1], bool)
    for root in np.unique(forest.roots):
        leaves, here = [], np.array([root])
        while len(here):
            leaves.append(here[here >= forest.inner])
            here = here[here < forest.inner]
            here = np.unique(np.concatenate([forest.first[here], forest.second[here]])) if len(here) else here
        always |= forest.weighed[np.concatenate(leaves) - forest.inner].all(0)
    return always


def _aggregated(n: OnnxNode, forest: Forest, leaves: Value, how: str) -> Value:
    """Join the weights of the trees to sums, means, or the smallest or largest of those that there are."""
    if how in ("SUM", "AVERAGE"):
        total = n.emit("sum", _gathered(n, forest.weights, leaves), axes=(1,), keep=False)
        return total if how == "SUM" else n.emit("div", total, float(len(forest.roots)))
    table = np.where(forest.weighed, forest.weights, inf if how == "MIN" else -inf).astype(forest.weights.dtype)
    weights = _gathered(n, table, leaves)
    best = n.emit("max", flipped(n, weights) if how == "MIN" else weights, axes=(1,), keep=False)
    return flipped(n, best) if how == "MIN" else best


def _with_base(n: OnnxNode, sums: Value, base: np.ndarray) -> Value:
    n.require(len(base) in (0, sums.type.dims[1]), f"{len(base)} base values do not fit {sums.type.dims[1]} targets")
    return (
        n.emit("add", sums, base.astype(np.float64 if sums.type.dtype == "f64" else np.float32)) if len(base) else sums
    )


def _regressor(n: OnnxNode) -> Result:
    targets, how, name = n.int_attr("n_targets", 1), n.text_attr("aggregate_function", "SUM"), transform_of(n)
    n.require(how in _AGGREGATES, f"aggregate_function={how} is not known")
    forest, base, _ = classic_forest(n, "target", targets, _double(n))
    leaves = _leaves(n, _operand(n, forest), forest)
    sums = _with_base(n, _aggregated(n, forest, leaves, how), base)
    return transformed(n, n.cast(_or_nothing(n, forest, leaves, sums), "f32"), name)


def _newest(n: OnnxNode) -> Result:
    """Write TreeEnsemble, whose result has the type of its operand.

    Its transforms go by numbers, here in the order of onnxruntime. ONNX calls SOFTMAX 1 and LOGISTIC 2.
    """
    dtype = n.type().dtype
    n.require(dtype in FLOATS, f"needs floats, got {n.type()}")
    how, name = n.int_attr("aggregate_function", 1), n.int_attr("post_transform")
    n.require(
        0 <= how < len(_AGGREGATES) and 0 <= name < len(TRANSFORMS), "aggregate_function or post_transform is not known"
    )
    forest = newest_forest(n, n.int_attr("n_targets", 1))
    leaves = _leaves(n, _operand(n, forest), forest)
    sums = widened(n, _or_nothing(n, forest, leaves, _aggregated(n, forest, leaves, _AGGREGATES[how])))
    return n.cast(transformed(n, sums, TRANSFORMS[name]), dtype)


def _classifier(n: OnnxNode) -> Sequence[Result]:
    name = transform_of(n)
    labels = labels_of(n, "classlabels_strings", "classlabels_int64s")
    n.require(len(labels) > 1, "needs two labels or more")
    forest, base, classes = classic_forest(n, "class", len(labels), _double(n))
    leaves = _leaves(n, _operand(n, forest), forest)
    sums = _aggregated(n, forest, leaves, "SUM")
    if len(labels) == 2:
        return _of_two(n, forest, n.cast(sums, "f32"), base.astype(np.float32), classes, (labels, name))
    scores = n.cast(_with_base(n, sums, base), "f32")
    some = None if len(base) else _weighed(n, forest, leaves)  # classes without a weight are not chosen
    rated = scores if some is None else n.emit("where", some, scores, -inf)
    return best_label(n, rated, labels), transformed(n, scores, name)


def _of_two(
    n: OnnxNode, forest: Forest, sums: Value, base: np.ndarray, classes: frozenset[int], wanted: tuple[np.ndarray, str]
) -> Sequence[Result]:
    """Write label and scores of two classes as onnxruntime computes them."""
    labels, name = wanted
    no, yes = labels.tolist()
    parts = [n.emit("slice", sums, start=(0, i), stop=(sums.type.dims[0], i + 1), step=(1, 1)) for i in (0, 1)]
    rows = (sums.type.dims[0],)
    positive = bool((forest.weights >= 0).all())
    limit = 0.5 if positive else 0.0
    n.require(len(base) <= (2 if classes == {0} else 1), f"{len(base)} base values are not supported for these weights")
    if classes == {0}:
        score = n.emit("add", parts[0], float(base[0])) if len(base) else parts[0]
        label = chosen(n, n.emit("less", n.literal(limit, "f32"), reshape(n, score, rows)), yes, no)
        if len(base) == 2:
            nothing = n.emit("const", value=0.0, dtype="f32", shape=score.type.dims)
            return label, transformed(n, n.emit("concat", score, nothing, axis=1), name)
        n.require(name != "PROBIT", "PROBIT of weights for one of two classes is not supported")
        if positive or name == "LOGISTIC":
            return label, with_opposite(n, score, name)
        return label, n.emit("concat", n.emit("neg", score), score, axis=1)
    if classes == {1}:
        label = chosen(n, n.emit("less", n.literal(limit, "f32"), reshape(n, parts[1], rows)), yes, no)
        return label, transformed(n, sums, name)
    n.require(labels.tolist() == [0, 1], "two classes that both have weights need the labels 0 and 1")
    n.require(bool(_always_weighed(forest)[1]), "some rows have weights for the first of two classes alone")
    label = chosen(n, n.emit("less", 0.0, reshape(n, parts[1], rows)), 1, 0)
    scores = n.emit("add", sums, np.array([base[0], 0.0], np.float32)) if len(base) else sums
    return label, transformed(n, scores, name)


RULES: dict[str, Rule] = {
    "TreeEnsembleRegressor": _regressor,
    "TreeEnsembleClassifier": _classifier,
    "TreeEnsemble": _newest,
}
