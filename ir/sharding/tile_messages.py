"""Messages of edges between unlike meshes: which tiles of which values a rank sends to another.

In: an edge that says how values lie on both meshes, and the receives of a schedule. Out: for two ranks, the slices that
one cuts out of its parts, and where they lie in those of the other.

A rank takes each value from the ranks that it receives from, in the order in which its schedule names them: an element
comes from the first that has it. So the text of the schedule is the choice of senders. Ranks of a mesh have the same
tile of a value, or tiles without a common element. Hence the first rank with a tile sends all that the taker needs of
it, and no rank behind it sends the same once more. What a rank sends to another is the same for all microbatches of a
team: the checker refuses other senders for some of them (ir/verify/messages.py).

A rank of the same mesh that comes first hands on what it has of values of which both take the same: a link of a chain,
`1RF4<2:0 1F4` on rank 3 and `1RF4<0 1HF4>3:0 1F4` on rank 2. Tiles that are handed on travel in parcels, slices along
one dimension, so that each goes on while the next one comes.

A message carries slices as values of their own, named after the whole one and numbered; one that is all that the taker
has of a value has its name. They share messages as values of other edges do (ir/messages.py). What no slice covers is
padding, which is zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from math import prod
from typing import NamedTuple

from penstock.ir.cluster.cluster import GLOO, Cluster
from penstock.ir.graph import Edge, Mesh, Module, Op, Value
from penstock.ir.memo import Derived
from penstock.ir.messages import TOGETHER
from penstock.ir.schedule import HANDS, PER_BATCH, RECEIVES, SENDS, Action, Schedule

from .between_meshes import arriving_values, edge_values, travels_in_tiles
from .tiles import Ranges, SharedSlices, TensorTile, overlaps, tile_of

# The most parcels of a tile that is handed on.
PARCELS = 32
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


class TileSender(NamedTuple):
    """A place that tiles come from: of the mesh that they leave; or of the one where they arrive, which hands on what
    has come to it."""

    place: int
    hands_on: bool = False


# The number of a value in its edge, and one of its tiles.
_Numbered = tuple[int, Ranges]


def _parcels(both: SharedSlices, value: Value) -> list[SharedSlices]:
    """Cut a block into parcels, each with a message of its own."""
    dims = tuple(part.stop - part.start for part in both.one)
    count = parcels_of(value.type.plain.with_shape(dims).nbytes)
    dim = next((i for i, n in enumerate(dims) if n >= count), max(range(len(dims)), key=dims.__getitem__, default=0))
    if count < 2 or not dims:
        return [both]
    each = -(-dims[dim] // count)

    def cut(slices: tuple[slice, ...], at: int) -> tuple[slice, ...]:
        part = slices[dim]
        piece = slice(part.start + at, min(part.start + at + each, part.stop))
        return (*slices[:dim], piece, *slices[dim + 1 :])

    return [SharedSlices(cut(both.one, at), cut(both.other, at)) for at in range(0, dims[dim], each)]


def parcels_of(nbytes: int) -> int:
    """Return into how many parcels a tile that is handed on is cut at most: each is large enough to travel alone. There
    are fewer where these are of whole rows."""
    return max(1, min(PARCELS, nbytes // (TOGETHER + 1)))


def goes_in_parcels(cluster: Cluster, a: str, b: str) -> bool:
    """Return whether what a rank on `a` hands on to one on `b` goes on in parcels while it comes, not whole."""
    return cluster.carrier(a, b) == GLOO and "cuda" not in (cluster.device(a).kind, cluster.device(b).kind)


class TileEnds(NamedTuple):
    """The meshes at both ends of an edge."""

    edge: Edge
    source: Mesh
    target: Mesh

    def arrived(self, number: int, taker: int) -> TensorTile:
        """Return the tile of a value that a place takes."""
        return tile_of(arriving_values(self.edge)[number].type, self.target, taker)

    def shared(self, number: int, sender: int, taker: int) -> tuple[TensorTile, TensorTile]:
        """Return the tiles of a value that two places have."""
        return tile_of(self.edge.values[number].type, self.source, sender), self.arrived(number, taker)

    def alike(self, one: int, other: int) -> frozenset[int]:
        """Return the numbers of the values of which two places take the same."""
        numbers = range(len(self.edge.values))
        return frozenset(n for n in numbers if self.arrived(n, one) == self.arrived(n, other))

    def taken_bytes(self, number: int, taker: int) -> int:
        """Return the bytes of a value that a place takes, without padding."""
        t = self.edge.values[number].type.plain
        return t.with_shape((self.arrived(number, taker).size,)).nbytes

    def parcel_bytes(self, number: int, taker: int) -> int:
        """Return the bytes of the largest parcel of a value that is handed on to a place."""
        value, tile = self.edge.values[number], self.arrived(number, taker)
        cut = [parcel for both in overlaps(tile, tile) for parcel in _parcels(both, value)]
        sizes = [prod(part.stop - part.start for part in parcel.one) for parcel in cut]
        return value.type.plain.with_shape((max(sizes, default=0),)).nbytes

    def slices(
        self, senders: Sequence[TileSender], taker: int, in_parcels: Set[_Numbered] = frozenset()
    ) -> dict[TileSender, tuple[TileSlice, ...]]:
        """Return what a place takes from each of the places that send to it, in their order. `in_parcels` are the tiles
        at the target that are handed on, and travel in parcels."""
        known: set[_Numbered] = set()
        result: dict[TileSender, tuple[TileSlice, ...]] = {}
        for sender in senders:
            pieces: list[TileSlice] = []
            for number, value in enumerate(self.edge.values):
                wanted, blocks = self.arrived(number, taker), list[SharedSlices]()
                for held in self._held(number, sender, taker):
                    if (number, held.ranges) not in known:
                        known.add((number, held.ranges))
                        blocks += overlaps(held, wanted)
                if sender.hands_on:
                    # It lies there as it does here.
                    blocks = [SharedSlices(both.other, both.other) for both in blocks]
                if (number, wanted.ranges) in in_parcels:
                    blocks = [parcel for both in blocks for parcel in _parcels(both, value)]
                for i, both in enumerate(blocks):
                    dims = tuple(part.stop - part.start for part in both.one)
                    name = value.name if dims == wanted.shape else f"{value.name}.tile{i}"
                    block = Value(name, value.type.plain.with_shape(dims))
                    pieces.append(TileSlice(block, value.name, both.one, both.other))
            result[sender] = tuple(pieces)
        return result

    def _held(self, number: int, sender: TileSender, taker: int) -> list[TensorTile]:
        """Return the tiles of a value, as they left, that a place can send to another."""
        t = self.edge.values[number].type
        if not sender.hands_on:
            return [tile_of(t, self.source, sender.place)]
        if number not in self.alike(sender.place, taker):
            return []
        return list(dict.fromkeys(tile_of(t, self.source, place) for place in self.source.teams()[0]))

    def needs(self, taker: int, but: Set[int] = frozenset()) -> dict[tuple[int, ...], int]:
        """Return the bytes that a place has to take from one of several places: those that have the same tiles. Values
        with the numbers `but` are left out."""
        held_by: dict[tuple[int, Ranges], list[int]] = {}
        places = self.source.teams()[0]
        for number in sorted(set(range(len(self.edge.values))) - but):
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
        # By edge, taker and number in the batch: the ranks that the taker receives from.
        self._senders: dict[tuple[EdgeEnds, int, int], list[int]] = {}
        self._handed: dict[EdgeEnds, set[_Numbered]] = {}
        # By edge, rank and number in the batch: the ranks that the rank hands on to.
        self._takers: dict[tuple[EdgeEnds, int, int], tuple[int, ...]] = {}
        self._slices: dict[tuple[EdgeEnds, int, int], tuple[TileSlice, ...]] = {}
        self._per_batch = module.schedule.microbatches if module.schedule is not None else 1
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
                    if ends in self._edges and (rank != action.peer) and self._sender(ends, action.peer) is not None:
                        line = self._senders.setdefault((ends, rank, self._unit(ends, action.mb)), [])
                        if action.peer not in line:
                            line.append(action.peer)
        self._handed = self._tiles_handed_on()
        for (ends, taker, unit), line in self._senders.items():
            for sender in line:
                if self.hands_on(ends, sender):
                    self._takers[ends, sender, unit] = (*self._takers.get((ends, sender, unit), ()), taker)

    def __bool__(self) -> bool:
        return bool(self._edges)

    def __contains__(self, ends: EdgeEnds) -> bool:
        return ends in self._edges

    def _unit(self, ends: EdgeEnds, number: int) -> int:
        """Return the number in the batch of a microbatch."""
        return 0 if ends[2] in PER_BATCH else number % self._per_batch

    def _sender(self, ends: EdgeEnds, rank: int) -> TileSender | None:
        """Return the place of a rank that sends; None where it runs neither of both stages."""
        if (ends[0], rank) in self._places:
            return TileSender(self._places[ends[0], rank])
        return TileSender(self._places[ends[1], rank], True) if (ends[1], rank) in self._places else None

    def _tiles_handed_on(self) -> dict[EdgeEnds, set[_Numbered]]:
        """Return the tiles at the targets of edges that some rank hands on to another."""
        handed: dict[EdgeEnds, set[_Numbered]] = {}
        for (ends, taker, _), senders in self._senders.items():
            both, place = self._ends[ends], self._places.get((ends[1], taker))
            for sender in (self._sender(ends, rank) for rank in senders):
                if sender is not None and sender.hands_on and place is not None:
                    numbers = both.alike(sender.place, place)
                    handed.setdefault(ends, set()).update((n, both.arrived(n, place).ranges) for n in numbers)
        return handed

    def senders(self, ends: EdgeEnds, taker: int, number: int) -> tuple[int, ...]:
        """Return the ranks that a rank receives tiles of a microbatch or batch from, in order."""
        return tuple(self._senders.get((ends, taker, self._unit(ends, number)), ()))

    def handed_to(self, ends: EdgeEnds, rank: int, number: int) -> tuple[int, ...]:
        """Return the ranks that a rank hands tiles of a microbatch or batch on to."""
        return self._takers.get((ends, rank, self._unit(ends, number)), ())

    def hands_on(self, ends: EdgeEnds, rank: int) -> bool:
        """Return whether a rank that sends tiles of an edge hands on what has come to its stage."""
        sender = self._sender(ends, rank)
        return sender is not None and sender.hands_on

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
        key = (ends, sender, taker)
        if key not in self._slices:
            lines = ((end, of, line) for (end, of, _), line in self._senders.items())
            ranks = next((line for end, of, line in lines if (end, of) == (ends, taker) and sender in line), [])
            places = [place for rank in ranks if (place := self._sender(ends, rank)) is not None]
            by_place = self._ends[ends].slices(places, self._places[ends[1], taker], self._handed.get(ends, set()))
            for rank, place in zip(ranks, places, strict=True):
                self._slices[ends, rank, taker] = by_place[place]
        return self._slices.get(key, ())

    def messages(self) -> Iterator[tuple[EdgeEnds, int, int, tuple[Value, ...]]]:
        """Yield the ends of all messages, their ranks, and the values in them."""
        lines = self._senders.items()
        for ends, sender, taker in dict.fromkeys((ends, s, taker) for (ends, taker, _), line in lines for s in line):
            yield ends, sender, taker, tuple(piece.value for piece in self.slices(ends, sender, taker))

    def moved_bytes(self, ends: EdgeEnds) -> dict[str, int]:
        """Return the bytes of each value that travel over an edge for a microbatch or batch, over all ranks and links
        of chains; nothing before receives say who sends."""
        moved: dict[str, int] = {}
        lines = [(taker, of, line) for (end, taker, of), line in self._senders.items() if end == ends]
        first = min((of for _, of, _ in lines), default=0)
        for taker, of, line in lines:
            for piece in (piece for sender in line if of == first for piece in self.slices(ends, sender, taker)):
                moved[piece.whole] = moved.get(piece.whole, 0) + piece.value.type.nbytes
        return moved

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
    if action.kind in HANDS:
        return other, action.stage, action.phase
    return (action.stage, other, action.phase) if action.kind in SENDS else (other, action.stage, action.phase)


def message_values(module: Module, ends: EdgeEnds, sender: int, taker: int) -> tuple[Value, ...]:
    """Return the values in the messages of an edge between two ranks: those of the edge, or slices of them."""
    messages = tile_messages(module)
    if ends in messages:
        return tuple(piece.value for piece in messages.slices(ends, sender, taker))
    return tuple(v for e in _edges_at(module, ends) for v in module.local_values(e.values, e.src))


def moved_bytes(module: Module, edge: Edge) -> dict[str, int]:
    """Return the bytes of each value of an edge that travel for a microbatch or batch: those of all messages where it
    travels in tiles, else those of the value."""
    ends = (edge.src, edge.dst, edge.phase)
    moved = tile_messages(module).moved_bytes(ends) if travels_in_tiles(edge) else {}
    return moved or {value.name: value.type.nbytes for value in edge.values}


def _edges_at(module: Module, ends: EdgeEnds) -> Iterator[Edge]:
    return (edge for edge in module.edges if (edge.src, edge.dst, edge.phase) == ends)
