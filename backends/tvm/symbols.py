"""The names of the functions in a stage's library, for the code that makes the library and the code that loads it."""

from __future__ import annotations

from penstock.ir.graph import Graph, signature, slot_of

from .group import PACKED


def function_name(graph: str) -> str:
    """Return the name of a graph's function in the library: `s0.F` becomes `s0_F`."""
    return "".join(c if c.isalnum() else "_" for c in graph)


def pack_name(function: str) -> str:
    """Return the name of the function that packs operands for a function."""
    return f"{function}_pack"


def has_packed(graph: Graph) -> bool:
    """Return whether kernels of the graph may take packed operands; its library has a function for packing then."""
    return any(op.attrs.get(PACKED) for op in graph.ops)


def packed_slots(graph: Graph) -> tuple[int, ...]:
    """Return the places, among the slots of a graph, of the variables that its packed operands are made of."""
    makers, slots = graph.producers(), signature(graph).slots
    sources: set[int] = set()
    waiting = [op.ins[1] for op in graph.ops if op.attrs.get(PACKED)]
    while waiting:
        maker = makers.get(waiting.pop())
        slot = slot_of(maker) if maker is not None and maker.kind == "read" else None
        if slot is not None:
            sources.add(slots.index(slot))
        elif maker is not None:
            waiting += maker.ins
    return tuple(sorted(sources))
