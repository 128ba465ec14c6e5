"""Files that are written whole or not at all.

In: a path. Out: a temporary path beside it, which is renamed to the path after a success and removed after an error.
Errors name the path that could not be written.

Nothing is flushed to the disk: a caller that needs that flushes the file before, and the directory afterwards.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import DISK_ERRORS


@contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Name a path in errors of a disk that name none: a full disk says so to a descriptor."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno in DISK_ERRORS:
            raise OSError(error.errno, error.strerror, os.fspath(path)) from error
        raise


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces `path` when the block ends; after an error the old file stays. A link stays
    one: the file behind it is replaced."""
    path = Path(os.path.realpath(path))
    # A name may be as long as the file system allows, and so must be that of the temporary file.
    work = path.with_name(f".{path.name[:32]}.{secrets.token_hex(4)}.tmp")
    try:
        with naming(path):
            yield work
        work.replace(path)
    except OSError as error:
        if error.filename == os.fspath(work):
            raise OSError(error.errno, error.strerror, os.fspath(path)) from error
        raise
    finally:
        work.unlink(missing_ok=True)
