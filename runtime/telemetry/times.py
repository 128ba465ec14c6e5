"""The times of actions in a trace. In: a slice of a Chrome trace, from any writer. Out: its seconds."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any


def seconds_of(entry: Mapping[str, Any]) -> tuple[float, float]:
    """Return begin and end; ValueError where the one is behind the other, or either is no time."""
    start = float(entry["ts"]) / 1e6
    end = start + float(entry["dur"]) / 1e6
    if not (isfinite(start) and isfinite(end) and start <= end):
        raise ValueError(f"{entry['name']} from {entry['ts']} for {entry['dur']}")
    return start, end
