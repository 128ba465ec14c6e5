"""One node of domain ai.onnx.ml as a file, and random trees for it: what the tests of this folder share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper

Arrays = Mapping[str, np.ndarray]
MODES = ("LEQ", "LT", "GTE", "GT", "EQ", "NEQ")


def write_node(
    path: Path, kind: str, feeds: Arrays, outputs: Sequence[type], opset: int = 3, **attributes: Any
) -> Path:
    """Write a model of one node, whose inputs are `feeds`, and whose outputs have these types and any shape."""
    names = [f"y{i}" for i in range(len(outputs))]
    node = helper.make_node(kind, list(feeds), names, domain="ai.onnx.ml", **attributes)
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in feeds.items()
    ]
    results = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), None)
        for name, dtype in zip(names, outputs, strict=True)
    ]
    graph = helper.make_graph([node], "ml", inputs, results)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("ai.onnx.ml", opset)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)
    return path


def compared_by(transform: str | int) -> Callable[[np.ndarray], np.ndarray]:
    """Return through which function results are compared. PROBIT ends in a root, which halves digits next to 0."""
    return (lambda x: x * np.abs(x)) if transform in ("PROBIT", 4) else np.asarray


def features_of(random: np.random.Generator, dtype: np.dtype, rows: int, columns: int) -> np.ndarray:
    """Draw features on a coarse grid, so that equal numbers occur."""
    return (random.integers(-8, 9, (rows, columns)) / (1 if np.issubdtype(dtype, np.integer) else 2)).astype(dtype)


def random_trees(
    random: np.random.Generator, trees: int, features: int, modes: tuple[str, ...]
) -> dict[str, list[Any]]:
    """Grow random trees, as the attributes of their nodes. Nodes are listed in no order, and some trees are one leaf."""
    rows: list[tuple[Any, ...]] = []
    for tree in range(trees):
        open_nodes, used = [0], 1
        while open_nodes:
            node = open_nodes.pop()
            if used > 12 or (used > 1 and random.random() < 0.3) or random.random() < 0.05:
                rows.append((tree, node, 0, 0.0, "LEAF", 0, 0, 0))
                continue
            mode = modes[random.integers(len(modes))]
            split = float(random.integers(-6, 7)) / 2
            rows.append(
                (
                    tree,
                    node,
                    int(random.integers(features)),
                    split,
                    f"BRANCH_{mode}",
                    used,
                    used + 1,
                    int(random.integers(2)),
                )
            )
            open_nodes += [used, used + 1]
            used += 2
    names = (
        "treeids",
        "nodeids",
        "featureids",
        "values",
        "modes",
        "truenodeids",
        "falsenodeids",
        "missing_value_tracks_true",
    )
    return {f"nodes_{name}": list(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}


def leaves_of(nodes: Mapping[str, list[Any]]) -> list[tuple[int, int]]:
    columns = (nodes["nodes_treeids"], nodes["nodes_nodeids"], nodes["nodes_modes"])
    return [(tree, node) for tree, node, mode in zip(*columns, strict=True) if mode == "LEAF"]
