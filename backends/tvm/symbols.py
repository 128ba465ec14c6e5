"""The names of the functions in a stage's library, for the code that makes the library and the code that loads it."""

from __future__ import annotations

from penstock.ir.graph import Graph

from .group import PACKED


def function_name(graph: str) -> str:
    """Return the name of a graph's function in the library: `s0.F` becomes `s0_F`."""
    return "".join(c if c.isalnum() else "_" for c in graph)


def pack_name(function: str, number: int | None = None) -> str:
    """Return the name of the function that packs an operand for a kernel, or operand `number` of a graph's function. Of
    a graph without a number, it is the function that describes these operands."""
    return f"{function}_pack" + ("" if number is None else str(number))


def has_packed(graph: Graph) -> bool:
    """Return whether kernels of the graph may take packed operands; its library has a function for packing then."""
    return any(op.attrs.get(PACKED) for op in graph.ops)
