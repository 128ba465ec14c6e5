"""The collectives of a run: how often, how many bytes, how long, and how long ranks waited for them.

In: the collectives of all ranks with their times (a trace), and the module. Out: totals by graph, kind and axes, sums
of all ranks. A collective is under way from its begin to its result. What a rank spends in waiting for it is exposed:
the rest is hidden behind computations. A count is of collectives, in each of which several ranks meet. Bytes are those
that the runtime sends (ir/collective_calls.py). Sums of gradients over dp that are actions of the schedule are among
them where ranks keep parts (`s0.AR`), and not where each has the whole sum.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.ir.action_kinds import SUM
from penstock.ir.collective_calls import CollectiveCall, JointSum, calls_of, kept_sums, sent_bytes
from penstock.ir.graph import Module

from .trace import CollectiveTimes

# What an exchange calls a collective: the action, and the place in its graph.
_TEXT = re.compile(r"(\d+)([A-Z]+).* #(\d+)")


@dataclass(frozen=True, slots=True)
class CollectiveTotal:
    """Collectives of one graph that are alike: their number, and of all ranks together the bytes that they send, the
    seconds under way, and the seconds of waiting."""

    graph: str
    kind: str
    over: tuple[str, ...]
    count: int
    nbytes: int
    seconds: float
    exposed: float

    @property
    def name(self) -> str:
        """The kind and the axes, as one word."""
        return "_".join((self.kind, *self.over))


def collective_totals(ranks: Sequence[Sequence[CollectiveTimes]], module: Module) -> list[CollectiveTotal]:
    """Return the totals of a run, in the order of stages and graphs."""
    totals: dict[tuple[str, str, tuple[str, ...]], list[float]] = {}
    for done in ranks:
        for text, begun, waited, ended in done:
            match = _TEXT.fullmatch(text)
            calls = _calls(module, int(match[1]), match[2]) if match is not None else ()
            if match is None or int(match[3]) >= len(calls):
                raise ValueError(f"no collective of the program is called {text!r}")
            call = calls[int(match[3])]
            members = len(module.mesh_of(int(match[1])).group(0, call.over))
            sent = call.sent(members) if isinstance(call, JointSum) else sent_bytes(call.op, members)
            total = totals.setdefault((call.graph, call.op.kind, call.over), [0.0] * 4)
            for place, amount in enumerate(
                (1 / members, float(sent), max(ended - begun, 0.0), max(ended - waited, 0.0))
            ):
                total[place] += amount
    order = [*module.graphs, *dict.fromkeys(graph for graph, _, _ in totals)]
    return [
        CollectiveTotal(*key, round(count), round(nbytes), seconds, exposed)
        for key, (count, nbytes, seconds, exposed) in sorted(totals.items(), key=lambda item: order.index(item[0][0]))
    ]


def _calls(module: Module, stage: int, kind: str) -> Sequence[CollectiveCall]:
    """Return the collectives of an action, in their order."""
    graph = module.stage_graph(stage, kind)
    if graph is not None:
        return calls_of(graph)
    return kept_sums(module, stage) if kind == SUM else ()


def by_name(totals: Iterable[CollectiveTotal]) -> dict[str, CollectiveTotal]:
    """Return the sums over graphs, by name."""
    sums: dict[str, CollectiveTotal] = {}
    for one in totals:
        other = sums.get(one.name)
        sums[one.name] = (
            one
            if other is None
            else CollectiveTotal(
                "",
                one.kind,
                one.over,
                one.count + other.count,
                one.nbytes + other.nbytes,
                one.seconds + other.seconds,
                one.exposed + other.exposed,
            )
        )
    return sums
