"""The simulator: cases worked out by hand. Links, networks, cores and buffers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.ir.cluster.cluster import Cluster, Device, Link
from penstock.passes.simulator.cores import TURN
from penstock.passes.simulator.machine import Route, Seat, SimulatedMachine, TransportModel, machine_of, with_messages
from penstock.passes.simulator.simulate import simulate

from .hand_written import EAGER, ONE_WAY, lasting, nothing, when, written

# ------------------------------------------------------------------------------------------------ by hand


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


def test_what_is_read_within_a_quota_is_charged_once():
    """Rates of a device are within its quota: 10 bytes at 2 a second take 5 seconds, and what it computes waits for
    none of them. The control: seconds of a whole core, which the quota then makes twice as long."""
    program = written(1, r0="0SF1>1", r1="1RF1<0 1F1")
    device = Device("d", quota=0.5, socket_bandwidth=2.0)
    seat = replace(with_messages(Seat("h", 1, quota=0.5, speeds=(1.0, 0.99)), device), writing=0.0)
    for reading, seconds in ((seat.reading, 5), (1 / device.socket_bandwidth, 10)):
        machine = SimulatedMachine(seats=dict.fromkeys((0, 1), replace(seat, reading=reading)))
        found = simulate(program, 1, lasting(F=1), lambda *_: 10.0, machine)
        assert when(found, 1)["1RF0<0"][1] == pytest.approx(seconds)


def test_a_send_writes_what_fits_into_the_buffer():
    """4 of 6 bytes, at half a second each; the message moves meanwhile, at 1 byte per second."""
    program = written(1, r0="0SF1>1 0F1", r1="1RF1<0")
    machine = SimulatedMachine(lambda a, b: Route((("link", 1.0),)), seats={0: Seat("h", 2, writing=0.5, buffer=4)})
    found = simulate(program, 1, lasting(F=1), lambda *_: 6.0, machine)
    assert when(found, 0) == {"0SF0>1": (0, 2), "0F0": (2, 3)}
    assert when(found, 1)["1RF0<0"] == (6, 6)
