"""Weights that are computed of variables alone, and only where they are packed: once, when a program is loaded.

In: a graph. Out: the values between variables and the convolutions that are marked `packed` and read the last of them
as their weight. Elementwise and layout operations make them, and nothing else reads them. The kernel that packs the
weight computes each element where it reads it (`passes/rewrite/merge_convolutions.py` makes such weights).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.ir.graph import Op, Value
from penstock.ir.ops import OPS, VIEWS

_ALONE = ("const", "iota")


def made_ahead(
    ops: Sequence[Op], readers: Mapping[Value, Sequence[Op]], results: set[Value], fixed: frozenset[str] | None
) -> frozenset[Value]:
    """Return the values of which packed weights are computed. `fixed` are variables that never change; None: those
    behind each convolution that is marked."""
    if not any(_is_marked(op) for op in ops):
        return frozenset()
    of_variables: set[Value] = set()
    for op in ops:
        if op.kind == "read":
            steady = fixed is None or op.var in fixed
        elif op.kind in _ALONE:
            steady = not isinstance(op.attrs.get("value"), tuple)
        else:
            computes = OPS[op.kind].family == "elementwise" or op.kind in (*VIEWS, "pad")
            steady = computes and len(op.outs) == 1 and of_variables.issuperset(op.ins)
        if steady:
            of_variables.update(op.outs)
    ahead: set[Value] = set()
    for op in reversed(ops):
        if op.kind in ("read", *_ALONE) or not op.outs or op.outs[0] not in of_variables:
            continue
        (value,) = op.outs
        users = readers.get(value, ())
        if users and value not in results and all(_is_weight(u, value) or not ahead.isdisjoint(u.outs) for u in users):
            ahead.add(value)
    return frozenset(ahead)


def _is_marked(op: Op) -> bool:
    return op.kind == "conv" and bool(op.attrs.get("packed")) and "library" not in op.attrs


def _is_weight(op: Op, value: Value) -> bool:
    return _is_marked(op) and op.ins[1] is value and op.ins[0] is not value
