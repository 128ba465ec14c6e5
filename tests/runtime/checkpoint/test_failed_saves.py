"""Saves that a rank cannot finish: all ranks end with the cause, whichever of them is heard, and nothing is left half."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.models import write_mlp
from penstock.runtime.checkpoint import saving
from penstock.runtime.checkpoint.finding import damage_of
from penstock.support.errors import PenstockError

from ..waiting import wait_until
from .savers import TIMEOUT, Ranks

RANKS = 4
FULL = OSError(28, "No space left on device")


@pytest.fixture
def ranks(bundle_of, tmp_path, monkeypatch):
    return Ranks(bundle_of(2, "1f1b", 2), tmp_path, monkeypatch)


def work_of(ranks: Ranks) -> list[Path]:
    return list(ranks.directory.glob(".step-*"))


def after_the_removal(ranks: Ranks) -> list[PenstockError | None]:
    """Let rank 0 meet a full disk, and rank 1 open its file when rank 0 has removed the directory."""
    ranks.errors[0] = FULL
    ranks.turns[1] = lambda: wait_until(lambda: not work_of(ranks))
    return ranks.together(lambda saver: saver.save(ranks.directory, 1))


def test_a_rank_whose_directory_was_removed_names_the_cause(ranks):
    errors = after_the_removal(ranks)
    assert [type(error) for error in errors] == [PenstockError, PenstockError]
    own, other = map(str, errors)
    place = f"{ranks.directory}: cannot write the checkpoint: "
    assert own.startswith(f"{place}[Errno 28] No space left on device: '{ranks.directory}/.step-000001.")
    assert other.startswith(f"{place}rank 0: [Errno 28] No space left on device: '{ranks.directory}/.step-000001.")
    assert own.endswith("rank0.safetensors'")
    assert other.endswith("rank0.safetensors'")


def test_control_a_rank_that_is_not_told_names_what_it_met(ranks, monkeypatch):
    monkeypatch.setattr(saving.Saver, "_failure_of_others", lambda saver, key: None)
    assert "[Errno 2] No such file or directory" in str(after_the_removal(ranks)[1])


class LateStore:
    """A connection whose values reach the store late, as those of TCPStore may: `set` does not wait. An answer comes
    after them where the connection is `ordered`."""

    def __init__(self, store: Any, ordered: bool) -> None:
        self.store, self.ordered, self.waiting = store, ordered, []

    def set(self, name: str, value: str) -> None:
        sent = threading.Thread(target=lambda: (time.sleep(0.5), self.store.set(name, value)), daemon=True)
        sent.start()
        self.waiting.append(sent)

    def check(self, names: list[str]) -> bool:
        for sent in self.waiting if self.ordered else ():
            sent.join(TIMEOUT)
        return bool(self.store.check(names))

    def get(self, name: str) -> bytes:
        return bytes(self.store.get(name))


@pytest.mark.parametrize("ordered", [True, False])
def test_a_cause_is_known_before_the_directory_is_removed(ranks, ordered):
    """Control: without the order of a connection, the other rank is told nothing and names what it met."""
    ranks.savers[0].__dict__["_exchange"] = LateStore(ranks.meeting.clone(), ordered)
    own, other = map(str, after_the_removal(ranks))
    assert "[Errno 28] No space left on device: " in own
    assert ("rank 0: [Errno 28] No space left on device: " in other) == ordered
    assert ("[Errno 2] No such file or directory" in other) != ordered


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_wait_for_a_part_give_it_up(ranks, rank):
    """Rank 0 removes what is written, and the next save finds no trace of it."""
    ranks.errors[rank] = FULL
    errors = ranks.together(lambda saver: saver.save(ranks.directory, 1))
    assert all("No space left on device: " in str(error) for error in errors)
    assert list(ranks.directory.iterdir()) == []
    ranks.errors.clear()
    assert ranks.together(lambda saver: saver.save(ranks.directory, 1)) == [None, None]
    assert damage_of(ranks.directory / "step-000001") == []


def test_a_directory_that_a_user_removed_is_named_as_such(ranks):
    """No rank failed before: what is missing is the cause."""
    ranks.turns[1] = lambda: [path.rename(ranks.directory / "away") for path in work_of(ranks)]
    ranks.turns[0] = lambda: wait_until(lambda: not work_of(ranks))
    errors = ranks.together(lambda saver: saver.save(ranks.directory, 1))
    assert all("[Errno 2] No such file or directory" in str(error) for error in errors)


# ------------------------------------------------------------------------------------------------ whole runs


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle whose ranks write 64 KiB each."""
    folder = tmp_path_factory.mktemp("four")
    model = ps.from_onnx(write_mlp(folder / "model.onnx", [128] * (RANKS + 1), batch=4))
    training = ps.Training(loss="cross_entropy", optimizer=ps.SGD(lr=0.05), microbatches=RANKS)
    plan = ps.plan(model, ps.Cluster.local(RANKS), training)
    return ps.compile(plan, folder / "bundle", backend="numpy")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(folder)], capture_output=True).returncode:
        pytest.skip("this user may mount nothing")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(bundle: Path, disk: Path, kilobytes: int) -> subprocess.CompletedProcess[str]:
    """Train on a disk of that size, with a checkpoint after every step."""
    subprocess.run(["mount", "-o", f"remount,size={kilobytes}k", str(disk)], check=True)
    words = ["run", bundle, "--steps", 50, "--checkpoint", disk / "ckpt", "--checkpoint-every", 1]
    return subprocess.run(
        [sys.executable, "-m", "penstock", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


@pytest.mark.parametrize("trials", [6, pytest.param(60, marks=pytest.mark.slow)])
def test_a_disk_that_fills_during_a_save_is_named(bundle, disk, trials):
    """The size of the disk decides which rank is refused at which byte of which checkpoint."""
    chance = random.Random(5)
    for _ in range(trials):
        done = fill(bundle, disk, chance.randrange(140, 700, 4))
        (error,) = [line for line in done.stderr.splitlines() if line.startswith("penstock: error")]
        assert done.returncode == 1, done.stderr
        assert f"{disk}/ckpt: cannot write the checkpoint: " in error
        assert f"[Errno 28] No space left on device: '{disk}/ckpt/" in error
        # Where there is no checkpoint, the directory that was made for them is removed, too.
        left = sorted((disk / "ckpt").glob("*")) + sorted((disk / "ckpt").glob(".step*"))
        whole = [path for path in left if path.name != "latest"]
        assert [path for path in whole if not path.name.startswith("step-") or damage_of(path)] == []
        shutil.rmtree(disk / "ckpt", ignore_errors=True)
