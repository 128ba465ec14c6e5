"""The simulator: schedules on paper where nothing costs anything, cases worked out by hand, and what holds of every run."""

from __future__ import annotations

import heapq
import itertools
import math
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from penstock.ir.grid import simulate as on_paper
from penstock.passes.communicate.communicate import communicate
from penstock.passes.schedules.late_updates import sum_late
from penstock.passes.schedules.schedule import SCHEDULES, ScheduleOptions, build_schedule, schedule
from penstock.passes.simulator.cores import TURN, Core, Cores
from penstock.passes.simulator.machine import Route, Seat, SimulatedMachine, TransportModel
from penstock.passes.simulator.sharing import Resource, Task, fair_rates
from penstock.passes.simulator.simulate import simulate
from penstock.passes.simulator.wiring import wire_chain
from penstock.support.errors import UsageError, VerifyError

from .hand_written import EAGER, ONE_WAY, lasting, nothing, played, written

LAW = settings(max_examples=40, deadline=None, derandomize=True)
TRAINING = [kind for kind in SCHEDULES if kind != "forward"]
# Twentieths of a turn that are no ticks.
OFF_TICKS = [n for n in range(60) if n % 20]


# ------------------------------------------------------------------------------------------------ nothing costs anything


@pytest.mark.parametrize("kind", SCHEDULES)
@LAW
@given(d=st.integers(1, 7), m=st.integers(1, 12), batches=st.integers(1, 4), data=st.data())
def test_free_links_are_the_schedule_on_paper(kind, d, m, batches, data):
    """Every start and finish, for any times of stages."""
    times = {(kind, s): data.draw(st.integers(0, 9)) / 4 for s in range(d) for kind in "FBWU"}
    wired = wire_chain(build_schedule(kind, d, m))
    found = simulate(wired, batches, lambda rank, a: times.get((a.kind, a.stage), 0.0), nothing)
    paper = played(wired.expand_all(batches), lambda a: times.get((a.kind, a.stage), 0.0))
    assert {r: list(found.timed(r)) for r in wired.ranks} == paper


@pytest.mark.parametrize("kind", SCHEDULES)
@LAW
@given(d=st.integers(1, 7), m=st.integers(1, 12), tf=st.integers(0, 5), tb=st.integers(2, 9), tw=st.integers(0, 2))
def test_free_links_are_what_the_verifier_plays(kind, d, m, tf, tb, tw):
    wired = wire_chain(build_schedule(kind, d, m))
    parted = {a.stage for a in wired.actions() if a.kind == "W"}
    times = {"F": tf, "B": tb, "W": tw}
    found = simulate(
        wired, 3, lambda rank, a: times.get(a.kind, 0) - (tw if a.kind == "B" and a.stage in parted else 0), nothing
    )
    assert {r: list(found.timed(r)) for r in wired.ranks} == {
        r: [tuple(t) for t in line] for r, line in on_paper(wired, 3, tf, tb, tw).ranks.items()
    }


FORMULAS = {
    "1f1b": lambda d, m, tf, tb, tw: (m + d - 1) * (tf + tb),
    "gpipe": lambda d, m, tf, tb, tw: (m + d - 1) * (tf + tb),
    "2bw": lambda d, m, tf, tb, tw: m * (tf + tb),
    "eager-2bw": lambda d, m, tf, tb, tw: m * (tf + tb),
    "zb-1f1b": lambda d, m, tf, tb, tw: m * (tf + tb) + (d - 1) * (tf + tb - 2 * tw),
    "forward": lambda d, m, tf, tb, tw: m * tf,
}


@pytest.mark.parametrize("kind", SCHEDULES)
@LAW
@given(d=st.integers(1, 8), m=st.integers(1, 20), tw=st.integers(1, 3), f=st.integers(0, 3), b=st.integers(0, 3))
def test_steps_and_bubbles_follow_the_formulas(kind, d, m, tw, f, b):
    """Those of docs/schedules.md, exactly; from as many microbatches on as they need."""
    m, tf, tb = max(m, {"eager-2bw": 2 * d - 2, "2bw": d - 1, "zb-1f1b": d}.get(kind, 1)), tw + f, 2 * tw + b
    wired = wire_chain(build_schedule(kind, d, m))
    parted = {a.stage for a in wired.actions() if a.kind == "W"}
    times = {"F": tf, "B": tb, "W": tw}
    found = simulate(
        wired, 8, lambda rank, a: times.get(a.kind, 0) - (tw if a.kind == "B" and a.stage in parted else 0), nothing
    )
    expected = FORMULAS[kind](d, m, tf, tb, tw)
    assert found.step_seconds == expected
    busy = m * (tf + (0 if kind == "forward" else tb))
    if kind in ("1f1b", "gpipe"):
        # Every window of these is whole batches on every rank.
        assert [use.bubble for use in found.ranks] == pytest.approx([1 - busy / expected] * d)
    assert sum(found.critical_path.values()) == pytest.approx(found.window[1] - found.window[0])


@pytest.mark.parametrize("kind", TRAINING)
@LAW
@given(m=st.integers(2, 8), data=st.data())
def test_replicas_are_what_the_verifier_plays(kind, m, data):
    """Stages on several ranks with shares of any size, their sums included."""
    shares = []
    for _ in range(data.draw(st.integers(1, 3))):
        first = data.draw(st.integers(1, m))
        shares.append((first, m - first) if first < m else (m,))
    wired = wire_chain(sum_late(build_schedule(kind, len(shares), m, shares), SCHEDULES[kind].delay))
    parted = {a.stage for a in wired.actions() if a.kind == "W"}
    times = {"F": 1, "B": 3, "W": 1}
    found = simulate(wired, 3, lambda rank, a: times.get(a.kind, 0) - (a.kind == "B" and a.stage in parted), nothing)
    assert {r: list(found.timed(r)) for r in wired.ranks} == {
        r: [tuple(t) for t in line] for r, line in on_paper(wired, 3, 1, 3, 1).ranks.items()
    }
    assert {a.stage for a in wired.actions() if a.kind == "AR"} == {
        stage for stage, share in enumerate(shares) if len(share) > 1
    }


def test_a_sum_that_is_used_a_batch_later_keeps_nobody_waiting():
    """Two stages of two ranks under 2bw: sums that take a whole batch's time cost nothing; under 1f1b every step waits for them."""
    machine = SimulatedMachine(lambda a, b: Route(((f"{a}>{b}", 1.0),)))
    step = {}
    for kind in ("1f1b", "2bw"):
        wired = wire_chain(sum_late(build_schedule(kind, 2, 8, [(4, 4), (4, 4)]), SCHEDULES[kind].delay))
        for size in (0.0, 6.0):
            found = simulate(wired, 10, lasting(F=1, B=2), nothing, machine, reduced=lambda stage, size=size: size)
            step[kind, size] = found.step_seconds
    assert step["2bw", 6.0] == step["2bw", 0.0] == 12
    assert step["1f1b", 6.0] == step["1f1b", 0.0] + 6


def test_a_chain_is_wired_as_communicate_wires_it(toy):
    for kind in ("1f1b", "2bw", "gpipe"):
        module = schedule(toy(3), ScheduleOptions(kind, 4))
        assert wire_chain(module.schedule) == communicate(module).schedule


def test_latency_alone_is_that_of_the_schedule_on_paper():
    """With receives that need not be posted: what ir/simulate plays."""
    machine = SimulatedMachine(lambda a, b: Route((), 1.0), transport=EAGER)
    for kind, step in (("2bw", 27), ("eager-2bw", 18)):
        wired = wire_chain(build_schedule(kind, 4, 6))
        # The pattern takes two batches to come again, so the window has four.
        assert simulate(wired, 10, lasting(F=1, B=2), nothing, machine).step_seconds == step


# ------------------------------------------------------------------------------------------------ laws


@LAW
@given(data=st.data())
def test_fair_rates_are_max_min_fair(data):
    """Every task is at its cap or has a resource that is used up, of which nobody gets more."""
    resources = [Resource(str(i), data.draw(st.integers(1, 9))) for i in range(data.draw(st.integers(1, 4)))]
    tasks = []
    for number in range(data.draw(st.integers(1, 6))):
        used = data.draw(st.sets(st.sampled_from(range(len(resources))), max_size=len(resources)))
        demands = [(resources[i], float(data.draw(st.integers(1, 3)))) for i in sorted(used)]
        tasks.append(Task(number, 1.0, float(data.draw(st.integers(1, 9))), demands, lambda t: None))
        for resource, _ in demands:
            resource.tasks[number] = tasks[-1]
    rates = fair_rates(tasks)
    used = {r.name: sum(rates[t.number] * d for t in tasks for other, d in t.demands if other is r) for r in resources}
    for resource in resources:
        assert used[resource.name] <= resource.capacity * (1 + 1e-9)
    for task in tasks:
        level = rates[task.number]
        assert rates[task.number] <= task.cap * (1 + 1e-12)
        full = [r for r, _ in task.demands if used[r.name] >= r.capacity * (1 - 1e-9)]
        most = [all(rates[n] <= level * (1 + 1e-9) for n in r.tasks) for r in full]
        assert rates[task.number] >= task.cap * (1 - 1e-12) or any(most)


@LAW
@given(
    cores=st.integers(1, 3),
    work=st.lists(st.tuples(st.sampled_from(OFF_TICKS), st.integers(1, 60)), min_size=1, max_size=7),
)
def test_cores_do_as_a_clock_that_ticks_says(cores, work):
    """Against a walk over time in twentieths of a turn. Ends come before what begins at the same time, and that before a tick."""
    expected = ticked(cores, work)
    assume(len({*expected.values()}) == len(work))
    step, heap, ends, count = TURN / 20, [], {}, itertools.count()

    def push(time, what, stamp):
        heapq.heappush(heap, (round(time / step, 6), isinstance(what, Core), next(count), time, what, stamp))

    host, now, begins = Cores(cores, (), push), 0.0, sorted(range(len(work)), key=lambda i: work[i][0])
    while begins or heap or host.unsettled:
        first = work[begins[0]][0] if begins else math.inf
        following = min((first, 0.5), heap[0][:2] if heap else (math.inf, 1))
        if host.unsettled and following[0] * step > now:
            host.settle(now)
        elif following == (first, 0.5):
            i, now = begins.pop(0), first * step
            host.begin(now, i, work[i][1] * step, lambda time, i=i: ends.__setitem__(i, time / step), 1, 1.0)
        else:
            *_, now, what, stamp = heapq.heappop(heap)
            host.event(now, what, stamp)
    assert ends == pytest.approx(expected, abs=1e-6)


def ticked(cores, work):
    """When each of (begin, work) is done, in twentieths of a turn: one core's first in line gets one done in each."""
    queues, left, ends = [[] for _ in range(cores)], {}, {}
    for now in itertools.count():
        for queue in queues:
            if queue and not left[queue[0]]:
                ends[queue.pop(0)] = now
                fullest = max(queues, key=len)
                if not queue and len(fullest) > 1:
                    queue.append(fullest.pop())
        for i, (begin, lasts) in enumerate(work):
            if begin == now:
                left[i] = lasts
                min(queues, key=len).append(i)
        if len(ends) == len(work):
            return ends
        for queue in queues:
            if now % 20 == 0:
                queue[:] = queue[1:] + queue[:1]
            if queue:
                left[queue[0]] -= 1
    raise AssertionError("time ends")


@pytest.mark.parametrize("kind", TRAINING)
@LAW
@given(data=st.data())
def test_what_holds_of_every_run(kind, data):
    d, m, batches = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 8)), data.draw(st.integers(1, 4))
    wired = wire_chain(build_schedule(kind, d, m))
    times = {(k, s): data.draw(st.integers(0, 5)) / 2 for s in range(d) for k in "FBWU"}
    size = float(data.draw(st.integers(0, 6)))
    latency = data.draw(st.sampled_from([0.0, 0.5, 3.0]))
    names = data.draw(st.sampled_from(["own", "one", "host"]))
    name = {"own": lambda a, b: f"{a}>{b}", "one": lambda a, b: "all", "host": lambda a, b: f"nic {a // 2}"}[names]
    seats = {
        rank: Seat(
            f"h{rank // 3}",
            2,
            writing=data.draw(st.sampled_from([0.0, 0.1])),
            buffer=3,
            reading=data.draw(st.sampled_from([0.0, 0.1])),
        )
        for rank in range(d)
    }
    seated = data.draw(st.booleans())
    machine = SimulatedMachine(
        lambda a, b: Route(((name(a, b), 2.0),), latency),
        seats if seated else {},
        TransportModel(late=data.draw(st.sampled_from([0.0, 1.0]))),
    )
    found = simulate(wired, batches, lambda rank, a: times.get((a.kind, a.stage), 0.0), lambda *_: size, machine)
    sent, taken, moved = {}, {}, 0.0
    for rank in wired.ranks:
        line = list(found.timed(rank))
        assert [a for a, _, _ in line] == list(wired.expand(rank, batches))
        for (_, _, before), (_, start, finish) in pairwise(line):
            assert 0 <= before <= start <= finish  # never two actions at once
        for action, start, finish in line:
            alone = times.get((action.kind, action.stage), 0.0)
            assert finish - start >= alone - 1e-9
            if action.kind.startswith("S"):
                sent[action.kind[1], rank, action.peer, action.mb] = start
                moved += size
            elif action.kind.startswith("R"):
                taken[action.kind[1], action.peer, rank, action.mb] = start
    assert sent.keys() == taken.keys()
    assert all(taken[key] >= sent[key] + size / 2.0 + latency + machine.transport.late - 1e-9 for key in sent)
    assert sum(use.nbytes for use in found.links) == moved
    for use in found.links:
        assert use.nbytes / 2.0 <= use.busy + 1e-9 <= found.finish + 1e-6
    for use in found.ranks:
        assert use.busy + use.waiting + use.idle == pytest.approx(found.window[1] - found.window[0])
        # The lower bound of one rank: what it computes.
        alone = sum(times.get((a.kind, a.stage), 0.0) for a in wired.expand(use.rank, batches))
        assert found.finish >= alone - 1e-9
    assert sum(found.critical_path.values()) == pytest.approx(found.window[1] - found.window[0], abs=1e-6)
    # Free links and an empty machine are never slower; that does not hold between any two machines.
    assert (
        simulate(wired, batches, lambda rank, a: times.get((a.kind, a.stage), 0.0), nothing).finish
        <= found.finish + 1e-9
    )


def test_ranks_that_wait_for_each_other_are_told():
    program = written(1, r0="0RF1<1 0SF1>1", r1="1RF1<0 1SF1>0")
    with pytest.raises(
        VerifyError, match=r"these wait for ever: rank 0 at step 0 \(0RF0<1\), rank 1 at step 0 \(1RF0<0\)"
    ):
        simulate(program, 1, nothing, nothing)


def test_impossible_times_are_refused():
    with pytest.raises(UsageError, match=r"an action cannot take -1\.0"):
        simulate(ONE_WAY, 1, lasting(F=-1.0), nothing)
    with pytest.raises(UsageError, match="an action cannot take inf"):
        simulate(ONE_WAY, 1, lasting(F=math.inf), nothing)
    with pytest.raises(UsageError, match="at least one batch"):
        simulate(ONE_WAY, 0, nothing, nothing)
    seats = {0: Seat("h", 2), 1: Seat("h", 3)}
    with pytest.raises(UsageError, match="different things of its cores"):
        simulate(ONE_WAY, 1, nothing, nothing, SimulatedMachine(seats=seats))
