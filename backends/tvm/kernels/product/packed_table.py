"""Lookups in a table that a product reads packed, too: a tied embedding is then in memory once.

In: a `gather` or `gather_q` of rows with the mark `packed`. Out: the place of each element of the table among the
panels of the product `x @ table.T`. The packed operand is that of the product, made by the same function, so a program
holds one.

Limit: on machines with tile registers products of floats have other orders, and their tables stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from tvm import tirx

from penstock.backends.tvm.group import PACKED, Fusion, PackedWeight, packed_value
from penstock.backends.tvm.kernels.tools.body import Body
from penstock.backends.tvm.kernels.tools.elements import Index
from penstock.backends.tvm.kernels.tools.emit import Buffer, Expr, load
from penstock.ir.attrs import Attr
from penstock.ir.graph import Op, Value
from penstock.ir.ops import table_of
from penstock.ir.types import TensorType

from .choose import is_tiled_ahead
from .gemm import product_of
from .product import TiledProduct
from .quantised import emit_matmul_q, rounds_rows, sizes_of
from .quantised_packing import QuantisedPanels


def packed_tables(body: Body) -> Mapping[Value, Callable[[Index], Expr]]:
    """Return how the elements of a packed table are read, by its values; nothing where the group looks up no such
    table."""
    tables = {
        (op.kind, table_of(op)): op
        for op in body.group.ops
        if op.kind in ("gather", "gather_q") and op.attrs.get(PACKED) and _are_slots(body, table_of(op))
    }
    if body.loops is not None or len(tables) != 1:
        return {}
    (lookup,) = tables.values()
    return _quantised(body, lookup) if lookup.kind == "gather_q" else _floats(body, lookup.ins[0])


def _are_slots(body: Body, table: tuple[Value, ...]) -> bool:
    return all(value in body.group.homes for value in table)


def _floats(body: Body, table: Value) -> Mapping[Value, Callable[[Index], Expr]]:
    if body.machine.has_tiles:
        return {}
    inner = _product_of_one_row(body, "matmul", (table,), table.type.dims[1], tb=True)
    product = product_of(inner, inner.group.ops[0])
    if not is_tiled_ahead(inner, product):
        return {}
    tiled = TiledProduct(inner, product)
    if body.only_packing:
        # It ends with the function that packs.
        tiled.run()
    panels = _packed(body, (table,), tiled.stored, tiled.packing.panels_size)
    return {table: lambda index: load(panels, _position(tiled, index[1], index[0]))}


def _quantised(body: Body, lookup: Op) -> Mapping[Value, Callable[[Index], Expr]]:
    table, width = table_of(lookup), lookup.outs[0].type.dims[-1]
    attrs = {name: lookup.attrs[name] for name in ("bits", "group")}
    inner = _product_of_one_row(body, "matmul_q", table, width, **attrs)
    sizes = sizes_of(body.machine, inner.group.ops[0])
    # Such a processor rounds no rows, so perhaps the product reads the weight as it is.
    if not rounds_rows(body.machine) or not sizes.size:
        return {}
    if body.only_packing:
        emit_matmul_q(inner, inner.group.ops[0])
    panels = QuantisedPanels(sizes, _packed(body, table, "i32", sizes.size))
    reads = (panels.stored, panels.scale, panels.zero)
    return {value: partial(_at, read) for value, read in zip(table, reads, strict=False)}


def _at(read: Callable[[Expr, Expr], Expr], index: Index) -> Expr:
    column, place = index
    return read(column, place)


def _packed(body: Body, table: tuple[Value, ...], dtype: str, size: int) -> Buffer:
    value = packed_value(table[0], dtype, size)
    body.packing = PackedWeight(None, value, table)
    return body.operand(value)


def _product_of_one_row(body: Body, kind: str, table: tuple[Value, ...], width: int, **attrs: Attr) -> Body:
    """Return the product of one row by the rows of the table."""
    row = Value("row", TensorType("f32" if len(table) > 1 else table[0].type.dtype, (1, width)))
    out = Value("out", TensorType(row.type.dtype, (1, table[0].type.dims[0])))
    product = Op(kind, (row, *table), (out,), {**attrs, PACKED: True})
    homes = {value: body.group.homes[value] for value in table}
    return Body(Fusion((product,), (out,), homes=homes), body.machine, only_packing=body.only_packing)


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
