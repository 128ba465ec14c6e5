"""Homes: memory in other spaces, where a rank's items lie between their uses.

In: the image of an item (ir/memory/items.py) and a space of the cluster. Out: the item's variables as tensors while it
is on the device.

A home is a `Home`, which moves whole images: a file (home_files.py) for a CPU, pinned memory of the host (pinned.py)
for a GPU. Copies go on in the lanes of the rank (lanes.py). `bring` takes memory and begins to read, `store` begins to
write, and `let_go` gives the memory back once that is done. Nothing but these waits holds the program up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from penstock.ir.action_kinds import COPY_IN, COPY_OUT
from penstock.ir.cluster.spaces import Space
from penstock.ir.memory.items import Image
from penstock.ir.memory.saved_sets import SavedSet
from penstock.ir.types import LONG_NAMES, TensorType
from penstock.runtime.messages.ledger import CopyTimes
from penstock.support.errors import VerifyError

# Takes the bytes that were moved since the last call.
Moved = Callable[[int], None]
# Bytes that lie apart, by their places in an image, in order.
Parts = Sequence[tuple[int, torch.Tensor]]


def unheard(nbytes: int) -> None:
    """Do nothing where bytes were moved."""


class Home(Protocol):
    """Memory for an image in another space. Reads and writes move all of it, and call `moved` as they get on. Memory of
    the device is that of the lanes."""

    def read(self, memory: torch.Tensor, moved: Moved = ...) -> None: ...
    def write(self, memory: torch.Tensor, moved: Moved = ...) -> None: ...

    def write_parts(self, parts: Parts, pieces: torch.Tensor, moved: Moved = ...) -> None:
        """Write an image that is never whole: bytes that lie apart, by their places in it, in order. They may go
        through the memory for pieces."""

    def contents(self) -> torch.Tensor:
        """Return the bytes that are at home, without a copy."""

    def copied(self) -> torch.Tensor:
        """Return the bytes that are at home, in a copy that no later write changes."""


class Copying(Protocol):
    """A copy that was begun."""

    def wait(self) -> None:
        """Put what the device does next behind the copy, and write down its times and the bytes that it moved."""

    def settle(self) -> None:
        """Wait until the copy is done. An error of it is raised here each time."""


class Lanes(Protocol):
    """The lanes of a rank, which copy, and take memory of its device."""

    def open(self, space: Space, nbytes: int) -> Home:
        """Return a home for so many bytes in a space."""

    def memory(self, nbytes: int, *, zeros: bool = False) -> torch.Tensor:
        """Take memory of the device for so many bytes, perhaps with some more at its end."""

    def pieces(self, nbytes: int) -> torch.Tensor:
        """Take what values that lie apart go through on their way to a home, in pieces of so many bytes."""

    def begin(self, text: str, kind: str, image: Image | SavedSet, copy: Callable[[Moved], None]) -> Copying:
        """Begin a copy of an image. `text` names it in a trace, where it is an action of the program."""

    def trace(self) -> None:
        """Write down from here on what is copied."""

    def copied(self) -> tuple[CopyTimes, ...]:
        """Return the copies that were waited for since the last call. The device is done with them."""


class HomedItem:
    """An item of a stage, or a version of one: its variables at home, and on the device between `bring` and `let_go`,
    each of which may be called several times. Without a home they are zero each time they come."""

    def __init__(self, image: Image, home: Home | None, lanes: Lanes) -> None:
        self.image, self._home, self._lanes = image, home, lanes
        self._memory: torch.Tensor | None = None
        self._claims, self._version = 0, 0
        self._tensors: dict[str, torch.Tensor] = {}
        self._coming: Copying | None = None
        self._leaving: Copying | None = None
        # The last copy to its home, which the host waits for before it reads what is there.
        self._stored: Copying | None = None

    @property
    def is_here(self) -> bool:
        """Return whether it has memory on the device."""
        return self._memory is not None

    def claim(self, text: str, version: int, *, filled: bool = True) -> bool:
        """Bring a version, or claim what is there once more; return whether it came."""
        if self._claims and not self.image.holds_weights:
            raise VerifyError("is on the device already", where=self._where)
        if self._claims and version != self._version and self.image.versions > 1:
            what = f"is on the device in version {self._version}, and version {version} would take its place"
            raise VerifyError(what, where=self._where)
        self._claims, self._version = self._claims + 1, version
        if self._claims == 1:
            self.bring(text, filled=filled)
        return self._claims == 1

    def give_up(self) -> bool:
        """End a claim; return whether it was the last one, and the item goes."""
        self._claims = max(0, self._claims - 1)
        if not self._claims:
            self.let_go()
        return not self._claims

    def bring(self, text: str = "", *, filled: bool = True) -> None:
        """Take memory, and begin to copy what is at home into it, if it is to be `filled`."""
        if self._memory is not None:
            raise VerifyError("is on the device already", where=self._where)
        home = self._home
        # What is filled for the first time begins with zeros: padding stays so.
        memory = self._memory = self._lanes.memory(self.image.nbytes, zeros=home is None or not filled)
        self._tensors = self._cut(memory)
        if filled and home is not None:
            self._coming = self._lanes.begin(text, COPY_IN, self.image, lambda moved: home.read(memory, moved))

    def wait(self) -> None:
        """Wait until it is on the device. A copy that failed is an error here each time."""
        if self._coming is not None:
            self._coming.wait()
            self._coming = None

    def store(self, text: str = "") -> None:
        """Begin to copy it to its home."""
        self.wait()
        memory, home = self._memory, self._home
        if memory is None:
            raise VerifyError("is to be copied out, and is not on the device", where=self._where)
        self._await_home()
        if home is None:
            raise VerifyError("is to be copied out, and has no copy at home", where=self._where)
        self._stored = self._lanes.begin(text, COPY_OUT, self.image, lambda moved: home.write(memory, moved))
        self._leaving = self._stored

    def settle(self) -> None:
        """Wait until what was copied out is at home; an error of the copy is raised here."""
        if self._stored is not None:
            self._stored.settle()

    def let_go(self) -> None:
        """Give its memory back, once it is at home."""
        self.wait()
        self._await_home()
        # The memory goes with the last tensor of it.
        self._tensors, self._memory = {}, None

    def _await_home(self) -> None:
        """Wait for the copy to its home. One that failed is kept: what is at home then may be torn."""
        if self._leaving is not None:
            self._leaving.wait()
            self._leaving = None

    @contextmanager
    def filling(self) -> Iterator[None]:
        """Let the item be filled on the device for the first time."""
        self.bring(filled=False)
        yield
        if self._home is not None:
            self.store()
        self.let_go()

    def tensor(self, name: str) -> torch.Tensor:
        """Return a variable on the device."""
        if name not in self._tensors:
            raise VerifyError(f"is asked for on the device, and is at home in {self.image.space}", where=f"@{name}")
        return self._tensors[name]

    def newest(self, name: str) -> torch.Tensor:
        """Return the newest contents of a variable, on the device or at home."""
        if self._coming is not None:
            self._coming.settle()
        if self._tensors or self._home is None:
            return self.tensor(name)
        self.settle()
        return self._cut(self._home.contents())[name]

    def apart(self) -> dict[str, torch.Tensor]:
        """Return all variables as they are at home, in a copy that nothing changes. What is on its way there is waited
        for: a run ends with it."""
        self.settle()
        return {} if self._home is None else self._cut(self._home.copied())

    def _cut(self, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        types = {name: var.type for name, var in self.image.variables.items()}
        return cut(memory, self.image.nbytes, types, self.image.places)

    @property
    def _where(self) -> str:
        return f"@{min(self.image.variables)} and {len(self.image.variables) - 1} more"


def cut(
    memory: torch.Tensor, nbytes: int, types: Mapping[str, TensorType], places: Mapping[str, int]
) -> dict[str, torch.Tensor]:
    """Return the tensors that lie one behind the other in so many bytes of memory, by their names."""
    if memory.numel() > nbytes:
        # What tells of memory in a trace counts the storage of tensors.
        memory = torch.frombuffer(memory.numpy().data, dtype=torch.uint8, count=nbytes)
    return {
        name: memory[places[name] : places[name] + t.nbytes].view(getattr(torch, LONG_NAMES[t.dtype])).view(t.dims)
        for name, t in types.items()
    }
