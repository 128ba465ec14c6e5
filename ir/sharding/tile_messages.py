"""Messages of edges between unlike meshes: which tiles of which values a rank sends to another.

In: an edge that says how values lie on both meshes, and the receives of a schedule. Out: for two ranks, the slices that
one cuts out of its parts, and where they lie in those of the other.

A rank takes each value from the ranks that it receives from, in the order in which its schedule names them: an element
comes from the first that has it. So the text of the schedule is the choice of senders. Ranks of a mesh have the same
tile of a value, or tiles without a common element. Hence the first rank with a tile sends all that the taker needs of
it, and no rank behind it sends the same once more.

A message carries slices as values of their own, named after the whole one and numbered; one that is all that the taker
has of a value has its name. They share messages as values of other edges do (ir/messages.py). What no slice covers is
padding, which is zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

from penstock.ir.graph import Edge, Mesh, Module, Op, Value
from penstock.ir.memo import Derived
from penstock.ir.schedule import RECEIVES, SENDS, Action, Schedule

from .between_meshes import arriving_values, edge_values, travels_in_tiles
from .tiles import Ranges, TensorTile, overlaps, tile_of

# The source of an edge, its destination, and its phase.
EdgeEnds = tuple[int, int, str]


class TileSlice(NamedTuple):
    """A block of a value in a message. `value` has its name there and its type, `whole` is the name of the value;
    `taken` lies in the sender's part of that, and `put` in the taker's."""

    value: Value
    whole: str
    taken: tuple[slice, ...]
    put: tuple[slice, ...]

    @property
    def is_all(self) -> bool:
        """Return whether it is all that the taker has of the value."""
        return self.value.name == self.whole


class TileEnds(NamedTuple):
    """The meshes at both ends of an edge."""

    edge: Edge
    source: Mesh
    target: Mesh

    def shared(self, number: int, sender: int, taker: int) -> tuple[TensorTile, TensorTile]:
        """Return the tiles of a value that two places have."""
        left, arrived = self.edge.values[number], arriving_values(self.edge)[number]
        return tile_of(left.type, self.source, sender), tile_of(arrived.type, self.target, taker)

    def slices(self, senders: Sequence[int], taker: int) -> dict[int, tuple[TileSlice, ...]]:
        """Return what a place takes from each of the places that send to it, in their order."""
        known: set[tuple[int, Ranges]] = set()
        result: dict[int, tuple[TileSlice, ...]] = {}
        for sender in senders:
            pieces: list[TileSlice] = []
            for number, value in enumerate(self.edge.values):
                held, wanted = self.shared(number, sender, taker)
                if (number, held.ranges) in known:
                    continue
                known.add((number, held.ranges))
                for i, both in enumerate(overlaps(held, wanted)):
                    dims = tuple(part.stop - part.start for part in both.one)
                    name = value.name if dims == wanted.shape else f"{value.name}.tile{i}"
                    block = Value(name, value.type.plain.with_shape(dims))
                    pieces.append(TileSlice(block, value.name, both.one, both.other))
            result[sender] = tuple(pieces)
        return result

    def needs(self, taker: int) -> dict[tuple[int, ...], int]:
        """Return the bytes that a place has to take from one of several places: those that have the same tiles."""
        held_by: dict[tuple[int, Ranges], list[int]] = {}
        places = self.source.teams()[0]
        for number in range(len(self.edge.values)):
            for place in places:
                tile, wanted = self.shared(number, place, taker)
                if any(True for _ in overlaps(tile, wanted)):
                    held_by.setdefault((number, tile.ranges), []).append(place)
        needed: dict[tuple[int, ...], int] = {}
        for (number, _), holders in held_by.items():
            tile, wanted = self.shared(number, holders[0], taker)
            elements = sum(prod(part.stop - part.start for part in both.one) for both in overlaps(tile, wanted))
            t = self.edge.values[number].type.plain
            key = tuple(holders)
            needed[key] = needed.get(key, 0) + t.with_shape((elements,)).nbytes
        return needed


class TileMessages:
    """The messages of all edges of a module that travel in tiles, as its schedule says."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._edges = {(e.src, e.dst, e.phase): e for e in module.edges if travels_in_tiles(e)}
        self._ends = {
            ends: TileEnds(edge, module.mesh_of(edge.src), module.mesh_of(edge.dst))
            for ends, edge in self._edges.items()
        }
        # By edge, taker and the sender's team: the ranks that the taker receives from.
        self._senders: dict[tuple[EdgeEnds, int, int], list[int]] = {}
        self._slices: dict[tuple[EdgeEnds, int, int], dict[int, tuple[TileSlice, ...]]] = {}
        self._places = {
            (stage, rank): place
            for stage in {stage for src, dst, _ in self._edges for stage in (src, dst)}
            for place, rank in enumerate(module.ranks_of(stage))
        }
        if self._edges and module.schedule is not None:
            self._read(module.schedule)

    def _read(self, schedule: Schedule) -> None:
        homes = self._module.rank_stages()
        for rank, program in schedule.ranks.items():
            for action in (*program.start, *program.batch):
                if action.kind in RECEIVES and action.peer is not None:
                    if action.end is None and action.peer >= len(homes):
                        continue
                    ends = ends_of(action, homes)
                    if ends in self._edges and (ends[0], action.peer) in self._places:
                        line = self._senders.setdefault((ends, rank, self._team(ends[0], action.peer)), [])
                        if action.peer not in line:
                            line.append(action.peer)

    def __bool__(self) -> bool:
        return bool(self._edges)

    def __contains__(self, ends: EdgeEnds) -> bool:
        return ends in self._edges

    def _team(self, stage: int, rank: int) -> int:
        place = self._places[stage, rank]
        return next(i for i, team in enumerate(self._module.mesh_of(stage).teams()) if place in team)

    def senders(self, ends: EdgeEnds, taker: int, team: Sequence[int]) -> tuple[int, ...]:
        """Return the ranks of a team that a rank receives from, in order."""
        return tuple(self._senders.get((ends, taker, self._team(ends[0], team[0])), ()))

    def missing(self, ends: EdgeEnds, taker: int, senders: Sequence[int]) -> list[str]:
        """Return the names of values of which a rank gets less from some others than it needs."""
        both, elements = self._ends[ends], dict[str, int]()
        for sender in dict.fromkeys(senders):
            for piece in self.slices(ends, sender, taker):
                elements[piece.whole] = elements.get(piece.whole, 0) + piece.value.type.size
        place = self._places[ends[1], taker]
        wanted = {value.name: both.shared(i, 0, place)[1].size for i, value in enumerate(both.edge.values)}
        return [name for name, size in wanted.items() if elements.get(name, 0) < size]

    def slices(self, ends: EdgeEnds, sender: int, taker: int) -> tuple[TileSlice, ...]:
        """Return what a rank sends to another."""
        key = (ends, taker, self._team(ends[0], sender))
        if key not in self._slices:
            places = {self._places[ends[0], rank]: rank for rank in self._senders.get(key, ())}
            by_place = self._ends[ends].slices(list(places), self._places[ends[1], taker])
            self._slices[key] = {places[place]: pieces for place, pieces in by_place.items()}
        return self._slices[key].get(sender, ())

    def messages(self) -> Iterator[tuple[EdgeEnds, int, int, tuple[Value, ...]]]:
        """Yield the ends of all messages, their ranks, and the values in them."""
        for (ends, taker, _), senders in self._senders.items():
            for sender in senders:
                yield ends, sender, taker, tuple(piece.value for piece in self.slices(ends, sender, taker))

    def arriving(self, ends: EdgeEnds) -> tuple[Value, ...]:
        """Return the values of an edge with their types on one device of the stage that takes them."""
        return edge_values(self._module, self._edges[ends], ends[1])

    def arrivals(self, ends: EdgeEnds) -> Iterator[Op]:
        """Yield what happens to the values of an edge on their way, as operations on whole values."""
        edge = self._edges[ends]
        for left, arrived in zip(edge.values, arriving_values(edge), strict=True):
            yield Op("reshard", (left,), (arrived,), {"to": str(arrived.type)})


_MESSAGES = Derived[TileMessages](__name__, "messages")


def tile_messages(module: Module) -> TileMessages:
    """Return the messages of edges that travel in tiles."""
    return module.kept.once(_MESSAGES, lambda: TileMessages(module))


def ends_of(action: Action, homes: Mapping[int, int] | Sequence[int]) -> EdgeEnds:
    """Return the edge whose values a message moves."""
    other = action.other(homes)
    return (action.stage, other, action.phase) if action.kind in SENDS else (other, action.stage, action.phase)


def message_values(module: Module, ends: EdgeEnds, sender: int, taker: int) -> tuple[Value, ...]:
    """Return the values in the messages of an edge between two ranks: those of the edge, or slices of them."""
    messages = tile_messages(module)
    if ends in messages:
        return tuple(piece.value for piece in messages.slices(ends, sender, taker))
    return tuple(v for e in _edges_at(module, ends) for v in module.local_values(e.values, e.src))


def _edges_at(module: Module, ends: EdgeEnds) -> Iterator[Edge]:
    return (edge for edge in module.edges if (edge.src, edge.dst, edge.phase) == ends)
