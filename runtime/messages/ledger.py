"""The entries that a rank writes down of its memory while a run is traced.

In: tensors that come and go, from the store and the transport. Out: entries, in order.

Actions count from 0 over all runs of the rank; -1 is before the first. An entry says when, and in which action, what
happened to which block:

    own       a buffer of a variable is there: its number as block, and the version that it holds, where it has versions
    give      the memory of a variable is given back: its contents are at home in another space
    write     an update has made a version of a parameter          retire    no action will read a version after this
    post      a receive has memory for a message                   keep      a value is held under a name
    drop      a value is let go of
    call      a block that a call of a graph takes for temporaries, at the first call
    send      a message is handed to gloo, and stays there until it is sent
    sent      the message is with the peer (during whatever action that was)
    run       actions from here on are of batches from this one on

The block of a value is the memory that its tensor lies in, by address. Values of one message are in one block, and
blocks are used again. Without a ledger nothing is written, and nothing costs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from penstock.backends.interface import Temporary
from penstock.ir.memory.account import BEFORE

if TYPE_CHECKING:
    import torch


class LedgerEntry(NamedTuple):
    """One event in a block of memory. `owner` is the microbatch of a value, -1 - t for batch t, the first batch of a
    run, and 0 for all else. `nbytes` are those of the block. Of a call `name` is the kind of graph, with the first and
    the last kernel that work in the block. `stage` is the one that ran, on a rank that runs several."""

    at: float
    step: int
    what: str
    name: str
    owner: int
    block: int
    nbytes: int
    version: int | None = None
    stage: int | None = None


class CopyTimes(NamedTuple):
    """A copy: what it was, its bytes, when it began and ended, and the seconds that the program waited for it."""

    text: str
    nbytes: int
    begun: float
    ended: float
    waited: float


class Ledger:
    """Entries of one rank. `step` is the action that is being run, `stage` that of the action where the rank runs
    several."""

    def __init__(self) -> None:
        self.entries: list[LedgerEntry] = []
        self.step = BEFORE
        self.stage: int | None = None

    def begin(self, stage: int) -> None:
        """Enter what follows as of the next action."""
        self.step += 1
        if self.stage is not None:
            self.stage = stage

    def value(self, what: str, name: str, owner: int, tensor: torch.Tensor) -> None:
        memory = tensor.untyped_storage()
        if not memory.nbytes():
            return
        self._enter(what, name, owner, memory.data_ptr(), memory.nbytes())

    def variable(self, what: str, name: str, buffer: int, nbytes: int, version: int | None) -> None:
        self._enter(what, name, 0, buffer, nbytes, version)

    def call(self, kind: str, blocks: Sequence[Temporary]) -> None:
        """Enter the temporaries of a graph; one of no bytes stands for none."""
        for number, block in enumerate(blocks or [Temporary(0, "", "")]):
            name = " ".join((kind, block.first, block.last))
            self._enter("call", name, 0, number, block.nbytes)

    def _enter(self, what: str, name: str, owner: int, block: int, nbytes: int, version: int | None = None) -> None:
        self.entries.append(
            LedgerEntry(time.monotonic(), self.step, what, name, owner, block, nbytes, version, self.stage)
        )

    def run(self, first: int) -> None:
        """Enter that a run begins with the next action."""
        self.entries.append(LedgerEntry(time.monotonic(), self.step + 1, "run", "", first, 0, 0))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude entries that are made inside of the block from the run."""
        kept, self.entries = self.entries, []
        try:
            yield
        finally:
            self.entries = kept

    def taken(self) -> tuple[LedgerEntry, ...]:
        """Return the entries since the last time."""
        entries, self.entries = tuple(self.entries), []
        return entries
