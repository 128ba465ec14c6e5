"""The entries of a trace, and the times of its actions.

In: a Chrome trace, from any writer. Out: its entries, and the seconds of a slice.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import Any

import msgspec

from penstock.support.errors import UsageError

# All that is raised where entries of another type or form are read.
_NO_TRACE = (
    *(OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError),
    msgspec.ValidationError,
)


@contextmanager
def reading_trace(path: str | Path, hint: str) -> Iterator[list[dict[str, Any]]]:
    """Yield the entries of a trace; raise UsageError where the file is none, or not the one that the block reads."""
    try:
        yield json.loads(Path(path).read_text(encoding="utf-8"))["traceEvents"]
    except _NO_TRACE as error:
        raise UsageError(
            f"cannot read it as a trace: {type(error).__name__}: {error}", where=str(path), hint=hint
        ) from error


def seconds_of(entry: Mapping[str, Any]) -> tuple[float, float]:
    """Return begin and end; ValueError where the one is behind the other, or either is no time."""
    start = float(entry["ts"]) / 1e6
    end = start + float(entry["dur"]) / 1e6
    if not (isfinite(start) and isfinite(end) and start <= end):
        raise ValueError(f"{entry['name']} from {entry['ts']} for {entry['dur']}")
    return start, end
