"""Files that are written whole or not at all.

In: a path. Out: a temporary path beside it, which is renamed to the path after a success and removed after an error.
Errors name the path that could not be written.

Nothing is flushed to the disk: a caller that needs that flushes the file before, and the directory afterwards.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# The disk is at fault, or its quota: no other option or path of the user's is asked for.
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG)


@contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Name a path in errors of the system that name none: a full disk says so to a descriptor."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, error.strerror, os.fspath(path)) from error
        raise


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces `path` when the block ends; after an error the old file stays."""
    work = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with naming(path):
            yield work
        work.replace(path)
    finally:
        work.unlink(missing_ok=True)
