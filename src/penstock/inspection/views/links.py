"""The edges between stages as text: which ranks send, what carries their messages, and what a message takes.

In: a scheduled module with a cluster. Out: a table with a row for every pair of ranks and phase. Seconds are those of
the cost model for one microbatch, or batch, on links that are free.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.ir.graph import Module
from penstock.ir.messages import parcels
from penstock.ir.schedule import HANDS, PHASES, SENDS, Action
from penstock.ir.sharding.tile_messages import ends_of, message_values
from penstock.passes.costs.prices import Transfer, cost, shown_seconds
from penstock.support.errors import UsageError
from penstock.support.terminal import table
from penstock.support.words import shown_bytes, shown_rate

_COLUMNS = ("ranks", "devices", "phase", "carried by", "values", "messages", "bytes", "rate", "latency", "takes")


def show_links(module: Module, width: int | None = None) -> str:
    """Return the table of edges."""
    if module.cluster is None or module.schedule is None:
        raise UsageError(
            "names no devices or has no schedule",
            where=f"@{module.name}",
            hint="--links needs a bundle, or a dump after `schedule`",
        )
    rows = list(_rows(module))
    return table(_COLUMNS, rows, width, cut=(1,)) if rows else "no messages: there is one stage"


def _rows(module: Module) -> Iterator[list[str | int]]:
    cluster, schedule = module.cluster, module.schedule
    assert cluster is not None
    assert schedule is not None
    devices, stages = module.rank_devices(), module.rank_stages()
    for rank, program in sorted(schedule.ranks.items()):
        sends: dict[tuple[int, str, int, int], Action] = {
            (a.peer, a.kind, a.stage, a.other(stages)): a
            for a in (*program.start, *program.batch)
            if a.kind in (*SENDS, *HANDS) and a.peer is not None
        }
        for (peer, *_), action in sorted(
            sends.items(), key=lambda item: (item[0][0], PHASES.index(item[1].phase), *item[0][2:])
        ):
            ends = ends_of(action, stages)
            values = message_values(module, ends, rank, peer)
            link = cluster.message_link(devices[rank], devices[peer])
            nbytes, messages = sum(value.type.nbytes for value in values), len(parcels(values))
            yield [
                f"{rank} > {peer}",
                f"{devices[rank]} > {devices[peer]}",
                action.phase,
                cluster.carrier(devices[rank], devices[peer]) + (", handed on" if action.kind in HANDS else ""),
                len(values),
                messages,
                shown_bytes(nbytes),
                shown_rate(link.bandwidth),
                shown_seconds(link.latency),
                shown_seconds(cost(Transfer(nbytes, messages), link).seconds),
            ]
