"""The module: values, operations, graphs, variables, stages and the edges between them.

Everything is immutable by convention: a pass builds new objects and shares what it did not touch. A value's name is its
identity inside a graph, and across the graphs of one module the same name means the same tensor: the forward graph of a
stage saves `%h`, its backward graph takes `%h`; one stage returns `%h`, the next takes `%h`. So nothing but names wires
stages together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from penstock.support import notebook
from penstock.support.words import visible

from .action_kinds import FORWARD, UPDATE
from .attrs import Attr, Attrs
from .ladder.bounds import Bounded
from .memo import Derived, Memo, Result
from .schedule import ADDERS, Schedule
from .types import TensorType

if TYPE_CHECKING:
    from penstock.ir.cluster.cluster import Cluster


# Attributes that passes may write on any operation. They never change what an operation computes. `of` names the first
# result of the forward operation that a backward operation belongs to; `library` names the library that computes it
# instead of a generated kernel. `packed` says that its second operand never changes. Planners write the others.
ANNOTATIONS = ("of", "stage", "mesh", "sharding", "recompute", "kernel", "library", "packed")

# A cache holds what earlier microbatches left: `put` alone touches it. A copy is its source in fewer bits, in no file.
PARAM, GRAD, STATE, BUFFER, SETTING, CACHE, COPY = "param", "grad", "state", "buffer", "setting", "cache", "copy"
ROLES = (PARAM, GRAD, STATE, BUFFER, SETTING, CACHE, COPY)
# Words of older module texts. They are read until the format of bundles has another number.
FORMER_ROLES = {"table": SETTING}


@dataclass(frozen=True, slots=True)
class Value:
    """One tensor of a graph. Equal when name and type are equal."""

    name: str
    type: TensorType

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return f"%{self.name} : {self.type}"


def _has_nan(value: Attr) -> bool:
    """Return whether an attribute holds nan. Only nan differs from itself; a tuple takes the same object for equal."""
    if isinstance(value, tuple):
        return any(x != x for x in value)
    return value != value


def _one_nan(value: Attr) -> Attr:
    if isinstance(value, tuple):
        return tuple(math.nan if _has_nan(x) else x for x in value)
    return math.nan if _has_nan(value) else value


@dataclass(frozen=True, slots=True)
class Op:
    """One operation. `kind` is a row of the op table; `loc` is the ONNX node or Python line it came from."""

    kind: str
    ins: tuple[Value, ...]
    outs: tuple[Value, ...]
    attrs: Attrs = field(default_factory=dict)
    loc: str = ""
    # The line that ir/text.py prints of it, kept once it was printed.
    line: str | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # One nan for all, so that operations that print alike are equal.
        for value in self.attrs.values():
            if _has_nan(value):
                object.__setattr__(self, "attrs", {name: _one_nan(value) for name, value in self.attrs.items()})
                break

    def with_attrs(self, **changed: Attr | None) -> Op:
        """Return a copy with attributes set, or removed where the new value is None."""
        attrs = {k: v for k, v in self.attrs.items() if k not in changed}
        attrs |= {k: v for k, v in changed.items() if v is not None}
        return Op(self.kind, self.ins, self.outs, attrs, self.loc)

    def with_ins(self, ins: tuple[Value, ...]) -> Op:
        """Return a copy with other operands."""
        return Op(self.kind, ins, self.outs, self.attrs, self.loc)

    def renamed(self, table: Mapping[Value, Value]) -> Op:
        """Return a copy with operands and results replaced by those that the table maps them to."""
        return Op(self.kind, substitute(self.ins, table), substitute(self.outs, table), self.attrs, self.loc)

    @property
    def var(self) -> str:
        """The variable a state operation touches."""
        return str(self.attrs["var"])


@dataclass(frozen=True, slots=True)
class Graph:
    """A straight line of operations. `saved` are values kept for the backward graph of the same microbatch; of a
    backward graph, for that of weight gradients (W)."""

    name: str
    ins: tuple[Value, ...]
    outs: tuple[Value, ...]
    ops: tuple[Op, ...]
    saved: tuple[Value, ...] = ()
    # What was derived from it and is needed again (ir/memory/workspace.py).
    kept: Memo = field(default_factory=Memo, init=False, repr=False, compare=False)

    @property
    def results(self) -> tuple[Value, ...]:
        """Return the results of the compiled graph: outputs, then saved values that are neither inputs nor outputs."""
        known = {*self.ins, *self.outs}
        return self.outs + tuple(v for v in self.saved if v not in known)

    def keep(self, key: Derived[Result], find: Callable[[Graph], Result]) -> Result:
        """Return `find(graph)`. It is computed once and kept under the key: graphs do not change."""
        return self.kept.once(key, lambda: find(self))

    def producers(self) -> dict[Value, Op]:
        return {v: op for op in self.ops for v in op.outs}


@dataclass(frozen=True, slots=True)
class Var:
    """State that outlives a microbatch. `init`, its first value: `file` (the weights), `zeros`, or the elements. With a
    `source`, weights are computed from those of that variable of the model, in a `form` of ir/interpreter/derived.py.
    `home`: the memory space where it is between uses, if not the device, in a `chunk` if there are several."""

    name: str
    type: TensorType
    role: str
    stage: int | None = None
    versions: int = 1
    policy: str = ""
    init: str | tuple[float, ...] = "file"
    source: str = ""
    form: str = ""
    home: str = ""
    chunk: int | None = None


# The one axis with a meaning: along it microbatches are dealt out, along every other one ranks share a microbatch.
REPLICAS = "dp"


@dataclass(frozen=True, slots=True)
class Mesh:
    """Devices arranged along named axes, the last axis fastest. A place is the number of a device in it."""

    name: str
    axes: tuple[tuple[str, int], ...]
    devices: tuple[str, ...]

    @property
    def sizes(self) -> dict[str, int]:
        return dict(self.axes)

    def coordinates(self, place: int) -> dict[str, int]:
        """Return where a device lies on every axis."""
        along: dict[str, int] = {}
        for axis, size in reversed(self.axes):
            place, along[axis] = divmod(place, size)
        return along

    def group(self, place: int, over: Iterable[str]) -> tuple[int, ...]:
        """Return the places that differ from this one along axes in `over` alone, and itself; the first is major."""
        axes = [axis for axis in over if self.sizes.get(axis, 1) > 1]
        here, sizes = self.coordinates(place), self.sizes
        places = []
        for number in range(math.prod(sizes[axis] for axis in axes)):
            other = dict(here)
            for axis in reversed(axes):
                number, other[axis] = divmod(number, sizes[axis])
            at = 0
            for axis, size in self.axes:
                at = at * size + other[axis]
            places.append(at)
        return tuple(places)

    def teams(self) -> tuple[tuple[int, ...], ...]:
        """Return the places of each team, in order: those that work on one microbatch together."""
        shared = [axis for axis, _ in self.axes if axis != REPLICAS]
        return tuple(dict.fromkeys(self.group(place, shared) for place in range(len(self.devices))))


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the model, its device or mesh, and the memory space where what its forwards save may be meanwhile."""

    index: int
    place: str
    home: str = ""


@dataclass(frozen=True, slots=True)
class Edge:
    """The values that travel from stage `src` to stage `dst` for each microbatch. `phase` is F, B, P or N. Types are
    those of one rank. An edge between unlike meshes says how whole values lie on `src`, and by `to` how they arrive
    (ir/sharding/tile_messages.py)."""

    src: int
    dst: int
    phase: str
    values: tuple[Value, ...]
    to: tuple[TensorType, ...] = ()


@dataclass(frozen=True, slots=True)
class Note:
    """A fact for the user, left by a pass."""

    origin: str
    text: str


# An input that no data gives: the microbatches before this one since training began. Random numbers depend on it.
MICROBATCH = "microbatch.number"

# Inputs that no data gives: where a rank lies on an axis of its stage's mesh, such as `mesh.tp`.
COORDINATE = "mesh."

# The fact of modules whose stage graphs are what one device does: types are those of parts, collectives are operations.
LOCAL = "local"

# The norm of the whole gradient before clipping, a result of updates that use it; one that is not finite skips them.
NORM = "gradient.norm"


@dataclass(frozen=True)
class Module:
    """A whole program. `inputs` are fed for every microbatch, `outputs` are handed to the user; both by value name.
    `batch` has inputs and outputs whose samples do not lie along the first dimension (ir/batch_shares.py). `packs` are
    the stages of every rank where ranks run several."""

    name: str
    inputs: tuple[Value, ...] = ()
    outputs: tuple[str, ...] = ()
    cluster: Cluster | None = None
    meshes: tuple[Mesh, ...] = ()
    stages: tuple[Stage, ...] = ()
    vars: Mapping[str, Var] = field(default_factory=dict)
    graphs: Mapping[str, Graph] = field(default_factory=dict)
    edges: tuple[Edge, ...] = ()
    schedule: Schedule | None = None
    facts: tuple[str, ...] = ()
    notes: tuple[Note, ...] = ()
    batch: Mapping[str, int | None] = field(default_factory=dict)
    # Dimensions that stand for all sizes up to theirs: the module is a rung of a ladder (ir/ladder).
    bounds: tuple[Bounded, ...] = ()
    packs: tuple[tuple[int, ...], ...] = ()
    # Derived results that are needed again (ir/memory). They hold for all facts and notes.
    kept: Memo = field(default_factory=Memo, init=False, repr=False, compare=False)

    def __repr__(self) -> str:
        return notebook.in_one_line(self)

    def _repr_html_(self) -> str:
        return notebook.as_html(self)

    @property
    def data_inputs(self) -> tuple[Value, ...]:
        """The inputs that data must give."""
        filled = {MICROBATCH, *(bound.input for bound in self.bounds)}
        return tuple(value for value in self.inputs if value.name not in filled)

    @property
    def draws(self) -> bool:
        """Return whether the module draws random numbers: the number of a microbatch is an input."""
        return any(value.name == MICROBATCH for value in self.inputs)

    def but(self, **changed: Any) -> Module:
        """Return a copy with some fields replaced."""
        other: Module = replace(self, **changed)
        if changed.keys() <= {"facts", "notes"}:
            object.__setattr__(other, "kept", self.kept)
        return other

    def with_graph(self, graph: Graph) -> Module:
        return self.but(graphs={**self.graphs, graph.name: graph})

    def noted(self, origin: str, *texts: str) -> Module:
        return self.but(notes=self.notes + tuple(Note(origin, visible(text)) for text in texts))

    def devices_of(self, stage: int) -> tuple[str, ...]:
        """Return the devices that a stage lies on, one rank each: one, or those of its mesh."""
        return self.mesh_of(stage).devices

    def mesh_of(self, stage: int) -> Mesh:
        """Return the mesh that a stage lies on; for a single device, one without axes."""
        place = self.stages[stage].place
        return next((mesh for mesh in self.meshes if mesh.name == place), Mesh(place, (), (place,)))

    @property
    def is_local(self) -> bool:
        """Return whether stage graphs are what one device does (local form)."""
        return LOCAL in self.facts

    def local_type(self, type: TensorType, stage: int) -> TensorType:
        """Return the type of what one device of a stage has of an input, a variable or a value of an edge."""
        return type if type.is_plain else type.local(self.mesh_of(stage).sizes)

    def local_values(self, values: Iterable[Value], stage: int) -> tuple[Value, ...]:
        """Return values with their types on one device of a stage."""
        return tuple(v if v.type.is_plain else Value(v.name, self.local_type(v.type, stage)) for v in values)

    def given_names(self, stage: int) -> set[str]:
        """Return the names that graphs of a stage take without a maker: inputs of the module, and coordinates."""
        coordinates = {f"{COORDINATE}{axis}" for axis in self.mesh_of(stage).sizes} if self.is_local else set()
        return {value.name for value in self.inputs} | coordinates

    def rank_devices(self) -> list[str]:
        """Return the device of every rank: ranks are numbered stage by stage."""
        devices = {stage.index: iter(self.devices_of(stage.index)) for stage in self.stages}
        return [next(devices[at], self.stages[at].place) for at, *_ in self.rank_packs()]

    def ranks_of(self, stage: int) -> list[int]:
        """Return the ranks of a stage, in the order of its devices."""
        return [rank for rank, stages in enumerate(self.rank_packs()) if stage in stages]

    def rank_stages(self) -> list[int]:
        """Return the first stage of every rank."""
        return [stages[0] for stages in self.rank_packs()]

    def rank_packs(self) -> list[tuple[int, ...]]:
        """Return the stages of every rank."""
        return list(self.packs) or [(stage.index,) for stage in self.stages for _ in self.devices_of(stage.index)]

    def stage_graph(self, stage: int, kind: str) -> Graph | None:
        """Return the graph of one stage by its kind: F, B, W or U."""
        return self.graphs.get(f"s{stage}.{kind}")


def graph_stage(name: str) -> int | None:
    """Return the stage of a graph by its name, such as `s1.B`; None of a graph of the whole model."""
    head, dot, _ = name.partition(".")
    return int(head[1:]) if dot and head.startswith("s") and head[1:].isdecimal() else None


def graph_kind(name: str) -> str:
    """Name the computation of a graph: F, B, W, P, N or U; `main` is the F of a model that is not differentiated."""
    return FORWARD if name == "main" else name.rpartition(".")[2]


@dataclass(frozen=True, slots=True)
class Slot:
    """A buffer that a graph reads or writes: `slot` is mb, latest or next where there are versions, else empty."""

    var: str
    slot: str


@dataclass(frozen=True, slots=True)
class Signature:
    """The calling convention of every backend: arguments are `ins` then `slots`, results are `results`."""

    ins: tuple[Value, ...]
    slots: tuple[Slot, ...]
    results: tuple[Value, ...]


# Operations that touch a variable: those that `slot_of` knows.
_STATEFUL = ("read", "write", "accum", "take", "put")


def slot_of(op: Op) -> Slot | None:
    """Return the buffer a state operation touches; None for pure operations."""
    match op.kind:
        case "read":
            return Slot(op.var, str(op.attrs.get("version", "latest")))
        case "write":
            return Slot(op.var, "next")
        case "accum" | "take":
            return Slot(op.var, "")
        case "put":
            return Slot(op.var, "latest")
    return None


def made_values(ops: Iterable[Op]) -> set[Value]:
    return {v for op in ops for v in op.outs}


_TOUCHING = Derived[list[tuple[int, Op]]](__name__, "touching")


def touching_ops(graph: Graph | None) -> list[tuple[int, Op]]:
    """Return the operations that name a variable, with their places; none of a graph that is not there."""
    if graph is None:
        return []
    return graph.keep(_TOUCHING, lambda graph: [(i, op) for i, op in enumerate(graph.ops) if "var" in op.attrs])


def touched_vars(graph: Graph | None, *kinds: str) -> set[str]:
    """Return the variables of the operations of these kinds; none if there is no graph."""
    return {op.var for _, op in touching_ops(graph) if op.kind in kinds}


def summed_vars(module: Module, stage: int) -> list[str]:
    """Return the gradients that a stage adds to and its ranks have to sum up, in order; none that backwards sum up."""
    added = {name for kind in ADDERS for name in touched_vars(module.stage_graph(stage, kind), "accum")}
    return [name for name, var in module.vars.items() if name in added and REPLICAS not in sum(var.type.axes, ())]


def written_vars(graph: Graph) -> set[str]:
    """Return the variables that a graph makes new values of: in a forward graph, buffers that move with every
    microbatch. Caches are not among them, whose rows belong to one sequence each."""
    return touched_vars(graph, "write")


def stepped_vars(module: Module) -> set[str]:
    """Return the variables that have versions: updates write them, and forward or backward read them. A variable that
    no update writes is version 0 for ever."""
    updates = {name for name in module.graphs if graph_kind(name) == UPDATE}
    written = {var for name in updates for var in written_vars(module.graphs[name])}
    return written & {
        op.var for name, graph in module.graphs.items() if name not in updates for op in graph.ops if op.kind == "read"
    }


def signature(graph: Graph) -> Signature:
    """Return the buffers in order of first use. `take` and `accum` work in place; `write` fills the slot it names."""
    slots = dict.fromkeys(s for s in map(slot_of, graph.ops) if s is not None)
    return Signature(graph.ins, tuple(slots), graph.results)


def slot_types(graph: Graph) -> dict[Slot, TensorType]:
    """Return the type of every buffer that a graph touches."""
    return {slot: (op.outs or op.ins)[0].type for op in graph.ops if (slot := slot_of(op)) is not None}


def stage_vars(module: Module, stage: int) -> dict[str, Var]:
    """Return the variables of a stage in order: what its graphs touch, and parameters and buffers that nothing does."""
    graphs = [graph for name, graph in module.graphs.items() if name.startswith(f"s{stage}.")]
    touched = {op.var for graph in graphs for op in graph.ops if op.kind in _STATEFUL}
    return {
        name: var
        for name, var in module.vars.items()
        if name in touched or (var.stage == stage and var.role in (PARAM, BUFFER))
    }


def substitute(values: Iterable[Value], table: Mapping[Value, Value]) -> tuple[Value, ...]:
    return tuple(table.get(v, v) for v in values)


def rewrite(graph: Graph, rule: Callable[[Op], Sequence[Op] | None]) -> Graph:
    """Replace operations one by one. `rule` gives None to keep an op, else the ops that stand in its place; the results
    of the last of them replace the results of the old one, unless the names are kept. Returns the same object when
    nothing changed."""
    table: dict[Value, Value] = {}
    ops: list[Op] = []
    changed = False
    for op in graph.ops:
        if table and (ins := substitute(op.ins, table)) != op.ins:
            op = op.with_ins(ins)
        new = rule(op)
        if new is None:
            ops.append(op)
            continue
        changed = True
        ops += new
        if new:
            table |= {a: b for a, b in zip(op.outs, new[-1].outs, strict=True) if a != b}
    if not changed:
        return graph
    return Graph(graph.name, graph.ins, substitute(graph.outs, table), tuple(ops), substitute(graph.saved, table))


class Namer:
    """A source of names that are not taken yet: `h`, then `h.1`, `h.2`, in order, so that output is deterministic."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._taken = set(taken)
        self._tried: dict[str, int] = {}  # the last number of each base: those before it are taken for good

    @classmethod
    def of(cls, *graphs: Graph) -> Namer:
        return cls(v.name for g in graphs for v in (*g.ins, *(o for op in g.ops for o in op.outs)))

    def fresh(self, base: str) -> str:
        n = self._tried.get(base, 0)
        name = f"{base}.{n}" if n else base
        while name in self._taken:
            n += 1
            name = f"{base}.{n}"
        self._taken.add(name)
        self._tried[base] = n
        return name
