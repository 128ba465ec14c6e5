"""All ranks of a module in one process, each in a thread: executors, stores and transports as workers have them, between which messages are handed over in memory.
For laws that are to hold over many schedules; that processes do the same is another test's business."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from penstock.backends.numpy_backend import NumpyBackend
from penstock.ir.graph import Module, stage_vars, stepped_vars, summed_vars
from penstock.runtime.group.group import Team
from penstock.runtime.state.store import Store, SummedGradients
from penstock.runtime.telemetry.memory_trace import RankTrace
from penstock.runtime.transport import gloo_wire, sums
from penstock.runtime.transport.transport import RankTransport
from penstock.runtime.worker.executor import Conduct, Executor
from penstock.runtime.worker.feeds import DataFeed

SECONDS = 60


class Work:
    """A receive that is done when what was sent is there, or a send, which is done at once."""

    def __init__(self, fill=lambda: None, ready=None):
        self._fill, self._ready = fill, ready

    def wait(self, timeout=None):
        if self._ready is not None:
            assert self._ready.acquire(timeout=SECONDS), "nothing was sent"
        self._fill()


class Mail:
    """Messages by sender, receiver and tag, and sums over the ranks of a stage."""

    def __init__(self):
        self._lock, self._here = threading.Lock(), threading.local()
        self._boxes = defaultdict(list)
        self._ready = defaultdict(lambda: threading.Semaphore(0))
        self._sums = {}

    def enter(self, rank):
        self._here.rank, self._here.sums = rank, defaultdict(int)

    def send(self, tensors, peer, tag):
        key = (self._here.rank, peer, tag)
        with self._lock:
            self._boxes[key].append(tensors[0].clone())
            self._ready[key].release()
        return Work()

    def recv(self, tensors, peer, tag):
        key = (peer, self._here.rank, tag)
        with self._lock:
            ready = self._ready[key]

        def fill():
            tensors[0].copy_(self._boxes[key].pop(0))

        return Work(fill, ready)

    def all_reduce(self, tensor, group, async_op):
        number = self._here.sums[group]
        self._here.sums[group] += 1
        with self._lock:
            parts, barrier = self._sums.setdefault((group, number), ([], threading.Barrier(len(group))))
            parts.append(tensor.clone())

        def fill():
            barrier.wait(SECONDS)
            tensor.copy_(torch.stack(parts).sum(0))
            barrier.wait(SECONDS)

        return Work(fill)


class Noise:
    """Samples of a module's inputs."""

    def __init__(self, module: Module):
        self._types = {value.name: value.type for value in module.inputs}

    def microbatch(self, mb: int, name: str) -> np.ndarray:
        type = self._types[name]
        dtype = {"f32": np.float32, "i64": np.int64}[type.dtype]
        return np.random.default_rng(mb).integers(0, 2, type.dims).astype(dtype)


def traced(module: Module, runs: Sequence[tuple[int, int]], store_kind: type[Store] = Store) -> list[RankTrace]:
    """The trace of every rank, for runs of (first batch, batches). Weights are zeros, which memory does not mind."""
    with pytest.MonkeyPatch.context() as patch:
        return _traced(patch, module, runs, store_kind)


def _traced(
    monkeypatch: pytest.MonkeyPatch, module: Module, runs: Sequence[tuple[int, int]], store_kind: type[Store]
) -> list[RankTrace]:
    mail, members = Mail(), module.schedule.members()
    loss = next(v for graph in module.graphs.values() for v in graph.outs if v.name == module.outputs[0])
    monkeypatch.setattr(gloo_wire, "_world", lambda: mail)
    monkeypatch.setattr(sums, "dist", SimpleNamespace(all_reduce=mail.all_reduce))
    traces: dict[int, RankTrace] = {}
    failed: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            mail.enter(rank)
            transport = None
            executors: dict[int, Executor] = {}
            for stage in module.rank_packs()[rank]:
                mates = members[stage]
                team = Team(mates, mates, "gloo") if len(mates) > 1 else None
                summed = summed_vars(module, stage) if team else []
                store = store_kind(stage_vars(module, stage), stepped_vars(module), summed=SummedGradients(summed))
                for name, var in store.variables.items():
                    if var.role != "grad":
                        given = np.array(var.init if isinstance(var.init, tuple) else 0.0)
                        store.newest(name).copy_(torch.from_numpy(np.resize(given, var.type.dims)))
                transport = transport or RankTransport(rank, module.edges, module.rank_stages(), SECONDS, team=team)
                status = SimpleNamespace(show=lambda *_: None, spend=lambda *_: None, finish=lambda *_: None)
                program = NumpyBackend().load_stage(module, stage, ())
                conduct = Conduct(trace=True, stage=stage, stages=executors)
                executor = Executor(module, rank, program, store, transport, lambda *_: None, status, conduct)
                # The toy has outputs that are no losses.
                executor.is_loss_stage &= loss.type.dims == ()
            executor = next(iter(executors.values()))
            for first, batches in runs:
                executor.run(first, DataFeed(Noise(module), first, batches))
            traces[rank] = RankTrace(tuple(executor.events), executor.ledger.taken())
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in sorted(module.schedule.ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    if failed:
        raise failed[0]
    assert len(traces) == len(threads), "a rank did not end"
    return [traces[rank] for rank in sorted(traces)]
