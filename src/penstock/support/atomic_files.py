"""Files that are there whole or not at all. In: a path. Out: a place beside it to write to, which comes to the path in one rename when
the writing has gone well, and is removed when it has not.

Nothing is flushed to the disk: who needs that does it before, and flushes the directory afterwards.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Write a file to what is given here, and the path has it afterwards, in place of what was there; or that stays, after an error."""
    work = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        yield work
        work.replace(path)
    finally:
        work.unlink(missing_ok=True)
