"""The trees of an ensemble as tables, read from the attributes of a node.

Every inner node compares a feature with a number and goes on to one of two nodes. There are three comparisons: at most,
less, equal. Those for more, at least and unequal are the same with the ways exchanged. A set of numbers becomes a chain
of nodes that compare with one number each. `missing` says that what is no number takes the first way; else it takes the
second.

Inner nodes come first, then the leaves, which lead to themselves. A walk of `depth` steps from any root so ends in a
leaf.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass

import numpy as np

from penstock.frontends.onnx.node import OnnxNode
from penstock.frontends.writer import Refused

AT_MOST, LESS, EQUAL = range(3)
# The first ways of these comparisons are exchanged with the second: how they are written then.
_EXCHANGED = {"GTE": LESS, "GT": AT_MOST, "NEQ": EQUAL}
_KEPT = {"LEQ": AT_MOST, "LT": LESS, "EQ": EQUAL}
_MEMBER = "MEMBER"
# Comparisons of TreeEnsemble by their numbers.
_MODES = ("LEQ", "LT", "GTE", "GT", "EQ", "NEQ", _MEMBER)
# Every step of a walk is written out.
DEEPEST_TREE = 500


@dataclass(frozen=True)
class Forest:
    """Trees as tables over their nodes, inner ones first.

    `weights` has a row per leaf and a column per target, `weighed` says which of these the leaf has a weight for.
    """

    feature: np.ndarray
    split: np.ndarray
    mode: np.ndarray
    first: np.ndarray
    second: np.ndarray
    missing: np.ndarray
    roots: np.ndarray
    depth: int
    inner: int
    weights: np.ndarray
    weighed: np.ndarray


class ForestBuilder:
    """The inner nodes of trees under construction. A way is a node, or -1 less the number of a leaf."""

    def __init__(self, dtype: np.dtype) -> None:
        self._dtype = dtype
        self._rows: list[tuple[int, float, int, int, int, bool]] = []

    def add(self, mode: str, feature: int, split: float, ways: tuple[int, int], missing: bool) -> None:
        """Add an inner node."""
        if mode in _KEPT:
            self._rows.append((feature, split, _KEPT[mode], *ways, missing))
            return
        if mode not in _EXCHANGED:
            raise Refused(f"the comparison {mode} is not known")
        # No number is unequal to any.
        first = False if mode == "NEQ" else not missing
        self._rows.append((feature, split, _EXCHANGED[mode], ways[1], ways[0], first))

    def build(self, roots: Sequence[int], weights: np.ndarray, weighed: np.ndarray) -> Forest:
        inner, leaves = len(self._rows), len(weights)
        columns = list(zip(*self._rows, strict=True)) or [()] * 6

        def column(i: int, dtype: np.dtype | type, ends: np.ndarray | None = None) -> np.ndarray:
            of_leaves = np.zeros(leaves, dtype) if ends is None else ends
            return np.concatenate([np.array(columns[i], dtype), of_leaves])

        first, second = (column(i, np.int64, -1 - np.arange(leaves)) for i in (3, 4))
        starts = np.array(roots, np.int64)
        for way in (first, second, starts):
            if not -leaves <= way.min(initial=0) <= way.max(initial=-1) < inner:
                raise Refused("a node leads to one that is not there")
            way[way < 0] = inner - 1 - way[way < 0]
        return Forest(
            feature=column(0, np.int64),
            split=column(1, self._dtype),
            mode=column(2, np.int64),
            first=first,
            second=second,
            missing=column(5, bool),
            roots=starts,
            depth=_depth((first, second), starts, inner),
            inner=inner,
            weights=weights,
            weighed=weighed,
        )


def _depth(ways: Sequence[np.ndarray], roots: np.ndarray, inner: int) -> int:
    """Count the steps from the roots to the farthest leaf."""
    depth, here = 0, np.unique(roots)
    while len(here := here[here < inner]):
        depth += 1
        if depth > min(inner, DEEPEST_TREE):
            raise Refused("the nodes of a tree lead in a circle" if depth > inner else f"deeper than {DEEPEST_TREE}")
        here = np.unique(np.concatenate([way[here] for way in ways]))
    return depth


def _numbers(n: OnnxNode, name: str, double: bool) -> np.ndarray:
    """Read numbers that are an attribute of floats or, under a longer name, a tensor."""
    tensor = f"{name}_as_tensor"
    numbers = n.array_attr(tensor).reshape(-1) if n.given(tensor) else n.float_array(name)
    return numbers.astype(np.float64 if double or numbers.dtype == np.float64 else np.float32)


def _same_length(n: OnnxNode, columns: Mapping[str, Sized]) -> None:
    sizes = {name: len(column) for name, column in columns.items()}
    n.require(len(set(sizes.values())) == 1, f"attributes differ in length: {sizes}")


def classic_forest(n: OnnxNode, what: str, targets: int, double: bool) -> tuple[Forest, np.ndarray, frozenset[int]]:
    """Read the trees of a TreeEnsembleRegressor or -Classifier, whose weights are attributes `what`_....

    Return them, the base values, and the targets that have weights.
    """
    names = ("treeids", "nodeids", "featureids", "truenodeids", "falsenodeids")
    trees, ids, features, yes, no = (n.ints_attr(f"nodes_{name}") for name in names)
    modes, splits = n.texts_attr("nodes_modes"), _numbers(n, "nodes_values", double)
    missing = n.ints_attr("nodes_missing_value_tracks_true") or (0,) * len(ids)
    n.ignore("nodes_hitrates", "nodes_hitrates_as_tensor")
    columns: tuple[Sized, ...] = (trees, ids, features, yes, no, modes, splits, missing)
    _same_length(n, dict(zip((*names, "modes", "values", "tracks"), columns, strict=True)))
    weigh_trees, weigh_nodes, weigh_targets = (n.ints_attr(f"{what}_{name}") for name in ("treeids", "nodeids", "ids"))
    numbers = _numbers(n, f"{what}_weights", double)
    _same_length(n, {"trees": weigh_trees, "nodes": weigh_nodes, "targets": weigh_targets, "weights": numbers})

    leaves: dict[tuple[int, int], int] = {}
    inner: dict[tuple[int, int], int] = {}
    for at, mode in zip(zip(trees, ids, strict=True), modes, strict=True):
        n.require(at not in leaves and at not in inner, f"tree {at[0]} has two nodes {at[1]}")
        if mode == "LEAF":
            leaves[at] = len(leaves)
        else:
            inner[at] = len(inner)

    def place(tree: int, node: int) -> int:
        at = (tree, node)
        n.require(at in inner or at in leaves, f"tree {tree} has no node {node}")
        return inner[at] if at in inner else -1 - leaves[at]

    builder = ForestBuilder(splits.dtype)
    below: set[tuple[int, int]] = set()
    for i, mode in enumerate(modes):
        if mode != "LEAF":
            below |= {(trees[i], yes[i]), (trees[i], no[i])}
            ways = (place(trees[i], yes[i]), place(trees[i], no[i]))
            builder.add(mode.removeprefix("BRANCH_"), features[i], splits[i], ways, bool(missing[i]))
    roots = [at for at in zip(trees, ids, strict=True) if at not in below]
    n.require(len(roots) == len({tree for tree, _ in roots}) == len(set(trees)), "every tree needs one root")
    rows = [place(*at) for at in zip(weigh_trees, weigh_nodes, strict=True)]
    n.require(max(rows, default=-1) < 0, "a weight belongs to a node that is no leaf")
    table = _weights(n, [-1 - row for row in rows], weigh_targets, numbers, (len(leaves), targets))
    return (
        builder.build([place(*at) for at in roots], *table),
        _numbers(n, "base_values", double),
        frozenset(weigh_targets),
    )


def _weights(
    n: OnnxNode, rows: Sequence[int], targets: Sequence[int], numbers: np.ndarray, shape: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Make the tables of weights, and of who has one. A leaf of a single target has one in any case: 0."""
    n.require(shape[0] > 0 and shape[1] > 0 and len(rows) > 0, "there are no leaves with weights")
    n.room(shape[0] * shape[1])
    n.require(0 <= min(targets) <= max(targets) < shape[1], f"weights of targets beyond the {shape[1]} that there are")
    n.require(len(set(zip(rows, targets, strict=True))) == len(rows), "a leaf has two weights for one target")
    weights, weighed = np.zeros(shape, numbers.dtype), np.full(shape, shape[1] == 1)
    weights[list(rows), list(targets)] = numbers
    weighed[list(rows), list(targets)] = True
    return weights, weighed


def newest_forest(n: OnnxNode, targets: int) -> Forest:
    """Read the trees of a TreeEnsemble. Each leaf has one weight, for one target."""
    names = ("featureids", "truenodeids", "falsenodeids", "trueleafs", "falseleafs")
    features, yes, no, yes_leaf, no_leaf = (n.ints_attr(f"nodes_{name}") for name in names)
    splits, modes = _widened(n.array_attr("nodes_splits")), n.array_attr("nodes_modes").reshape(-1)
    missing = n.ints_attr("nodes_missing_value_tracks_true") or (0,) * len(features)
    n.ignore("nodes_hitrates")
    columns: tuple[Sized, ...] = (features, yes, no, yes_leaf, no_leaf, splits, modes, missing)
    _same_length(n, dict(zip((*names, "splits", "modes", "tracks"), columns, strict=True)))
    n.require(all(0 <= mode < len(_MODES) for mode in modes), "a comparison is not known")
    sets = _sets(n.array_attr("membership_values").reshape(-1)) if n.given("membership_values") else []
    members = iter(sets)
    n.require(sum(_MODES[mode] == _MEMBER for mode in modes) == len(sets), f"there are {len(sets)} sets of members")
    builder = ForestBuilder(splits.dtype)
    extra: list[tuple[int, float, tuple[int, int]]] = []
    for i, mode in enumerate(modes):
        n.require(min(yes[i], no[i]) >= 0, "a node leads to one that is not there")
        ways = tuple(-1 - way if leaf else way for way, leaf in ((yes[i], yes_leaf[i]), (no[i], no_leaf[i])))
        if _MODES[mode] != _MEMBER:
            builder.add(_MODES[mode], features[i], splits[i], (ways[0], ways[1]), bool(missing[i]))
            continue
        first, *others = next(members)
        # The others are asked in turn, in nodes behind all of the file's.
        at = len(modes) + len(extra)
        extra += [
            (features[i], number, (ways[0], ways[1] if k + 1 == len(others) else at + k + 1))
            for k, number in enumerate(others)
        ]
        builder.add("EQ", features[i], first, (ways[0], at if others else ways[1]), bool(missing[i]))
    n.room(len(extra))
    for feature, number, two in extra:
        builder.add("EQ", feature, number, two, missing=False)
    numbers = _widened(n.array_attr("leaf_weights"))
    owners = n.ints_attr("leaf_targetids")
    _same_length(n, {"leaf_targetids": owners, "leaf_weights": numbers})
    table = _weights(n, range(len(owners)), owners, numbers, (len(owners), targets))
    return builder.build(n.ints_attr("tree_roots"), *table)


def _widened(numbers: np.ndarray) -> np.ndarray:
    """Convert numbers to f32, but those that are f64."""
    return numbers.reshape(-1).astype(np.float64 if numbers.dtype == np.float64 else np.float32)


def _sets(numbers: np.ndarray) -> list[list[float]]:
    """Split members into sets, each of which ends with what is no number."""
    sets: list[list[float]] = [[]]
    for number in numbers.tolist():
        if number != number:
            sets.append([])
        else:
            sets[-1].append(number)
    return [members for members in sets if members]
