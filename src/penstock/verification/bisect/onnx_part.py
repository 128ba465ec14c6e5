"""A part of an ONNX model as a model: the reproducer of a wrong import.

In: a model, one of its values, all values for some inputs. Out: the node that makes the value, alone, or with as many
nodes before it as the wrong import needs. Its operands are inputs; integers among them (shapes, axes) are constants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

Values = Mapping[str, Any]


def smallest_part(
    model: onnx.ModelProto, name: str, values: Values, fails: Callable[[onnx.ModelProto, Values], bool]
) -> tuple[onnx.ModelProto, Values]:
    """Return the first of ever larger parts that fails, and its inputs; else the whole model up to the value."""
    part, feeds = model, values
    for part, feeds in _parts(model, name, values):
        if fails(part, feeds):
            break
    return part, feeds


def _parts(model: onnx.ModelProto, name: str, values: Values) -> Iterator[tuple[onnx.ModelProto, Values]]:
    makers = {out: node for node in model.graph.node for out in node.output if out}
    chosen: list[onnx.NodeProto] = [makers[name]]
    while True:
        yield _part(model, chosen, name, values)
        more = [
            makers[i]
            for node in chosen
            for i in node.input
            if i in makers and not any(makers[i] is other for other in chosen)
        ]
        if not more:
            return
        kept = [*chosen, *more]
        chosen = [node for node in model.graph.node if any(node is other for other in kept)]


def _part(
    model: onnx.ModelProto, nodes: list[onnx.NodeProto], name: str, values: Values
) -> tuple[onnx.ModelProto, Values]:
    results = {out for node in nodes for out in node.output}
    read = dict.fromkeys(i for node in nodes for i in node.input if i and i not in results)
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    inputs = {value.name for value in model.graph.input}
    arrays = {i: np.asarray(values[i]) for i in read if i not in stored}
    feeds = {i: array for i, array in arrays.items() if array.dtype.kind == "f" or i in inputs}
    constants = [numpy_helper.from_array(array, i) for i, array in arrays.items() if i not in feeds]
    graph = helper.make_graph(
        nodes,
        model.graph.name or "part",
        [
            helper.make_tensor_value_info(i, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
            for i, array in feeds.items()
        ],
        [helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(values[name].dtype), values[name].shape)],
        [*(stored[i] for i in read if i in stored), *constants],
    )
    part = helper.make_model(
        graph, opset_imports=list(model.opset_import), functions=list(model.functions), ir_version=model.ir_version
    )
    return part, feeds


def save(part: onnx.ModelProto, path: Path) -> None:
    """Write a model to a file."""
    onnx.save(part, path)
