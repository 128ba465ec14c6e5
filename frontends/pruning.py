"""What a graph's outputs depend on: readers of models leave out the rest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from penstock.ir.graph import Op, Value


def live_ops(ops: Sequence[Op], outs: Iterable[Value]) -> list[Op]:
    """The operations that `outs` depend on, in order. Operations of a model have no effects, so the others can go."""
    needed = set(outs)
    kept = []
    for op in reversed(ops):
        if any(v in needed for v in op.outs):
            kept.append(op)
            needed.update(op.ins)
    return kept[::-1]
