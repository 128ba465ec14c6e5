"""Changes to operations and actions that a broken pass might have made. Each takes a list, and returns another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from penstock.ir.graph import Graph, Module, Op, Value, substitute
from penstock.ir.ops import make
from penstock.ir.schedule import Action

Change = Callable[[list[Op]], list[Op]]
Break = Callable[[Module], Module]


def in_graph(name: str, change: Change) -> Break:
    """A pass that changes a graph. Where there is no such graph, or nothing in it to change, the pass is right."""

    def broken(module: Module) -> Module:
        graph = module.graphs.get(name)
        if graph is None:
            return module
        ops = tuple(change(list(graph.ops)))
        return (
            module
            if ops == graph.ops
            else module.with_graph(Graph(graph.name, graph.ins, graph.outs, ops, graph.saved))
        )

    return broken


def in_schedule(change: Callable[[list[Action]], list[Action]], rank: int = 0) -> Break:
    """A pass that changes what a rank does in every batch."""

    def broken(module: Module) -> Module:
        if module.schedule is None:
            return module
        program = module.schedule.ranks[rank]
        ranks = {**module.schedule.ranks, rank: replace(program, batch=tuple(change(list(program.batch))))}
        return module.but(schedule=replace(module.schedule, ranks=ranks))

    return broken


def at(ops: list[Op], name: str) -> int | None:
    """The operation that makes a value, or works on a variable."""
    return next(
        (
            i
            for i, op in enumerate(ops)
            if name in (*(v.name for v in op.outs), op.attrs.get("var") if not op.outs else None)
        ),
        None,
    )


def where(name: str, change: Callable[[list[Op], int], list[Op]]) -> Change:
    return lambda ops: ops if (i := at(ops, name)) is None else change(ops, i)


def changed(name: str, **attrs: object) -> Change:
    """Other attributes."""
    return where(name, lambda ops, i: [*ops[:i], ops[i].with_attrs(**attrs), *ops[i + 1 :]])  # type: ignore[arg-type]


def dropped(name: str) -> Change:
    return where(name, lambda ops, i: [*ops[:i], *ops[i + 1 :]])


def passed_by(name: str, operand: int = 0) -> Change:
    """Who reads a value reads an operand of its operation instead."""
    return where(name, lambda ops, i: _reading(ops, i, ops[i].ins[operand]))


def _reading(ops: list[Op], i: int, value: Value) -> list[Op]:
    instead = {ops[i].outs[0]: value}
    later = [Op(op.kind, substitute(op.ins, instead), op.outs, op.attrs, op.loc) for op in ops[i + 1 :]]
    return [*ops[:i], *later]


def followed_by(name: str, kind: str, twice: bool = False) -> Change:
    """A value on which one more operation is done."""

    def change(ops: list[Op], i: int) -> list[Op]:
        op = ops[i]
        plain = Value(f"{name}.plain", op.outs[0].type)
        rest = {k: v for k, v in op.attrs.items() if k in ("of", "kernel")}
        ins = (plain, plain) if twice else (plain,)
        return [
            *ops[:i],
            Op(op.kind, op.ins, (plain, *op.outs[1:]), op.attrs, op.loc),
            Op(kind, ins, op.outs[:1], rest, op.loc),
            *ops[i + 1 :],
        ]

    return where(name, change)


def swapped(name: str) -> Change:
    return where(name, lambda ops, i: [*ops[:i], replace(ops[i], ins=ops[i].ins[::-1]), *ops[i + 1 :]])


def before(name: str, operand: int, kinds: list[tuple[str, dict[str, object]]]) -> Change:
    """An operand that something is done to on its way."""

    def change(ops: list[Op], i: int) -> list[Op]:
        value, more = ops[i].ins[operand], []
        for number, (kind, attrs) in enumerate(kinds):
            more.append(make(kind, (value,), [f"{name}.{operand}.{number}"], "", **attrs))  # type: ignore[arg-type]
            value = more[-1].outs[0]
        ins = list(ops[i].ins)
        ins[operand] = value
        return [*ops[:i], *more, replace(ops[i], ins=tuple(ins)), *ops[i + 1 :]]

    return where(name, change)


def latest(ops: list[Op]) -> list[Op]:
    """All reads of the newest version."""
    return [op.with_attrs(version="latest") if op.kind == "read" else op for op in ops]
