"""The savers of all ranks in one process, whose files are written when and as a test says."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.backends.bundle.format import Bundle
from penstock.backends.bundle.tensor_file import write_tensors
from penstock.ir.graph import stage_vars, stepped_vars
from penstock.runtime.checkpoint import saving
from penstock.runtime.group.group import RankGroup, host_store
from penstock.runtime.messages.control import Setup
from penstock.runtime.messages.status import Status
from penstock.runtime.state.store import Store
from penstock.support.errors import PenstockError

TIMEOUT = 30


class Ranks:
    """The savers of all ranks of a bundle, with their stores filled. `errors` are those that ranks meet as they write,
    and `turns` what they wait for before."""

    def __init__(self, bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.meeting = host_store(bundle.world_size, TIMEOUT)
        self.bundle, self.directory = bundle, tmp_path / "ckpt"
        self.stores: list[Store] = []
        self.savers: list[saving.Saver] = []
        self.may_write = threading.Event()
        self.may_write.set()
        self.errors: dict[int, OSError] = {}
        self.turns: dict[int, Callable[[], Any]] = {}

        def write(
            path: Path,
            arrays: Mapping[str, np.ndarray],
            metadata: Mapping[str, str] | None = None,
            progress: Callable[[int], None] | None = None,
        ) -> tuple[str, int]:
            assert self.may_write.wait(TIMEOUT)
            rank = int(path.name.removeprefix("rank").partition(".")[0])
            self.turns.get(rank, lambda: None)()
            if rank in self.errors:
                raise self.errors[rank]
            return write_tensors(path, arrays, metadata, progress)

        monkeypatch.setattr(saving, "write_tensors", write)
        setup = Setup(str(bundle.path), TIMEOUT)
        for rank in range(bundle.world_size):
            store = Store(stage_vars(bundle.module, rank), stepped_vars(bundle.module), version=1)
            for name in store.variables:
                if name not in store.gradients:
                    store.newest(name).fill_(1)
            group = RankGroup(self.meeting.clone(), rank, bundle.world_size, TIMEOUT)
            self.stores.append(store)
            self.savers.append(saving.Saver(bundle, rank, group, setup, store, Status(None, rank)))

    def together(self, action: Callable[[saving.Saver], Any]) -> list[PenstockError | None]:
        """Do something on every rank at once; return the errors."""
        errors: list[PenstockError | None] = [None] * len(self.savers)

        def do(rank: int) -> None:
            try:
                action(self.savers[rank])
            except PenstockError as error:
                errors[rank] = error

        threads = [threading.Thread(target=do, args=(rank,), daemon=True) for rank in range(len(self.savers))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT)
            assert not thread.is_alive()
        return errors
