"""The user's cache: entries by key in parts of the cache folder.

Each part is bounded in size, and safe for several processes at once.

    folder   $PENSTOCK_CACHE, else $XDG_CACHE_HOME/penstock, else ~/.cache/penstock; PENSTOCK_CACHE=off turns it off
    bound    $PENSTOCK_CACHE_SIZE: bytes, or a number with KiB, MiB or GiB; 1 GiB by default

An entry is one file: the SHA-256 of the content, then the content. It is written under a temporary name and renamed, so
readers see all of it or nothing. An entry whose hash does not match counts as absent and is written again. A hit sets
the file's time; `trim` deletes the files with the oldest times until the others fit. Deleting an entry that another
process reads does no harm: that process has the file open.

A folder that cannot be written to is no error: nothing is kept. `trouble` has the reason, which the last line of a
build repeats (`told`).
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
import time
from pathlib import Path

from .errors import UsageError

_BOUND = 1 << 30
_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_HASH = 32
# The process that wrote a temporary file this long ago has ended.
_ABANDONED_S = 3600.0


def cache_folder() -> Path | None:
    """Return the folder of the cache; None when the cache is off."""
    chosen = os.environ.get("PENSTOCK_CACHE")
    if chosen == "off":
        return None
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "penstock"


def cache_bound() -> int:
    """Return the size in bytes that a part of the cache may have."""
    text = os.environ.get("PENSTOCK_CACHE_SIZE", "")
    if not text:
        return _BOUND
    match = re.fullmatch(r"([0-9]{1,30}) *(|KiB|MiB|GiB)", text)
    if match is None:
        raise UsageError(
            f"bad PENSTOCK_CACHE_SIZE {text!r}", hint="bytes, or a number with KiB, MiB or GiB, e.g. 500MiB"
        )
    return int(match[1]) * _UNITS[match[2]]


class Cache:
    """One part of the cache: entries by key, which is a file name."""

    def __init__(self, folder: Path | None, bound: int = _BOUND, *, part: str) -> None:
        self.folder = folder / part if folder is not None else None
        self.bound = bound
        self.trouble = ""

    @staticmethod
    def of_user(part: str) -> Cache:
        """Open a part of the user's cache."""
        return Cache(cache_folder(), cache_bound(), part=part)

    def told(self, what: str) -> str:
        """Return a report with the trouble of the cache behind it, if there was any."""
        return f"{what} ({self.trouble})" if self.trouble else what

    def get(self, key: str) -> bytes | None:
        """Return the content of an entry; None when there is none, or its bytes are not those that were stored."""
        if self.folder is None:
            return None
        path = self.folder / key
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self.trouble = f"the cache cannot be read: {error}"
            return None
        content = data[_HASH:]
        if hashlib.sha256(content).digest() != data[:_HASH]:
            return None
        try:
            os.utime(path)
        except OSError as error:
            # The entry counts all the same, with its old age. A file that was deleted meanwhile has no age.
            if not isinstance(error, FileNotFoundError):
                self.trouble = f"the cache cannot be written: {error}"
        return content

    def put(self, key: str, content: bytes) -> None:
        """Write an entry."""
        if self.folder is None:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.folder, suffix=".part", delete=False) as file:
                try:
                    file.write(hashlib.sha256(content).digest() + content)
                    file.close()
                    Path(file.name).replace(self.folder / key)
                except BaseException:
                    Path(file.name).unlink(missing_ok=True)
                    raise
        except OSError as error:
            self.trouble = f"the cache cannot be written: {error}"

    def trim(self) -> None:
        """Delete the entries that were not used for longest until the rest is within the bound."""
        if self.folder is None:
            return
        entries: list[tuple[float, int, Path]] = []
        try:
            with os.scandir(self.folder) as items:
                for item in items:
                    try:
                        status = item.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue
                    entries.append((status.st_mtime, status.st_size, Path(item.path)))
        except FileNotFoundError:
            return
        except OSError as error:
            self.trouble = f"the cache cannot be read: {error}"
            return
        total, now = sum(count for _, count, _ in entries), time.time()
        for used, count, path in sorted(entries):
            temporary = path.suffix == ".part"
            if temporary and now - used < _ABANDONED_S:
                continue
            if temporary or total > self.bound:
                try:
                    path.unlink(missing_ok=True)
                except OSError as error:
                    self.trouble = f"the cache cannot be trimmed: {error}"
                    return
                total -= count
