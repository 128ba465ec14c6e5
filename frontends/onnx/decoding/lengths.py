"""Values of a decoder that follow from lengths alone: computed at import, for so many past and new tokens.

In: nodes of a decoder, and names. Out: the elements of those that are known once the mask sees everything, positions
count from the past on, and all sizes are numbers. Tokens, keys and values stay unknown: a value that depends on their
elements has none here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx.helper import make_tensor_value_info, tensor_dtype_to_np_dtype

from penstock.frontends.onnx.binding import bind
from penstock.frontends.onnx.importer import OnnxImporter
from penstock.frontends.onnx.report import Findings
from penstock.frontends.onnx.source import OnnxFile, names_taken
from penstock.frontends.onnx.tensors import KnownTensor
from penstock.frontends.onnx.trained import Trained
from penstock.frontends.onnx.versions import opsets_of

from .interface import DecoderNames, fed_inputs

# The size of a dimension of keys and values that the file leaves open.
_OPEN = 8


@dataclass(frozen=True)
class LengthSample:
    """Numbers of past and new tokens of one sequence."""

    past: int
    tokens: int


def needed_for(
    nodes: Sequence[onnx.NodeProto], wanted: Iterable[str], given: Collection[str] = ()
) -> list[onnx.NodeProto]:
    """Return the nodes that the wanted tensors are computed by, from those that are `given`, in their order."""
    needed, kept = set(wanted), list[onnx.NodeProto]()
    for node in reversed(nodes):
        if not needed.isdisjoint(node.output):
            needed.update(name for name in names_taken(node) if name not in given)
            kept.append(node)
    return kept[::-1]


def values_at(
    source: OnnxFile,
    nodes: Sequence[onnx.NodeProto],
    names: DecoderNames,
    wanted: Collection[str],
    sample: LengthSample,
) -> dict[str, np.ndarray]:
    """Return those of the wanted values that follow from lengths, for one number of past and new tokens."""
    importer = import_at(source, needed_for(nodes, wanted), names, sample)
    tensors = {name: importer.scope.tensors.get(name) for name in wanted}
    return {name: tensor.array for name, tensor in tensors.items() if isinstance(tensor, KnownTensor)}


def import_at(
    source: OnnxFile,
    nodes: Sequence[onnx.NodeProto],
    names: DecoderNames,
    sample: LengthSample,
    fed: Mapping[str, tuple[int, ...]] | None = None,
) -> OnnxImporter:
    """Import some nodes for one number of past and new tokens. `fed` are the shapes of tensors of floats that become
    inputs. What cannot be imported is left out."""
    graph = source.model.graph
    held = _held(graph, names, sample)
    inputs = [
        make_tensor_value_info(name, value.type.tensor_type.elem_type, _shape(name, value, names, sample))
        for name, value in fed_inputs(graph).items()
        if name not in held
    ]
    inputs += [make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name, shape in (fed or {}).items()]
    part = source.part(nodes, inputs, [], held)
    importer = OnnxImporter(part, opsets_of(source), Findings(), Trained(part, Findings(), None, None))
    importer.take_inputs(part.model.graph, bind(part.model.graph, {}, {}, str(source.path)))
    importer.take_initializers(part.model.graph)
    for index, node in enumerate(part.model.graph.node):
        importer.take_node(node, index, importer.scope)
    return importer


def _held(graph: onnx.GraphProto, names: DecoderNames, sample: LengthSample) -> dict[str, np.ndarray]:
    """Return the elements of the inputs that follow from lengths."""
    total = sample.past + sample.tokens
    elements = {names.mask: np.ones((1, total)), names.positions: np.arange(sample.past, total)[None]}
    return {
        name: elements[name].astype(tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type))
        for name, value in fed_inputs(graph).items()
        if name in elements
    }


def _shape(name: str, value: onnx.ValueInfoProto, names: DecoderNames, sample: LengthSample) -> tuple[int, ...]:
    if name == names.tokens:
        return (1, sample.tokens)
    fixed = {0: 1, 2: sample.past}
    dims = value.type.tensor_type.shape.dim
    return tuple(fixed.get(axis, dim.dim_value or _OPEN) for axis, dim in enumerate(dims))


def by_length(
    values: Sequence[tuple[LengthSample, Mapping[str, np.ndarray]]], name: str
) -> np.ndarray | tuple[int, ...] | None:
    """Compare a value at several numbers of past tokens.

    Return its elements where they are the same, its shape where they are the positions of the tokens, else None.
    """
    arrays = [array.get(name) for _, array in values]
    if any(array is None for array in arrays):
        return None
    known = [array for array in arrays if array is not None]
    if all(np.array_equal(array, known[0]) for array in known):
        return known[0]
    for (sample, _), array in zip(values, known, strict=True):
        wanted = np.arange(sample.past, sample.past + sample.tokens)
        if array.size != sample.tokens or not np.array_equal(array.reshape(-1), wanted):
            return None
    return tuple(known[0].shape)
