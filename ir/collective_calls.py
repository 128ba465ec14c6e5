"""The collectives of stage graphs as calls: where each stands, which ranks meet in it, and what a rank sends.

In: a graph of the local form, or a module with meshes. Out: plain facts, which nothing is decided by here.

Every rank sends its part to each peer. An all_reduce of a large tensor is a reduce_scatter of flat parts, and an
all_gather of the sums, which is what a ring sends, too. Of a small one every rank has the whole tensor of every other:

    all_reduce      small: (n-1) operand         large: 2 (n-1) ceil(elements/n)
    all_gather      (n-1) operand
    reduce_scatter  (n-1) result
    all_to_all      (n-1) ceil(operand/n along `split`)
    shift           operand, unless it goes all the way round

Where the type of a gradient ends in `+dp`, AR leaves on each replica of its stage the sum of its own part alone. That
is a reduce_scatter with half the bytes of an all_reduce. The part lies where it lies in the whole gradient. The
elements around it belong to no sum, and only a `take` may see them. Along which dimension parts lie, `part_dim` says
for the pass `zero`, the interpreter and the runtime.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod

from .action_kinds import SUM
from .attrs import Attrs
from .graph import REPLICAS, Graph, Module, Op, Value, graph_stage, summed_vars
from .memo import Derived
from .ops import EXCHANGES, axes_over, complete_attrs, integer, make
from .schedule import COMPUTE
from .types import ITEM_BYTES, TensorType, part_size

# The bytes of an operand from which on an all_reduce goes by parts. Below, a second meeting costs more than the bytes.
BY_PARTS_FROM = 1 << 15
# Gradients that lie one behind the other begin at multiples of so many bytes.
_ALIGNMENT = 64


@dataclass(frozen=True)
class CollectiveCall:
    """A collective of a graph, and its number among the collectives there."""

    graph: str
    number: int
    op: Op

    @cached_property
    def attrs(self) -> Attrs:
        """All attributes, with their defaults."""
        return complete_attrs(self.op)

    @cached_property
    def over(self) -> tuple[str, ...]:
        """The mesh axes along which the members of its group differ."""
        return axes_over(self.attrs["over"])

    @cached_property
    def key(self) -> str:
        """A name that is single in the module."""
        return f"{self.graph} {self.op.outs[0].name}"

    def __str__(self) -> str:
        over = self.over[0] if len(self.over) == 1 else f"[{', '.join(self.over)}]"
        return f"%{self.op.outs[0].name} = {self.op.kind}(%{self.op.ins[0].name}, over={over})"


@dataclass(frozen=True)
class JointSum(CollectiveCall):
    """The sums of several gradients as one collective. They have one element type and as many copies, and lie one
    behind the other in memory. `op` is that of the first of them."""

    calls: tuple[CollectiveCall, ...]
    copies: int

    @cached_property
    def key(self) -> str:
        """A name that is single in the module."""
        return f"{self.graph} {self.number}"

    @cached_property
    def types(self) -> dict[str, TensorType]:
        """The types of the gradients on one rank, by name."""
        return {call.op.ins[0].name: call.op.ins[0].type for call in self.calls}

    @cached_property
    def places(self) -> tuple[int, ...]:
        """The places where the gradients begin, and their end, in elements."""
        step = _ALIGNMENT // ITEM_BYTES[self.op.ins[0].type.dtype]
        return tuple(accumulate((-(-t.size // step) * step for t in self.types.values()), initial=0))

    def sent(self, members: int) -> int:
        """Return the bytes that one rank of so many sends."""
        return sum(sent_bytes(call.op, members) for call in self.calls)

    def __str__(self) -> str:
        return f"parts of the sums of {len(self.calls)} gradients, over={REPLICAS}"


_MEETING = Derived[dict[tuple[int, int, str], tuple[int, ...]]](__name__, "meeting")
_CALLS = Derived[tuple[CollectiveCall, ...]](__name__, "calls")


def calls_of(graph: Graph) -> tuple[CollectiveCall, ...]:
    """Return the collectives of a graph in their order."""
    return graph.keep(_CALLS, _calls)


def _calls(graph: Graph) -> tuple[CollectiveCall, ...]:
    exchanges = (op for op in graph.ops if op.kind in EXCHANGES)
    return tuple(CollectiveCall(graph.name, i, op) for i, op in enumerate(exchanges))


def goes_by_parts(op: Op, members: int) -> bool:
    """Return whether an all_reduce is done as a reduce_scatter and an all_gather of flat parts."""
    x = op.ins[0].type
    return op.kind == "all_reduce" and x.nbytes >= BY_PARTS_FROM and x.size >= members


def sent_bytes(op: Op, members: int) -> int:
    """Return the bytes that one rank of a group of so many sends in a collective."""
    x, y, peers = op.ins[0].type, op.outs[0].type, members - 1
    width = x.nbytes // x.size if x.size else 0
    match op.kind:
        case "all_reduce" if goes_by_parts(op, members):
            return 2 * peers * part_size(x.size, members) * width
        case "reduce_scatter":
            return peers * y.nbytes
        case "all_to_all":
            split = integer(complete_attrs(op)["split"]) % x.rank
            rows = part_size(x.dims[split], members)
            return peers * rows * (x.size // x.dims[split] if x.dims[split] else 0) * width
        case "shift":
            return x.nbytes if integer(complete_attrs(op)["by"]) % members else 0
    return peers * x.nbytes


# ------------------------------------------------------------------------------------------------ sums of a batch


def part_dim(t: TensorType, sizes: Mapping[str, int]) -> int | None:
    """Return the dimension that is split over the replicas: the first that divides, else the largest; None where no
    dimension has an element for each replica."""
    replicas, local = sizes[REPLICAS], t.local(sizes).dims
    free = [i for i in range(t.rank) if not t.axes_of(i)]
    parts = [prod(sizes.get(axis, 1) for axis in t.axes_of(i)) * replicas for i in range(t.rank)]
    even = [i for i in range(t.rank) if t.dims[i] and t.dims[i] % parts[i] == 0 and t.blocks_of(i) == 1]
    if even:
        return min(even, key=lambda i: (i not in free, i))
    large = [i for i in free if local[i] >= replicas]
    return max(large, key=lambda i: local[i], default=None)


def kept_parts(module: Module, stage: int) -> tuple[CollectiveCall, ...]:
    """Return what AR does for the gradients of a stage of which replicas keep parts, as one reduce_scatter each. Their
    operands have the names of the gradients."""
    sizes = module.mesh_of(stage).sizes
    calls: list[CollectiveCall] = []
    for name in summed_vars(module, stage):
        t = module.vars[name].type
        if REPLICAS in t.partial and sizes.get(REPLICAS, 1) > 1:
            dim = part_dim(t, sizes)
            assert dim is not None, f"no dimension of @{name} : {t} has parts for all replicas"
            whole = Value(name, t.local(sizes))
            op = make("reduce_scatter", [whole], [f"{name}.part"], axis=dim, over=REPLICAS, parts=sizes[REPLICAS])
            calls.append(CollectiveCall(f"s{stage}.{SUM}", len(calls), op))
    return tuple(calls)


def kept_sums(module: Module, stage: int) -> tuple[JointSum, ...]:
    """Return the collectives that AR of a stage consists of, for gradients of which replicas keep parts."""
    alike: dict[tuple[str, int], list[CollectiveCall]] = {}
    for call in kept_parts(module, stage):
        value = call.op.ins[0]
        alike.setdefault((value.type.dtype, module.vars[value.name].versions), []).append(call)
    return tuple(
        JointSum(f"s{stage}.{SUM}", number, calls[0].op, tuple(calls), copies)
        for number, ((_, copies), calls) in enumerate(alike.items())
    )


def kept_slices(call: CollectiveCall, place: int, members: int) -> tuple[slice, ...]:
    """Return where the part of one of the replicas lies in the whole gradient; it is shorter at the end."""
    dims, dim = call.op.ins[0].type.dims, integer(call.attrs["axis"])
    size = part_size(dims[dim], members)
    mine = slice(min(place * size, dims[dim]), min((place + 1) * size, dims[dim]))
    return tuple(mine if i == dim else slice(None) for i in range(len(dims)))


# ------------------------------------------------------------------------------------------------ ranks


def place_of(module: Module, rank: int) -> int:
    """Return the place of a rank in the mesh of its stages."""
    return module.ranks_of(module.rank_stages()[rank]).index(rank)


def coordinates_of(module: Module, rank: int) -> dict[str, int]:
    """Return where a rank lies on every axis of its stage's mesh."""
    return module.mesh_of(module.rank_stages()[rank]).coordinates(place_of(module, rank))


def group_of(module: Module, rank: int, over: Sequence[str]) -> tuple[int, ...]:
    """Return the ranks that differ from a rank along these axes alone, itself among them, the first axis major."""
    stage = module.rank_stages()[rank]
    ranks = module.ranks_of(stage)
    return tuple(ranks[other] for other in module.mesh_of(stage).group(ranks.index(rank), over))


def groups_of(module: Module) -> tuple[tuple[int, ...], ...]:
    """Return all groups of more than one rank that meet in collectives, each once, in an order that all ranks know."""
    groups: dict[tuple[int, ...], None] = {}
    for rank, stages in enumerate(module.rank_packs()):
        for name, graph in module.graphs.items():
            if graph_stage(name) in stages:
                groups |= dict.fromkeys(group_of(module, rank, call.over) for call in calls_of(graph))
    return tuple(sorted(group for group in groups if len(group) > 1))


def meeting_ranks(module: Module) -> Mapping[tuple[int, int, str], tuple[int, ...]]:
    """Return the ranks that run a graph together, by rank, stage and kind, where collectives of it bring several
    together."""
    return module.kept.once(_MEETING, lambda: _meeting_ranks(module))


def _meeting_ranks(module: Module) -> dict[tuple[int, int, str], tuple[int, ...]]:
    together: dict[tuple[int, int, str], tuple[int, ...]] = {}
    for stage in module.stages:
        graphs = {kind: g for kind in COMPUTE if (g := module.stage_graph(stage.index, kind)) and calls_of(g)}
        if not graphs:
            continue
        mesh, listed = module.mesh_of(stage.index), module.ranks_of(stage.index)
        for kind, graph in graphs.items():
            if first_meeting(module, stage.index, kind) is not None:
                axes = {axis for call in calls_of(graph) for axis in call.over}
                for team in [tuple(range(len(mesh.devices)))] if REPLICAS in axes else mesh.teams():
                    ranks = tuple(listed[place] for place in team)
                    together |= {(rank, stage.index, kind): ranks for rank in ranks}
    return together


def first_meeting(module: Module, stage: int, kind: str) -> CollectiveCall | None:
    """Return the first collective of a graph that brings several ranks together; None where there is none."""
    graph, sizes = module.stage_graph(stage, kind), module.mesh_of(stage).sizes
    calls = calls_of(graph) if graph is not None else ()
    return next((call for call in calls if any(sizes.get(axis, 1) > 1 for axis in call.over)), None)
