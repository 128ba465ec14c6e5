"""The meaning of a schedule, in NumPy: the judge of every pass and every backend.

`run_schedule` executes the final module, rank by rank, with messages, version slots and drops. It raises VerifyError
where the real runtime would hang or read the wrong thing: no rank can move, a message of another microbatch arrives, a
slot holds another version, a value was dropped.

A module may be run at any point of its way. Without versions a read takes the newest version. Without send and receive
actions values are handed over by name, and an action waits until what it needs exists. AR hands a rank's gradients of a
batch to the sum over its replicas; a rank that uses the sum waits for all of them, and adds in their order.

In local form each rank has its parts of variables and inputs, cut out of the whole ones. The ranks that the collectives
of a graph bring together stand at it together, and run it operation by operation. Results are whole again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from penstock.ir.action_kinds import AGAIN, COPY_IN, COPY_OUT, DROP, FORWARD, LET_GO, SUM, UPDATE
from penstock.ir.collective_calls import kept_parts, kept_slices
from penstock.ir.graph import (
    COPY,
    GRAD,
    REPLICAS,
    Graph,
    Mesh,
    Module,
    Op,
    Value,
    slot_of,
    stepped_vars,
    summed_vars,
)
from penstock.ir.memory.items import stage_images
from penstock.ir.memory.saved_sets import moves_saved, saved_set
from penstock.ir.memory.update_parts import graph_of
from penstock.ir.ops import axes_over
from penstock.ir.schedule import COMPUTE, COPIES, HANDS, MESSAGES, RECEIVES, SENDS, SUM_USERS, VERSIONED, Action
from penstock.ir.sharding.between_meshes import travels_in_tiles
from penstock.ir.sharding.tile_messages import ends_of, tile_messages
from penstock.ir.sharding.tiles import seat_of
from penstock.support.errors import UsageError, VerifyError
from penstock.support.words import counted

from .collectives import COLLECTIVES
from .graphs import run_graph, run_team
from .ops import F64, Array
from .ranks import InterpretedRank, StageVariables, part_across, put_tiles
from .recurrence import InterpretedRun, Watch, by_name, collect, microbatches_of, watching
from .store import Arrays, VersionStore, as_value, initial_arrays

# Called with each operation that a rank has done: the rank, the name of the graph, the microbatch (of an update, the
# batch), the operation and its results.
RankWatch = Callable[[int, str, int, Op, tuple[Array, ...]], None]


def run_schedule(
    module: Module,
    weights: Arrays,
    batches: Sequence[Arrays],
    *,
    first: int = 0,
    batches_count: int | None = None,
    previous: Arrays | None = None,
    precision: str = F64,
    watch: Watch | None = None,
) -> InterpretedRun:
    """Execute the module's schedule for batches first .. first + batches_count - 1; `batches[0]` is batch `first`.

    `weights` hold version `first` of the parameters and of the optimiser state, which is zeros where it is missing.
    `previous` holds version first - 1. A schedule with a delay needs it when it does not start at batch 0.
    """
    count = len(batches) if batches_count is None else batches_count
    if count > len(batches):
        raise UsageError(f"{count} batches are asked for, {len(batches)} are given", where=module.name)
    pipeline = _pipeline(module, weights, batches[:count], first, precision)
    pipeline.watch = watch
    for name, array in (previous or {}).items():
        pipeline.put(name, first - 1, array)
    return pipeline.run()


def watch_ranks(module: Module, weights: Arrays, batches: Sequence[Arrays], watch: RankWatch) -> InterpretedRun:
    """Execute the module's schedule in float64, and show each operation of each rank."""
    pipeline = _pipeline(module, weights, batches, 0, F64)
    pipeline.watch_rank = watch
    return pipeline.run()


def _pipeline(module: Module, weights: Arrays, batches: Sequence[Arrays], first: int, precision: str) -> _Pipeline:
    """Return the ranks of a module with the microbatches of some batches."""
    if module.schedule is None:
        raise UsageError(
            "the module has no schedule yet; run it with the recurrence, or apply the pass `schedule`",
            where=module.name,
        )
    m = module.schedule.microbatches
    feed: dict[int, dict[str, Array]] = {}
    for t, batch in enumerate(batches, first):
        parts = microbatches_of(module, batch, t)
        if len(parts) != m:
            raise UsageError(
                f"batch {t} has {counted(len(parts), 'microbatch')}, the schedule has {m}", where=module.name
            )
        feed |= {t * m + k: mb for k, mb in enumerate(parts)}
    return _Pipeline(module, weights, feed, module.schedule.expand_all(len(batches), first), first, precision)


class _Pipeline:
    def __init__(
        self,
        module: Module,
        weights: Arrays,
        feed: dict[int, dict[str, Array]],
        programs: dict[int, list[Action]],
        first: int,
        precision: str,
    ) -> None:
        self.module, self.feed, self.precision = module, feed, precision
        self.watch: Watch | None = None
        self.watch_rank: RankWatch | None = None
        self.run_found = InterpretedRun(module.outputs[0])
        # Before messages exist, edges between unlike meshes say how values lie there (passes/sharding/crossings).
        messages = any(a.kind in MESSAGES for program in programs.values() for a in program)
        self.wired = messages or not all(map(travels_in_tiles, module.edges))
        self.tiles = tile_messages(module)
        assert module.schedule is not None
        self.per_batch = module.schedule.microbatches
        self.channels: dict[tuple[str, int, int, int | None, int | None], deque[tuple[int, dict[str, Array]]]] = {}
        self.stepped = stepped_vars(module)
        self.ranks = {}
        self.homes, self.members = module.schedule.homes(), module.schedule.members()
        self.replicas, self.inputs = module.schedule.replicas(), {v.name: v.type for v in module.inputs}
        self.teams = {rank: team for teams in module.schedule.teams().values() for team in teams for rank in team}
        # The gradients that ranks of a stage have added to the sum of a batch, by stage and batch.
        self.sums: dict[tuple[int, int], dict[int, dict[str, Array]]] = {}
        for index, program in programs.items():
            rank = self.ranks[index] = InterpretedRank(index, program, *_seat(module, index), module.is_local)
            for stage in module.schedule.stages_of(index) or (index,):
                graphs = [g for kind in COMPUTE if (g := module.stage_graph(stage, kind)) is not None]
                names = dict.fromkeys(slot.var for g in graphs for slot in map(slot_of, g.ops) if slot is not None)
                first_arrays = initial_arrays(module, weights, list(names), precision)
                parts = {name: rank.part(array, module.vars[name].type) for name, array in first_arrays.items()}
                rank.stores[stage] = VersionStore(module.vars, self.stepped, parts, first)

    def put(self, var: str, version: int, array: Array) -> None:
        for name, held in self.module.vars.items():
            if name != var and (held.role != COPY or held.source != var):
                continue
            value = as_value(array, Value(name, held.type), self.precision)
            for rank in self.ranks.values():
                for store in rank.stores.values():
                    if name in store.newest:
                        store.put(name, version, rank.part(value, held.type))

    def run(self) -> InterpretedRun:
        """Run all ranks in turn, each as far as it can; when no rank moves in a whole round, none ever will."""
        moved = True
        while moved:
            moved = False
            for rank in self.ranks.values():
                while (action := rank.action()) is not None and self._perform(rank, action):
                    rank.step += 1
                    moved = True
        stuck = [
            f"rank {r.index}, step {r.step}: {a} waits for {self._wanted(r, a)}"
            for r in self.ranks.values()
            if (a := r.action())
        ]
        if stuck:
            raise VerifyError("no rank can move\n  " + "\n  ".join(stuck), where=f"schedule of {self.module.name}")
        left = [f"{src}{phase}>{dst}: {len(queue)}" for (phase, src, dst, *_), queue in self.channels.items() if queue]
        if left:
            raise VerifyError(
                f"messages were never received: {', '.join(left)}", where=f"schedule of {self.module.name}"
            )
        for stage, ranks in self.members.items():
            collect(self.run_found, self.module, StageVariables(self.module, stage, [self.ranks[r] for r in ranks]))
        self._compare_ranks()
        return self.run_found

    def _compare_ranks(self) -> None:
        """Check that the ranks of a stage have the same variables in the end, where they hold the same part."""
        for stage, ranks in self.members.items():
            for name in self.ranks[ranks[0]].stores[stage].slots:
                var = self.module.vars[name]
                if var.role == GRAD:
                    continue
                holders: dict[object, int] = {}
                for rank in map(self.ranks.__getitem__, ranks):
                    other = holders.setdefault(rank.tile(var.type), rank.index)
                    here, there = (self.ranks[r].stores[stage].latest(name) for r in (other, rank.index))
                    if not np.array_equal(here, there, equal_nan=True):
                        raise VerifyError(
                            f"ranks {other} and {rank.index} of stage {stage} end with different @{name}",
                            where=self.module.name,
                        )

    def _perform(self, rank: InterpretedRank, action: Action) -> bool:
        """Execute one action; False when it has to wait."""
        where = f"rank {rank.index}, step {rank.step}: {action}"
        try:
            meaning = MEANINGS.get(action.kind)
            if meaning is None:
                raise VerifyError(f"the interpreter has no meaning for {action.kind}")
            return meaning(self, rank, action)
        except VerifyError as error:
            raise VerifyError(str(error), where=where) from error

    def _graph(self, action: Action) -> Graph:
        graph = graph_of(self.module, action)
        if graph is None:
            raise VerifyError(f"there is no graph @s{action.stage}.{action.kind}")
        return graph

    def _find(self, rank: InterpretedRank, stage: int, mb: int, name: str) -> Array | None:
        """Find a value of a microbatch: held here, fed from outside, or held by any rank before messages exist."""
        held = rank.values.get((stage, mb), {})
        if name in held:
            return held[name]
        if name in self.inputs and name in self.feed.get(mb, {}):
            return rank.part(self.feed[mb][name], self.inputs[name])
        if self.module.is_local and name in rank.coordinates:
            return rank.coordinates[name]
        if self.wired:
            return None
        edge = next((e for e in self.module.edges if e.dst == stage and name in [v.name for v in e.values]), None)
        if edge is not None:
            teams = {self.teams[other] for other in self.members[edge.src]}
            return part_across(self.module, edge, name, mb, rank, [[self.ranks[r] for r in team] for team in teams])
        at = self.teams[rank.index].index(rank.index)
        others = (self.ranks[team[at]] for team in dict.fromkeys(self.teams.values()) if at < len(team))
        places = [place for other in others for (_, number), place in other.values.items() if number == mb]
        return next((place[name] for place in places if name in place), None)

    def _party(self, rank: InterpretedRank, graph: Graph) -> list[InterpretedRank]:
        """Return the ranks that run a graph together, because its collectives bring them together."""
        axes = {axis for op in graph.ops if op.kind in COLLECTIVES for axis in axes_over(op.attrs["over"])}
        if not any(rank.mesh.sizes.get(axis, 1) > 1 for axis in axes):
            return [rank]
        ranks = self.members[self.homes[rank.index]] if REPLICAS in axes else self.teams[rank.index]
        return [self.ranks[index] for index in ranks]

    def _missing(self, party: Sequence[InterpretedRank], action: Action) -> InterpretedRank | None:
        """Return a rank of a party that stands elsewhere. Teams run one action with microbatches of their own."""
        team = self.teams[party[0].index]
        for rank in party:
            other = rank.action()
            known = other is not None and _meeting(other) == _meeting(action)
            if not known or (rank.index in team and party[0].action() != other):
                return rank
        return None

    def _inputs(self, rank: InterpretedRank, graph: Graph, action: Action) -> dict[str, Array] | None:
        """Return what a graph takes; None while a rank has to wait for it."""
        ins = {v.name: x for v in graph.ins if (x := self._find(rank, action.stage, action.holder, v.name)) is not None}
        missing = [v.name for v in graph.ins if v.name not in ins]
        if missing and not self.wired:
            return None
        if missing:
            listed = ", ".join("%" + name for name in missing)
            raise VerifyError(f"@{graph.name} needs {listed} of {_unit(action)}, which this rank does not hold")
        if action.kind in SUM_USERS and (action.stage, action.mb) in rank.waiting and not self._take_sum(rank, action):
            return None
        return ins

    def _compute(self, rank: InterpretedRank, action: Action) -> bool:
        graph = self._graph(action)
        party = self._party(rank, graph)
        if len(party) > 1 and self._missing(party, action) is not None:
            return False
        actions = [current for other in party if (current := other.action()) is not None]
        inputs = []
        for other, current in zip(party, actions, strict=True):
            ins = self._inputs(other, graph, current)
            if ins is None:
                return False
            inputs.append(ins)
        stores = [self._seen_by(other, current) for other, current in zip(party, actions, strict=True)]
        # The first rank of a team stands for it.
        watch = self.watch if rank.index == self.teams[rank.index][0] or len(party) > 1 else None
        seen = [watching(watch, graph, action.mb), *[None for _ in party[1:]]]
        if (watch_rank := self.watch_rank) is not None:
            seen = [
                partial(watch_rank, other.index, graph.name, current.mb)
                for other, current in zip(party, actions, strict=True)
            ]
        results = self._run(graph, party, inputs, stores, seen)
        for other, current, ins, arrays in zip(party, actions, inputs, results, strict=True):
            self._keep(other, current, graph, ins, arrays)
            if other is not rank:
                other.step += 1
        return True

    def _run(
        self,
        graph: Graph,
        party: Sequence[InterpretedRank],
        inputs: Sequence[Arrays],
        stores: Sequence[VersionStore],
        seen: Sequence[Callable[[Op, tuple[Array, ...]], None] | None],
    ) -> list[list[Array]]:
        """Run a graph on the ranks of a party. `seen` gets what each of them computes."""
        if not any(op.kind in COLLECTIVES for op in graph.ops):
            return [run_graph(graph, inputs[0], stores[0], self.precision, seen[0])]
        places, mesh = [rank.place for rank in party], party[0].mesh
        by_place = dict(zip(places, seen, strict=True))

        def watch(place: int, op: Op, arrays: tuple[Array, ...]) -> None:
            if (tell := by_place[place]) is not None:
                tell(op, arrays)

        return run_team(graph, inputs, mesh, stores, self.precision, watch, places)

    def _seen_by(self, rank: InterpretedRank, action: Action) -> VersionStore:
        """Return the variables as a computation sees them."""
        batch = action.batch(self.per_batch)
        if action.kind == UPDATE:
            return rank.stores[action.stage].at(made=action.version, batch=batch)
        return rank.stores[action.stage].at(action.version, batch=batch)

    def _keep(self, rank: InterpretedRank, action: Action, graph: Graph, ins: Arrays, results: list[Array]) -> None:
        """Keep what a computation gives."""
        batch, leads = action.batch(self.per_batch), rank.index == self.teams[rank.index][0]
        if action.kind == UPDATE:
            leaving = [e for e in self.module.edges if (e.src, e.phase) == (action.stage, UPDATE)]
            named, sent = by_name(graph, results), {v.name for edge in leaving for v in edge.values}
            shown = {name: array for name, array in named.items() if name not in sent}
            self._show(self.run_found.handed_out.setdefault(batch, {}), shown, rank, leads)
            store = rank.stores[action.stage]
            for name in self.stepped & store.slots.keys():
                self.run_found.buffers[name] = max(self.run_found.buffers.get(name, 0), store.buffers(name))
            if self.wired and not action.item:
                rank.values.pop((action.stage, action.holder), None)
            if handed := {name: array for name, array in named.items() if name in sent or not self.wired}:
                rank.values.setdefault((action.stage, action.holder), {}).update(handed)
            return
        if action.kind in VERSIONED and leads:
            self.run_found.log.append((action.stage, action.mb, action.kind, action.version))
        kept = rank.values.setdefault((action.stage, action.holder), {})
        kept |= {name: x for name, x in ins.items() if action.kind == FORWARD}
        kept |= by_name(graph, results)
        self._hand_over(rank, action, kept)
        if action.kind == FORWARD:
            shown = {v.name: kept[v.name] for v in graph.outs if v.name in self.module.outputs}
            self._show(self.run_found.outputs.setdefault(action.mb, {}), shown, rank, leads)

    def _show(self, known: dict[str, Array], results: Arrays, rank: InterpretedRank, leads: bool) -> None:
        """Record results for the user. All ranks of a team must have the same."""
        for name, array in results.items():
            if not leads and name in known and not np.array_equal(known[name], array, equal_nan=True):
                raise VerifyError(f"%{name} differs from that of rank {self.teams[rank.index][0]} of the same team")
            known.setdefault(name, array) if not leads else known.update({name: array})

    def _bring(self, rank: InterpretedRank, action: Action) -> bool:
        """Add a rank's gradients of a batch to the sum over its replicas."""
        store = rank.stores[action.stage].at(batch=action.mb)
        brought = self.sums.setdefault((action.stage, action.mb), {})
        brought[rank.index] = {name: store.take(name) for name in summed_vars(self.module, action.stage)}
        rank.waiting.add((action.stage, action.mb))
        return True

    def _take_sum(self, rank: InterpretedRank, action: Action) -> bool:
        """Replace the rank's own gradients by the sum of the batch, or its part between elements that belong to no sum.
        Return False while other ranks still add to it."""
        brought, members = self.sums[action.stage, action.mb], self.replicas[rank.index]
        if not brought.keys() >= set(members):
            return False
        rank.waiting.remove((action.stage, action.mb))
        store = rank.stores[action.stage].at(batch=action.mb)
        for member in members:
            for name, part in brought[member].items():
                store.accumulate(name, part)
        for call in kept_parts(self.module, action.stage):
            others = np.full(call.op.ins[0].type.dims, np.nan)
            others[kept_slices(call, rank.mesh.coordinates(rank.place)[REPLICAS], len(members))] = 0
            store.accumulate(call.op.ins[0].name, others)
        return True

    def _copy(self, rank: InterpretedRank, action: Action) -> bool:
        """Move an item between its home and the device, at once, or let go of it there."""
        if moves_saved(action):
            rank.move_saved(action, saved_set(self.module, action.stage))
            return True
        image, store = stage_images(self.module, action.stage).get(action.item), rank.stores[action.stage]
        if image is None:
            raise VerifyError(f"stage {action.stage} has no {action.item} with a home")
        moves = {COPY_IN: store.bring, COPY_OUT: store.store, LET_GO: store.let_go}
        moves[action.kind](image.variables, action.version)
        return True

    def _let_go(self, rank: InterpretedRank, action: Action) -> bool:
        if action.item:
            return self._copy(rank, action)
        held, saved = rank.values.get((action.stage, action.mb), {}), self._graph(action._replace(kind=AGAIN)).saved
        missing = [f"%{v.name}" for v in saved if held.pop(v.name, None) is None]
        if missing:
            raise VerifyError(f"microbatch {action.mb} does not hold {', '.join(missing)}, which it should let go of")
        return True

    def _drop(self, rank: InterpretedRank, action: Action) -> bool:
        if rank.values.pop((action.stage, action.mb), None) is None:
            raise VerifyError(f"microbatch {action.mb} holds nothing that could be dropped")
        return True

    def _hand_over(self, rank: InterpretedRank, action: Action, kept: Arrays) -> None:
        """Give the results of a computation to the other stages of its rank that take them."""
        for edge in self.module.edges:
            if (edge.src, edge.phase) == (action.stage, action.kind) and rank.index in self.members.get(edge.dst, ()):
                held = rank.values.setdefault((edge.dst, action.holder), {})
                held.update((v.name, kept[v.name]) for v in edge.values)

    def _channel(self, rank: InterpretedRank, action: Action) -> deque[tuple[int, dict[str, Array]]]:
        return self.channels.setdefault(action.channel(rank.index), deque())

    def _values_of(self, src: int, dst: int, phase: str) -> list[str]:
        names = [v.name for e in self.module.edges if (e.src, e.dst, e.phase) == (src, dst, phase) for v in e.values]
        if not names:
            raise VerifyError(f"the module has no edge from stage {src} to stage {dst} in phase {phase}")
        return names

    def _send(self, rank: InterpretedRank, action: Action) -> bool:
        assert action.peer is not None
        ends = ends_of(action, self.homes)
        names = self._values_of(*ends)
        held = rank.values.get((action.stage, action.holder), {})
        missing = [f"%{n}" for n in names if n not in held]
        if missing:
            raise VerifyError(f"{', '.join(missing)} of {_unit(action)} should be sent, but this rank does not hold it")
        values = {n: held[n] for n in names}
        if ends in self.tiles:
            pieces = self.tiles.slices(ends, rank.index, action.peer)
            values = {piece.value.name: values[piece.whole][piece.taken] for piece in pieces}
        self._channel(rank, action).append((action.mb, values))
        return True

    def _receive(self, rank: InterpretedRank, action: Action) -> bool:
        assert action.peer is not None
        queue = self._channel(rank, action)
        if not queue:
            return False
        mb, values = queue.popleft()
        if mb != action.mb:
            next_one = _unit(action._replace(mb=mb))
            raise VerifyError(f"{_unit(action)} is expected from rank {action.peer}, the next message is of {next_one}")
        held, ends = rank.values.setdefault((action.stage, action.holder), {}), ends_of(action, self.homes)
        if ends not in self.tiles:
            held.update(values)
            return True
        pieces = self.tiles.slices(ends, action.peer, rank.index)
        put_tiles(held, values, pieces, self.tiles.arriving(ends), self.precision)
        if self.watch_rank is not None and action.peer == self.tiles.senders(ends, rank.index, action.mb)[-1]:
            for op in self.tiles.arrivals(ends):
                graph = f"s{action.stage}.{action.kind}"
                self.watch_rank(rank.index, graph, action.mb, op, (held[op.outs[0].name],))
        return True

    def _wanted(self, rank: InterpretedRank, action: Action) -> str:
        if action.kind in RECEIVES:
            return f"a message from rank {action.peer}"
        if (action.stage, action.mb) in rank.waiting and action.kind in SUM_USERS:
            return f"the gradients of the other ranks of stage {action.stage}"
        party = self._party(rank, graph := self._graph(action))
        if len(party) > 1 and (other := self._missing(party, action) or self._missing(party[::-1], action)) is not None:
            return f"rank {other.index}, which is in {other.action() or 'nothing any more'}"
        return (
            ", ".join(f"%{v.name}" for v in graph.ins if self._find(rank, action.stage, action.holder, v.name) is None)
            + f" of {_unit(action)}"
        )


# The meaning of every kind: the function runs the action, and returns False when the action has to wait.
MEANINGS: dict[str, Callable[[_Pipeline, InterpretedRank, Action], bool]] = {
    **dict.fromkeys(COMPUTE, _Pipeline._compute),
    **dict.fromkeys((*SENDS, *HANDS), _Pipeline._send),
    **dict.fromkeys(RECEIVES, _Pipeline._receive),
    SUM: _Pipeline._bring,
    **dict.fromkeys(COPIES, _Pipeline._copy),
    LET_GO: _Pipeline._let_go,
    DROP: _Pipeline._drop,
}


def _seat(module: Module, rank: int) -> tuple[Mesh, int]:
    """Return the mesh and the place of a rank; one device of its own where the module says nothing of it."""
    if rank < len(module.rank_stages()):
        return seat_of(module, rank)
    return Mesh(f"rank {rank}", (), (f"rank {rank}",)), 0


def _meeting(action: Action) -> tuple[int, str, int | None]:
    return action.stage, action.computation, action.version


def _unit(action: Action) -> str:
    return f"{'batch' if action.once else 'microbatch'} {action.mb}"
