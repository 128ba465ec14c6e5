"""Blocks of memory, from the entries that a ledger wrote down of values and messages.

In: entries, one after the other. Out: the blocks that live, and those that did.

A block lives from when a receive has it, or a value is kept in it, until the last value in it is dropped. Its
address says which one it is, as long as it lives. One that was sent may be there for longer. It is away until the peer
has it, and counts as that where nothing lives in it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.runtime.messages.ledger import LedgerEntry

VALUES = ("post", "keep", "drop", "send", "sent")


@dataclass(slots=True)
class Stay:
    """A block, with the values that have ever been in it, and how many of them still are, once for each stage that
    holds them. `ended` is None while it lives; `stage` as in the entries."""

    block: int
    owner: int
    nbytes: int
    begun: int
    names: list[str] = field(default_factory=list)
    held: int = 0
    ended: int | None = None
    stage: int | None = None


class Stays:
    """The blocks of memory of one rank, followed entry by entry: those that live now, and `all` that ever did. `nbytes`
    are the bytes of the living blocks. A block is away while a send of it is under way, and `most_away` are the most
    bytes that ever were."""

    def __init__(self) -> None:
        self.all: list[Stay] = []
        self.nbytes = self.most_away = 0
        self._living: dict[int, Stay] = {}
        # By address: how many sends of a block are under way, and its bytes.
        self._away: dict[int, tuple[int, int]] = {}

    @property
    def away(self) -> int:
        """Bytes of blocks that were sent and have not arrived, and in which nothing lives."""
        return sum(nbytes for block, (_, nbytes) in self._away.items() if block not in self._living)

    def follow(self, entry: LedgerEntry) -> None:
        """Follow an entry; entries about other things than values and messages change nothing."""
        match entry.what:
            case "post":
                self._begin(entry)
            case "keep":
                stay = self._living.get(entry.block) or self._begin(entry)
                if not stay.names:
                    # Of a message, the stage that takes it.
                    stay.stage = entry.stage
                stay.names.append(entry.name)
                stay.held += 1
            case "drop":
                stay = self._living[entry.block]
                stay.held -= 1
                if not stay.held:
                    stay.ended = entry.step
                    self.nbytes -= stay.nbytes
                    del self._living[entry.block]
            case "send":
                self._away[entry.block] = (self._away.get(entry.block, (0, 0))[0] + 1, entry.nbytes)
            case "sent":
                count, nbytes = self._away.pop(entry.block)
                if count > 1:
                    self._away[entry.block] = (count - 1, nbytes)
        self.most_away = max(self.most_away, self.away)

    def _begin(self, entry: LedgerEntry) -> Stay:
        stay = self._living[entry.block] = Stay(entry.block, entry.owner, entry.nbytes, entry.step, stage=entry.stage)
        self.all.append(stay)
        self.nbytes += stay.nbytes
        return stay
