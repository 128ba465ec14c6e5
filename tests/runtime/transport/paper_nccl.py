"""NCCL of paper: a library of torch that moves bytes by gloo, and has NCCL's rules.

* It takes tensors of GPUs alone: here those that are marked as such (`PaperTensor`).
* A communicator is made by all of its ranks together, the same one everywhere, and each of them has a GPU of its own.
* Operations of a communicator are done one after the other, in the order in which they were issued.
* The nth operation of one rank is the partner of the nth of the other. Where they do not fit, both fail. NCCL itself
  would hang, or mix messages up.

`dist.Backend.register_backend("paper", make, extended_api=True)` makes it known.
"""

from __future__ import annotations

import queue
import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from penstock.ir.types import TensorType
from penstock.runtime.state import tensors
from penstock.runtime.transport import packing

SEND, RECEIVE, SUM = 1, 2, 3
PARTNER = {SEND: RECEIVE, RECEIVE: SEND, SUM: SUM}
SECONDS = 20
# The GPU of this process.
GPU = ["none"]


class PaperTensor(torch.Tensor):
    """A tensor that says it is on a GPU."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0)


def on_gpu(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, as that of a GPU."""
    return tensor.as_subclass(PaperTensor)


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, as that of the host."""
    return tensor.as_subclass(torch.Tensor)


def allocate_on_paper() -> None:
    """Let memory that the transport takes on a GPU be of paper."""
    original = tensors.allocate

    def allocate(type: TensorType, device: torch.device = tensors.CPU) -> torch.Tensor:
        return on_gpu(original(type)) if device.type == "cuda" else original(type)

    tensors.allocate = packing.allocate = allocate


class PaperWork:
    """An operation under way."""

    def __init__(self) -> None:
        self._done, self._error = threading.Event(), None

    def finish(self, error: Exception | None) -> None:
        self._error = error
        self._done.set()

    def is_completed(self) -> bool:
        return self._done.is_set()

    def exception(self) -> Exception | None:
        return self._error

    def wait(self, *timeout: timedelta) -> bool:
        """Stand for the wait of a device, and for what comes behind it: NCCL would return at once."""
        assert not timeout, "a wait with a deadline blocks the rank"
        self._done.wait()
        if self._error is not None:
            raise self._error
        return True


class PaperGroup(dist.ProcessGroup):
    """A communicator. Its thread does the operations."""

    def __init__(self, gloo: Any, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._gloo, self._rank = gloo, rank
        self._queue: queue.SimpleQueue[tuple[PaperWork, int, torch.Tensor, int]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def getBackendName(self) -> str:
        return "paper"

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> PaperWork:
        return self._issue(SEND, tensors, tag)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> PaperWork:
        return self._issue(RECEIVE, tensors, tag)

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> PaperWork:
        return self._issue(SUM, tensors, 0)

    def _issue(self, kind: int, tensors: list[torch.Tensor], tag: int) -> PaperWork:
        (tensor,) = tensors
        if not isinstance(tensor, PaperTensor):
            raise RuntimeError("NCCL takes tensors of GPUs alone")
        work = PaperWork()
        self._queue.put((work, kind, tensor, tag))
        return work

    def _run(self) -> None:
        failure: Exception | None = None
        while True:
            work, kind, tensor, tag = self._queue.get()
            # A communicator that failed stays so.
            if failure is None:
                try:
                    self._do(kind, on_host(tensor), tag)
                except RuntimeError as error:
                    failure = error
            work.finish(failure)

    def _do(self, kind: int, tensor: torch.Tensor, tag: int) -> None:
        peer = 1 - self._rank
        mine, theirs = torch.tensor([kind, tag, tensor.nbytes]), torch.zeros(3, dtype=torch.int64)
        sent = self._gloo.send([mine], peer, 0)
        self._gloo.recv([theirs], peer, 0).wait(timedelta(seconds=SECONDS))
        sent.wait(timedelta(seconds=SECONDS))
        if theirs.tolist() != [PARTNER[kind], tag, tensor.nbytes]:
            raise RuntimeError(f"the ends issue in another order: {mine.tolist()} here, {theirs.tolist()} there")
        if kind == SUM:
            self._gloo.allreduce([tensor]).wait()
        elif kind == SEND:
            self._gloo.send([tensor], peer, 1).wait(timedelta(seconds=SECONDS))
        else:
            self._gloo.recv([tensor], peer, 1).wait(timedelta(seconds=SECONDS))


def make(options: Any, _: Any) -> PaperGroup:
    """Make a communicator with all ranks that belong to it."""
    rank, ranks, store = options.group_rank, list(options.global_ranks_in_group), options.store
    store.set(f"member {rank}", f"{ranks} {GPU[0]}")
    keys = [f"member {other}" for other in range(options.group_size)]
    # Fails after the timeout of the store where a rank does not come.
    store.wait(keys, timedelta(seconds=2))
    members = [store.get(key).decode().rpartition(" ") for key in keys]
    if {listed for listed, _, _ in members} != {str(ranks)}:
        raise RuntimeError(f"ranks make different communicators at once: {members}")
    if len({gpu for _, _, gpu in members}) < len(members):
        raise RuntimeError(f"two ranks of a communicator have one GPU: {members}")
    gloo = dist.ProcessGroupGloo(store, rank, options.group_size, timedelta(seconds=SECONDS))
    return PaperGroup(gloo, rank, options.group_size)
