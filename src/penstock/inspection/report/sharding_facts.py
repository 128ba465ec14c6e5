"""The layouts of tensors and the collectives of a program, as data.

    {"meshes": [a line for each stage],
     "tensors": [[name, role, stage, whole type, type on a device, bytes there, bytes of the whole], ...],
     "collectives": [[graph, kind, axes, count, bytes that a rank sends, predicted seconds, exposed ones, reasons], ...]
                    of one run of a graph,
     "measured": [[graph, kind, axes, count, bytes, seconds under way, seconds exposed], ...] of all ranks, or null}

Collectives of one kind and the same axes are one row of their graph, with a reason for each.
"""

from __future__ import annotations

from typing import Any

from penstock.inspection.sharding.layouts import CollectiveUse, split_facts
from penstock.ir.graph import Module

from .material import RunTrace


def sharding_facts(module: Module, trace: RunTrace | None) -> dict[str, Any] | None:
    """Return the facts; None where nothing is split."""
    if not module.is_local:
        return None
    facts = split_facts(module)
    rows: dict[tuple[str, str, tuple[str, ...]], list[CollectiveUse]] = {}
    for use in facts.collectives:
        rows.setdefault((use.graph, use.kind, use.over), []).append(use)
    measured = None
    if trace is not None:
        measured = [
            [one.graph, one.kind, list(one.over), one.count, one.nbytes, one.seconds, one.exposed]
            for one in trace.collectives
        ]
    return {
        "meshes": list(facts.meshes),
        "tensors": [[t.name, t.role, t.stage, t.whole, t.local, t.device_bytes, t.whole_bytes] for t in facts.tensors],
        "collectives": [
            [
                graph,
                kind,
                list(over),
                len(uses),
                sum(use.sent for use in uses),
                *_seconds(uses),
                [u.reason for u in uses],
            ]
            for (graph, kind, over), uses in rows.items()
        ],
        "measured": measured,
    }


def _seconds(uses: list[CollectiveUse]) -> list[float | None]:
    """Return the seconds of collectives, and of them the exposed ones; None where they are not known."""
    columns = [[use.seconds for use in uses], [use.exposed for use in uses]]
    known = [[seconds for seconds in column if seconds is not None] for column in columns]
    return [sum(column) if len(column) == len(uses) else None for column in known]
