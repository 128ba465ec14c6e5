"""The writing of checkpoints, in the background of training (their contents: format.py).

In: a rank's store with a drained pipeline. Out: a directory that is there whole or not at all. Each rank writes what
no rank of a lower number in its stage has: whole tensors, or its tiles of them.

A save has two parts. Training waits for the first. In it rank 0 makes a working directory beside the checkpoint's
place and clears away the remains of dead saves. Every rank that writes copies its state. A thread of every rank does
the second while training goes on. It writes its files and tells rank 0 of them, through a connection of its own to the
group's store. Rank 0 writes the index when it has heard of all, and renames the directory, then the pointer to it. It
removes the checkpoints that are not to be kept. Files and directories are flushed to the disk before each rename. So
the index is there when everything is, and never for half of it.

A rank that cannot write its part tells the other ranks why. They give the save up, too, and end with that cause. Rank 0
then removes what is written: under another name, so that no rank adds a file meanwhile.

One save at a time: the next one waits until the one before is done, and says so. A save without `background` waits
for its own end, and takes no copy. An error of a thread is raised in the rank's main thread at its next action
(`check`), and ends the run. Waiting is bounded by progress: a save of which nothing more is written for `_STALLED`
seconds ends the run, too. A run that fails or is interrupted while a checkpoint is being written ends when that is
there, as long as it gets on (`status.await_saves`).

    .step-000100.<token>.tmp     being written
    .step-000100.<token>.old     replaced by one of the same step
    .step-000100.<token>.gone    being removed
    .latest.<token>.tmp          the pointer, being written

One run at a time may save into a directory (lock.py): the next save takes files under these names for left over.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import msgspec
import numpy as np
from torch.distributed import Store as GroupStore  # type: ignore[attr-defined]

from penstock.backends.bundle.format import Bundle, stored_vars
from penstock.backends.bundle.tensor_file import write_tensors
from penstock.backends.bundle.writer import flush_directory
from penstock.ir.batch_shares import microbatch_size
from penstock.ir.graph import Module
from penstock.ir.sharding.tiles import TensorTile, copy, owns, seat_of, tile_of, whole_tile
from penstock.runtime.group.group import RankGroup
from penstock.runtime.messages.control import Setup
from penstock.runtime.messages.status import Deadline, Status, await_saves
from penstock.runtime.state.packs import PackState
from penstock.runtime.state.store import Store
from penstock.runtime.state.tensors import as_array
from penstock.support.atomic_files import naming
from penstock.support.errors import PeerLost, PenstockError, VerifyError
from penstock.support.words import shown_bytes

from .format import (
    FORMAT,
    INDEX,
    INDEX_HASH,
    LATEST,
    TILED,
    Index,
    is_kept,
    left_behind,
    random_seed,
    read_index,
    saved_step,
    saved_steps,
    step_name,
)
from .lock import make_directories
from .stored_tiles import SavedFile

# The longest time without progress of a save. Flushing a large file to a slow disk is one step.
_STALLED = 600.0
_LOOK_SECONDS = 0.02
_SHOW_SECONDS = 0.5
Arrays = Mapping[str, np.ndarray]


@dataclass
class _Writing:
    """A save under way on one rank. `written` counts tensors' bytes; its part is `reported` when written, and the
    checkpoint is `whole` when rank 0 has put it in its place."""

    step: int
    directory: Path
    total: int
    written: int = 0
    reported: bool = False
    whole: bool = False
    thread: threading.Thread | None = None
    failure: BaseException | None = None
    work: Path | None = field(default=None)


class SaveFailure(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The cause of a save that failed on a rank, for the other ranks. `system`: the system refused to write."""

    rank: int
    what: str
    system: bool

    def error(self, directory: Path) -> PenstockError:
        """Return the error of a rank that gives the save up for this cause."""
        if self.system:
            return _unwritable(directory, f"rank {self.rank}: {self.what}")
        return PeerLost(f"rank {self.rank} failed as it wrote the checkpoint: {self.what}", where=str(directory))


class _GivenUp(Exception):
    """Another rank could not write its part."""

    def __init__(self, cause: SaveFailure) -> None:
        super().__init__(cause.what)
        self.cause = cause


class Saver:
    """Saves of one rank, together with those of all other ranks."""

    def __init__(
        self, bundle: Bundle, rank: int, group: RankGroup, setup: Setup, store: Store | PackState, status: Status
    ) -> None:
        self._bundle, self._rank, self._group, self._setup, self._store, self._status = (
            bundle,
            rank,
            group,
            setup,
            store,
            status,
        )
        # Ranks that have the same tile of a variable: the first one of them saves it.
        self._mesh, self._place = seat_of(bundle.module, rank)
        self._count = 0
        self._writing: _Writing | None = None

    @cached_property
    def _exchange(self) -> GroupStore:
        """A connection of the writing thread's own: a wait of the main thread would hold the other one."""
        connection: GroupStore = self._group.store.clone()  # type: ignore[attr-defined]
        return connection

    def save(self, directory: Path, step: int, *, background: bool = False, keep_last: int | None = None) -> float:
        """Begin a save, and wait for its end unless it is to go on in the background. Return how many seconds the save
        before was waited for."""
        if step != self._store.version and self._store.versioned:
            raise VerifyError(
                f"after {step} steps the newest version is {self._store.version}", where=f"rank {self._rank}"
            )
        waited = self.finish()
        self._count += 1
        key = f"save/{self._count}"
        try:
            work = self._meet(key, directory, step)
        except OSError as error:
            raise _unwritable(directory, error) from error
        self._status.show("saving")
        parts = self._parts(step, copied=background)
        total = sum(array.nbytes for _, _, arrays in parts for array in arrays.values())
        writing = _Writing(step, directory, total, work=work)
        writing.thread = threading.Thread(
            target=self._write, args=(writing, key, parts, keep_last), name="saving", daemon=True
        )
        self._writing = writing
        self._status.save(0)
        # Made here, not by two threads at once.
        _ = self._exchange
        writing.thread.start()
        if not background:
            self.finish()
        self._status.show(None)
        return waited

    def check(self) -> None:
        """Raise the error of a save in the background."""
        if self._writing is not None and self._writing.failure is not None:
            failure, directory = self._writing.failure, self._writing.directory
            self._writing = None
            raise _unwritable(directory, failure) if isinstance(failure, OSError) else failure

    def finish(self) -> float:
        """Wait for the save that is under way; return the seconds."""
        writing, started = self._writing, time.monotonic()
        if writing is None:
            return 0.0
        assert writing.thread is not None
        deadline, written = Deadline(_STALLED), -1
        while writing.thread.is_alive():
            writing.thread.join(_SHOW_SECONDS)
            if writing.written != written:
                deadline, written = Deadline(_STALLED), writing.written
            if deadline.is_over():
                part = f"{shown_bytes(writing.written)} of {shown_bytes(writing.total)}"
                done = "its part" if writing.written >= writing.total else part
                what = (
                    f"the checkpoint of step {writing.step} got no further for {_STALLED:g} s: this rank has "
                    f"written {done}"
                )
                raise PeerLost(what, where=f"rank {self._rank}, {writing.directory}", hint="is the disk full, or gone?")
            if writing.thread.is_alive():
                # To the launcher, a rank whose line does not change hangs.
                self._status.show(
                    f"saving step {writing.step}: {shown_bytes(writing.written)} of {shown_bytes(writing.total)}, "
                    f"{time.monotonic() - started:.0f} s"
                )
        self.check()
        self._writing = None
        return time.monotonic() - started

    def settle(self) -> None:
        """Wait, after the run has failed, until the save under way does not need this rank, if that gets on."""
        writing = self._writing
        if writing is not None:
            await_saves(lambda: [float(writing.written + 1)] if self._is_needed(writing) else [])

    def _is_needed(self, writing: _Writing) -> bool:
        if writing.thread is None or not writing.thread.is_alive():
            return False
        return not writing.whole if self._rank == 0 else not writing.reported

    # -------------------------------------------------------------------------------------------- parts of a save

    def _meet(self, key: str, directory: Path, step: int) -> Path:
        if self._rank != 0:
            return Path(self._group.get(f"{key}/work", "the checkpoint directory of rank 0").decode())
        work = start_save(directory, step)
        self._group.put(f"{key}/work", str(work).encode())
        return work

    def _parts(self, step: int, copied: bool) -> list[tuple[str, int, Arrays]]:
        """Return the files of this rank: name, version, arrays without padding."""
        vars = self._bundle.module.vars
        mine = {n for n in self._store.variables if owns(vars[n].type, self._mesh, self._place)}
        names = [name for name, var in self._store.variables.items() if name in mine and is_kept(var)]
        parts = [(f"rank{self._rank}.safetensors", step, {name: self._store.newest(name) for name in names})]
        parts += [
            (f"rank{self._rank}.older.safetensors", version, {n: t for n, t in tensors.items() if n in mine})
            for version, tensors in self._store.older().items()
        ]
        # What is at home would need room on the device for a copy.
        apart = self._store.apart() if copied else {}
        files: list[tuple[str, int, Arrays]] = []
        for name, version, tensors in parts:
            # A tensor on another device is copied anyway.
            aside = apart.get(version, {})
            arrays = {
                key: np.array(
                    self._packed(key, as_array(aside.get(key, t))),
                    copy=(copied and t.device.type == "cpu" and key not in aside) or None,
                )
                for key, t in tensors.items()
            }
            if arrays:
                files.append((name, version, arrays))
        return files

    def _packed(self, name: str, array: np.ndarray) -> np.ndarray:
        tile = self._tile(name)
        if tile == tile.packed:
            return array
        packed = np.empty(tile.packed.shape, array.dtype)
        copy(array, tile, packed, tile.packed)
        return packed

    def _tile(self, name: str) -> TensorTile:
        return tile_of(self._bundle.module.vars[name].type, self._mesh, self._place)

    def _write(self, writing: _Writing, key: str, parts: list[tuple[str, int, Arrays]], keep_last: int | None) -> None:
        """Write the files of this rank, in the thread of the save."""
        assert writing.work is not None

        def count(size: int) -> None:
            writing.written += size
            self._status.save(writing.written)

        try:
            files = {}
            while parts:
                name, version, arrays = parts.pop(0)
                with naming(writing.work / name):
                    digest, size = write_tensors(writing.work / name, arrays, progress=count)
                types = {tensor: self._bundle.module.vars[tensor].type.plain for tensor in arrays}
                files[name] = SavedFile(
                    digest,
                    size,
                    version,
                    {tensor: str(type) for tensor, type in types.items()},
                    {n: self._tile(n).ranges for n, type in types.items() if self._tile(n) != whole_tile(type)},
                )
            self._exchange.set(f"{key}/part/{self._rank}", msgspec.json.encode(files).decode())
            # The order matters: a rank that gets the order to end may end as soon as it has reported its part.
            self._status.save(writing.written, done=self._rank != 0)
            writing.reported = True
            if self._rank == 0:
                for rank in range(1, self._group.world):
                    files |= msgspec.json.decode(self._await(f"{key}/part/{rank}", key), type=dict[str, SavedFile])
                finish_save(
                    writing.work,
                    writing.directory,
                    describe_save(self._bundle, self._setup, writing.step, files),
                    keep_last,
                )
                writing.whole = True
                self._status.end_save()
                self._exchange.set(f"{key}/done", "")
                # The store with the messages of other ranks lives in this process, which may end when this thread has.
                for rank in range(1, self._group.world):
                    self._await(f"{key}/heard/{rank}", key)
                self._forget(key)
            else:
                self._await(f"{key}/done", key)
                self._exchange.set(f"{key}/heard/{self._rank}", "")
        except RuntimeError as error:  # of the group's store
            writing.failure = self._lost(writing, error)
        except BaseException as error:  # handed on by `check`
            writing.failure = self._give_up(writing, key, error)
        finally:
            self._status.end_save()

    def _forget(self, key: str) -> None:
        """Remove what the ranks exchanged for a save, by rank 0: no rank asks for it after it has heard of the end."""
        others = range(1, self._group.world)
        names = ["work", "done", *(f"part/{rank}" for rank in (0, *others)), *(f"heard/{rank}" for rank in others)]
        with suppress(RuntimeError):  # the store is gone, and all that is in it
            for name in names:
                self._exchange.delete_key(f"{key}/{name}")

    def _give_up(self, writing: _Writing, key: str, error: BaseException) -> BaseException:
        """Return the cause of a failure of this rank's thread, and share it with the other ranks if it is this rank's
        own."""
        assert writing.work is not None
        cause = error.cause if isinstance(error, _GivenUp) else None
        try:
            if isinstance(error, FileNotFoundError):
                # Rank 0 may have removed the directory, for a cause that it shared before.
                cause = self._failure_of_others(key)
            if cause is None:
                failure = SaveFailure(self._rank, str(error), isinstance(error, OSError))
                self._exchange.set(f"{key}/failed", msgspec.json.encode(failure).decode())
                # `set` does not wait for the store. Its answer to a question that follows says that it knows the cause:
                # before the directory is gone, for which another rank will ask for one.
                self._exchange.check([f"{key}/failed"])
        except RuntimeError as lost:  # the store went with the rank that serves it
            if isinstance(error, FileNotFoundError):
                return self._lost(writing, lost)
        if self._rank == 0:
            remove_unfinished(writing.work)
        return error if cause is None else cause.error(writing.directory)

    def _lost(self, writing: _Writing, error: RuntimeError) -> PeerLost:
        first = str(error).partition("\n")[0]
        return PeerLost(f"the other ranks are gone while the checkpoint of step {writing.step} is written: {first}")

    def _failure_of_others(self, key: str) -> SaveFailure | None:
        if not self._exchange.check([f"{key}/failed"]):
            return None
        return msgspec.json.decode(bytes(self._exchange.get(f"{key}/failed")), type=SaveFailure)

    def _await(self, name: str, key: str) -> bytes:
        """Return a value that another rank's thread puts there for the save `key`, unless a rank could not write its
        part. The caller of `finish` bounds the wait; the process ends it otherwise."""
        while not self._exchange.check([name]):
            if (cause := self._failure_of_others(key)) is not None:
                raise _GivenUp(cause)
            time.sleep(_LOOK_SECONDS)
        return bytes(self._exchange.get(name))


def _unwritable(directory: Path, error: object) -> PenstockError:
    return PenstockError(f"cannot write the checkpoint: {error}", where=str(directory))


# ------------------------------------------------------------------------------------------------ files and directories


def start_save(directory: Path, step: int) -> Path:
    """Make the working directory of a checkpoint, by rank 0, with nothing of dead saves beside it."""
    make_directories(directory)
    clear_away(directory)
    work = directory / f".{step_name(step)}.{secrets.token_hex(4)}.tmp"
    work.mkdir()
    return work


def remove_unfinished(work: Path) -> None:
    """Remove the working directory of a save that failed. What the system does not let go is left for the next save."""
    gone = work.with_suffix(".gone")
    with suppress(OSError):
        work.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def clear_away(directory: Path) -> None:
    """Remove the files of saves that did not come to their end. One that was replaced, but not yet by another, comes
    back."""
    for path, kind in left_behind(directory):
        place = directory / path.name[1:].partition(".")[0]
        if kind == "old" and not place.exists():
            path.rename(place)
        elif path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    flush_directory(directory)


def describe_save(bundle: Bundle, setup: Setup, step: int, files: dict[str, SavedFile]) -> Index:
    """Return the index of a checkpoint."""
    module: Module = bundle.module
    assert module.schedule is not None
    batch = microbatch_size(module) * module.schedule.microbatches
    theirs = bundle.source_names or {}
    return Index(
        TILED if any(file.tiles for file in files.values()) else FORMAT,
        step,
        module.name,
        module.schedule.name,
        module.schedule.microbatches,
        setup.data,
        files,
        bundle=str(bundle.path),
        source_hash=bundle.manifest.source_hash,
        tables=dict(setup.tables),
        samples=step * batch + setup.offset,
        # The seed of the draws, which is not the module's when the run went on from a checkpoint with another one.
        seed=None if (seed := random_seed(module)) is None else seed ^ setup.key,
        names={name: tuple(theirs.get(name, (name,))) for name, var in stored_vars(module).items() if is_kept(var)},
    )


def finish_save(work: Path, directory: Path, index: Index, keep_last: int | None = None) -> Path:
    """Add the index to the files of all ranks, and put the checkpoint in its place. Remove those before it that are not
    to be kept."""
    write_index(work, index)
    flush_directory(work)
    place = directory / step_name(index.step)
    old = directory / f".{place.name}.{secrets.token_hex(4)}.old"
    if place.exists():
        place.rename(old)
    work.rename(place)
    flush_directory(directory)
    pointer = directory / f".{LATEST}.{secrets.token_hex(4)}.tmp"
    _write(pointer, place.name.encode() + b"\n")
    pointer.rename(directory / LATEST)
    flush_directory(directory)
    if old.exists():
        shutil.rmtree(old)
    if keep_last is not None:
        _remove_older(directory, index.step, keep_last)
    return place


def _remove_older(directory: Path, step: int, keep_last: int) -> None:
    """Remove old checkpoints except that of a step and the newest complete ones before it, `keep_last` in all. A
    damaged one does not count, and stays."""
    assert keep_last >= 1
    complete = []
    for place in saved_steps(directory):
        if saved_step(place) < step and _has_index(place):
            complete.append(place)
    outdated = [
        place.rename(directory / f".{place.name}.{secrets.token_hex(4)}.gone") for place in complete[keep_last - 1 :]
    ]
    flush_directory(directory)
    for folder in outdated:
        shutil.rmtree(folder)


def _has_index(place: Path) -> bool:
    try:
        read_index(place)
    except PenstockError:
        return False
    return True


def write_index(folder: Path, index: Index) -> None:
    text = msgspec.json.format(msgspec.json.encode(index, order="sorted"), indent=2) + b"\n"
    _write(folder / INDEX, text)
    _write(folder / INDEX_HASH, f"{hashlib.sha256(text).hexdigest()}  {INDEX}\n".encode())


def _write(path: Path, data: bytes) -> None:
    with naming(path), path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
