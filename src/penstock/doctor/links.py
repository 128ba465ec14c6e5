"""Measurements of a link: messages between two processes, as the runtime sends them.

They go over gloo, and on one machine through memory that both share.

In: a connected group and pairs of its ranks. Out: for each pair the seconds of a message one way by its size, half
of there and back, and the line through them:

    seconds = latency + bytes / bandwidth, with the least squares of relative errors

A pair on this machine also has the time that one end of a message takes of a rank, by size. The message goes through
the runtime's own RankTransport, with caches full of other data. Over gloo it is posted ahead, held by a thread, and
read by gloo's. The line through these times is `message_overhead` and `socket_bandwidth` of a device
(ir/cluster/cluster.py). Through memory it is `shared_overhead`, and `copy_bandwidth`, as one of the two ends copies.

    python -m penstock.support.processes links --rank R --port P
        one end of a pair on this machine; rank 0 prints the times as JSON

Known limits: one message at a time in one direction; both ends do nothing else meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from penstock.ir.graph import Edge, Value
from penstock.ir.schedule import Action
from penstock.ir.types import TensorType
from penstock.runtime.group.group import RankGroup, host_store, join_store
from penstock.runtime.group.neighbours import connect, identity
from penstock.runtime.launch.local import loopback_name, thread_environment
from penstock.runtime.transport.transport import RankTransport
from penstock.support.entry_points import ENTRY_POINTS
from penstock.support.errors import PeerLost
from penstock.support.helper_processes import failure, outputs, start
from penstock.support.processes import command_of

SIZES = (64, 4 << 10, 64 << 10, 512 << 10, 4 << 20, 16 << 20)
_TURNS, _SECONDS = 5, 0.25
# The number of messages of one size whose ends are timed. The bytes that a send writes before it returns, and those
# that a rank works on between messages.
_MESSAGES, _WHOLE, _OTHERS = 60, 4 << 20, 8 << 20
# Messages of one size that go there and back through memory: so many, unless that moves more bytes.
_TRIPS, _MOVED = 500, 256 << 20
_TAG = 2


class Wire(NamedTuple):
    bandwidth: float
    latency: float


def fit(times: Sequence[tuple[int, float]]) -> Wire:
    """Fit the line through (bytes, seconds): least squares of relative errors. Neither part is negative."""
    # With weights 1/t the unknowns are latency and seconds per byte: a x = 1 in each row, a = (1, bytes) / t.
    rows = [(1.0 / t, n / t) for n, t in times]
    aa, ab, bb = (sum(x[i] * x[j] for x in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, b = (sum(x[i] for x in rows) for i in (0, 1))
    determinant = aa * bb - ab * ab
    latency, per_byte = (a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant
    if latency < 0:
        latency, per_byte = 0.0, b / bb
    if per_byte <= 0:
        n, t = max(times)
        latency, per_byte = min(t for _, t in times), t / n
    return Wire(1.0 / per_byte, latency)


def ping(peer: int, first: bool) -> list[tuple[int, float]]:
    """Send messages of all sizes there and back over gloo; both ends call this. Return (bytes, seconds one way) on the
    side that goes first."""
    measured = []
    for size in SIZES:
        tensor = torch.zeros(size, dtype=torch.uint8)
        enough = torch.zeros(1, dtype=torch.uint8)
        times: list[float] = []
        for turn in range(10_000):
            begin = time.perf_counter()
            if first:
                dist.send(tensor, peer, tag=_TAG)
                dist.recv(tensor, peer, tag=_TAG)
                # The first one opens the connection.
                times += [time.perf_counter() - begin] if turn else []
                enough[0] = len(times) >= _TURNS and sum(times) >= _SECONDS
                dist.send(enough, peer, tag=_TAG)
            else:
                dist.recv(tensor, peer, tag=_TAG)
                dist.send(tensor, peer, tag=_TAG)
                dist.recv(enough, peer, tag=_TAG)
            if enough[0]:
                break
        if times:
            measured.append((size, sorted(times)[len(times) // 4] / 2))
    return measured


def ends(
    group: RankGroup, host_key: str, sizes: Sequence[int] = SIZES, messages: int = _MESSAGES
) -> list[tuple[int, float]]:
    """Send messages from rank 0 to rank 1 and back, as stages send them. Return (bytes, seconds of one end) of this
    side. The seconds are half of what sending one message and receiving one take on this side. This thread is timed by
    the clock, other threads by processor time. `host_key` as in neighbours.connect: empty for gloo."""
    rank, (out, back) = group.rank, _phases(group.rank)
    others = torch.zeros(_OTHERS, dtype=torch.uint8)
    measured = []
    for size in sizes:
        if size > _WHOLE:
            break
        transport = _transport(group, size, host_key, f"ends{size}{host_key}")
        tensors = {"x": torch.zeros(size, dtype=torch.uint8)}
        times: list[float] = []
        receives, sends = (
            [Action(kind, rank, mb, peer=1 - rank) for mb in range(messages)] for kind in (f"R{back}", f"S{out}")
        )
        transport.post(receives[0])
        behind = _behind()
        for receive, later, send in zip(receives, [*receives[1:], None], sends, strict=True):
            # As in a pipeline, a receive is posted before its message is sent. So the message is written at once, and
            # caches are full of other data.
            begin = time.perf_counter()
            if later is not None:
                transport.post(later)
            posted = time.perf_counter() - begin
            if rank == 1:
                transport.receive(receive)
            others.add_(1)
            tensors["x"].fill_(send.mb % 256)
            begin = time.perf_counter()
            transport.send(send, tensors)
            posted += time.perf_counter() - begin
            if rank == 0:
                transport.receive(receive)
            before, behind = behind, _behind()
            times.append(posted + behind - before)
        transport.flush()
        transport.close()
        measured.append((size, sorted(times)[len(times) // 4] / 2))
    return measured


def trips(group: RankGroup, host_key: str, sizes: Sequence[int] = SIZES, most: int = _TRIPS) -> list[tuple[int, float]]:
    """Send messages as `ping` does, through memory, `most` of each size at most."""
    first, (out, back) = group.rank == 0, _phases(group.rank)
    measured = []
    for size in sizes:
        transport = _transport(group, size, host_key, f"trips{size}")
        tensors = {"x": torch.zeros(size, dtype=torch.uint8)}
        count = max(_TURNS, min(most, _MOVED // size))
        times = []
        receives, sends = (
            [Action(kind, group.rank, mb, peer=1 - group.rank) for mb in range(count)]
            for kind in (f"R{back}", f"S{out}")
        )
        transport.post(receives[0])
        for receive, later, send in zip(receives, [*receives[1:], None], sends, strict=True):
            if later is not None:
                transport.post(later)
            begin = time.perf_counter()
            if first:
                transport.send(send, tensors)
            transport.receive(receive)
            times.append(time.perf_counter() - begin)
            if not first:
                transport.send(send, tensors)
        transport.flush()
        transport.close()
        measured.append((size, sorted(times)[len(times) // 4] / 2))
    return measured


def _phases(rank: int) -> tuple[str, str]:
    """Return the phase in which a rank of two sends, and that in which it receives."""
    return ("F", "B") if rank == 0 else ("B", "F")


def _transport(group: RankGroup, size: int, host_key: str, key: str) -> RankTransport:
    values = (Value("x", TensorType("u8", (size,))),)
    (out, back), peer = _phases(group.rank), 1 - group.rank
    near = connect(group, [(f"S{out}", peer), (f"R{back}", peer)], host_key, key) if host_key else {}
    return RankTransport(
        group.rank, [Edge(0, 1, "F", values), Edge(1, 0, "B", values)], [0, 1], group.timeout, near=near
    )


def _behind() -> float:
    """Return the processor time of all other threads of this process."""
    return time.process_time() - time.thread_time()


def measure_pairs(group: RankGroup) -> dict[tuple[int, int], list[tuple[int, float]]]:
    """Measure every pair of ranks of the group, one after the other; all ranks get all of it."""
    measured: dict[str, list[tuple[int, float]]] = {}
    for a in range(group.world):
        for b in range(a + 1, group.world):
            if group.rank in (a, b):
                measured[f"{a} {b}"] = ping(b if group.rank == a else a, group.rank == a)
            group.gather(f"wires/{a}/{b}", b"")
    of_pairs: dict[tuple[int, int], list[tuple[int, float]]] = {}
    for part in group.gather("wires/times", json.dumps(measured).encode()):
        of_pairs |= {
            (int(a), int(b)): [(n, t) for n, t in times]
            for pair, times in json.loads(part).items()
            if times
            for a, b in (pair.split(),)
        }
    return of_pairs


class Loopback(NamedTuple):
    """Seconds of a message one way, and seconds of a rank for one of its ends over gloo and through memory, by its
    size. Where memory is not shared, messages go over gloo, and there are no such ends."""

    times: list[tuple[int, float]]
    ends: list[tuple[int, float]]
    shared_ends: list[tuple[int, float]]


def measure_loopback(timeout: float = 60.0) -> Loopback:
    """Measure two processes on this machine, over the interface that the runtime takes for local runs."""
    store = host_store(2, timeout)
    environment = os.environ | thread_environment(1) | {"GLOO_SOCKET_IFNAME": loopback_name()}
    command = [*command_of("links"), "--port", str(store.port), "--timeout", str(timeout)]
    running = [start([*command, "--rank", str(rank)], environment) for rank in (0, 1)]
    written = outputs(running, timeout)
    if written is None:
        raise PeerLost(
            f"two processes on this machine did not finish exchanging messages within {timeout:g} s", where="doctor"
        )
    if (problem := failure(running, written)) is not None:
        raise PeerLost(f"two processes on this machine cannot talk over gloo:\n{problem}", where="doctor")
    return Loopback(*([(n, t) for n, t in part] for part in json.loads(written[0][0])))


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog=f"{ENTRY_POINTS['begin']} wires", description="One end of a measured link.")
    for name in ("rank", "port"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--timeout", type=float, default=60.0)
    arguments = parser.parse_args(argv)
    group = RankGroup(join_store(arguments.port, 2, arguments.timeout), arguments.rank, 2, arguments.timeout)
    group.connect()
    host_key = identity()
    times = trips(group, host_key) if host_key else ping(1 - arguments.rank, arguments.rank == 0)
    measured = Loopback(times, ends(group, ""), ends(group, host_key) if host_key else [])
    if arguments.rank == 0:
        print(json.dumps(measured))
    group.leave()
