"""The operands of attention over caches, their sizes and its attributes, for kernels of all devices."""

from __future__ import annotations

from penstock.backends.tvm.kernels.tools.elements import number
from penstock.ir.graph import Op
from penstock.ir.ops import complete_attrs


class Attended:
    """The operands of an `attend`, and the numbers that its loops are made of."""

    def __init__(self, op: Op) -> None:
        self.op = op
        self.q, self.keys, self.values, self.starts, self.lengths, self.table = op.ins
        self.rows, self.query_heads, self.size = self.q.type.dims
        self.blocks, _, self.heads, _ = self.keys.type.dims
        self.sequences, self.per_sequence = self.table.type.dims
        self.group = self.query_heads // self.heads
        attrs = complete_attrs(op)
        self.window, self.cap, self.scale = int(number(attrs["window"])), number(attrs["cap"]), number(attrs["scale"])
