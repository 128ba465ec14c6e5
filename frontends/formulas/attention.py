"""Heads of attention."""

from __future__ import annotations

from penstock.ir.graph import Value

from ..writer import Writer
from .layout import expand, reshape, transpose


def split_heads(w: Writer, x: Value, heads: int) -> Value:
    """[batch, positions, heads * size] as [batch, heads, positions, size]."""
    if x.type.rank == 4:
        return x
    w.require(x.type.rank == 3 and heads > 0, f"needs four dimensions, or three and the number of heads, got {x.type}")
    batch, positions, width = x.type.dims
    w.require(width % heads == 0, f"{width} of {x.type} does not divide into {heads} heads")
    return transpose(w, reshape(w, x, (batch, positions, heads, width // heads)), (0, 2, 1, 3))


def repeat_heads(w: Writer, x: Value, heads: int) -> Value:
    """Each key and value head serves a group of query heads."""
    batch, own, positions, size = x.type.dims
    w.require(heads % own == 0, f"{heads} query heads do not divide into {own} key heads")
    if heads == own:
        return x
    spread = expand(w, reshape(w, x, (batch, own, 1, positions, size)), (batch, own, heads // own, positions, size))
    return reshape(w, spread, (batch, heads, positions, size))
