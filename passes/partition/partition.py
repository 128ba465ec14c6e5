"""Choose which stage every operation runs in: a planner, so it only writes `stage=` annotations, `Var.stage` and the
stage lines.

In: graph F (and B and U when training), and a cluster. Out: the same operations, annotated. Stage i runs on device i of
the cluster, or on the devices that `devices` names for it. These share the microbatches of a batch, and each has a copy
of the stage's variables. With a `mesh` teams of them do (devices.py): then an operation takes the time of its part.

The operations of F, in their order, are cut into `stages` contiguous ranges. Let comp(i, j, s) be the time of
operations i..j-1 and their backward operations on device s. Let comm(i, s) be the time to send the values that cross
the cut before operation i between devices s-1 and s: activations forward, their gradients back. A dynamic programme
finds the cuts that minimise

    max over stages s of  comp(cut[s], cut[s+1], s) + comm(cut[s], s)

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
from itertools import pairwise, repeat
from math import prod

import numpy as np
import numpy.typing as npt

from penstock.ir.action_kinds import BACKWARD
from penstock.ir.cluster.cluster import Cluster, Device, Link
from penstock.ir.graph import BUFFER, CACHE, GRAD, PARAM, STATE, Graph, Module, Namer, Op, Stage, Value, Var
from penstock.ir.liveness import from_state_alone
from penstock.ir.ops import OPS
from penstock.passes.communicate.wire import travelling
from penstock.passes.costs.prices import GraphCost, Transfer, cost, shown_seconds
from penstock.passes.schedules.dealing import shares_of
from penstock.support.errors import UsageError
from penstock.support.words import counted, itemised, meant, shown_bytes

from .chain import (
    chain_of,
    crossing_bytes,
    forward_graph,
    moving_spans,
    moving_users,
    params_behind,
    positions_of,
    readers,
    tied_bytes,
)
from .devices import StageDevices, mesh_axes, on_one_device, placed_packs
from .ideals import OperationWork, better_stages
from .memory import Outlook, StageNeeds, needs_of

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PartitionOptions:
    """The options of `partition`. `split_at` overrides the search: names of values or locs; each starts a new stage.
    `only_at` are the same kind of names: if there are any, the search starts stages at them only. `microbatches` is the
    number of microbatches in a batch. `devices` names the devices of every stage, with blanks between several. `shares`
    is the number of microbatches that each team of them runs, in order; by default, shares are as equal as possible.
    `mesh` are the axes of each stage's devices, such as `dp=2,tp=2`; without, a stage's devices are replicas.
    `schedule`, `recompute` (auto, none or all) and `wire` are settings of later passes. `wire` is the element type of
    float32 values between stages. Without a schedule the search ignores memory.
    `packs` is the number of stages on each device, dealt round or `folded` (0 3 / 1 2); `stages` and `devices` count
    devices then."""

    stages: int = 0
    split_at: tuple[str, ...] = ()
    only_at: tuple[str, ...] = ()
    microbatches: int = 1
    devices: tuple[str, ...] = ()
    shares: tuple[int, ...] = ()
    schedule: str = ""
    recompute: str = "auto"
    wire: str = "f32"
    mesh: str = ""
    packs: int = 1
    folded: bool = False


def partition(module: Module, options: PartitionOptions) -> Module:
    """Cut the model into contiguous stages, one per device, so that the slowest stage is as fast as possible."""
    axes = mesh_axes(options.mesh)
    cut_into = -(-(len(options.split_at) + 1) // max(1, options.packs))
    wanted = max(1, options.stages, cut_into) * prod(size for _, size in axes)
    cluster = module.cluster or Cluster.local(wanted)
    placed = placed_packs(
        cluster, options.devices, options.stages, options.split_at, axes, options.packs, options.folded
    )
    devices = placed.teams()
    count = len(devices)
    whole, module = module, on_one_device(module, axes)
    chain = chain_of(module)
    if not chain:
        raise UsageError("the model computes nothing from its inputs: there is no operation to put on a device")
    if len(chain) < count:
        raise UsageError(
            f"{counted(count, 'stage')} need at least {counted(count, 'operation')}, the model has {len(chain)}",
            hint="ask for fewer stages",
        )
    shares = shares_of(options.shares, [len(group) for group in devices], options.microbatches)
    costs = _Costs(module, chain, devices, shares, cluster, options.wire)
    if options.split_at:
        stages = _by_operation(_given_cuts(costs, options.split_at), len(chain))
        return _annotate(whole.but(cluster=cluster), placed, costs, stages)
    stages = _chosen(costs, count, options.only_at, None)
    reading = readers(chain, costs.params)
    outlook = Outlook(options.schedule, options.recompute, options.wire)
    needs = needs_of(module, chain, reading, devices, shares, costs.forward, outlook)
    # Where all stages fit as they are, nothing else is as fast.
    fitting = (
        _chosen(costs, count, options.only_at, needs) if needs is not None and any(_extra(needs, count, stages)) else []
    )
    annotated = _annotate(whole.but(cluster=cluster), placed, costs, fitting or stages)
    if not fitting or fitting == stages:
        return annotated
    slower, faster = (
        shown_seconds(max(sum(costs.of_stage(s, cut)) for s in range(count))) for cut in (fitting, stages)
    )
    return annotated.noted(
        "partition",
        f"cut so that stages fit into memory: the slowest takes {slower} per microbatch, "
        f"without limits it would take {faster}",
    )


def _by_operation(cuts: Sequence[int], count: int) -> list[int]:
    return [s for s, (a, b) in enumerate(pairwise([*cuts, count])) for _ in range(a, b)]


def _extra(needs: StageNeeds, count: int, stages: Sequence[int]) -> list[float]:
    """Return the seconds that memory costs each stage."""
    return [needs.extra(s, {i for i, stage in enumerate(stages) if stage == s}) for s in range(count)]


def _chosen(costs: _Costs, count: int, only_at: Sequence[str], needs: StageNeeds | None) -> list[int]:
    """Return the stage of every operation, by the best ranges or by better sets. It is empty where memory is too small
    for all ranges."""

    def slowest(stages: Sequence[int]) -> float:
        extra = _extra(needs, count, stages) if needs is not None else [0.0] * count
        return max(sum(costs.of_stage(s, stages)) + extra[s] for s in range(count))

    cuts = _best_cuts(costs, count, only_at, needs)
    if not cuts:
        return []
    stages = _by_operation(cuts, len(costs.chain))
    if only_at or count == 1:
        return stages
    value = slowest(stages)
    sets = better_stages(costs.work(), cuts, value)
    return sets if sets and (needs is None or slowest(sets) < value) else stages


# ------------------------------------------------------------------------------------------------ costs


def _slowest_seconds(
    module: Module,
    index: Mapping[Value, int],
    count: int,
    devices: Sequence[Sequence[Device]],
    shares: Sequence[Sequence[int]],
) -> list[list[Array]]:
    """Return for every stage the seconds of each of `count` operations in the forward graph and in the backward graph.
    Of several devices the slowest for its share of the whole model counts. `index` has the operation that makes a
    value."""
    forward, backward = forward_graph(module), module.graphs.get(BACKWARD)
    microbatches, position = sum(shares[0]), {v.name: i for v, i in index.items()}
    places = [(GraphCost(forward), [index.get(op.outs[0]) if op.outs else None for op in forward.ops])]
    if backward is not None:
        where = [position[str(op.attrs["of"])] if "of" in op.attrs else None for op in backward.ops]
        places.append((GraphCost(backward), where))

    def work(device: Device, share: int) -> list[Array]:
        times = [np.zeros(count) for _ in places]
        for seconds, (graph, where) in zip(times, places, strict=True):
            for i, spent in zip(where, graph.op_seconds(device), strict=True):
                if i is not None:
                    seconds[i] += spent * (share / microbatches)
        return times

    return [
        max(map(work, *pair), key=lambda times: float(sum(map(np.sum, times))))
        for pair in zip(devices, shares, strict=True)
    ]


def _backward_edges(backward: Graph, index: Mapping[Value, int]) -> set[tuple[int, int]]:
    """Return edges between operations of which the backward of one reads what the other, or its backward, makes. Where
    tensors are split, an operation may itself read another view than its backward, so that nothing else orders the
    two. `index` has the operation that makes a value."""
    position = {v.name: i for v, i in index.items()}
    # The operations behind each value of the backward graph; sums of gradients belong to none.
    behind: dict[str, frozenset[int]] = {}
    edges = set()
    for op in backward.ops:
        user = position.get(str(op.attrs.get("of", "")))
        sources = frozenset[int]().union(*(behind.get(v.name, frozenset()) for v in op.ins))
        if user is not None:
            saved = {i for v in op.ins if (i := position.get(v.name, user)) < user}
            edges |= {(min(i, user), max(i, user)) for i in sources | saved if i != user}
            sources = frozenset({user})
        behind |= dict.fromkeys((v.name for v in op.outs), sources)
    return edges


class _Costs:
    """Prefix sums of operation times per stage, and transfer times per cut and pair of neighbours."""

    def __init__(
        self,
        module: Module,
        chain: Sequence[Op],
        devices: Sequence[Sequence[Device]],
        shares: Sequence[Sequence[int]],
        cluster: Cluster,
        wire: str,
    ) -> None:
        self.chain = chain
        microbatches = sum(shares[0])
        index = {v: i for i, op in enumerate(chain) for v in op.outs}
        self.params = params_behind(module)
        backward = module.graphs.get(BACKWARD)
        slowest = _slowest_seconds(module, index, len(chain), devices, shares)
        self.forward = [seconds[0] for seconds in slowest]
        self.before = [np.concatenate([[0.0], np.cumsum(sum(seconds))]) for seconds in slowest]
        trips = 2 if backward is not None else 1
        crossing = crossing_bytes(chain, wire) * trips
        if backward is not None:
            crossing += tied_bytes(module, chain, self.params) * (2.0 / microbatches)
        self._trips, self._links = trips, [(0.0, list[Link]())]
        for (senders, a), (receivers, b) in pairwise(zip(devices, shares, strict=True)):
            links = [cluster.message_link(x.name, y.name) for x in senders for y in receivers if x.name != y.name]
            self._links.append((max(*a, *b) / microbatches if max(len(a), len(b)) > 1 else 1.0, links))
        self.transfer = [
            np.array([self.travel(stage, float(n)) if stage else 0.0 for n in crossing])
            for stage in range(len(devices))
        ]
        users: dict[Value, set[int]] = {}
        for i, op in enumerate(chain):
            for value in op.ins:
                if value in index:
                    users.setdefault(value, {index[value]}).add(i)
        self._values = [(frozenset(where), travelling(v.type, wire) * float(trips)) for v, where in users.items()]
        self._edges = [(index[v], i) for v, where in users.items() for i in where if i != index[v]]
        if backward is not None:
            if any(op.kind == "reshard" for graph in (forward_graph(module), backward) for op in graph.ops):
                self._edges += sorted(_backward_edges(backward, index) - set(self._edges))
            self._values += [
                (frozenset(where), module.vars[n].type.nbytes * 2.0 / microbatches)
                for n, where in readers(chain, self.params).items()
            ]

    def travel(self, stage: int, count: float) -> float:
        """Return the seconds for so many bytes between a stage and the one before it."""
        part, links = self._links[stage]
        return (
            part * max(cost(Transfer(count, self._trips), link).seconds for link in links)
            if count > 0 and links
            else 0.0
        )

    def work(self) -> OperationWork:
        """Return the work of all operations without an order."""
        together = [users for _, users in sorted(moving_users(self.chain).items())]
        return OperationWork(
            [np.diff(before) for before in self.before], self._edges, together, self._values, self.travel
        )

    def of_stage(self, stage: int, stages: Sequence[int]) -> tuple[float, float]:
        """Compute and transfer seconds of one stage, where every operation has one."""
        seconds = np.diff(self.before[stage])
        parted = [n for where, n in self._values if len({stages[i] >= stage for i in where}) > 1]
        return float(sum(seconds[i] for i, s in enumerate(stages) if s == stage)), self.travel(
            stage, sum(parted)
        ) if stage else 0.0


# ------------------------------------------------------------------------------------------------ the search


def _best_cuts(costs: _Costs, count: int, only_at: Sequence[str], needs: StageNeeds | None) -> list[int]:
    """Return the first operation of every stage, or nothing where no choice fits. best[s, j] is the smallest bottleneck
    of the first j operations over stages 0 .. s."""
    n = len(costs.chain)
    allowed = np.full(n + 1, not only_at)
    if only_at:
        position = _known_positions(costs.chain, only_at)
        allowed[[position[name] for name in only_at]] = True
    for first, last in moving_spans(costs.chain).values():
        allowed[first + 1 : last + 1] = False
    starts = [np.where(allowed, costs.transfer[s] - costs.before[s], np.inf) for s in range(count)]
    best, choice = np.full((count, n + 1), np.inf), np.zeros((count, n + 1), dtype=np.int64)
    for j, more in enumerate(repeat(None, n) if needs is None else needs.rows(), 1):
        best[0, j] = costs.before[0][j] + (more[0][0] if more is not None else 0.0)
        for stage in range(1, min(count, j)):
            load = costs.before[stage][j] + starts[stage][stage:j]
            if more is not None:
                load = load + more[stage][stage:]
            bottleneck = np.maximum(best[stage - 1, stage:j], load)
            k = int(np.argmin(bottleneck))
            best[stage, j], choice[stage, j] = bottleneck[k], stage + k
    if not np.isfinite(best[-1, n]):
        if needs is not None:
            return []
        raise UsageError(
            f"{count} stages cannot all start at the places that are given",
            hint="ask for fewer stages, or give more places",
        )
    cuts = [n]
    for stage in reversed(range(1, count)):
        cuts.append(int(choice[stage, cuts[-1]]))
    return [0, *reversed(cuts[1:])]


def _given_cuts(costs: _Costs, split_at: Sequence[str]) -> list[int]:
    position = _known_positions(costs.chain, split_at)
    problems, starts, spans = [], {0: "the first operation of the model"}, moving_spans(costs.chain)
    for name in split_at:
        cut = position[name]
        if cut in starts:
            again = "is given twice" if starts[cut] == repr(name) else f"names the same operation as {starts[cut]}"
            problems.append(f"{name!r} {again}")
        apart = [variable for variable, (first, last) in spans.items() if first < cut <= last]
        if apart:
            problems.append(f"before {name!r} @{apart[0]} is read, and behind it written: it can be on one stage only")
        starts.setdefault(cut, repr(name))
    if problems:
        raise UsageError("cannot split there:" + itemised(problems))
    return sorted(starts)


def _known_positions(chain: Sequence[Op], names: Sequence[str]) -> dict[str, int]:
    position = positions_of(chain)
    unknown = [name for name in names if name not in position]
    if unknown:
        listed = "with `--dump-ir dumps`, `penstock inspect dumps/00_input.ir --op .` lists those there are"
        raise UsageError(
            f"no value or node named {', '.join(map(repr, unknown))} to split at",
            hint=" ".join(filter(None, [*(meant(name, position) for name in unknown[:1]), listed])),
        )
    return position


# ------------------------------------------------------------------------------------------------ writing it down


def _annotate(module: Module, placed: StageDevices, costs: _Costs, stages: Sequence[int]) -> Module:
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
    `earliest` of several where the gradient depends on variables only. Forward values that are computed again get no
    stage: they are computed where they are used."""
    anywhere = from_state_alone(backward) | again
    made_on: dict[Value, int] = {}
    stages: dict[int, int] = {}
    for op in backward.ops:
        if op.outs and anywhere.issuperset(op.outs):
            continue
        if "of" in op.attrs:
            stage = by_name[str(op.attrs["of"])]
        elif op.kind == "accum" and (home := vars[op.var].stage) is not None:
            stage = home
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
