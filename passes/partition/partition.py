"""Choose which stage every operation runs in: a planner, so it only writes `stage=` annotations, `Var.stage` and the
stage lines.

In: graph F (and B and U when training), and a cluster. Out: the same operations, annotated. Stage i runs on device i of
the cluster, or on the devices that `devices` names for it. These share the microbatches of a batch, and each has a copy
of the stage's variables. With a `mesh` teams of them do (devices.py): then an operation takes the time of its part.

The operations of F, in their order, are cut into `stages` contiguous ranges, so that a microbatch takes the shortest
time (cuts.py). Where the pipeline drains after each batch, that is a sum, the largest of all stages: the seconds of a
stage, forward and backward, and those of the values that cross the cut in front of it. These are activations, and their
gradients on the way back. Between hosts, schedules that never drain (2bw, eager-2bw) let messages travel during
computations. There the slowest stage counts, the busiest link, and the round trips that forwards in hand wait for.

Then the same costs price sets of operations that are no ranges, but depend forward only (ideals.py). Faster sets
replace the ranges. So branches whose operations take turns in the graph need not be cut across. With `split_at` or
`only_at` stages are ranges.

Seconds are those of passes/costs/prices.py: the kernels that `fuse` would choose, shared out over their operations. A
parameter lives on the stage that reads it. Where several stages read it (tied weights), each has a copy, and they
exchange their parts of its gradient once per batch (passes/training/shared_gradients.py). That is counted as transfer,
spread over the `microbatches` of a batch, so that cuts keep such operations together where it costs too much. Backward
operations follow the forward operation they belong to; sums of gradients run on the lowest stage among their operands,
so that one tensor travels instead of several; updates run where the parameter lives. Operations that depend on
constants only are not annotated: every stage that needs them computes them. A variable that F changes (a running
statistic) is on one stage: no cut lies between the operations that read it and the one that writes it.

A stage on several devices takes as long per batch as the slowest of them for its share; its time per
microbatch is that over all microbatches.

Where stages do not fit into the memory of their devices (an estimate, memory.py), the search looks for cuts that do. A
stage that fits only with recomputation takes that much longer. A stage that does not fit at all is chosen only where
every choice has one. Nothing is refused here.

Known limits: sets that are no ranges are looked for without memory, and taken if they happen to fit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from penstock.ir.action_kinds import UPDATE
from penstock.ir.cluster.cluster import Cluster, Device
from penstock.ir.graph import BUFFER, CACHE, GRAD, PARAM, STATE, Graph, Module, Namer, Op, Stage, Value, Var
from penstock.ir.liveness import from_state_alone
from penstock.ir.ops import OPS
from penstock.passes.costs.prices import shown_seconds
from penstock.passes.schedules.dealing import shares_of
from penstock.passes.schedules.schedule import SCHEDULES
from penstock.support.errors import UsageError
from penstock.support.words import counted, shown_bytes

from .chain import (
    chain_of,
    forward_graph,
    params_behind,
    readers,
)
from .chain_costs import ChainCosts
from .cuts import CutSearch, by_operation, extra_seconds, given_cuts, pins_of
from .devices import Axes, StageDevices, mesh_axes, placed_packs, unlike_devices
from .ideals import better_stages
from .judging import judge_of, refined
from .memory import Outlook, needs_of
from .modules import MODULE, OPERATION, module_words, modules_of_stages
from .team_costs import team_seconds
from .tree import module_starts


@dataclass(frozen=True, slots=True)
class PartitionOptions:
    """The options of `partition`. `split_at` overrides the search: names of values or locs; each starts a new stage.
    `only_at` are the same kind of names: if there are any, the search starts stages at them only. With `split_by`
    module it starts them between modules (modules.py). `pins` are such names with the stage that they are on, `NAME=1`.
    `microbatches` is the number of microbatches in a batch. `devices` names the devices of every stage, with blanks
    between several. `shares` is the number of microbatches that each team of them runs, in order; by default, shares
    are as equal as possible. `mesh` are the axes of each stage's devices, such as `dp=2,tp=2`; without, a stage's
    devices are replicas.
    `schedule`, `recompute` (auto, none or all) and `wire` are settings of later passes. `wire` is the element type of
    float32 values between stages. Without a schedule the search ignores memory.
    `packs` is the number of stages on each device, dealt round or `folded` (0 3 / 1 2); `stages` and `devices` count
    devices then. With `updates_elsewhere` stages neither update weights nor hold optimiser state."""

    stages: int = 0
    split_at: tuple[str, ...] = ()
    only_at: tuple[str, ...] = ()
    split_by: str = OPERATION
    pins: tuple[str, ...] = ()
    microbatches: int = 1
    devices: tuple[str, ...] = ()
    shares: tuple[int, ...] = ()
    schedule: str = ""
    recompute: str = "auto"
    wire: str = "f32"
    mesh: str = ""
    packs: int = 1
    folded: bool = False
    updates_elsewhere: bool = False


def partition(module: Module, options: PartitionOptions) -> Module:
    """Cut the model into contiguous stages, one per device, so that the slowest stage is as fast as possible."""
    axes = mesh_axes(options.mesh)
    cut_into = -(-(len(options.split_at) + 1) // max(1, options.packs))
    wanted = max(1, options.stages, cut_into) * prod(size for _, size in axes)
    cluster = module.cluster or Cluster.local(wanted)
    placed = _placed(cluster, options, axes)
    devices = placed.teams()
    count = len(devices)
    parts = placed.parts(module)
    chain = chain_of(module)
    if not chain:
        raise UsageError("the model computes nothing from its inputs: there is no operation to put on a device")
    if len(chain) < count:
        raise UsageError(
            f"{counted(count, 'stage')} need at least {counted(count, 'operation')}, the model has {len(chain)}",
            hint="ask for fewer stages",
        )
    shares = shares_of(options.shares, [len(group) for group in devices], options.microbatches)
    priced = _without_updates(parts) if options.updates_elsewhere else parts
    meshes = [placed.mesh("", stage) for stage in range(count)] if placed.unlike else []
    exchanges = team_seconds(module, meshes, cluster)
    costs = ChainCosts(priced, devices, shares, cluster, options.wire, exchanges)
    if options.split_at:
        _check_open(options)
        stages = by_operation(given_cuts(costs, options.split_at), len(chain))
        return _annotate(module.but(cluster=cluster), placed, costs, stages)
    stages, fitting = _searched(parts, options, devices, shares, costs, cluster)
    annotated = _annotate(module.but(cluster=cluster), placed, costs, fitting or stages)
    if options.split_by == MODULE:
        annotated = annotated.noted("partition", *_module_notes(chain, costs, fitting or stages))
    if not fitting or fitting == stages:
        return annotated
    free = CutSearch(costs, count, eagerness=_eagerness(options, devices))
    slower, faster = (shown_seconds(free.step(cut)) for cut in (fitting, stages))
    return annotated.noted(
        "partition",
        f"cut so that stages fit into memory: the slowest takes {slower} per microbatch, "
        f"without limits it would take {faster}",
    )


def _without_updates(parts: Sequence[Module]) -> list[Module]:
    without = {
        id(part): part.but(graphs={name: graph for name, graph in part.graphs.items() if name != UPDATE})
        for part in parts
    }
    return [without[id(part)] for part in parts]


def _are_apart(options: PartitionOptions, devices: Sequence[Sequence[Device]]) -> bool:
    """Return whether messages count for themselves: between hosts. Their terms, and the simulations, take a rank for a
    stage."""
    return len({device.host for group in devices for device in group}) > 1 and options.packs == 1


def _eagerness(options: PartitionOptions, devices: Sequence[Sequence[Device]]) -> int:
    """Return the forwards in hand for each stage behind, where messages travel during computations; else 0."""
    kind = SCHEDULES.get(options.schedule)
    return kind.eagerness if kind is not None and kind.delay > 0 and _are_apart(options, devices) else 0


def _searched(
    parts: Sequence[Module],
    options: PartitionOptions,
    devices: Sequence[Sequence[Device]],
    shares: Sequence[Sequence[int]],
    costs: ChainCosts,
    cluster: Cluster,
) -> tuple[list[int], list[int]]:
    """Return the stage of every operation, and other ones that fit into memory where these do not; none where nothing
    does."""
    chain, count, module = costs.chain, len(devices), parts[0]
    pins = pins_of(chain, options.pins, count)
    free = CutSearch(costs, count, options.only_at, None, _eagerness(options, devices), pins, options.pins)
    weights = {name: float(var.type.nbytes) for name, var in module.vars.items()}
    names = [group[0].name for group in devices if len(group) == 1]
    is_judged = _are_apart(options, devices) and len(names) == count and not mesh_axes(options.mesh)

    def chosen(search: CutSearch) -> list[int]:
        judge = judge_of(search, options.schedule, options.microbatches, names, cluster) if is_judged else None
        if options.split_by == MODULE:
            search = replace(search, only_at=module_starts(search, weights, judge, count * options.microbatches))
        stages = _chosen(search)
        return refined(search, stages, judge, count * options.microbatches) if stages else stages

    stages = chosen(free)
    outlook = Outlook(options.schedule, options.recompute, options.wire, options.updates_elsewhere)
    needs = needs_of(parts, readers(chain, costs.params), devices, shares, costs.forward, outlook)
    # Where all stages fit as they are, nothing else is as fast.
    fits = needs is None or not any(extra_seconds(needs, s, stages) for s in range(count))
    return stages, [] if fits else chosen(replace(free, needs=needs))


def _chosen(search: CutSearch) -> list[int]:
    """Return the stage of every operation, by the best ranges or by better sets. It is empty where memory is too small
    for all ranges."""
    cuts = search.best()
    if not cuts:
        return []
    stages = by_operation(cuts, len(search.costs.chain))
    if search.only_at or search.pins or search.count == 1:
        return stages
    # Sets are looked for by sums of computations and transfers, which no other term is above.
    value = search.step(stages)
    sets = better_stages(search.costs.work(), cuts, value)
    return sets if sets and (search.needs is None or search.step(sets) < value) else stages


def _check_open(options: PartitionOptions) -> None:
    """Refuse settings of the search where all stages are given."""
    flags = ["--split-by module"] * (options.split_by == MODULE) + ["--pin"] * bool(options.pins)
    if flags:
        raise UsageError(
            f"--split-at says where all stages start, and {' and '.join(flags)} what to choose from",
            hint="leave out one or the other",
        )


# ------------------------------------------------------------------------------------------------ writing it down


def _module_notes(chain: Sequence[Op], costs: ChainCosts, stages: Sequence[int]) -> list[str]:
    """Name the modules of each stage."""
    return [
        f"stage {stage} has modules {module_words(names)}"
        for stage, names in enumerate(modules_of_stages(chain, costs.params, stages))
        if names
    ]


def _placed(cluster: Cluster, options: PartitionOptions, axes: Axes) -> StageDevices:
    """Return the devices of every stage; with a mesh each, or with one mesh or none for all."""
    if ";" not in options.mesh:
        return placed_packs(
            cluster, options.devices, options.stages, options.split_at, axes, options.packs, options.folded
        )
    return unlike_devices(cluster, options.devices, options.split_at, options.mesh, options.packs, options.folded)


def _annotate(module: Module, placed: StageDevices, costs: ChainCosts, stages: Sequence[int]) -> Module:
    """Write stages on operations and variables: those of the chain, and of what follows them."""
    forward, devices = forward_graph(module), placed.groups
    stage_of = {id(op): stage for op, stage in zip(chain_of(module), stages, strict=True)}
    graphs = dict(module.graphs)
    readers = _reading_stages(forward, stage_of, params_behind(module))
    tied = {name: stages for name, stages in readers.items() if len(stages) > 1}
    graphs[forward.name] = _with_stages(forward, stage_of)
    by_name = {v.name: stage_of[id(op)] for op in forward.ops if id(op) in stage_of for v in op.outs}
    moving = {op.var: {stage_of[id(op)]} for op in forward.ops if op.kind in ("write", "put")}
    vars = _place_vars(module, readers | moving)
    if "B" in module.graphs:
        again = {v for op in forward.ops for v in op.outs}
        earliest = {f"{name}.grad": min(stages) for name, stages in readers.items()}
        graphs["B"] = _with_stages(
            module.graphs["B"], _backward_stages(module.graphs["B"], by_name, vars, again, earliest)
        )
    homes = {var.name: var.stage for var in vars.values()}
    if "U" in module.graphs:
        graphs["U"] = _with_stages(module.graphs["U"], _update_stages(module.graphs["U"], homes))
    if "N" in module.graphs:
        homes |= {f"{name}.grad": min(stages) for name, stages in tied.items()}
        graphs["N"] = _with_stages(module.graphs["N"], _update_stages(module.graphs["N"], homes))
    notes = []
    for stage in range(len(devices)):
        compute, transfer = costs.of_stage(stage, stages)
        names = ", ".join(device.name for device in devices[stage])
        text = f"stage {stage} on {names}: {stages.count(stage)} of {len(costs.chain)} operations, "
        text += f"predicted {compute * 1e3:.3f} ms compute"
        if stage:
            text += f" and {transfer * 1e3:.3f} ms transfer from stage {stage - 1}"
        notes.append(f"{text} per microbatch, starts at {_name(costs.chain[stages.index(stage)])}")
    for name, where in tied.items():
        numbers = ", ".join(map(str, sorted(where)))
        copies = (
            f"@{name} is read on stages {numbers}: each has a copy of its {shown_bytes(module.vars[name].type.nbytes)}"
        )
        notes.append(
            copies + (", and they exchange gradients of that size once per batch" if "B" in module.graphs else "")
        )
    # No mesh may be called like a device.
    known = module.cluster.devices if module.cluster is not None else ()
    namer = Namer(
        [*(device.name for group in (*devices, known) for device in group), *(mesh.name for mesh in module.meshes)]
    )
    meshes = {i: placed.mesh(namer.fresh(f"s{i}"), i) for i, group in enumerate(devices) if len(group) > 1}
    on = tuple(Stage(i, meshes[i].name if i in meshes else group[0].name) for i, group in enumerate(devices))
    annotated = module.but(
        stages=on, vars=vars, graphs=graphs, meshes=(*module.meshes, *meshes.values()), packs=placed.packs
    )
    return annotated.noted("partition", *notes)


def _name(op: Op) -> str:
    return op.loc or (f"%{op.outs[0].name}" if op.outs else f"@{op.var}")


def _with_stages(graph: Graph, stage_of: Mapping[int, int]) -> Graph:
    ops = tuple(op.with_attrs(stage=stage_of[id(op)]) if id(op) in stage_of else op for op in graph.ops)
    return replace(graph, ops=ops)


def _reading_stages(
    forward: Graph, stage_of: Mapping[int, int], params: Mapping[Value, frozenset[str]]
) -> dict[str, set[int]]:
    """Map each parameter to the stages that read it."""
    readers: dict[str, set[int]] = {}
    for op in forward.ops:
        for value in op.ins:
            if id(op) in stage_of:
                for name in params.get(value, ()):
                    readers.setdefault(name, set()).add(stage_of[id(op)])
    return readers


def _place_vars(module: Module, readers: Mapping[str, set[int]]) -> dict[str, Var]:
    """Place variables on stages. Parameters live where they are read, and variables that the forward graph changes live
    where it changes them. Gradients and optimiser state, named after them, live with them. Other variables, and those
    that several stages read, are replicated."""
    home = {name: min(stages) for name, stages in readers.items() if len(stages) == 1}
    vars: dict[str, Var] = {}
    for var in module.vars.values():
        owner = var.name if var.role in (PARAM, BUFFER, CACHE) else _owner(var)
        vars[var.name] = replace(var, stage=home[owner]) if owner in home else var
    return vars


def _owner(var: Var) -> str:
    """Return the parameter that a gradient `w.grad` or a state `w.momentum` belongs to."""
    return var.name.rpartition(".")[0] if var.role in (GRAD, STATE) else ""


def _backward_stages(
    backward: Graph, by_name: Mapping[str, int], vars: Mapping[str, Var], again: set[Value], earliest: Mapping[str, int]
) -> dict[int, int]:
    """Return the stages of backward operations. An operation runs on the stage of its forward operation, a sum of
    gradients on the lowest stage among its operands. An `accum` runs on the parameter's stage if it has one, or on the
    `earliest` of several where the gradient depends on variables only. What is no gradient of a parameter is added on
    all stages. Forward values that are computed again get no stage: they are computed where they are used."""
    anywhere, params = from_state_alone(backward) | again, {name for name, var in vars.items() if var.role == PARAM}
    made_on: dict[Value, int] = {}
    stages: dict[int, int] = {}
    for op in backward.ops:
        if op.outs and anywhere.issuperset(op.outs):
            continue
        if "of" in op.attrs:
            stage = by_name[str(op.attrs["of"])]
        elif op.kind == "accum" and (home := vars[op.var].stage) is not None:
            stage = home
        elif op.kind == "accum" and _owner(vars[op.var]) not in params:
            continue
        else:
            stage = min((made_on[v] for v in op.ins if v in made_on), default=earliest.get(str(op.attrs.get("var")), 0))
        stages[id(op)] = stage
        made_on |= dict.fromkeys(op.outs, stage)
    return stages


def _update_stages(update: Graph, homes: Mapping[str, int | None]) -> dict[int, int]:
    """Return the stages of update operations. Operations on a placed variable, or on values that come from one, run
    where it lives. Others run everywhere."""
    made_on: dict[Value, int] = {}
    stages: dict[int, int] = {}
    for op in update.ops:
        home = homes[op.var] if OPS[op.kind].effect else None
        places = {made_on[v] for v in op.ins if v in made_on} | ({home} if home is not None else set())
        assert len(places) <= 1, f"update {op.kind} mixes variables of stages {sorted(places)}"
        if places:
            stages[id(op)] = places.pop()
            made_on |= dict.fromkeys(op.outs, stages[id(op)])
    return stages
