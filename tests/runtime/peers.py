"""Two processes that talk over the transport; started by test_transport.py with scenario, rank and port (0 on rank 0, which prints it)."""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta

os.environ["GLOO_SOCKET_IFNAME"] = "lo"

import torch
import torch.distributed as dist

from penstock.ir import parcels
from penstock.ir.errors import PenstockError
from penstock.ir.graph import Edge, Value
from penstock.ir.schedule import Action
from penstock.ir.types import parse_type
from penstock.runtime import transport as transports
from penstock.runtime.transport import Group, Transport, host_store, join_store

KINDS = ("f32", "f16", "bf16", "f64", "i64", "i32", "i8", "u8", "bool")
MANY = tuple(Value(f"v{k}", parse_type(f"{k}[3,5]")) for k in KINDS)
ODD = (Value("scalar", parse_type("f32[]")), Value("empty", parse_type("f32[0,4]")), Value("plain", parse_type("f32[2]")))
EDGES = (Edge(0, 1, "F", MANY), Edge(1, 0, "B", ODD), Edge(0, 1, "B", ODD))


def content(values, mb, salt):
    return {v.name: (torch.arange(v.type.size).reshape(v.type.dims) * 3 + mb + salt).to(allocate_like(v)) for v in values}


def allocate_like(value):
    from penstock.runtime.store import TORCH_DTYPES

    return TORCH_DTYPES[value.type.dtype]


def same(found, expected):
    return found.keys() == expected.keys() and all(torch.equal(found[n], expected[n]) for n in expected)


def slow_exchange(rank, group):
    exchange(rank, group, latency=0.05)


def exchange(rank, group, latency=0.0):
    """Both phases at once, receives posted early and taken late, in orders that would mix up without tags."""
    transport = Transport(rank, EDGES, {0: 0, 1: 1}, 10, latency=latency)
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
    counting = Counting(transports._world())
    transports._world = lambda: counting
    for limit, expected in ((parcels.TOGETHER, 3), (0, 2 + len(MANY) + 2)):
        parcels.TOGETHER = limit
        transport = Transport(rank, (edge,), {0: 0, 1: 1}, 10)
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
    transports.dist.new_group = lambda ranks, **options: asked.append((ranks, options["backend"]))
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
        transports.gpu_of = lambda device, gpus=gpus: gpus[rank]
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
        assert {n: t[0].item() for n, t in found.items()} == {"first": 7, "eight": 108, "second": 207, "nine": 309, "third": 407}
    group.gather("end", b"")


def agree(rank, group):
    group.agree("colour", "blue")
    group.agree("shape", f"shape {rank}")


def silent(rank, group):
    """Rank 1 never sends."""
    transport = Transport(rank, EDGES, {0: 0, 1: 1}, 1)
    if rank == 0:
        transport.receive(Action("RB", 0, 5, peer=1))
    else:
        time.sleep(2.5)


def deaf(rank, group):
    """Rank 1 never receives: the send fails in the background and is raised at the flush."""
    transport = Transport(rank, EDGES, {0: 0, 1: 1}, 1)
    if rank == 0:
        transport.send(Action("SF", 0, 5, peer=1), content(MANY, 5, 0))
        transport.flush()
    else:
        time.sleep(2.5)


def gone(rank, group):
    """Rank 1 dies while rank 0 waits."""
    transport = Transport(rank, EDGES, {0: 0, 1: 1}, 30)
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


def main(scenario, rank, port):
    store = host_store(2, 20) if rank == 0 else join_store(port, 2, 20)
    if rank == 0:
        print(store.port, flush=True)
    group = Group(store, rank, 2, 20)
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


SCENARIOS = {f.__name__: f for f in (exchange, slow_exchange, together, raw_tags, team, agree, silent, deaf, gone, absent)}

if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
