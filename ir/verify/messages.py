"""The checker of the fact wired: the messages between ranks.

In: a module with edges and a schedule with sends and receives.

Edges carry exactly what the graphs of one stage take from those of another. On every rank a computation runs after all
its receives and before all its sends. Every message is sent once and received once, in the same order on both sides of
a channel; the ranks of a stage sum up gradients and meet in collectives of graphs in the same order; and no rank waits
for ever, when sends are buffered, and receives and collectives wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest

from penstock.ir.action_kinds import DROP, FORWARD, LET_GO, SUM
from penstock.ir.collective_calls import first_meeting, meeting_ranks
from penstock.ir.graph import Edge, Module, Value
from penstock.ir.grid import message_rules
from penstock.ir.schedule import (
    COMPUTE,
    COPIES,
    HANDS,
    PER_BATCH,
    RECEIVE_OF,
    RECEIVES,
    SEND_OF,
    SENDS,
    TAKERS,
    Action,
    Routes,
)
from penstock.ir.sharding.between_meshes import arriving_values, edge_values, travels_in_tiles
from penstock.ir.sharding.tile_messages import TileMessages, ends_of, tile_messages

from .problems import Problem
from .runs import ConcreteRun, FirstOfEach, over_runs
from .schedules import check_progress, sources, taking

Channel = tuple[str, int, int, int | None, int | None]


def check_wired(module: Module) -> Iterator[Problem]:
    schedule = module.schedule
    if schedule is None:
        yield Problem("schedule", "there is none")
        return
    problems = list(_check_edges(module))
    yield from problems
    if problems:
        return
    yield from over_runs(module, _check_messages)


def _check_edges(module: Module) -> Iterator[Problem]:
    expected = sources(module)
    edges = {(e.src, e.dst, e.phase): e for e in module.edges}
    if len(edges) != len(module.edges):
        yield Problem("edges", "two edges have the same source, destination and phase")
    for key, values in expected.items():
        place = f"edge {key[0]}>{key[1]} {key[2]}"
        if key not in edges:
            taker = taking(module, key[1], key[2], values)[0]
            yield Problem(
                place, f"there is none, but @s{key[1]}.{taker} takes {_values(values)} from @s{key[0]}.{key[2]}"
            )
        elif list(edge_values(module, edges[key], key[0])) != values:
            yield Problem(place, f"carries {_values(edges[key].values)}, expected {_values(values)}")
        elif travels_in_tiles(edges[key]):
            yield from _check_layouts(module, edges[key], place)
    for key, edge in edges.items():
        if key not in expected:
            taker = " or ".join(f"@s{key[1]}.{kind}" for kind in TAKERS[key[2]])
            yield Problem(
                f"edge {key[0]}>{key[1]} {key[2]}", f"carries {_values(edge.values)}, which {taker} does not take"
            )


def _check_layouts(module: Module, edge: Edge, place: str) -> Iterator[Problem]:
    """Check that values of an edge between unlike meshes arrive in the sizes that graphs take, and are no sums of
    parts."""
    graphs = [g for kind in TAKERS[edge.phase] if (g := module.stage_graph(edge.dst, kind)) is not None]
    arrived = {value.name: value for value in edge_values(module, edge, edge.dst)}
    for value in dict.fromkeys(v for graph in graphs for v in graph.ins if v.name in arrived):
        if value != arrived[value.name]:
            yield Problem(place, f"{arrived[value.name]} arrives on a rank of stage {edge.dst}, which takes {value}")
    for value, other in zip(edge.values, arriving_values(edge), strict=True):
        if value.type.plain != other.type.plain:
            yield Problem(place, f"{value} leaves, and arrives as {other.type}, which is another tensor")
        if value.type.partial or other.type.partial:
            yield Problem(place, f"{value} is a sum of parts, which does not travel in tiles")


def _values(values: Iterable[Value]) -> str:
    return ", ".join(map(repr, values)) or "nothing"


def _check_messages(module: Module, run: ConcreteRun) -> Iterator[Problem]:
    into: dict[tuple[int, str], list[tuple[int, str]]] = {}
    out: dict[tuple[int, str], list[int]] = {}
    for edge in module.edges:
        for kind in taking(module, edge.dst, edge.phase, edge.values):
            into.setdefault((edge.dst, kind), []).append((edge.src, edge.phase))
        out.setdefault((edge.src, edge.phase), []).append(edge.dst)
    tiles = tile_messages(module)
    for rank, actions in run.programs.items():
        yield from _Ends(run, rank, into, out, tiles).check(actions)
    yield from _check_channels(run)
    yield from _check_orders(module, run)
    yield from check_progress(module, run, message_rules(run.schedule))


class _Ends:
    """The checker of the ends of messages on one rank: all that a computation takes has come before it, and all that it
    makes is sent after it, each exactly once. The peer of a message is a rank, what it is of the stage: any rank of it
    will do, as the channels show that it has it. `into` are the sources of what computations take, with their phases;
    `out` the stages that take the results of phases, `tiles` the messages between unlike meshes, of which a rank gets
    several in place of one."""

    def __init__(
        self,
        run: ConcreteRun,
        rank: int,
        into: Mapping[tuple[int, str], list[tuple[int, str]]],
        out: Mapping[tuple[int, str], list[int]],
        tiles: TileMessages,
    ) -> None:
        self._into, self._out, self._tiles = into, out, tiles
        self._arriving = {(stage, phase, peer) for (stage, _), sources in into.items() for peer, phase in sources}
        self._homes, self._members = run.schedule.homes(), run.schedule.members()
        self._rank, self._own = rank, set(run.schedule.stages_of(rank))
        self._packed = any(len(run.schedule.stages_of(other)) > 1 for other in run.programs)
        self._teams, self._routes = run.schedule.teams(), Routes(run.schedule)
        self._done: dict[tuple[str, int, int, int | None, int | None], int] = {}
        # The ranks that have sent tiles, by edge and microbatch or batch.
        self._arrived: dict[tuple[tuple[int, int, str], int], list[int]] = {}
        self._problem = FirstOfEach(run, rank)

    def check(self, actions: list[Action]) -> Iterator[Problem]:
        for step, a in enumerate(actions):
            if a.item and a.kind not in COMPUTE:
                continue
            if (check := ENDS[a.kind]) is not None:
                yield from check(self, step, a)
            self._done.setdefault((a.computation, a.stage, a.mb, a.peer, a.end), step)
        for (kind, stage, mb, *_), step in self._done.items():
            # One of the teams of a stage sends results that exist once per batch. The check of the receiver notices a
            # missing one.
            each = kind not in PER_BATCH or len(self._teams[stage]) == 1
            for target in self._out.get((stage, kind), ()) if each else ():
                peers, send = self._members[target], SEND_OF[kind]
                if self._owes(kind, stage, mb, target):
                    ends = "|".join(map(str, peers))
                    what = f"its results are never sent to stage {target} ({stage}{send}{mb}>{ends})"
                    yield from self._problem("unsent", step, what)

    def send(self, step: int, a: Action) -> Iterator[Problem]:
        other = self._other(a)
        yield from self._message(step, a, known=other in self._out.get((a.stage, a.phase), ()))
        if (a.phase, a.stage, a.mb, None, None) not in self._done:
            yield from self._problem("early", step, f"sends what {a.stage}{a.phase}{a.mb} has not computed yet")

    def receive(self, step: int, a: Action) -> Iterator[Problem]:
        other = self._other(a)
        known = (a.stage, a.phase, other) in self._arriving
        yield from self._message(step, a, known=known)
        if known and a.peer is not None and other is not None and (other, a.stage, a.phase) in self._tiles:
            self._receive_tiles(a, (other, a.stage, a.phase))
            if not self._tiles.slices((other, a.stage, a.phase), a.peer, self._rank):
                yield from self._problem("tile", step, "brings nothing that has not come from other ranks")
            return
        if known and a.peer is not None:
            (place, size), (there, of) = self._routes.seat(self._rank), self._routes.seat(a.peer)
            if size == of and place != there:
                what = f"comes from place {there} of its team, which may have another part; expected place {place}"
                yield from self._problem("place", step, what)
        for peer in self._members.get(other, ()) if other is not None else ():
            if peer != a.peer and (first := self._done.get((a.kind, a.stage, a.mb, peer, a.end))) is not None:
                yield from self._problem("twice", step, f"has already come from rank {peer} at step {first}")

    def hand_on(self, step: int, a: Action) -> Iterator[Problem]:
        """Check that all of the values have come before they are handed on, from another stage, to a rank of this, and
        that no computation takes them before: it may wait for that rank."""
        ends = ends_of(a, self._homes)
        fellow = a.peer != self._rank and a.peer in self._members[a.stage]
        yield from self._message(step, a, known=fellow and ends in self._tiles)
        if not fellow or ends not in self._tiles:
            return
        if self._tiles.missing(ends, self._rank, self._arrived.get((ends, a.mb), [])):
            yield from self._problem("early", step, f"hands on what has not come from stage {a.end} yet")
        for (stage, kind), origins in self._into.items():
            if stage == a.stage and (ends[0], a.phase) in origins and (kind, stage, a.mb, None, None) in self._done:
                what = (
                    f"comes behind {stage}{kind}{a.mb}, which takes the same values, so that rank {a.peer} waits for it"
                )
                yield from self._problem("behind", step, what)

    def _receive_tiles(self, a: Action, ends: tuple[int, int, str]) -> None:
        assert a.peer is not None
        self._arrived.setdefault((ends, a.mb), []).append(a.peer)

    def _check_tiles(self, step: int, a: Action, ends: tuple[int, int, str]) -> Iterator[Problem]:
        """Check that all elements of the values of an edge have come, each from one rank."""
        peers = self._arrived.get((ends, a.mb), [])
        missing = self._tiles.missing(ends, self._rank, peers)
        if missing:
            listed = ", ".join(f"%{name}" for name in missing)
            come = f"rank {', '.join(map(str, peers))}" if peers else "no rank"
            what = f"takes {listed} from stage {ends[0]}, of which elements are missing: tiles have come from {come}"
            yield from self._problem("tiles", step, what)

    def compute(self, step: int, a: Action) -> Iterator[Problem]:
        for source, phase in self._into.get((a.stage, a.kind), ()):
            if (source, a.stage, phase) in self._tiles and source not in self._own:
                yield from self._check_tiles(step, a, (source, a.stage, phase))
                continue
            peers, receive = self._members[source], RECEIVE_OF[phase]
            if source in self._own:
                if (phase, source, a.mb, None, None) not in self._done:
                    what = f"runs before {source}{phase}{a.mb} of the same rank, whose results it takes"
                    yield from self._problem("late", step, what)
            elif not self._moved(receive, a.stage, a.mb, source):
                ends = "|".join(map(str, peers))
                what = f"runs before its inputs from stage {source} have arrived ({a.stage}{receive}{a.mb}<{ends})"
                yield from self._problem("late", step, what)

    def let_go(self, step: int, a: Action) -> Iterator[Problem]:
        """Check that nothing is let go of before it was sent."""
        for target in self._out.get((a.stage, FORWARD), ()):
            if self._owes(FORWARD, a.stage, a.mb, target):
                what = f"comes before the results of microbatch {a.mb} are sent to stage {target}"
                yield from self._problem("unsent", step, what)

    def _message(self, step: int, a: Action, *, known: bool) -> Iterator[Problem]:
        key = (a.kind, a.stage, a.mb, a.peer, a.end)
        if key in self._done:
            yield from self._problem("twice", step, f"was already done at step {self._done[key]}")
        if not known:
            other = self._other(a)
            other_stage = str(other) if other == a.peer or a.end is not None else f"the stage of rank {a.peer}"
            what = f"there is no {a.phase} edge between stages {a.stage} and {other_stage} in that direction"
            yield from self._problem("edge", step, what)

    def _other(self, a: Action) -> int | None:
        if a.peer is None or (a.end is None and self._packed):
            return None
        if a.kind in RECEIVES and a.end is not None and self._hands(a):
            return a.end
        other = self._homes.get(a.peer) if a.end is None else a.end
        # A rank that the message names must run the stage that it names, and sends itself nothing.
        return other if other is None or (a.peer in self._members.get(other, ()) and a.peer != self._rank) else None

    def _hands(self, a: Action) -> bool:
        """Return whether a receive is of what another rank of the stage hands on."""
        assert a.end is not None
        ends = (a.end, a.stage, a.phase)
        return ends in self._tiles and a.peer != self._rank and a.peer in self._members[a.stage]

    def _owes(self, phase: str, stage: int, mb: int, target: int) -> bool:
        """Return whether a stage awaits results of this rank that were not sent. Ranks of a team have the same
        results; where the team that takes them is smaller, not all of them send."""
        if target in self._own:
            return False
        if (stage, target, phase) in self._tiles:
            takers = self._routes.takers(phase, target, mb)
            return any(self._owes_tiles(phase, stage, mb, target, taker) for taker in takers)
        if self._moved(SEND_OF[phase], stage, mb, target):
            return False
        return bool(self._routes.targets(self._rank, phase, stage, target, mb))

    def _owes_tiles(self, phase: str, stage: int, mb: int, target: int, taker: int) -> bool:
        """Return whether a rank awaits tiles of this one that were not sent."""
        end = target if self._packed else None
        wanted = self._tiles.slices((stage, target, phase), self._rank, taker)
        return bool(wanted) and (SEND_OF[phase], stage, mb, taker, end) not in self._done

    def _moved(self, kind: str, stage: int, mb: int, other: int) -> bool:
        """Return whether a message with another stage was sent or received."""
        end = other if self._packed else None
        return any((kind, stage, mb, peer, end) in self._done for peer in self._members[other])


# The check of every kind; a sum is checked over all ranks of its stage, and drops in schedules.py.
ENDS: dict[str, Callable[[_Ends, int, Action], Iterator[Problem]] | None] = {
    **dict.fromkeys(COMPUTE, _Ends.compute),
    **dict.fromkeys(SENDS, _Ends.send),
    **dict.fromkeys(RECEIVES, _Ends.receive),
    **dict.fromkeys(HANDS, _Ends.hand_on),
    **dict.fromkeys((SUM, *COPIES), None),
    LET_GO: _Ends.let_go,
    DROP: None,
}


def _check_channels(run: ConcreteRun) -> Iterator[Problem]:
    """Check that messages of one phase between two ranks arrive in the order in which they are sent, each of
    them once."""
    sent: dict[Channel, list[tuple[str, int, int, int]]] = {}
    received: dict[Channel, list[tuple[str, int, int, int]]] = {}
    for rank, actions in run.programs.items():
        for step, a in enumerate(actions):
            if a.peer is not None and a.kind in (*SENDS, *HANDS):
                sent.setdefault(a.channel(rank), []).append((a.phase, a.mb, rank, step))
            elif a.peer is not None and a.kind in RECEIVES:
                received.setdefault(a.channel(rank), []).append((a.phase, a.mb, rank, step))
    for channel in dict.fromkeys((*sent, *received)):
        left, right = sent.get(channel, []), received.get(channel, [])
        there, here = {x[:2] for x in left}, {x[:2] for x in right}
        lost = next((x for x in left if x[:2] not in here), None)
        awaited = next((x for x in right if x[:2] not in there), None)
        if lost is not None:
            yield run.problem(*lost[2:], f"rank {channel[2]} never receives this message")
        if awaited is not None:
            yield run.problem(*awaited[2:], f"rank {channel[1]} never sends this message")
        if lost is None and awaited is None:
            for x, y in zip(left, right, strict=False):
                if x[:2] != y[:2]:
                    what = (
                        f"receives {y[0]}{y[1]} where {run.place(*x[2:])} sends {x[0]}{x[1]}; the order on a channel "
                        "must be the same"
                    )
                    yield run.problem(*y[2:], what)
                    break


def _check_orders(module: Module, run: ConcreteRun) -> Iterator[Problem]:
    """Check that replicas sum up the gradients of the same batches in one order. They come to computations whose
    collectives bring all of them together in one order, too."""
    together = meeting_ranks(module)
    for members in dict.fromkeys(run.schedule.replicas().values()):
        if len(members) == 1:
            continue
        orders = {rank: list(_meetings(run.programs[rank], rank, members, together)) for rank in members}
        leader, order = members[0], orders[members[0]]
        for rank in members[1:]:
            other = orders[rank]
            at = next((i for i, (x, y) in enumerate(zip_longest(order, other)) if not x or not y or x[0] != y[0]), None)
            if at is None:
                continue
            does = "sum" if all(meeting[0] == SUM for meeting, _ in (*order, *other)) else "meet"
            sides = ", ".join(
                f"rank {r} {_near(run.programs[r], steps, at)}{_collective(module, run.programs[r], steps, at)}"
                for r, steps in ((leader, order), (rank, other))
            )
            what = f"ranks {', '.join(map(str, members))} {does} in different orders: {sides}"
            longer, listed = (leader, order) if len(order) > at else (rank, other)
            yield run.problem(longer, listed[at][1], what)


# What brings replicas together, without the number of a microbatch, and the step at which a rank comes to it.
_Met = tuple[tuple[str, int, int], int]


def _meetings(
    actions: Iterable[Action],
    rank: int,
    members: tuple[int, ...],
    together: Mapping[tuple[int, int, str], tuple[int, ...]],
) -> Iterator[_Met]:
    """Yield what brings all members together on one of them, with its step. Computations have no number: replicas run
    other microbatches."""
    joint = {key[1:] for key, ranks in together.items() if key[0] == rank and set(members) <= set(ranks)}
    for step, a in enumerate(actions):
        if a.kind == SUM:
            yield (a.kind, a.stage, a.mb), step
        elif (a.stage, a.kind) in joint:
            yield (a.computation, a.stage, -1), step


def _near(actions: Sequence[Action], order: Sequence[_Met], at: int) -> str:
    """Format the meetings of a rank around one of them."""
    begin, end = max(0, at - 2), at + 3
    listed = [str(actions[step]) for _, step in order[begin:end]]
    return f"[{', '.join(['...'] * (begin > 0) + listed + ['...'] * (len(order) > end))}]"


def _collective(module: Module, actions: Sequence[Action], order: Sequence[_Met], at: int) -> str:
    """Format the collective in which a rank is the first to meet others of another order; sums have none."""
    action = actions[order[at][1]] if at < len(order) else None
    call = first_meeting(module, action.stage, action.kind) if action is not None else None
    return f" ({action}: {call})" if call is not None else ""
