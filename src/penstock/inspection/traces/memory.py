"""The traced memory of a run beside the plan.

In: the module that ran, and the trace that `run --trace` wrote. Out: for every rank the live bytes after each action,
planned and measured, and the first difference; every block with its access intervals; blocks of the same kind together,
and those that lie idle for longer than it takes to move them out and back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from penstock.ir.graph import Module
from penstock.ir.memory.account import Account, Life, first_difference
from penstock.ir.memory.idle import Gap, Way, idle_at, longest_gap, way_out
from penstock.runtime.telemetry.memory_trace import RankTrace, measured_account, most_away, planned_beside
from penstock.runtime.telemetry.trace import makers
from penstock.support.errors import UsageError


@dataclass(frozen=True)
class TracedPoint:
    """The live bytes after an action that ended at `seconds`; `planned` is None where the plan has no such action."""

    seconds: float
    action: str
    planned: int | None
    measured: int


@dataclass(frozen=True)
class HeldVersion:
    """A version of a parameter in a buffer.

    It lives from the action that writes it (None: it was there before) to its last reader.
    """

    version: int
    written: str | None
    retired: str | None


@dataclass(frozen=True)
class TracedBlock:
    """A block of memory in a traced run.

    `taken` and `given` are the actions of its allocation and release, None before the first and after the last. Times
    are seconds since the first action of all. `idle_s` is the longest time between two uses, `after` and `before` the
    actions around it, `move_s` the time of moving it out and back.
    """

    purpose: str
    what: str
    made_by: str | None
    block: str
    nbytes: int
    taken: str | None
    taken_s: float
    given: str | None
    given_s: float
    uses: tuple[tuple[float, float], ...]
    first_use: str | None
    last_use: str | None
    idle_s: float
    after: str | None
    before: str | None
    move_s: float
    versions: tuple[HeldVersion, ...]


@dataclass(frozen=True)
class BlockKind:
    """Blocks with the same values in them, of all microbatches or batches, or the buffers of a variable.

    Seconds are medians, `between` the kinds of actions around the longest idle times. `at_peak` are the bytes of those
    that could be elsewhere at the peak.
    """

    purpose: str
    names: tuple[str, ...]
    made_by: str | None
    count: int
    nbytes: int
    live_s: float
    idle_s: float
    between: str
    move_s: float
    candidate: bool
    at_peak: int


@dataclass(frozen=True)
class TracedMemory:
    """The memory of one rank in a traced run.

    `difference` is None where plan and trace agree in every block and action. `temporaries` are bytes of calls by kind
    of graph. `on_the_way` is the most that was held at once only because it had been sent and had not arrived.
    """

    rank: int
    stages: tuple[int, ...]
    device: str
    place: str
    bandwidth: float
    difference: str | None
    points: tuple[TracedPoint, ...]
    kinds: tuple[BlockKind, ...]
    blocks: tuple[TracedBlock, ...]
    temporaries: Mapping[str, tuple[int, ...]]
    on_the_way: int

    @property
    def most_live(self) -> TracedPoint:
        """The first point with the most live bytes."""
        return max(self.points, key=lambda point: point.measured)


def traced_memory(module: Module, traces: Sequence[RankTrace], where: str) -> tuple[TracedMemory, ...]:
    """Return the memory of each rank; raise UsageError if the trace is not of this module."""
    _check(module, traces, where)
    return tuple(_of_rank(module, rank, trace) for rank, trace in enumerate(traces))


def _check(module: Module, traces: Sequence[RankTrace], where: str) -> None:
    hint = "give the bundle, or the last dump, that ran with --trace"
    if module.schedule is None or module.cluster is None:
        raise UsageError("a trace is of a program: this module has no schedule, or no devices", where=where, hint=hint)
    ranks = module.schedule.ranks
    if len(traces) != len(ranks):
        raise UsageError(f"the trace has {len(traces)} ranks, the module {len(ranks)}", where=where, hint=hint)
    for rank, trace in enumerate(traces):
        known = {(a.kind, a.stage, a.peer) for a in (*ranks[rank].start, *ranks[rank].batch)}
        unknown = next((a for a in trace.actions if (a.kind, a.stage, a.peer) not in known), None)
        if unknown is not None:
            raise UsageError(
                f"rank {rank} of the trace runs {unknown}, which it never does in the module", where=where, hint=hint
            )
        if trace.actions and not any(entry.what == "own" for entry in trace.entries):
            raise UsageError(
                "the trace says nothing of memory", where=where, hint="traces of runs do, those of simulations do not"
            )


def _of_rank(module: Module, rank: int, trace: RankTrace) -> TracedMemory:
    assert module.cluster is not None
    stages, device = module.rank_packs()[rank], module.rank_devices()[rank]
    planned, measured = planned_beside(module, rank, trace), measured_account(module, rank, trace)
    way, made_by = way_out(module.cluster, device), makers(module, stages)
    difference = first_difference(planned, measured)
    expected: list[int | None] = [*planned.curve()]
    expected += [None] * (len(measured.actions) - len(expected))
    lines = zip(measured.times, measured.actions, expected, measured.curve(), strict=False)
    points = tuple(TracedPoint(end, str(action), before, now) for (_, end), action, before, now in lines)
    peak = max(range(len(points)), key=lambda step: points[step].measured, default=0)
    gap_of = {id(life): longest_gap(measured, life) for life in measured.lives}
    return TracedMemory(
        rank,
        stages,
        device,
        way.place,
        way.bandwidth,
        None if difference is None else str(difference),
        points,
        tuple(_kinds(measured, gap_of, way, made_by, peak)),
        tuple(_block(measured, life, gap_of[id(life)], way, made_by) for life in measured.lives),
        dict(measured.workspace),
        most_away(trace),
    )


def _block(account: Account, life: Life, gap: Gap | None, way: Way, made_by: Mapping[str, str]) -> TracedBlock:
    def action(step: int | None) -> str | None:
        return None if step is None or step < 0 else str(account.actions[step])

    begin, end = _span(account, life)
    held = [v for v in account.versions if life.owner is None and (v.name, v.copy) == (life.names[0], life.copy)]
    return TracedBlock(
        life.purpose,
        life.label,
        _maker(life, made_by),
        life.block or str(life.copy),
        life.nbytes,
        action(life.taken_at),
        begin,
        action(life.given_at),
        end,
        tuple(account.times[step] for step in life.uses),
        action(life.uses[0] if life.uses else None),
        action(life.uses[-1] if life.uses else None),
        0.0 if gap is None else gap.seconds,
        None if gap is None else action(gap.after),
        None if gap is None else action(gap.before),
        way.seconds(life.nbytes),
        tuple(HeldVersion(v.version, action(v.written), action(v.retired)) for v in held),
    )


def _kinds(
    account: Account, gap_of: Mapping[int, Gap | None], way: Way, made_by: Mapping[str, str], peak: int
) -> list[BlockKind]:
    """Return the kinds of blocks; the one that could free most at the peak comes first."""
    alike: dict[tuple[str, tuple[str, ...], int], list[Life]] = {}
    for life in account.lives:
        alike.setdefault((life.purpose, life.names, life.nbytes), []).append(life)
    kinds = []
    for (purpose, names, nbytes), lives in alike.items():
        longest = [gap for life in lives if (gap := gap_of[id(life)]) is not None]
        idle = median([gap.seconds for gap in longest]) if longest else 0.0
        around = sorted(f"{account.actions[gap.after].kind} {account.actions[gap.before].kind}" for gap in longest)
        between = max(around, key=around.count).replace(" ", " and ") if around else ""
        spans = [_span(account, life) for life in lives]
        move = way.seconds(nbytes)
        away = sum(nbytes for life in lives if idle_at(account, life, peak, way))
        live = median([end - begin for begin, end in spans])
        kinds.append(
            BlockKind(
                purpose,
                names,
                _maker(lives[0], made_by),
                len(lives),
                nbytes,
                live,
                idle,
                between,
                move,
                idle > move,
                away,
            )
        )
    return sorted(kinds, key=lambda kind: (-kind.at_peak, -kind.nbytes, kind.names))


def _span(account: Account, life: Life) -> tuple[float, float]:
    """Return the seconds at which a block is allocated and released."""
    if not account.times:
        return 0.0, 0.0
    begin = account.times[max(life.taken_at, 0)][0]
    return begin, account.times[-1 if life.given_at is None else life.given_at][1]


def _maker(life: Life, made_by: Mapping[str, str]) -> str | None:
    return next((made_by[name] for name in life.names if name in made_by), None) if life.owner is not None else None
