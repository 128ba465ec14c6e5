"""The buffers of one parameter, and the version that each holds: which may be read, which overwritten."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from penstock.ir.graph import Var
from penstock.support.errors import VerifyError

from .tensors import CPU, allocate


@dataclass
class Versions:
    """The buffers of one parameter. `held` says which version each buffer holds."""

    var: Var
    buffers: list[torch.Tensor]
    held: dict[int, int] = field(default_factory=dict)
    device: torch.device = CPU
    retired: set[int] = field(default_factory=set)
    newest: int = 0
    most_live: int = 0

    def live(self) -> list[int]:
        return sorted(v for v in self.held.values() if v not in self.retired or v == self.newest)

    def place(self, version: int) -> torch.Tensor:
        """Return the buffer that holds a version."""
        for buffer, held in self.held.items():
            if held == version and (version not in self.retired or version == self.newest):
                return self.buffers[buffer]
        present = ", ".join(map(str, self.live()))
        raise VerifyError(f"version {version} was asked for, versions present: {present}", where=f"@{self.var.name}")

    def target(self, version: int, grow: bool) -> torch.Tensor:
        """Return the buffer that an update may write a new version to."""
        return self.buffers[self._free_buffer(version, grow)]

    def _free_buffer(self, version: int, grow: bool) -> int:
        buffer = version % self.var.versions
        if self.held.get(buffer) is None or self.held[buffer] in self.retired:
            return buffer
        if not grow:
            raise VerifyError(
                f"version {version} would overwrite version {self.held[buffer]}, which still has readers; "
                f"versions present: {', '.join(map(str, self.live()))}",
                where=f"@{self.var.name}",
            )
        free = [b for b, held in self.held.items() if held in self.retired and held != self.newest]
        spare = [b for b in range(len(self.buffers)) if b not in self.held]
        if not (free or spare):
            self.buffers.append(allocate(self.var.type, self.device))
            spare = [len(self.buffers) - 1]
        return (free + spare)[0]

    def start(self, version: int, grow: bool) -> None:
        """Begin an update: from here on the new version is alive beside the others."""
        buffer = self._free_buffer(version, grow)
        self.most_live = max(self.most_live, len([v for v in self.live() if v != self.held.get(buffer)]) + 1)

    def finish(self, version: int, grow: bool) -> None:
        """End an update: the old contents of its buffer are gone."""
        buffer = self._free_buffer(version, grow)
        self.retired.discard(self.held.get(buffer, version))
        self.held[buffer] = version
        self.newest = version
        self.most_live = max(self.most_live, len(self.live()))
