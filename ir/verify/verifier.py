"""The static verifier. In: a module. Out: nothing, or one VerifyError that lists all problems found, each with its place and context.

Every fact a module claims has one checker here; checkers read the module and trust no pass. They run in levels (types, then what the
graphs say together, then the order of actions, then what depends on that order) and stop after the first level with problems, because
the rest would be consequences. Graph facts are checked in this file, schedule facts in ir/verify/schedules.py and
ir/verify/messages.py.

    typed           single assignment, operand and result types by the op table, equal names in different graphs have equal types
    differentiated  backward takes what forward saves; forward reads, and writes buffers it alone touches; backward accumulates gradients, update takes and writes
    staged          every operation and every variable on exactly one stage, or replicated; every graph input has one provider
    fused           operations that share a kernel can run as one
    scheduled       who computes what when: complete, each microbatch once, updates between batches, no deadlock
    versioned       forward and backward see one version, which exists and is not overwritten
    wired           sends and receives match, in order, and move exactly what the graphs need
    freed           everything is dropped once, after its last use, and fits into the memory of the device

Cost: about 5 microseconds per operation for its types, 15 to 20 with all facts; the schedule of 8
stages and 32 microbatches takes 0.2 seconds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from math import prod

from penstock.ir.action_kinds import ACTION_KINDS, BACKWARD, FORWARD, NORM_PARTS, PARTS, UPDATE, WEIGHTS, adder
from penstock.ir.cluster.cluster import Cluster
from penstock.ir.graph import (
    BUFFER,
    GRAD,
    PARAM,
    ROLES,
    SETTING,
    STATE,
    Graph,
    Module,
    Op,
    Value,
    touched_vars,
    touching_ops,
    written_vars,
)
from penstock.ir.memo import Derived
from penstock.ir.ops import infer_op
from penstock.ir.schedule import COMPUTE, PHASES, READERS
from penstock.ir.types import TensorType
from penstock.support.gc_pause import nothing_collected

from .agreement import check_agreement
from .messages import check_wired
from .problems import LIMIT, Problem, op_window, to_error
from .schedules import check_freed, check_scheduled, check_versioned

Checker = Callable[[Module], Iterable[Problem]]
STAGE_GRAPH = re.compile(rf"s(\d+)\.({'|'.join(COMPUTE)})")


def verify(module: Module) -> None:
    """Check types and every fact the module claims; VerifyError lists what is wrong."""
    check(module, ("typed", *module.facts))


def check(module: Module, facts: Sequence[str]) -> None:
    """Check the given facts; those without a checker say nothing that can be checked."""
    try:
        for level in LEVELS:
            found = (problem for fact in level if fact in facts for problem in CHECKERS[fact](module))
            with nothing_collected():
                problems = list(islice(found, LIMIT))
            if problems:
                raise to_error(module.name, problems)
    finally:
        if module.schedule is not None:
            module.schedule.kept.clear()  # as large as many batches of actions


# ------------------------------------------------------------------------------------------------ typed


def check_typed(module: Module) -> Iterator[Problem]:
    types = {name: var.type for name, var in module.vars.items()}
    for name, var in module.vars.items():
        if name != var.name:
            yield Problem(f"@{name}", f"the variable stored under this name is called @{var.name}")
        if var.role not in ROLES or var.versions < 1:
            yield Problem(
                f"@{name}",
                f"role {var.role}, {var.versions} versions; expected one of {', '.join(ROLES)} and at least one",
            )
        if isinstance(var.init, tuple) and len(var.init) != var.type.size:
            yield Problem(f"@{name}", f"is {var.type} and begins with {len(var.init)} elements")
    seen: dict[str, tuple[Value, str]] = {v.name: (v, "input of the module") for v in module.inputs}
    for name, graph in module.graphs.items():
        if name != graph.name:
            yield Problem(f"@{name}", f"the graph stored under this name is called @{graph.name}")
        yield from _check_unless_known(graph, types)
        for value in (*graph.ins, *graph.outs, *graph.saved):
            other, place = seen.setdefault(value.name, (value, f"@{name}"))
            if other.type != value.type:
                yield Problem(
                    f"@{name}",
                    f"%{value.name} is {value.type} here and {other.type} in {place}; equal names mean equal tensors",
                )


# The types of the variables with which a graph was found right.
_RIGHT = Derived[dict[str, TensorType]](__name__, "right")


def _check_unless_known(graph: Graph, types: dict[str, TensorType]) -> Iterator[Problem]:
    """Graphs do not change, and most passes hand on most of them: one that was found right is right as long as its variables have the types
    that they had."""
    before = graph.kept.get(_RIGHT)
    if before is not None and all(types.get(name) == kind for name, kind in before.items()):
        return
    right = True
    for problem in _check_graph(graph, types):
        right = False
        yield problem
    if right:
        graph.kept.put(_RIGHT, {op.var: types[op.var] for _, op in touching_ops(graph)})


def _check_graph(graph: Graph, types: dict[str, TensorType]) -> Iterator[Problem]:
    defined: dict[str, TensorType] = {}
    for value in graph.ins:
        if value.name in defined:
            yield Problem(f"@{graph.name}", f"input %{value.name} is listed twice")
        defined[value.name] = value.type
    for i, op in enumerate(graph.ops):
        for what in _op_problems(op, defined, types):
            yield Problem(_op_place(graph, i), what, op_window(graph, i))
        for value in op.outs:
            defined[value.name] = value.type
    for name, values in (("returns", graph.outs), ("saves", graph.saved)):
        for value in values:
            if value.name not in defined:
                yield Problem(f"@{graph.name}", f"{name} %{value.name}, which is not defined in it")
            elif defined[value.name] != value.type:
                yield Problem(
                    f"@{graph.name}", f"{name} %{value.name} as {value.type}, defined as {defined[value.name]}"
                )
        if len({v.name for v in values}) != len(values):
            yield Problem(f"@{graph.name}", f"{name} a value twice: {', '.join('%' + v.name for v in values)}")


def _op_problems(op: Op, defined: dict[str, TensorType], types: dict[str, TensorType]) -> list[str]:
    problems: list[str] = []
    for value in op.ins:
        known = defined.get(value.name)
        if known is None:
            problems.append(f"operand %{value.name} is not defined above")
        elif known is not value.type and known != value.type:
            problems.append(f"operand %{value.name} is used as {value.type}, defined as {known}")
    names = set()
    for value in op.outs:
        if value.name in defined or value.name in names:
            problems.append(f"%{value.name} is defined twice")
        names.add(value.name)
    try:
        found = infer_op(op, types)
    except TypeError as error:
        return [*problems, str(error)]
    if len(found) != len(op.outs):
        problems.append(f"declares {len(op.outs)} results, the op table says {len(found)}")
    else:
        problems += [
            f"result %{v.name} is declared {v.type}, expected {t}"
            for v, t in zip(op.outs, found, strict=True)
            if v.type != t
        ]
    if op.kind == "read" and op.attrs.get("version", "latest") not in ("mb", "latest"):
        problems.append(f"reads version {op.attrs['version']}, expected mb or latest")
    return problems


def _op_place(graph: Graph, i: int) -> str:
    op = graph.ops[i]
    return f"@{graph.name} op {i} ({op.kind}{f' from {op.loc}' if op.loc else ''})"


# ------------------------------------------------------------------------------------------------ differentiated


def _families(module: Module) -> Iterator[tuple[int | None, dict[str, Graph]]]:
    """The graphs that belong together, by kind: those of the whole model, or those of each stage."""
    whole = {kind: module.graphs[kind] for kind in COMPUTE if kind in module.graphs}
    if whole:
        yield None, whole
    for stage in module.stages:
        family = {kind: g for kind in COMPUTE if (g := module.stage_graph(stage.index, kind))}
        if family:
            yield stage.index, family


def check_differentiated(module: Module) -> Iterator[Problem]:
    families = list(_families(module))
    if not any(BACKWARD in family for _, family in families):
        yield Problem(
            "graphs",
            f"no backward graph, expected B or s0.B, ...; there is {', '.join('@' + n for n in module.graphs) or 'none'}",
        )
        return
    updating = any(UPDATE in family for _, family in families)
    for stage, family in families:
        yield from _check_saved(stage, family)
        yield from _check_effects(module, family)
        if updating:
            yield from _check_update(module, family)


def _check_saved(stage: int | None, family: dict[str, Graph]) -> Iterator[Problem]:
    if FORWARD not in family:
        return
    saved = [v.name for v in family[FORWARD].saved]
    takers = (kind for kind in READERS if ACTION_KINDS[kind].saved_by)
    taken = [v.name for kind in takers if kind in family for v in family[kind].ins]
    if stage is None and saved != taken:
        yield Problem("@B", f"takes {_listed(taken)}, expected what @F saves, in order: {_listed(saved)}")
    lost = [name for name in saved if name not in taken]
    if stage is not None and lost:
        yield Problem(f"@s{stage}.F", f"saves {_listed(lost)}, which @s{stage}.B never takes")
    kept = {v.name for v in family[BACKWARD].saved} if BACKWARD in family else set()
    lost = sorted(kept - {v.name for v in family[WEIGHTS].ins} if WEIGHTS in family else kept)
    if lost:
        yield Problem(f"@{family[BACKWARD].name}", f"saves {_listed(lost)}, which no weight gradient graph takes")


# What the graph of a computation may do to variables, by kind of operation, and of which roles these are.
_READABLE = (PARAM, STATE, BUFFER, SETTING)
EFFECTS: dict[str, dict[str, tuple[str, ...]]] = {
    FORWARD: {"read": _READABLE, "write": (BUFFER,)},
    BACKWARD: {"read": _READABLE, "accum": (GRAD,)},
    WEIGHTS: {"read": _READABLE, "accum": (GRAD,)},
    PARTS: {"take": (GRAD,)},
    NORM_PARTS: {"read": (GRAD,), "accum": (GRAD,)},
    UPDATE: {"read": _READABLE, "take": (GRAD,), "write": (PARAM, STATE)},
}


def _check_effects(module: Module, family: dict[str, Graph]) -> Iterator[Problem]:
    moving = touched_vars(family.get(FORWARD), "write")
    for kind, graph in family.items():
        done: dict[str, str] = {}
        allowed = dict(EFFECTS[kind])
        if any(ACTION_KINDS[other].part_of == kind for other in family):
            del allowed["accum"]
        for i, op in touching_ops(graph):
            roles, role = allowed.get(op.kind), module.vars[op.var].role
            if roles is None:
                yield Problem(
                    _op_place(graph, i),
                    f"{op.kind} is not allowed here, only {', '.join(allowed)}",
                    op_window(graph, i),
                )
            elif role not in roles:
                yield Problem(
                    _op_place(graph, i), f"@{op.var} is a {role}, expected {' or '.join(roles)}", op_window(graph, i)
                )
            elif op.var in done:
                yield Problem(
                    _op_place(graph, i), f"@{op.var} was already changed by {done[op.var]} above", op_window(graph, i)
                )
            elif kind != FORWARD and op.var in moving:
                what = f"{op.kind}s @{op.var}, which forward changes with every microbatch; expected forward alone to touch it"
                yield Problem(_op_place(graph, i), what, op_window(graph, i))
            if op.kind in ("write", "take"):
                done[op.var] = op.kind


def _check_update(module: Module, family: dict[str, Graph]) -> Iterator[Problem]:
    """Gradients of a stage are accumulated by its backward and taken by its update, or handed out for it; a parameter with a gradient is
    written there."""
    last = adder(family)
    made = touched_vars(family.get(last), "accum") | touched_vars(family.get(NORM_PARTS), "accum")
    taken = touched_vars(family.get(PARTS), "take") | touched_vars(family.get(UPDATE), "take")
    written = touched_vars(family.get(UPDATE), "write")
    backward = family[last].name if last in family else "the backward graph, which is missing,"
    update = f"@{family[UPDATE].name}" if UPDATE in family else "the update graph, which is missing,"
    for name in sorted(made - taken):
        yield Problem(f"@{backward}", f"gradient @{name} is accumulated here and never taken by {update}")
    for name in sorted(taken - made):
        yield Problem(update, f"gradient @{name} is taken here and never accumulated by @{backward}")
    used = {name for kind in READERS for name in touched_vars(family.get(kind), "read")}
    for name in sorted(written):
        if module.vars[name].role == PARAM and name not in used:
            yield Problem(update, f"writes @{name}, which neither forward nor backward of this stage reads")
    for name in sorted(used - written):
        if module.vars[name].role == PARAM and f"{name}.grad" in made:
            yield Problem(update, f"does not write @{name}, though its gradient is accumulated")


def _listed(names: Iterable[str]) -> str:
    return ", ".join("%" + n for n in names) or "nothing"


# ------------------------------------------------------------------------------------------------ staged


def check_staged(module: Module) -> Iterator[Problem]:
    indices = [s.index for s in module.stages]
    if indices != list(range(len(indices))) or not indices:
        yield Problem("stages", f"found stages {indices}, expected 0, 1, 2, ...")
        return
    if module.cluster is not None:
        places = {d.name for d in module.cluster.devices} | {m.name for m in module.meshes}
        for stage in module.stages:
            if stage.place not in places:
                yield Problem(
                    f"stage {stage.index}",
                    f"is on {stage.place}, which is no device or mesh; there are {', '.join(sorted(places))}",
                )
        yield from _check_meshes(module, module.cluster)
    for var in module.vars.values():
        if var.stage is not None and var.stage not in indices:
            yield Problem(f"@{var.name}", f"is on stage {var.stage}, which does not exist; there are {indices}")
    if any(STAGE_GRAPH.fullmatch(name) for name in module.graphs):
        yield from _check_split(module)
    else:
        for graph in module.graphs.values():
            yield from _check_annotations(graph, len(indices))


def _check_meshes(module: Module, cluster: Cluster) -> Iterator[Problem]:
    """A mesh is made of devices of the cluster that can run the same code, as many as its axes say."""
    known = {device.name: device for device in cluster.devices}
    taken = dict.fromkeys(known, "a device")
    for mesh in module.meshes:
        if mesh.name in taken:
            yield Problem(
                f"mesh @{mesh.name}",
                f"has the name of {taken[mesh.name]}, so a stage on {mesh.name} could be on either",
            )
        taken[mesh.name] = "another mesh"
        unknown = [name for name in mesh.devices if name not in known]
        if unknown:
            yield Problem(
                f"mesh @{mesh.name}", f"has {', '.join(unknown)}, which is no device; there are {', '.join(known)}"
            )
        sizes = [size for _, size in mesh.axes]
        if prod(sizes) != len(mesh.devices) or len(set(mesh.devices)) < len(mesh.devices):
            what = f"has axes of {' x '.join(map(str, sizes))} and devices {', '.join(mesh.devices)}, expected as many different ones"
            yield Problem(f"mesh @{mesh.name}", what)
        kinds = {(known[name].kind, known[name].target) for name in mesh.devices if name in known}
        if len(kinds) > 1:
            listed = ", ".join(f"{kind} {target}" for kind, target in sorted(kinds))
            yield Problem(f"mesh @{mesh.name}", f"mixes devices that need different code: {listed}")


def _check_annotations(graph: Graph, stages: int) -> Iterator[Problem]:
    """Stages written on operations: forward values move up, backward values down, and what has no stage can be cloned anywhere."""
    places: dict[str, int] = {}
    row = ACTION_KINDS.get(graph.name)
    stays, down = row is not None and row.gradients == "uses", row is not None and row.way < 0
    for i, op in enumerate(graph.ops):
        sources = {v.name: places[v.name] for v in op.ins if v.name in places}
        stage = op.attrs.get("stage")
        if stage is None:
            if sources:
                name, place = next(iter(sources.items()))
                what = f"is on no stage, but takes %{name} from stage {place}; only what depends on no stage can be replicated"
                yield Problem(_op_place(graph, i), what, op_window(graph, i))
            continue
        if not isinstance(stage, int) or not 0 <= stage < stages:
            yield Problem(_op_place(graph, i), f"is on stage {stage}, expected 0 .. {stages - 1}", op_window(graph, i))
            continue
        for name, place in sources.items():
            if place != stage if stays else place < stage if down else place > stage:
                way = (
                    "down in a backward graph"
                    if down
                    else "nowhere in an update graph"
                    if stays
                    else "up in a forward graph"
                )
                what = f"is on stage {stage}, but takes %{name} from stage {place}; values move {way}"
                yield Problem(_op_place(graph, i), what, op_window(graph, i))
        places |= {v.name: stage for v in op.outs}


def _check_split(module: Module) -> Iterator[Problem]:
    for name in module.graphs:
        match = STAGE_GRAPH.fullmatch(name)
        if match is None:
            yield Problem(f"@{name}", "is on no stage; expected only s<stage>.F, .B, .W, .P, .N and .U after the split")
        elif int(match[1]) >= len(module.stages):
            yield Problem(f"@{name}", f"there is no stage {match[1]}, only 0 .. {len(module.stages) - 1}")
    for stage in module.stages:
        if module.stage_graph(stage.index, FORWARD) is None:
            yield Problem(f"stage {stage.index}", f"has no forward graph @s{stage.index}.F")
    yield from _check_providers(module)
    yield from check_agreement(module)
    yield from _check_places(module)
    yield from _check_owners(module)


def _check_providers(module: Module) -> Iterator[Problem]:
    """Each input of a stage graph comes from the user, from the same stage's forward, or from one other stage. What is handed out once per
    batch is for its own stage, too."""
    fed = {v.name for v in module.inputs}
    makers: dict[str, dict[str, list[int]]] = {}
    for phase in (*PHASES, UPDATE):
        found = makers.setdefault(phase, {})
        for stage in module.stages:
            graph = module.stage_graph(stage.index, phase)
            for value in graph.outs if graph else ():
                found.setdefault(value.name, []).append(stage.index)
        for name, stages in found.items():
            if len(stages) > 1:
                yield Problem(
                    f"%{name}", f"is returned by {' and '.join(f'@s{s}.{phase}' for s in stages)}, expected one maker"
                )
    for kind in COMPUTE:
        row = ACTION_KINDS[kind]
        sources, earlier = row.takes, row.saved_by
        if not (sources or earlier):
            continue
        for index in (s.index for s in module.stages):
            graph = module.stage_graph(index, kind)
            kept = {v.name for k in earlier if (g := module.stage_graph(index, k)) for v in g.saved}
            own = {index} if row.way else set()
            for value in graph.ins if graph else ():
                given = {s for p in sources for s in makers[p].get(value.name, ())} - own
                if value.name not in fed and value.name not in kept and not given:
                    tried = "not an input of the module" + "".join(f", not saved by @s{index}.{k}" for k in earlier)
                    if sources:
                        tried += f", not returned by @s*.{' or @s*.'.join(sources)} of another stage"
                    what = f"takes {value!r}, which nobody provides: {tried}"
                    yield Problem(f"@s{index}.{kind}", what)
    for name in module.outputs:
        if name not in makers[FORWARD] and name not in fed:
            yield Problem(f"%{name}", "is an output of the module, but no stage returns it; was a layer dropped?")


def _check_places(module: Module) -> Iterator[Problem]:
    """Every variable is used by exactly one stage, the one it names, or names none and is replicated."""
    users: dict[str, set[int]] = {name: set() for name in module.vars}
    moving = {
        name: s.index
        for s in module.stages
        if (graph := module.stage_graph(s.index, FORWARD))
        for name in written_vars(graph)
    }
    for stage in module.stages:
        for kind in COMPUTE:
            graph = module.stage_graph(stage.index, kind)
            for _, op in touching_ops(graph):
                users[op.var].add(stage.index)
    for name, var in module.vars.items():
        if not users[name]:
            yield Problem(f"@{name}", f"{var.role} {var.type} is used by no stage; was a layer dropped?")
        elif var.stage is not None and users[name] != {var.stage}:
            where = " and ".join(f"stage {s}" for s in sorted(users[name]))
            yield Problem(
                f"@{name}",
                f"is on stage {var.stage}, but used by {where}",
                hint="a variable without a stage is replicated",
            )
        elif name in moving and len(users[name]) > 1:
            where = " and ".join(f"stage {s}" for s in sorted(users[name]))
            yield Problem(
                f"@{name}",
                f"is changed by the forward of stage {moving[name]}, but used by {where}; expected one stage",
            )


def _check_owners(module: Module) -> Iterator[Problem]:
    """An operation is done by one stage, unless it depends on nothing that enters its graph: constants and state may be replicated."""
    for kind in READERS:
        owners: dict[str, str] = {}
        for stage in module.stages:
            graph = module.stage_graph(stage.index, kind)
            fixed = {v.name for v in graph.ins} if graph else set()
            for i, op in enumerate(graph.ops if graph else ()):
                if not any(v.name in fixed for v in op.ins):
                    continue
                for value in op.outs:
                    fixed.add(value.name)
                    assert graph is not None
                    other = owners.setdefault(value.name, graph.name)
                    if other != graph.name:
                        yield Problem(
                            _op_place(graph, i),
                            f"%{value.name} is computed by @{other} as well, expected one stage",
                            op_window(graph, i),
                        )


# ------------------------------------------------------------------------------------------------ fused


def check_fused(module: Module) -> Iterator[Problem]:
    for graph in module.graphs.values():
        yield from _check_kernels(graph)


def _check_kernels(graph: Graph) -> Iterator[Problem]:
    """A kernel runs as one: no value may leave it, pass through another kernel and come back, so the kernels have an order."""
    units: list[object] = [op.attrs.get("kernel", i) for i, op in enumerate(graph.ops)]
    makers = {v.name: unit for op, unit in zip(graph.ops, units, strict=True) for v in op.outs}
    needs: dict[object, set[object]] = {unit: set() for unit in units}
    for i, (op, unit) in enumerate(zip(graph.ops, units, strict=True)):
        if "kernel" in op.attrs and not isinstance(unit, str):
            yield Problem(_op_place(graph, i), f"kernel must be a name, got {unit!r}", op_window(graph, i))
            return
        sources = needs[unit]
        for v in op.ins:
            source = makers.get(v.name, unit)
            if source != unit:
                sources.add(source)
    users: dict[object, list[object]] = {unit: [] for unit in needs}
    for unit, sources in needs.items():
        for source in sources:
            users[source].append(unit)
    waiting = {unit: len(sources) for unit, sources in needs.items()}
    ready = [unit for unit, count in waiting.items() if not count]
    while ready:
        for user in users[ready.pop()]:
            waiting[user] -= 1
            if not waiting[user]:
                ready.append(user)
    stuck = sorted(unit for unit, count in waiting.items() if count and isinstance(unit, str))
    if stuck:
        at = next(i for i, unit in enumerate(units) if unit in stuck)
        what = f"kernels {', '.join(stuck)} need each other's results, so none of them can run as one"
        yield Problem(_op_place(graph, at), what, op_window(graph, at))


CHECKERS: dict[str, Checker] = {
    "typed": check_typed,
    "differentiated": check_differentiated,
    "staged": check_staged,
    "fused": check_fused,
    "scheduled": check_scheduled,
    "versioned": check_versioned,
    "wired": check_wired,
    "freed": check_freed,
}
LEVELS = (("typed",), ("differentiated", "staged", "fused"), ("scheduled",), ("versioned", "wired"), ("freed",))
