"""The costs of cutting a chain: seconds of operations on the devices of each stage, and of messages over each cut.

Where stages have a mesh each, an operation takes on each of them what the part of one device takes. What travels counts
as on the mesh that splits it least.

A microbatch takes c seconds to go over a cut and for its gradient to come back, latency and bytes. It keeps the busiest
link or card of the boundary for l seconds, without latency, each direction by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise, repeat
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from penstock.ir.action_kinds import BACKWARD, UPDATE
from penstock.ir.cluster.cluster import Cluster, Device, Link
from penstock.ir.graph import Graph, Module, Op, Value
from penstock.ir.ops import OPS
from penstock.passes.communicate.wire import travelling
from penstock.passes.costs.prices import GraphCost, Transfer, cost

from .chain import chain_of, crossing_bytes, forward_graph, moving_users, params_behind, readers, tied_bytes
from .ideals import OperationWork
from .team_costs import TeamSeconds

Array = npt.NDArray[np.float64]
T = TypeVar("T")


def _slowest_seconds(
    module: Module,
    devices: Sequence[Sequence[Device]],
    shares: Sequence[Sequence[int]],
    exchanges: Sequence[TeamSeconds],
) -> list[list[Array]]:
    """Return for every stage the seconds of each operation of the chain in the forward graph and in the backward graph.
    Of several devices the slowest for its share of the whole model counts, with collectives of the stage."""
    forward, backward, chain = forward_graph(module), module.graphs.get(BACKWARD), chain_of(module)
    index, count = _makers(chain), len(chain)
    microbatches, position = sum(shares[0]), {v.name: i for v, i in index.items()}
    places = [(GraphCost(forward), [index.get(op.outs[0]) if op.outs else None for op in forward.ops])]
    if backward is not None:
        where = [position[str(op.attrs["of"])] if "of" in op.attrs else None for op in backward.ops]
        places.append((GraphCost(backward), where))

    def work(device: Device, share: int, exchanged: TeamSeconds) -> list[Array]:
        times = [np.zeros(count) for _ in places]
        for seconds, (graph, where) in zip(times, places, strict=True):
            moved = exchanged.get(graph.graph.name, repeat(0.0))
            for i, spent, more in zip(where, graph.op_seconds(device), moved, strict=False):
                if i is not None:
                    seconds[i] += (spent + more) * (share / microbatches)
        return times

    return [
        max(map(work, *pair, repeat(exchanged)), key=lambda times: float(sum(map(np.sum, times))))
        for *pair, exchanged in zip(devices, shares, exchanges, strict=True)
    ]


def _of_stages(parts: Sequence[Module], seconds: Callable[[Module], Sequence[T]]) -> list[T]:
    """Return what each stage takes, of the seconds that all stages take with the part of the module that is its own."""
    known = {id(part): seconds(part) for part in {id(part): part for part in parts}.values()}
    return [known[id(part)][stage] for stage, part in enumerate(parts)]


def _makers(chain: Sequence[Op]) -> dict[Value, int]:
    return {v: i for i, op in enumerate(chain) for v in op.outs}


def _users(chain: Sequence[Op], index: Mapping[Value, int]) -> dict[Value, set[int]]:
    """Return the operations that make and that read each value of a chain."""
    users: dict[Value, set[int]] = {}
    for i, op in enumerate(chain):
        for value in op.ins:
            if value in index:
                users.setdefault(value, {index[value]}).add(i)
    return users


def _messages(parts: Sequence[Module], wire: str) -> dict[str, float]:
    """Return the bytes of each value of a chain as it travels, in the largest of these parts."""
    messages: dict[str, float] = {}
    for part in parts:
        for value in (value for op in chain_of(part) for value in op.outs):
            messages[value.name] = max(messages.get(value.name, 0.0), float(travelling(value.type, wire)))
    return messages


def _seconds_of_variables(
    graph: Graph | None, first: Mapping[str, int], count: int, devices: Sequence[Sequence[Device]]
) -> list[Array]:
    """Return for every stage the seconds of a graph's work on gradients and state, at the operation that reads their
    parameter `first`: updates, and sums of gradients. Of several devices the slowest counts."""
    if graph is None:
        return [np.zeros(count) for _ in devices]
    owner: dict[Value, str] = {}
    where: list[int | None] = []
    for op in graph.ops:
        names = {op.var, op.var.rpartition(".")[0]} if OPS[op.kind].effect else {owner.get(v, "") for v in op.ins}
        name = next((name for name in sorted(names) if name in first), "") if "of" not in op.attrs else ""
        owner |= dict.fromkeys(op.outs, name)
        where.append(first.get(name))
    priced, known = GraphCost(graph), dict[Device, Array]()
    for device in {device for group in devices for device in group}:
        known[device] = np.zeros(count)
        for i, spent in zip(where, priced.op_seconds(device), strict=True):
            if i is not None:
                known[device][i] += spent
    return [max((known[device] for device in group), key=np.sum) for group in devices]


def backward_edges(backward: Graph, index: Mapping[Value, int]) -> set[tuple[int, int]]:
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


def _busiest(cluster: Cluster, source: Device, target: Device, trips: int) -> float:
    """Return the seconds that a byte over a cut, which goes one way of `trips`, keeps the busiest link or card."""
    if source.name == target.name:
        return 0.0
    used: dict[tuple[str, float], float] = {}
    for way, (a, b) in enumerate(((source, target), (target, source))[:trips]):
        path = cluster.path(a.name, b.name)
        for share in ((f"way {way}", path.bandwidth), *path.shares):
            used[share] = used.get(share, 0.0) + 1.0 / trips
    return max(part / rate for (_, rate), part in used.items())


class ChainCosts:
    """Prefix sums of operation times per stage; transfer times and loads of links per cut and pair of neighbours."""

    def __init__(
        self,
        parts: Sequence[Module],
        devices: Sequence[Sequence[Device]],
        shares: Sequence[Sequence[int]],
        cluster: Cluster,
        wire: str,
        exchanges: Sequence[TeamSeconds] = (),
    ) -> None:
        module, unlike = parts[0], list({id(part): part for part in parts}.values())
        self.chain = chain = chain_of(module)
        microbatches, index = sum(shares[0]), _makers(chain)
        self.params = params_behind(module)
        backward = module.graphs.get(BACKWARD)
        exchanges = exchanges or [{}] * len(parts)
        slowest = _of_stages(parts, lambda part: _slowest_seconds(part, devices, shares, exchanges))
        self.forward = [seconds[0] for seconds in slowest]
        reading = readers(chain, self.params)
        first = {name: positions[0] for name, positions in reading.items()}

        def on_variables(kind: str) -> list[Array]:
            return _of_stages(
                parts, lambda part: _seconds_of_variables(part.graphs.get(kind), first, len(chain), devices)
            )

        self.updates, sums = on_variables(UPDATE), on_variables(BACKWARD)
        self.before = [np.concatenate([[0.0], np.cumsum(sum(seconds))]) for seconds in slowest]
        # What work on variables takes besides, for a microbatch and with the updates of a batch spread over all.
        self.sums = [spent * max(share) / microbatches for spent, share in zip(sums, shares, strict=True)]
        self.besides = [added + spent / microbatches for added, spent in zip(self.sums, self.updates, strict=True)]
        self.steady = [
            before + np.concatenate([[0.0], np.cumsum(besides)])
            for before, besides in zip(self.before, self.besides, strict=True)
        ]
        trips = 2 if backward is not None else 1
        crossing = np.max([crossing_bytes(chain_of(part), wire) for part in unlike], axis=0) * trips
        if backward is not None:
            tied = [tied_bytes(part, chain, self.params) for part in unlike]
            crossing += np.max(tied, axis=0) * (2.0 / microbatches)
        self._trips, self._links, self._busy = trips, [(0.0, list[Link]())], [0.0]
        for (senders, a), (receivers, b) in pairwise(zip(devices, shares, strict=True)):
            links = [cluster.message_link(x.name, y.name) for x in senders for y in receivers if x.name != y.name]
            self._links.append((max(*a, *b) / microbatches if max(len(a), len(b)) > 1 else 1.0, links))
            self._busy.append(max(_busiest(cluster, x, y, trips) for x in senders for y in receivers))
        self.transfer = [
            np.array([self.travel(stage, float(n)) if stage else 0.0 for n in crossing])
            for stage in range(len(devices))
        ]
        self.loads = [crossing * (part * busy) for (part, _), busy in zip(self._links, self._busy, strict=True)]
        users, messages = _users(chain, index), _messages(unlike, wire)
        self._values = [(frozenset(where), messages[v.name] * trips) for v, where in users.items()]
        self._edges = [(index[v], i) for v, where in users.items() for i in where if i != index[v]]
        if backward is not None:
            if any(op.kind == "reshard" for graph in (forward_graph(module), backward) for op in graph.ops):
                self._edges += sorted(backward_edges(backward, index) - set(self._edges))
            self._values += [
                (frozenset(where), max(part.vars[n].type.nbytes for part in unlike) * 2.0 / microbatches)
                for n, where in reading.items()
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
        computed = float(sum(seconds[i] for i, s in enumerate(stages) if s == stage))
        return computed, self.travel(stage, self._parted(stage, stages)) if stage else 0.0

    def load(self, stage: int, stages: Sequence[int]) -> float:
        """Return the seconds that a microbatch keeps the busiest link or card between a stage and the one before it."""
        return self._parted(stage, stages) * self._links[stage][0] * self._busy[stage]

    def one_way(self, stage: int, stages: Sequence[int]) -> float:
        """Return the bytes of a message between a stage and the one before it."""
        return self._parted(stage, stages) / self._trips

    def _parted(self, stage: int, stages: Sequence[int]) -> float:
        """Return the bytes that travel between a stage and the one before it."""
        return sum(n for where, n in self._values if len({stages[i] >= stage for i in where}) > 1)
