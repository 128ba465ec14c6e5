"""What ONNX's shape inference promises of the results of nodes.

It is asked once about the model's own graph (source.py), and node by node inside of loops, branches and functions, where types come with the operands.
What it says is a check on our rules, and the type of results that are lost; nothing is taken from it that a rule could not tell.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx
from onnx import numpy_helper
from onnx.helper import make_opsetid, make_tensor_type_proto, np_dtype_to_tensor_dtype

from penstock.ir.types import TensorType, numpy_dtype

from .node import Node
from .source import SMALL, our_dtype
from .tensors import Empty, Known, Lost, Tensor, TensorList

Promises = Mapping[str, TensorType]


def static_types(inferred: Mapping[str, onnx.TypeProto]) -> dict[str, TensorType]:
    """The types that are tensors of an element type that we have, every size a number."""
    found = {name: _static(kind) for name, kind in inferred.items()}
    return {name: kind for name, kind in found.items() if kind is not None}


def _static(kind: onnx.TypeProto) -> TensorType | None:
    if not kind.HasField("tensor_type") or not kind.tensor_type.HasField("shape"):
        return None
    shape = tuple(d.dim_value if d.HasField("dim_value") else -1 for d in kind.tensor_type.shape.dim)
    try:
        return None if -1 in shape else TensorType(our_dtype(kind.tensor_type.elem_type), shape)
    except ValueError:
        return None


def type_proto(tensor: Tensor | None) -> onnx.TypeProto | None:
    """The type of an operand as ONNX says it, an empty one when it is not given; None when it is no tensor of known type."""
    match tensor:
        case None:
            return onnx.TypeProto()
        case Known():
            return make_tensor_type_proto(np_dtype_to_tensor_dtype(tensor.array.dtype), tensor.array.shape)
        case TensorList() | Empty() | Lost(type=None):
            return None
        case _:
            assert tensor.type is not None
            return make_tensor_type_proto(np_dtype_to_tensor_dtype(numpy_dtype(tensor.type.dtype)), tensor.type.dims)


def promised_by_node(n: Node) -> Promises:
    """The types of one node's results by its operands; nothing about operators that ONNX does not know or that contain graphs."""
    proto, types, data = n.proto, {}, {}
    counts = [a.i for a in proto.attribute if a.name == "num_outputs"]
    if any(a.HasField("g") or a.graphs for a in proto.attribute) or any(count != len(proto.output) for count in counts):
        return {}
    for name, tensor in zip(proto.input, n.operands, strict=True):
        kind = type_proto(tensor)
        if kind is None:
            return {}
        if name:
            types[name] = kind
        if name and isinstance(tensor, Known) and tensor.array.size <= SMALL:
            data[name] = numpy_helper.from_array(tensor.array, name)
    try:
        schema = onnx.defs.get_schema(proto.op_type, n.opset, proto.domain)
        imports = [make_opsetid(domain, version) for domain, version in n.scope.opsets.items()]
        return static_types(onnx.shape_inference.infer_node_outputs(schema, proto, types, data, None, imports))
    except Exception:  # it raises all kinds; the rule then says what is wrong with the node
        return {}
