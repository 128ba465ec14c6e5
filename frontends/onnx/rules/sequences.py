"""Sequences and optionals: lists that exist at import only.

Their lengths and the positions in them must be known. Their entries may be computed at run time.
"""

from __future__ import annotations

import numpy as np

from penstock.frontends.formulas.layout import axis_of, concat, cut, reshape, stack
from penstock.frontends.onnx.node import OnnxNode, Result, Rule
from penstock.frontends.onnx.tensors import Empty, KnownTensor, Tensor, TensorList
from penstock.frontends.writer import Refused


def _list(n: OnnxNode) -> list[Tensor]:
    tensor = n.operand(0)
    if not isinstance(tensor, TensorList):
        raise Refused("operand 0 is not a sequence")
    return list(tensor.items)


def _place(n: OnnxNode, i: int, count: int, default: int) -> int:
    """Read a position among `count` entries. Negative ones count from the end."""
    if not n.has(i):
        return default
    at = n.ints(i, "the position in the sequence")[0]
    n.require(-count <= at < count, f"position {at} is outside of {count}")
    return at % count


def _construct(n: OnnxNode) -> Result:
    return TensorList(tuple(n.tensor(i) for i in range(n.count)))


def _empty(n: OnnxNode) -> Result:
    n.ignore("dtype")
    return TensorList(())


def _at(n: OnnxNode) -> Result:
    items = _list(n)
    return items[_place(n, 1, len(items), 0)]


def _insert(n: OnnxNode) -> Result:
    items = _list(n)
    at = n.ints(2, "the position in the sequence")[0] if n.has(2) else len(items)
    n.require(-len(items) <= at <= len(items), f"position {at} is outside of {len(items)}")
    items.insert(at, n.tensor(1))  # before an entry, negative ones from the end
    return TensorList(tuple(items))


def _erase(n: OnnxNode) -> Result:
    items = _list(n)
    n.require(bool(items), "the sequence is empty")
    del items[_place(n, 1, len(items), len(items) - 1)]
    return TensorList(tuple(items))


def _split(n: OnnxNode) -> Result:
    kind = n.type()
    axis = axis_of(n, n.int_attr("axis"), kind.rank)
    keep = bool(n.int_attr("keepdims", 1)) or n.has(1)
    size = kind.dims[axis]
    sizes = [1] * size
    if n.has(1):
        lengths = n.constant(1, "the list of sizes")
        each = max(1, int(lengths.reshape(-1)[0])) if lengths.size else 1
        sizes = lengths.tolist() if lengths.ndim else [min(each, size - start) for start in range(0, size, each)]
    n.require(sum(sizes) == size and min(sizes, default=0) >= 0, f"sizes {sizes} do not split {size}")
    parts: list[Tensor] = []
    for end, step in zip(np.cumsum(sizes).tolist(), sizes, strict=True):
        known = n.known(0)
        if known is not None:
            part = np.take(known, np.arange(end - step, end), axis)
            parts.append(n.known_of(part if keep else part.squeeze(axis)))
        else:
            y = cut(n, n.value(), axis, end - step, end)
            parts.append(y if keep else reshape(n, y, (*kind.dims[:axis], *kind.dims[axis + 1 :])))
    return TensorList(tuple(parts))


def _concat(n: OnnxNode) -> Result:
    items, new = _list(n), bool(n.int_attr("new_axis"))
    n.require(bool(items), "the sequence is empty")
    n.require(not any(isinstance(t, TensorList | Empty) for t in items), "the entries are not tensors")
    types = [n.type_of(t) for t in items if not isinstance(t, TensorList | Empty)]
    axis = axis_of(n, n.int_attr("axis"), types[0].rank + new)
    arrays = [t.array for t in items if isinstance(t, KnownTensor)]
    if len(arrays) == len(items):
        joined: np.ndarray = np.stack(arrays, axis) if new else np.concatenate(arrays, axis)
        return joined
    parts = [n.value_of(t) for t in items if not isinstance(t, TensorList | Empty)]
    return stack(n, parts, axis) if new else concat(n, parts, axis)


def _optional(n: OnnxNode) -> Result:
    n.ignore("type")
    return n.operand(0) if n.has(0) else Empty()


def _has_element(n: OnnxNode) -> Result:
    return np.array(n.has(0) and not isinstance(n.operand(0), Empty))


def _get_element(n: OnnxNode) -> Result:
    n.require(not isinstance(n.operand(0), Empty), "the optional is empty")
    return n.operand(0)


RULES: dict[str, Rule] = {
    "SequenceConstruct": _construct,
    "SequenceEmpty": _empty,
    "SequenceAt": _at,
    "SequenceInsert": _insert,
    "SequenceErase": _erase,
    "SequenceLength": lambda n: np.array(len(_list(n)), np.int64),
    "SplitToSequence": _split,
    "ConcatFromSequence": _concat,
    "Optional": _optional,
    "OptionalHasElement": _has_element,
    "OptionalGetElement": _get_element,
}
