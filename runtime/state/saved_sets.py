"""Saved sets in another memory space: what forwards saved, between its copy out and the backward that takes it.

In: the saved set of a stage (ir/memory/saved_sets.py), its homes, the threads that copy. Out: the values of a
microbatch as tensors in memory of their own, once it is to come back.

All homes are opened at the start, as many as sets are away at once. The values of a set lie apart on the device. Into
a file they are written in pieces, so that direct writes have whole blocks; a GPU copies each by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from penstock.ir.action_kinds import COPY_IN, COPY_OUT, SAVED_ITEM
from penstock.ir.memory.saved_sets import SavedSet
from penstock.ir.schedule import Action
from penstock.support.errors import VerifyError

from .homes import Copying, Home, Lanes, Parts, cut
from .store import Store


@dataclass(slots=True)
class _Away:
    """The set of a microbatch that has a home: the copies that go on, if any, and what is copied home meanwhile."""

    home: Home
    parts: Parts = ()
    leaving: Copying | None = None
    coming: Copying | None = None


class SavedSets:
    """The saved sets of a stage that are elsewhere, by microbatch."""

    def __init__(self, saved: SavedSet, homes: Sequence[Home], lanes: Lanes) -> None:
        self.saved, self._free, self._lanes = saved, [*homes], lanes
        self.names = frozenset(saved.values)
        self._away: dict[int, _Away] = {}
        # Copies out are one after the other, so that all of them go through the same memory.
        self._pieces = lanes.pieces(saved.gathered)

    def move(self, action: Action, store: Store) -> None:
        """Do what an action says with the set of its microbatch; `store` has its values while they are there."""
        mb = action.mb
        if action.kind == COPY_OUT:
            self.store(mb, store.values.get(mb, {}), str(action))
        elif action.kind == COPY_IN:
            store.put_all(mb, self.bring(mb, str(action)))
        else:
            self.let_go(mb)
            store.keep_only(mb, frozenset(store.values[mb]) - self.names)

    def store(self, mb: int, tensors: Mapping[str, torch.Tensor], text: str) -> None:
        """Begin to copy the values of a microbatch to a home."""
        if mb in self._away or not self._free:
            what = "is at home already" if mb in self._away else "has no home: all are taken"
            raise VerifyError(f"what microbatch {mb} saved {what}", where=text)
        away = self._away[mb] = _Away(self._free.pop())
        away.parts = flat = [
            (self.saved.places[name], tensors[name].detach().reshape(-1).view(torch.uint8)) for name in self.names
        ]
        flat.sort(key=lambda part: part[0])
        away.leaving = self._lanes.begin(
            text, COPY_OUT, self.saved, lambda moved: away.home.write_parts(flat, self._pieces, moved)
        )

    def let_go(self, mb: int) -> None:
        """Wait until a set is at home: then its values may go."""
        away = self._of(mb)
        if away.leaving is not None:
            away.leaving.wait()
            away.leaving, away.parts = None, ()

    def bring(self, mb: int, text: str) -> dict[str, torch.Tensor]:
        """Take memory for a set, and begin to copy what is at home into it. Return its values, which are there once
        they were waited for."""
        away = self._of(mb)
        if away.leaving is not None or away.coming is not None:
            raise VerifyError(f"what microbatch {mb} saved is on the device", where=text)
        memory = self._lanes.memory(self.saved.nbytes)
        away.coming = self._lanes.begin(text, COPY_IN, self.saved, lambda moved: away.home.read(memory, moved))
        types = {name: value.type for name, value in self.saved.values.items()}
        return cut(memory, self.saved.nbytes, types, self.saved.places)

    def wait(self, mb: int) -> None:
        """Wait for a set that is on its way back. Its home is free then."""
        away = self._away.get(mb)
        if away is not None and away.coming is not None:
            away.coming.wait()
            self._free.append(self._away.pop(mb).home)

    def _of(self, mb: int) -> _Away:
        if mb not in self._away:
            raise VerifyError(f"what microbatch {mb} saved is not at home", where=f"item {SAVED_ITEM}")
        return self._away[mb]
