"""Blocks of collectives between ranks that share no memory, over gloo.

In: blocks that members of a group send to each other, in numbered turns. Out: the blocks of the others.

Groups have connections of their own, so that their tags meet no other's. In each turn a member sends every receiver a
text, which says what the blocks are, under the number of the turn. The block follows under a tag made of that text. A
receiver that expects other blocks reads the text, and gets no wrong block. Sends and receives of a turn begin together,
and gloo moves them in a thread of its own.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from penstock.ir.schedule import Action
from penstock.ir.types import TensorType
from penstock.runtime.state.tensors import Recycled

from .rounds import Array, Round, nbytes_of
from .senders import LOST, Failures, Sender, Works
from .shared_board import MemberElsewhere, MemberLost

_TEXT = TensorType("u8", (256,))
# Tags of texts: so many for each group, as groups of the same ranks in another order share connections. From _BLOCKS on
# those of blocks.
_TURNS, _BLOCKS = 1 << 16, 1 << 30
# Sends name no action: errors of theirs name the group's next turn.
_NOTHING = Action("F", 0, 0)


class GlooGroup:
    """A group of ranks that share no memory. `number` tells it from others, and is the same on all of them. `group` is
    torch's, whose members are in the order of their ranks. Turns have numbers from 1 on."""

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int], rank: int, number: int, seconds: float) -> None:
        self.place, self.members = ranks.index(rank), len(ranks)
        order = sorted(ranks)
        self._ends, self._number = [order.index(other) for other in ranks], number
        self._group, self._timeout = group, timedelta(seconds=max(seconds, 0.001))
        self._buffers = Recycled()
        self._failed: Failures = []
        self._sender = Sender(self._timeout, self._failed)
        self._arriving: dict[int, dict[int, tuple[list[dist.Work], torch.Tensor, torch.Tensor]]] = {}

    def stand(self, text: bytes) -> None:
        """Say nothing: the other members hear of this one by its blocks."""

    def post(self, turn: int, text: bytes, blocks: Round, x: Array, out: Array) -> None:
        """Send the blocks of a turn, and get ready for those of others."""
        if self._failed:
            raise self._lost(blocks.receivers[0], self._failed[0][1])
        size, tag = TensorType("u8", (nbytes_of(blocks),)), self._tag(text, nbytes_of(blocks))
        try:
            self._arriving[turn] = {member: self._expect(turn, tag, size, member) for member in blocks.sources}
            works: Works = []
            block = None
            for member in blocks.receivers:
                if block is None or not blocks.alike:
                    block = self._buffers.tensor(size)
                    blocks.fill(_typed(block, blocks), x, out, member)
                head, end = self._head(text), self._ends[member]
                works.append((self._group.send([head], end, self._turn(turn)), head))
                works.append((self._group.send([block], end, tag), block))
        except LOST as error:
            raise self._lost(blocks.receivers[0], error) from error
        if works:
            self._sender.hold(_NOTHING, works)

    def collect(self, turn: int, text: bytes, blocks: Round) -> dict[int, Array]:
        """Wait for the blocks of a turn."""
        arrived = {}
        for member, (works, head, block) in self._arriving[turn].items():
            try:
                works[0].wait(self._timeout)
                said = _said(head)
                if said != text[: _TEXT.nbytes]:
                    raise MemberElsewhere(member, said.decode(errors="replace"))
                works[1].wait(self._timeout)
            except MemberElsewhere:
                raise
            except LOST as error:
                raise self._lost(member, error) from error
            arrived[member] = _typed(block, blocks)
        return arrived

    def done(self, turn: int, blocks: Round) -> None:
        """Let go of the blocks of a turn."""
        del self._arriving[turn]

    def lend(self, nbytes: int) -> Array | None:
        """Return nothing: no memory is shared."""
        return None

    def _expect(
        self, turn: int, tag: int, size: TensorType, member: int
    ) -> tuple[list[dist.Work], torch.Tensor, torch.Tensor]:
        head, block = self._buffers.tensor(_TEXT), self._buffers.tensor(size)
        end = self._ends[member]
        works = [self._group.recv([head], end, self._turn(turn)), self._group.recv([block], end, tag)]
        return works, head, block

    def _turn(self, turn: int) -> int:
        return self._number * _TURNS + turn % _TURNS

    def _tag(self, text: bytes, nbytes: int) -> int:
        """Return the tag of blocks, which no text has."""
        return _BLOCKS + (zlib.crc32(b"%d %d %s" % (self._number, nbytes, text)) & (_BLOCKS - 1))

    def _head(self, text: bytes) -> torch.Tensor:
        head = self._buffers.tensor(_TEXT)
        head.numpy()[:] = np.frombuffer(text[: _TEXT.nbytes].ljust(_TEXT.nbytes, b"\0"), np.uint8)
        return head

    @staticmethod
    def _lost(member: int, error: Exception) -> MemberLost:
        text = str(error).splitlines()[0] if str(error) else ""
        return MemberLost(member, text, late="imed out" in text or "timeout" in text)


def _typed(block: torch.Tensor, blocks: Round) -> Array:
    return block.numpy().view(blocks.dtype).reshape(blocks.shape)


def _said(head: torch.Tensor) -> bytes:
    return head.numpy().tobytes().rstrip(b"\0")
