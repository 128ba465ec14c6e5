"""The static verifier.

In: a module. Out: nothing, or one VerifyError that lists all problems found, each with its place and context.

Every fact a module claims has one checker here; checkers read the module and trust no pass. They run in levels: types,
then facts of all graphs together, then the order of actions, then what depends on that order. They stop after the first
level with problems, because later problems would follow from those. Facts of graphs are checked in this file and in
ir/verify/stages.py, facts of schedules in ir/verify/schedules.py, ir/verify/versions.py and ir/verify/messages.py.

    typed           single assignment, operand and result types by the op table, equal names in different graphs \
have equal types; a forward graph alone puts into caches, and attend alone takes what put gave
    differentiated  backward takes what forward saves; forward reads, and writes buffers it alone touches; \
backward accumulates gradients, update takes and writes
    staged          every operation and every variable on exactly one stage, or replicated; \
every graph input has one provider
    fused           operations that share a kernel can run as one
    scheduled       who computes what when: complete, each microbatch once, updates between batches, no deadlock
    versioned       forward and backward see one version, which exists and is not overwritten
    wired           sends and receives match, in order, and move exactly what the graphs need
    sharded         whole graphs with layouts: every operation obeys its rule, partial sums pass linear operands only
    local           stage graphs are what one device does: what is declared whole is the same on all ranks of a team
    freed           everything is dropped once, after its last use, and fits into the memory of the device

Cost: about 5 microseconds per operation for its types, 15 to 20 with all facts; the schedule of 8 stages and 32
microbatches takes 0.2 seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice

from penstock.ir.action_kinds import ACTION_KINDS, AGAIN, BACKWARD, FORWARD, NORM_PARTS, PARTS, UPDATE, WEIGHTS, adder
from penstock.ir.graph import (
    BUFFER,
    COORDINATE,
    COPY,
    GRAD,
    LOCAL,
    PARAM,
    ROLES,
    SETTING,
    STATE,
    Graph,
    Module,
    Op,
    Value,
    graph_stage,
    touched_vars,
    touching_ops,
)
from penstock.ir.memo import Derived
from penstock.ir.memory.workspace import is_inline
from penstock.ir.ops import infer_op
from penstock.ir.schedule import COMPUTE, READERS
from penstock.ir.sharding.between_meshes import edge_values, travels_in_tiles
from penstock.ir.types import TensorType
from penstock.support.gc_pause import nothing_collected

from .caches import check_caches
from .layouts import check_local, check_sharded
from .messages import check_wired
from .problems import LIMIT, Problem, op_place, op_window, to_error
from .schedules import check_freed, check_scheduled
from .stages import check_staged
from .versions import check_versioned

Checker = Callable[[Module], Iterable[Problem]]


def verify(module: Module) -> None:
    """Check types and every fact the module claims; VerifyError lists what is wrong."""
    check(module, ("typed", *module.facts))


def check(module: Module, facts: Sequence[str]) -> None:
    """Check the given facts; those without a checker say nothing that can be checked."""
    try:
        for level in LEVELS:
            all_problems = (problem for fact in level if fact in facts for problem in CHECKERS[fact](module))
            with nothing_collected():
                problems = list(islice(all_problems, LIMIT))
            if problems:
                raise to_error(module.name, problems)
    finally:
        if module.schedule is not None:
            module.schedule.kept.clear()  # as many actions as many batches have


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
    yield from _check_batch(module)
    tiled = _tiled_types(module)
    seen: dict[str, tuple[Value, str]] = {v.name: (v, "input of the module") for v in module.inputs}
    for name, graph in module.graphs.items():
        if name != graph.name:
            yield Problem(f"@{name}", f"the graph stored under this name is called @{graph.name}")
        stage = graph_stage(name) if module.is_local else None
        here = stage if stage is not None and stage < len(module.stages) else None
        yield from _check_unless_known(graph, types if here is None else _local_types(module, types, here))
        for value in (*graph.ins, *graph.outs, *graph.saved):
            other, place = seen.setdefault(value.name, (value, f"@{name}"))
            expected = other.type if here is None else module.local_type(other.type, here)
            if value.name in tiled:
                expected = tiled[value.name].get(stage, tiled[value.name][None])
            if expected != value.type:
                yield Problem(
                    f"@{name}",
                    f"%{value.name} is {value.type} here and {expected} in {place}; equal names mean equal tensors",
                )
        if here is not None:
            yield from _check_coordinates(module, graph, here)
    yield from check_caches(module)


def _check_batch(module: Module) -> Iterator[Problem]:
    """Check that samples are said to lie along dimensions that there are."""
    if not module.batch:
        return
    values = {v.name: v for graph in module.graphs.values() for v in graph.outs if v.name in module.outputs}
    values |= {v.name: v for v in module.inputs}
    for name, axis in module.batch.items():
        if name not in values:
            yield Problem(f"%{name}", "is said to have samples, and is no input and no output")
        elif axis is not None and axis >= values[name].type.rank:
            yield Problem(f"%{name}", f"is {values[name].type} and has no dimension {axis} for samples to lie along")


def _tiled_types(module: Module) -> dict[str, dict[int | None, TensorType]]:
    """Return the types of values that travel in tiles: on one device of the stages that take them, and of others."""
    types: dict[str, dict[int | None, TensorType]] = {}
    for edge in module.edges:
        if travels_in_tiles(edge):
            for left, arrived in zip(
                *(edge_values(module, edge, stage) for stage in (edge.src, edge.dst)), strict=True
            ):
                types.setdefault(left.name, {None: left.type})[edge.dst] = arrived.type
    return types


def _local_types(module: Module, types: Mapping[str, TensorType], stage: int) -> dict[str, TensorType]:
    """Return the types of what one device of a stage has of each variable."""
    return {name: module.local_type(kind, stage) for name, kind in types.items()}


def _check_coordinates(module: Module, graph: Graph, stage: int) -> Iterator[Problem]:
    """Check that a graph takes coordinates of axes that there are, and no data is called like them."""
    fed, known = {value.name for value in module.inputs}, module.given_names(stage)
    for value in graph.ins:
        if not value.name.startswith(COORDINATE):
            continue
        if value.name in fed:
            yield Problem(f"%{value.name}", "is an input of the module, but a rank has its coordinates from its mesh")
        elif value.name not in known:
            axes = ", ".join(module.mesh_of(stage).sizes) or "none"
            yield Problem(f"@{graph.name}", f"takes %{value.name}; the axes of the mesh of stage {stage} are {axes}")
        elif value.type != TensorType("i64", ()):
            yield Problem(f"@{graph.name}", f"takes %{value.name} as {value.type}, a coordinate is i64[]")


# The types of the variables with which a graph was found right.
_RIGHT = Derived[dict[str, TensorType]](__name__, "right")


def _check_unless_known(graph: Graph, types: dict[str, TensorType]) -> Iterator[Problem]:
    """Check the graphs that are not known to be right. Graphs do not change, and most passes keep most of them. A graph
    that was right stays right as long as its variables have the same types."""
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
            yield Problem(op_place(graph, i), what, op_window(graph, i))
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
        inferred = infer_op(op, types)
    except TypeError as error:
        return [*problems, str(error)]
    if len(inferred) != len(op.outs):
        problems.append(f"declares {len(op.outs)} results, the op table says {len(inferred)}")
    else:
        problems += [
            f"result %{v.name} is declared {v.type}, expected {t}"
            for v, t in zip(op.outs, inferred, strict=True)
            if v.type != t and (op.kind == "reshard" or v.type.plain != t)
        ]
    if op.kind == "read" and op.attrs.get("version", "latest") not in ("mb", "latest"):
        problems.append(f"reads version {op.attrs['version']}, expected mb or latest")
    return problems


# ------------------------------------------------------------------------------------------------ differentiated


def _families(module: Module) -> Iterator[tuple[int | None, dict[str, Graph]]]:
    """Yield the graphs that belong together, by kind: those of the whole model, or those of each stage."""
    unsplit = {kind: module.graphs[kind] for kind in COMPUTE if kind in module.graphs}
    if unsplit:
        yield None, unsplit
    for stage in module.stages:
        family = {kind: g for kind in COMPUTE if (g := module.stage_graph(stage.index, kind))}
        if family:
            yield stage.index, family


def check_differentiated(module: Module) -> Iterator[Problem]:
    families = list(_families(module))
    if not any(BACKWARD in family for _, family in families):
        yield Problem(
            "graphs",
            "no backward graph, expected B or s0.B, ...; there is "
            f"{', '.join('@' + n for n in module.graphs) or 'none'}",
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
    inputs = [v.name for kind in takers if kind in family for v in family[kind].ins]
    if stage is None and saved != inputs:
        yield Problem("@B", f"takes {_listed(inputs)}, expected what @F saves, in order: {_listed(saved)}")
    lost = [name for name in saved if name not in inputs]
    if stage is not None and lost:
        yield Problem(f"@s{stage}.F", f"saves {_listed(lost)}, which @s{stage}.B never takes")
    if AGAIN in family:
        yield from _check_again(family[FORWARD], family[AGAIN], inputs)
    kept = {v.name for v in family[BACKWARD].saved} if BACKWARD in family else set()
    lost = sorted(kept - {v.name for v in family[WEIGHTS].ins} if WEIGHTS in family else kept)
    if lost:
        yield Problem(f"@{family[BACKWARD].name}", f"saves {_listed(lost)}, which no weight gradient graph takes")


def _check_again(forward: Graph, again: Graph, taken: Collection[str]) -> Iterator[Problem]:
    """Check that what is computed again is what a backward takes, and the same as in the forward. The forward saves
    all of it, for microbatches that keep it, or nothing."""
    repeated, saved = [v.name for v in again.saved], {v.name for v in forward.saved}
    if again.outs:
        yield Problem(f"@{again.name}", f"returns {_listed(v.name for v in again.outs)}, expected nothing")
    if lost := [name for name in repeated if name not in taken]:
        yield Problem(f"@{again.name}", f"saves {_listed(lost)}, which no backward graph takes")
    if strange := [name for name in repeated if name not in {v.name for op in forward.ops for v in op.outs}]:
        yield Problem(f"@{again.name}", f"computes {_listed(strange)} again, which @{forward.name} does not compute")
    if (some := [name for name in repeated if name in saved]) and len(some) < len(repeated):
        others = _listed(name for name in repeated if name not in saved)
        what = f"saves {_listed(some)}, but not {others}; @{again.name} computes both"
        yield Problem(f"@{forward.name}", f"{what} again, expected all or none")


# The operations on variables that the graph of a computation may have, and the roles of these variables.
_READABLE = (PARAM, STATE, BUFFER, SETTING, COPY)
EFFECTS: dict[str, dict[str, tuple[str, ...]]] = {
    FORWARD: {"read": _READABLE, "write": (BUFFER,)},
    AGAIN: {"read": _READABLE},
    BACKWARD: {"read": _READABLE, "accum": (GRAD,)},
    WEIGHTS: {"read": _READABLE, "accum": (GRAD,)},
    PARTS: {"take": (GRAD,)},
    NORM_PARTS: {"read": (GRAD,), "accum": (GRAD,)},
    UPDATE: {"read": _READABLE, "take": (GRAD,), "write": (PARAM, STATE, COPY)},
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
                    op_place(graph, i),
                    f"{op.kind} is not allowed here, only {', '.join(allowed)}",
                    op_window(graph, i),
                )
            elif role not in roles:
                yield Problem(
                    op_place(graph, i), f"@{op.var} is a {role}, expected {' or '.join(roles)}", op_window(graph, i)
                )
            elif op.var in done:
                yield Problem(
                    op_place(graph, i), f"@{op.var} was already changed by {done[op.var]} above", op_window(graph, i)
                )
            elif kind != FORWARD and op.var in moving:
                what = (
                    f"{op.kind}s @{op.var}, which forward changes with every microbatch; expected forward alone to "
                    "touch it"
                )
                yield Problem(op_place(graph, i), what, op_window(graph, i))
            if op.kind in ("write", "take"):
                done[op.var] = op.kind


def _check_update(module: Module, family: dict[str, Graph]) -> Iterator[Problem]:
    """Check that the backward of a stage accumulates its gradients. Its update takes them, or P returns them for it.
    The update writes each parameter with a gradient."""
    last = adder(family)
    accumulated = touched_vars(family.get(last), "accum") | touched_vars(family.get(NORM_PARTS), "accum")
    used_up = touched_vars(family.get(PARTS), "take") | touched_vars(family.get(UPDATE), "take")
    written = touched_vars(family.get(UPDATE), "write")
    backward = family[last].name if last in family else "the backward graph, which is missing,"
    update = f"@{family[UPDATE].name}" if UPDATE in family else "the update graph, which is missing,"
    for name in sorted(accumulated - used_up):
        yield Problem(f"@{backward}", f"gradient @{name} is accumulated here and never taken by {update}")
    for name in sorted(used_up - accumulated):
        yield Problem(update, f"gradient @{name} is taken here and never accumulated by @{backward}")
    used = {name for kind in READERS for name in touched_vars(family.get(kind), "read")}
    yield from _check_copies(module, family.get(UPDATE), used | written)
    used |= {module.vars[name].source for name in used if module.vars[name].role == COPY}
    for name in sorted(written - _handed_out(family.get(UPDATE))):
        if module.vars[name].role == PARAM and name not in used:
            yield Problem(update, f"writes @{name}, which neither forward nor backward of this stage reads")
    for name in sorted(used - written):
        if module.vars[name].role == PARAM and f"{name}.grad" in accumulated:
            yield Problem(update, f"does not write @{name}, though its gradient is accumulated")


def _check_copies(module: Module, update: Graph | None, touched: set[str]) -> Iterator[Problem]:
    """Check that an update writes each copy of a parameter whenever it writes the parameter, with the same value."""
    new = {op.var: op.ins[0] for _, op in touching_ops(update) if op.kind == "write"}
    makers = update.producers() if update is not None else {}
    for name in sorted(name for name in touched if module.vars[name].role == COPY):
        var, source = module.vars[name], module.vars.get(module.vars[name].source)
        if source is None or source.role != PARAM or source.type.with_dtype(var.type.dtype) != var.type:
            yield Problem(f"@{name}", f"is a copy {var.type}, expected from a parameter, of its dimensions")
            continue
        cast = makers.get(new[name]) if name in new else None
        if (cast is None) != (source.name not in new) or (
            cast is not None and (cast.kind != "cast" or cast.ins != (new[source.name],))
        ):
            what = f"writes @{name} otherwise than @{source.name}; expected the cast of the same value"
            yield Problem(f"@{update.name}" if update is not None else f"@{name}", what)


def _handed_out(update: Graph | None) -> set[str]:
    """Return the variables whose new values an update hands out, to stages that read them."""
    if update is None:
        return set()
    return {op.var for _, op in touching_ops(update) if op.kind == "write" and op.ins[0] in update.outs}


def _listed(names: Iterable[str]) -> str:
    return ", ".join("%" + n for n in names) or "nothing"


# ------------------------------------------------------------------------------------------------ fused


def check_fused(module: Module) -> Iterator[Problem]:
    for graph in module.graphs.values():
        yield from _check_kernels(graph)


def _check_kernels(graph: Graph) -> Iterator[Problem]:
    """Check that kernels have an order: no value may leave a kernel, pass through another and come back. What is
    computed where it is read belongs to the kernels that read it."""
    units: list[object] = [op.attrs.get("kernel", i) for i, op in enumerate(graph.ops)]
    # The kernels that a value comes from.
    makers: dict[str, set[object]] = {}
    needs: dict[object, set[object]] = {unit: set() for unit in units}
    for i, (op, unit) in enumerate(zip(graph.ops, units, strict=True)):
        if "kernel" in op.attrs and not isinstance(unit, str):
            yield Problem(op_place(graph, i), f"kernel must be a name, got {unit!r}", op_window(graph, i))
            return
        sources = {source for v in op.ins for source in makers.get(v.name, ())}
        needs[unit] |= sources - {unit}
        makers |= dict.fromkeys((v.name for v in op.outs), sources if is_inline(op) else {unit})
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
        yield Problem(op_place(graph, at), what, op_window(graph, at))


CHECKERS: dict[str, Checker] = {
    "typed": check_typed,
    "differentiated": check_differentiated,
    "staged": check_staged,
    "fused": check_fused,
    "sharded": check_sharded,
    LOCAL: check_local,
    "scheduled": check_scheduled,
    "versioned": check_versioned,
    "wired": check_wired,
    "freed": check_freed,
}
LEVELS = (
    ("typed",),
    ("differentiated", "staged", "fused", "sharded", LOCAL),
    ("scheduled",),
    ("versioned", "wired"),
    ("freed",),
)
