"""Predicted memory of every rank. In: a module with a schedule. Out: bytes by purpose, and the peak of their sum.

What is counted, per stage:
    weights      parameters, times the versions kept              gradients, state, buffers    one copy each
    activations  what the forward graph saves (inputs of the module among it), for each microbatch between its F and its D; where weight
                 gradients are apart (W), what W takes of it and of B, until W
    boundary     values that came from other stages or go to them, from their receive or computation until they are consumed or sent;
                 what is exchanged once per batch, until the update
    data         batches of the stage's inputs that wait in host memory; not counted for stages on GPUs
    workspace    temporaries inside one graph (storage.py), and blocks that nobody uses at the moment
After F and its sends a microbatch holds exactly what F saves, after B and its sends what W takes, after W nothing: that is the contract with the
runtime.

Results and temporaries of compiled graphs come from an allocator that keeps a freed block for the next one of exactly that size. So what it
holds is, for each size, the most blocks of that size at once; the walk counts them. Memory of received values and of inputs is used again in the same
way. Receives are posted ahead, and have their memory from then on.
What is sent stays until the next send of its channel.
Known limits: scratch memory inside kernels and rounding to pages need more; small values that share a message (parcels.py) are counted as if each had
memory of its own. The interpreter and its libraries are not counted: a worker measures them before it loads its variables.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .graph import GRAD, PARAM, STATE, Graph, Module, Value
from .schedule import COMPUTE, PHASES, RECEIVES, Action, Schedule
from .storage import planned_blocks

BATCHES = 3
# The runtime posts the receives among the next so many actions (a batch action with its sends, receives and drop is at most five of them), and
# at most so many of one channel: one that arrives while its predecessor is worked on, one to follow.
LOOK_AHEAD = 10
# Batches handed to the workers and not finished yet. Under 2bw the update of a batch needs the one after it; two more keep the pipe full.
BATCHES_AHEAD = 4
POSTED = 2


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one stage; `peak` is the largest sum at one moment, `in_flight` the most microbatches that hold activations. `workspace` is what
    is held at that moment beside values of microbatches and variables."""

    stage: int
    weights: int
    gradients: int
    state: int
    buffers: int
    activations: int
    boundary: int
    data: int
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
    taken = {v.name for graph in graphs.values() for v in graph.ins}
    batch = module.schedule.microbatches * sum(v.type.nbytes for v in module.data_inputs if v.name in taken)
    # One more than are ahead: a batch counts as finished when the loss is known, and stages before that one still work on it.
    data = 0 if _on_gpu(module, rank) else (BATCHES_AHEAD + 1) * batch
    walk = _Walk(module, stage, graphs)
    for _ in walk.follow(module.schedule, rank, BATCHES):
        pass
    return Memory(
        stage,
        **fixed,
        activations=walk.activations,
        boundary=walk.boundary,
        data=data,
        workspace=walk.workspace,
        peak=sum(fixed.values()) + data + walk.peak,
        in_flight=walk.in_flight,
    )


def memory_curve(module: Module, rank: int, batches: int) -> Iterator[tuple[Action, int, int]]:
    """After each action of a run: bytes that live then, and bytes that the process holds (freed blocks of results and messages are kept for the next).
    With variables and data, as `measure_memory` counts them; temporaries of a graph are held from its first call on, and live during it."""
    assert module.schedule is not None, "memory needs a schedule"
    program = module.schedule.ranks[rank]
    stage = next(a.stage for a in (*program.start, *program.batch))
    row = _stage_memory(module, rank, stage)
    walk = _Walk(module, stage, {kind: g for kind in COMPUTE if (g := module.stage_graph(stage, kind))})
    for action in walk.follow(module.schedule, rank, batches):
        values = sum(walk.now.values()) + walk.coming
        yield action, row.fixed + row.data + values, row.fixed + row.data + sum(pool.bytes for pool in walk.pools.values())


def _on_gpu(module: Module, rank: int) -> bool:
    place = module.rank_devices()[rank]
    return module.cluster is not None and any(d.name == place and d.kind == "cuda" for d in module.cluster.devices)


class _Pool:
    """Blocks by size: those in use, and how many there were at most, which is how many there are."""

    def __init__(self) -> None:
        self.used: Counter[int] = Counter()
        self.most: Counter[int] = Counter()
        self.bytes = 0

    def change(self, size: int, sign: int) -> None:
        """Take a block (1), or give it back (-1)."""
        self.used[size] += sign
        if self.used[size] > self.most[size]:
            self.most[size] += 1
            self.bytes += size


class _Walk:
    """Follows one rank's program and counts what lives: per microbatch, values that are saved and values that are passing through."""

    def __init__(self, module: Module, stage: int, graphs: dict[str, Graph]) -> None:
        self.graphs, self.homes = graphs, module.rank_stages()
        self.blocks = {kind: planned_blocks(graph) for kind, graph in graphs.items()}
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
        # Memory of results and temporaries, of inputs of the module, and of received values; and which of these a value is in.
        self.pools = {"made": _Pool(), "fed": _Pool(), "received": _Pool()}
        self.pool_of = dict.fromkeys((v.name for v in module.inputs), "fed")
        self.pool_of |= dict.fromkeys((v.name for graph in graphs.values() for v in graph.results), "made")
        self.posted: dict[tuple[str, int], set[int]] = {}
        self.lingering: dict[tuple[str, int], list[int]] = {}
        self.coming = 0  # bytes of messages that may come before their action
        self.activations = self.boundary = self.workspace = self.peak = self.in_flight = 0

    def follow(self, schedule: Schedule, rank: int, batches: int) -> Iterator[Action]:
        """Run through the program of a rank; each action is handed out when it is done."""
        actions = list(schedule.expand(rank, batches))
        drops = any(a.kind == "D" for a in actions)
        others = [action for action in actions if action.kind != "D"]
        done = 0
        for action in actions:
            for later in others[done : done + 1 + LOOK_AHEAD]:
                self.post(later)
            self.step(action, drops)
            done += action.kind != "D"
            yield action

    def post(self, action: Action) -> None:
        """A receive that lies ahead: from now on there is memory for it, unless its channel has enough."""
        if action.kind not in RECEIVES:
            return
        assert action.peer is not None
        posted = self.posted.setdefault((action.kind, action.peer), set())
        if action.mb not in posted and len(posted) < POSTED:
            posted.add(action.mb)
            self._message(action, 1)

    def _message(self, action: Action, sign: int) -> None:
        """Memory of a message is there, or is that of values of its microbatch from now on."""
        assert action.peer is not None
        for value in self.edges[action.kind[1], self.homes[action.peer], action.stage]:
            self.coming += sign * value.type.nbytes
            self.pools["received"].change(value.type.nbytes, sign)

    def step(self, action: Action, drops: bool) -> None:
        kind, mb = action.kind, action.mb
        if kind in RECEIVES:
            assert action.peer is not None
            if mb in self.posted.get((kind, action.peer), ()):
                self.posted[kind, action.peer].remove(mb)
                self._message(action, -1)
            self._hold(action.holder, self.edges[kind[1], self.homes[action.peer], action.stage])
        elif kind in ("F", "B", "W"):
            graph = self.graphs[kind]
            self._hold(mb, graph.ins)
            self._hold(mb, graph.results)
            self._call(kind)
            self._keep(mb, self.kept[kind] | self.sent.get(kind, set()))
            if not drops and kind == self.last and not self.targets.get(kind):
                self._keep(mb, set())
        elif kind in ("SF", "SB"):
            phase = kind[1]
            self.sends[phase, mb] = self.sends.get((phase, mb), 0) + 1
            if self.sends[phase, mb] == self.targets[phase]:
                self._keep(mb, self.kept[phase] if drops or self.last != phase else set())
            self._linger(action)
        elif kind == "D":
            self._keep(mb, set())
        elif kind in ("P", "N"):
            self._hold(action.holder, self.graphs[kind].results)
            self._call(kind)
        elif kind == "U":
            self._call("U")
            self._keep(action.holder, set())
        self.activations = max(self.activations, self.now[True])
        self.boundary = max(self.boundary, self.now[False] + self.coming)
        self.in_flight = max(self.in_flight, sum(mb >= 0 for mb in self.held))
        self._note()

    def _linger(self, action: Action) -> None:
        """What was sent stays until the peer has it: until the next send of the channel, say. What is saved stays anyway."""
        assert action.peer is not None
        for size in self.lingering.get((action.kind, action.peer), ()):
            self.pools["made"].change(size, -1)
        values = self.edges[action.kind[1], action.stage, self.homes[action.peer]]
        sizes = [v.type.nbytes for v in values if v.name not in self.saved]
        self.lingering[action.kind, action.peer] = sizes
        for size in sizes:
            self.pools["made"].change(size, 1)

    def _call(self, kind: str) -> None:
        """One call of a graph: its temporaries come and go."""
        for sign in (1, -1):
            for size in self.blocks[kind]:
                self.pools["made"].change(size, sign)
        self._note()

    def _note(self) -> None:
        total = sum(pool.bytes for pool in self.pools.values())
        if total > self.peak:
            self.peak, self.workspace = total, total - sum(self.now.values()) - self.coming

    def _hold(self, mb: int, values: Iterable[Value]) -> None:
        held = self.held.setdefault(mb, {})
        for value in values:
            if value.name not in held:
                held[value.name] = value.type.nbytes
                self._count(value.name, value.type.nbytes, 1)

    def _keep(self, mb: int, names: set[str]) -> None:
        held = self.held.get(mb, {})
        for name in [n for n in held if n not in names]:
            self._count(name, held.pop(name), -1)
        if not held:
            self.held.pop(mb, None)

    def _count(self, name: str, size: int, sign: int) -> None:
        self.now[name in self.saved] += sign * size
        self.pools[self.pool_of.get(name, "received")].change(size, sign)
