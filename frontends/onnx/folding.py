"""Nodes whose operands are all known, computed at import.

An operator means what onnx.reference, ONNX's own NumPy implementation, computes. So folding and the rules of the op
tables are independent of each other. A result of another type than shape inference promises is refused rather than
converted.

A result is computed only if it is known beforehand to be small. A few bytes of a file can ask for a tensor that fills
all memory. They can also cost hours in a reference implementation that loops in Python.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator

from penstock.frontends.writer import LARGEST, Refused

from .inference import Promises
from .node import OnnxNode
from .tensors import KnownTensor

# Operators for which onnx.reference deviates from the specification (signs of LpNormalization, lengths, clip and
# activations of recurrent layers, channels of LRN).
OTHERWISE = frozenset({"LRN", "LpNormalization", "RNN", "GRU", "LSTM"})
# The largest result of operators whose reference loops over elements in Python, and the largest product of operand
# sizes of those that sum products.
_LARGEST_LOOP, _LARGEST_PRODUCT = 1 << 13, 1 << 32

# fmt: off
# Shape inference does not give the result sizes of these. They are of the order of the operands' sizes.
_LIKE_OPERANDS = frozenset({
    "Compress", "GroupNormalization", "MeanVarianceNormalization", "NonZero", "NonMaxSuppression", "StringNormalizer",
    "StringSplit", "Unique",
})
_LOOPS = frozenset({
    "AveragePool", "Col2Im", "Conv", "ConvInteger", "ConvTranspose", "DeformConv", "GRU", "GridSample", "LRN", "LSTM",
    "LpPool", "MaxPool", "MaxRoiPool", "MaxUnpool", "NonMaxSuppression", "QLinearConv", "RNN", "Resize", "RoiAlign",
    "TfIdfVectorizer", "Upsample",
})
_PRODUCTS = frozenset({"Einsum", "Gemm", "MatMul", "MatMulInteger", "QLinearMatMul"})
# fmt: on


def small(n: OnnxNode, promises: Promises) -> bool:
    """Return whether the results of a node with known operands are small and quick to compute."""
    names = [name for name in n.proto.output if name]
    if n.kind not in _LIKE_OPERANDS and any(name not in promises.sizes for name in names):
        return False
    operands = [t.array.size for t in n.operands if isinstance(t, KnownTensor)]
    most = _LARGEST_LOOP if n.kind in _LOOPS else LARGEST
    sizes = [promises.sizes.get(name, 0) for name in names]
    if n.kind in _PRODUCTS and math.prod(max(1, size) for size in operands) > _LARGEST_PRODUCT >> (
        8 if n.kind == "Einsum" else 0
    ):
        return False
    return max(sizes, default=0) <= most and (n.kind not in _LOOPS or max(operands, default=0) <= most)


def fold(n: OnnxNode, opset: int) -> list[np.ndarray]:
    """Compute the results of a node whose operands are all known or optional and absent.

    The node is written in `opset`.
    """
    if n.kind in OTHERWISE:
        raise Refused("onnx's implementation of it does something else")
    arrays = [t.array if isinstance(t, KnownTensor) else None for t in n.operands]
    names = [f"in{i}" if array is not None else "" for i, array in enumerate(arrays)]
    outs = [f"out{i}" if name else "" for i, name in enumerate(n.proto.output)]
    node = onnx.helper.make_node(n.kind, names, outs, name="folded", domain=n.proto.domain)
    node.attribute.extend(n.attributes)

    feeds = {name: array for name, array in zip(names, arrays, strict=True) if array is not None}
    try:
        with np.errstate(all="ignore"):  # constants may hold infinities on purpose
            outputs = _evaluator(node.SerializeToString(), opset).run(None, feeds)
    except Exception as error:  # onnx.reference raises whatever NumPy raises
        raise Refused(f"cannot be computed at import: {error}") from error
    results = iter(outputs)
    return [np.asarray(next(results)) if name else np.empty(0) for name in n.proto.output]


@lru_cache(maxsize=64)
def _evaluator(serialised: bytes, opset: int) -> ReferenceEvaluator:
    """Make the evaluator of one node. Loops repeat the same nodes, and making it takes longer than running it."""
    node = onnx.NodeProto.FromString(serialised)

    def values(names: Iterable[str]) -> list[onnx.ValueInfoProto]:
        return [
            onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None)
            for name in dict.fromkeys(names)
            if name
        ]

    graph = onnx.helper.make_graph([node], "folded", values(node.input), values(node.output))
    return ReferenceEvaluator(graph, opsets={"": opset})
