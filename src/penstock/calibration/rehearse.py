"""One rank of a bundle by itself: the time of its actions when no other rank keeps it waiting. For simulations with
measured times.

    python -m penstock.support.processes rehearse BUNDLE --rank R --threads N --batches N [--seconds S]

In: a bundle. Out: for each kind of action the usual seconds, from the end of the action before it to its own. The
work of the worker's loop in between is in it.

A rank runs its program with the worker's own code, stage, store and data. Its process has the threads of its device.
Only its messages are not there: sends go nowhere, and receives give random values that were made before. It is run
again and again until `seconds` have passed; the first run does not count.

`rehearse` can run several ranks at once, from the moment when all are warm: the same numbers then hold for busy
neighbours. Limits: a real receive brings values that another core wrote; the work of gloo's threads for messages is not
in it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
import torch.distributed as dist

from penstock.backends.bundle.format import Bundle, open_bundle
from penstock.ir.collective_calls import groups_of
from penstock.ir.graph import Edge, Value
from penstock.ir.schedule import COMPUTE, Action, Schedule
from penstock.runtime.group.group import Circle, RankGroup
from penstock.runtime.group.neighbours import End
from penstock.runtime.launch.local import thread_environment
from penstock.runtime.messages.control import DataSpec, Record, RunCommand, Setup, TraceRecord
from penstock.runtime.messages.status import Status, StatusBoard
from penstock.runtime.state.tensors import TORCH_DTYPES
from penstock.runtime.transport.rounds import Round
from penstock.runtime.transport.transport import RankTransport
from penstock.runtime.worker.worker import Worker
from penstock.support.entry_points import ENTRY_POINTS
from penstock.support.errors import PenstockError
from penstock.support.processes import command_of

_TIMEOUT = 600.0


class _Alone(RankGroup):
    """A group whose other members are not asked."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world, self.timeout = rank, world, _TIMEOUT
        self.team = None
        self.lost = _refuse_loss

    def connect_stages(self, schedule: Schedule, device: torch.device) -> dict[End, socket.socket]:
        return {}

    def form_team(self, ranks: Sequence[int], device: torch.device) -> None:
        pass

    def form_circles(self, groups: Sequence[tuple[int, ...]], device: torch.device) -> list[Circle]:
        return []

    def find_direct(self, schedule: Schedule, device: torch.device) -> set[tuple[int, str, int]]:
        return set()

    def form_edges(
        self, schedule: Schedule, device: torch.device, direct: Collection[tuple[int, str, int]] = ()
    ) -> dict[End, dist.ProcessGroup]:
        return {}

    def agree(self, what: str, value: str, hint: str = "") -> None:
        pass

    def leave(self) -> None:
        pass


def _refuse_loss(error: PenstockError) -> None:
    raise AssertionError("no rank is waited for")


class _SilentGroup:
    """A stand-in for the members of a group: their blocks are zeros, and there at once."""

    def __init__(self, place: int, members: int) -> None:
        self.place, self.members = place, members

    def stand(self, text: bytes) -> None:
        pass

    def post(self, turn: int, text: bytes, blocks: Round, x: np.ndarray, out: np.ndarray) -> None:
        pass

    def collect(self, turn: int, text: bytes, blocks: Round) -> dict[int, np.ndarray]:
        return {member: np.zeros(blocks.shape, blocks.dtype) for member in blocks.sources}

    def done(self, turn: int, blocks: Round) -> None:
        pass

    def lend(self, nbytes: int) -> None:
        pass


class _Silent:
    """A stand-in for a transport: sends go nowhere, and receives return at once."""

    def __init__(self, real: RankTransport) -> None:
        self._real = real
        self._made: dict[str, torch.Tensor] = {}

    def edge_of(self, action: Action) -> Edge:
        return self._real.edge_of(action)

    def send(self, action: Action, tensors: Mapping[str, torch.Tensor]) -> None:
        for value in self.edge_of(action).values:
            tensors[value.name].contiguous()

    def post(self, action: Action) -> bool:
        return True

    def expect(self, action: Action) -> None:
        pass

    def receive(self, action: Action) -> dict[str, torch.Tensor]:
        return {value.name: self._value(value) for value in self.edge_of(action).values}

    def sum_up(self, action: Action, tensors: Sequence[torch.Tensor]) -> None:
        pass

    def finish_sum(self, action: Action) -> None:
        pass

    def flush(self) -> None:
        pass

    def _value(self, value: Value) -> torch.Tensor:
        """Return one tensor for each value that arrives: no action writes to it."""
        if value.name not in self._made:
            noise = torch.rand(value.type.dims, generator=torch.Generator().manual_seed(0))
            self._made[value.name] = ((noise - 0.5) * 1e-2).to(TORCH_DTYPES[value.type.dtype]).to(self._real.device)
        return self._made[value.name]


def _refuse(wait: bool) -> NoReturn:
    raise PenstockError("a rehearsal takes no commands")


def rehearse_here(
    bundle: Bundle, rank: int, batches: int, seconds: float, warm: Callable[[], None]
) -> dict[str, float]:
    """Rehearse in this process, which must have the threads of the device. Return usual seconds by kind of action.
    `warm` is called before the runs that count."""
    traces: list[TraceRecord] = []

    def reply(message: Record, arrays: Mapping[str, np.ndarray]) -> None:
        if isinstance(message, TraceRecord):
            traces.append(message)

    board = StatusBoard(rank + 1)
    setup = Setup(str(bundle.path), _TIMEOUT, DataSpec(), trace=True)
    worker = Worker(
        bundle, rank, _Alone(rank, bundle.world_size), setup, reply, _refuse, Status(board.descriptor, rank)
    )
    worker.executor.transport = _Silent(worker.transport)  # type: ignore[assignment]
    groups = [group for group in groups_of(bundle.module) if rank in group]
    worker.exchange.join({group: _SilentGroup(group.index(rank), len(group)) for group in groups})
    times: dict[str, list[float]] = {}
    first, begun = 0, 0.0
    while not times or time.monotonic() - begun < seconds:
        worker.obey(RunCommand(first, batches))
        if first:
            last = None
            parts: dict[str, float] = {}
            for text, start, end in traces[-1].events:
                action, took = Action.parse(text), end - (start if last is None else last)
                last = end
                if action.item and action.kind in COMPUTE:  # a part of what ends without an item
                    parts[action.kind] = parts.get(action.kind, 0.0) + took
                else:
                    times.setdefault(action.kind, []).append(took + parts.pop(action.kind, 0.0))
        else:
            warm()
            begun = time.monotonic()
        traces.clear()
        first += batches
    board.close()
    return {kind: usual(seconds_of_kind) for kind, seconds_of_kind in times.items()}


def usual(times: Sequence[float]) -> float:
    """Return the mean without the slowest tenth: a batch is the sum of many actions, but not of the load of other
    programs."""
    return statistics.mean(sorted(times)[: max(1, len(times) - len(times) // 10)])


def rehearse(
    bundle: Bundle,
    ranks: Sequence[int],
    batches: int = 2,
    seconds: float = 1.0,
    prefixes: Mapping[int, Sequence[str]] | None = None,
) -> list[dict[str, float]]:
    """Rehearse each of these ranks in a process of its own, all at once; return one row per entry of `ranks`.
    `prefixes` stand before the command of a rank, such as one that makes its process part of a group with a quota."""
    running = []
    for rank in ranks:
        threads = bundle.rank(rank).threads
        flags = {"rank": rank, "threads": threads, "batches": batches, "seconds": seconds}
        command = [*command_of("rehearse"), str(bundle.path), *(f"--{k}={v}" for k, v in flags.items())]
        environment = os.environ | thread_environment(threads)
        prefix = (prefixes or {}).get(rank, ())
        running.append(
            subprocess.Popen(
                [*prefix, *command],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                stdin=subprocess.PIPE,
            )
        )
    rows: list[dict[str, float]] = []
    try:
        # All ranks begin when the last one is warm: imports and loads of a rank would disturb the caches and cores of
        # other ranks.
        for process in running:
            assert process.stdout is not None
            process.stdout.readline()
        for process in running:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(b"go\n")
                process.stdin.flush()
        for rank, process in zip(ranks, running, strict=True):
            out, errors = process.communicate(timeout=_TIMEOUT)
            if process.returncode:
                raise PenstockError(
                    f"measuring failed:\n{errors.decode(errors='replace').strip()}", where=f"rank {rank}"
                )
            rows.append(json.loads(out))
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
                process.wait()
    return rows


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog=f"{ENTRY_POINTS['begin']} rehearse", description="Times of one rank by itself, as JSON."
    )
    parser.add_argument("bundle", type=Path)
    for name in ("rank", "threads", "batches"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--seconds", type=float, default=1.0)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)

    def warm() -> None:
        print("warm", flush=True)
        sys.stdin.readline()

    seconds = rehearse_here(
        open_bundle(arguments.bundle, arguments.rank), arguments.rank, arguments.batches, arguments.seconds, warm
    )
    print(json.dumps(seconds))
