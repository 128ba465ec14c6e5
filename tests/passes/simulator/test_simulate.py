"""The simulator: schedules on paper where nothing costs anything, cases worked out by hand, and what holds of every run."""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from penstock.ir.cluster.cluster import Cluster, Device, Link
from penstock.ir.grid import simulate as on_paper
from penstock.ir.schedule import Action, Program, Schedule
from penstock.passes.communicate.communicate import communicate
from penstock.passes.schedules.late_updates import sum_late
from penstock.passes.schedules.schedule import SCHEDULES, ScheduleOptions, build_schedule, schedule
from penstock.passes.simulator.cores import TURN, Core, Cores
from penstock.passes.simulator.machine import Route, Seat, SimulatedMachine, TransportModel, machine_of
from penstock.passes.simulator.sharing import Resource, Task, fair_rates
from penstock.passes.simulator.simulate import simulate, wire_chain
from penstock.support.errors import UsageError, VerifyError

LAW = settings(max_examples=40, deadline=None, derandomize=True)
TRAINING = [kind for kind in SCHEDULES if kind != "forward"]
EAGER = TransportModel(posted=None)
# Twentieths of a turn that are no ticks.
OFF_TICKS = [n for n in range(60) if n % 20]


def written(microbatches, **ranks):
    """A schedule whose batch lists are given as text, for batch 1: written(2, r0="0F2 0SF2>1")."""
    programs = {int(name[1:]): Program((), tuple(map(Action.parse, text.split()))) for name, text in ranks.items()}
    return Schedule("hand", microbatches, programs)


def lasting(**times):
    return lambda rank, action: times.get(action.kind, 0.0)


def nothing(*_):
    return 0.0


def when(found, rank):
    return {str(action): (start, finish) for action, start, finish in found.timed(rank)}


def played(programs, lasts):
    """By brute force: every action starts when the one before it has ended, and the send whose message it takes."""
    ends, starts = {}, {}
    while len(ends) < sum(map(len, programs.values())):
        for rank, actions in programs.items():
            for position, a in enumerate(actions):
                before = [(rank, position - 1)] if position else []
                if a.kind.startswith("R"):
                    sent = Action(f"S{a.kind[1]}", a.peer, a.mb, None, rank)
                    before.append((a.peer, programs[a.peer].index(sent)))
                if (rank, position) not in ends and all(key in ends for key in before):
                    starts[rank, position] = max((ends[key] for key in before), default=0.0)
                    ends[rank, position] = starts[rank, position] + lasts(a)
    return {
        rank: [(a, starts[rank, i], ends[rank, i]) for i, a in enumerate(actions)] for rank, actions in programs.items()
    }


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


# ------------------------------------------------------------------------------------------------ by hand


ONE_WAY = written(2, r0="0F2 0SF2>1 0F3 0SF3>1", r1="1RF2<0 1F2 1RF3<0 1F3")


def test_bandwidth_and_latency():
    """8 bytes at 2 per second: 4 s for each message, one after another, and half a second until it is there."""
    machine = SimulatedMachine(lambda a, b: Route((("link", 2.0),), 0.5))
    found = simulate(ONE_WAY, 1, lasting(F=1), lambda phase, source, target: 8, machine)
    assert when(found, 0)["0SF1>1"] == (2, 2)
    # Sent at 1, moves from 1 to 5; the second waits for its way from 2 to 5.
    assert when(found, 1) == {"1RF0<0": (5.5, 5.5), "1F0": (5.5, 6.5), "1RF1<0": (9.5, 9.5), "1F1": (9.5, 10.5)}
    assert [(use.name, use.nbytes, use.busy) for use in found.links] == [("link", 16, 8)]
    path = found.critical_path
    assert path == {"moving 0>1": 4.5, "queue of 0>1": 3, "computing on rank 1": 1, "computing on rank 0": 2}


def test_messages_wait_for_their_receives():
    """Receives of rank 1 are posted one action ahead; the word takes the latency, too."""
    program = written(1, r0="0F1 0SF1>1", r1="1B1 1W1 1RF1<0 1F1")
    machine = SimulatedMachine(lambda a, b: Route((), 0.5), transport=TransportModel(posted=2, look_ahead=1))
    found = simulate(program, 1, lasting(F=1, B=4, W=0.25), nothing, machine)
    # Sent at 1; posted when W starts at 4; known at 4.5, there at 5.
    assert when(found, 1)["1RF0<0"] == (5, 5)
    free = simulate(program, 1, lasting(F=1, B=4, W=0.25), nothing, replace(machine, transport=EAGER))
    assert when(free, 1)["1RF0<0"] == (4.25, 4.25)


def test_only_so_many_receives_of_a_channel_are_under_way():
    """Four messages of a second each, sent at once; two may be posted. The third is posted when the first was taken."""
    sends = " ".join(f"0SF{n}>1" for n in range(4, 8))
    takes = " ".join(f"1RF{n}<0 1F{n}" for n in range(4, 8))
    program = written(4, r0=sends, r1=takes)
    machine = SimulatedMachine(lambda a, b: Route((("link", 1.0),)))
    found = simulate(program, 1, lasting(F=10), lambda *_: 1, machine)
    # The first two arrive at 1 and 2; the third is posted when the first was taken, at 1, and the fourth at 11: both long before their turn.
    assert [when(found, 1)[f"1RF{n}<0"][0] for n in range(4)] == [1, 11, 21, 31]
    tight = simulate(program, 1, lasting(F=0.25), lambda *_: 1, replace(machine, transport=TransportModel(posted=1)))
    assert [when(tight, 1)[f"1RF{n}<0"][0] for n in range(4)] == [1, 2, 3, 4]
    latency = replace(machine, route=lambda a, b: Route((("link", 1.0),), 0.25), transport=TransportModel(posted=1))
    found = simulate(program, 1, lasting(F=0.25), lambda *_: 1, latency)
    # Taken at 1.25, the next one posted then, known at 1.5, moved at 2.5, there at 2.75, and so on.
    assert [when(found, 1)[f"1RF{n}<0"][0] for n in range(4)] == [1.25, 2.75, 4.25, 5.75]


TWO_PAIRS = written(1, r0="0F1 0SF1>2", r1="1F1 1SF1>3", r2="2RF1<0 2F1", r3="3RF1<1 3F1")


def by_nic(name=lambda a, b: "nic"):
    return SimulatedMachine(lambda a, b: Route(((f"{a}>{b}", 4.0), (name(a, b), 4.0))))


def arrivals(machine, **sizes):
    found = simulate(TWO_PAIRS, 1, lasting(F=1), lambda phase, source, target: sizes.get(f"s{source}", 8.0), machine)
    return when(found, 2)["2RF0<0"][0], when(found, 3)["3RF0<1"][0]


def test_messages_share_a_nic():
    """8 bytes at 4 per second take 2 s alone, and twice that when both go through one NIC."""
    assert arrivals(by_nic()) == (5, 5)
    # The shorter one is through at 1 + 2; the longer then has 12 - 4 bytes to go at full speed.
    assert arrivals(by_nic(), s0=4.0, s1=12.0) == (3, 5)


def test_sharing_is_what_slows_them():
    """The control: a machine that gives everyone a NIC of its own fails the check above."""
    assert arrivals(by_nic(lambda a, b: f"nic of {a}")) == (3, 3) != (5, 5)


def test_a_nic_of_a_cluster_file_has_two_directions():
    devices = tuple(Device(f"d{i}", host=f"h{i // 2}") for i in range(4))
    links = (Link("d0", "d2", 4.0, 0.0, "eth"), Link("d1", "d3", 4.0, 0.0, "eth"))
    cluster = Cluster(devices, (*links, Link("d0", "d1", 4.0, 0.0, "bus")))
    machine = machine_of(cluster, {i: f"d{i}" for i in range(4)})
    assert machine.route(0, 2).shares == (
        ("d0>d2", 4.0),
        ("eth", 4.0),
    )  # both hosts have all its links: which is its own nobody says
    third = replace(
        cluster, devices=(*devices, Device("d4", host="h2")), links=(*cluster.links, Link("d4", "d0", 2.0, 0.0, "eth"))
    )
    machine = machine_of(third, {i: f"d{i}" for i in range(5)})
    assert machine.route(0, 2).shares == (("d0>d2", 4.0), ("eth out", 4.0))
    assert machine.route(3, 1).shares == (("d3>d1", 4.0), ("eth in", 4.0))
    assert machine.route(4, 0).shares == (("d4>d0", 2.0), ("eth in", 4.0))
    assert machine.route(0, 1).shares == (("d0>d1", 4.0), ("bus", 4.0))
    assert machine_of(cluster, {0: "d0", 1: "d0"}).route(0, 1) == Route()


def test_sums_over_replicas_go_on_beside_computations():
    """Two ranks of one stage; 12 bytes there and back at 2 per second, twice a quarter of a second of latency: the update waits, the forward does not."""
    program = written(2, r0="0B2 0AR1 0F2 0U1", r1="0B3 0AR1 0F3 0U1")
    machine = SimulatedMachine(lambda a, b: Route(((f"{a}>{b}", 2.0),), 0.25))
    times = {0: {"B": 1.0, "F": 2.0, "U": 1.0}, 1: {"B": 3.0, "F": 2.0, "U": 1.0}}
    found = simulate(
        program, 1, lambda rank, a: times[rank].get(a.kind, 0.0), nothing, machine, reduced=lambda stage: 12.0
    )
    assert when(found, 0)["0F0"] == (1, 3)
    # The slower one is there at 3; 2 (n - 1) / n * 12 = 12 bytes over every link of the ring.
    assert when(found, 0)["0U0"] == when(found, 1)["0U0"] == (3 + 6 + 0.5, 10.5)
    assert {use.name: use.nbytes for use in found.links} == {"0>1": 12, "1>0": 12}
    assert found.critical_path == {"summing stage 0": 6.5, "computing on rank 1": 3, "computing on rank 0": 1}


def test_a_ring_is_as_fast_as_its_slowest_link():
    program = written(3, **{f"r{rank}": f"0F{3 + rank} 0AR1 0U1" for rank in range(3)})
    machine = SimulatedMachine(lambda a, b: Route(((f"{a}>{b}", 1.0 if a == 1 else 100.0),), 0.0))
    found = simulate(program, 1, nothing, nothing, machine, reduced=lambda stage: 9.0)
    assert when(found, 2)["0U0"][0] == 12  # 2 * 2/3 * 9 bytes at 1 per second
    crossing = SimulatedMachine(lambda a, b: Route((("nic", 1.0),), 0.0))
    # All three links of the ring go through one NIC: a third of its bandwidth for each.
    assert when(simulate(program, 1, nothing, nothing, crossing, reduced=lambda stage: 9.0), 2)["0U0"][0] == 36


def ended(ranks, times, seats):
    """When each rank's only computation is done."""
    alone = written(1, **{f"r{rank}": f"{rank}F1" for rank in range(ranks)})
    found = simulate(alone, 1, lambda rank, a: times[rank], nothing, SimulatedMachine(seats=seats))
    return [when(found, rank)[f"{rank}F0"][1] for rank in range(ranks)]


def test_ranks_take_turns_on_the_cores_of_their_host():
    """Three threads on two cores: two share one, in turns; when another core falls idle, the one that waits goes there."""
    seats = {rank: Seat("h", 2) for rank in range(3)}
    # Ranks 0 and 2 on one core: at 2 rank 1 is done, and they have done 1 each. One core for each of them from then on.
    assert ended(3, [2.0, 2.0, 2.0], seats) == pytest.approx([3, 2, 3], abs=2 * TURN)
    # Not equal parts for all: the control, which would have all three end at 3.
    assert ended(3, [2.0, 2.0, 2.0], seats) != pytest.approx([3, 3, 3], abs=0.5)
    # Rank 0 is through after its own 2 turns of half a core each, and rank 2 has the core alone.
    assert ended(3, [1.0, 4.0, 3.0], seats) == pytest.approx([2, 4, 4], abs=2 * TURN)
    # Who begins while another one runs waits for its turn.
    one = {rank: Seat("h", 1) for rank in range(2)}
    assert ended(2, [1.5 * TURN, TURN], one) == pytest.approx([2.5 * TURN, 2 * TURN])


def test_a_quota_is_no_share_of_turns():
    """A quota of half a core leaves the rest of it to who is there: three quarters of a core for each of the others would be fair, but they stay where they are."""
    seats = {0: Seat("h", 2, quota=0.5), 1: Seat("h", 2), 2: Seat("h", 2)}
    # Rank 2 beside rank 0: half a core each; rank 0 is not slowed by that. At 2, when rank 1 is done, rank 2 takes its core.
    assert ended(3, [4.0, 2.0, 2.0], seats) == pytest.approx([4, 2, 3], abs=2 * TURN)
    assert ended(1, [4.0], seats) == [4]


def test_a_parallel_computation_goes_as_its_slowest_thread():
    pair = {0: Seat("h", 2, threads=2), 1: Seat("h", 2)}
    # Rank 1 takes half of one of the cores until it is done at 4; rank 0 waits for what it computes there.
    assert ended(2, [3.0, 2.0], pair) == pytest.approx([5, 4], abs=2 * TURN)


def test_busy_neighbours_slow_each_other():
    seats = {rank: Seat("h", 2, speeds=(1.0, 0.8)) for rank in range(2)}
    found = simulate(
        written(1, r0="0F1", r1="1F1"), 1, lambda rank, a: 4.0 if rank else 8.0, nothing, SimulatedMachine(seats=seats)
    )
    # Both at 0.8 until the first is done at 5; the other has 8 - 4 left.
    assert [when(found, r)[f"{r}F0"][1] for r in range(2)] == pytest.approx([9, 5])
    # Three on two cores: three quarters of the speed until one is done at 4 / 0.75, the others half-way by then, at 0.8 from there on.
    turns = {rank: Seat("h", 2, speeds=(1.0, 0.8, 0.75)) for rank in range(3)}
    assert ended(3, [4.0] * 3, turns) == pytest.approx([4 / 0.75 + 2 / 0.8, 4 / 0.75, 4 / 0.75 + 2 / 0.8], abs=3 * TURN)
    # Two threads of one rank slow each other in the time that it takes alone.
    alone = {0: Seat("h", 2, threads=2, speeds=(1.0, 0.8))}
    assert when(simulate(written(1, r0="0F1"), 1, lasting(F=4), nothing, SimulatedMachine(seats=alone)), 0)["0F0"][
        1
    ] == pytest.approx(4)


def test_reading_takes_processor_time():
    """One core for both ranks: while 4 bytes are read, at a second each, what the receiver computes has every other turn."""
    program = written(1, r0="0SF1>1", r1="1B1 1RF1<0 1F1")
    machine = SimulatedMachine(seats={rank: Seat("h", 1, reading=1.0) for rank in range(2)})
    found = simulate(program, 1, lasting(B=6), lambda *_: 4.0, machine)
    assert when(found, 1)["1B0"] == (0, pytest.approx(10, abs=2 * TURN))
    assert when(found, 1)["1RF0<0"][1] == pytest.approx(10, abs=2 * TURN)
    assert found.messages == {}
    free = simulate(
        program, 1, lasting(B=6), lambda *_: 4.0, SimulatedMachine(seats={rank: Seat("h", 1) for rank in range(2)})
    )
    assert when(free, 1)["1B0"] == (0, 6)


def test_a_send_writes_what_fits_into_the_buffer():
    """4 of 6 bytes, at half a second each; the message moves meanwhile, at 1 byte per second."""
    program = written(1, r0="0SF1>1 0F1", r1="1RF1<0")
    machine = SimulatedMachine(lambda a, b: Route((("link", 1.0),)), seats={0: Seat("h", 2, writing=0.5, buffer=4)})
    found = simulate(program, 1, lasting(F=1), lambda *_: 6.0, machine)
    assert when(found, 0) == {"0SF0>1": (0, 2), "0F0": (2, 3)}
    assert when(found, 1)["1RF0<0"] == (6, 6)


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
