"""Nodes whose operands are all known, computed at import.

The meaning of an operator is that of onnx.reference, ONNX's own NumPy implementation, so that folding and the rules of the op tables
are independent of each other. A result of another type than shape inference promises is refused rather than converted.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator

from ..writer import Refused

# Results above this many elements stay operations: a mask repeated over a batch is cheaper to broadcast than to store.
LARGEST = 1 << 22


def fold(proto: onnx.NodeProto, operands: Sequence[np.ndarray | None], opset: int) -> list[np.ndarray]:
    """The results of one node on known operands (None for an optional one that is not given)."""
    names = [f"in{i}" if array is not None else "" for i, array in enumerate(operands)]
    outs = [f"out{i}" if name else "" for i, name in enumerate(proto.output)]
    node = onnx.helper.make_node(proto.op_type, names, outs, name="folded", domain=proto.domain)
    node.attribute.extend(proto.attribute)

    def values(these: list[str]) -> list[onnx.ValueInfoProto]:
        return [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in dict.fromkeys(these) if name]

    graph = onnx.helper.make_graph([node], "folded", values(names), values(outs))
    feeds = {name: array for name, array in zip(names, operands, strict=True) if name}
    try:
        with np.errstate(all="ignore"):  # constants may hold infinities on purpose
            found = ReferenceEvaluator(graph, opsets={"": opset}).run(None, feeds)
    except Exception as error:  # onnx.reference raises whatever NumPy raises
        raise Refused(f"cannot be computed at import: {error}") from error
    results = iter(found)
    return [np.asarray(next(results)) if name else np.empty(0) for name in proto.output]
