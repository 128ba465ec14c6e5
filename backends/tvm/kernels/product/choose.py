"""The choice of the loops of a matrix product.

In: a Product. Out: its loops, by sizes and by where operands lie. A right operand that is packed ahead has one order
for any number of rows, whose sums are added up in one order, too: the bits of a row do not depend on the rows beside
it. Tile registers, sums of at most four numbers, and operands that the kernel packs for itself have no such rule.
"""

from __future__ import annotations

from math import prod

from penstock.backends.tvm.kernels.tiles import product as tile_product
from penstock.backends.tvm.kernels.tools.body import Body
from penstock.backends.tvm.kernels.tools.product_terms import Product

from .few_rows import SHORT_K, STREAM_COLUMNS, emit_dots, emit_short, emit_streams, has_few_rows, is_dots
from .product import TiledProduct


def emit_product(body: Body, product: Product) -> None:
    """Emit a product with the loops that suit its sizes."""
    p = product
    if body.loops is not None:
        body.loops.product(body, p)
        return
    if tile_product.suits(body, p):
        tile_product.emit_tile_product(body, p)
    elif 0 < p.k <= SHORT_K and p.b_along_j and p.n >= body.lanes and len(body.group.ops) <= SHORT_K:
        emit_short(body, p)
    elif is_tiled_ahead(body, p):
        TiledProduct(body, p).run()
    elif is_dots(p):
        emit_dots(body, p)
    elif has_few_rows(body, p) and p.b_along_j and p.n >= STREAM_COLUMNS:
        emit_streams(body, p)
    else:
        TiledProduct(body, p).run()


def is_tiled_ahead(body: Body, p: Product) -> bool:
    """Return whether tiles read a right operand that was packed ahead, where none of the loops before them suits."""
    return p.k > 0 and p.op is not None and prod(p.batch) == 1 and body.takes_packed(p.op)
