"""A pause of Python's garbage collector, for work that makes many objects and no cycles.

Searching for cycles meanwhile takes a third of the time, and finds none.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def nothing_collected() -> Iterator[None]:
    """Turn off the collector of cycles; objects without references are still freed at once."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
