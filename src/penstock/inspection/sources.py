"""The nodes of a model that operations came from.

In: a bundle and the `loc` of an operation. Out: a SourceNode.

For a bundle compiled from ONNX the node itself is read, from the structure that the bundle keeps of its model. For one
from torch the `loc` is the path of the module and the name of the call. Nodes inside local functions and subgraphs have
their place before their name, and only that is known of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from penstock.backends.bundle.format import Bundle
from penstock.frontends.names import legal
from penstock.ir.graph import Module

ONNX, TORCH, VARIABLE = "ONNX node", "torch call", "variable"


@dataclass(frozen=True)
class SourceNode:
    """A node of the source model.

    `kind` is the frontend's kind of node, empty where that is unknown; the other fields are what is known of the node.
    `module` is the path of a torch module.
    """

    name: str
    kind: str = ""
    op_type: str = ""
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()
    module: str = ""


def source_of(bundle: Bundle | None, module: Module, loc: str) -> SourceNode:
    """Return the node that a `loc` names."""
    if loc in module.vars:
        return SourceNode(loc, VARIABLE)
    if bundle is not None and bundle.source_rest is not None:
        path, slash, call = loc.rpartition("/")
        return SourceNode(loc, TORCH, call if slash else loc, module=path)
    if bundle is not None and (structure := bundle.source_structure) is not None:
        return _nodes(structure).get(loc, SourceNode(loc, ONNX))
    return SourceNode(loc)


@lru_cache(maxsize=2)
def _nodes(structure: Path) -> dict[str, SourceNode]:
    return {source.name: source for source in _read(structure)}


def _read(structure: Path) -> Iterator[SourceNode]:
    import onnx

    from penstock.frontends.onnx.source import node_name  # lazy: heavy

    model = onnx.load_model(str(structure), load_external_data=False)
    for index, node in enumerate(model.graph.node):
        attributes = tuple(str(onnx.helper.printable_attribute(attribute)) for attribute in node.attribute)
        name = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
        yield SourceNode(legal(node_name(node, index)), ONNX, name, tuple(node.input), tuple(node.output), attributes)
