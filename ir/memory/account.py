"""The account of a rank's memory over a run, block by block.

In: blocks with the actions that take them, use them and give them back, planned (predict.py) or measured
(runtime/messages/ledger.py). Out: live bytes after every action, by purpose; what happens when; the first thing in
which two accounts differ.

Actions are counted from 0 in the order in which the rank runs them; what is there before the first of them was taken at
BEFORE. A block is live after the action that takes it and no longer after the one that gives it back. Temporaries of a
compiled graph live inside of one action. So they are no blocks of this account, but sizes by graph (`workspace`). The
account leaves out batches that wait in host memory. It also leaves out messages that the transport holds until a peer
has received them, and freed memory that is kept for later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from penstock.ir.schedule import Action

BEFORE = -1


class Life(NamedTuple):
    """One stay in a block of memory. `owner` is the microbatch, -1 - t for batch t, None for a variable, of which it is
    buffer number `copy`. `given_at` is None for what is there at the end. `uses` are the actions that make, write or
    read what is in it; `block` is its address, where measured. `stage` is the one of the rank that it was taken for."""

    purpose: str
    names: tuple[str, ...]
    owner: int | None
    nbytes: int
    taken_at: int
    given_at: int | None
    copy: int = 0
    uses: tuple[int, ...] = ()
    block: str = ""
    stage: int = 0

    @property
    def label(self) -> str:
        if self.owner is None:
            return f"@{self.names[0]}#{self.copy}"
        owner = f"microbatch {self.owner}" if self.owner >= 0 else f"batch {-1 - self.owner}"
        return f"{' '.join(f'%{name}' for name in self.names)} of {owner}"


@dataclass(frozen=True, slots=True)
class Version:
    """A version of a parameter, from the update that writes it into buffer `copy` to the action after which no action
    reads it."""

    name: str
    version: int
    copy: int
    written: int
    retired: int | None


class Happening(NamedTuple):
    """One act of an action on memory: take, give (a block), write, retire (a version)."""

    step: int
    what: str
    names: tuple[str, ...]
    owner: int | None
    copy: int
    version: int
    nbytes: int

    def __str__(self) -> str:
        if self.what in ("write", "retire"):
            return f"{self.what} version {self.version} of @{self.names[0]} in buffer {self.copy}"
        return (
            f"{self.what} {self.nbytes} bytes for "
            f"{Life('', self.names, self.owner, self.nbytes, 0, None, self.copy).label}"
        )


@dataclass(frozen=True, slots=True)
class Account:
    """The memory of one rank in a run. `workspace` are the sizes of a call's temporaries by kind of graph, of graphs
    where they are known; `times` the seconds at which actions began and ended, where measured."""

    rank: int
    actions: tuple[Action, ...]
    lives: tuple[Life, ...]
    versions: tuple[Version, ...] = ()
    workspace: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    times: tuple[tuple[float, float], ...] = ()

    def curve(self) -> list[int]:
        """Return the live bytes after each action."""
        changes = [0] * (len(self.actions) + 1)
        for life in self.lives:
            changes[life.taken_at + 1] += life.nbytes
            if life.given_at is not None:
                changes[life.given_at + 1] -= life.nbytes
        return list(accumulate(changes))[1:]

    def live_at(self, step: int) -> list[Life]:
        """Return the blocks that live after an action, the largest first."""
        lives = (
            life for life in self.lives if life.taken_at <= step and (life.given_at is None or life.given_at > step)
        )
        return sorted(lives, key=lambda life: (-life.nbytes, life.label))

    def happenings(self) -> list[Happening]:
        """Return all that happens to memory, in the order of actions, and in the order of names within one action."""
        return sorted(
            self._happenings(),
            key=lambda h: (h.step, h.what, h.names, h.owner is None, h.owner or 0, h.copy, h.version, h.nbytes),
        )

    def _happenings(self) -> Iterator[Happening]:
        for life in self.lives:
            yield Happening(life.taken_at, "take", life.names, life.owner, life.copy, 0, life.nbytes)
            if life.given_at is not None:
                yield Happening(life.given_at, "give", life.names, life.owner, life.copy, 0, life.nbytes)
        for version in self.versions:
            yield Happening(version.written, "write", (version.name,), None, version.copy, version.version, 0)
            if version.retired is not None:
                yield Happening(version.retired, "retire", (version.name,), None, version.copy, version.version, 0)


@dataclass(frozen=True, slots=True)
class AccountDifference:
    """The first thing in which a measured account is not the planned one. `step` and `action` are
    None where they differ for the whole run."""

    rank: int
    step: int | None
    action: Action | None
    planned_bytes: int
    measured_bytes: int
    only_planned: tuple[str, ...]
    only_measured: tuple[str, ...]

    def __str__(self) -> str:
        at = (
            ""
            if self.step is None
            else "before the first action"
            if self.action is None
            else f"action {self.step}, {self.action}"
        )
        parts = [f"rank {self.rank}" + (f", {at}" if at else "")]
        if self.planned_bytes != self.measured_bytes:
            parts.append(f"{self.planned_bytes} bytes live as planned, {self.measured_bytes} as measured")
        for what, listed in (("only planned", self.only_planned), ("only measured", self.only_measured)):
            if listed:
                more = f", and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
                parts.append(f"{what}: {', '.join(listed[:_SHOWN])}{more}")
        return "; ".join(parts)


_SHOWN = 4


def first_difference(planned: Account, measured: Account) -> AccountDifference | None:
    """Return the first difference between two accounts. It is None where both ran the same actions with the same
    effects, and calls have the same temporaries."""
    rank = planned.rank
    for step, (expected, ran) in enumerate(zip(planned.actions, measured.actions, strict=False)):
        if expected != ran:
            return AccountDifference(rank, step, ran, 0, 0, (f"action {expected}",), (f"action {ran}",))
    if len(planned.actions) != len(measured.actions):
        return AccountDifference(
            rank, None, None, 0, 0, (f"{len(planned.actions)} actions",), (f"{len(measured.actions)} actions",)
        )
    by_step = [_by_step(account) for account in (planned, measured)]
    for step in range(BEFORE, len(planned.actions)):
        expected_here, measured_here = (account.get(step, Counter()) for account in by_step)
        if expected_here != measured_here:
            expected_bytes, measured_bytes = (
                sum(life.nbytes for life in account.live_at(step)) for account in (planned, measured)
            )
            action = planned.actions[step] if step >= 0 else None
            missing, more = (
                tuple(sorted(map(str, c.elements())))
                for c in (expected_here - measured_here, measured_here - expected_here)
            )
            return AccountDifference(rank, step, action, expected_bytes, measured_bytes, missing, more)
    for kind in planned.workspace.keys() & measured.workspace.keys():
        sizes = [sorted(account.workspace[kind]) for account in (planned, measured)]
        if sizes[0] != sizes[1]:
            texts = [f"temporaries of {kind} of {', '.join(map(str, row)) or 'no'} bytes" for row in sizes]
            return AccountDifference(rank, None, None, sum(sizes[0]), sum(sizes[1]), (texts[0],), (texts[1],))
    return None


def _by_step(account: Account) -> dict[int, Counter[Happening]]:
    table: dict[int, Counter[Happening]] = {}
    for happening in account.happenings():
        table.setdefault(happening.step, Counter())[happening] += 1
    return table
