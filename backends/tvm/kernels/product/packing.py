"""The packing of both operands of a blocked product.

In: a block of rows and of k, or a panel of B. Out: loops that copy it to the places where tiles read it.

A is packed as [tiles, k, mi], so that a step along k reads mi neighbours. B is packed as [k, columns], in whole
vectors. Where B lies along k, squares of it are transposed in registers.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx

from penstock.backends.tvm.kernels.tools.body import Body
from penstock.backends.tvm.kernels.tools.elements import Index
from penstock.backends.tvm.kernels.tools.emit import HALVES, SERIAL, TVM_DTYPES, VECTOR, Buffer, Expr, ceil_div, literal
from penstock.backends.tvm.kernels.tools.product_terms import Product
from penstock.backends.tvm.kernels.tools.transpose import transpose_block
from penstock.ir.graph import Op

# Tiles of A packed side by side, so that the lines they share are read once.
_PACKED_TOGETHER = 8


@dataclass(frozen=True)
class ProductBlock:
    """A block of rows, start .. start + rows, and of k, k_from .. k_from + k_size, done in one pass over the columns.

    With `first` given, sums are left in `partial`, added to those there unless `first` holds. Without it, they are
    finished."""

    lead: Index
    start: Expr
    rows: int
    k_from: Expr
    k_size: int
    partial: Buffer | None = None
    first: object = None
    packed: Buffer | None = None


@dataclass(frozen=True)
class ProductPanel:
    """A packed panel of B [k, columns], which begins at element `at` of a buffer. With `fill`, the tile packs it while
    it reads B in place, or the panel `source`, whose elements are shorter."""

    packed: Buffer
    at: Expr | int = 0
    fill: bool = False
    source: ProductPanel | None = None


def stored_dtype(body: Body, op: Op, dtype: str) -> str:
    """Return the element type that panels of operand 1 may have without rounding: that of the operand, or of the
    variable that it is widened from."""
    for value in (op.ins[1], *body.sources(op)[:1]):
        if value.type.dtype in HALVES and dtype == "f32":
            return value.type.dtype
    return dtype


@dataclass(frozen=True)
class ProductPacking:
    """The packing of the operands of one product.

    Tiles have `rows` rows, vectors `lanes` columns. A packed tile of A is copied in vectors of `reach` rows. These may
    reach past its last row into the next tile, which is written later.
    """

    body: Body
    p: Product
    dtype: str
    lanes: int
    rows: int
    reach: int

    def padded(self, columns: int) -> int:
        """Return the columns of a packed panel: whole vectors."""
        return ceil_div(columns, self.lanes) * self.lanes

    @property
    def panels_size(self) -> int:
        """The elements of all panels of B."""
        return self.p.k * self.padded(self.p.n)

    def tile_size(self, k_size: int) -> int:
        """Return the elements from one packed tile of A to the next, with room for vectors that reach past the last
        row."""
        return k_size * self.rows + self.reach - self.rows

    def pack_a(self, block: ProductBlock) -> Buffer:
        """Pack a block of A, [tiles, k, mi]: all full row tiles, then the rows left over, in the same layout."""
        emit, mi, a = self.body.emit, self.rows, self.p.a
        size = self.tile_size(block.k_size)
        packed = emit.alloc(ceil_div(block.rows, mi) * size, self.dtype, "ap")
        count, odd = divmod(block.rows, mi)
        # A vector may read past the last row of its tile, not past the last row of A.
        safe = max((block.rows - self.reach) // mi + 1, 0) if self.reach > mi else count

        def copy(io: Expr, k: Expr, height: int, *, whole: bool) -> None:
            if whole:
                with emit.loop(self.reach, VECTOR, "ii") as ii, self.body.point():
                    emit.store(
                        packed, a(block.lead, block.start + io * mi + ii, block.k_from + k), io * size + k * mi + ii
                    )
                return
            for r in range(height):
                with self.body.point():
                    emit.store(
                        packed, a(block.lead, block.start + io * mi + r, block.k_from + k), io * size + k * mi + r
                    )

        vectors = self.p.a_along_i and mi > 1
        together = _PACKED_TOGETHER if vectors else 1
        groups, left = divmod(safe if vectors else count, together)
        with emit.loop(groups, SERIAL, "ig") as ig, emit.loop(block.k_size, SERIAL, "k") as k:
            for t in range(together):
                copy(ig * together + t, k, mi, whole=vectors)
        with emit.loop(left, SERIAL, "io") as io, emit.loop(block.k_size, SERIAL, "k") as k:
            copy(io + groups * together, k, mi, whole=vectors)
        for io in range(groups * together + left, count):
            with emit.loop(block.k_size, SERIAL, "k") as k:
                copy(literal(io, "i32"), k, mi, whole=False)
        if odd:
            with emit.loop(block.k_size, SERIAL, "k") as k:
                copy(literal(count, "i32"), k, odd, whole=False)
        return packed

    def pack_b(self, block: ProductBlock, j: Expr, columns: int, panel: ProductPanel) -> None:
        """Pack a panel of B, [k, columns], with columns rounded up to whole vectors and padded with zeros."""
        emit, p, lanes, k_size = self.body.emit, self.p, self.lanes, block.k_size
        whole, tail = divmod(columns, lanes)
        width = self.padded(columns)
        packed, at, zero = panel.packed, panel.at, literal(0, self.dtype)
        # Vectors are rounded to 16 bits in vector loops alone.
        whole_type = str(packed.dtype) == TVM_DTYPES[self.dtype]
        locate = p.b_address if p.b_along_k and whole_type else None
        turned = k_size // lanes * lanes if locate is not None else 0
        if locate is not None:
            with (
                emit.loop(whole if turned else 0, SERIAL, "v") as v,
                emit.loop(turned // lanes, SERIAL, "k") as k,
                self.body.point(),
            ):
                addresses = [locate(block.lead, block.k_from + k * lanes, j + (v * lanes + r)) for r in range(lanes)]
                places = [self.body.memory(address) for address in addresses if address is not None]
                turned_rows = transpose_block(emit, self.dtype, lanes, lanes, places[0][0], [at for _, at in places])
                for r, row in enumerate(turned_rows):
                    emit.store(packed, row, tirx.Ramp(at + (k * lanes + r) * width + v * lanes, 1, lanes))
        with emit.loop(k_size - turned if whole else 0, SERIAL, "k") as k:
            for v in range(whole):
                with emit.loop(lanes, VECTOR, "ji") as ji, self.body.point():
                    emit.store(
                        packed,
                        p.b(block.lead, block.k_from + k + turned, j + (v * lanes + ji)),
                        at + (k + turned) * width + (v * lanes + ji),
                    )
        if tail:
            with emit.loop(k_size, SERIAL, "k") as k:
                with emit.loop(tail, SERIAL, "ji") as ji, self.body.point():
                    emit.store(
                        packed,
                        p.b(block.lead, block.k_from + k, j + (whole * lanes + ji)),
                        at + k * width + (whole * lanes + ji),
                    )
                with emit.loop(lanes - tail, SERIAL, "ji") as ji:
                    emit.store(packed, zero, at + k * width + (whole * lanes + tail + ji))
