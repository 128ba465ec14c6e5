"""The parts of an update: the graphs that it runs as, where optimiser state comes to the device in chunks.

In: the update graph of a stage, and variables with the number of their chunk. Out: a graph for each chunk, `s0.U.c2`,
which `0U1@2:c2` runs, and one for all that is left, `s0.U`, which runs last and ends the update. A part has what the
new values of its variables are computed from, and nothing else. Scalars that several parts need are computed by each.

A part takes gradients, and overwrites variables. So what no part but one may touch ties new values together: `clusters`
lists the state that has to stay in one part. A scalar that the update takes, such as the sum of loss scales, is read by
all parts that need it, and taken by the last.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from penstock.ir.action_kinds import CHUNK_ITEM, UPDATE
from penstock.ir.graph import Graph, Module, Op, Value
from penstock.ir.memo import Derived
from penstock.ir.schedule import Action
from penstock.support.errors import VerifyError

# The part that ends an update.
LAST = ""
_PARTS = Derived[dict[int, dict[str, Graph]]](__name__, "parts")


def update_parts(module: Module, stage: int) -> Mapping[str, Graph]:
    """Return the graphs of a stage's update by item: that of `LAST` alone where its state is in no chunks; none where
    it has no update."""
    parts = module.kept.once(_PARTS, dict)
    if stage not in parts:
        parts[stage] = _parts_of(module, stage)
    return parts[stage]


def graph_of(module: Module, action: Action) -> Graph | None:
    """Return the graph that an action runs."""
    if action.kind == UPDATE:
        return update_parts(module, action.stage).get(action.item)
    return module.stage_graph(action.stage, action.kind)


def share_of_update(module: Module, action: Action) -> float:
    """Return the share of the work of a computation that an action does: of an update by the bytes that its part
    writes."""
    parts = update_parts(module, action.stage) if action.kind == UPDATE else {}
    if len(parts) < 2 or action.item not in parts:
        return 1.0
    sizes = {item: sum(op.ins[0].type.nbytes for op in part.ops if op.kind == "write") for item, part in parts.items()}
    return sizes[action.item] / max(1, sum(sizes.values()))


def computation_of(graph: Graph) -> str:
    """Name what a graph of a stage computes: its kind, or a part of the update, `U.c0`."""
    return graph.name.partition(".")[2]


def chunk_item(number: int) -> str:
    """Name the item of a chunk."""
    return f"{CHUNK_ITEM}{number}"


def clusters(update: Graph, state: Collection[str]) -> list[list[str]]:
    """Return the variables of some optimiser state that an update can change in parts, in its order: those of a list in
    one part. What a result of the update is tied to is left out."""
    return [
        [name for name in state if name in group.touched]
        for group in _groups(update)
        if not group.has_results and not group.touched.isdisjoint(state)
    ]


def _parts_of(module: Module, stage: int) -> dict[str, Graph]:
    update = module.stage_graph(stage, UPDATE)
    if update is None:
        return {}
    chunks = {
        name: var.chunk
        for name, var in module.vars.items()
        if var.stage == stage and var.home and var.chunk is not None
    }
    if not chunks:
        return {LAST: update}
    places: dict[str, set[int]] = {chunk_item(number): set() for number in sorted(set(chunks.values()))}
    left = set[int]()
    for group in _groups(update):
        items = sorted({chunk_item(chunks[name]) for name in group.touched if name in chunks})
        if len(items) > 1 or (items and group.has_results):
            names = ", ".join(f"@{name}" for name in sorted(group.touched & chunks.keys()))
            what = " and ".join([*items, *(["the results of the update"] if group.has_results else [])])
            raise VerifyError(f"{what} are made of {names} together, so they cannot be apart", where=f"@{update.name}")
        (places[items[0]] if items else left).update(group.places)
    parts: dict[str, Graph] = {}
    common = _common(update)
    left |= {i for numbers in places.values() for i in numbers if update.ops[i] in common}
    for item, numbers in places.items():
        ops = tuple(replace(op, kind="read") if op in common else op for i, op in enumerate(update.ops) if i in numbers)
        operands = {value for op in ops for value in op.ins}
        ins = tuple(value for value in update.ins if value in operands)
        parts[item] = Graph(f"{update.name}.{item}", ins, (), ops)
    return {**parts, LAST: replace(update, ops=tuple(op for i, op in enumerate(update.ops) if i in left))}


def _common(update: Graph) -> list[Op]:
    """Return the operations that take a scalar: parts may read it, as the last one takes it."""
    return [op for op in update.ops if op.kind == "take" and not op.outs[0].type.rank]


@dataclass(slots=True)
class _Group:
    """New values of variables, and perhaps results of the update, that one part makes: the places of the operations
    behind them, the variables that these touch, and those of them that no other part may touch."""

    places: set[int]
    touched: set[str]
    alone: set[str]
    has_results: bool = False


def _groups(update: Graph) -> list[_Group]:
    """Return what an update makes, in its order, in groups that no variable ties together."""
    groups: list[_Group] = []
    for group in _made(update):
        apart = []
        for other in groups:
            if other.alone.isdisjoint(group.alone):
                apart.append(other)
                continue
            group.places |= other.places
            group.touched |= other.touched
            group.alone |= other.alone
            group.has_results |= other.has_results
        groups = [*apart, group]
    return sorted(groups, key=lambda group: min(group.places, default=len(update.ops)))


def _made(update: Graph) -> list[_Group]:
    """Return a group for each thing that an update makes: every new value of a variable, every gradient that it takes
    and does not use, and its results."""
    ops, used = update.ops, {value for op in update.ops for value in op.ins}
    makers = {value: i for i, op in enumerate(ops) for value in op.outs}
    ends = [[i] for i, op in enumerate(ops) if op.kind == "write" or (op.kind == "take" and used.isdisjoint(op.outs))]
    pieces, common = [], {op.var for op in _common(update)}
    for listed in [*ends, [makers[value] for value in update.outs if value in makers]]:
        places = _behind(ops, makers, listed)
        touched = {ops[i].var for i in places if "var" in ops[i].attrs}
        pieces.append(_Group(places, touched, {ops[i].var for i in places if ops[i].kind == "take"} - common))
    pieces[-1].has_results = True
    # A counter follows from no gradient. All parts may read it, because the last part writes it.
    written = {op.var for op in ops if op.kind == "write"}
    counters = {ops[i].var for group in pieces if not group.alone for i in group.places if ops[i].kind == "write"}
    for group in pieces:
        group.alone |= (group.touched & written) - counters
    return pieces


def _behind(ops: Sequence[Op], makers: Mapping[Value, int], ends: Iterable[int]) -> set[int]:
    """Return the places of operations, and of all that they are computed from."""
    places, ahead = set[int](), list(ends)
    while ahead:
        if (place := ahead.pop()) not in places:
            places.add(place)
            ahead += [makers[value] for value in ops[place].ins if value in makers]
    return places
