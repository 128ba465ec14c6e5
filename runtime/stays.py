"""Blocks of memory out of what a ledger wrote down of values and messages. In: entries, one after the other. Out: the blocks that live, and those that did.

A block lives from when a receive has it, or a value is kept in it, until the last value in it is dropped. Its address says which one it is, as long as it lives.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .ledger import Entry

VALUES = ("post", "keep", "drop")


@dataclass(slots=True)
class Stay:
    """A block, with the values that have ever been in it, and how many of them still are. `given` is None while it lives."""

    block: int
    owner: int
    nbytes: int
    taken: int
    names: list[str] = field(default_factory=list)
    held: int = 0
    given: int | None = None


class Stays:
    """What lives after the entries so far, and `all` that ever did; `nbytes` are those of what lives."""

    def __init__(self) -> None:
        self.all: list[Stay] = []
        self.nbytes = 0
        self._living: dict[int, Stay] = {}

    def follow(self, entry: Entry) -> None:
        """Entries about other things than values and messages change nothing."""
        match entry.what:
            case "post":
                self._begin(entry)
            case "keep":
                stay = self._living.get(entry.block) or self._begin(entry)
                stay.names.append(entry.name)
                stay.held += 1
            case "drop":
                stay = self._living[entry.block]
                stay.held -= 1
                if not stay.held:
                    stay.given = entry.step
                    self.nbytes -= stay.nbytes
                    del self._living[entry.block]

    def _begin(self, entry: Entry) -> Stay:
        stay = self._living[entry.block] = Stay(entry.block, entry.owner, entry.nbytes, entry.step)
        self.all.append(stay)
        self.nbytes += stay.nbytes
        return stay
