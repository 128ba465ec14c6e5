"""Inputs that a static compiler has to know: sizes, axes, shapes, numbers of repetitions.

Many node tests give such numbers as inputs of the graph, where models have constants. `shape_like` names the inputs that reach an operand of
this kind, `attempts` what to bind at import, and in what order.

`Shape` and `Size` end the search: sizes are known without the tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx

from .cases import graphs_of

# fmt: off
# The operands of each operator that say sizes, places of dimensions or what is to be run.
_SHAPE_LIKE: dict[str, tuple[int, ...]] = {
    "AffineGrid": (1,), "BlackmanWindow": (0,), "CenterCropPad": (1,), "Col2Im": (1, 2), "Compress": (1,), "ConstantOfShape": (0,),
    "CumProd": (1,), "CumSum": (1,), "DFT": (1, 2), "Dropout": (2,), "Expand": (1,), "HammingWindow": (0,), "HannWindow": (0,),
    "If": (0,), "Loop": (0, 1), "MaxUnpool": (2,), "MelWeightMatrix": (0, 1, 2), "NonMaxSuppression": (2,), "OneHot": (1,), "Pad": (1, 3),
    "Range": (0, 1, 2), "Reshape": (1,), "Resize": (3,), "ReverseSequence": (1,), "STFT": (1, 3), "Slice": (1, 2, 3, 4), "Split": (1,),
    "SplitToSequence": (1,), "Squeeze": (1,), "Tile": (1, 2), "TopK": (1,), "Trilu": (1,), "Unsqueeze": (1,),
    **dict.fromkeys(("ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd",
                     "ReduceSum", "ReduceSumSquare"), (1,)),
}
# Operands that are numbers in floating point, or numbers that other operands are read by, and settle what is computed.
_NUMBERS: dict[str, tuple[int, ...]] = {
    "Clip": (1, 2), "Dropout": (1, 2), "MelWeightMatrix": (3, 4), "NonMaxSuppression": (2, 3, 4), "OneHot": (1, 2), "Pad": (1, 2, 3),
    "Range": (0, 1, 2), "Resize": (1, 2, 3), "Upsample": (1,), "QuantizeLinear": (1, 2), "DequantizeLinear": (1, 2),
    "QLinearConv": (1, 2, 4, 5, 6, 7), "QLinearMatMul": (1, 2, 4, 5, 6, 7), "ConvInteger": (2, 3), "MatMulInteger": (2, 3),
}
# fmt: on
_WHOLE = {
    onnx.TensorProto.DataType.Value(kind)
    for kind in ("INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64", "BOOL")
}


def attempts(model: onnx.ModelProto) -> list[tuple[str, ...]]:
    """What to try, in order: nothing known, integers that say shapes, and then numbers of any type in places that want numbers."""
    whole = shape_like(model, _SHAPE_LIKE)
    kinds = {value.name: value.type.tensor_type.elem_type for value in model.graph.input}
    first = tuple(name for name in whole if kinds[name] in _WHOLE)
    both = {kind: (*_SHAPE_LIKE.get(kind, ()), *_NUMBERS.get(kind, ())) for kind in (*_SHAPE_LIKE, *_NUMBERS)}
    return list(dict.fromkeys([(), first, tuple(shape_like(model, both))]))


def shape_like(model: onnx.ModelProto, positions: Mapping[str, Iterable[int]]) -> list[str]:
    """Inputs of the graph that operands in these places depend on, in the graph's order."""
    nodes = [node for graph in graphs_of(model.graph) for node in graph.node]
    makers = {name: node for node in nodes for name in node.output if name}
    todo = [node.input[i] for node in nodes for i in positions.get(node.op_type, ()) if i < len(node.input)]
    seen: set[str] = set()
    while todo:
        name = todo.pop()
        if not name or name in seen:
            continue
        seen.add(name)
        node = makers.get(name)
        if node is not None and node.op_type not in ("Shape", "Size"):
            todo += _reads(node)
    return [value.name for value in model.graph.input if value.name in seen and value.type.HasField("tensor_type")]


def _reads(node: onnx.NodeProto) -> list[str]:
    inner = [a.g for a in node.attribute if a.HasField("g")] + [g for a in node.attribute for g in a.graphs]
    return [*node.input, *(name for graph in inner for g in graphs_of(graph) for n in g.node for name in n.input)]
