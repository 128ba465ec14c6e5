"""Files that are written whole or not at all.

In: a path. Out: a temporary path beside it, which is renamed to the path after a success and removed after an error.

Nothing is flushed to the disk: a caller that needs that flushes the file before, and the directory afterwards.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces `path` when the block ends; after an error the old file stays."""
    work = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        yield work
        work.replace(path)
    finally:
        work.unlink(missing_ok=True)
