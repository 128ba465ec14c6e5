"""Two processes with GPUs of paper, whose edges and sums go by NCCL of paper (paper_nccl.py). test_device_wire.py has
them forked from one that has imported this."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace

import torch
import torch.distributed as dist

from penstock.ir.graph import Edge, Value
from penstock.ir.schedule import Action
from penstock.ir.types import parse_type
from penstock.runtime.group import group as groups
from penstock.runtime.transport import gloo_wire
from penstock.runtime.transport.overdue import Overdue
from penstock.runtime.transport.transport import RankTransport

from . import paper_nccl, peers
from .paper_nccl import PaperTensor, on_gpu, on_host

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
LARGE = tuple(Value(name, parse_type("f32[300,200]")) for name in ("first", "second"))
EDGES = (Edge(0, 1, "F", (LARGE[0], *peers.MANY, LARGE[1])), Edge(1, 0, "B", peers.ODD), Edge(0, 1, "B", peers.ODD))
FORWARD, BACKWARD, BESIDE = (edge.values for edge in EDGES)


def schedule():
    """Actions that use all channels; what else a schedule has does not matter here."""
    return SimpleNamespace(
        ranks=[
            SimpleNamespace(
                start=(), batch=[Action("SF", 0, 0, peer=1), Action("SB", 0, 0, peer=1), Action("RB", 0, 0, peer=1)]
            ),
            SimpleNamespace(
                start=(), batch=[Action("RF", 1, 0, peer=0), Action("RB", 1, 0, peer=0), Action("SB", 1, 0, peer=0)]
            ),
        ]
    )


def on_paper(rank, gpu=None):
    """Let this process have a GPU, by which NCCL of paper knows it."""
    paper_nccl.GPU[0] = f"gpu{rank if gpu is None else gpu}"
    groups.NCCL, groups.gpu_of = "paper", lambda device: paper_nccl.GPU[0]
    paper_nccl.allocate_on_paper()


def content(values, mb, salt):
    return {name: on_gpu(x) for name, x in peers.content(values, mb, salt).items()}


def same(found, expected):
    assert all(isinstance(x, PaperTensor) for x in found.values()), "a value left the GPU"
    return peers.same({n: on_host(x) for n, x in found.items()}, {n: on_host(x) for n, x in expected.items()})


def open_transport(rank, group, timeout=10, device=GPU):
    """A transport whose messages all go by NCCL of paper."""
    on_paper(rank)
    lines = group.form_edges(schedule(), CPU)
    assert lines.keys() == {(a.kind, a.peer) for a in schedule().ranks[rank].batch}
    # A communicator for each direction of each phase.
    assert len(set(lines.values())) == len(lines)
    transport = RankTransport(rank, EDGES, {0: 0, 1: 1}, timeout, device, team=group.team)
    transport.use_library(lines, Overdue(timeout, group.lost))
    # Nothing goes over gloo.
    gloo_wire._world = None
    return transport


def exchange(rank, group):
    """All types, both ways at once."""
    transport = open_transport(rank, group)
    for mb in range(4):
        if rank == 0:
            transport.send(Action("SB", 0, mb, peer=1), content(BESIDE, mb, 50))
            transport.send(Action("SF", 0, mb, peer=1), content(FORWARD, mb, 0))
            assert same(transport.receive(Action("RB", 0, mb, peer=1)), content(BACKWARD, mb, 100)), mb
        else:
            # Receives that come soon are not posted ahead.
            transport.expect(Action("RF", 1, mb + 1, peer=0))
            assert not transport.post(Action("RF", 1, mb + 1, peer=0))
            transport.send(Action("SB", 1, mb, peer=0), content(BACKWARD, mb, 100))
            assert same(transport.receive(Action("RF", 1, mb, peer=0)), content(FORWARD, mb, 0)), mb
            assert same(transport.receive(Action("RB", 1, mb, peer=0)), content(BESIDE, mb, 50)), mb
    transport.flush()
    group.gather("end", b"")


def sums(rank, group):
    """Gradients of two ranks of a stage; the wait has no deadline, and so blocks no rank (paper_nccl.py)."""
    on_paper(rank)
    group.form_team((0, 1), CPU)
    assert group.team.kind == "paper"
    transport = RankTransport(rank, (), {0: 0, 1: 0}, 10, GPU, team=group.team)
    transport.use_library({}, Overdue(10, group.lost))
    for batch in range(3):
        x = on_gpu(torch.full((1000,), float(rank + 1 + batch)))
        transport.sum_up(Action("AR", 0, batch), [x])
        transport.finish_sum(Action("U", 0, batch))
        assert on_host(x).tolist() == [3.0 + 2 * batch] * 1000
    transport.flush()
    group.gather("end", b"")


def off(rank, group):
    """One rank that does not want NCCL is enough, and so is one GPU for two ranks."""
    on_paper(rank)
    groups.gpu_of = lambda device: "" if rank else "gpu0"
    assert group.form_edges(schedule(), CPU) == {}
    group.store = dist.PrefixStore("again", group.store)
    groups.gpu_of = lambda device: "gpu0"
    assert group.form_edges(schedule(), CPU) == {}
    group.gather("end", b"")


# ------------------------------------------------------------------------------------------------ what has to fail


def swapped(rank, group):
    """The receiver takes the second message first."""
    transport = open_transport(rank, group)
    if rank == 0:
        for mb in (0, 1):
            transport.send(Action("SB", 0, mb, peer=1), content(BESIDE, mb, 0))
        transport.flush()
    else:
        transport.receive(Action("RB", 1, 1, peer=0))


def crossed(rank, group):
    """The ranks open their communicators in different orders."""
    if rank:
        in_order = groups.channels_of
        groups.channels_of = lambda schedule: in_order(schedule)[::-1]
    transport = open_transport(rank, group)
    if rank == 0:
        transport.send(Action("SB", 0, 0, peer=1), content(BESIDE, 0, 0))
    else:
        transport.send(Action("SB", 1, 0, peer=0), content(BACKWARD, 0, 0))
    transport.flush()


def missing(rank, group):
    """A rank opens none."""
    on_paper(rank)
    if rank == 0:
        group.form_edges(schedule(), CPU)
    else:
        group.gather("gpus of edges", b"gpu1")
        time.sleep(4)


def crowded(rank, group):
    """Two ranks have one GPU, and say that they have two."""
    on_paper(rank, gpu=0)
    groups.gpu_of = lambda device: f"gpu{rank}"
    group.form_edges(schedule(), CPU)


def in_memory(rank, group):
    """A value is in the memory of the host."""
    transport = open_transport(rank, group)
    if rank == 0:
        transport.send(Action("SF", 0, 0, peer=1), peers.content(FORWARD, 0, 0))
    else:
        time.sleep(1)


def blocked():
    """Wait for a device that does not answer, as a look at one of its results does."""
    time.sleep(30)


def receive_in_vain(transport):
    """Begin to receive a gradient that nobody sends, and wait for the device."""
    transport._post(Action("RB", 0, 5, peer=1), transport._open(Action("RB", 0, 5, peer=1)))
    blocked()


def gone(rank, group):
    """A rank dies while the device of the other one waits."""
    transport = open_transport(rank, group, timeout=30)
    if rank == 0:
        receive_in_vain(transport)
    time.sleep(0.5)
    os._exit(0)


def silent(rank, group):
    """A rank never sends."""
    transport = open_transport(rank, group, timeout=1)
    if rank == 0:
        receive_in_vain(transport)
    time.sleep(3)


def silent_sum(rank, group):
    """A rank never adds its gradients."""
    on_paper(rank)
    group.form_team((0, 1), CPU)
    transport = RankTransport(rank, (), {0: 0, 1: 0}, 1, GPU, team=group.team)
    transport.use_library({}, Overdue(1, group.lost))
    if rank == 0:
        transport.sum_up(Action("AR", 0, 7), [on_gpu(torch.ones(3))])
        blocked()
    time.sleep(3)


SCENARIOS = (exchange, sums, off, swapped, crossed, missing, crowded, in_memory, gone, silent, silent_sum)


def speak(scenario, rank, port, log):
    """Be one of the two."""
    if not hasattr(dist.Backend, "PAPER"):
        dist.Backend.register_backend("paper", paper_nccl.make, extended_api=True, devices=["cpu"])
    peers.SCENARIOS |= {f"device {f.__name__}": f for f in SCENARIOS}
    peers.speak(f"device {scenario}", rank, port, log)
