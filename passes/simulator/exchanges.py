"""The time of collectives inside stage graphs, over the links of the groups that do them.

In: a module in local form, and the routes between its ranks. Out: for every rank and graph the seconds of its
collectives, and the ranks that run a graph together.

Ranks exchange directly: each sends every other one of its group its part. All groups of a team do that at once. So an
exchange takes its latencies, and the time of the link or NIC that has most bytes to move. Of n bytes on each of k ranks
a rank sends to each other one

    all_reduce        n/k to be added, then n/k of the sum: twice the latency
    reduce_scatter    n/k          all_to_all    n/k
    all_gather        n            shift         n, to one rank

A collective begins where it stands, and is waited for where its result is first read. So kernels between the two hide
it, in the order in which they run: the *exposed* part is what they leave. Between ranks that share memory the
processor of a rank moves the bytes itself, and only the latency can be hidden. Collectives of a rank move one after
another.

Known limits: what hides a collective is priced by the rates of the device, also where graphs were measured. Teams do
not compete for links with each other or with messages. The processor time of sockets is not counted.

`Gatherings` is for the simulation: who stands at a computation that several ranks run together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import NamedTuple

from penstock.ir.cluster.cluster import Device
from penstock.ir.graph import Graph, Mesh, Module, Op
from penstock.ir.memory.workspace import kernels_in_order
from penstock.ir.ops import EXCHANGES, axes_over, integer
from penstock.ir.schedule import COMPUTE
from penstock.passes.costs.prices import GraphCost, timed_kind

from .machine import Route

Routes = Callable[[int, int], Route]


def _collectives(graph: Graph) -> list[Op]:
    return [op for op in graph.ops if op.kind in EXCHANGES]


def _sent(op: Op, group: Sequence[int]) -> Iterator[tuple[int, int, float]]:
    """Yield the bytes that each rank of a group sends to each other one: from, to, bytes."""
    size, count = float(op.ins[0].type.nbytes), len(group)
    if op.kind == "shift":
        by = integer(op.attrs["by"]) % count
        yield from ((rank, group[(i + by) % count], size) for i, rank in enumerate(group) if by)
        return
    each = {"all_reduce": 2 * size / count, "all_gather": size}.get(op.kind, size / count)
    yield from ((a, b, each) for a in group for b in group if a != b)


class CollectiveTime(NamedTuple):
    """The seconds of a collective: those in which the rank's processor copies, those beside it, and the part of these
    that no kernel hides."""

    copying: float
    beside: float
    exposed: float = 0.0

    @property
    def whole(self) -> float:
        """The seconds from begin to end."""
        return self.copying + self.beside

    @property
    def added(self) -> float:
        """The seconds that it adds to its graph."""
        return self.copying + self.exposed


def _seconds(op: Op, mesh: Mesh, places: Sequence[int], ranks: Sequence[int], route: Routes) -> CollectiveTime:
    """Return the seconds of a collective that the ranks at some places do at once. `ranks` are those of all places."""
    groups = dict.fromkeys(mesh.group(place, axes_over(op.attrs["over"])) for place in places)
    moved: dict[tuple[bool, str], float] = {}
    speeds: dict[str, float] = {}
    latency = 0.0
    for group in groups:
        for source, target, count in _sent(op, [ranks[place] for place in group]):
            way = route(source, target)
            latency = max(latency, way.latency)
            for name, speed in way.shares:
                speeds[name] = speed
                moved[way.shared, name] = moved.get((way.shared, name), 0.0) + count
    rounds = 2 if op.kind == "all_reduce" else 1
    copying, travelling = (
        max((count / speeds[name] for (near, name), count in moved.items() if near is shared), default=0.0)
        for shared in (True, False)
    )
    return CollectiveTime(copying, rounds * latency + travelling)


def _exposed(graph: Graph, times: Mapping[str, CollectiveTime], device: Device | None) -> dict[str, CollectiveTime]:
    """Return the seconds of the collectives of a graph by their results, with what its kernels leave exposed."""
    priced = GraphCost.of(graph)
    seconds = priced.kernel_seconds(device) if device is not None else [0.0] * len(priced.kernels)
    lasts = {id(op): s for kernel, s in zip(priced.kernels, seconds, strict=True) for op in kernel.ops[:1]}
    ends: dict[str, float] = {}
    result = dict(times)
    now = moving = 0.0

    def wait(name: str) -> None:
        nonlocal now
        end = ends.pop(name)
        result[name] = times[name]._replace(exposed=max(0.0, end - now))
        now = max(now, end)

    for ops, reads in kernels_in_order(priced.chosen):
        for name in [name for name in ends if name in reads]:
            wait(name)
        now += lasts.get(id(ops[0]), 0.0)
        if ops[0].kind in EXCHANGES:
            name = ops[0].outs[0].name
            now += times[name].copying
            moving = ends[name] = max(now, moving) + times[name].beside
    for name in list(ends):
        wait(name)
    return result


def collective_times(
    module: Module, route: Routes, rank: int, kind: str, stage: int | None = None
) -> dict[str, CollectiveTime]:
    """Return the seconds of the collectives of a rank's graph, by the names of their results; of its first stage, if
    none is given."""
    stage = module.rank_stages()[rank] if stage is None else stage
    ranks = module.ranks_of(stage)
    graph, mesh = module.stage_graph(stage, kind), module.mesh_of(stage)
    ops = _collectives(graph) if graph is not None else []
    if graph is None or not ops:
        return {}
    team = next(places for places in mesh.teams() if ranks.index(rank) in places)
    device = None if module.cluster is None else module.cluster.device(module.rank_devices()[rank])
    return _exposed(graph, {op.outs[0].name: _seconds(op, mesh, team, ranks, route) for op in ops}, device)


def exchange_seconds(module: Module, route: Routes) -> dict[tuple[int, str], float]:
    """Return the seconds that the collectives of each graph add on every rank, by rank and `timed_kind`; none where a
    graph has none."""
    seconds: dict[tuple[int, str], float] = {}
    for rank, stages in enumerate(module.rank_packs()):
        for stage, kind in product(stages, COMPUTE):
            if times := collective_times(module, route, rank, kind, stage):
                seconds[rank, timed_kind(module, stage, kind)] = sum(time.added for time in times.values())
    return seconds


def collective_seconds(module: Module, stage: int, op: Op, route: Routes) -> float:
    """Return the seconds of one collective of a stage by itself, of the team that takes longest."""
    return mesh_seconds(module.mesh_of(stage), op, route, module.ranks_of(stage))


def mesh_seconds(mesh: Mesh, op: Op, route: Routes, ranks: Sequence[int] = ()) -> float:
    """Return the same on a mesh. Its places are the ranks, where no others are given."""
    ranks = ranks or range(len(mesh.devices))
    return max(_seconds(op, mesh, team, ranks, route).whole for team in mesh.teams())


def team_seconds(op: Op, mesh: Mesh, route: Routes) -> float:
    """Return the seconds of one collective of a mesh that is one team, whose ranks are the places on it."""
    places = range(len(mesh.devices))
    return _seconds(op, mesh, places, places, route).whole


class Gatherings:
    """Ranks that wait for each other in front of computations. They run the computations of a kind that bring them
    together in one order, and each as many; other actions may differ, as those of replicas with unequal shares do.
    `together` are the ranks of each, by rank, stage and kind."""

    def __init__(self, together: Mapping[tuple[int, int, str], tuple[int, ...]]) -> None:
        self._together = together
        # By rank, stage and kind, the place of the computation that a rank came to last, and how many it came to.
        self._last: dict[tuple[int, int, str], tuple[int, int]] = {}
        # By the first of the ranks, stage, kind and number of the computation: the places of the ranks that are there.
        self._standing: dict[tuple[int, int, str, int], dict[int, int]] = {}

    def come(self, rank: int, position: int, stage: int, kind: str) -> Mapping[int, int] | None:
        """Accept a rank at a computation. Return None while others have yet to come, else the ranks that wait for it,
        with the places of their programs that they are at."""
        ranks = self._together.get((rank, stage, kind), ())
        if len(ranks) < 2:
            return {}
        place, number = self._last.get((rank, stage, kind), (-1, 0))
        if place != position:
            number += 1
            self._last[rank, stage, kind] = position, number
        standing = self._standing.setdefault((ranks[0], stage, kind, number), {})
        if len(standing) == len(ranks):
            return {}
        standing[rank] = position
        return {other: at for other, at in standing.items() if other != rank} if len(standing) == len(ranks) else None
