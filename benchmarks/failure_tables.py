"""Tables of trials and of long runs, for people and for the page about runs (docs/runtime.md)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from failure_runs import Result
from machine import markdown

RESULTS = Path(__file__).resolve().parent / "results"


def table_of(results: Sequence[Result]) -> str:
    """Write a table with a line for each kind: trials, failures, and the longest time against the promised one."""
    lines = []
    for kind in sorted({result.kind for result in results}):
        mine = [result for result in results if result.kind == kind]
        timed = [result for result in mine if result.seconds is not None]
        longest = max(timed, key=lambda result: (result.seconds or 0) - (result.within or 0), default=None)
        seconds = "" if longest is None else f"{longest.seconds:.1f} of {longest.within:g}"
        again = max(result.again_s for result in mine)
        lines.append([kind, len(mine), sum(bool(r.problems) for r in mine), seconds, f"{again:.1f}" if again else ""])
    return markdown(["kind", "trials", "failed", "longest seconds to the end", "to the next step"], lines)


def trials_table() -> str:
    """Write the table of the committed trials."""
    document = json.loads((RESULTS / "failures.json").read_text(encoding="utf-8"))
    return table_of([Result(**row) for row in document["trials"]]) + "\n"


def together_table() -> str:
    """Write the table of the committed run of training and inference at once."""
    document: dict[str, Any] = json.loads((RESULTS / "together.json").read_text(encoding="utf-8"))
    lines = [
        [one["process"], f"{one['mib']:.0f}", *(f"{value:+.3f}" for value in one["per_minute"].values())]
        for one in document["processes"]
    ]
    return markdown(["process", "MiB", "MiB per minute", "descriptors per minute", "threads per minute"], lines) + "\n"
