"""Ranges of the integers that a module takes.

In: a module and the name of one of its inputs. Out: the range its values must lie in, and their uses.

An input that indexes a table of n rows takes -n .. n-1. One that names classes, of which there are n, takes 0 ..
n-1. It is followed through layout changes and casts, over all stages. An input that is only used after arithmetic, or
of which a slice is used, has no range. What one device does of a split program compares places in the whole table with
those of its own part. It counts negative ones from the end before (passes/sharding/forms.py), which says the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from penstock.ir.graph import COORDINATE, Graph, Module, Op
from penstock.ir.ops import complete_attrs, definition

Range = tuple[int, int]
INDEX, CLASSES = "index", "classes"
# Exchanges of devices that return the numbers that they take.
MOVING = ("all_gather", "all_to_all")


class Use(NamedTuple):
    """A use of an input, as index or as label, and the range [low, high) for that."""

    kind: str
    low: int
    high: int


def integer_range(module: Module, name: str) -> Range | None:
    """Return the range [low, high) that every value of an integer input must lie in; None when the module says
    nothing."""
    ranges = uses(module, name, sliced=False)
    return (max(use.low for use in ranges), min(use.high for use in ranges)) if ranges else None


def first_outside(array: np.ndarray, bounds: Range | None, axis: int = 0) -> tuple[int, str] | None:
    """Return the place along an axis and a description of the first value out of range."""
    if bounds is None or not array.size or not np.issubdtype(array.dtype, np.integer):
        return None
    low, high = bounds
    if low <= int(array.min()) and int(array.max()) < high:
        return None
    # Compared as Python integers would be: -1 has no place in an unsigned type.
    limits = np.iinfo(array.dtype)
    bad = (array < max(low, limits.min)) | (array > min(high - 1, limits.max))
    place = np.unravel_index(int(bad.argmax()), array.shape)
    return int(place[axis]) if place else 0, f"the value {int(array[place])}, the model takes {low} to {high - 1}"


def uses(module: Module, name: str, *, sliced: bool) -> set[Use]:
    """Return everything that an input indexes or labels. `sliced` follows slices too, of which only some values are
    used."""
    all_uses: set[Use] = set()
    # Values that go from one graph to another keep their names; other names may mean something else in each graph.
    shared, known = {name}, 0
    while len(shared) > known:
        known = len(shared)
        for graph in module.graphs.values():
            carriers = shared & {value.name for value in graph.ins}
            _follow(graph, carriers, all_uses, sliced)
            if module.is_local:
                all_uses |= _uses_of_parts(graph, carriers)
            shared |= carriers & {value.name for value in graph.outs}
    return all_uses


def _follow(graph: Graph, carriers: set[str], all_uses: set[Use], sliced: bool) -> None:
    # Layout changes and casts return the numbers that they take.
    for op in graph.ops:
        if not any(value.name in carriers for value in op.ins):
            continue
        layout = definition(op.kind).family == "layout" and (sliced or op.kind != "slice")
        if op.kind == "cast" or op.kind in MOVING or layout or _takes_own_part(op, carriers):
            carriers |= {value.name for value in op.outs}
        elif (use := _use_of(op, carriers)) is not None:
            all_uses.add(use)


def _takes_own_part(op: Op, carriers: set[str]) -> bool:
    """Return whether an operation takes the part of a device; all devices together take everything."""
    return op.kind == "gather" and op.ins[0].name in carriers and op.ins[1].name.startswith(COORDINATE)


def _use_of(op: Op, carriers: set[str]) -> Use | None:
    if op.kind == "gather" and op.ins[1].name in carriers:
        rows = op.ins[0].type.dims[int(complete_attrs(op)["axis"])]  # type: ignore[arg-type]
        return Use(INDEX, -rows, rows)
    if op.kind in ("cross_entropy", "cross_entropy_grad") and op.ins[1].name in carriers:
        return Use(CLASSES, 0, op.ins[0].type.dims[-1])
    return None


def _uses_of_parts(graph: Graph, carriers: set[str]) -> set[Use]:
    """Return the uses of carriers as places in a whole of which the device has a part."""
    makers = {v.name: op for op in graph.ops for v in op.outs}
    all_uses = set()
    for op in graph.ops:
        size = counted_from_the_end(op, makers)
        if size is not None and op.ins[2].name in carriers:
            # Labels are looked for among the numbers of classes.
            labels = any(other.kind == "equal" and op.outs[0] in other.ins for other in graph.ops)
            all_uses.add(Use(CLASSES, 0, size) if labels else Use(INDEX, -size, size))
    return all_uses


def counted_from_the_end(op: Op, makers: Mapping[str, Op]) -> int | None:
    """Return n where an operation results in x + n for a negative x, else in x."""
    below, moved = (makers.get(v.name) for v in op.ins[:2]) if op.kind == "where" else (None, None)
    if below is None or moved is None or (below.kind, moved.kind) != ("less", "add"):
        return None
    numbers = []
    for test in (below, moved):
        const = makers.get(test.ins[1].name)
        if test.ins[0] != op.ins[2] or const is None or const.kind != "const":
            return None
        numbers.append(const.attrs["value"])
    zero, size = numbers
    return size if zero == 0 and isinstance(size, int) and size > 0 else None
