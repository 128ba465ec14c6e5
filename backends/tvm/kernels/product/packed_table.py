"""Lookups in a table that a product reads packed, too: a tied embedding is then in memory once.

In: a `gather` of rows with the mark `packed`. Out: the place of each element of the table among the panels of the
product `x @ table.T`. The packed operand is that of the product, made by the same function, so a program holds one.

Limit: on machines with tile registers products have other orders, and tables stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tvm import tirx

from penstock.backends.tvm.group import PACKED, Fusion, PackedWeight, packed_value
from penstock.backends.tvm.kernels.tools.body import Body
from penstock.backends.tvm.kernels.tools.elements import Index
from penstock.backends.tvm.kernels.tools.emit import Expr, load
from penstock.ir.graph import Op, Value
from penstock.ir.types import TensorType

from .choose import is_tiled_ahead
from .gemm import product_of
from .product import TiledProduct


def packed_tables(body: Body) -> Mapping[Value, Callable[[Index], Expr]]:
    """Return how the elements of a packed table are read, by the table; nothing where the group looks up no such
    table."""
    tables = {
        op.ins[0]
        for op in body.group.ops
        if op.kind == "gather" and op.attrs.get(PACKED) and op.ins[0] in body.group.homes
    }
    if body.loops is not None or body.machine.has_tiles or len(tables) != 1:
        return {}
    (table,) = tables
    group = _product_group(table, body.group.homes[table])
    inner = Body(group, body.machine, only_packing=body.only_packing)
    product = product_of(inner, group.ops[0])
    if not is_tiled_ahead(inner, product):
        return {}
    tiled = TiledProduct(inner, product)
    if body.only_packing:
        # It ends with the function that packs.
        tiled.run()
    value = packed_value(table, tiled.stored, tiled.packing.panels_size)
    body.packing = PackedWeight(None, value, (table,))
    panels = body.operand(value)
    return {table: lambda index: load(panels, _position(tiled, index[1], index[0]))}


def _product_group(table: Value, home: str) -> Fusion:
    """Return the product whose right operand is the table, for one row."""
    words, width = table.type.dims
    row = Value("row", TensorType(table.type.dtype, (1, width)))
    out = Value("out", TensorType(table.type.dtype, (1, words)))
    product = Op("matmul", (row, table), (out,), {"tb": True, PACKED: True})
    return Fusion((product,), (out,), homes={table: home})


def _position(tiled: TiledProduct, k: Expr, j: Expr) -> Expr:
    """Return the position of element [k, j] of the right operand among its panels."""
    p, width, lanes, steps = tiled.p, tiled.width, tiled.lanes, tiled.steps
    block = tirx.floordiv(k, tiled.k_size)
    k_from = block * tiled.k_size
    size = tirx.min(tiled.k_size, p.k - k_from) if tiled.k_blocks > 1 else p.k
    step = k - k_from
    start = k_from * tiled.packing.padded(p.n)
    whole = p.n // width * width
    panel = tirx.floordiv(j, width) * width
    inside = start + panel * size + step * width + (j - panel)
    if whole == p.n:
        return inside
    last, column = start + whole * size, j - whole
    if steps > 1:
        # Some steps of each column lie side by side (narrow_rest.py), and those left over in lines of their own.
        grouped = p.k // steps * steps
        line = tirx.Select(step < grouped, tirx.floordiv(step, steps), step - grouped + grouped // steps)
        place = last + line * lanes + column * steps + tirx.Select(step < grouped, tirx.floormod(step, steps), 0)
    else:
        place = last + step * tiled.packing.padded(p.n - whole) + column
    return tirx.Select(j < whole, inside, place)
