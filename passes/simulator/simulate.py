"""A simulation of discrete events: runs a schedule against modelled times, links, NICs and cores. Imports nothing
heavy, so that planners may call it.

In: a wired schedule (one with sends and receives), how long each action takes on its rank alone, the bytes of each
message, and a `SimulatedMachine`. It has the links between two ranks, and says which ranks share the cores of a host.
Out: `Simulated` (result.py): when every action ran, and why not earlier. The model follows the runtime:

* Actions of a rank run one after another. Sends take no time of it (unless `seconds` says so) and never block; a
  receive waits for its message.
* A receive is posted at the earliest `look_ahead` actions before its turn, and at most `posted` of one channel are
  under way (ir/memory/predict.py). A message starts to move when it was sent and its receive is posted. The word of
  that takes the latency of the link, too. Messages from one rank to another move one after another, as they do on one
  connection; those of different pairs share links and NICs (sharing.py). It arrives `latency` after its last byte has
  left. With `late`, the start of each is put off that long, any number at once, as Job(latency=) does for measurements.
* What a rank hands on goes on while it comes (relays.py).
* A computation with collectives starts when all ranks that it brings together are there (exchanges.py).
* AR starts when all replicas of the rank are there. It is a ring, in which every rank sends and receives 2(n-1)/n of
  the bytes over its link to the next one. It takes 2(n-1) latencies. The ranks go on meanwhile; the first U, P or N of
  that batch waits for it.
* CI and CO begin copies between memory spaces, which go on meanwhile (copies.py).
* Ranks that share a host share its cores, as Linux deals them out (cores.py), each up to its quota. A rank within one
  saves time up while it waits (quotas.py). Moving a byte may
  cost processor time (`Seat`): of the sender while the message moves already, of the receiver beside its computations.

Times are those of the period: an action takes the same in every batch. Known limits: a link has one path, without
routing, loss of packets or jitter. Neighbours slow a computation by their number, not by what they do.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from heapq import heappop, heappush
from itertools import pairwise

from penstock.ir.action_kinds import DROP, LET_GO, SUM
from penstock.ir.schedule import (
    COMPUTE,
    COPIES,
    HANDS,
    MESSAGES,
    RECEIVES,
    SENDS,
    SUM_USERS,
    Action,
    Program,
    Schedule,
)
from penstock.support.errors import UsageError, VerifyError

from .copies import Copies
from .cores import Burst, Core, Cores
from .exchanges import Gatherings
from .machine import FREE, Route, Seat, SimulatedMachine
from .moving import MessageChannel, RankPair, move
from .periods import Repetition, posts, unrolled
from .quotas import savings
from .relays import Relays
from .result import LinkUse, Message, RankTimeline, Simulated, SimulatedStep
from .sharing import Resource, Sharing

Seconds = Callable[[int, Action], float]
Bytes = Callable[[str, int, int], float]
Reduced = Callable[[int], float]

# Bytes per second below which 2^64 bytes would take longer than a float can say.
_DEAD = sys.float_info.min * 2.0**64


def simulate(
    schedule: Schedule,
    batches: int,
    seconds: Seconds,
    nbytes: Bytes,
    machine: SimulatedMachine = FREE,
    *,
    reduced: Reduced | None = None,
) -> Simulated:
    """Run so many batches from an empty pipeline to an empty pipeline. `seconds(rank, action)` is asked once for every
    action of the period, as written for batch 1. `nbytes(phase, source stage, target stage)` is a message,
    `reduced(stage)` the bytes that AR sums. VerifyError when ranks wait for each other."""
    if batches < 1:
        raise UsageError(f"needs at least one batch, got {batches}", where="simulate")
    return _Simulation(schedule, batches, seconds, nbytes, machine, reduced or (lambda stage: 0.0)).run()


def step_seconds(
    schedule: Schedule, batches: int, seconds: Seconds, nbytes: Bytes, machine: SimulatedMachine, reduced: Reduced
) -> float:
    """Return the seconds of a batch in a long run, as `simulate` has it, from fewer batches where the run repeats
    itself before. Only for schedules whose updates no batch overtakes: under others the pace may still change."""
    simulation = _Simulation(schedule, batches, seconds, nbytes, machine, reduced)
    if not simulation.crowded:
        simulation.repetition = Repetition(simulation.lines, simulation.ends)
    simulated, watch = simulation.run(), simulation.repetition
    return simulated.step_seconds if watch is None or watch.seconds is None else watch.seconds


# ------------------------------------------------------------------------------------------------ events

_RECEIVE, _SEND, _REDUCE, _COMPUTE, _TAKE, _OTHER, _COPY, _HAND = range(8)
CODES = {
    **dict.fromkeys(RECEIVES, _RECEIVE),
    **dict.fromkeys(SENDS, _SEND),
    **dict.fromkeys(COMPUTE, _COMPUTE),
    SUM: _REDUCE,
    **dict.fromkeys(COPIES, _COPY),
    **dict.fromkeys(HANDS, _HAND),
    **dict.fromkeys((LET_GO, DROP), _OTHER),
}
_WAKE, _READY, _END, _REDUCED, _COMPUTED = range(5)
# The first number of the key of a ring, whose ranks follow; that of a pair is its source.
_RING = -1


def _for_sums(route: Route) -> Route:
    return replace(route, shares=tuple((name, min(speed, route.summing)) for name, speed in route.shares))


class _Simulation:
    def __init__(
        self,
        schedule: Schedule,
        batches: int,
        seconds: Seconds,
        nbytes: Bytes,
        machine: SimulatedMachine,
        reduced: Reduced,
    ) -> None:
        self.schedule, self.machine, self.transport = schedule, machine, machine.transport
        self.batches, self.nbytes, self.reduced = batches, nbytes, reduced
        self.heap: list[tuple[float, int, int, object, int]] = []
        self.number = 0
        self.repetition: Repetition | None = None
        self.sharing = Sharing(lambda time, task, stamp: self.push(time, _END, task, stamp))
        self.stage_of = {
            rank: next((a.stage for a in (*p.start, *p.batch)), rank) for rank, p in schedule.ranks.items()
        }
        self.rings, self.gatherings = schedule.replicas(), Gatherings(machine.together)
        self.channels: dict[tuple[str, int, int, int | None, int | None], MessageChannel] = {}
        self.resources: dict[str, Resource] = {}
        self.uses: dict[str, LinkUse] = {}
        self.pairs: dict[tuple[int, ...], RankPair] = {}
        self.messages: dict[tuple[int, int], Message] = {}
        self.reductions: dict[tuple[int, int, int], float] = {}
        self.copies = Copies(schedule, machine.copied, lambda time, rank: self.push(time, _WAKE, rank))
        self.arrivals: dict[tuple[int, int, int], int] = {}
        self.awaiting: dict[tuple[int, int, int], int] = {}
        self._take_routes()
        self.ends: dict[int, list[int]] = {}
        self.lines = {rank: self._line(rank, program, seconds) for rank, program in schedule.ranks.items()}
        self.posts = (
            {rank: posts(line, _RECEIVE, self.transport) for rank, line in self.lines.items()}
            if self.transport.posted is not None
            else {}
        )
        self.relays = Relays(
            self.stage_of, self.lines.values(), _RECEIVE, _HAND, lambda one, other: machine.route(one, other).whole
        )
        self._take_seats()

    def push(self, time: float, code: int, what: object, extra: int = 0) -> None:
        self.number += 1
        heappush(self.heap, (time, self.number, code, what, extra))

    # ------------------------------------------------------------------------------------ before the first event

    def _take_routes(self) -> None:
        """Record pairs and rings with the links that they go through. Only a link that several of them use is a shared
        resource."""
        routes: dict[tuple[int, ...], list[Route]] = {}
        for rank, program in self.schedule.ranks.items():
            for kind, peer in dict.fromkeys((a.kind, a.peer) for a in (*program.start, *program.batch)):
                if kind in MESSAGES:
                    assert peer is not None
                    source, target = (peer, rank) if kind in RECEIVES else (rank, peer)
                    if (source, target) not in routes:
                        routes[source, target] = [self.machine.route(source, target)]
                elif CODES[kind] == _REDUCE:
                    ring = self.rings[rank]
                    if (_RING, *ring) not in routes and len(ring) > 1:
                        routes[_RING, *ring] = [
                            _for_sums(self.machine.route(a, b)) for a, b in pairwise((*ring, ring[0]))
                        ]
        routes |= {key: [route] for key, route in self.copies.lanes()}
        users = Counter(name for hops in routes.values() for name in {name for hop in hops for name, _ in hop.shares})
        for key, hops in routes.items():
            speeds = {name: speed for hop in hops for name, speed in hop.shares}
            times = Counter(name for hop in hops for name, _ in hop.shares)
            if dead := [name for name, speed in speeds.items() if speed < _DEAD]:
                raise UsageError(f"link {', '.join(dead)} is dead: at its rate no message would ever arrive")
            for name, speed in speeds.items():
                self.uses.setdefault(name, LinkUse(name, speed))
            shared = [name for name, speed in speeds.items() if users[name] > 1 and speed < math.inf]
            demands = tuple(
                (self.resources.setdefault(name, Resource(name, speeds[name])), float(times[name])) for name in shared
            )
            cap = min((speed / times[name] for name, speed in speeds.items() if name not in shared), default=math.inf)
            rounds = 2 * (len(hops) - 1) if key[0] == _RING else 1
            latency = rounds * max(hop.latency for hop in hops)
            self.pairs[key] = RankPair(latency, cap, demands, tuple((self.uses[name], times[name]) for name in speeds))

    def _line(self, rank: int, program: Program, seconds: Seconds) -> RankTimeline:
        reduces, copying = (
            any(a.kind in kinds for a in (*program.start, *program.batch)) for kinds in ((SUM,), COPIES)
        )
        steps: list[tuple[SimulatedStep, ...]] = []
        for actions in (program.start, program.batch):
            period = []
            for a in actions:
                code = CODES[a.kind]
                if reduces and a.kind in SUM_USERS:
                    code = _TAKE
                channel = self._channel(rank, a) if code in (_SEND, _RECEIVE, _HAND) else None
                exchanged = self.machine.exchanged(rank, a)
                lasts = seconds(rank, a) + exchanged
                if not 0 <= lasts < math.inf:
                    raise UsageError(f"an action cannot take {lasts} seconds", where=f"rank {rank}, {a}")
                waits = copying and (bool(a.item) or code in (_COMPUTE, _TAKE))
                period.append(SimulatedStep(a, code, lasts, channel, a.once, waits, exchanged))
            steps.append(tuple(period))
        line, self.ends[rank] = unrolled(steps[0], steps[1], self.batches, self.schedule.microbatches)
        return line

    def _channel(self, rank: int, action: Action) -> MessageChannel:
        assert action.peer is not None
        key = action.channel(rank)
        _, source, target, *_ = key
        if key not in self.channels:
            ends = action.stage, action.other(self.stage_of)
            ends = ends if action.kind in SENDS else ends[::-1]
            size, parcel = self.machine.size_of((action.phase, source, target, *ends), self.nbytes)
            self.channels[key] = MessageChannel(
                source, target, size, parcel, self.pairs[source, target], *self._ends(source, target, size)
            )
        return self.channels[key]

    def _ends(self, source: int, target: int, size: float) -> tuple[float | None, bool]:
        """Return the time that a message takes of its sender, and whether it takes time of the receiver."""
        shared, seat = self.machine.route(source, target).shared, self.machine.seats.get(source)
        rate = 0.0 if seat is None else seat.copying if shared else seat.writing
        if seat is None or not rate:
            return None, not shared
        return rate * (size if shared else min(size, seat.buffer)), not shared

    def _take_seats(self) -> None:
        """Create a resource for each host whose cores may run short. On other hosts computations take their time,
        whatever runs beside them."""
        wanted: dict[str, float] = {}
        seats: dict[str, Seat] = {}
        reading = {channel.target for channel in self.channels.values() if channel.reads}
        for rank, seat in self.machine.seats.items():
            other = seats.setdefault(seat.host, seat)
            if (other.cores, other.speeds) != (seat.cores, seat.speeds):
                raise UsageError(f"two seats of host {seat.host} say different things of its cores", where="simulate")
            wanted[seat.host] = (
                wanted.get(seat.host, 0.0)
                + seat.threads * seat.quota
                # Within a quota, computing and reading share it.
                + (1.0 if seat.reading and rank in reading and seat.quota >= 1 else 0.0)
            )
        self.crowded = {
            host: Cores(int(seat.cores), seat.speeds, lambda time, what, stamp: self.push(time, _COMPUTED, what, stamp))
            for host, seat in seats.items()
            if wanted[host] > seat.cores * (1 + 1e-9) or any(speed != 1 for speed in seat.speeds)
        }
        self.cores = {
            rank: (self.crowded[seat.host], seat)
            for rank, seat in self.machine.seats.items()
            if seat.host in self.crowded and rank in self.lines
        }
        self.saved = savings(self.machine.seats)

    # -------------------------------------------------------------------------------------------- the loop

    def run(self) -> Simulated:
        self.at = dict.fromkeys(self.lines, 0)
        self.clock = dict.fromkeys(self.lines, 0.0)
        self.ready: list[int] = []
        self.posted = dict.fromkeys(self.lines, -1)
        for rank in self.lines:
            self._advance(rank, 0.0)
        heap, now = self.heap, 0.0
        crowded, watch = list(self.crowded.values()), self.repetition
        while watch is None or watch.seconds is None:
            if not heap or heap[0][0] > now:
                if self.sharing.unsettled:
                    self.sharing.settle(now)
                for cores in crowded:
                    if cores.unsettled:
                        cores.settle(now)
                if not heap:
                    break
            now, _, code, what, extra = heappop(heap)
            if code == _WAKE:
                self._advance(what, now, extra)  # type: ignore[arg-type]
            elif code == _READY:
                self._ready(what, extra, now)  # type: ignore[arg-type]
            elif code == _END:
                self.sharing.end(now, what, extra)  # type: ignore[arg-type]
            elif code == _COMPUTED:
                assert isinstance(what, Burst | Core)
                what.owner.event(now, what, extra)
            else:
                self._reduced(what, now)  # type: ignore[arg-type]
        stuck = [rank for rank, line in self.lines.items() if self.at[rank] < len(line.steps)]
        if stuck and (watch is None or watch.seconds is None):
            waits = ", ".join(
                f"rank {r} at step {self.at[r]} ({self.lines[r].action(self.at[r], self.schedule.microbatches)})"
                for r in stuck[:8]
            )
            raise VerifyError(
                f"cannot finish {self.batches} batches: these wait for ever: {waits}",
                where=f"schedule {self.schedule.name}",
            )
        for resource in self.resources.values():
            self.uses[resource.name].busy = resource.busy
        return Simulated(
            self.schedule, self.batches, self.stage_of, self.lines, tuple(self.uses.values()), self.messages
        )

    def _advance(self, rank: int, now: float, passed: int = 0) -> None:
        """Run a rank until it has to wait for something. `passed`: the time of its current action has just passed."""
        line = self.lines[rank]
        steps, numbers, starts, finishes = line.steps, line.numbers, line.starts, line.finishes
        posts, together = self.posts.get(rank), self.machine.together
        position = self.at[rank]
        while position < len(steps):
            step, mb = steps[position], numbers[position]
            code = step.code
            if not passed:
                if posts is not None and self.posted[rank] < position:
                    self.posted[rank] = position
                    ahead = posts[0][position]
                    while ahead >= 0:
                        self._post(steps[ahead].channel, numbers[ahead], now)
                        ahead = posts[1][ahead]
                if (code == _RECEIVE and not self._arrived(rank, position, step.channel, mb, now)) or (
                    code == _TAKE and not self._summed(rank, step.action.stage, mb, now)
                ):
                    break
                if together and not self._gathered(rank, position, step.action, now):
                    break
                if step.waits and self.copies.waits((rank, position, mb), step.action, now, self.messages):
                    break
                starts[position] = now
                lasts = step.seconds
                if code == _SEND and step.channel.writing is not None:
                    lasts += step.channel.writing
                    self._send(step.channel, mb, now, position)
                if lasts > 0:
                    if rank in self.saved:
                        computed = lasts - step.exchanged
                        is_message = step.channel is not None
                        lasts = step.exchanged + self.saved[rank].shortened(now, computed, is_message=is_message)
                    if rank in self.cores:
                        cores, seat = self.cores[rank]
                        cores.begin(
                            now, rank, lasts, lambda time: self._advance(rank, time, 1), seat.threads, seat.quota
                        )
                    else:
                        self.push(now + lasts, _WAKE, rank, 1)
                    break
            passed = 0
            finishes[position] = now
            if code == _SEND and step.channel.writing is None:
                self._send(step.channel, mb, now, position)
            elif code == _REDUCE:
                self._join(rank, position, step.action.stage, mb, now)
            elif code == _COPY:
                self.copies.begin((rank, position, mb), step.action, now, self.sharing, self.pairs)
            position += 1
        self.at[rank] = position
        if (watch := self.repetition) is not None and position >= watch.next_end[rank]:
            watch.come(rank, position)

    # -------------------------------------------------------------------------------------------- messages

    def _arrived(self, rank: int, position: int, channel: MessageChannel, mb: int, now: float) -> bool:
        message = channel.arrived.get(mb)
        if message is None:
            channel.awaited = mb
            return False
        if message.arrived > now:
            self.push(message.arrived, _WAKE, rank)
            return False
        del channel.arrived[mb]
        # Only messages that a rank waited for are of interest later.
        if message.arrived == now:
            self.messages[rank, position] = message
        return True

    def _send(self, channel: MessageChannel, mb: int, now: float, position: int, sent: float | None = None) -> None:
        sent = now if sent is None else sent
        posted = 0.0 if self.transport.posted is None else channel.posted.pop(mb, None)
        if posted is None:
            channel.sent[mb] = (sent, position)
        else:
            self._meet(channel, mb, now, sent, position, posted)

    def _post(self, channel: MessageChannel, mb: int, now: float) -> None:
        sent = channel.sent.pop(mb, None)
        if sent is None:
            channel.posted[mb] = now
        else:
            self._meet(channel, mb, now, *sent, now)

    def _meet(self, channel: MessageChannel, mb: int, now: float, sent: float, position: int, posted: float) -> None:
        """Move a message that is sent and posted, as soon as the sender knows."""
        known = posted + channel.pair.latency if posted > 0 else 0.0
        ready = max(sent + self.transport.late, known)
        if ready > now:
            self.push(ready, _READY, (channel, mb, sent, position, posted))
        else:
            self._ready((channel, mb, sent, position, posted), 0, now)

    def _ready(self, what: tuple[MessageChannel, int, float, int, float], _: int, now: float) -> None:
        channel, mb, sent, position, posted = what
        reader = self.cores.get(channel.target) if channel.reads else None
        size = channel.nbytes

        def arrive(begun: float, end: float) -> None:
            arrived = self.relays.arrived(channel, mb, end, partial(arrive, begun)) if self.relays else end
            if arrived is None:
                return
            end = arrived
            message = Message(channel.source, position, sent, posted, now, begun, end)
            channel.arrived[mb] = message
            if channel.awaited == mb:
                channel.awaited = -1
                self.push(end, _WAKE, channel.target)

        if self.relays:
            for link, at in self.relays.begun(channel, mb, now):
                self._send(link.channel, mb, now, link.positions[mb], at)
        move(
            self.sharing,
            channel.pair,
            size,
            now,
            arrive,
            (channel.target, *reader) if reader and reader[1].reading > 0 else None,
        )

    def _gathered(self, rank: int, position: int, action: Action, now: float) -> bool:
        """Return whether all ranks that run a computation together have come to it. The last one wakes the others."""
        waiting = self.gatherings.come(rank, position, action.stage, action.kind)
        for other, at in (waiting or {}).items():
            if position:
                self.messages[other, at] = Message(rank, position - 1, now, now, now, now, now)
            self.push(now, _WAKE, other)
        return waiting is not None

    # -------------------------------------------------------------------------------------------- sums over replicas

    def _join(self, rank: int, position: int, stage: int, batch: int, now: float) -> None:
        ring = self.rings[rank]
        self.reductions[rank, stage, batch] = math.inf
        met = ring[0], stage, batch
        self.arrivals[met] = self.arrivals.get(met, 0) + 1
        if self.arrivals[met] < len(ring):
            return
        del self.arrivals[met]
        size = 2 * (len(ring) - 1) / len(ring) * self.reduced(stage)

        def arrive(begun: float, end: float) -> None:
            message = Message(rank, position, now, now, now, begun, end)
            self.push(end, _REDUCED, (ring, stage, batch, message))

        if len(ring) > 1:
            move(self.sharing, self.pairs[_RING, *ring], size, now, arrive)
        else:
            arrive(now, now)

    def _reduced(self, what: tuple[tuple[int, ...], int, int, Message], now: float) -> None:
        ring, stage, batch, message = what
        for rank in ring:
            self.reductions[rank, stage, batch] = now
            if self.awaiting.pop((rank, stage, batch), None) is not None:
                self.messages[rank, self.at[rank]] = message
                self.push(now, _WAKE, rank)

    def _summed(self, rank: int, stage: int, batch: int, now: float) -> bool:
        if self.reductions.get((rank, stage, batch), 0.0) <= now:
            return True
        self.awaiting[rank, stage, batch] = 1
        return False
