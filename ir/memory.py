"""Predicted memory of every rank. In: a module with a schedule. Out: bytes by purpose, and the peak of their sum.

What is counted, per stage:
    weights      parameters, times the versions kept              gradients, state, buffers    one copy each
    activations  what the forward graph saves (inputs of the module among it), for each microbatch between its F and its D; where weight
                 gradients are apart (W), what W takes of it and of B, until W
    boundary     values that came from other stages or go to them, from their receive or computation until they are consumed or sent;
                 what is exchanged once per batch, until the update
    workspace    temporaries inside one graph: the peak of one walk over its operations, each value living until its last use
After F and its sends a microbatch holds exactly what F saves, after B and its sends what W takes, after W nothing: that is the contract with the runtime.
Known limits: fused kernels and the planner of a backend need less workspace; sends that linger and the allocator's rounding need more.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .graph import GRAD, PARAM, STATE, Graph, Module, Value
from .schedule import COMPUTE, PHASES, Action

BATCHES = 3


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one stage; `peak` is the largest sum at one moment, `in_flight` the most microbatches that hold activations."""

    stage: int
    weights: int
    gradients: int
    state: int
    buffers: int
    activations: int
    boundary: int
    workspace: int
    peak: int
    in_flight: int

    @property
    def fixed(self) -> int:
        return self.weights + self.gradients + self.state + self.buffers


def measure_memory(module: Module) -> dict[int, Memory]:
    """One row per rank. A schedule without drops counts as one that drops after the last computation of a microbatch."""
    assert module.schedule is not None, "memory needs a schedule"
    table = {}
    for rank, program in module.schedule.ranks.items():
        stages = {a.stage for a in (*program.start, *program.batch)}
        assert len(stages) == 1, f"rank {rank} runs stages {sorted(stages)}, expected one"
        table[rank] = _stage_memory(module, rank, stages.pop())
    return table


def _stage_memory(module: Module, rank: int, stage: int) -> Memory:
    assert module.schedule is not None
    graphs = {kind: g for kind in COMPUTE if (g := module.stage_graph(stage, kind))}
    fixed = {"weights": 0, "gradients": 0, "state": 0, "buffers": 0}
    for name in {op.var for graph in graphs.values() for op in graph.ops if "var" in op.attrs}:
        var = module.vars[name]
        fixed[{PARAM: "weights", GRAD: "gradients", STATE: "state"}.get(var.role, "buffers")] += var.type.nbytes * var.versions
    workspace = {kind: measure_workspace(graph) for kind, graph in graphs.items()}
    walk = _Walk(module, stage, graphs, workspace)
    drops = any(a.kind == "D" for a in (*module.schedule.ranks[rank].start, *module.schedule.ranks[rank].batch))
    for action in module.schedule.expand(rank, BATCHES):
        walk.step(action, drops)
    peak = sum(fixed.values()) + walk.peak
    return Memory(
        stage,
        **fixed,
        activations=walk.activations,
        boundary=walk.boundary,
        workspace=max(workspace.values(), default=0),
        peak=peak,
        in_flight=walk.in_flight,
    )


class _Walk:
    """Follows one rank's program and counts what lives: per microbatch, values that are saved and values that are passing through."""

    def __init__(self, module: Module, stage: int, graphs: dict[str, Graph], workspace: dict[str, int]) -> None:
        self.graphs, self.workspace = graphs, workspace
        self.edges = {(e.phase, e.src, e.dst): e.values for e in module.edges}
        self.saved = {v.name for kind in ("F", "B") if kind in graphs for v in graphs[kind].saved}
        # What stays after each computation, beside what is to be sent: what the later ones take.
        for_weights = {v.name for v in graphs["W"].ins} if "W" in graphs else set()
        self.kept = {"F": {v.name for v in graphs["F"].saved} if "F" in graphs else set(), "B": for_weights, "W": set[str]()}
        self.sent = {kind: {v.name for e in module.edges if (e.src, e.phase) == (stage, kind) for v in e.values} for kind in PHASES}
        self.targets = {kind: sum((e.src, e.phase) == (stage, kind) for e in module.edges) for kind in PHASES}
        self.last = next((kind for kind in ("W", "B") if kind in graphs), "F")
        self.held: dict[int, dict[str, int]] = {}
        self.sends: dict[tuple[str, int], int] = {}
        self.now = {True: 0, False: 0}
        self.activations = self.boundary = self.peak = self.in_flight = 0

    def step(self, action: Action, drops: bool) -> None:
        kind, mb = action.kind, action.mb
        if kind in ("RF", "RB", "RP", "RN"):
            assert action.peer is not None
            self._hold(action.holder, self.edges[kind[1], action.peer, action.stage])
        elif kind in ("F", "B", "W"):
            graph = self.graphs[kind]
            self._hold(mb, graph.ins)
            self._hold(mb, graph.results)
            self.peak = max(self.peak, sum(self.now.values()) + self.workspace[kind])
            self._keep(mb, self.kept[kind] | self.sent.get(kind, set()))
            if not drops and kind == self.last and not self.targets.get(kind):
                self._keep(mb, set())
        elif kind in ("SF", "SB"):
            phase = kind[1]
            self.sends[phase, mb] = self.sends.get((phase, mb), 0) + 1
            if self.sends[phase, mb] == self.targets[phase]:
                self._keep(mb, self.kept[phase] if drops or self.last != phase else set())
        elif kind == "D":
            self._keep(mb, set())
        elif kind in ("P", "N"):
            self._hold(action.holder, self.graphs[kind].results)
            self.peak = max(self.peak, sum(self.now.values()) + self.workspace[kind])
        elif kind == "U":
            self.peak = max(self.peak, sum(self.now.values()) + self.workspace["U"])
            self._keep(action.holder, set())
        self.activations = max(self.activations, self.now[True])
        self.boundary = max(self.boundary, self.now[False])
        self.peak = max(self.peak, sum(self.now.values()))
        self.in_flight = max(self.in_flight, sum(mb >= 0 for mb in self.held))

    def _hold(self, mb: int, values: Iterable[Value]) -> None:
        held = self.held.setdefault(mb, {})
        for value in values:
            if value.name not in held:
                held[value.name] = value.type.nbytes
                self.now[value.name in self.saved] += value.type.nbytes

    def _keep(self, mb: int, names: set[str]) -> None:
        held = self.held.get(mb, {})
        for name in [n for n in held if n not in names]:
            self.now[name in self.saved] -= held.pop(name)
        if not held:
            self.held.pop(mb, None)


def measure_workspace(graph: Graph) -> int:
    """Peak bytes of temporaries when every operation runs on its own. Variables, inputs and results have buffers elsewhere."""
    outside = {v.name for v in (*graph.ins, *graph.results)}
    for op in graph.ops:
        if op.kind in ("read", "take"):
            outside |= {v.name for v in op.outs}
        elif op.kind == "write":
            outside |= {v.name for v in op.ins}
    last = {v.name: i for i, op in enumerate(graph.ops) for v in (*op.ins, *op.outs)}
    now = most = 0
    for i, op in enumerate(graph.ops):
        now += sum(v.type.nbytes for v in op.outs if v.name not in outside)
        most = max(most, now)
        now -= sum(v.type.nbytes for v in {*op.ins, *op.outs} if v.name not in outside and last[v.name] == i)
    return most
