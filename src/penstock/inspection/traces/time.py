"""The time of a step, divided: every second of a traced run stands under one heading.

In: the module that ran, the trace that `run --trace` wrote and, if measured, the kernels of the module. Out: for each
rank the seconds of a step in computations, waits, messages, sums and what lies between actions. Each is a mean over all
steps but the first two and the last, which fill and empty the pipeline, so that the parts add up to the step.

    step         = computing + waiting + moving + sums + drops + between
    waiting      = behind + on the way
    behind       the message was not sent yet: its sender still computed, or waited itself
    on the way   it was sent, and had not arrived
    between      nothing of the trace: the interpreter of the actions, losses, reports, and other programs

Measured kernels divide computing once more (kernels/timing.py times each alone, on this machine):

    computing    = at full rate + kernels + together
    at full rate   the work of the kernels at the best rates of this machine: `roofline`
    kernels        the kernels alone, above that
    together       the graphs in the run, above their kernels alone: caches and memory that ranks share, calls

Kernels whose operands stay in a cache can be faster than the roofline, and graphs faster than their kernels alone:
parts may be below zero.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.inspection.kernels.kernels import KernelRow, shown_kinds
from penstock.ir.action_kinds import ACTION_KINDS
from penstock.ir.graph import Module
from penstock.ir.schedule import HANDS, RECEIVES, SENDS, Action, Schedule
from penstock.support.errors import UsageError
from penstock.support.words import counted

from .trace import ActionSpan, RankRow, Trace

# Steps that are left out: the first ones also load what the first calls need, the last one drains the pipeline.
_FIRST, _LAST = 2, 1
_Message = tuple[str, int, int, int]


@dataclass(frozen=True)
class GraphTime:
    """A stage graph in a step: its calls, their seconds in the run, and those of its kernels if they were measured."""

    graph: str
    calls: float
    run_s: float
    alone_s: float | None
    full_rate_s: float | None


@dataclass(frozen=True)
class KernelTime:
    """Kernels of one graph that are alike: all their calls in a step, on all ranks of the stage."""

    kernel: str
    operations: str
    calls: float
    alone_s: float
    full_rate_s: float

    @property
    def above_s(self) -> float:
        return self.alone_s - self.full_rate_s


@dataclass(frozen=True)
class RankTime:
    """The seconds of one rank in a step, by what they were for."""

    rank: int
    name: str
    graphs: tuple[GraphTime, ...]
    behind_s: float
    on_the_way_s: float
    sending_s: float
    sums_s: float
    copies_s: float
    drops_s: float
    between_s: float

    @property
    def computing_s(self) -> float:
        return sum(graph.run_s for graph in self.graphs)

    @property
    def step_s(self) -> float:
        parts = (
            self.behind_s,
            self.on_the_way_s,
            self.sending_s,
            self.sums_s,
            self.copies_s,
            self.drops_s,
            self.between_s,
        )
        return self.computing_s + sum(parts)


@dataclass(frozen=True)
class StepTime:
    """The steps that were looked at, each rank's time in one of them, and the measured kernels, those with the most
    time above full rate first."""

    steps: int
    seconds: float
    ranks: tuple[RankTime, ...]
    kernels: tuple[KernelTime, ...]


def step_time(module: Module, trace: Trace, measured: Sequence[KernelRow] = ()) -> StepTime:
    """Divide the time of the steps of a traced run; raise UsageError where the trace is of another module or too
    short."""
    schedule = module.schedule
    if schedule is None:
        raise UsageError("the module has no schedule yet", hint="inspect the bundle that ran")
    if len(trace.rows) != len(schedule.ranks):
        raise UsageError(
            f"the trace has {len(trace.rows)} ranks, and the module {len(schedule.ranks)}",
            where=str(trace.path),
            hint="give the trace of a run of this bundle",
        )
    sent = _sends(trace, schedule)
    kernels = _seconds_of_graphs(measured)
    ranks, steps = [], 0
    for rank, row in enumerate(trace.rows):
        spans, steps, begin, end = _window(row, schedule, rank, trace)
        ranks.append(_rank_time(rank, row.name, (spans, steps, end - begin), sent, kernels))
    seconds = sum(rank.step_s for rank in ranks) / len(ranks)
    return StepTime(steps, seconds, tuple(ranks), _kernel_times(ranks, measured))


def _kernel_times(ranks: Sequence[RankTime], measured: Sequence[KernelRow]) -> tuple[KernelTime, ...]:
    calls: dict[str, float] = defaultdict(float)
    for rank in ranks:
        for graph in rank.graphs:
            calls[graph.graph] += graph.calls
    kernels = []
    for row in measured:
        count = calls[row.graph] * len(row.names)
        times = (count, count * row.seconds, count * row.roofline_s)
        kernels.append(KernelTime(row.label, shown_kinds(row.ops), *times))
    return tuple(sorted(kernels, key=lambda kernel: -kernel.above_s))


def _actions(row: RankRow, trace: Trace) -> list[tuple[Action, ActionSpan]]:
    """Return the actions of a rank with their times; the words after an action's name are for people."""
    try:
        return [(Action.parse(span.action.partition(" ")[0]), span) for span in row.spans]
    except ValueError as error:
        raise UsageError(str(error), where=str(trace.path)) from error


def _sends(trace: Trace, schedule: Schedule) -> dict[_Message, float]:
    """Return when each message was handed over: its phase, its ranks, its number."""
    return {
        (action.phase, rank, action.peer, action.mb): span.start
        for rank, row in zip(schedule.ranks, trace.rows, strict=True)
        for action, span in _actions(row, trace)
        if action.kind in (*SENDS, *HANDS) and action.peer is not None
    }


def _window(
    row: RankRow, schedule: Schedule, rank: int, trace: Trace
) -> tuple[list[tuple[Action, ActionSpan]], int, float, float]:
    """Return the actions of whole steps, how many steps these are, and their begin and end.

    A step ends with the last action of the list that is run once per batch.
    """
    actions = _actions(row, trace)
    last = schedule.ranks[rank].batch[-1]
    ends = [
        position
        for position, (action, _) in enumerate(actions)
        if (action.kind, action.stage, action.peer, action.item) == (last.kind, last.stage, last.peer, last.item)
        and (action.mb - last.mb) % (1 if action.once else schedule.microbatches) == 0
    ]
    whole = ends[_FIRST - 1 : len(ends) - _LAST]
    if len(whole) < 2:
        raise UsageError(
            f"rank {rank} did {counted(len(ends), 'step')} in this trace, of which the first {_FIRST} and the last do "
            "not count",
            where=str(trace.path),
            hint=f"trace a run of at least {_FIRST + _LAST + 1} steps of this bundle",
        )
    first, final = whole[0], whole[-1]
    return actions[first + 1 : final + 1], len(whole) - 1, actions[first][1].end, actions[final][1].end


def _rank_time(
    rank: int,
    name: str,
    window: tuple[list[tuple[Action, ActionSpan]], int, float],
    sent: Mapping[_Message, float],
    kernels: Mapping[str, tuple[float, float]],
) -> RankTime:
    actions, steps, seconds = window
    calls: dict[str, list[float]] = {}
    spent = dict.fromkeys(("behind", "on the way", "sends", "sums", "copies", "drops"), 0.0)
    for action, span in actions:
        length = span.end - span.start
        if ACTION_KINDS[action.kind].computes:
            calls.setdefault(f"s{action.stage}.{action.kind}", []).append(length)
        elif action.kind in RECEIVES:
            handed = sent.get((action.phase, -1 if action.peer is None else action.peer, rank, action.mb), span.start)
            behind = min(max(handed - span.start, 0.0), length)
            spent["behind"] += behind
            spent["on the way"] += length - behind
        else:
            # Letting go of what was copied out waits for the copy.
            spent["copies" if action.item else ACTION_KINDS[action.kind].does] += length
    between = seconds - sum(spent.values()) - sum(map(sum, calls.values()))
    graphs = tuple(_graph_time(graph, times, steps, kernels.get(graph)) for graph, times in calls.items())
    return RankTime(
        rank,
        name,
        graphs,
        behind_s=spent["behind"] / steps,
        on_the_way_s=spent["on the way"] / steps,
        sending_s=spent["sends"] / steps,
        sums_s=spent["sums"] / steps,
        copies_s=spent["copies"] / steps,
        drops_s=spent["drops"] / steps,
        between_s=between / steps,
    )


def _graph_time(graph: str, times: Sequence[float], steps: int, kernels: tuple[float, float] | None) -> GraphTime:
    calls = len(times) / steps
    alone, full_rate = (None, None) if kernels is None else (calls * kernels[0], calls * kernels[1])
    return GraphTime(graph, calls, sum(times) / steps, alone, full_rate)


def _seconds_of_graphs(measured: Sequence[KernelRow]) -> dict[str, tuple[float, float]]:
    """Return the seconds of the kernels of one call of each graph, alone and at full rate."""
    of_graph: dict[str, tuple[float, float]] = {}
    for row in measured:
        alone, full_rate = of_graph.get(row.graph, (0.0, 0.0))
        calls = len(row.names)
        of_graph[row.graph] = (alone + calls * row.seconds, full_rate + calls * row.roofline_s)
    return of_graph
