"""The split of the values of an edge into messages.

In: the values. Out: parcels, the same on both ends, as they follow from types alone.

A message costs its ends processor time whatever it carries; to put several values into one costs a copy of each where
they are sent, and none where they arrive: they stay where they lie in the message. So values of at most TOGETHER bytes
share a message, and each larger one has its own; a value without elements is not sent. In a shared message each value
begins at a multiple of 64 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .graph import Value

# Less than a message costs its ends beside its bytes, by the rates of a message and of a copy; not tuned any further.
TOGETHER = 128 << 10
_ALIGNMENT = 64


class Parcel(NamedTuple):
    """A message: the values in it by their number in the edge, where each of them begins, and all bytes."""

    numbers: tuple[int, ...]
    places: tuple[int, ...]
    nbytes: int


def parcels(values: Sequence[Value]) -> tuple[Parcel, ...]:
    """Return the messages of an edge in the order in which they are sent. Shared ones come last, because packing takes
    time."""
    small = [i for i, value in enumerate(values) if 0 < value.type.nbytes <= TOGETHER]
    alone = [i for i, value in enumerate(values) if value.type.nbytes > TOGETHER or (len(small) == 1 and i == small[0])]
    messages = [Parcel((i,), (0,), values[i].type.nbytes) for i in alone]
    if len(small) > 1:
        places, total = [], 0
        for i in small:
            places.append(total)
            total += -(-values[i].type.nbytes // _ALIGNMENT) * _ALIGNMENT
        messages.append(Parcel(tuple(small), tuple(places), total))
    return tuple(messages)
