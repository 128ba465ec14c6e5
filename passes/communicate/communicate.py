"""Move values between stages: the pass `communicate` finds the edges, and inserts the sends and receives.

In: a scheduled module of stage graphs. Out: the same with edges and SF, RF, SB, RB actions.

A graph input has one of three sources. It is an input of the module, which every rank that takes it is fed; or another
graph of the same stage makes it; or a graph of another stage returns it, by name: of the same kind in forward and
backward, P or N for what is exchanged once per batch. Only values of the third source travel. One Edge per (source,
destination, phase) carries all of them, in the order in which the source returns them. So a value that skips stages
goes straight from its producer, once per destination. Any other input is an error; one error lists them all.

Each send stands right after the computation that makes its values, and each receive right before the first computation
that takes them. Several of them stand in the order of the other stage's number. Between stages of
one rank nothing is sent. Both ends run the microbatches of one phase in
the same order, so the order on a channel is the same on both. Where stages lie on several ranks, a microbatch goes to
the rank that runs it (ir/schedule.py, Routes).

Edges that `localize` has written, of values that lie unlike on the meshes of two stages, stay as they are. Such values
travel in tiles, and a rank receives from as many others as have what it takes; senders.py chooses them. One that is to
hand on what comes does so right behind its receives.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from penstock.ir.action_kinds import ACTION_KINDS, AGAIN
from penstock.ir.graph import Edge, Graph, Module, Value
from penstock.ir.schedule import (
    HAND_OF,
    MESSAGES,
    PER_BATCH,
    PHASES,
    RECEIVE_OF,
    SEND_OF,
    TAKERS,
    Action,
    Routes,
    Schedule,
)
from penstock.ir.sharding.between_meshes import edge_values, travels_in_tiles
from penstock.ir.sharding.tile_messages import EdgeEnds, TileEnds
from penstock.ir.verify.schedules import taking
from penstock.support.errors import UsageError, VerifyError

from .senders import balanced_senders


@dataclass(frozen=True, slots=True)
class CommunicateOptions:
    """Options of `communicate`, which has none."""


def find_edges(module: Module) -> tuple[Edge, ...]:
    """Return the edges between stages, sorted by phase, source and destination. One VerifyError lists every input
    without a source."""
    problems: list[str] = []
    edges: list[Edge] = []
    written = {(edge.src, edge.dst, edge.phase): edge for edge in module.edges}
    for phase in PHASES:
        graphs = {s.index: g for s in module.stages if (g := module.stage_graph(s.index, phase))}
        makers = _makers(graphs, problems)
        wanted: dict[tuple[int, int], set[str]] = {}
        takers = [
            (s.index, g) for s in module.stages for kind in TAKERS[phase] if (g := module.stage_graph(s.index, kind))
        ]
        for stage, graph in takers:
            for value in graph.ins:
                if _is_local(module, stage, phase, value):
                    continue
                source = makers.get(value.name)
                if source is None and phase in PER_BATCH:
                    continue  # another phase hands it out
                if source == stage and phase in PER_BATCH:
                    continue
                if source is None or source == stage:
                    problems.append(
                        f"@{graph.name} takes {value}, which is no input of the module, "
                        f"{_elsewhere(module, stage, phase)}"
                    )
                    continue
                sent = next(v for v in graphs[source].outs if v.name == value.name)
                if sent.type != value.type and (source, stage, phase) not in written:
                    problems.append(f"@{graph.name} takes {value}, but @{graphs[source].name} returns {sent}")
                wanted.setdefault((source, stage), set()).add(value.name)
        for (src, dst), names in sorted(wanted.items()):
            edge = Edge(src, dst, phase, tuple(v for v in graphs[src].outs if v.name in names))
            known = written.get((src, dst, phase), edge)
            if edge_values(module, known, src) != edge.values:
                problems.append(
                    f"edge {src}>{dst} {phase} carries {known.values}, @{graphs[src].name} returns {edge.values}"
                )
            edges.append(known)
    if problems:
        raise VerifyError("\n  ".join(problems), where=f"communicate @{module.name}")
    return tuple(edges)


def _makers(graphs: dict[int, Graph], problems: list[str]) -> dict[str, int]:
    makers: dict[str, int] = {}
    for stage, graph in graphs.items():
        for value in graph.outs:
            if makers.setdefault(value.name, stage) != stage:
                problems.append(
                    f"%{value.name} is returned by both @{graphs[makers[value.name]].name} and @{graph.name}, "
                    "expected one maker"
                )
    return makers


def _is_local(module: Module, stage: int, phase: str, value: Value) -> bool:
    """Return whether the rank has the value without receiving it."""
    if value.name in module.given_names(stage):
        return True
    savers = (module.stage_graph(stage, kind) for kind in ACTION_KINDS[phase].saved_by)
    return any(v.name == value.name for saver in savers if saver is not None for v in saver.saved)


def _elsewhere(module: Module, stage: int, phase: str) -> str:
    returned = f"not returned by the {ACTION_KINDS[phase].words} graph of another stage"
    savers = (k for k in ACTION_KINDS[phase].saved_by if k != AGAIN or module.stage_graph(stage, k))
    saved = "".join(f"not saved by @s{stage}.{kind} " for kind in savers)
    return f"{saved}and {returned}"


def is_connected(module: Module) -> bool:
    """Return whether sends and receives stand in the schedule, or no values travel between ranks."""
    edges_are_final = bool(module.edges) and not all(map(travels_in_tiles, module.edges))
    return edges_are_final or (
        module.schedule is not None and any(a.kind in MESSAGES for a in module.schedule.actions())
    )


def communicate(module: Module, options: CommunicateOptions = CommunicateOptions()) -> Module:
    """Find the values that travel between stages, and put sends and receives around the computations."""
    if module.schedule is None:
        raise UsageError("the module has no schedule", where="communicate", hint="run the schedule pass first")
    if is_connected(module):
        raise UsageError(
            "the module already has edges", where="communicate", hint="the pass runs once, after weight-versions"
        )
    edges = find_edges(module)
    if not edges:
        return module
    arriving: dict[tuple[int, str], list[tuple[str, int]]] = {}
    leaving: dict[tuple[int, str], list[int]] = {}
    for edge in edges:
        arriving.setdefault((edge.dst, taking(module, edge.dst, edge.phase, edge.values)[0]), []).append(
            (edge.phase, edge.src)
        )
        leaving.setdefault((edge.src, edge.phase), []).append(edge.dst)

    peers, packed = _Peers(module, edges, module.schedule), bool(module.packs)

    def surround(rank: int, action: Action) -> Iterator[Action]:
        at = (action.stage, action.kind)
        for phase, source in sorted(arriving.get(at, ())):
            for peer in peers.sources(rank, (source, action.stage, phase), action.mb):
                named = packed or peers.hands_on(rank, peer)
                yield Action(RECEIVE_OF[phase], action.stage, action.mb, None, peer, source if named else None)
            for peer in peers.fellows(rank, (source, action.stage, phase), action.mb):
                yield Action(HAND_OF[phase], action.stage, action.mb, None, peer, source)
        yield action
        for target in sorted(leaving.get(at, ())):
            for peer in peers.targets(rank, (action.stage, target, action.kind), action.mb):
                yield Action(SEND_OF[action.kind], action.stage, action.mb, None, peer, target if packed else None)

    return module.but(edges=edges, schedule=module.schedule.rewrite_ranks(surround))


class _Peers:
    """The ranks that messages come from and go to."""

    def __init__(self, module: Module, edges: tuple[Edge, ...], schedule: Schedule) -> None:
        self._module, self._routes, self._devices = module, Routes(schedule), module.rank_devices()
        self._tiled = {(e.src, e.dst, e.phase): e for e in edges if travels_in_tiles(e)}
        self._chosen: dict[tuple[EdgeEnds, tuple[int, ...], tuple[int, ...]], Mapping[int, tuple[int, ...]]] = {}

    def sources(self, rank: int, ends: EdgeEnds, number: int) -> list[int]:
        """Return the ranks that a rank receives from, in order."""
        source, _, phase = ends
        if (edge := self._tiled.get(ends)) is None:
            return [peer for peer in (self._routes.source(rank, phase, source, number),) if peer != rank]
        teams = self._routes.source_team(rank, phase, source, number), self._routes.team(rank)
        if (ends, *teams) not in self._chosen:
            both = TileEnds(edge, self._module.mesh_of(edge.src), self._module.mesh_of(edge.dst))
            self._chosen[ends, *teams] = balanced_senders(both, self._module.cluster, teams, self._devices)
        return list(self._chosen[ends, *teams][rank])

    def hands_on(self, rank: int, peer: int) -> bool:
        """Return whether a rank that sends to another is one of its team."""
        return peer in self._routes.team(rank)

    def fellows(self, rank: int, ends: EdgeEnds, number: int) -> list[int]:
        """Return the ranks of its team that a rank hands on to what it receives."""
        if ends not in self._tiled:
            return []
        return [other for other in self._routes.team(rank) if rank in self.sources(other, ends, number)]

    def targets(self, rank: int, ends: EdgeEnds, number: int) -> list[int]:
        """Return the ranks that a rank sends to."""
        source, target, phase = ends
        if ends not in self._tiled:
            peers = self._routes.targets(rank, phase, source, target, number)
            return [peer for peer in peers if peer != rank]
        takers = self._routes.takers(phase, target, number)
        return [taker for taker in takers if rank in self.sources(taker, ends, number)]
