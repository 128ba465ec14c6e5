"""Run the updates of stages on other devices: the pass `update-on`. In: stage graphs with updates. Out: a stage more
for each of the `devices`, which has an update graph and no forward.

    s0.P    hands out the gradients of stage 0, and s0.N its part of the norm, as before
    s2.U    takes them, makes new weights and state of stages 0 and 1, and returns the weights
    s0.U    takes the new weights of stage 0, and makes them its next version

Optimiser state and settings live on the new stage alone. A weight is on both, as one that two stages read is: the new
stage has what it updates, the other what it computes with. So the runtime, checkpoints and checkers know all of it.
What s2.U computes is what the updates of these stages computed, operation by operation.

The update of a stage runs on the first of the devices that is on its host, else on the first. A device that would be
left without one takes over that of a device with several; of more devices than stages the last ones have none. A weight
that stages with different devices read is updated on the first of these, and goes to all stages that read it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from penstock.ir.action_kinds import NORM_PARTS, PARTS, UPDATE
from penstock.ir.graph import REPLICAS, Graph, Module, Op, Stage, Value, Var, substitute, touched_vars
from penstock.ir.liveness import live_ops
from penstock.ir.schedule import COMPUTE, READERS
from penstock.support.errors import UsageError
from penstock.support.words import counted, itemised


@dataclass(frozen=True, slots=True)
class UpdateOnOptions:
    """Options of `update-on`: the `devices` that run updates, and no forward."""

    devices: tuple[str, ...] = ()


def update_on(module: Module, options: UpdateOnOptions) -> Module:
    """Move updates to stages of their own on other devices."""
    updates = {s.index: g for s in module.stages if (g := module.stage_graph(s.index, UPDATE)) is not None}
    _check(module, options.devices, updates)
    graphs, moved = dict(module.graphs), dict[int, Graph]()
    handed = {stage: _handed(module, stage, graph) for stage, graph in updates.items()}
    groups = _groups(module, options.devices, handed)
    for stage, graph in updates.items():
        gone = _hand_out(module, stage, graphs)
        moved[stage] = _renamed(graph, gone)
        graphs[graph.name] = _installing(moved[stage], handed[stage])
    stages, done = list(module.stages), set[str]()
    for device, members in groups.items():
        names = {name for stage in members for name in handed[stage]} - done
        # Another device updates what its stages have in common with these.
        others = {name for stage in members for name in handed[stage]} & done
        done |= names
        graph = _together(len(stages), [moved[stage] for stage in members], names, others)
        graphs[graph.name] = graph
        stages.append(Stage(len(stages), device))
    packs = (*module.packs, *((stage.index,) for stage in stages[len(module.stages) :])) if module.packs else ()
    result = module.but(stages=tuple(stages), graphs=graphs, packs=packs)
    notes = [
        f"updates of {counted(len(members), 'stage')} run on {device}: {', '.join(map(str, members))}"
        for device, members in groups.items()
    ]
    return result.but(vars=_placed(result)).noted("update-on", *notes)


def _check(module: Module, devices: Sequence[str], updates: Mapping[int, Graph]) -> None:
    """Refuse what has no meaning; one error names all of it."""
    known = {device.name for device in module.cluster.devices} if module.cluster is not None else set(devices)
    computing = {name: s.index for s in module.stages for name in module.devices_of(s.index)}
    problems = [] if devices else ["no device is named"]
    problems += [] if updates else ["the module has no updates"]
    for name in dict.fromkeys(devices):
        if devices.count(name) > 1:
            problems.append(f"{name} is named twice")
        if name not in known:
            problems.append(f"{name} is no device of the cluster: {', '.join(sorted(known))}")
        elif name in computing:
            problems.append(f"{name} computes stage {computing[name]}; an update elsewhere has a device of its own")
    axes = {axis for s in module.stages for axis, size in module.mesh_of(s.index).axes if size > 1}
    if axes - {REPLICAS}:
        problems.append(f"stages lie on meshes with axes {', '.join(sorted(axes - {REPLICAS}))}")
    if problems:
        raise UsageError("cannot run updates there:" + itemised(problems), where="update-on")


def _groups(module: Module, devices: Sequence[str], handed: Mapping[int, Mapping[str, Value]]) -> dict[str, list[int]]:
    """Return the stages whose updates run on each device; no device without new weights. `handed` are those of each
    stage, of which tied ones count where they come first."""
    hosts = {device.name: device.host for device in module.cluster.devices} if module.cluster is not None else {}
    groups: dict[str, list[int]] = {name: [] for name in devices}
    for stage in handed:
        host = hosts.get(module.devices_of(stage)[0])
        groups[next((name for name in devices if hosts.get(name) == host), devices[0])].append(stage)
    weights, making = set[str](), set[int]()
    for stage, names in handed.items():
        if not weights.issuperset(names):
            making.add(stage)
        weights |= names.keys()
    for members in groups.values():
        most = max(groups.values(), key=lambda stages: len(making.intersection(stages)))
        if making.isdisjoint(members) and len(making.intersection(most)) > 1:
            members.append(max(making.intersection(most)))
            most.remove(members[-1])
    return _with_weights(groups, handed)


def _with_weights(groups: Mapping[str, list[int]], handed: Mapping[int, Mapping[str, Value]]) -> dict[str, list[int]]:
    """Return the groups that make new weights; stages of others are in the first of these."""
    weights, kept, others = set[str](), dict[str, list[int]](), list[int]()
    for device, members in groups.items():
        names = {name for stage in members for name in handed[stage]}
        if names - weights:
            kept[device] = list(members)
        else:
            others += members
        weights |= names
    if kept:
        next(iter(kept.values())).extend(others)
    return {device: sorted(members) for device, members in kept.items()} or {next(iter(groups)): sorted(others)}


def _handed(module: Module, stage: int, update: Graph) -> dict[str, Value]:
    """Return the new values that computations of a stage read, by variable: weights, and the scale of the loss."""
    read = {name for kind in READERS for name in touched_vars(module.stage_graph(stage, kind), "read")}
    return {op.var: op.ins[0] for op in update.ops if op.kind == "write" and op.var in read}


def _hand_out(module: Module, stage: int, graphs: dict[str, Graph]) -> dict[str, Value]:
    """Let P of a stage return all gradients that its update takes, and N use these. Return them by variable."""
    update, parts = graphs[f"s{stage}.{UPDATE}"], graphs.get(f"s{stage}.{PARTS}")
    gone = {op.var: Value(f"{op.var}.s{stage}", op.outs[0].type) for op in update.ops if op.kind == "take"}
    if gone:
        takes = tuple(Op("take", (), (value,), {"var": name}) for name, value in gone.items())
        before = Graph(f"s{stage}.{PARTS}", (), (), ()) if parts is None else parts
        graphs[before.name] = replace(before, outs=(*before.outs, *gone.values()), ops=(*before.ops, *takes))
    if (norm := graphs.get(f"s{stage}.{NORM_PARTS}")) is not None:
        graphs[norm.name] = _renamed(norm, gone)
    return gone


def _renamed(graph: Graph, gone: Mapping[str, Value]) -> Graph:
    """Replace reads and takes of gradients by inputs."""
    table: dict[Value, Value] = {}
    ops: list[Op] = []
    for op in graph.ops:
        if op.kind in ("read", "take") and op.var in gone:
            table[op.outs[0]] = gone[op.var]
        else:
            ops.append(op.with_ins(substitute(op.ins, table)))
    ins = dict.fromkeys((*graph.ins, *table.values()))
    return Graph(graph.name, tuple(ins), substitute(graph.outs, table), tuple(ops), graph.saved)


def _installing(update: Graph, handed: Mapping[str, Value]) -> Graph:
    """Return the update of a stage that takes new values from elsewhere. What it returns, the norm, it computes."""
    writes = tuple(Op("write", (value,), (), {"var": name}) for name, value in handed.items())
    kept = live_ops([op for op in update.ops if op.kind != "write"], update.outs)
    used = {value for op in kept for value in op.ins} | {*update.outs}
    ins = (*(value for value in update.ins if value in used), *handed.values())
    return Graph(update.name, ins, update.outs, (*kept, *writes))


def _together(stage: int, updates: Sequence[Graph], names: set[str], others: set[str]) -> Graph:
    """Return the update graph of a new stage: all operations of these updates once, without writes of `others`. It
    returns the new values of `names`."""
    results, written = set[Value](), set[str]()
    ops: list[Op] = []
    for op in (op for graph in updates for op in graph.ops):
        if op.kind == "write":
            if op.var in written or op.var in others:
                continue
            written.add(op.var)
        elif not results.isdisjoint(op.outs):
            continue
        results.update(op.outs)
        ops.append(op)
    kept = live_ops(ops, ())
    used = {value for op in kept for value in op.ins}
    ins = dict.fromkeys(value for graph in updates for value in graph.ins if value in used)
    outs = tuple(op.ins[0] for op in kept if op.kind == "write" and op.var in names)
    return Graph(f"s{stage}.{UPDATE}", tuple(ins), outs, tuple(kept))


def _placed(module: Module) -> dict[str, Var]:
    """Return the variables with the stages that use them."""
    users: dict[str, set[int]] = {}
    for stage in (s.index for s in module.stages):
        for kind in COMPUTE:
            for name in touched_vars(module.stage_graph(stage, kind), "read", "write", "accum", "take", "put"):
                users.setdefault(name, set()).add(stage)
    vars = {}
    for name, var in module.vars.items():
        stages = users.get(name, set())
        if var.stage is not None and stages and stages != {var.stage}:
            var = replace(var, stage=stages.pop() if len(stages) == 1 else None)
        vars[name] = var
    return vars
