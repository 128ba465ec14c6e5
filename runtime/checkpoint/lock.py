"""Claims on directories of checkpoints: one run at a time saves into a directory.

In: a directory. Out: a claim on it, or UsageError that names its holder.

    DIR/.in-use     locked by the run that saves into DIR; removed when that ends in order

A claim is a lock of the system (flock) on this file. It ends with the process that holds it, however that ends, so a
killed run leaves a file and no claim. Shared file systems carry locks over to other hosts, and some keep that of a host
that went down. So the holder touches the file every `_BEAT_SECONDS`, and a run that finds it locked by another host
watches it. Once touched, it is in use. Untouched for `_SILENT_SECONDS`, it is replaced by a new file, and its holder,
should it come back, finds that out before its next save. A start of the same run waits up to `_HANDOVER_SECONDS` for
the one before it, which may be on its way out.

Known limit: where a file system has no locks there is no claim, which users are warned of.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from penstock.backends.bundle.writer import flush_directory
from penstock.support.errors import PenstockError, UsageError

FILE = ".in-use"
_BEAT_SECONDS, _LOOK_SECONDS = 2.0, 0.2
_SILENT_SECONDS, _HANDOVER_SECONDS = 30.0, 60.0
_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_HINT = "give --checkpoint another directory, or end that run first"


class Holder(msgspec.Struct, frozen=True):
    """The holder of a claim. It has a process, a host by name and by the id of its boot, and the name of its run, if
    there is one."""

    process: int
    host: str
    boot: str
    run: str = ""

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}"


class Held(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The message of rank 0 to the other ranks when a directory is theirs."""

    warnings: list[str]


def own_boot() -> str:
    """Return the id of this boot of the host, which no other host has; the host's name where the system has no such
    id."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return socket.gethostname()


class Claims:
    """The directories that one run saves into. `run` is its name, if it may be started again under it while the start
    before is still ending."""

    def __init__(self, run: str = "") -> None:
        self._run = run
        self._held: dict[str, _Claim] = {}
        self._lent = False

    def lent(self) -> Claims:
        """Return the same claims for an object that does not give them up at the end: a job of a run that may start
        again."""
        claims = Claims(self._run)
        claims._held, claims._lent = self._held, True
        return claims

    def hold(self, directory: str | os.PathLike[str]) -> list[str]:
        """Claim a directory before the first write into it, and make it where there is none. Return the warnings for
        users."""
        place = os.path.realpath(directory)
        try:
            if place in self._held:
                self._held[place].check()
                return []
            self._held[place] = claim = _Claim(Path(place), self._run)
        except OSError as error:
            raise PenstockError(
                f"cannot write the checkpoint: {error.strerror or error}", where=str(directory)
            ) from error
        return (
            []
            if claim.locked
            else [f"{directory}: its file system has no locks; make sure that no other run saves there"]
        )

    def close(self) -> None:
        """Release all claims."""
        while self._held and not self._lent:
            self._held.popitem()[1].close()


class _Claim:
    """A claim on one directory."""

    def __init__(self, directory: Path, run: str) -> None:
        self._path = directory / FILE
        self._made = make_directories(directory)
        self._holder = Holder(os.getpid(), socket.gethostname(), own_boot(), run)
        self._end, self._swap = threading.Event(), threading.Lock()
        self._descriptor = -1
        self._has_locks = True
        try:
            self._descriptor = self._take()
        except BaseException:
            self._remove_made()
            raise
        self._beat = threading.Thread(target=self._touch, name="claim", daemon=True)
        self._beat.start()

    @property
    def locked(self) -> bool:
        """Return whether there is a claim: not where the file system has no locks."""
        return self._descriptor >= 0

    def check(self) -> None:
        """Check that the claim is still there, and try to get one back that was lost."""
        if not self._has_locks or (self.locked and _is_at(self._descriptor, self._path)):
            return
        if not self.locked:
            self._descriptor = self._take()
            return
        if self._path.exists():
            what = (
                f"{_said(_holder_at(self._path))} has taken it over: this run gave no sign of life for "
                f"{_SILENT_SECONDS:g} s"
            )
            raise UsageError(what, where=str(self._path.parent))
        # A user has cleared the directory, or removed it.
        make_directories(self._path.parent)
        with self._swap:
            os.close(self._descriptor)
            self._descriptor = -1
        self._descriptor = self._take()

    def close(self) -> None:
        self._end.set()
        self._beat.join()
        if self.locked:
            if _is_at(self._descriptor, self._path):
                # A run that opened it before notices when it gets the lock that the file is gone.
                self._path.unlink()
            os.close(self._descriptor)
        self._remove_made()

    def _remove_made(self) -> None:
        for folder in reversed(self._made):
            with suppress(OSError):  # the directory is not empty
                folder.rmdir()

    def _touch(self) -> None:
        while not self._end.wait(_BEAT_SECONDS):
            # A file server may be away for a while. Other runs conclude that this run has ended only when that lasts.
            with self._swap, suppress(OSError):
                if self.locked:
                    os.utime(self._descriptor)

    # -------------------------------------------------------------------------------------------- taking

    def _take(self) -> int:
        """Lock the file and return its descriptor; -1 where there are no locks."""
        started = moved = time.monotonic()
        seen: tuple[int, int] | None = None
        while True:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                locked = _lock(descriptor)
                if locked is None:
                    self._has_locks = False
                    self._path.unlink(missing_ok=True)
                    return -1
                # Otherwise its holder removed it between the two.
                if locked and _is_at(descriptor, self._path):
                    self._sign(descriptor)
                    descriptor, locked_file = -1, descriptor
                    return locked_file
                state = os.fstat(descriptor)
            finally:
                if descriptor >= 0:
                    os.close(descriptor)
            if locked:
                continue
            now, holder = time.monotonic(), _holder_at(self._path)
            touched = (state.st_ino, state.st_mtime_ns)
            if holder is not None and holder.run and holder.run == self._holder.run:
                if now - started > _HANDOVER_SECONDS:
                    raise self._refusal(holder)
            # The lock of a process of this host is there as long as the process.
            elif (holder is not None and holder.boot == self._holder.boot) or seen not in (None, touched):
                raise self._refusal(holder)
            if seen != touched:
                seen, moved = touched, now
            elif now - moved > _SILENT_SECONDS and (descriptor := self._replace(touched[0])) >= 0:
                return descriptor
            time.sleep(_LOOK_SECONDS)

    def _replace(self, inode: int) -> int:
        """Replace a file whose holder is gone by a file of this process. Return -1 where another run was faster. Of
        several processes that do so at once the last one gets it."""
        fresh = self._path.with_name(f"{FILE}.{secrets.token_hex(4)}.tmp")
        descriptor = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            if not _lock(descriptor):
                return -1
            self._sign(descriptor)
            if self._path.stat().st_ino == inode:
                fresh.replace(self._path)
                time.sleep(_LOOK_SECONDS)
                if _is_at(descriptor, self._path):
                    descriptor, locked_file = -1, descriptor
                    return locked_file
            return -1
        finally:
            if descriptor >= 0:
                os.close(descriptor)
                fresh.unlink(missing_ok=True)

    def _sign(self, descriptor: int) -> None:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, msgspec.json.encode(self._holder) + b"\n", 0)
        os.fsync(descriptor)

    def _refusal(self, holder: Holder | None) -> UsageError:
        if holder == self._holder:
            what, hint = (
                "a job of this process saves checkpoints there",
                "give another directory, or close that job first",
            )
        else:
            what, hint = f"{_said(holder)} saves checkpoints there", _HINT
        return UsageError(f"is in use: {what}", where=str(self._path.parent), hint=hint)


def _lock(descriptor: int) -> bool | None:
    """Lock an open file. Return whether that worked, or None where there are no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _WITHOUT_LOCKS:
            return None
        raise
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    """Return whether an open file is the one at a path."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _holder_at(path: Path) -> Holder | None:
    """Return the holder of a directory; None while that is being written down, or where it is gone."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Holder)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None


def _said(holder: Holder | None) -> str:
    return "another run" if holder is None else str(holder)


def make_directories(directory: Path) -> list[Path]:
    """Make a directory with all above it, so that they survive a power cut; return those that were not there, the
    uppermost first."""
    missing = [folder for folder in (directory, *directory.parents) if not folder.exists()][::-1]
    for folder in missing:
        folder.mkdir(exist_ok=True)
        flush_directory(folder.parent)
    return missing
