"""Tensors that are split over devices as text: their layouts, the collectives, and what these send."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.inspection.sharding.layouts import SplitFacts
from penstock.passes.costs.prices import shown_seconds
from penstock.support.terminal import table
from penstock.support.words import counted, shown_bytes

_TENSORS = ("tensor", "role", "stage", "whole type", "on a device", "there", "whole", "all devices")
_COLLECTIVES = (
    "graph",
    "collective",
    "over",
    "ranks",
    "per",
    "a rank sends",
    "predicted",
    "exposed",
    "result",
    "behind",
    "read by",
)
_REASONS = ("graph", "result", "exchanged because", "not with the given layouts")
_GRAPHS = ("graph", "collectives", "per", "a rank sends", "per batch", "all ranks")


def show_sharding(facts: SplitFacts, width: int | None = None) -> str:
    """Return the tables of how tensors lie, and of collectives."""
    return "\n".join(_lines(facts, width))


def _lines(facts: SplitFacts, width: int | None) -> Iterator[str]:
    yield from facts.meshes
    yield ""
    rows = [
        [
            t.name,
            t.role,
            "-" if t.stage is None else t.stage,
            t.whole,
            t.local,
            *map(shown_bytes, (t.device_bytes, t.whole_bytes, t.copies)),
        ]
        for t in facts.tensors
    ]
    yield table(_TENSORS, rows, width, cut=(0,))
    if facts.collectives:
        yield ""
        uses = [
            [
                *(u.graph, u.kind, ", ".join(u.over), u.members, u.per, shown_bytes(u.sent)),
                *("-" if seconds is None else shown_seconds(seconds) for seconds in (u.seconds, u.exposed)),
                *(u.result, u.behind, u.reader),
            ]
            for u in facts.collectives
        ]
        yield table(_COLLECTIVES, uses, width, cut=(9, 10, 8))
        yield ""
        reasons = [[u.graph, u.result, u.reason, ", ".join(u.avoided_by) or "-"] for u in facts.collectives]
        yield table(_REASONS, reasons, width, cut=(3, 2, 1))
        yield ""
        sums = [
            [
                g.graph,
                ", ".join(f"{count} {kind}" for kind, count in g.kinds.items()),
                g.per,
                *map(shown_bytes, (g.sent, g.batch, g.ranks)),
            ]
            for g in facts.graphs
        ]
        yield table(_GRAPHS, sums, width, cut=(1,))
    yield (
        f"{counted(len(facts.collectives), 'collective')}; in a batch a rank sends at most "
        f"{shown_bytes(facts.rank_bytes)} in them, all ranks together {shown_bytes(facts.all_bytes)}"
    )
    yield "sums of gradients over dp (AR) and messages between stages are not among them"
