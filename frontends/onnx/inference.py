"""Types of node results, as ONNX's shape inference promises them.

Shape inference runs node by node, with the types that the operands have here. Its answers check our rules, give the
type of lost results, and say how large a result to be computed at import will be. No import depends on them for
anything that a rule could not derive.

Shape inference is native code that trusts its input: run over whole graphs, it ends the process for files that its
checker accepts. It is made for single nodes whose operands have static types. `_harmless` keeps other nodes from it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import onnx
from onnx import numpy_helper
from onnx.helper import make_opsetid, make_tensor_type_proto, np_dtype_to_tensor_dtype

from penstock.frontends.writer import Lost
from penstock.ir.types import TensorType, numpy_dtype

from .node import OnnxNode
from .source import SMALL, our_dtype
from .tensors import Empty, KnownTensor, Tensor, TensorList

# Attributes that name dimensions of operands; and operators whose results have dimensions that the operands lack, or
# that take one behind the last.
_PLACES = ("axis", "axes", "batch_axis", "time_axis", "perm")
_NEW_PLACES = ("Unsqueeze", "Flatten", "OneHot")
# Errors that it raises beside its own: the checker's, and Python's for native exceptions (out of range, a bad length,
# bytes that are no text).
_RAISED = (
    onnx.checker.ValidationError,
    onnx.defs.SchemaError,
    RuntimeError,
    ValueError,
    LookupError,
    TypeError,
)


@dataclass(frozen=True)
class Promises:
    """The promised types and sizes of results by their names.

    `types` are those of tensors whose element type has a counterpart here and whose sizes are all numbers. `sizes` are
    the counts of elements of all tensors whose sizes are numbers.
    """

    types: Mapping[str, TensorType] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)


def promises_of(inferred: Mapping[str, onnx.TypeProto]) -> Promises:
    types, sizes = {}, {}
    for name, kind in inferred.items():
        if not kind.HasField("tensor_type") or not kind.tensor_type.HasField("shape"):
            continue
        shape = tuple(d.dim_value if d.HasField("dim_value") else -1 for d in kind.tensor_type.shape.dim)
        if min(shape, default=0) < 0:
            continue
        sizes[name] = math.prod(shape)
        try:
            types[name] = TensorType(our_dtype(kind.tensor_type.elem_type), shape)
        except ValueError:
            continue
    return Promises(types, sizes)


def type_proto(tensor: Tensor | None) -> onnx.TypeProto | None:
    """Return the type of an operand in ONNX's form.

    It is empty if the operand is absent, and None if it is no tensor of known type.
    """
    match tensor:
        case None:
            return onnx.TypeProto()
        case KnownTensor():
            return make_tensor_type_proto(np_dtype_to_tensor_dtype(tensor.array.dtype), tensor.array.shape)
        case TensorList() | Empty() | Lost(type=None):
            return None
        case _:
            assert tensor.type is not None
            return make_tensor_type_proto(np_dtype_to_tensor_dtype(numpy_dtype(tensor.type.dtype)), tensor.type.dims)


def promised_by_node(n: OnnxNode) -> Promises:
    """Infer the types of one node's results from its operands.

    Return nothing for unknown operators and those that contain graphs.
    """
    promises = _inferred(n) or Promises()
    return Promises({}, promises.sizes) if _mistaken(n.proto, n.opset) else promises


def _inferred(n: OnnxNode) -> Promises | None:
    """Infer the types of a node's results. Return None where inference refuses its operands."""
    proto, types, data = n.proto, {}, {}
    for name, tensor in zip(proto.input, n.operands, strict=True):
        kind = type_proto(tensor)
        if kind is None:
            return Promises()
        if name:
            types[name] = kind
        if name and isinstance(tensor, KnownTensor) and tensor.array.size <= SMALL:
            data[name] = numpy_helper.from_array(tensor.array, name)
    ranks = [len(kind.tensor_type.shape.dim) for kind in types.values()]
    if not _harmless(proto, ranks):
        return Promises()
    try:
        schema = onnx.defs.get_schema(proto.op_type, n.opset, proto.domain)
        imports = [make_opsetid(domain, version) for domain, version in n.scope.opsets.items()]
        return promises_of(onnx.shape_inference.infer_node_outputs(schema, proto, types, data, None, imports))
    except onnx.shape_inference.InferenceError:  # the rule then reports the fault of the node
        return None
    except _RAISED:
        return Promises()


def contradicts(n: OnnxNode) -> bool:
    """Return whether the sizes of a node's operands contradict each other or its attributes, as ONNX has it."""
    return _inferred(n) is None


def _mistaken(proto: onnx.NodeProto, opset: int) -> bool:
    """Return whether shape inference is known to be wrong for a node.

    It takes an STFT without `onesided` for a two-sided one, and counts a window too many in some pools.
    """
    both_sides = proto.op_type == "STFT" and all(a.name != "onesided" for a in proto.attribute)
    return both_sides or (opset < 22 and rounds_up(proto))


def _harmless(proto: onnx.NodeProto, ranks: Collection[int]) -> bool:
    """Return whether shape inference may see a node.

    It ends the process for a Split whose number of results is not the one it states. It also does so for some operators
    that name dimensions which their operands do not have.
    """
    most, fewest = max(ranks, default=0), min(ranks, default=0)
    for a in proto.attribute:
        if a.HasField("g") or a.graphs:
            return False
        if a.name == "num_outputs" and a.i != len(proto.output):
            return False
        if a.name == "batch_dims" and not 0 <= a.i <= fewest:
            return False
        if a.name in _PLACES:
            places = a.ints if a.type == onnx.AttributeProto.INTS else (a.i,)
            last = most + (len(places) if proto.op_type in _NEW_PLACES else 0)
            if not all(-last <= place < last for place in places):
                return False
    return True


def rounds_up(proto: onnx.NodeProto) -> bool:
    """Return whether a node is a pool for which shape inference, before opset 22, may count one window too many."""
    return bool(proto.op_type.endswith("Pool") and any(a.name == "ceil_mode" and a.i for a in proto.attribute))
