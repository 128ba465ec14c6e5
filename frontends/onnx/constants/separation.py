"""Statistics that share a tensor with weights, made tensors of their own.

torch's exporter writes equal tensors once. So the scale of a new batch norm is the tensor of its running variance, and
its offset that of its running mean. Training moves the first of each and not the second.

    separate_statistics   a model, changed in place: every running mean and variance that something else reads as a
                          weight becomes a copy of its own. The model means what it meant.

Known limit: batch norms inside of functions and of control flow are left as they are.
"""

from __future__ import annotations

import onnx
from onnx.helper import make_tensor_value_info

from penstock.ir.graph import Namer

from .uses import Reader, kind_of, uses_in

_STATISTICS = (3, 4)
# From this IR version on an initializer need not be an input of the graph, too.
_FREE = 4


def _is_statistic(reader: Reader) -> bool:
    return reader.kind == "BatchNormalization" and reader.position in _STATISTICS


def separate_statistics(model: onnx.ModelProto) -> None:
    graph = model.graph
    norms = [node for node in graph.node if kind_of(node) == "BatchNormalization"]
    if not norms:
        return
    readers = uses_in(model)
    shared = {
        tensor.name: tensor
        for tensor in graph.initializer
        if {_is_statistic(reader) for reader in readers(tensor)} == {True, False}
    }
    if not shared:
        return
    stored = {tensor.name: tensor.name for tensor in graph.initializer}
    for node in graph.node:
        if kind_of(node) == "Identity" and node.input and node.input[0] in stored:
            stored[node.output[0]] = stored[node.input[0]]
    namer = Namer([*stored, *(value.name for value in graph.input), *(o for node in graph.node for o in node.output)])
    copies: dict[str, str] = {}
    for node in norms:
        for position, name in enumerate(node.input):
            if position not in _STATISTICS or stored.get(name) not in shared:
                continue
            if name not in copies:
                copies[name] = namer.fresh(f"{name}.statistic")
                tensor = graph.initializer.add()
                tensor.CopyFrom(shared[stored[name]])
                tensor.name = copies[name]
                if model.ir_version < _FREE:
                    graph.input.add().CopyFrom(make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
            node.input[position] = copies[name]
