"""Several values in one message (ir/messages.py says which).

In: the values of an edge, or memory for those that arrive. Out: the tensors that gloo sends or fills.

A value that travels alone is sent from its tensor and received into one. Those that share a message are copied into
memory for it, with gaps, and are parts of the memory that it arrived in.

Of values that travel in tiles (ir/sharding/tile_messages.py), slices are copied out of the sender's parts. The taker
copies them into its own, unless one slice is all that it takes.

A microbatch of a smaller size of the model (ir/ladder) has smaller values. Its messages lie in blocks of the size of
those that the largest one has, and so take no memory of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from penstock.ir.graph import Value
from penstock.ir.messages import Parcel, parcels
from penstock.ir.sharding.tile_messages import EdgeEnds, TileMessages, TileSlice
from penstock.ir.types import TensorType
from penstock.runtime.state.tensors import CPU, TORCH_DTYPES, Recycled, allocate


class EdgePacking:
    """The messages of one edge on one side. `buffers` gives the memory of messages; values are on `device`. Blocks
    have one of the sizes in `rooms`, where one is large enough."""

    def __init__(
        self, values: Sequence[Value], buffers: Recycled, device: torch.device = CPU, rooms: Sequence[int] = ()
    ) -> None:
        self._values, self.parcels = tuple(values), parcels(values)
        self.names = tuple(value.name for value in values)
        types = [self._memory(parcel) for parcel in self.parcels]
        room = [min((size for size in rooms if size >= type.nbytes), default=0) for type in types]
        self._lend = [buffers.lender(*each) for each in zip(types, room, strict=True)]
        # Whether each message is a value, in the order of the edge.
        self._plain = [parcel.numbers for parcel in self.parcels] == [(i,) for i in range(len(values))]
        self._empty = {i: allocate(value.type, device) for i, value in enumerate(values) if not value.type.nbytes}

    def __len__(self) -> int:
        return len(self.parcels)

    def sizes(self) -> list[int]:
        """Return the bytes of each message of a microbatch."""
        return [self._memory(parcel).nbytes for parcel in self.parcels]

    def messages(self) -> list[torch.Tensor]:
        """Return memory for all messages of one microbatch."""
        return [lend() for lend in self._lend]

    def pack(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the messages that carry these values, which are contiguous."""
        return [
            self.message(i, [tensors[number] for number in parcel.numbers]) for i, parcel in enumerate(self.parcels)
        ]

    def message(self, i: int, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return a message that carries its values."""
        parcel = self.parcels[i]
        if len(parcel.numbers) == 1:
            return tensors[0]
        message = self._lend[i]()
        for number, place, tensor in zip(parcel.numbers, parcel.places, tensors, strict=True):
            self._part(message, number, place).copy_(tensor)
        return message

    def values_in(self, i: int, message: torch.Tensor) -> list[torch.Tensor]:
        """Return the values that a message carries."""
        parcel = self.parcels[i]
        if len(parcel.numbers) == 1:
            return [message]
        return [self._part(message, *at) for at in zip(parcel.numbers, parcel.places, strict=True)]

    def unpack(self, messages: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the values, in the order of the edge."""
        if self._plain:
            return list(messages)
        values = dict(self._empty)
        for i, (parcel, message) in enumerate(zip(self.parcels, messages, strict=True)):
            values.update(zip(parcel.numbers, self.values_in(i, message), strict=True))
        return [values[number] for number in range(len(self._values))]

    def _memory(self, parcel: Parcel) -> TensorType:
        return self._values[parcel.numbers[0]].type if len(parcel.numbers) == 1 else TensorType("u8", (parcel.nbytes,))

    def _part(self, message: torch.Tensor, number: int, place: int) -> torch.Tensor:
        type = self._values[number].type
        return message[place : place + type.nbytes].view(TORCH_DTYPES[type.dtype]).view(type.dims)


class EdgePackings:
    """The messages of one edge on one side, of microbatches of every size. `values` are those of the edge by rung, the
    largest first; `rung_of` is the rung of a microbatch."""

    def __init__(
        self,
        values: Mapping[str, Sequence[Value]],
        rung_of: Callable[[int], str],
        buffers: Recycled,
        device: torch.device = CPU,
    ) -> None:
        self._rung_of, self._by_rung = rung_of, dict[str, EdgePacking]()
        rooms: list[int] = []
        for rung, of_rung in values.items():
            self._by_rung[rung] = EdgePacking(of_rung, buffers, device, rooms)
            rooms = rooms or self._by_rung[rung].sizes()
        self._only = self.all[0] if len(values) == 1 else None

    def of(self, mb: int) -> EdgePacking:
        """Return the messages of a microbatch."""
        return self._only or self._by_rung[self._rung_of(mb)]

    @property
    def all(self) -> list[EdgePacking]:
        """The messages of every size."""
        return list(self._by_rung.values())


class TiledMessages:
    """The tiles that one rank sends and takes, of microbatches of one size. Parts are on `device`."""

    def __init__(self, messages: TileMessages, rank: int, device: torch.device = CPU) -> None:
        self._messages, self._rank, self._buffers = messages, rank, Recycled(device)
        # What has come of a microbatch over an edge: parts by name, and the ranks that have sent theirs.
        self._coming: dict[tuple[EdgeEnds, int], tuple[dict[str, torch.Tensor], set[int]]] = {}
        self.width = max((len(parcels(values)) for *_, values in messages.messages()), default=1)

    def __contains__(self, ends: EdgeEnds) -> bool:
        return ends in self._messages

    def values(self, ends: EdgeEnds, sender: int, taker: int) -> tuple[Value, ...]:
        """Return the values in the messages of one rank to another."""
        return tuple(piece.value for piece in self._messages.slices(ends, sender, taker))

    def pieces(self, ends: EdgeEnds, sender: int, taker: int) -> tuple[TileSlice, ...]:
        """Return the slices in the messages of one rank to another."""
        return self._messages.slices(ends, sender, taker)

    def handed_on(self, ends: EdgeEnds, unit: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the ranks that this one hands tiles on to, and those that it has them from."""
        return self._messages.handed_to(ends, self._rank, unit), self._messages.senders(ends, self._rank, unit)

    def hands_on(self, ends: EdgeEnds, sender: int) -> bool:
        """Return whether a rank that sends tiles hands them on, and so is of the stage that takes them."""
        return self._messages.hands_on(ends, sender)

    def cut(self, ends: EdgeEnds, taker: int, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return what this rank sends to another, contiguous."""
        pieces = self._messages.slices(ends, self._rank, taker)
        return [tensors[piece.whole][piece.taken].contiguous() for piece in pieces]

    def put(self, ends: EdgeEnds, sender: int, unit: int, tiles: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Put tiles of a microbatch or batch in their places. Return the parts of which these are the first."""
        senders = self._messages.senders(ends, self._rank, unit)
        parts, known = self._coming.setdefault((ends, unit), ({}, set()))
        before = set(parts)
        pieces = self._messages.slices(ends, sender, self._rank)
        parts.update({p.whole: tile for p, tile in zip(pieces, tiles, strict=True) if p.is_all})
        for value in self._messages.arriving(ends) if not known else ():
            if value.name not in parts and not self._comes_whole(ends, senders, value.name):
                parts[value.name] = self._buffers.tensor(value.type)
                if self._is_padded(ends, senders, value):
                    parts[value.name].zero_()
        for piece, tile in zip(pieces, tiles, strict=True):
            if not piece.is_all:
                parts[piece.whole][piece.put] = tile
        known.add(sender)
        if len(known) == len(senders):
            del self._coming[ends, unit]
        return {name: part for name, part in parts.items() if name not in before}

    def _sizes(self, ends: EdgeEnds, senders: Sequence[int], name: str) -> list[tuple[bool, int]]:
        pieces = [piece for sender in senders for piece in self._messages.slices(ends, sender, self._rank)]
        return [(piece.is_all, piece.value.type.size) for piece in pieces if piece.whole == name]

    def _comes_whole(self, ends: EdgeEnds, senders: Sequence[int], name: str) -> bool:
        return any(is_all for is_all, _ in self._sizes(ends, senders, name))

    def _is_padded(self, ends: EdgeEnds, senders: Sequence[int], value: Value) -> bool:
        return sum(size for _, size in self._sizes(ends, senders, value.name)) < value.type.size
