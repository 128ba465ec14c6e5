"""An estimate of the memory that stages need, so that cuts are found that fit.

In: the chain of operations, what they read and save, the schedule. Out: for a stage and any set of operations the
seconds that memory costs it. That is 0 where the stage fits as it is, and infinity where it does not fit at all. Where
it fits only with recomputation (passes/memory/recompute.py), it is the seconds of the forward pass.

    bytes of a stage = parameters * versions + gradients (twice if they wait for other ranks)
                     + optimiser state      of what its operations read
                     + gradients * (2 + versions)    where other devices update weights: gradients that go, those that
                                                     went, and new weights that come
                     + saved * in flight            values that the backward of its operations takes
                     + fed                          batches of its inputs that wait, on CPUs
                     + 3 * (bytes that cross its cuts) + 2 * (results of its largest operation)
    computed again   what comes in, inputs of the model too, * in flight + saved once, instead of saved * in flight

In flight is counted in the schedule itself, for a pipeline in which every stage computes. A device without a limit
needs nothing. With several devices the smallest counts.

Known limits: an estimate before there are kernels; recomputation is taken to be of a whole stage. What a plan really
needs is counted at the end (ir/memory/predict.py), and refused there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.ir.action_kinds import BACKWARD
from penstock.ir.cluster.cluster import Device
from penstock.ir.graph import GRAD, PARAM, STATE, Module, Op, Value, Var
from penstock.ir.grid import most_in_flight
from penstock.ir.memory.predict import BATCHES_AHEAD
from penstock.passes.communicate.wire import travelling
from penstock.passes.schedules.kind import ScheduleKind
from penstock.passes.schedules.schedule import SCHEDULES, build_schedule

from .chain import chain_of

Array = npt.NDArray[np.float64]
# Operations by position in the chain, and bytes that a stage needs that has any of them.
Items = Sequence[tuple[tuple[int, ...], float]]
_MESSAGES, _RESULTS = 3.0, 2.0
# Gradients on their way to the device that updates weights: those of a batch, and those of the one before, whose
# message is held until the next one.
PASSING = 2


@dataclass(frozen=True, slots=True)
class Room:
    """The demands of a schedule on one stage: microbatches in flight, bytes it may need, and whether its inputs wait in
    that memory."""

    in_flight: int
    limit: int | None
    waits: bool


@dataclass(frozen=True, slots=True)
class StageLoad:
    """Bytes of a chain. `fixed`, `saved` and `fed` are those of items that some of its operations have, `fed` of inputs
    of the model, of which `waiting` microbatches wait; `values` those of what travels where operations are on several
    stages; `results` those of each operation."""

    fixed: Items
    saved: Items
    fed: Items
    values: Sequence[tuple[frozenset[int], float]]
    results: Sequence[float]
    waiting: int


@dataclass(frozen=True, slots=True)
class Outlook:
    """The work of later passes on stages: their schedule, what `recompute` computes again (auto, none or all), the
    element type in which float32 values travel, and whether other devices update weights."""

    schedule: str
    recompute: str
    wire: str
    updates_elsewhere: bool = False


class StageNeeds:
    """Bytes and seconds of stages. `loads` are those of the chain on one device of each stage, `forward` the seconds of
    operations by stage, `recompute` what may be computed again: auto, none or all."""

    def __init__(
        self, rooms: Sequence[Room], loads: Sequence[StageLoad], forward: Sequence[Array], recompute: str
    ) -> None:
        self.rooms, self.loads, self.recompute = rooms, loads, recompute
        self._ends = [np.concatenate([[0.0], np.cumsum(seconds)]) for seconds in forward]
        self._forward = forward

    def extra(self, stage: int, members: Set[int]) -> float:
        """Return the seconds that memory costs a stage of these operations."""
        load = self.loads[stage]

        def held(items: Items) -> float:
            return sum(nbytes for where, nbytes in items if not members.isdisjoint(where))

        parted = [
            (where, nbytes) for where, nbytes in load.values if not members.isdisjoint(where) and not where <= members
        ]
        comes = sum(nbytes for where, nbytes in parted if min(where) not in members)
        results = max((load.results[i] for i in members), default=0.0)
        forward = sum(float(self._forward[stage][i]) for i in members)
        always = held(load.fixed) + _MESSAGES * sum(nbytes for _, nbytes in parted) + _RESULTS * results
        return float(
            self._seconds(
                stage, np.array([always]), *(np.array([x]) for x in (held(load.saved), held(load.fed), comes, forward))
            )[0]
        )

    def _seconds(self, stage: int, always: Array, saved: Array, fed: Array, comes: Array, forward: Array) -> Array:
        room = self.rooms[stage]
        if room.limit is None:
            return np.zeros(len(always))
        always = always + fed * self.loads[stage].waiting if room.waits else always
        plain, again = always + saved * room.in_flight, always + saved + (comes + fed) * room.in_flight
        seconds = (
            np.where(plain <= room.limit, 0.0, np.inf) if self.recompute != "all" else np.full(len(always), np.inf)
        )
        return (
            seconds
            if self.recompute == "none"
            else np.where(again <= room.limit, np.minimum(seconds, forward), seconds)
        )

    def rows(self) -> Iterable[list[Array]]:
        """Yield arrays for each `last` from 1 on, one for each stage. Entry `first` is `extra` of the operations first
        .. last-1."""
        unlike = list({id(load): load for load in self.loads}.values())
        for rows in zip(*map(self._rows_of, unlike), strict=True):
            of_stages = {stage: row for by_stage in rows for stage, row in by_stage.items()}
            yield [of_stages[stage] for stage in range(len(self.loads))]

    def _rows_of(self, load: StageLoad) -> Iterator[dict[int, Array]]:
        """Yield the same of the stages that have this load."""
        count, results = len(load.results), np.asarray(load.results)
        fixed, saved, fed = (_Rows(_touched(items), count) for items in (load.fixed, load.saved, load.fed))
        touched = _Rows(_touched((tuple(where), nbytes) for where, nbytes in load.values), count)
        inside = _Rows(((max(where), min(where), None, nbytes) for where, nbytes in load.values), count)
        arriving = np.zeros(count + 1)
        for where, nbytes in load.values:
            arriving[min(where) + 1] += nbytes
        arriving = np.cumsum(arriving)
        for last in range(1, count + 1):
            travels = touched.up_to(last)
            largest = np.maximum.accumulate(results[:last][::-1])[::-1]
            always = fixed.up_to(last) + _MESSAGES * (travels - inside.up_to(last)) + _RESULTS * largest
            comes, kept, waits = travels - (arriving[last] - arriving[:last]), saved.up_to(last), fed.up_to(last)
            yield {
                stage: self._seconds(stage, always, kept, waits, comes, ends[last] - ends[:last])
                for stage, ends in enumerate(self._ends)
                if self.loads[stage] is load
            }


# A move is (last, to, off, bytes). From the range that ends with operation `last` on, bytes count for ranges that begin
# at most at `to`. They no longer count for those that begin at most at `off`.
Move = tuple[int, int, int | None, float]


def _touched(items: Iterable[tuple[tuple[int, ...], float]]) -> Iterator[Move]:
    """Yield the changes of bytes as a range grows: an item counts for a range with any of its operations."""
    for where, nbytes in items:
        before = None
        for i in sorted(set(where)):
            yield i, i, before, nbytes
            before = i


class _Rows:
    """Sums over ranges of operations that end later and later."""

    def __init__(self, moves: Iterable[Move], count: int) -> None:
        self._at = np.zeros(count)
        self._moves: list[list[tuple[int, int | None, float]]] = [[] for _ in range(count)]
        for time, to, off, nbytes in moves:
            self._moves[time].append((to, off, nbytes))

    def up_to(self, last: int) -> Array:
        """Return an array with the bytes of the operations first .. last-1 in entry `first`. Called with 1, 2, ... in
        turn."""
        for to, off, nbytes in self._moves[last - 1]:
            self._at[to] += nbytes
            if off is not None:
                self._at[off] -= nbytes
        return np.cumsum(self._at[:last][::-1])[::-1]


def needs_of(
    parts: Sequence[Module],
    readers: Mapping[str, Sequence[int]],
    devices: Sequence[Sequence[Device]],
    shares: Sequence[Sequence[int]],
    forward: Sequence[Array],
    outlook: Outlook,
) -> StageNeeds | None:
    """Return the memory needs of stages that are cut from a chain. They are None where no device has a limit, or no
    schedule is named. `parts` are the module as one device of each stage has it, `readers` the operations that read
    each parameter."""
    if outlook.schedule not in SCHEDULES or all(device.memory is None for ranks in devices for device in ranks):
        return None
    kind = SCHEDULES[outlook.schedule]
    # A rank gets its part of each batch.
    waiting = (BATCHES_AHEAD + 1) * max(max(row) for row in shares)

    def load_of(module: Module) -> StageLoad:
        chain, bytes_of = (
            chain_of(module),
            _fixed_bytes(module, kind, max(map(len, devices)), outlook.updates_elsewhere),
        )
        users, fed, saved = _uses(module, chain)
        return StageLoad(
            [(tuple(where), bytes_of[name]) for name, where in readers.items()],
            [(tuple(where), float(v.type.nbytes)) for v, where in saved.items()],
            [(tuple(where), float(v.type.nbytes)) for v, where in fed.items()],
            [(frozenset(where), float(travelling(v.type, outlook.wire))) for v, where in users.items()],
            [float(sum(v.type.nbytes for v in op.outs)) for op in chain],
            waiting,
        )

    loads = {key: load_of(part) for key, part in {id(part): part for part in parts}.items()}
    recompute = outlook.recompute if kind.recomputes else "none"
    rooms = list(_rooms(outlook.schedule, devices, shares))
    return StageNeeds(rooms, [loads[id(part)] for part in parts], forward, recompute)


def _rooms(schedule: str, devices: Sequence[Sequence[Device]], shares: Sequence[Sequence[int]]) -> Iterator[Room]:
    """Yield the room of every stage."""
    built = build_schedule(schedule, len(devices), sum(shares[0]), shares)
    for ranks, places in zip(built.members().values(), devices, strict=True):
        limits = [device.room for device in places if device.room is not None]
        programs = [[*built.ranks[rank].start, *built.ranks[rank].batch, *built.ranks[rank].batch] for rank in ranks]
        flight = max(map(most_in_flight, programs)) if SCHEDULES[schedule].trains else 1
        yield Room(flight, min(limits, default=None), all(device.kind == "cpu" for device in places))


def _fixed_bytes(module: Module, kind: ScheduleKind, replicas: int, updates_elsewhere: bool) -> dict[str, float]:
    """Return the bytes of every parameter with its versions, gradients and state; a stage has at most so many
    replicas. Where other devices update it there is no state, but gradients that go and weights that come."""
    owned: dict[str, list[Var]] = {name: [var] for name, var in module.vars.items() if var.role == PARAM}
    for var in module.vars.values():
        if var.role in (GRAD, STATE) and var.name.rpartition(".")[0] in owned:
            owned[var.name.rpartition(".")[0]].append(var)
    sizes = {}
    for name, vars in owned.items():
        trained = any(var.role == GRAD for var in vars)
        gradients = kind.gradient_copies(replicas) + (PASSING + kind.versions) * updates_elsewhere
        copies = {PARAM: kind.versions if trained else 1, GRAD: gradients, STATE: int(not updates_elsewhere)}
        sizes[name] = float(sum(var.type.nbytes * copies[var.role] for var in vars))
    return sizes


# The operations, by position in a chain, that belong to a value.
_Places = dict[Value, set[int]]


def _uses(module: Module, chain: Sequence[Op]) -> tuple[_Places, _Places, _Places]:
    """Return three mappings to operations. The first has the makers and users of each value of a chain. The second has
    the users of each input of the model. The third has the operations whose backward takes each of both.
    """
    maker = {v: i for i, op in enumerate(chain) for v in op.outs}
    users: _Places = {}
    fed: _Places = {}
    for i, op in enumerate(chain):
        for value in op.ins:
            if value in maker:
                users.setdefault(value, {maker[value]}).add(i)
            elif value in module.data_inputs:
                fed.setdefault(value, set()).add(i)
    saved: _Places = {}
    position = {v.name: i for v, i in maker.items()}
    backward = module.graphs.get(BACKWARD)
    for op in backward.ops if backward is not None else ():
        if "of" in op.attrs:
            for value in op.ins:
                if value in maker or value in module.data_inputs:
                    saved.setdefault(value, set()).add(position[str(op.attrs["of"])])
    return users, fed, saved
