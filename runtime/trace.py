"""A timeline of a run as Chrome-trace JSON, which Perfetto opens: one row per rank, one slice per action. In: (action, start, end) of each rank."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from ..ir.errors import PenstockError

Event = tuple[str, float, float]


def write_trace(path: Path, ranks: Sequence[Sequence[Event]]) -> None:
    """Times count from the first action of all; ranks on one host share a clock."""
    origin = min((start for events in ranks for _, start, _ in events), default=0.0)
    slices: list[dict[str, object]] = [
        {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}} for rank in range(len(ranks))
    ]
    for rank, events in enumerate(ranks):
        for action, start, end in events:
            kind = action.lstrip("0123456789").split("@")[0].rstrip("0123456789<>").rstrip("0123456789")
            times = {"ts": round((start - origin) * 1e6, 1), "dur": round((end - start) * 1e6, 1)}
            slices.append({"name": action, "cat": kind, "ph": "X", "pid": rank, "tid": 0, **times})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"traceEvents": slices, "displayTimeUnit": "ms"}), encoding="utf-8")
    except OSError as error:
        raise PenstockError(f"cannot write the trace: {error}", where=str(path)) from error
