"""Collectives of one rank: the exchange that its stage is loaded with.

In: the module, and the groups that this rank is in (group/group.py). Out: results of collectives, bit for bit those
of the interpreter.

Every member of a group sends each other one its part, and adds up what it gets in the order of the group (rounds.py).
Blocks go over a carrier: memory that ranks of a host share (shared_board.py), or gloo (gloo_blocks.py). They leave when
a collective begins, and arrive while the program computes. What arrived is read when the program waits. Only the second
round of a large all_reduce waits for the first one of the others. Groups of GPUs leave all of it to NCCL
(library_group.py).

All members of a group run the same graph, so their collectives are numbered alike. With every block goes a text: the
action, the collective and its number in the graph. Where the texts differ, the programs disagree, and nothing is added
up. Groups over `dp` work on several microbatches, so there the text leaves out which one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch

from penstock.ir.collective_calls import CollectiveCall, JointSum, group_of, sent_bytes
from penstock.ir.graph import REPLICAS, Module
from penstock.ir.schedule import Action
from penstock.runtime.messages.status import describe
from penstock.runtime.state.tensors import CPU, as_array
from penstock.support.errors import PeerLost, VerifyError

from .rounds import Array, Round, rounds_of
from .shared_board import MemberElsewhere, MemberLost


class Carrier(Protocol):
    """The way of blocks between the members of a group, which go by their places in it."""

    place: int
    members: int

    def stand(self, text: bytes) -> None:
        """Say where this rank is."""

    def post(self, turn: int, text: bytes, blocks: Round, x: Array, out: Array) -> None:
        """Send the blocks of a turn."""

    def collect(self, turn: int, text: bytes, blocks: Round) -> dict[int, Array]:
        """Wait for the blocks of others."""

    def done(self, turn: int, blocks: Round) -> None:
        """Let go of the blocks of a turn, once the others have read what is lent."""

    def lend(self, nbytes: int) -> Array | None:
        """Return memory that the other members can read, if there is such."""


class DeviceGroup(Protocol):
    """A group of GPUs whose library does collectives itself."""

    place: int
    members: int

    def begin(self, call: CollectiveCall, x: torch.Tensor, out: torch.Tensor) -> None:
        """Begin a collective behind what its device does."""

    def wait(self, call: CollectiveCall) -> None:
        """Let the device wait for it."""


class CollectiveEvent(NamedTuple):
    """A collective of a run, for traces: what it was, when it began, and when the program waited for it and went on.
    Seconds on the host's monotonic clock."""

    text: str
    begun: float
    waited: float
    ended: float


@dataclass(slots=True)
class _Known:
    """The preparation of a collective, made at its first call."""

    ranks: tuple[int, ...]
    carrier: Carrier
    device: DeviceGroup | None
    rounds: tuple[Round, ...]
    text: bytes
    over_replicas: bool
    nbytes: int


@dataclass(slots=True)
class _Begun:
    """A collective that has begun: the number of its first turn, its text, its tensors, and where a copy goes to."""

    turn: int
    text: bytes
    x: Array
    out: Array
    held: tuple[torch.Tensor, torch.Tensor]
    copied: bool
    at: float


class _Alone:
    """A group of one rank."""

    place, members = 0, 1

    def stand(self, text: bytes) -> None:
        """Say nothing."""

    def post(self, turn: int, text: bytes, blocks: Round, x: Array, out: Array) -> None:
        """Send nothing."""

    def collect(self, turn: int, text: bytes, blocks: Round) -> dict[int, Array]:
        """Return nothing."""
        return {}

    def done(self, turn: int, blocks: Round) -> None:
        """Let go of nothing."""

    def lend(self, nbytes: int) -> Array | None:
        """Lend nothing."""
        return None


class RankExchange:
    """The collectives of one rank. The groups come with `join`, when the rank knows its device and its peers."""

    def __init__(self, module: Module, rank: int, seconds: float) -> None:
        self._module, self.rank, self._seconds = module, rank, seconds
        self._homes = module.rank_stages()
        self._groups: dict[tuple[int, ...], Carrier] = {}
        self._devices: dict[tuple[int, ...], DeviceGroup] = {}
        self._turns: dict[tuple[int, ...], int] = {}
        self._known: dict[str, _Known] = {}
        # Those of one graph are waited for before it runs again. Sums of several batches may be under way.
        self._begun: dict[str, list[_Begun]] = {}
        self._lent: set[str] = set()
        self._action: Action | None = None
        self._at = b""
        # Collectives done, bytes sent, seconds waited, and events for traces.
        self.count, self.sent, self.waited = 0, 0, 0.0
        self.events: list[CollectiveEvent] | None = None

    def join(
        self, groups: Mapping[tuple[int, ...], Carrier], devices: Mapping[tuple[int, ...], DeviceGroup] | None = None
    ) -> None:
        """Use these groups, by their ranks."""
        self._groups |= groups
        self._devices |= devices or {}

    def lend(self, call: JointSum, nbytes: int) -> Array | None:
        """Return memory for the gradients of a sum from which the other ranks can read them; None where there is none.
        All ranks of a group do the same."""
        carrier = self._groups.get(group_of(self._module, self.rank, call.over))
        memory = None if carrier is None else carrier.lend(nbytes)
        if memory is not None:
            self._lent.add(call.key)
        return memory

    def enter(self, action: Action) -> None:
        """Say which action runs from here on."""
        self._action = action
        if self._groups:
            self._at = _place_of(action).encode()
            for carrier in self._groups.values():
                carrier.stand(self._at)

    # -------------------------------------------------------------------------------------------- the exchange

    def begin(self, call: CollectiveCall, x: torch.Tensor, out: torch.Tensor) -> None:
        """Begin a collective: its blocks leave."""
        known = self._known.get(call.key) or self._prepare(call)
        carrier = known.carrier
        self.count += 1
        self.sent += known.nbytes
        at = time.monotonic()
        if known.device is not None:
            known.device.begin(call, x, out)
            begun = _Begun(0, self._text(known), _NONE, _NONE, (x, out), False, at)
            self._begun.setdefault(call.key, []).append(begun)
            return
        copied = out.device != CPU
        operand, result = as_array(x), _writable(out)
        turn = self._turns[known.ranks]
        self._turns[known.ranks] = turn + len(known.rounds)
        begun = _Begun(turn, self._text(known), operand, result, (x, out), copied, at)
        try:
            carrier.post(turn, begun.text, known.rounds[0], operand, result)
        except (MemberLost, MemberElsewhere) as error:
            raise self._failed(call, known, error) from error
        self._begun.setdefault(call.key, []).append(begun)

    def wait(self, call: CollectiveCall) -> None:
        """Wait for the result of a collective, of those with one name for the first that began."""
        known, begun = self._known[call.key], self._begun[call.key].pop(0)
        carrier = known.carrier
        waited = time.monotonic()
        if known.device is not None:
            known.device.wait(call)
        else:
            try:
                self._finish(known, begun, carrier)
            except (MemberLost, MemberElsewhere) as error:
                raise self._failed(call, known, error) from error
            if begun.copied:
                begun.held[1].copy_(_tensor(begun.out, begun.held[1]))
        ended = time.monotonic()
        self.waited += ended - waited
        if self.events is not None:
            self.events.append(CollectiveEvent(begun.text.decode(), begun.at, waited, ended))

    def _finish(self, known: _Known, begun: _Begun, carrier: Carrier) -> None:
        for i, blocks in enumerate(known.rounds):
            turn = begun.turn + i
            if i:
                carrier.post(turn, begun.text, blocks, begun.x, begun.out)
            blocks.take(begun.x, begun.out, carrier.collect(turn, begun.text, blocks))
            carrier.done(turn, blocks)

    # -------------------------------------------------------------------------------------------- words

    def _prepare(self, call: CollectiveCall) -> _Known:
        ranks = group_of(self._module, self.rank, call.over)
        device = self._devices.get(ranks)
        carrier = _ALONE if len(ranks) == 1 or device is not None else self._groups.get(ranks)
        if carrier is None:
            raise VerifyError(
                f"no group of ranks {', '.join(map(str, ranks))} was formed", where=f"@{call.graph}: {call}"
            )
        self._turns.setdefault(ranks, 1)
        known = self._known[call.key] = _Known(
            ranks,
            carrier,
            device,
            rounds_of(call, len(ranks), ranks.index(self.rank), call.key in self._lent),
            f", {call} #{call.number}".encode(),
            REPLICAS in call.over,
            call.sent(len(ranks)) if isinstance(call, JointSum) else sent_bytes(call.op, len(ranks)),
        )
        return known

    def _text(self, known: _Known) -> bytes:
        """Return the text of a collective in the action under way, the same on all members."""
        if not known.over_replicas or self._action is None:
            return self._at + known.text
        return f"{self._action.stage}{self._action.kind}".encode() + known.text

    def _failed(
        self, call: CollectiveCall, known: _Known, error: MemberLost | MemberElsewhere
    ) -> PeerLost | VerifyError:
        peer = known.ranks[error.member]
        here = f"rank {self.rank}" + (f" in {_place_of(self._action)}" if self._action is not None else "")
        stands = f"{here}, {call}, waits for rank {peer}"
        stage = self._homes[self.rank]
        place = f"rank {self.rank}, stage {stage}"
        if self._action is not None:
            place += f", action {self._action}"
        there = f", which is in {error.standing.rpartition(' #')[0] or error.standing}" if error.standing else ""
        if isinstance(error, MemberElsewhere):
            hint = "the ranks of a group must run the same actions in the same order"
            return VerifyError(stands + there, where=place, hint=hint)
        detail = str(error).partition("] ")[2] if str(error).startswith("[") else str(error)
        what = (
            f"did not answer within {self._seconds:g} s"
            if error.late
            else f"closed the connection ({detail.partition('. ')[0].rstrip('.')})"
        )
        waited = describe(self._action) if self._action is not None else call.graph
        return PeerLost(
            f"rank {peer} (stage {self._homes[peer]}) {what}; waited for {call} of {waited}: {stands}{there}",
            where=place,
            hint="if it was only slow, give a longer --timeout" if error.late else "",
        )


_NONE, _ALONE = np.empty(0), _Alone()


def _place_of(action: Action | None) -> str:
    return "" if action is None else f"{action.stage}{action.kind}{action.mb}"


def _writable(out: torch.Tensor) -> Array:
    """Return the memory of a result: its own, or on the host where it is on another device."""
    return as_array(out if out.device == CPU else torch.empty(out.shape, dtype=out.dtype))


def _tensor(array: Array, like: torch.Tensor) -> torch.Tensor:
    return (
        torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        if like.dtype == torch.bfloat16
        else torch.from_numpy(array)
    )
