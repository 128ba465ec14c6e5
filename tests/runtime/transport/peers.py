"""Two processes that talk over the transport; test_transport.py has them forked from one that has imported this."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from penstock.ir import messages as parcels
from penstock.ir.graph import Edge, Value
from penstock.ir.schedule import Action
from penstock.ir.types import parse_type
from penstock.runtime.group import group as groups
from penstock.runtime.group import neighbours
from penstock.runtime.group.group import RankGroup, host_store, join_store
from penstock.runtime.group.neighbours import connect, identity
from penstock.runtime.transport import gloo_wire
from penstock.runtime.transport.transport import RankTransport
from penstock.support.errors import PenstockError

KINDS = ("f32", "f16", "bf16", "f64", "i64", "i32", "i8", "u8", "bool")
MANY = tuple(Value(f"v{k}", parse_type(f"{k}[3,5]")) for k in KINDS)
ODD = (
    Value("scalar", parse_type("f32[]")),
    Value("empty", parse_type("f32[0,4]")),
    Value("plain", parse_type("f32[2]")),
)
EDGES = (Edge(0, 1, "F", MANY), Edge(1, 0, "B", ODD), Edge(0, 1, "B", ODD))


def content(values, mb, salt):
    return {
        v.name: (torch.arange(v.type.size).reshape(v.type.dims) * 3 + mb + salt).to(allocate_like(v)) for v in values
    }


def allocate_like(value):
    from penstock.runtime.state.tensors import TORCH_DTYPES

    return TORCH_DTYPES[value.type.dtype]


def same(found, expected):
    return found.keys() == expected.keys() and all(torch.equal(found[n], expected[n]) for n in expected)


def slow_exchange(rank, group):
    exchange(rank, group, latency=0.05)


def exchange(rank, group, latency=0.0):
    """Both phases at once, receives posted early and taken late, in orders that would mix up without tags."""
    transport = RankTransport(rank, EDGES, {0: 0, 1: 1}, 10, latency=latency)
    microbatches = [0, 1, 2, 4095, 4096, 4097, 8192]
    if rank == 0:
        for mb in microbatches:
            transport.send(Action("SB", 0, mb, peer=1), content(ODD, mb, 50))
            transport.send(Action("SF", 0, mb, peer=1), content(MANY, mb, 0))
        for mb in microbatches:
            assert same(transport.receive(Action("RB", 0, mb, peer=1)), content(ODD, mb, 100)), mb
        transport.flush()
    else:
        assert transport.post(Action("RF", 1, 0, peer=0))
        assert transport.post(Action("RF", 1, 0, peer=0))
        assert transport.post(Action("RF", 1, 1, peer=0))
        # No more than two messages of a channel are under way before their action.
        assert not transport.post(Action("RF", 1, 2, peer=0))
        for mb in microbatches:
            transport.send(Action("SB", 1, mb, peer=0), content(ODD, mb, 100))
        # Another order than the sender's, as far as the tags tell microbatches apart.
        for mb in (1, 0, 2, 4097, 4095, 4096, 8192):
            assert same(transport.receive(Action("RF", 1, mb, peer=0)), content(MANY, mb, 0)), mb
        for mb in microbatches:
            assert same(transport.receive(Action("RB", 1, mb, peer=0)), content(ODD, mb, 50)), mb
        transport.flush()
    group.gather("end", b"")


class Counting:
    """The group, which counts messages."""

    def __init__(self, group):
        self.group, self.sent, self.posted = group, 0, 0

    def send(self, *words):
        self.sent += 1
        return self.group.send(*words)

    def recv(self, *words):
        self.posted += 1
        return self.group.recv(*words)


def together(rank, group):
    """Small values of an edge share a message, large ones have their own; without sharing each has one."""
    large = [Value(name, parse_type("f32[300,200]")) for name in ("first", "second")]
    edge = Edge(0, 1, "F", (large[0], *MANY, large[1], *ODD))
    counting = Counting(gloo_wire._world())
    gloo_wire._world = lambda: counting
    for limit, expected in ((parcels.TOGETHER, 3), (0, 2 + len(MANY) + 2)):
        parcels.TOGETHER = limit
        transport = RankTransport(rank, (edge,), {0: 0, 1: 1}, 10)
        counting.sent = counting.posted = 0
        for mb in range(3):
            if rank == 0:
                transport.send(Action("SF", 0, mb, peer=1), content(edge.values, mb, 7))
            else:
                found = transport.receive(Action("RF", 1, mb, peer=0))
                assert same(found, content(edge.values, mb, 7)), mb
                assert all(x.data_ptr() % 64 == 0 and x.is_contiguous() for x in found.values())
        transport.flush()
        assert (counting.sent, counting.posted) == ((3 * expected, 0) if rank == 0 else (0, 3 * expected))
    group.gather("end", b"")


def team(rank, group):
    """Sums over gloo where there are no GPUs; and NCCL is asked for only where each of the ranks has a GPU of its own."""
    group.form_team((0, 1), torch.device("cpu"))
    assert group.team.kind == "gloo"
    total = torch.full((3,), float(rank + 1))
    dist.all_reduce(total, group=group.team.group)
    assert total.tolist() == [3.0] * 3
    asked = []
    groups.dist.new_group = lambda ranks, **options: asked.append((ranks, options["backend"]))
    for number, (gpus, kind) in enumerate(
        [
            (("", ""), "gloo"),
            (("a 1", ""), "gloo"),
            (("", "a 1"), "gloo"),
            (("a 1", "a 1"), "gloo"),  # two ranks on one GPU
            (("a 1", "a 2"), "nccl"),
            (("a 1", "b 1"), "nccl"),
        ]
    ):
        groups.gpu_of = lambda device, gpus=gpus: gpus[rank]
        group.store = dist.PrefixStore(str(number), group.store)
        group.form_team((0, 1), torch.device("cuda"))
        assert asked.pop() == ([0, 1], kind), gpus
        assert group.team.kind == kind
    group.gather("end", b"")


def raw_tags(rank, group):
    """What the transport relies on: gloo matches by (source, tag), and equal tags in order."""
    if rank == 0:
        tensors = [torch.full((2,), float(100 * i + tag)) for i, tag in enumerate((7, 8, 7, 9, 7))]
        works = [dist.isend(tensor, 1, tag=int(tensor[0]) % 100) for tensor in tensors]
        for work in works:
            work.wait(timedelta(seconds=10))
    else:
        time.sleep(0.3)
        found = {}
        works = []
        for name, tag in (("nine", 9), ("first", 7), ("eight", 8), ("second", 7), ("third", 7)):
            found[name] = torch.zeros(2)
            works.append(dist.irecv(found[name], 0, tag=tag))
        for work in reversed(works):
            work.wait(timedelta(seconds=10))
        assert {n: t[0].item() for n, t in found.items()} == {
            "first": 7,
            "eight": 108,
            "second": 207,
            "nine": 309,
            "third": 407,
        }
    group.gather("end", b"")


def agree(rank, group):
    group.agree("colour", "blue")
    group.agree("shape", f"shape {rank}")


def silent(rank, group):
    """Rank 1 never sends."""
    transport = RankTransport(rank, EDGES, {0: 0, 1: 1}, 1)
    if rank == 0:
        transport.receive(Action("RB", 0, 5, peer=1))
    else:
        time.sleep(2.5)


def deaf(rank, group):
    """Rank 1 never receives: the send fails in the background and is raised at the flush."""
    transport = RankTransport(rank, EDGES, {0: 0, 1: 1}, 1)
    if rank == 0:
        transport.send(Action("SF", 0, 5, peer=1), content(MANY, 5, 0))
        transport.flush()
    else:
        time.sleep(2.5)


def gone(rank, group):
    """Rank 1 dies while rank 0 waits."""
    transport = RankTransport(rank, EDGES, {0: 0, 1: 1}, 30)
    if rank == 0:
        transport.receive(Action("RB", 0, 5, peer=1))
    else:
        time.sleep(0.5)
        os._exit(0)


def absent(rank, group):
    """Rank 1 never shows up at the store."""
    group.timeout = 1
    if rank == 0:
        group.gather("roll", b"")
    else:
        time.sleep(3)


# ------------------------------------------------------------------------------------------------ memory that both share


def share(group, edges=EDGES, key="near", timeout=10, **options):
    """A transport whose messages all go through memory."""
    ends = {(f"{'S' if e.src == group.rank else 'R'}{e.phase}", 1 - group.rank) for e in edges}
    near = connect(group, ends, identity(), key)
    assert near.keys() == ends
    return RankTransport(group.rank, edges, {0: 0, 1: 1}, timeout, near=near, **options)


def shared_exchange(rank, group):
    """All types, both ways at once; nothing goes over gloo."""
    gloo_wire._world = None
    for number, latency in enumerate((0.0, 0.02)):
        transport = share(group, key=f"near{number}", latency=latency)
        for mb in range(12):
            if rank == 0:
                transport.send(Action("SB", 0, mb, peer=1), content(ODD, mb, 50))
                transport.send(Action("SF", 0, mb, peer=1), content(MANY, mb, 0))
                assert same(transport.receive(Action("RB", 0, mb, peer=1)), content(ODD, mb, 100)), mb
            else:
                assert transport.post(Action("RF", 1, mb, peer=0))
                transport.send(Action("SB", 1, mb, peer=0), content(ODD, mb, 100))
                assert same(transport.receive(Action("RF", 1, mb, peer=0)), content(MANY, mb, 0)), mb
                assert same(transport.receive(Action("RB", 1, mb, peer=0)), content(ODD, mb, 50)), mb
        transport.flush()
        transport.close()
    group.gather("end", b"")


def shared_late(rank, group):
    """Messages that nobody has memory for yet wait in the background, in order; what was received stays as it is while it is held, and its memory is used
    again after that."""
    large = (Value("x", parse_type("f32[300,200]")), Value("y", parse_type("f32[60000]")))
    transport = share(group, (Edge(0, 1, "F", large),))
    if rank == 0:
        begin = time.monotonic()
        for mb in range(20):
            transport.send(Action("SF", 0, mb, peer=1), content(large, mb, 0))
        assert time.monotonic() - begin < 0.4
        group.put("sent", b"")
        transport.flush()
        assert time.monotonic() - begin > 0.5
    else:
        group.get("sent", "the messages")
        time.sleep(0.5)
        held = []
        for mb in range(20):
            held.append(transport.receive(Action("RF", 1, mb, peer=0)))
            held = held[-3:]
            for back, found in enumerate(reversed(held)):
                assert same(found, content(large, mb - back, 0)), (mb, back)
        # Three that are held and one that comes, of two values each.
        assert len(transport._blocks._places) <= 8
    group.gather("end", b"")


def shared_wide(rank, group):
    """Values by the hundred, each by itself, cost neither packets nor files by the hundred."""
    kept, parcels.TOGETHER = parcels.TOGETHER, 0
    values = tuple(Value(f"v{i}", parse_type("f32[16]")) for i in range(600))
    transport = share(group, (Edge(0, 1, "F", values),))
    before = len(os.listdir("/proc/self/fd"))
    for mb in range(3):
        if rank == 0:
            transport.send(Action("SF", 0, mb, peer=1), content(values, mb, 0))
        else:
            transport.post(Action("RF", 1, mb, peer=0))
            transport.post(Action("RF", 1, mb + 1, peer=0))
            assert same(transport.receive(Action("RF", 1, mb, peer=0)), content(values, mb, 0))
    transport.flush()
    assert len(os.listdir("/proc/self/fd")) <= before + 2
    parcels.TOGETHER = kept
    group.gather("end", b"")


def shared_sealed(rank, group):
    """A sender that cuts off the memory it may write to, or makes it longer, is refused by the system."""
    transport = share(group)
    if rank == 0:
        transport.send(Action("SF", 0, 0, peer=1), content(MANY, 0, 0))
        transport.flush()
        (file,) = transport._channels["SF", 1, 0, None].outgoing._files.values()
        for size in (0, 1 << 30):
            try:
                os.ftruncate(file, size)
            except PermissionError:
                continue
            raise AssertionError(f"made the receiver's memory {size} bytes long")
    else:
        assert same(transport.receive(Action("RF", 1, 0, peer=0)), content(MANY, 0, 0))
    group.gather("end", b"")


def shared_strangers(rank, group):
    """Whoever connects with other words than a sender's is turned away; and ranks that are not near each other share nothing."""
    assert connect(group, [("SF" if rank == 0 else "RF", 1 - rank)], f"host {rank}", "apart") == {}
    assert connect(group, [("SF" if rank == 0 else "RF", 1 - rank)], "" if rank else identity(), "one") == {}
    if rank == 0:
        own = identity()
        group.put("strange/near/0", f'["{own}", ""]'.encode())
        name = json.loads(group.get("strange/near/1", "the name"))[1]
        mute = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        mute.connect(f"\0penstock-{name}")
        for words in (b"RF 7", b"nonsense", b"\xff\xff", b"RF " + b"9" * 500, b""):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as one:
                one.connect(f"\0penstock-{name}")
                one.send(words)
        if os.getuid() == 0 and (child := os.fork()) == 0:
            os.setuid(65534)
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as one:
                one.connect(f"\0penstock-{name}")
                one.send(b"RF 0")
                one.recv(1)  # until it is turned away
            os._exit(0)
        if os.getuid() == 0:
            os.waitpid(child, 0)
        group.put("calls", b"")
        neighbours._call(f"\0penstock-{name}", "RF 0", time.monotonic() + 5).close()
    else:
        assert connect(group, [("RF", 0)], identity(), "strange").keys() == {("RF", 0)}
        # Only the last one was let in.
        assert group.store.check(["calls"])
    group.gather("end", b"")


def shared_memory(rank, group):
    """Those above, one after the other."""
    store, world = group.store, gloo_wire._world
    for scenario in (shared_exchange, shared_late, shared_wide, shared_sealed, shared_strangers):
        group.store = dist.PrefixStore(scenario.__name__, store)
        scenario(rank, group)
    gloo_wire._world = world


def shared_deaf(rank, group):
    transport = share(group, timeout=1)
    if rank == 0:
        transport.send(Action("SF", 0, 5, peer=1), content(MANY, 5, 0))
        transport.flush()
    else:
        time.sleep(2.5)


def shared_gone(rank, group):
    transport = share(group, timeout=30)
    if rank == 0:
        transport.receive(Action("RB", 0, 5, peer=1))
    else:
        time.sleep(0.5)
        os._exit(0)


def shared_mixed_up(rank, group):
    """A schedule that orders messages differently on both sides, which the verifier refuses, does not hand over the wrong ones."""
    transport = share(group)
    if rank == 0:
        for mb in (4, 5):
            transport.send(Action("SF", 0, mb, peer=1), content(MANY, mb, 0))
        transport.flush()
    else:
        with contextlib.suppress(PenstockError):
            transport.receive(Action("RF", 1, 5, peer=0))
        time.sleep(1)


def speak(scenario, rank, port, log):
    """Be one of the two, and write into a file; on rank 0, the port where they meet is the first line."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for output in (1, 2):
        os.dup2(descriptor, output)
    # What this process inherited writes elsewhere.
    sys.stdout, sys.stderr = (os.fdopen(output, "w", closefd=False) for output in (1, 2))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = host_store(2, 20) if rank == 0 else join_store(port, 2, 20)
    if rank == 0:
        print(store.port, flush=True)
    group = RankGroup(store, rank, 2, 20)
    group.connect()
    try:
        SCENARIOS[scenario](rank, group)
    except PenstockError as error:
        print(f"{type(error).__name__} {error}", flush=True)
        os._exit(error.exit_code)
    print("well", flush=True)
    # The store lives in rank 0.
    time.sleep(0.3 * (rank == 0))
    os._exit(0)


SHARED = (shared_memory, shared_deaf, shared_gone, shared_mixed_up)
SCENARIOS = {
    f.__name__: f
    for f in (exchange, slow_exchange, together, raw_tags, team, agree, silent, deaf, gone, absent, *SHARED)
}
