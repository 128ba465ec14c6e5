"""Lines of memory that tiles of a product ask for while they compute: they are on their way when they are needed, and
computing hides the time that this takes.

In: a panel of B and the tiles that read it. Out: the `LinesAhead` of a tile. Lines that results are stored to, where
sums are short, are asked for likewise (`lines_of_result`).

A panel that the kernel packs for itself: its tiles ask for the next panel, line by line where B lies, all but the first
tile, which packs. Both panels and a block of A have to fit into the second cache. A panel of a B along k was packed
apart, and is in the second cache twice.

A panel that was packed ahead: panels lie in memory in the order in which they are read, so the processor's own
prediction works. It ends with each page, though, and memory rests while a tile of few rows computes. The only tile of a
panel asks for lines a little further on. Several tiles ask for an equal part each of what comes next, as long as the
panel. A long panel is cut along k into pieces that stay in the second cache (`pieces_of`): all tiles are at one piece
before the next, and sums go on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx

from penstock.backends.tvm.kernels.tools.body import BIJECTIONS, Body
from penstock.backends.tvm.kernels.tools.elements import Index, linear
from penstock.backends.tvm.kernels.tools.emit import Buffer, Expr, ceil_div, literal
from penstock.backends.tvm.kernels.tools.product_terms import Product
from penstock.ir.graph import slot_of
from penstock.ir.types import ITEM_BYTES

from .packing import ProductBlock

LINE_BYTES = 64
# Panels of more than this do not stay in the second cache beside another one; and those of a B along j, which is packed
# while it is read.
_PANEL_BYTES, _READ_BYTES = 256 << 10, 512 << 10
# A panel that the kernel packs asks for the next one from so many tiles on.
_TILES_AHEAD = 2
# Results of more than this are in no cache near by.
_LARGE_BYTES = 1 << 20
# Up to so many steps along k, a tile asks beforehand for the lines it will be stored to, or added to.
_SHORT_K, _SHORT_K_ADDED = 256, 1024
# The most lines that are asked for at once: more would fill the buffers that the loop itself loads through.
_AT_ONCE = 8
# How far ahead the only tile of a panel asks.
_NEXT_BYTES = 32 << 10


@dataclass(frozen=True)
class LinesAhead:
    """The lines that one tile asks for: their count, and the hint for a line of the tile, by the lines that each tile
    asks for and the number of the line. Where `evenly`, turns of the tile's loop ask for a few each, and hardly more
    than the count in all."""

    count: int
    hint: Callable[[int, Expr], None]
    evenly: bool = False

    def fits(self, parts: int) -> bool:
        """Return whether so many parts of the loop may ask for equal shares."""
        each = ceil_div(self.count, parts)
        return not self.evenly or (each <= _AT_ONCE and each * parts - self.count <= self.count // 8)


def pieces_of(tiles: int, k_size: int, panel_bytes: int) -> int:
    """Return the pieces along k of a panel that was packed ahead."""
    if tiles == 1 or panel_bytes <= _PANEL_BYTES:
        return 1
    least = ceil_div(panel_bytes, _PANEL_BYTES)
    return next((count for count in range(least, 2 * least + 1) if k_size % count == 0), 1)


def lines_of_packed(
    body: Body, packed: Buffer, at: Expr, elements: int, dtype: str, tiles: int
) -> Callable[[Expr], LinesAhead] | None:
    """Return what each tile, by its number, asks for while the tiles compute `elements` of a panel from `at` on."""
    line, size = LINE_BYTES // ITEM_BYTES[dtype], elements * ITEM_BYTES[dtype]
    if tiles > 1 and size > _PANEL_BYTES:
        return None
    further = min(size, _NEXT_BYTES) if tiles == 1 else size
    count = ceil_div(ceil_div(size, LINE_BYTES), tiles)
    first = at + further // ITEM_BYTES[dtype]

    def of_tile(tile: Expr) -> LinesAhead:
        def hint(each: int, number: Expr) -> None:
            body.emit.prefetch(packed, first + (tile * each + number) * line, written=False, near=False)

        return LinesAhead(count, hint, evenly=True)

    return of_tile


def lines_of_plain(
    body: Body, p: Product, block: ProductBlock, j: Expr, width: int, tiles: int
) -> Callable[[Expr], LinesAhead]:
    """Return what each of some tiles, by its number, asks for while they compute a panel at column `j`: the next one,
    which the kernel packs."""
    line = max(LINE_BYTES // ITEM_BYTES[p.out.type.dtype], 1)
    along, across = (block.k_size, width) if p.b_along_k else (width, block.k_size)
    per_row = ceil_div(along, line)
    lines = per_row * across
    count = ceil_div(lines, tiles)

    def of_tile(tile: Expr) -> LinesAhead:
        def hint(each: int, number: Expr) -> None:
            place = tirx.min(tile * each + number, lines - 1)
            k, column = tirx.floordiv(place, per_row), j + width + tirx.floormod(place, per_row) * line
            if p.b_along_k:
                k, column = tirx.floormod(place, per_row) * line, j + width + tirx.floordiv(place, per_row)
            assert p.b_address is not None
            address = p.b_address(block.lead, block.k_from + k, column)
            if address is not None:
                body.emit.prefetch(body.operand(address[0]), address[1], written=False, near=False)

        return LinesAhead(count, hint)

    return of_tile


def asks_for_plain(p: Product, tiles: int, panel_bytes: int) -> bool:
    """Return whether tiles ask for the next panel of a B that the kernel packs: else its first tile waits for
    memory."""
    if p.b_address is None or tiles < _TILES_AHEAD or panel_bytes > (_PANEL_BYTES if p.b_along_k else _READ_BYTES):
        return False
    zero = literal(0, "i32")
    return p.b_address((zero,) * len(p.batch), zero, zero) is not None


def lines_of_result(body: Body, p: Product, first: object, k_size: int) -> list[Buffer]:
    """Return the buffers that a tile is stored to, where their lines need a prefetch. That is so if the inner loop is
    too short to have them in cache in time. `first` is that of the tile's block."""
    near = p.out.type.size * ITEM_BYTES[p.out.type.dtype] <= _LARGE_BYTES
    slots = [slot_of(op) for op in body.group.ops if op.kind == "accum" and op.ins[0] == p.out]
    short = k_size <= (_SHORT_K_ADDED if slots else _SHORT_K)
    if near or not short or first is not None or any(op.kind in BIJECTIONS for op in body.group.ops):
        return []
    return [
        *(body.slot(slot, p.out) for slot in slots if slot is not None),
        *(body.result(v) for v in body.group.outs if v.type == p.out.type),
    ]


def ask_for_result(
    body: Body, p: Product, targets: list[Buffer], corner: tuple[Index, Expr, Expr], number: Expr, per_row: int
) -> None:
    """Ask for one line of the result of a tile, counted along its rows."""
    lead, i, j = corner
    line = max(LINE_BYTES // ITEM_BYTES[p.out.type.dtype], 1)
    place = p.place(lead, i + tirx.floordiv(number, per_row), j + tirx.floormod(number, per_row) * line)
    for buffer in targets:
        body.emit.prefetch(buffer, linear(place, p.out.type.dims))
