"""The checker of agreement, a part of the fact staged: stages that compute the same update use the same numbers.

In: a module of stage graphs. Out: problems.

Updates of several stages write copies of one variable (a tied parameter, the loss scale, counters). All of them act on
numbers that the stages agree on (the norm of the whole gradient). That holds if

    equal names     what copies are computed from, and what follows from what stages hand out, is computed in the same
                    way on all of them, from the same values in the same order
    equal writes    a variable without a stage is written by every stage that touches it, with the same value
    equal sums      what several stages add to a variable that is no gradient of a parameter, each for itself, is the
                    same value
    whole sums      the gradient of a parameter that several stages update contains the parts of all stages that add
                    to it
    one decision    every new value of a parameter or of its state depends on what N of every stage hands out
    own gradients   what P hands out is gone: N and U of that stage take it from P
    one copy        only what updates change and others read has versions, and gradients
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from penstock.ir.action_kinds import NORM_PARTS, PARTS, UPDATE
from penstock.ir.graph import (
    ANNOTATIONS,
    GRAD,
    STATE,
    Graph,
    Module,
    Op,
    Value,
    stepped_vars,
    touched_vars,
)
from penstock.ir.schedule import ADDERS, VERSIONED

from .problems import Problem, op_window


def check_agreement(module: Module) -> Iterator[Problem]:
    updates = {s.index: graph for s in module.stages if (graph := module.stage_graph(s.index, UPDATE))}
    yield from _check_names(module, updates)
    yield from _check_writes(module, updates)
    yield from _check_equal_sums(module)
    yield from _check_sums(module, updates)
    yield from _check_decisions(module, updates)
    yield from _check_parts(module)
    stepped = stepped_vars(module)
    for name, var in module.vars.items():
        if var.versions > 1 and name not in stepped and var.role != GRAD:
            yield Problem(
                f"@{name}",
                f"{var.role} has {var.versions} versions, but no update changes what forward or backward reads of it",
            )


def _definition(op: Op) -> tuple[object, ...]:
    return (
        op.kind,
        tuple(v.name for v in op.ins),
        tuple(sorted((k, v) for k, v in op.attrs.items() if k not in ANNOTATIONS)),
    )


def _check_names(module: Module, updates: Mapping[int, Graph]) -> Iterator[Problem]:
    """Check equal names: compare the values behind copies, and those that follow from the results of N alone."""
    definitions: dict[str, tuple[Graph, tuple[object, ...]]] = {}
    handed_out = {
        v.name for s in module.stages if (graph := module.stage_graph(s.index, NORM_PARTS)) for v in graph.outs
    }
    for graph in updates.values():
        alike = _behind(
            graph, (op.ins[0] for op in graph.ops if op.kind == "write" and module.vars[op.var].stage is None)
        )
        decided = set(handed_out)
        settled = set(handed_out)  # decisions, and values that depend on nothing else
        for i, op in enumerate(graph.ops):
            names, outs = {v.name for v in op.ins}, {v.name for v in op.outs}
            if names <= settled:
                settled |= outs
                if names & decided:
                    decided |= outs
            for name in outs & (alike | decided):
                other, definition = definitions.setdefault(name, (graph, _definition(op)))
                if definition != _definition(op):
                    what = f"%{name} is computed otherwise by @{other.name}; stages would not agree"
                    yield Problem(f"@{graph.name} op {i} ({op.kind})", what, op_window(graph, i))


def _check_writes(module: Module, updates: Mapping[int, Graph]) -> Iterator[Problem]:
    written: dict[str, dict[int, str]] = {}
    for stage, graph in updates.items():
        for op in graph.ops:
            if op.kind == "write":
                written.setdefault(op.var, {})[stage] = op.ins[0].name
    readers = {s.index: _read_by(module, s.index) for s in module.stages}
    for name, by_stage in written.items():
        for stage, read in readers.items():
            if stage not in by_stage and name in read:
                yield Problem(f"@s{stage}.U", f"does not write @{name}, a copy of what stages {sorted(by_stage)} write")
        if len({*by_stage.values()}) > 1:
            listed = ", ".join(f"%{value} on stage {stage}" for stage, value in by_stage.items())
            yield Problem(f"@{name}", f"copies are written with different values: {listed}")


def _read_by(module: Module, stage: int) -> set[str]:
    """Return the variables that a stage reads."""
    return {name for kind in VERSIONED for name in touched_vars(module.stage_graph(stage, kind), "read")}


def _check_equal_sums(module: Module) -> Iterator[Problem]:
    first: dict[str, tuple[Graph, list[tuple[object, ...]]]] = {}
    for stage in (s.index for s in module.stages):
        for graph in (graph for kind in ADDERS if (graph := module.stage_graph(stage, kind)) is not None):
            for i, op in enumerate(graph.ops):
                if op.kind != "accum" or module.vars[op.var].stage is not None or op.var.endswith(".grad"):
                    continue
                needed = _behind(graph, op.ins)
                addends = [_definition(other) for other in graph.ops if any(v.name in needed for v in other.outs)]
                other, definitions = first.setdefault(op.var, (graph, addends))
                if definitions != addends:
                    what = f"adds otherwise to @{op.var} than @{other.name}; each stage adds the same, for itself"
                    yield Problem(f"@{graph.name} op {i} (accum)", what, op_window(graph, i))


def _check_sums(module: Module, updates: Mapping[int, Graph]) -> Iterator[Problem]:
    added: dict[str, list[int]] = {}
    for stage in (s.index for s in module.stages):
        for kind in ADDERS:
            graph = module.stage_graph(stage, kind)
            for name in sorted(touched_vars(graph, "accum")):
                added.setdefault(name, []).append(stage)
    writers: dict[str, list[int]] = {}
    for stage, graph in updates.items():
        for name in touched_vars(graph, "write"):
            writers.setdefault(name, []).append(stage)
    for name in module.vars:
        stages = writers.get(name, [])
        if len(stages) < 2:
            continue
        for stage in stages:
            written = (op.ins[0] for op in updates[stage].ops if op.kind == "write" and op.var == name)
            needed = _behind_all(updates, stage, written)
            for source in added.get(f"{name}.grad", ()):
                if not any(v.name in needed for v in _handed_out(module, source, f"{name}.grad")):
                    what = (
                        f"updates @{name} without the part of its gradient from stage {source}; stages {stages} update "
                        "it, and need the "
                        "same sum"
                    )
                    yield Problem(f"@s{stage}.U", what)


def _handed_out(module: Module, stage: int, var: str) -> list[Value]:
    graph = module.stage_graph(stage, PARTS)
    values = {v for op in graph.ops if op.kind == "take" and op.var == var for v in op.outs} if graph else set()
    return [v for v in graph.outs if v in values] if graph else []


def _check_decisions(module: Module, updates: Mapping[int, Graph]) -> Iterator[Problem]:
    parts = {
        v.name: s.index for s in module.stages if (graph := module.stage_graph(s.index, NORM_PARTS)) for v in graph.outs
    }
    for stage, graph in updates.items() if parts else ():
        for i, op in enumerate(graph.ops):
            if op.kind != "write" or (module.vars[op.var].role == STATE and module.vars[op.var].stage is None):
                continue  # counters and the loss scale are equal by their definition
            needed = _behind_all(updates, stage, op.ins)
            for name, source in parts.items():
                if name not in needed:
                    what = (
                        f"writes @{op.var} without %{name}, which stage {source} hands out: stages would not decide "
                        "alike"
                    )
                    yield Problem(f"@{graph.name} op {i} (write)", what, op_window(graph, i))


def _check_parts(module: Module) -> Iterator[Problem]:
    for stage in (s.index for s in module.stages):
        graph = module.stage_graph(stage, PARTS)
        gone = touched_vars(graph, "take")
        for kind in (NORM_PARTS, UPDATE):
            later = module.stage_graph(stage, kind)
            for name in sorted(gone & touched_vars(later, "read", "take")):
                yield Problem(f"@s{stage}.{kind}", f"uses @{name}, which @s{stage}.P has taken and handed out")


def _behind_all(updates: Mapping[int, Graph], stage: int, values: Iterable[Value]) -> set[str]:
    """Return the names of these values of an update, and of all that they are computed from, also by the updates of
    other stages that hand them out."""
    names = _behind(updates[stage], values)
    for other, graph in updates.items():
        if other != stage:
            names |= _behind(graph, [value for value in graph.outs if value.name in names])
    return names


def _behind(graph: Graph, values: Iterable[Value]) -> set[str]:
    """Return the names of these values and of all values that they are computed from."""
    names = {v.name for v in values}
    for op in reversed(graph.ops):
        if any(v.name in names for v in op.outs):
            names |= {v.name for v in op.ins}
    return names
