"""Work that makes many objects and no cycles among them: looking for cycles meanwhile takes a third of the time, and finds none."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def nothing_collected() -> Iterator[None]:
    """Python's collector of cycles rests; what nobody refers to goes at once as ever."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
