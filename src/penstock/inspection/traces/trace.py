"""The reader of a trace for display.

In: the file that `run --trace`, `simulate --trace` or `inspect --export` wrote. Out: a Trace: the actions of every rank
with their times.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.ir.schedule import COMPUTE
from penstock.passes.costs.prices import shown_seconds
from penstock.runtime.telemetry.times import reading_trace, seconds_of
from penstock.support import notebook
from penstock.support.words import counted, visible

_HINT = "give a file that `penstock run --trace` or `penstock simulate --trace` wrote"


@dataclass(frozen=True, slots=True)
class ActionSpan:
    """One action; seconds from the first action of the run."""

    action: str
    kind: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class RankRow:
    """One rank. Its name says stage and device, if the trace does. Spans are in the order in which they began."""

    name: str
    spans: tuple[ActionSpan, ...]

    @property
    def computing(self) -> float:
        """The seconds of its computations."""
        return sum(span.end - span.start for span in self.spans if span.kind in COMPUTE)


@dataclass(frozen=True)
class Trace:
    """The actions of a run or a simulation, by rank."""

    path: Path
    rows: tuple[RankRow, ...]

    @property
    def seconds(self) -> float:
        """The end of the last action, on the clock of the trace."""
        return max((span.end for row in self.rows for span in row.spans), default=0.0)

    def __repr__(self) -> str:
        total = sum(len(row.spans) for row in self.rows)
        busy = (
            ", ".join(f"{visible(row.name)} computes {row.computing / self.seconds:.0%}" for row in self.rows[:8])
            if self.seconds
            else "nothing ran"
        )
        more = f", and {counted(len(self.rows) - 8, 'more rank')}" if len(self.rows) > 8 else ""
        return (
            f"<trace {self.path}: {counted(len(self.rows), 'rank')}, {counted(total, 'action')} in "
            f"{shown_seconds(self.seconds)}; "
            f"{busy}{more}>"
        )

    def _repr_html_(self) -> str:
        return notebook.as_html(self)


def load_trace(path: str | Path) -> Trace:
    """Read a trace; raise UsageError where the file is not one."""
    with reading_trace(path, _HINT) as events:
        names = {
            event["pid"]: str(event["args"]["name"])
            for event in events
            if event["ph"] == "M" and event["name"] == "process_name"
        }
        spans: dict[int, list[ActionSpan]] = {rank: [] for rank in names}
        for rank, span in _spans(events):
            spans[rank].append(span)
        ordered = sorted(names)
    return Trace(
        Path(path),
        tuple(RankRow(names[rank], tuple(sorted(spans[rank], key=lambda span: span.start))) for rank in ordered),
    )


def _spans(events: list[dict[str, Any]]) -> Iterator[tuple[int, ActionSpan]]:
    for event in events:
        if event["ph"] == "X":
            yield event["pid"], ActionSpan(str(event["name"]), str(event["cat"]), *seconds_of(event))
