"""Random ensembles of trees against onnxruntime: all comparisons, missing values, aggregates and transforms; and controls."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import numpy_helper

from penstock.frontends.onnx import import_onnx
from penstock.frontends.onnx.rules.ml import tables, trees
from penstock.frontends.onnx.rules.ml.scores import TRANSFORMS
from penstock.support.errors import UnsupportedModel

from ...cases import compare, run
from .cases import MODES, compared_by, features_of, leaves_of, random_trees, write_node

FLOATS = (np.float32, np.float64)
TYPES = (*FLOATS, np.int32, np.int64)
SEEDS = st.integers(0, 1 << 30)


def _agree(
    kind: str, feeds: dict[str, np.ndarray], outputs: tuple[type, ...], opset: int = 3, **attributes: Any
) -> None:
    with TemporaryDirectory() as folder, np.errstate(all="ignore"):
        path = write_node(Path(folder) / "trees.onnx", kind, feeds, outputs, opset, **attributes)
        compare(path, feeds, through=compared_by(attributes.get("post_transform", "NONE")))


def _fed(random: np.random.Generator, dtype: type, rows: int = 9, columns: int = 4) -> dict[str, np.ndarray]:
    x = features_of(random, np.dtype(dtype), rows, columns)
    if np.issubdtype(dtype, np.floating):
        x[random.random(x.shape) < 0.15] = np.nan
        x[0, 0], x[1, 1] = np.inf, -np.inf
    return {"x": x}


def _modes(random: np.random.Generator) -> tuple[str, ...]:
    return (MODES[random.integers(len(MODES))],) if random.random() < 0.5 else MODES


@settings(max_examples=60, deadline=None)
@given(SEEDS, st.sampled_from(FLOATS), st.sampled_from(["SUM", "AVERAGE", "MIN", "MAX"]), st.sampled_from(TRANSFORMS))
def test_regressors(seed: int, dtype: type, how: str, transform: str) -> None:
    random = np.random.default_rng(seed)
    nodes = random_trees(random, int(random.integers(1, 5)), 4, _modes(random))
    targets = int(random.integers(1, 4))
    rows = [
        (tree, node, target, float(random.standard_normal()))
        for tree, node in leaves_of(nodes)
        for target in range(targets)
        if targets == 1 or random.random() < 0.7
    ] or [(*leaves_of(nodes)[0], 0, 1.0)]
    names = ("target_treeids", "target_nodeids", "target_ids", "target_weights")
    base = {"base_values": random.standard_normal(targets).tolist()} if random.random() < 0.5 else {}
    _agree(
        "TreeEnsembleRegressor",
        _fed(random, dtype),
        (np.float32,),
        n_targets=targets,
        aggregate_function=how,
        post_transform=transform,
        **nodes,
        **{name: list(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)},
        **base,
    )


@settings(max_examples=80, deadline=None)
@given(SEEDS, st.sampled_from(TYPES), st.integers(2, 4), st.sampled_from(TRANSFORMS), st.sampled_from([0, 1, 2]))
def test_classifiers(seed: int, dtype: type, classes: int, transform: str, which: int) -> None:
    """Of two classes, weights are for the first, the second, or both."""
    random = np.random.default_rng(seed)
    nodes = random_trees(random, int(random.integers(1, 5)), 4, _modes(random))
    weighed = [which] if classes == 2 and which < 2 else range(classes)
    low = 0.05 if random.random() < 0.5 else -1.0
    rows = [
        (tree, node, target, float(random.uniform(low, 1)))
        for tree, node in leaves_of(nodes)
        for target in weighed
        if classes == 2 or target == 0 or random.random() < 0.5
    ]
    names = ("class_treeids", "class_nodeids", "class_ids", "class_weights")
    count = classes if classes > 2 else 1
    base = {"base_values": random.standard_normal(count).tolist()} if random.random() < 0.3 else {}
    if classes == 2 and which == 0 and transform == "PROBIT":
        transform = "NONE"
    _agree(
        "TreeEnsembleClassifier",
        _fed(random, dtype),
        (np.int64, np.float32),
        classlabels_int64s=[0, 1] if classes == 2 and which == 2 else [int(x) for x in random.permutation(9)[:classes]],
        post_transform=transform,
        **nodes,
        **{name: list(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)},
        **base,
    )


def _newest(random: np.random.Generator, dtype: type, targets: int, members: bool) -> dict[str, Any]:
    """Grow random trees as attributes of TreeEnsemble, whose nodes and leaves are apart."""
    modes = (*range(7), 6, 6) if members else range(6)
    rows: list[list[Any]] = []
    leaves: list[tuple[int, float]] = []
    sets: list[float] = []
    roots = []

    def leaf() -> tuple[int, int]:
        leaves.append((int(random.integers(targets)), float(random.standard_normal())))
        return len(leaves) - 1, 1

    def grow(depth: int) -> int:
        at, mode = len(rows), int(random.choice(list(modes)))
        rows.append([int(random.integers(4)), float(random.integers(-6, 7)) / 2, mode, int(random.integers(2))])
        if mode == 6:
            sets.extend([*(random.choice(np.arange(-6.0, 7.0), random.integers(1, 5), replace=False).tolist()), np.nan])
        ways = [leaf() if depth == 0 or random.random() < 0.3 else (grow(depth - 1), 0) for _ in range(2)]
        rows[at] += [ways[0][0], ways[0][1], ways[1][0], ways[1][1]]
        return at

    for _ in range(random.integers(1, 5)):
        roots.append(grow(int(random.integers(0, 4))))
    feature, split, mode, missing, yes, yes_leaf, no, no_leaf = (list(column) for column in zip(*rows, strict=True))
    owners, weights = zip(*leaves, strict=True)
    tensor = numpy_helper.from_array
    return {
        "nodes_featureids": feature, "nodes_splits": tensor(np.array(split, dtype)), "nodes_modes": tensor(np.array(mode, np.uint8)),
        "nodes_truenodeids": yes, "nodes_trueleafs": yes_leaf, "nodes_falsenodeids": no, "nodes_falseleafs": no_leaf,
        "nodes_missing_value_tracks_true": missing, "tree_roots": roots, "leaf_targetids": list(owners),
        "leaf_weights": tensor(np.array(weights, dtype)), "n_targets": targets,
        **({"membership_values": tensor(np.array(sets, dtype))} if sets else {}),
    }  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(SEEDS, st.sampled_from(FLOATS), st.integers(0, 3), st.integers(0, 4), st.booleans())
def test_ensembles_of_the_newest_form(seed: int, dtype: type, how: int, transform: int, members: bool) -> None:
    random = np.random.default_rng(seed)
    attributes = _newest(random, dtype, int(random.integers(1, 4)), members)
    feeds = _fed(random, dtype)
    if members:  # onnxruntime holds integers in sets only, and takes -0.5 for 0 in some
        feeds = {"x": np.round(feeds["x"])}
    _agree("TreeEnsemble", feeds, (dtype,), 5, aggregate_function=how, post_transform=transform, **attributes)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_sets_of_members_and_halves_by_the_definition(tmp_path: Path, dtype: type) -> None:
    """No fraction is a member of a set of integers. onnxruntime takes -0.5 for one here, and has no kernel for f16."""
    tensor = numpy_helper.from_array
    x = np.array([[0], [-0.5], [-4], [4], [1], [np.nan], [np.inf]], dtype)
    for tracks in (0, 1):
        attributes: dict[str, Any] = {
            "nodes_featureids": [0], "nodes_splits": tensor(np.array([9], dtype)), "nodes_modes": tensor(np.array([6], np.uint8)),
            "nodes_truenodeids": [0], "nodes_trueleafs": [1], "nodes_falsenodeids": [1], "nodes_falseleafs": [1],
            "nodes_missing_value_tracks_true": [tracks], "tree_roots": [0], "leaf_targetids": [0, 0],
            "leaf_weights": tensor(np.array([1, 2], dtype)), "n_targets": 1,
            "membership_values": tensor(np.array([4, -4, 0, np.nan], dtype)),
        }  # fmt: skip
        path = write_node(tmp_path / "trees.onnx", "TreeEnsemble", {"x": x}, (dtype,), 5, **attributes)
        found = run(import_onnx(path), {"x": x})[0]
        assert found.dtype == dtype
        assert found.reshape(-1).tolist() == [1, 2, 1, 1, 2, 2 - tracks, 2]


@pytest.mark.parametrize("opset", [1, 2, 3, 4])
def test_older_forms_of_the_operators(opset: int) -> None:
    random = np.random.default_rng(opset)
    nodes = random_trees(random, 3, 4, MODES)
    rows = [(tree, node, 0, float(random.standard_normal())) for tree, node in leaves_of(nodes)]
    names = ("target_treeids", "target_nodeids", "target_ids", "target_weights")
    weights = {name: list(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}
    _agree("TreeEnsembleRegressor", _fed(random, np.float32), (np.float32,), opset, n_targets=1, **nodes, **weights)


def test_numbers_of_64_bits(tmp_path: Path) -> None:
    """Splits and weights as tensors: f32 does not tell these splits and features from each other."""
    random = np.random.default_rng(0)
    nodes = random_trees(random, 3, 4, ("LEQ",))
    nodes["nodes_values"] = [1 + 1e-12 * value for value in nodes["nodes_values"]]
    leaves = leaves_of(nodes)
    splits = numpy_helper.from_array(np.array(nodes.pop("nodes_values")))
    weights = numpy_helper.from_array(random.standard_normal(len(leaves)))
    feeds = {"x": 1 + 1e-12 * random.integers(-6, 7, (20, 4)) / 2}
    _agree(
        "TreeEnsembleRegressor", feeds, (np.float32,), n_targets=1, nodes_values_as_tensor=splits, target_weights_as_tensor=weights,
        target_treeids=[t for t, _ in leaves], target_nodeids=[i for _, i in leaves], target_ids=[0] * len(leaves), **nodes,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------- controls and refusals

STUMP: dict[str, Any] = {
    "nodes_treeids": [0, 0, 0],
    "nodes_nodeids": [0, 1, 2],
    "nodes_featureids": [0, 0, 0],
    "nodes_values": [0.5, 0.0, 0.0],
    "nodes_modes": ["BRANCH_LEQ", "LEAF", "LEAF"],
    "nodes_truenodeids": [1, 0, 0],
    "nodes_falsenodeids": [2, 0, 0],
    "n_targets": 1,
    "target_treeids": [0, 0],
    "target_nodeids": [1, 2],
    "target_ids": [0, 0],
    "target_weights": [1.0, 2.0],
}
X = {"x": np.array([[0.0], [0.5], [1.0], [np.nan]], np.float32)}


@pytest.mark.parametrize("part", ["less", "missing", "step"])
def test_wrong_walks_are_caught(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attributes = {**STUMP, "nodes_missing_value_tracks_true": [1, 0, 0]}
    _agree("TreeEnsembleRegressor", X, (np.float32,), **attributes)
    if part == "less":
        monkeypatch.setitem(tables._KEPT, "LEQ", tables.LESS)
    if part == "missing":
        attributes["nodes_missing_value_tracks_true"] = [0, 0, 0]
        build = tables.ForestBuilder.add
        monkeypatch.setattr(tables.ForestBuilder, "add", lambda self, *rest, missing=True: build(self, *rest[:4], True))
    if part == "step":
        leaves = trees._leaves
        monkeypatch.setattr(trees, "_leaves", lambda n, x, forest: n.emit("sub", 1, leaves(n, x, forest)))
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        _agree("TreeEnsembleRegressor", X, (np.float32,), **attributes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"nodes_modes": ["BRANCH_ODD", "LEAF", "LEAF"]}, "comparison ODD is not known"),
        ({"nodes_truenodeids": [7, 0, 0]}, "tree 0 has no node 7"),
        ({"nodes_nodeids": [0, 1, 1]}, "two nodes 1"),
        ({"nodes_truenodeids": [0, 0, 0], "nodes_falsenodeids": [0, 0, 0]}, "every tree needs one root"),
        ({"nodes_featureids": [3, 0, 0]}, "feature 3 is not one of"),
        ({"target_ids": [0, 4]}, "targets beyond the 1"),
        ({"target_nodeids": [0, 2]}, "no leaf"),
        ({"nodes_values": [0.5]}, "differ in length"),
        ({"aggregate_function": "MEDIAN"}, "aggregate_function=MEDIAN"),
        ({"post_transform": "CUBE"}, "post_transform=CUBE"),
    ],
)
def test_what_makes_no_tree_says_why(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    path = write_node(tmp_path / "trees.onnx", "TreeEnsembleRegressor", X, (np.float32,), **{**STUMP, **changes})
    with pytest.raises(UnsupportedModel, match=said):
        import_onnx(path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"classlabels_strings": ["no", "yes"]}, "labels that are strings are not supported"),
        ({"classlabels_int64s": [3]}, "two labels or more"),
        ({"classlabels_int64s": [3, 4], "class_ids": [0, 1]}, "need the labels 0 and 1"),
        ({"classlabels_int64s": [0, 1], "class_ids": [1, 0]}, "first of two classes alone"),
        ({"classlabels_int64s": [0, 1], "post_transform": "PROBIT"}, "PROBIT"),
    ],
)
def test_classes_that_are_not_supported_say_why(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    stump = {name.replace("target_", "class_"): column for name, column in STUMP.items() if name != "n_targets"}
    outputs = (np.int64, np.float32)
    path = write_node(tmp_path / "trees.onnx", "TreeEnsembleClassifier", X, outputs, **{**stump, **changes})
    with pytest.raises(UnsupportedModel, match=said):
        import_onnx(path)
