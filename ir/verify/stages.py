"""The checker of the fact staged: every operation and every variable on exactly one stage, or replicated.

In: a module with stages. Every graph input has one provider.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import prod

from penstock.ir.action_kinds import ACTION_KINDS, AGAIN, FORWARD, UPDATE
from penstock.ir.batch_shares import updating_stages
from penstock.ir.cluster.cluster import Cluster
from penstock.ir.graph import COORDINATE, Graph, Module, touching_ops, written_vars
from penstock.ir.schedule import COMPUTE, PHASES, READERS

from .agreement import check_agreement
from .problems import Problem, op_place, op_window

STAGE_GRAPH = re.compile(rf"s(\d+)\.({'|'.join(COMPUTE)})")


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
    """Check that a mesh has devices of the cluster that can run the same code, as many as its axes say."""
    known = {device.name: device for device in cluster.devices}
    names = dict.fromkeys(known, "a device")
    for mesh in module.meshes:
        if mesh.name in names:
            yield Problem(
                f"mesh @{mesh.name}",
                f"has the name of {names[mesh.name]}, so a stage on {mesh.name} could be on either",
            )
        names[mesh.name] = "another mesh"
        unknown = [name for name in mesh.devices if name not in known]
        if unknown:
            yield Problem(
                f"mesh @{mesh.name}", f"has {', '.join(unknown)}, which is no device; there are {', '.join(known)}"
            )
        sizes = [size for _, size in mesh.axes]
        if prod(sizes) != len(mesh.devices) or len(set(mesh.devices)) < len(mesh.devices):
            what = (
                f"has axes of {' x '.join(map(str, sizes))} and devices {', '.join(mesh.devices)}, expected as "
                "many different ones"
            )
            yield Problem(f"mesh @{mesh.name}", what)
        kinds = {(known[name].kind, known[name].target) for name in mesh.devices if name in known}
        if len(kinds) > 1:
            listed = ", ".join(f"{kind} {target}" for kind, target in sorted(kinds))
            yield Problem(f"mesh @{mesh.name}", f"mixes devices that need different code: {listed}")


def _check_annotations(graph: Graph, stages: int) -> Iterator[Problem]:
    """Check the stages written on operations. Forward values move up, backward values down, and operations without a
    stage can be cloned anywhere."""
    places: dict[str, int] = {}
    row = ACTION_KINDS.get(graph.name)
    stays, down = row is not None and row.gradients == "uses", row is not None and row.way < 0
    for i, op in enumerate(graph.ops):
        sources = {v.name: places[v.name] for v in op.ins if v.name in places}
        stage = op.attrs.get("stage")
        if stage is None:
            if sources:
                name, place = next(iter(sources.items()))
                what = (
                    f"is on no stage, but takes %{name} from stage {place}; only what depends on no stage can be "
                    "replicated"
                )
                yield Problem(op_place(graph, i), what, op_window(graph, i))
            continue
        if not isinstance(stage, int) or not 0 <= stage < stages:
            yield Problem(op_place(graph, i), f"is on stage {stage}, expected 0 .. {stages - 1}", op_window(graph, i))
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
                yield Problem(op_place(graph, i), what, op_window(graph, i))
        places |= {v.name: stage for v in op.outs}


def _check_split(module: Module) -> Iterator[Problem]:
    for name in module.graphs:
        match = STAGE_GRAPH.fullmatch(name)
        if match is None:
            yield Problem(f"@{name}", "is on no stage; expected only s<stage>.F, .B, .W, .P, .N and .U after the split")
        elif int(match[1]) >= len(module.stages):
            yield Problem(f"@{name}", f"there is no stage {match[1]}, only 0 .. {len(module.stages) - 1}")
    updating = updating_stages(module)
    for stage in module.stages:
        update = module.stage_graph(stage.index, UPDATE)
        if stage.index not in updating and module.stage_graph(stage.index, FORWARD) is None:
            yield Problem(f"stage {stage.index}", f"has no forward graph @s{stage.index}.F")
        elif stage.index in updating and update is not None and not update.outs:
            what = f"has no forward graph @s{stage.index}.F, and @{update.name} hands out no new weights"
            yield Problem(f"stage {stage.index}", what)
    yield from _check_providers(module)
    yield from check_agreement(module)
    yield from _check_places(module)
    yield from _check_owners(module)


def _check_providers(module: Module) -> Iterator[Problem]:
    """Check that each input of a stage graph comes from the user, from the same stage's forward, or from one other
    stage. Results of P and N are for their own stage, too."""
    inputs = {v.name for v in module.inputs}
    makers: dict[str, dict[str, list[int]]] = {}
    for phase in PHASES:
        returned = makers.setdefault(phase, {})
        for stage in module.stages:
            graph = module.stage_graph(stage.index, phase)
            for value in graph.outs if graph else ():
                returned.setdefault(value.name, []).append(stage.index)
        for name, stages in returned.items():
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
            graph, fed = module.stage_graph(index, kind), module.given_names(index)
            kept = {v.name for k in earlier if (g := module.stage_graph(index, k)) for v in g.saved}
            itself = {index} if row.way else set()
            for value in graph.ins if graph else ():
                providers = {s for p in sources for s in makers[p].get(value.name, ())} - itself
                if value.name not in fed and value.name not in kept and not providers:
                    tried = "not an input of the module"
                    tried += "".join(
                        f", not saved by @s{index}.{k}"
                        for k in earlier
                        if k != AGAIN or module.stage_graph(index, k) is not None
                    )
                    if sources:
                        tried += f", not returned by @s*.{' or @s*.'.join(sources)} of another stage"
                    what = f"takes {value!r}, which nobody provides: {tried}"
                    yield Problem(f"@s{index}.{kind}", what)
    for name in module.outputs:
        if name not in makers[FORWARD] and name not in inputs:
            yield Problem(f"%{name}", "is an output of the module, but no stage returns it; was a layer dropped?")


def _check_places(module: Module) -> Iterator[Problem]:
    """Check that every variable is used by the one stage that it names, or names none and is replicated."""
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
    """Check that one stage runs an operation. Constants and state, which depend on nothing that enters the graph but
    coordinates of the rank, may be replicated."""
    for kind in READERS:
        owners: dict[str, str] = {}
        for stage in module.stages:
            graph = module.stage_graph(stage.index, kind)
            fixed = {v.name for v in graph.ins if not v.name.startswith(COORDINATE)} if graph else set()
            for i, op in enumerate(graph.ops if graph else ()):
                if not any(v.name in fixed for v in op.ins):
                    continue
                for value in op.outs:
                    fixed.add(value.name)
                    assert graph is not None
                    other = owners.setdefault(value.name, graph.name)
                    if other != graph.name:
                        yield Problem(
                            op_place(graph, i),
                            f"%{value.name} is computed by @{other} as well, expected one stage",
                            op_window(graph, i),
                        )
