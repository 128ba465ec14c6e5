"""Panels of a correlation: output channels in lanes, so many vectors of them as the registers allow.

In: a Correlation, and sums with channels beside each other, position after position. Out: `Panels.finish` turns them,
so that `Body.finish` gets vectors of neighbouring positions. register_tiles.py and winograd.py make the sums.
"""

from __future__ import annotations

from math import prod

from tvm import tirx

from penstock.backends.tvm.kernels.tools.body import Body
from penstock.backends.tvm.kernels.tools.correlation import Correlation, ask_for_results
from penstock.backends.tvm.kernels.tools.emit import SERIAL, Buffer, Expr, ceil_div, literal
from penstock.backends.tvm.kernels.tools.transpose import pieces, transpose_block


class Panels:
    """Output channels of all groups, cut into panels of `width`."""

    def __init__(self, body: Body, c: Correlation, lanes: int, vectors: int | None = None) -> None:
        self.body, self.c, self.emit, self.lanes = body, c, body.emit, lanes
        self.vectors = vectors or min(body.machine.vectors, ceil_div(c.filters, lanes))
        self.width = self.vectors * lanes
        # Panels of a group.
        self.panels = ceil_div(c.filters, self.width)

    def split(self, panel: Expr) -> tuple[Expr, Expr]:
        """Return the group of a panel, and its first output channel in it."""
        if self.panels == 1:
            return panel, literal(0, "i32")
        if self.c.groups == 1:
            return literal(0, "i32"), panel * self.width
        return tirx.floordiv(panel, self.panels), tirx.floormod(panel, self.panels) * self.width

    def finish(self, image: Expr, panel: Expr, sums: Buffer, row: Expr, rows: int) -> None:
        c, emit, lanes = self.c, self.emit, self.lanes
        group, first = self.split(panel)
        positions = rows * c.spatial[1]

        def block(p: Expr, height: int) -> None:
            for v in range(self.vectors):
                turned = emit.alloc(lanes * lanes, c.dtype, "turned")
                starts = [(p + min(i, height - 1)) * self.width + v * lanes for i in range(lanes)]
                vectors = transpose_block(emit, c.dtype, lanes, lanes, sums, starts)
                for i, vector in enumerate(vectors):
                    emit.add(tirx.BufferStore(turned, vector, [tirx.Ramp(i * lanes, 1, lanes)]))
                valid = min(lanes, c.filters - v * lanes) if self.panels == 1 else lanes
                with emit.loop(valid, SERIAL, "j") as j:
                    channel = emit.bind(first + (j + v * lanes), "o")
                    if self.panels > 1 and c.filters % self.width:
                        with emit.when(channel < c.filters):
                            store(p, height, group * c.filters + channel, turned, j)
                    else:
                        store(p, height, group * c.filters + channel, turned, j)

        def store(p: Expr, height: int, channel: Expr, turned: Buffer, j: Expr) -> None:
            channel = emit.bind(channel, "o")
            first_result = (image * (c.groups * c.filters) + channel) * prod(c.spatial) + row * c.spatial[1]
            ask_for_results(self.body, c.out, first_result + p + lanes, 1)
            for i, _ in pieces(emit, height, lanes):
                with self.body.point():
                    q = p + i
                    index = c.place(
                        image, channel, row + tirx.floordiv(q, c.spatial[1]), tirx.floormod(q, c.spatial[1])
                    )
                    self.body.finish({c.out: (tirx.BufferLoad(turned, [j * lanes + i]), index)})

        whole, tail = divmod(positions, lanes)
        if whole:
            with emit.loop(whole, SERIAL, "p") as p, self.body.point():
                block(p * lanes if whole > 1 else literal(0, "i32"), lanes)
        if tail:
            with self.body.point():
                block(literal(whole * lanes, "i32"), tail)
