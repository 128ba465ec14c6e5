"""Operators that other operators define: a model's own functions, and those that ONNX defines by a function.

In: a node and a function. Out: the results of the function, whose nodes are imported in the node's place. A function
sees its own operands only; its nodes are read at the opset that the function names. An attribute that refers to one of
the function's gets the value in this call, or else the default.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Protocol

import onnx

from penstock.frontends.writer import Refused

from .inference import type_proto
from .node import OnnxNode
from .source import graphs_of
from .tensors import NodeUnfinished, Scope, Tensor, is_lost
from .versions import DOMAINS, OPSETS

Identity = tuple[str, str, str]
# Nodes that loops, branches and functions may add to a model in all.
MOST_NODES = 10_000
# The deepest nesting of graphs: each level takes some Python calls, whose number is limited.
DEEPEST = 64


class BodyImporter(Protocol):
    """An importer of the nodes of a function, or of a graph inside a node."""

    def run_nodes(self, nodes: Sequence[onnx.NodeProto], scope: Scope) -> None: ...


def identity(proto: onnx.NodeProto | onnx.FunctionProto) -> Identity:
    """Return domain, name and overload, in which a call and its function agree."""
    name = proto.op_type if isinstance(proto, onnx.NodeProto) else proto.name
    return ("" if proto.domain in DOMAINS else proto.domain, name, proto.overload)


def results_of(scope: Scope, names: Sequence[str]) -> list[Tensor]:
    """Look up tensors by their names in a scope whose nodes have been imported."""
    tensors = [scope.find(name) for name in names]
    if any(map(is_lost, tensors)):
        raise NodeUnfinished
    missing = [name for name, tensor in zip(names, tensors, strict=True) if tensor is None]
    if missing:
        raise Refused(f"{', '.join(missing)} is a result, but was not given as operand")
    return [tensor for tensor in tensors if tensor is not None]


def call(importer: BodyImporter, n: OnnxNode, function: onnx.FunctionProto) -> list[Tensor]:
    """Import a call and return its results in the order of the function."""
    name = identity(function)
    if name in n.scope.calls:
        raise Refused("the function calls itself")
    if n.count > len(function.input):
        raise Refused(f"the function takes {len(function.input)} operands, got {n.count}")
    opsets = {"" if entry.domain in DOMAINS else entry.domain: int(entry.version) for entry in function.opset_import}
    opsets = {**n.scope.opsets, **opsets}
    if opsets[""] not in OPSETS:
        raise Refused(f"the function is written in opset {opsets['']}, which is not supported")
    arguments = {a.name: a for a in n.attributes}
    attributes: dict[str, onnx.AttributeProto | None] = dict.fromkeys(function.attribute)
    attributes |= {a.name: a for a in function.attribute_proto}
    attributes |= {name: arguments[name] for name in attributes if name in arguments}
    n.ignore(*attributes)
    scope = Scope(opsets, f"{n.name}/", f"{n.scope.path}{n.own_name}/", calls=(*n.scope.calls, name))
    for i, formal in enumerate(function.input):
        scope.tensors[formal] = n.operand(i) if n.has(i) else None
    importer.run_nodes([_filled_in(node, attributes) for node in function.node], scope)
    wanted = len(n.proto.output)
    return results_of(scope, list(function.output)[:wanted])


def _filled_in(node: onnx.NodeProto, attributes: Mapping[str, onnx.AttributeProto | None]) -> onnx.NodeProto:
    """Replace references to a function's attributes by these attributes."""
    if not any(a.ref_attr_name or a.HasField("g") or a.graphs for a in node.attribute):
        return node
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    _fill_in(copy, attributes)
    return copy


def _fill_in(node: onnx.NodeProto, attributes: Mapping[str, onnx.AttributeProto | None]) -> None:
    kept = []
    for attribute in node.attribute:
        if attribute.ref_attr_name:
            value = attributes.get(attribute.ref_attr_name)
            if value is None:  # an optional attribute that the call leaves out
                continue
            named = onnx.AttributeProto()
            named.CopyFrom(value)
            named.name = attribute.name
            attribute = named
        for graph in graphs_of(attribute):
            for inner in graph.node:
                _fill_in(inner, attributes)
        kept.append(attribute)
    whole = [onnx.AttributeProto.FromString(a.SerializeToString()) for a in kept]
    del node.attribute[:]
    node.attribute.extend(whole)


# ---------------------------------------------------------------------------------------- ONNX's own definitions


@cache
def has_definition(kind: str) -> bool:
    """Return whether ONNX defines a standard operator by other operators, in any opset."""
    schemas: list[Any] = [s for s in onnx.defs.get_all_schemas() if s.name == kind and s.domain == ""]
    return any(s.has_function or s.has_context_dependent_function for s in schemas)


def definition(n: OnnxNode) -> onnx.FunctionProto | None:
    """Return ONNX's definition of a standard operator by other operators, if any.

    It may depend on the types of the operands.
    """
    try:
        schema: Any = onnx.defs.get_schema(n.kind, n.opset, "")
    except onnx.defs.SchemaError:
        return None
    body = b""
    if schema.has_context_dependent_function:
        types = [type_proto(tensor) for tensor in n.operands]
        if all(t is not None for t in types):
            version = _newest(schema.context_dependent_function_opset_versions, n.opset)
            parts = [t.SerializeToString() for t in types if t is not None]
            body = schema.get_context_dependent_function_with_opset_version(version, n.proto.SerializeToString(), parts)
    elif schema.has_function:
        body = schema.get_function_with_opset_version(_newest(schema.function_opset_versions, n.opset))
    return onnx.FunctionProto.FromString(body) if body else None


def _newest(versions: Sequence[int], opset: int) -> int:
    """Choose the newest body not newer than the model, else the oldest: it names its own opset and means the same."""
    return max((v for v in versions if v <= opset), default=min(versions))
