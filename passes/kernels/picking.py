"""Padding that only lookups read: each lookup computes the elements that it takes, and the padded value has no memory.

So a replica that updates its part of a weight (sharding/replicas/zero.py) copies no whole one where parts are uneven.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from penstock.ir.graph import Op, Value


def picked_later(
    ops: Iterable[Op], readers: Mapping[Value, Sequence[Op]], results: Collection[Value]
) -> frozenset[Value]:
    """Return the padded values that lookups alone read, be it through reshapes."""

    def is_picked(value: Value) -> bool:
        return value not in results and all(
            (op.kind == "gather" and value is op.ins[0] and value is not op.ins[1])
            or (op.kind == "reshape" and is_picked(op.outs[0]))
            for op in readers.get(value, ())
        )

    return frozenset(op.outs[0] for op in ops if op.kind == "pad" and is_picked(op.outs[0]))
