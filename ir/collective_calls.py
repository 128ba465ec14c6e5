"""The collectives of stage graphs as calls: where each stands, which ranks meet in it, and what a rank sends.

In: a graph of the local form, or a module with meshes. Out: plain facts, which nothing is decided by here.

Every rank sends its part to each peer. An all_reduce of a large tensor is a reduce_scatter of flat parts, and an
all_gather of the sums, which is what a ring sends, too. Of a small one every rank has the whole tensor of every other:

    all_reduce      small: (n-1) operand         large: 2 (n-1) ceil(elements/n)
    all_gather      (n-1) operand
    reduce_scatter  (n-1) result
    all_to_all      (n-1) ceil(operand/n along `split`)
    shift           operand, unless it goes all the way round
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from .attrs import Attrs
from .graph import Graph, Module, Op, graph_stage
from .memo import Derived
from .ops import EXCHANGES, axes_over, complete_attrs, integer
from .types import part_size

# The bytes of an operand from which on an all_reduce goes by parts. Below, a second meeting costs more than the bytes.
BY_PARTS_FROM = 1 << 15


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


# ------------------------------------------------------------------------------------------------ ranks


def place_of(module: Module, rank: int) -> int:
    """Return the place of a rank in the mesh of its stage."""
    stages = module.rank_stages()
    return rank - stages.index(stages[rank])


def coordinates_of(module: Module, rank: int) -> dict[str, int]:
    """Return where a rank lies on every axis of its stage's mesh."""
    return module.mesh_of(module.rank_stages()[rank]).coordinates(place_of(module, rank))


def group_of(module: Module, rank: int, over: Sequence[str]) -> tuple[int, ...]:
    """Return the ranks that differ from a rank along these axes alone, itself among them, the first axis major."""
    place = place_of(module, rank)
    mesh = module.mesh_of(module.rank_stages()[rank])
    return tuple(rank - place + other for other in mesh.group(place, over))


def groups_of(module: Module) -> tuple[tuple[int, ...], ...]:
    """Return all groups of more than one rank that meet in collectives, each once, in an order that all ranks know."""
    groups: dict[tuple[int, ...], None] = {}
    for rank, stage in enumerate(module.rank_stages()):
        for name, graph in module.graphs.items():
            if graph_stage(name) == stage:
                groups |= dict.fromkeys(group_of(module, rank, call.over) for call in calls_of(graph))
    return tuple(sorted(group for group in groups if len(group) > 1))
