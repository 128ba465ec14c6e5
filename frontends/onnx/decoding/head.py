"""The head of a decoder: the last nodes before its logits, which need the rows that choose tokens, and no others.

In: the nodes that logits are computed by. Out: the same with the rows chosen before the first of the last nodes that
work row by row: a product by a weight, and what is done with single numbers. A decoder of another form computes logits
of all rows, which takes longer and gives the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import onnx

from penstock.frontends.onnx.source import OnnxFile, names_taken

_PRODUCTS = ("MatMul", "MatMulNBits")
_NUMBERS = ("Add", "Sub", "Mul", "Div")
_ALONE = ("Tanh", "Cast", "Identity")


def rows_before(
    nodes: Sequence[onnx.NodeProto], source: OnnxFile, logits: str, chosen: str
) -> tuple[list[onnx.NodeProto], str]:
    """Choose rows as early as possible. Return the nodes, and the name of the logits of these rows."""
    makers = {name: node for node in nodes for name in node.output}
    uses = Counter(name for node in nodes for name in names_taken(node))
    ranks = _fixed_ranks(nodes, source)
    at, name = logits, logits
    while (node := makers.get(name)) is not None and uses[name] == (name != logits):
        before = _row_by_row(node, ranks)
        if before is None:
            break
        name = before
        at = name if node.op_type in _PRODUCTS else at
    picked = f"turn.rows.{at}"
    gather = onnx.helper.make_node("Gather", [at, chosen], [picked], picked, axis=1)
    if at == logits:
        return [*nodes, gather], picked
    written: list[onnx.NodeProto] = []
    for one in nodes:
        if at in one.input and uses[at] == 1:
            copy = onnx.NodeProto()
            copy.CopyFrom(one)
            copy.input[list(one.input).index(at)] = picked
            written += [gather, copy]
        else:
            written.append(one)
    return written, logits


def _fixed_ranks(nodes: Sequence[onnx.NodeProto], source: OnnxFile) -> dict[str, int]:
    """Return the ranks of stored tensors, and of constants that nodes give."""
    ranks = {tensor.name: len(tensor.dims) for tensor in source.model.graph.initializer}
    for node in nodes:
        if node.op_type == "Constant":
            ranks.update((node.output[0], len(a.t.dims)) for a in node.attribute if a.name == "value")
        elif node.op_type == "Transpose" and node.input[0] in ranks:
            ranks[node.output[0]] = ranks[node.input[0]]
    return ranks


def _row_by_row(node: onnx.NodeProto, ranks: dict[str, int]) -> str | None:
    """Return the operand whose rows a node works on one by one, None where there is none."""
    first, others = node.input[0] if node.input else "", list(node.input[1:])
    if node.op_type in _PRODUCTS:
        return first if first not in ranks and all(not name or name in ranks for name in others) else None
    if node.op_type in _ALONE and not others:
        return first
    if node.op_type in _NUMBERS and len(node.input) == 2:
        moving = [name for name in node.input if name not in ranks]
        fixed = [ranks[name] for name in node.input if name in ranks]
        return moving[0] if len(moving) == 1 and max(fixed) <= 1 else None
    return None
