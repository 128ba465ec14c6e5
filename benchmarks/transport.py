"""The cost of a message: a pipeline of two stages with empty kernels over loopback, beside gloo by itself.

    python benchmarks/transport.py                          both parts: a minute
    python benchmarks/transport.py --only pipeline --sizes 65536 --json transport.json

Three contenders take turns between the same two processes: Penstock with memory that the ranks share, as on one host;
Penstock over gloo, as between hosts; and gloo alone.

    pipeline   Training under 1f1b and 2bw and inference, through the runtime's executor, store, transport and feed.
               Only the kernels are left out: a stage returns tensors that were made before. Per microbatch of training
               there is one message each way, of inference one. `gloo` is a loop of torch.distributed's isend, irecv and
               wait with the same messages in the same order, and nothing else.
    stream     Messages one way, as fast as they go: through the transport, posted ahead as it does it, and by isend and
               irecv with as many posted.

Two processes on one machine, one core each where there are two. Figures are medians over turns, and each turn ends when
both processes are done. Received contents are compared with the sent ones.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import torch.distributed as dist
from machine import markdown, write_json

import penstock as ps
from penstock.backends.bundle.format import open_bundle
from penstock.ir.graph import Edge, Module, Value, stage_vars, stepped_vars
from penstock.ir.memory.walk import POSTED
from penstock.ir.schedule import PHASES, RECEIVES, SENDS, Action
from penstock.ir.types import TensorType, numpy_dtype
from penstock.models import write_mlp
from penstock.runtime.group.group import RankGroup, host_store, join_store
from penstock.runtime.group.neighbours import connect, ends_of, identity
from penstock.runtime.launch.local import loopback_name, thread_environment
from penstock.runtime.messages.status import Status
from penstock.runtime.state.store import Store
from penstock.runtime.state.tensors import TORCH_DTYPES
from penstock.runtime.transport.transport import End, RankTransport
from penstock.runtime.worker.executor import Conduct, Executor
from penstock.runtime.worker.feeds import DataFeed
from penstock.support.helper_processes import failure, outputs, start

WIDTH = 1024
SIZES = (64 << 10, 1 << 20, 16 << 20)
SCHEDULES = ("1f1b", "2bw", "forward")
MICROBATCHES = 8
TIMEOUT = 120.0
CONTENDERS = ("shared", "over gloo", "gloo")
_TAG = 5


def write_bundle(folder: Path, size: int, schedule: str) -> Path:
    """Compile two products, cut between them: the message has so many bytes."""
    path = write_mlp(folder / "model.onnx", (4, WIDTH, 4), None, seed=1)
    model = ps.from_onnx(path, dims={"batch": size // (4 * WIDTH)})
    products = [op.outs[0].name for op in model.module.graphs["main"].ops if op.kind == "matmul"]
    cluster = ps.Cluster.local(2)
    if schedule == "forward":
        plan = ps.plan(model, cluster, split_at=products[1:])
    else:
        training = ps.Training(loss="cross_entropy", optimizer=ps.SGD(lr=0.01), microbatches=MICROBATCHES)
        plan = ps.plan(model, cluster, training, schedule=schedule, split_at=products[1:])
    return ps.compile(plan, folder / f"{schedule}{size}", backend="numpy")


class Empty:
    """A stage program without kernels: results are always the same tensors.

    With `checks`, received tensors are compared with the sent ones.
    """

    device = torch.device("cpu")

    def __init__(self, module: Module) -> None:
        self._graphs = module.graphs
        self._results = {g.name: [filled(v) for v in g.results] for g in module.graphs.values()}
        self._moved = {v.name for e in module.edges for v in e.values}
        self.checks = False

    def hold(self, graph: str, slots: Sequence[torch.Tensor]) -> None:
        pass

    def watch(self, graph: str, args: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], None]:
        return self.call(graph, args), None

    def call(self, graph: str, args: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if self.checks:
            for value, x in zip(self._graphs[graph].ins, args, strict=False):
                if value.name in self._moved and not torch.equal(x, filled(value)):
                    raise SystemExit(f"@{graph}: other contents of %{value.name} arrived than were sent")
        return self._results[graph]


def filled(value: Value) -> torch.Tensor:
    """Make the contents of a value, a function of its name."""
    numbers = torch.arange(value.type.size, dtype=torch.float64).reshape(value.type.dims) * 1e-3 + sum(
        value.name.encode()
    )
    return numbers.to(TORCH_DTYPES[value.type.dtype])


def transports(group: RankGroup, edges: Sequence[Edge], ends: Iterable[End], key: str) -> dict[str, RankTransport]:
    """Make two transports for the channels `ends` of this rank.

    One sends messages through memory that both processes share, where they can; the other has gloo carry them.
    """
    near = connect(group, ends, identity(), key)
    shared = {"shared": RankTransport(group.rank, edges, [0, 1], TIMEOUT, near=near)} if near else {}
    return shared | {"over gloo": RankTransport(group.rank, edges, [0, 1], TIMEOUT)}


class Noise:
    """Samples that exist already."""

    def __init__(self, module: Module) -> None:
        self._arrays = {v.name: np.zeros(v.type.dims, numpy_dtype(v.type.dtype)) for v in module.data_inputs}

    def microbatch(self, mb: int, name: str) -> np.ndarray:
        return self._arrays[name]


class Pipeline:
    """One rank of a bundle whose kernels are empty; and the same messages over gloo alone."""

    def __init__(
        self,
        path: Path,
        rank: int,
        group: RankGroup,
        program: Callable[[Module], Empty] = Empty,
        *,
        trace: bool = False,
    ) -> None:
        module = open_bundle(path).module
        assert module.schedule is not None
        self.schedule, self.rank, self.done = module.schedule, rank, Counter[Executor]()
        self.program, self.samples = program(module), Noise(module)
        self.executors = {
            name: self._executor(module, transport, trace)
            for name, transport in transports(
                group, module.edges, ends_of(module.schedule, rank), f"{path} {trace}"
            ).items()
        }
        ends = {(f"S{e.phase}" if e.src == rank else f"R{e.phase}"): e for e in module.edges}
        self.sent = {kind: [filled(v) for v in e.values] for kind, e in ends.items() if kind[0] == "S"}
        blank = {
            kind: [torch.empty(v.type.dims, dtype=TORCH_DTYPES[v.type.dtype]) for v in e.values]
            for kind, e in ends.items()
            if kind[0] == "R"
        }
        self.buffers = {
            kind: [[x.clone() for x in values] for _ in range(POSTED + 1)] for kind, values in blank.items()
        }
        self.program.checks = True
        for executor in self.executors.values():
            self.run(executor, 2)
        self.program.checks = False

    def _executor(self, module: Module, transport: RankTransport, trace: bool) -> Executor:
        store = Store(stage_vars(module, self.rank), stepped_vars(module))
        return Executor(
            module,
            self.rank,
            self.program,
            store,
            transport,
            lambda record, arrays: None,
            Status(None, self.rank),
            Conduct(trace=trace),
        )

    def contenders(self) -> dict[str, Callable[[int], None]]:
        return {name: partial(self.run, executor) for name, executor in self.executors.items()} | {
            "gloo": self.run_gloo
        }

    def run(self, executor: Executor, batches: int) -> None:
        """Run so many batches from an empty pipeline to an empty pipeline."""
        first = self.done[executor]
        executor.run(first, DataFeed(self.samples, first, batches))  # type: ignore[arg-type]
        self.done[executor] += batches

    def run_gloo(self, batches: int, compute: Callable[[str], object] | None = None) -> None:
        """Exchange the messages alone, or with `compute` for each forward or backward."""
        actions = [a for a in self.schedule.expand(self.rank, batches) if a.kind in (*SENDS, *RECEIVES, "F", "B")]
        waiting = {kind: deque(a for a in actions if a.kind == kind) for kind in self.buffers}
        posted: dict[str, deque[list[Any]]] = {kind: deque() for kind in self.buffers}
        number = dict.fromkeys(self.buffers, 0)
        sends = []

        def post(kind: str) -> None:
            if waiting[kind]:
                waiting[kind].popleft()
                into = self.buffers[kind][number[kind] % (POSTED + 1)]
                number[kind] += 1
                posted[kind].append([dist.irecv(x, 1 - self.rank, tag=_tag(kind, i)) for i, x in enumerate(into)])

        for kind in self.buffers:
            for _ in range(POSTED):
                post(kind)
        for action in actions:
            if action.kind in SENDS:
                sends += [
                    dist.isend(x, 1 - self.rank, tag=_tag(action.kind, i)) for i, x in enumerate(self.sent[action.kind])
                ]
            elif action.kind in RECEIVES:
                for work in posted[action.kind].popleft():
                    work.wait()
                post(action.kind)
            elif compute is not None:
                compute(action.kind)
        for work in sends:
            assert work is not None
            work.wait()


def _tag(kind: str, index: int) -> int:
    return _TAG + 4 * index + PHASES.index(kind[1])


class Stream:
    """Messages from rank 0 to rank 1."""

    def __init__(self, size: int, group: RankGroup) -> None:
        self.value, self.rank, self.first = Value("x", TensorType("f32", (size // 4,))), group.rank, 0
        self.transports = transports(
            group, [Edge(0, 1, "F", (self.value,))], [("RF", 0) if group.rank else ("SF", 1)], f"stream{size}"
        )
        self.x = filled(self.value)
        self.buffers = [torch.empty_like(self.x) for _ in range(POSTED + 1)]
        for transport in self.transports.values():
            self.run(transport, 3, checks=True)

    def contenders(self) -> dict[str, Callable[[int], None]]:
        return {name: partial(self.run, transport) for name, transport in self.transports.items()} | {
            "gloo": self.run_gloo
        }

    def run(self, transport: RankTransport, messages: int, checks: bool = False) -> None:
        numbers = range(self.first, self.first + messages)
        self.first += messages
        for mb in numbers:
            if self.rank == 0:
                transport.send(Action("SF", 0, mb, peer=1), {"x": self.x})
                continue
            for later in range(mb, min(mb + POSTED, self.first)):
                transport.post(Action("RF", 1, later, peer=0))
            received = transport.receive(Action("RF", 1, mb, peer=0))
            if checks and not torch.equal(received["x"], self.x):
                raise SystemExit("other contents arrived than were sent")
            del received
        transport.flush()

    def run_gloo(self, messages: int) -> None:
        works: deque[Any] = deque()
        for number in range(messages):
            if self.rank == 0:
                works.append(dist.isend(self.x, 1, tag=_TAG))
            else:
                if len(works) == POSTED:
                    works.popleft().wait()
                works.append(dist.irecv(self.buffers[number % (POSTED + 1)], 0, tag=_TAG))
        for work in works:
            work.wait()


# ------------------------------------------------------------------------------------------------ one rank


def turns(contenders: dict[str, Callable[[int], None]], count: int, rounds: int) -> dict[str, list[float]]:
    """Return seconds of each turn; the first round does not count."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name, run in contenders.items():
            dist.barrier()
            begin = time.perf_counter()
            run(count)
            dist.barrier()
            if number:
                times[name].append(time.perf_counter() - begin)
    return times


def work(orders: list[dict[str, Any]], group: RankGroup, rounds: int) -> list[dict[str, Any]]:
    results = []
    for order in orders:
        size, count = order["bytes"], order["count"]
        one = Pipeline(Path(order["bundle"]), group.rank, group) if order["part"] == "pipeline" else Stream(size, group)
        times = turns(one.contenders(), count, rounds)
        per = count * (one.schedule.microbatches if isinstance(one, Pipeline) else 1)
        results.append({**order, "times": {name: [t / per for t in part] for name, part in times.items()}})
    return results


# ------------------------------------------------------------------------------------------------ the parent


def add_rank_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that this program passes to the ranks that it starts."""
    for name in ("--orders", "--rank", "--port"):
        parser.add_argument(name, help=argparse.SUPPRESS)


def run_rank(arguments: argparse.Namespace, work: Callable[[Any, RankGroup, int], list[dict[str, Any]]]) -> bool:
    """Work as one of the two ranks, and print the result on rank 0. Return False in any other process."""
    if arguments.rank is None:
        return False
    rank = int(arguments.rank)
    group = RankGroup(join_store(int(arguments.port), 2, TIMEOUT), rank, 2, TIMEOUT)
    group.connect()
    results = work(json.loads(arguments.orders), group, arguments.rounds)
    if rank == 0:
        print(json.dumps(results))
    group.leave()
    return True


def told_by_two(orders: Any, rounds: int) -> list[dict[str, Any]]:
    """Run this program's two ranks with these orders.

    Return the lines that rank 0 printed, with the median of each contender's times.
    """
    store = host_store(2, TIMEOUT)
    environment = os.environ | thread_environment(1) | {"GLOO_SOCKET_IFNAME": loopback_name()}
    command = [
        sys.executable,
        sys.argv[0],
        "--orders",
        json.dumps(orders),
        "--rounds",
        str(rounds),
        "--port",
        str(store.port),
    ]
    running = [start([*command, "--rank", str(rank)], environment) for rank in (0, 1)]
    printed = outputs(running, 600.0)
    if printed is None:
        raise SystemExit("the two processes did not finish within 600 s")
    if (problem := failure(running, printed)) is not None:
        raise SystemExit(problem)
    lines: list[dict[str, Any]] = json.loads(printed[0][0])
    for line in lines:
        line["seconds"] = {name: statistics.median(times) for name, times in line["times"].items()}
    return lines


def measure(orders: list[dict[str, Any]], rounds: int) -> list[dict[str, Any]]:
    lines = told_by_two(orders, rounds)
    if any(CONTENDERS[0] not in line["times"] for line in lines):
        raise SystemExit("two processes cannot share memory here")
    for line in lines:
        line.pop("bundle", None)
    return lines


def table(lines: Sequence[dict[str, Any]]) -> str:
    return markdown(
        ["part", "message", "shared memory", "over gloo", "gloo alone", ""], [cells_of(line) for line in lines]
    )


def cells_of(line: dict[str, Any]) -> list[str]:
    times = [line["seconds"][name] for name in CONTENDERS]
    size = f"{line['bytes'] >> 20} MiB" if line["bytes"] >= 1 << 20 else f"{line['bytes'] >> 10} KiB"
    if line["part"] == "pipeline":
        name, cells = f"{line['schedule']}, us per microbatch", [f"{t * 1e6:.0f}" for t in times]
    else:
        name, cells = "stream, GB/s", [f"{line['bytes'] / t / 1e9:.2f}" for t in times]
    return [name, size, *cells, f"{times[2] / times[0]:.2f} times as fast as gloo alone"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", choices=("pipeline", "stream"))
    parser.add_argument(
        "--sizes",
        type=int,
        nargs="+",
        default=list(SIZES),
        metavar="BYTES",
        help=f"of messages, multiples of {4 * WIDTH}",
    )
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES))
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="turns of each contender (default: 7)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    add_rank_arguments(parser)
    arguments = parser.parse_args()
    if run_rank(arguments, work):
        return
    if any(size <= 0 or size % (4 * WIDTH) for size in arguments.sizes):
        parser.error(f"sizes must be multiples of {4 * WIDTH}")
    orders: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        for size in arguments.sizes:
            for schedule in arguments.schedules if arguments.only != "stream" else ():
                bundle = write_bundle(Path(folder), size, schedule)
                batches = max(2, min(25, (64 << 20) // size))
                orders.append(
                    {"part": "pipeline", "schedule": schedule, "bytes": size, "count": batches, "bundle": str(bundle)}
                )
            if arguments.only != "pipeline":
                orders.append({"part": "stream", "bytes": size, "count": max(16, min(400, (512 << 20) // size))})
        lines = measure(orders, arguments.rounds)
    print(table(lines))
    write_json(arguments.json, {"lines": lines})


if __name__ == "__main__":
    main()
