"""The part of messages' time that a pipeline of two stages hides behind computations, over loopback and slow links.

    python benchmarks/overlap.py                            both: three minutes; links need root, iproute2 and tc
    python benchmarks/overlap.py --only loopback --json overlap.json

Two stages that really compute train under eager-2bw, the schedule for links on which a message takes up to a forward,
through the runtime's executor, store, transport and feed. Kernels are products of 256x256 matrices, as many as take a
chosen multiple of the time of one message: 1.25 of it forwards, 2.5 backwards. So computations take 3.75 times a
message, and the two messages of a microbatch twice a message.

    compute    the computations of both stages at once, without messages
    messages   the messages of the same schedule over gloo alone, without computations
    gloo       both, by torch.distributed's isend, irecv and wait in a plain loop
    over gloo  both, by the runtime, as between hosts
    shared     both, by the runtime, as on one host: through memory that the ranks share

hidden = 1 - (seconds of both - seconds of compute) / seconds of messages, per microbatch. It includes messages at the
ends of a turn, where the pipeline fills and drains, which cannot be hidden; `messages` are those over gloo for all
contenders. Over loopback messages are copied by the same cores that compute, so no contender can hide all of them. Slow
links are network namespaces behind a token bucket (benchmarks/namespaces.py). The same two cores carry their packets,
too: computations become slower, which counts against the sender. So there is a second figure for the runtime:

not waited for = 1 - seconds that receivers stood waiting after a message was sent / seconds of the messages by
themselves

Contenders take turns in the same two processes; figures are medians over turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from machine import write_json
from namespaces import Hosts, available
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from transport import CONTENDERS, TIMEOUT, Empty, Pipeline, turns, write_bundle

from penstock.ir.graph import Module
from penstock.ir.schedule import RECEIVES, SENDS, Action
from penstock.runtime.group.group import RankGroup
from penstock.runtime.launch.local import loopback_name, thread_environment
from penstock.runtime.worker.executor import Executor

SCHEDULE = "eager-2bw"
FORWARD, BACKWARD = 1.25, 2.5
_SIDE = 256
_PORT = 29511
# The rows: bytes of a message, and bytes per second of links, where they are not those of loopback.
ROWS = {"loopback": (16 << 20, None), "links": (1 << 20, 50e6)}


class Busy(Empty):
    """A stage program that keeps a core busy for a while."""

    def __init__(self, module: Module) -> None:
        super().__init__(module)
        self._left, self._right = torch.rand(_SIDE, _SIDE), torch.rand(_SIDE, _SIDE)
        self._into = torch.empty(_SIDE, _SIDE)
        # Products of a forward and of a backward.
        self.products = {"F": 0, "B": 0}

    def work(self, kind: str) -> None:
        for _ in range(self.products.get(kind, 0)):
            torch.mm(self._left, self._right, out=self._into)

    def call(self, graph: str, args: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        self.work(graph.partition(".")[2])
        return super().call(graph, args)


def message_seconds(size: int, rank: int) -> float:
    """Return the seconds of one message by itself: half of a round trip."""
    x, times = torch.zeros(size, dtype=torch.uint8), []
    for _ in range(6):
        begin = time.perf_counter()
        for turn in (0, 1):
            (dist.send if turn == rank else dist.recv)(x, 1 - rank)
        times.append((time.perf_counter() - begin) / 2)
    return statistics.median(times[1:])


def measure(size: int, bundle: str, group: RankGroup, rounds: int, batches: int) -> dict[str, Any]:
    rank = group.rank
    pipeline = Pipeline(Path(bundle), rank, group, Busy, trace=True)
    busy = pipeline.program
    assert isinstance(busy, Busy)
    # Both ranks do all of this at once: calibration is to see cores that compute on both sides.
    message, chunk = message_seconds(size, rank), 200
    busy.products["F"] = chunk
    seconds_per_product = []
    for _ in range(5):
        dist.barrier()
        begin = time.perf_counter()
        busy.work("F")
        seconds_per_product.append((time.perf_counter() - begin) / chunk)
    # The slower rank's, and the quickest of five: computations are rather too long than too short.
    slowest = torch.tensor([message, min(seconds_per_product)], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    message, product = slowest.tolist()
    busy.products = {"F": max(1, round(FORWARD * message / product)), "B": max(1, round(BACKWARD * message / product))}
    kinds = [a.kind for a in pipeline.schedule.expand(rank, batches) if a.kind in ("F", "B")]

    def compute(count: int) -> None:
        for kind in kinds:
            busy.work(kind)

    def run(executor: Executor, count: int) -> None:
        assert executor.events is not None
        assert executor.ledger is not None
        executor.events.clear()
        executor.ledger.taken()
        pipeline.run(executor, count)

    contenders: dict[str, Callable[[int], None]] = {
        "compute": compute,
        "messages": pipeline.run_gloo,
        **{name: partial(run, executor) for name, executor in pipeline.executors.items()},
        "gloo": lambda count: pipeline.run_gloo(count, busy.work),
    }
    per = batches * pipeline.schedule.microbatches
    times = {name: [t / per for t in part] for name, part in turns(contenders, batches, rounds).items()}
    seconds = {name: statistics.median(part) for name, part in times.items()}
    hidden = {
        name: 1 - (seconds[name] - seconds["compute"]) / seconds["messages"] for name in CONTENDERS if name in seconds
    }
    unawaited = {}
    for name, executor in pipeline.executors.items():
        # Of the last turn. The clock is the same in all processes.
        traces = [json.loads(part) for part in group.gather(f"events of {name}", json.dumps(executor.events).encode())]
        unawaited[name] = 1 - waited(traces) / (2 * per * message)
    return {
        "bytes": size,
        "message": message,
        "seconds": seconds,
        "hidden": hidden,
        "not_waited_for": unawaited,
        "times": times,
    }


def waited(traces: Sequence[Sequence[tuple[str, float, float]]]) -> float:
    """Return the seconds that receivers stood waiting for a message after it was sent."""
    sent: dict[tuple[str, int], float] = {}
    received: list[tuple[tuple[str, int], float, float]] = []
    for trace in traces:
        for text, start, end in trace:
            action = Action.parse(text)
            if action.kind in SENDS:
                sent[action.kind[1], action.mb] = start
            elif action.kind in RECEIVES:
                received.append(((action.kind[1], action.mb), start, end))
    return sum(max(0.0, end - max(start, sent[key])) for key, start, end in received)


def run_row(name: str, rounds: int, batches: int, folder: Path) -> dict[str, Any]:
    size, rate = ROWS[name]
    bundle = write_bundle(folder, size, SCHEDULE)
    words = ["--rank-of", name, "--bundle", str(bundle), "--rounds", str(rounds), "--batches", str(batches)]
    environment = os.environ | thread_environment(1)
    outs = [folder / f"{name}{rank}.txt" for rank in (0, 1)]
    running: list[subprocess.Popen[str]] = []

    def command(rank: int, address: str) -> list[str]:
        return [
            sys.executable,
            __file__,
            *words,
            "--rank",
            str(rank),
            "--address",
            address,
            "--report",
            str(folder / f"{name}.json"),
        ]

    def wait() -> None:
        try:
            for process, out in zip(running, outs, strict=True):
                if process.wait(600):
                    raise SystemExit(out.read_text(encoding="utf-8"))
        finally:
            for process in running:
                process.kill()
                process.wait()

    with outs[0].open("w") as first, outs[1].open("w") as second:
        if rate is None:
            environment["GLOO_SOCKET_IFNAME"] = loopback_name()
            for rank, out in enumerate((first, second)):
                running.append(
                    subprocess.Popen(command(rank, "127.0.0.1"), env=environment, stdout=out, stderr=out, text=True)
                )
            wait()
        else:
            environment["GLOO_SOCKET_IFNAME"] = "eth0"
            with Hosts(["first", "second"]) as hosts:
                hosts.shape(rate)
                for rank, out in enumerate((first, second)):
                    running.append(hosts.start(rank, command(rank, hosts.address(0)), environment, out))
                wait()
    result: dict[str, Any] = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    return {"row": name, "rate": rate, **result}


def table(lines: Sequence[dict[str, Any]]) -> str:
    names = " | ".join(f"{name} | hidden | not waited for" for name in ("over gloo", "shared"))
    rows = [f"| links | message | alone | compute | messages | gloo | hidden | {names} |", "| --- " * 13 + "|"]
    for line in lines:
        seconds = line["seconds"]
        cells = [
            "loopback" if line["rate"] is None else f"{line['rate'] / 1e6:.0f} MB/s",
            f"{line['bytes'] >> 20} MiB",
            f"{line['message'] * 1e3:.1f} ms",
            *(f"{seconds[name] * 1e3:.1f} ms" for name in ("compute", "messages")),
        ]
        for name in reversed(CONTENDERS):
            cells += [f"{seconds[name] * 1e3:.1f} ms", f"{line['hidden'][name]:.0%}"] if name in seconds else ["", ""]
            if name != "gloo":
                cells.append(f"{line['not_waited_for'][name]:.0%}" if name in seconds else "")
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", choices=tuple(ROWS))
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="turns of each contender (default: 5)")
    parser.add_argument(
        "--batches", type=int, default=6, metavar="N", help="batches per turn, of 8 microbatches (default: 6)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    for name in ("--rank", "--rank-of", "--address", "--bundle", "--report"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        rank, span = int(arguments.rank), timedelta(seconds=TIMEOUT)
        group = RankGroup(TCPStore(arguments.address, _PORT, 2, rank == 0, span), rank, 2, TIMEOUT)
        group.connect()
        result = measure(ROWS[arguments.rank_of][0], arguments.bundle, group, arguments.rounds, arguments.batches)
        if rank == 0:
            Path(arguments.report).write_text(json.dumps(result), encoding="utf-8")
        group.gather("end", b"")
        group.leave()
        return
    lines = []
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        for name in [arguments.only] if arguments.only else ROWS:
            if ROWS[name][1] is not None and (reason := available()):
                print(f"no slow links: {reason}", file=sys.stderr)
                continue
            lines.append(run_row(name, arguments.rounds, arguments.batches, Path(folder)))
    print(table(lines))
    write_json(arguments.json, {"lines": lines})


if __name__ == "__main__":
    main()
