"""The meaning of a schedule, in NumPy: the judge of every pass and every backend.

`run_schedule` executes the final module, rank by rank, with messages, version slots and drops. It raises VerifyError
where the real runtime would hang or read the wrong thing: no rank can move, a message of another microbatch arrives, a
slot holds another version, a value was dropped.

A module may be run at any point of its way. Without versions a read takes the newest version. Without send and receive
actions values are handed over by name, and an action waits until what it needs exists. AR hands a rank's gradients of a
batch to the sum over its stage; a rank that uses the sum waits for all ranks, and adds in their order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from penstock.ir.action_kinds import DROP, FORWARD, SUM, UPDATE
from penstock.ir.graph import GRAD, Graph, Module, Value, slot_of, stepped_vars, summed_vars
from penstock.ir.schedule import COMPUTE, MESSAGES, PER_BATCH, RECEIVES, SENDS, SUM_USERS, VERSIONED, Action
from penstock.support.errors import UsageError, VerifyError
from penstock.support.words import counted

from .graphs import run_graph
from .ops import F64, Array
from .recurrence import InterpretedRun, Watch, by_name, collect, microbatches_of, watching
from .store import Arrays, VersionStore, as_value, initial_arrays


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
    if module.schedule is None:
        raise UsageError(
            "the module has no schedule yet; run it with the recurrence, or apply the pass `schedule`",
            where=module.name,
        )
    count = len(batches) if batches_count is None else batches_count
    if count > len(batches):
        raise UsageError(f"{count} batches are asked for, {len(batches)} are given", where=module.name)
    m = module.schedule.microbatches
    feed: dict[int, dict[str, Array]] = {}
    for t, batch in enumerate(batches[:count], first):
        parts = microbatches_of(module, batch, t)
        if len(parts) != m:
            raise UsageError(
                f"batch {t} has {counted(len(parts), 'microbatch')}, the schedule has {m}", where=module.name
            )
        feed |= {t * m + k: mb for k, mb in enumerate(parts)}
    pipeline = _Pipeline(module, weights, feed, module.schedule.expand_all(count, first), first, precision, watch)
    for name, array in (previous or {}).items():
        pipeline.put(name, first - 1, array)
    return pipeline.run()


class _Rank:
    """One rank: its program, its variables, and the values it holds for each microbatch and batch, by
    `Action.holder`."""

    def __init__(self, index: int, program: list[Action], store: VersionStore) -> None:
        self.index, self.program, self.store = index, program, store
        self.step = 0
        self.values: dict[int, dict[str, Array]] = {}
        # Batches whose gradients it has added to a sum that it has not used yet.
        self.waiting: set[int] = set()

    def action(self) -> Action | None:
        return self.program[self.step] if self.step < len(self.program) else None


class _Pipeline:
    def __init__(
        self,
        module: Module,
        weights: Arrays,
        feed: dict[int, dict[str, Array]],
        programs: dict[int, list[Action]],
        first: int,
        precision: str,
        watch: Watch | None = None,
    ) -> None:
        self.module, self.feed, self.precision, self.watch = module, feed, precision, watch
        self.run_found = InterpretedRun(module.outputs[0])
        self.wired = bool(module.edges) or any(a.kind in MESSAGES for program in programs.values() for a in program)
        assert module.schedule is not None
        self.per_batch = module.schedule.microbatches
        self.channels: dict[tuple[int, int, str], deque[tuple[int, dict[str, Array]]]] = {}
        self.stepped = stepped_vars(module)
        self.ranks = {}
        self.homes, self.members = module.schedule.homes(), module.schedule.members()
        # The gradients that ranks of a stage have added to the sum of a batch, by stage and batch.
        self.sums: dict[tuple[int, int], dict[int, dict[str, Array]]] = {}
        for index, program in programs.items():
            graphs = [
                g for g in (module.stage_graph(self.homes.get(index, index), kind) for kind in COMPUTE) if g is not None
            ]
            names = dict.fromkeys(slot.var for g in graphs for slot in map(slot_of, g.ops) if slot is not None)
            store = VersionStore(
                module.vars, self.stepped, initial_arrays(module, weights, list(names), precision), first
            )
            self.ranks[index] = _Rank(index, program, store)

    def put(self, var: str, version: int, array: Array) -> None:
        value = as_value(array, Value(var, self.module.vars[var].type), self.precision)
        for rank in self.ranks.values():
            if var in rank.store.newest:
                rank.store.put(var, version, value)

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
        left = [f"{src}{phase}>{dst}: {len(queue)}" for (src, dst, phase), queue in self.channels.items() if queue]
        if left:
            raise VerifyError(
                f"messages were never received: {', '.join(left)}", where=f"schedule of {self.module.name}"
            )
        for rank in self.ranks.values():
            collect(self.run_found, self.module, rank.store)
        self._compare_ranks()
        return self.run_found

    def _compare_ranks(self) -> None:
        """Check that the ranks of a stage have the same variables in the end."""
        for stage, ranks in self.members.items():
            for rank in ranks[1:]:
                for name in self.ranks[rank].store.slots:
                    if self.module.vars[name].role == GRAD:
                        continue
                    here, there = (self.ranks[r].store.latest(name) for r in (ranks[0], rank))
                    if not np.array_equal(here, there, equal_nan=True):
                        raise VerifyError(
                            f"ranks {ranks[0]} and {rank} of stage {stage} end with different @{name}",
                            where=self.module.name,
                        )

    def _perform(self, rank: _Rank, action: Action) -> bool:
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
        graph = self.module.stage_graph(action.stage, action.kind)
        if graph is None:
            raise VerifyError(f"there is no graph @s{action.stage}.{action.kind}")
        return graph

    def _find(self, rank: _Rank, mb: int, name: str) -> Array | None:
        """Find a value of a microbatch: held here, fed from outside, or held by any rank before messages exist."""
        fed = {v.name for v in self.module.inputs}
        places = [rank.values.get(mb, {}), self.feed.get(mb, {}) if name in fed else {}]
        if not self.wired:
            places += [other.values.get(mb, {}) for other in self.ranks.values()]
        return next((place[name] for place in places if name in place), None)

    def _compute(self, rank: _Rank, action: Action) -> bool:
        graph = self._graph(action)
        ins = {v.name: self._find(rank, action.holder, v.name) for v in graph.ins}
        missing = [name for name, x in ins.items() if x is None]
        if missing and not self.wired:
            return False
        if missing:
            listed = ", ".join("%" + n for n in missing)
            raise VerifyError(f"@{graph.name} needs {listed} of {_unit(action)}, which this rank does not hold")
        if action.kind in SUM_USERS and action.mb in rank.waiting and not self._take_sum(rank, action):
            return False
        batch = action.batch(self.per_batch)
        seen = watching(self.watch, graph, action.mb)
        if action.kind == UPDATE:
            results = run_graph(graph, ins, rank.store.at(made=action.version, batch=batch), self.precision, seen)
            self.run_found.handed_out.setdefault(batch, {}).update(by_name(graph, results))
            for name in self.stepped & rank.store.slots.keys():
                self.run_found.buffers[name] = max(self.run_found.buffers.get(name, 0), rank.store.buffers(name))
            if self.wired:
                rank.values.pop(action.holder, None)
            return True
        results = run_graph(graph, ins, rank.store.at(action.version, batch=batch), self.precision, seen)
        if action.kind in VERSIONED:
            self.run_found.log.append((action.stage, action.mb, action.kind, action.version))
        kept = rank.values.setdefault(action.holder, {})
        kept |= {name: x for name, x in ins.items() if x is not None and action.kind == FORWARD}
        kept |= by_name(graph, results)
        if action.kind == FORWARD:
            shown = {v.name: kept[v.name] for v in graph.outs if v.name in self.module.outputs}
            self.run_found.outputs.setdefault(action.mb, {}).update(shown)
        return True

    def _bring(self, rank: _Rank, action: Action) -> bool:
        """Add a rank's gradients of a batch to the sum over the ranks of its stage."""
        store = rank.store.at(batch=action.mb)
        brought = self.sums.setdefault((action.stage, action.mb), {})
        brought[rank.index] = {name: store.take(name) for name in summed_vars(self.module, action.stage)}
        rank.waiting.add(action.mb)
        return True

    def _take_sum(self, rank: _Rank, action: Action) -> bool:
        """Replace the rank's own gradients by the sum of the batch. Return False while other ranks still add to it."""
        brought, members = self.sums[action.stage, action.mb], self.members[action.stage]
        if len(brought) < len(members):
            return False
        rank.waiting.remove(action.mb)
        store = rank.store.at(batch=action.mb)
        for member in members:
            for name, part in brought[member].items():
                store.accumulate(name, part)
        return True

    def _drop(self, rank: _Rank, action: Action) -> bool:
        if rank.values.pop(action.mb, None) is None:
            raise VerifyError(f"microbatch {action.mb} holds nothing that could be dropped")
        return True

    def _channel(self, src: int, dst: int, phase: str) -> deque[tuple[int, dict[str, Array]]]:
        return self.channels.setdefault((src, dst, phase), deque())

    def _values_of(self, src: int, dst: int, phase: str) -> list[str]:
        names = [v.name for e in self.module.edges if (e.src, e.dst, e.phase) == (src, dst, phase) for v in e.values]
        if not names:
            raise VerifyError(f"the module has no edge from stage {src} to stage {dst} in phase {phase}")
        return names

    def _send(self, rank: _Rank, action: Action) -> bool:
        assert action.peer is not None
        names = self._values_of(action.stage, self.homes[action.peer], action.phase)
        held = rank.values.get(action.holder, {})
        missing = [f"%{n}" for n in names if n not in held]
        if missing:
            raise VerifyError(f"{', '.join(missing)} of {_unit(action)} should be sent, but this rank does not hold it")
        self._channel(rank.index, action.peer, action.phase).append((action.mb, {n: held[n] for n in names}))
        return True

    def _receive(self, rank: _Rank, action: Action) -> bool:
        assert action.peer is not None
        queue = self._channel(action.peer, rank.index, action.phase)
        if not queue:
            return False
        mb, values = queue.popleft()
        if mb != action.mb:
            raise VerifyError(
                f"{_unit(action)} is expected from rank {action.peer}, the next message is of "
                f"{_unit(action._replace(mb=mb))}"
            )
        rank.values.setdefault(action.holder, {}).update(values)
        return True

    def _wanted(self, rank: _Rank, action: Action) -> str:
        if action.kind in RECEIVES:
            return f"a message from rank {action.peer}"
        if action.mb in rank.waiting and action.kind in SUM_USERS:
            return f"the gradients of the other ranks of stage {action.stage}"
        graph = self._graph(action)
        return (
            ", ".join(f"%{v.name}" for v in graph.ins if self._find(rank, action.holder, v.name) is None)
            + f" of {_unit(action)}"
        )


# The meaning of every kind: the function runs the action, and returns False when the action has to wait.
MEANINGS: dict[str, Callable[[_Pipeline, _Rank, Action], bool]] = {
    **dict.fromkeys(COMPUTE, _Pipeline._compute),
    **dict.fromkeys(SENDS, _Pipeline._send),
    **dict.fromkeys(RECEIVES, _Pipeline._receive),
    SUM: _Pipeline._bring,
    DROP: _Pipeline._drop,
}


def _unit(action: Action) -> str:
    return f"{'batch' if action.kind in PER_BATCH else 'microbatch'} {action.mb}"
