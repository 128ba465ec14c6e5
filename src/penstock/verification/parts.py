"""Parts of split tensors against the whole program: every named value of every rank.

In: a module in local form, the whole program with the layouts of its values, weights and batches. Out: the first value
of which ranks together have another than one device, in the order of execution, or the number of values that are equal.

The local form is run by the interpreter in float64, rank by rank as its schedule says, and the whole program as one
device. Passes keep the names of values. A value that the whole program does not have, such as a mask, is not judged;
what it makes wrong is. Partial sums are added up before they are compared, and padding is left out. Known limits: the
parts of a norm (graphs P and N) are judged by the updates that use it; only the first updates of a schedule with a
delay are those of the whole program, so one batch is run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.ir.action_kinds import NORM_PARTS, PARTS
from penstock.ir.graph import REPLICAS, Module, Op, graph_kind
from penstock.ir.interpreter.ops import Array
from penstock.ir.interpreter.recurrence import run_recurrence
from penstock.ir.interpreter.schedules import watch_ranks
from penstock.ir.ops import axes_over
from penstock.ir.schedule import PER_BATCH
from penstock.ir.sharding.tiles import cut, fill, seat_of
from penstock.ir.text import print_op
from penstock.ir.types import UNIT_ROUNDOFF, TensorType
from penstock.support.errors import VerifyError

from .roundings import changed_by, relative_error
from .tolerance import Allowed, in_float64

Arrays = Mapping[str, np.ndarray]
# Whether it is one of a batch, the number of the microbatch or batch, and the name of a value.
Key = tuple[bool, int, str]


@dataclass(frozen=True)
class PartOff:
    """A value that ranks have wrong: the operation that makes it, and the first rank whose part is off."""

    key: Key
    graph: str
    op: Op
    type: TensorType
    rank: int
    coordinates: Mapping[str, int]
    axes: tuple[str, ...]
    error: float
    allowed: Allowed

    def __str__(self) -> str:
        per_batch, number, name = self.key
        unit = f"{'batch' if per_batch else 'microbatch'} {number}"
        at = ", ".join(f"{axis} {i}" for axis, i in self.coordinates.items())
        over = f", along {', '.join(self.axes)}" if self.axes else ""
        size = f"{self.error:.2g} of the largest element" if np.isfinite(self.error) else "what is not finite"
        return (
            f"%{name} : {self.type} of {unit} is off by {size} on rank {self.rank} ({at}){over}, "
            f"in @{self.graph}: {print_op(self.op).strip()}"
        )


class PartsComparison:
    """The comparison of a local form with the whole program."""

    def __init__(self, local: Module, whole: Module) -> None:
        self.local, self.whole = local, whole
        self.allowed = in_float64(whole.graphs.values())
        self.types = {v.name: v.type for graph in whole.graphs.values() for op in graph.ops for v in op.outs}
        assert local.schedule is not None
        self.teams = {rank: team for teams in local.schedule.teams().values() for team in teams for rank in team}
        self.seats = {rank: seat_of(local, rank) for rank in self.teams}
        self.compared = 0
        # The parts of a value by rank, for each team.
        self._held: dict[tuple[int, Key], dict[int, Array]] = {}
        self._right: dict[Key, Array] = {}

    def first_off(self, weights: Arrays, batch: Arrays, seed: int = 0) -> PartOff | None:
        """Run one batch, and return the first value that is off."""
        self._right = self._whole_values(weights, batch)
        wrong: list[PartOff] = []

        def watch(rank: int, graph: str, number: int, op: Op, results: Sequence[Array]) -> None:
            kind = graph_kind(graph)
            if kind not in (PARTS, NORM_PARTS):
                for i, (value, array) in enumerate(zip(op.outs, results, strict=True)):
                    wrong.extend(self._seen(rank, graph, op, (kind in PER_BATCH, number, value.name), array, i))

        try:
            watch_ranks(self.local, weights, [batch], watch)
        except VerifyError:
            # Ranks that part from each other are told of by what made them part, if that has a name.
            if not wrong:
                raise
        return self._judged(wrong, weights, batch, seed)

    def _whole_values(self, weights: Arrays, batch: Arrays) -> dict[Key, Array]:
        values: dict[Key, Array] = {}

        def watch(graph: str, number: int, op: Op, results: Sequence[Array]) -> None:
            values.update(
                {(graph in PER_BATCH, number, v.name): np.asarray(x) for v, x in zip(op.outs, results, strict=True)}
            )

        run_recurrence(self.whole, weights, [batch], watch=watch)
        return values

    def _seen(self, rank: int, graph: str, op: Op, key: Key, array: Array, result: int = 0) -> Iterator[PartOff]:
        """Keep a part of a value. Yield what is off once all ranks of the team have theirs."""
        if key not in self._right:
            return
        team = self.teams[rank]
        ready = self._held.setdefault((team[0], key), {})
        ready[rank] = np.array(array)
        if len(ready) < len(team):
            return
        del self._held[team[0], key]
        self.compared += 1
        right, wrong = self._right[key], dict[int, float]()
        # What arrives from an unlike mesh is told by its whole type.
        t = op.outs[result].type
        if op.kind != "reshard":
            t = _over_replicas(self.types[key[2]], t, self.seats[rank][0].sizes)
        for other in team:
            mesh, place = self.seats[other]
            here = [r for r in team if self.seats[r][1] in mesh.group(place, t.partial)] if t.partial else [other]
            together, whole = np.array(right, np.result_type(right, ready[other])), sum(ready[r] for r in here)
            if np.shape(whole) != np.shape(cut(right, t, mesh, place)):
                wrong[other] = float("inf")
                continue
            fill(together, whole, t, mesh, place)
            error = relative_error(together, right)
            if not error <= self.allowed.error:
                wrong[other] = error
        if wrong:
            first = min(wrong)
            mesh, place = self.seats[first]
            yield PartOff(
                key, graph, op, t, first, mesh.coordinates(place), _axes(op, t), max(wrong.values()), self.allowed
            )

    def _judged(self, candidates: Sequence[PartOff], weights: Arrays, batch: Arrays, seed: int) -> PartOff | None:
        """Return the first value that is further off than it moves when all numbers are changed by a rounding."""
        if not candidates:
            return None
        source, u = np.random.default_rng(seed), UNIT_ROUNDOFF["f64"]
        shaken = self._whole_values(
            {name: changed_by(u, np.asarray(array), source) for name, array in weights.items()},
            {name: changed_by(u, np.asarray(array), source) for name, array in batch.items()},
        )
        for off in candidates:
            moved = relative_error(shaken[off.key], self._right[off.key])
            if not off.error <= self.allowed.widened(moved, "what the whole program moves by").error:
                return off
        return None


def _over_replicas(t: TensorType, local: TensorType, sizes: Mapping[str, int]) -> TensorType:
    """Return the type of a value of which replicas have parts: those of an update over replicas are smaller along one
    dimension."""
    for dim in range(t.rank):
        axes = [(*t.axes_of(i), REPLICAS) if i == dim else t.axes_of(i) for i in range(t.rank)]
        split = t.laid(axes, t.partial, [t.blocks_of(i) for i in range(t.rank)])
        if t.local(sizes).shape != local.shape == split.local(sizes).shape:
            return split
    return t


def _axes(op: Op, t: TensorType) -> tuple[str, ...]:
    """Return the axes of a collective, or those along which its result is split or partial."""
    if "over" in op.attrs:
        return axes_over(op.attrs["over"])
    return tuple(dict.fromkeys([*(axis for axes in t.axes for axis in axes), *t.partial]))
