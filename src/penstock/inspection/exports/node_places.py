"""The places of the nodes of an ONNX model in the program that was compiled from it.

In: a model and the module of a bundle of it. Out: for every node, the operations of the forward pass that compute it. A
node that was fused into the operation of another has the operations that use all of its results.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx

from penstock.frontends.names import legal
from penstock.frontends.onnx.source import node_name
from penstock.ir.graph import Module

from .placed import Placed, forward_graphs, placed_ops


def node_places(model: onnx.ModelProto, module: Module) -> list[list[Placed]]:
    """Return the operations of every node. A node with graphs or a function inside has those of these."""
    by_path: dict[str, list[Placed]] = {}
    for graph in forward_graphs(module):
        for placed in placed_ops(module, graph):
            path = placed.op.loc
            while path:
                by_path.setdefault(path, []).append(placed)
                path = path.rpartition("/")[0]
    places = [by_path.get(legal(node_name(node, index)), []) for index, node in enumerate(model.graph.node)]
    return _absorbed(model.graph, places)


def _absorbed(graph: onnx.GraphProto, places: Sequence[list[Placed]]) -> list[list[Placed]]:
    """Return the operations of every node.

    A node without operations, though it depends on the inputs, gets those of the nodes that use its results. These must
    be of the same stages.
    """
    users: dict[str, list[int]] = {}
    # Shapes are known when a model is compiled: what is computed from them is folded away.
    varies = {value.name for value in graph.input} - {tensor.name for tensor in graph.initializer}
    for index, node in enumerate(graph.node):
        names = _taken(node)
        if node.op_type not in ("Shape", "Size") and any(name in varies for name in names):
            varies.update(node.output)
            for name in dict.fromkeys(names):
                users.setdefault(name, []).append(index)
    ops_of = list(places)
    # Nodes stand after those whose results they use.
    for index in reversed(range(len(ops_of))):
        results = [name for name in graph.node[index].output if name in varies]
        after = [ops_of[user] for name in results for user in users.get(name, ())]
        if not ops_of[index] and len({frozenset(op.stage for op in ops) for ops in after}) == 1:
            ops_of[index] = [op for ops in after for op in ops]
    return ops_of


def _taken(node: onnx.NodeProto) -> list[str]:
    """Return the names of a node's operands, and of those of graphs inside it."""
    inner = (
        graph
        for attribute in node.attribute
        for graph in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs)
    )
    return [name for name in node.input if name] + [
        name for graph in inner for each in graph.node for name in _taken(each)
    ]
