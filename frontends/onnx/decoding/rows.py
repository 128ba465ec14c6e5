"""Two proofs about the graph of a turn: its rows do not see each other, and no look-up is beyond its table.

A turn holds tokens of several sequences, so only `put` and `attend` may take rows together. The dimension of the tokens
is followed through the graph by the rules that split tensors (ir/sharding). An operation that adds rows up, mixes them
with another dimension, or has numbers of its own for each row is a problem.

Kernels do not check indices. Those that are tokens or positions are followed to the tables that they look up, whose
sizes bound the words and the context.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from penstock.ir.graph import Graph, Op, Value
from penstock.ir.ops import complete_attrs, integer
from penstock.ir.sharding.rules import rule_of
from penstock.ir.sharding.splits import Split, read_split, split_of
from penstock.ir.types import INTS

_TOKENS = ("tokens",)
_BY_ROW = ("turn.tokens", "turn.positions", "turn.places")
_ALIKE = ("reshape", "cast", "transpose", "broadcast")


def row_problems(graph: Graph) -> list[str]:
    """List the operations of a turn that let rows see each other."""
    rows = {value: 0 for value in graph.ins if value.name in _BY_ROW}
    uniform: set[Value] = set()
    problems: list[str] = []
    for op in graph.ops:
        if op.kind == "const" and not isinstance(op.attrs["value"], tuple):
            uniform.update(op.outs)
        elif op.kind in ("put", "attend"):
            if rows.get(op.ins[0]) != 0:
                problems.append(f"{op.kind} {op.loc}: its rows are not those of the turn")
            rows |= {value: 0 for value in op.outs if op.kind == "attend"}
        elif _chooses(op, rows):
            continue
        elif not rows.keys().isdisjoint(op.ins) and (problem := _follow(op, rows, uniform)):
            problems.append(f"{op.kind} {op.loc or op.outs[0].name}: {problem}")
    return problems


def _chooses(op: Op, rows: dict[Value, int]) -> bool:
    """Return whether an operation takes the rows that choose tokens."""
    by_number = op.kind == "gather" and op.ins[1].name == "turn.chosen"
    return by_number and integer(op.attrs["axis"]) == rows.get(op.ins[0])


def _follow(op: Op, rows: dict[Value, int], uniform: set[Value]) -> str:
    """Note where the rows lie in the results of an operation. Return what is wrong with it, if anything."""
    rule = rule_of(op)
    size = next(value.type.dims[rows[value]] for value in op.ins if value in rows)
    names: dict[str, Split] = {}
    for value, dimensions in zip(op.ins, rule.ins, strict=True):
        if value in rows:
            factors = dimensions[rows[value]]
            read = read_split(factors, Split(_TOKENS), rule.sizes, size) if factors else None
            if read is None:
                return "mixes the tokens of a turn with another dimension, or takes some of them"
            names[read[0]] = read[1]
    if len(names) > 1 or any(rule.marks.get(name, "") for name in names):
        return "takes the tokens of a turn together, which may be of several sequences"
    for value, dimensions in zip(op.ins, rule.ins, strict=True):
        of_each = any(name in factors for factors in dimensions for name in names)
        if of_each and value not in rows and value not in uniform:
            return f"has numbers for each row of a turn, {value.name}"
    for value, dimensions in zip(op.outs, rule.outs, strict=True):
        places = [split_of(factors, names, rule.sizes) for factors in dimensions]
        at = [dim for dim, place in enumerate(places) if place is None or place.axes]
        if len(at) != 1 or (place := places[at[0]]) is None or place.blocks != 1:
            return "mixes the tokens of a turn with another dimension"
        rows[value] = at[0]
    return ""


@dataclass
class Lookups:
    """The sizes of the tables that tokens and positions look up, and look-ups of which none is known."""

    words: int | None = None
    positions: int | None = None
    problems: list[str] = field(default_factory=list)


def lookups_of(graph: Graph) -> Lookups:
    """Return the smallest tables that tokens and positions look up."""
    lookups = Lookups()
    # Values that are tokens or positions, and what was added to these; None where they were changed otherwise.
    known: dict[Value, tuple[str, int] | None] = {v: (v.name, 0) for v in graph.ins if v.name in _BY_ROW[:2]}
    numbers = {op.outs[0]: op.attrs["value"] for op in graph.ops if op.kind == "const"}
    for op in graph.ops:
        if op.kind == "gather" and op.ins[1] in known:
            _note(lookups, op, known[op.ins[1]])
        for value in _followed(op, known):
            known[value] = _shifted(op, known, numbers)
    return lookups


def _followed(op: Op, known: dict[Value, tuple[str, int] | None]) -> Iterator[Value]:
    """Yield results that may be indices and depend on tokens or positions."""
    if op.kind != "gather" and not known.keys().isdisjoint(op.ins):
        yield from (value for value in op.outs if value.type.dtype in INTS)


def _shifted(
    op: Op, known: dict[Value, tuple[str, int] | None], numbers: Mapping[Value, object]
) -> tuple[str, int] | None:
    if op.kind in _ALIKE:
        return known[op.ins[0]]
    if op.kind == "add":
        number = next((numbers[value] for value in op.ins if value in numbers), None)
        index = next((known[value] for value in op.ins if value in known), None)
        if index is not None and isinstance(number, int) and number >= 0:
            return index[0], index[1] + number
    return None


def _note(lookups: Lookups, op: Op, index: tuple[str, int] | None) -> None:
    size = op.ins[0].type.dims[integer(complete_attrs(op)["axis"])]
    if index is None:
        lookups.problems.append(f"gather {op.loc}: no bound is known for its indices")
    elif index[0] == "turn.tokens":
        lookups.words = min(size - index[1], lookups.words or size)
    else:
        lookups.positions = min(size - index[1], lookups.positions or size)
