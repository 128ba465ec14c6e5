"""A schedule played through on a grid of ranks and times, without a run.

In: a schedule and how long computations take. Out: when every action starts and finishes, or which ranks wait for each
other.

Sends are buffered and take no time of their rank, receives wait for the message, computations of one rank run one after
another. A sum over the ranks of a stage begins with AR and goes on in the background: what uses it (P, N, U) waits for
all of them. In a schedule without sends and receives yet, a forward waits for the stage before it, and a backward for
the stage after it. A computation whose graph has collectives begins when all ranks that it brings together have come
to it. `latency` is what a message takes on any link. Known limits: bandwidth, and links that are not a
chain before `communicate`; the modelled cluster is the business of passes/simulator.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.support.errors import VerifyError

from .action_kinds import ACTION_KINDS, AGAIN, BACKWARD, DROP, FORWARD, LET_GO, SUM, WEIGHTS, adder
from .schedule import COMPUTE, COPIES, HANDS, PHASES, RECEIVES, SENDS, SUM_USERS, Action, Schedule

Event = Hashable
Programs = Mapping[int, Sequence[Action]]


class Gathering(NamedTuple):
    """The ranks that a computation brings together, and the event that all of them are there. The event of one of them
    is `(event, rank)`."""

    event: Event
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Rules:
    """The events around an action of a rank. It waits for `needs`; `gives` hold once it is done, and `meets` as soon as
    its turn comes. What `gathers` lists waits then until all ranks have come to it.
    """

    needs: Callable[[int, Action], Iterable[Event]]
    gives: Callable[[int, Action], Iterable[Event]]
    meets: Callable[[int, Action], Iterable[Event]]
    gathers: Mapping[tuple[int, Action], Gathering] = field(default_factory=dict)


class Meeting(NamedTuple):
    """The events of an action that ranks meet by: the message that it moves, the arrival of its rank at a sum, those of
    all ranks."""

    needs: str
    gives: str
    meets: str


MESSAGE, ARRIVAL, ARRIVALS, NOTHING = "message", "arrival", "arrivals", ""
_ALONE = Meeting(NOTHING, NOTHING, NOTHING)
MEETINGS: dict[str, Meeting] = {
    **dict.fromkeys(COMPUTE, _ALONE),
    **dict.fromkeys(SUM_USERS, Meeting(ARRIVALS, NOTHING, NOTHING)),
    **dict.fromkeys((*SENDS, *HANDS), Meeting(NOTHING, MESSAGE, NOTHING)),
    **dict.fromkeys(RECEIVES, Meeting(MESSAGE, NOTHING, NOTHING)),
    SUM: Meeting(NOTHING, NOTHING, ARRIVAL),
    **dict.fromkeys((*COPIES, LET_GO, DROP), _ALONE),
}


class Timed(NamedTuple):
    action: Action
    start: float
    finish: float


@dataclass(frozen=True, slots=True)
class Played:
    """The actions that ran, rank by rank, and for each rank that cannot go on the event it waits for."""

    ranks: Mapping[int, list[Timed]]
    stuck: Mapping[int, Event]

    @property
    def finish(self) -> float:
        return max((timed.finish for line in self.ranks.values() for timed in line), default=0.0)


def message_rules(schedule: Schedule) -> Rules:
    """Return the rules of a schedule with sends and receives: an event is a message, or the arrival of a rank at a sum
    over its replicas."""
    replicas = schedule.replicas()
    summing = {a.stage for a in schedule.actions() if a.kind == SUM}

    def message(rank: int, action: Action) -> Event:
        return (*action.channel(rank), action.mb)

    events: dict[str, Callable[[int, Action], Iterable[Event]]] = {
        MESSAGE: lambda rank, a: (message(rank, a),),
        ARRIVAL: lambda rank, a: ((SUM, rank, a.stage, a.mb),),
        ARRIVALS: lambda rank, a: (
            [(SUM, other, a.stage, a.mb) for other in replicas[rank]] if a.stage in summing else ()
        ),
        NOTHING: lambda rank, a: (),
    }
    needs, gives, meets = (
        {kind: events[meeting[i]] for kind, meeting in MEETINGS.items()} for i in range(len(Meeting._fields))
    )
    return Rules(
        needs=lambda rank, a: needs[a.kind](rank, a),
        gives=lambda rank, a: gives[a.kind](rank, a),
        meets=lambda rank, a: meets[a.kind](rank, a),
    )


def value_rules(feeds: Mapping[tuple[str, int], Sequence[tuple[str, int]]], schedule: Schedule) -> Rules:
    """Return the rules of a schedule without sends: `feeds[kind, stage]` are the computations of other stages, by kind
    and stage, that it waits for."""
    collective = message_rules(schedule)

    def needs(rank: int, action: Action) -> Iterable[Event]:
        fed = [(phase, source, action.mb) for phase, source in feeds.get((action.kind, action.stage), ())]
        return [*fed, *collective.needs(rank, action)] if action.kind in COMPUTE else ()

    return Rules(needs, lambda rank, a: ((a.kind, a.stage, a.mb),) if a.kind in PHASES else (), collective.meets)


def gatherings(
    programs: Programs, together: Mapping[tuple[int, int, str], tuple[int, ...]]
) -> dict[tuple[int, Action], Gathering]:
    """Return where ranks gather in a run. `together` are the ranks that a computation brings together, by rank, stage
    and kind. The n-th of a stage and kind on one rank meets the n-th on the others: replicas run other microbatches."""
    places: dict[tuple[int, Action], Gathering] = {}
    for rank, actions in programs.items() if together else ():
        counts: dict[tuple[int, str], int] = {}
        for action in actions:
            ranks = together.get((rank, action.stage, action.kind))
            if ranks is not None:
                key = action.stage, action.kind
                counts[key] = counts.get(key, 0) + 1
                places[rank, action] = Gathering((ranks[0], *key, counts[key]), ranks)
    return places


def play(programs: Programs, rules: Rules, duration: Callable[[Action], float], latency: float = 0.0) -> Played:
    """Run every rank as far as it gets. Linear in the number of actions."""
    done: dict[Event, float] = {}
    waiting: dict[Event, list[int]] = {}
    lines: dict[int, list[Timed]] = {rank: [] for rank in programs}
    clock = dict.fromkeys(programs, 0.0)
    blocked: dict[int, Event] = {}
    standing: dict[Event, set[int]] = {}
    ready: list[int] = list(programs)[::-1]

    def wait(rank: int, event: Event) -> None:
        blocked[rank] = event
        waiting.setdefault(event, []).append(rank)

    def post(events: Iterable[Event], time: float) -> None:
        for event in events:
            done.setdefault(event, time)
            ready.extend(waiting.pop(event, ()))

    while ready:
        rank = ready.pop()
        blocked.pop(rank, None)
        line, actions = lines[rank], programs[rank]
        for at in range(len(line), len(actions)):
            action = actions[at]
            post(rules.meets(rank, action), clock[rank])
            start = clock[rank]
            for event in rules.needs(rank, action):
                if event not in done:
                    wait(rank, event)
                    break
                start = max(start, done[event] + latency)
            if rank in blocked:
                break
            gathering = rules.gathers.get((rank, action)) if rules.gathers else None
            if gathering is not None:
                there = standing.setdefault(gathering.event, set())
                there.add(rank)
                if len(there) == len(gathering.ranks):
                    post((gathering.event,), start)
                elif gathering.event not in done:
                    wait(rank, gathering.event)
                    break
                start = max(start, done[gathering.event])
            finish = start + duration(action)
            line.append(Timed(action, start, finish))
            clock[rank] = finish
            post(rules.gives(rank, action), finish)
    for rank, event in blocked.items():
        if event in standing:
            ranks = rules.gathers[rank, programs[rank][len(lines[rank])]].ranks
            blocked[rank] = (event, next(other for other in ranks if other not in standing[event]))
    return Played(lines, blocked)


def chain(schedule: Schedule) -> dict[tuple[str, int], list[tuple[str, int]]]:
    """List the computations that feed each computation when each stage talks to its neighbours only."""
    present = {(a.kind, a.stage) for a in schedule.actions()}
    return {
        (kind, stage): [(kind, source)]
        for kind, stage in present
        if (kind, source := stage - ACTION_KINDS[kind].way) in present - {(kind, stage)}
    }


def simulate(
    schedule: Schedule,
    batches: int,
    forward_time: float = 1,
    backward_time: float = 2,
    weight_time: float = 1,
    *,
    first: int = 0,
    latency: float = 0,
) -> Played:
    """Start and finish of every action of a run. `weight_time` is the part of the backward's time that W takes on
    stages that have one. R takes as long as a forward. VerifyError when the ranks wait for each other."""
    programs = schedule.expand_all(batches, first)
    wired = any(a.kind in SENDS for a in schedule.actions())
    rules = message_rules(schedule) if wired else value_rules(chain(schedule), schedule)
    times = {FORWARD: forward_time, AGAIN: forward_time, BACKWARD: backward_time, WEIGHTS: weight_time}
    split = {(whole, a.stage): times[a.kind] for a in schedule.actions() if (whole := ACTION_KINDS[a.kind].part_of)}

    def duration(action: Action) -> float:
        return times.get(action.kind, 0.0) - split.get((action.kind, action.stage), 0.0)

    played = play(programs, rules, duration, latency)
    if played.stuck:
        waits = ", ".join(
            f"rank {r} at step {len(played.ranks[r])} ({programs[r][len(played.ranks[r])]})"
            for r in sorted(played.stuck)
        )
        raise VerifyError(
            f"cannot finish {batches} batches: these wait for ever: {waits}", where=f"schedule {schedule.name}"
        )
    return played


def time_per_batch(
    schedule: Schedule,
    forward_time: float = 1,
    backward_time: float = 2,
    weight_time: float = 1,
    *,
    latency: float = 0,
    batches: int = 6,
) -> float:
    """Return the time of one more batch in a long run."""
    short, long = (
        simulate(schedule, n, forward_time, backward_time, weight_time, latency=latency).finish
        for n in (batches, 2 * batches)
    )
    return (long - short) / batches


def most_in_flight(actions: Iterable[Action]) -> int:
    """Return the largest number of microbatches that have run forward and not yet backward, W included, in the program
    of a rank."""
    listed = list(actions)
    last = adder({action.kind for action in listed})
    now = most = 0
    for action in listed:
        now += {FORWARD: 1, last: -1}.get(action.kind, 0)
        most = max(most, now)
    return most
