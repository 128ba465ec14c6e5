"""A training step of tensors split over two processes, beside torch's `parallelize_module` over gloo.

    python benchmarks/tensor_parallel.py                       three models, two cores: about three minutes
    python benchmarks/tensor_parallel.py --only gpt --rounds 9 --json tensor_parallel.json

    mlp      four layers, 1,024 and 4,096 wide in turn, 256 samples
    gpt      two blocks of a decoder, 512 wide, 8 heads, 4 sequences of 128 tokens, vocabulary of 2,048
    tiny     one layer for the benchmark's own test; not measured by default
    swiglu   two gated blocks without attention, 768 and 2,048 wide, 512 tokens

Both read one torch module with one set of weights, train with AdamW in float32, on two processes of one thread each.
torch splits what its plan says: ColwiseParallel and RowwiseParallel for the linear layers of a block. Penstock is given
the same plan (`shard={...: "Colwise"}`). `one` and `two` are Penstock without a mesh, on one process of one thread and
of two. The losses of the first steps are compared: exit code 1 where they differ. Contenders take turns of some steps
each. The figure of a turn is its time per step, that of a contender the median of its turns.

`predicted` is the simulator's step over the measured one. Rates of devices and links are measured before (`penstock
doctor --devices 2`), or read from `--cluster`. With `--json` rows of other models that a file has are kept, so that
models can be measured one by one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import load, markdown, processor, system, versions, write_json
from torch import Tensor, nn
from torch.nn import functional as F
from torch_ranks import TorchRanks

import penstock as ps

RANKS, RATE = 2, 1e-3
TOLERANCE = 2e-3


class Mlp(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(F.relu(self.fc1(x)))


class Gated(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Block(nn.Module):
    """A block of a decoder. Its heads are as many as its products have columns for."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.size = width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.proj = (nn.Linear(width, width) for _ in range(4))
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, positions, _ = x.shape
        y = self.norm1(x)
        q, k, v = (p(y).view(batch, positions, -1, self.size).transpose(1, 2) for p in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, positions, -1))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x)), approximate="tanh"))


class Decoder(nn.Module):
    def __init__(self, vocabulary: int, positions: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(positions, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Stack(nn.Module):
    """Blocks, and a head for ten classes."""

    def __init__(self, blocks: list[nn.Module], width: int) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(blocks), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@dataclass(frozen=True)
class Case:
    """A model: how it is made, the shape of its inputs, the number of its classes, and its plan by module."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    classes: int
    whole_numbers: bool
    plan: dict[str, str]

    def batch(self, step: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(step)
        if self.whole_numbers:
            tokens = rng.integers(0, self.classes, (self.shape[0], self.shape[1] + 1))
            return {"tokens": tokens[:, :-1].copy(), "labels": tokens[:, 1:].copy()}
        x = rng.standard_normal(self.shape).astype(np.float32)
        return {"x": x, "labels": rng.integers(0, self.classes, self.shape[:1])}


def planned(count: int, columns: tuple[str, ...], rows: tuple[str, ...]) -> dict[str, str]:
    """Return the plan of so many blocks."""
    return {
        f"blocks.{i}.{name}": style
        for i in range(count)
        for names, style in ((columns, "Colwise"), (rows, "Rowwise"))
        for name in names
    }


CASES = {
    "mlp": Case(
        lambda: Stack([Mlp(1024, 4096) for _ in range(2)], 1024), (256, 1024), 10, False, planned(2, ("fc1",), ("fc2",))
    ),
    "gpt": Case(
        lambda: Decoder(2048, 128, 512, 8, 2), (4, 128), 2048, True, planned(2, ("q", "k", "v", "fc1"), ("proj", "fc2"))
    ),
    "tiny": Case(lambda: Stack([Mlp(32, 64)], 32), (16, 32), 10, False, planned(1, ("fc1",), ("fc2",))),
    "swiglu": Case(
        lambda: Stack([Gated(768, 2048) for _ in range(2)], 768),
        (512, 768),
        10,
        False,
        planned(2, ("gate", "up"), ("down",)),
    ),
}


def make(case: Case) -> nn.Module:
    torch.manual_seed(0)
    return case.make()


# ------------------------------------------------------------------------------------------------ torch


def torch_rank(rank: int, port: int, name: str, calls: Any) -> None:
    """Train as one rank of torch's tensor parallelism: as many steps as each call says."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    case = CASES[name]
    module = make(case)
    mesh = init_device_mesh("cpu", (RANKS,))
    styles = {"Colwise": ColwiseParallel, "Rowwise": RowwiseParallel}
    parallelize_module(module, mesh, {module_name: styles[style]() for module_name, style in case.plan.items()})
    optimizer = torch.optim.AdamW(module.parameters(), lr=RATE, weight_decay=0.01)
    step = 0
    while (count := calls.recv()) is not None:
        losses = []
        begin = time.perf_counter()
        for _ in range(count):
            batch = [torch.from_numpy(x) for x in case.batch(step).values()]
            logits = module(batch[0])
            loss = F.cross_entropy(logits.reshape(-1, case.classes), batch[1].reshape(-1))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            step += 1
        calls.send(((time.perf_counter() - begin) / count, losses))
    dist.destroy_process_group()


class TorchContender(TorchRanks):
    """Two processes of torch."""

    def __init__(self, name: str) -> None:
        super().__init__(torch_rank, RANKS, name)

    def run(self, count: int) -> tuple[float, list[float]]:
        answers = self.ask(count)
        return max(seconds for seconds, _ in answers), answers[0][1]


# ------------------------------------------------------------------------------------------------ Penstock


class PenstockContender:
    """A job on the devices of a cluster; `predicted` is the step that the simulator foresaw."""

    def __init__(self, case: Case, cluster: ps.Cluster, folder: Path) -> None:
        ranks = len(cluster.devices)
        example = torch.from_numpy(next(iter(case.batch(0).values())))
        model = ps.from_torch(make(case), (example,))
        training = ps.Training(loss="cross_entropy", optimizer=ps.AdamW(lr=RATE, weight_decay=0.01), microbatches=1)
        split: dict[str, Any] = {"mesh": f"tp={RANKS}", "shard": case.plan} if ranks > 1 else {}
        plan = ps.plan(model, cluster, training, **split)
        self.predicted = plan.predicted.step
        self.names = [value.name for value in plan.module.data_inputs]
        ps.compile(plan, folder)
        self.job, self.case, self.step, self.ranks = ps.open(folder), case, 0, ranks

    def run(self, count: int) -> tuple[float, list[float]]:
        batches = [self.case.batch(self.step + i) for i in range(count)]
        self.step += count
        begin = time.perf_counter()
        losses = list(self.job.run(self._named(batches)))
        return (time.perf_counter() - begin) / count, losses

    def _named(self, batches: list[dict[str, np.ndarray]]) -> Iterator[dict[str, np.ndarray]]:
        for batch in batches:
            yield dict(zip(self.names, batch.values(), strict=True))

    def close(self) -> None:
        self.job.close()


def measured_cluster() -> ps.Cluster:
    """Measure the devices of the split contenders, both at once."""
    from penstock.doctor.examine import examine

    report = examine(count=RANKS)
    assert report is not None, "the benchmark runs on one host"
    return report.cluster


def measure(name: str, rounds: int, steps: int, cluster: ps.Cluster) -> dict[str, Any]:
    """Measure one model; the first turn of each contender warms up and says its losses."""
    case, before = CASES[name], load()
    with tempfile.TemporaryDirectory() as folder:
        contenders: dict[str, Any] = {
            "torch": TorchContender(name),
            "penstock": PenstockContender(case, cluster, Path(folder) / "split"),
            "one": PenstockContender(case, replace(cluster, devices=cluster.devices[:1]), Path(folder) / "one"),
            "two": PenstockContender(case, ps.Cluster.local(1, threads=[RANKS]), Path(folder) / "two"),
        }
        try:
            first = {who: contender.run(steps)[1] for who, contender in contenders.items()}
            turns: dict[str, list[float]] = {who: [] for who in contenders}
            for _ in range(rounds):
                for who, contender in contenders.items():
                    turns[who].append(contender.run(steps)[0])
        finally:
            for contender in contenders.values():
                contender.close()
    error = max(abs(a - b) / abs(b) for who in first for a, b in zip(first[who], first["one"], strict=True))
    medians = {who: statistics.median(seconds) for who, seconds in turns.items()}
    pairs = [t / p for t, p in zip(turns["torch"], turns["penstock"], strict=True)]
    return {
        "model": name,
        "torch_ms": 1e3 * medians["torch"],
        "penstock_ms": 1e3 * medians["penstock"],
        "one_ms": 1e3 * medians["one"],
        "two_ms": 1e3 * medians["two"],
        "speedup": statistics.median(pairs),
        "over_one": medians["one"] / medians["penstock"],
        "over_two": medians["two"] / medians["penstock"],
        "predicted": contenders["penstock"].predicted / medians["penstock"],
        "predicted_one": contenders["one"].predicted / medians["one"],
        "error": error,
        "turns": turns,
        "load": [before, load()],
    }


def table_of(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return the heads and lines of the table."""
    head = [
        *("model", "torch ms", "penstock ms", "one thread ms", "two threads ms", "torch / penstock"),
        *("one thread / penstock", "two threads / penstock", "predicted / measured", "predicted / fastest turn"),
        "loss error",
    ]
    times, ratios = ("torch_ms", "penstock_ms", "one_ms", "two_ms"), ("speedup", "over_one", "over_two", "predicted")
    lines = [
        [
            row["model"],
            *(f"{row[key]:.1f}" for key in times),
            *(f"{row[key]:.2f}" for key in ratios),
            f"{row['predicted'] * row['penstock_ms'] / (1e3 * min(row['turns']['penstock'])):.2f}",
            f"{row['error']:.0e}",
        ]
        for row in rows
    ]
    return head, lines


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=CASES, default=[name for name in CASES if name != "tiny"])
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contender (default: 5)")
    parser.add_argument("--steps", type=int, default=6, help="steps of a turn (default: 6)")
    parser.add_argument("--cluster", type=Path, help="rates of two devices of this machine (default: measure them)")
    parser.add_argument("--json", type=Path, help="write all figures here, beside those of other models")
    arguments = parser.parse_args()
    cluster = ps.Cluster.load(arguments.cluster) if arguments.cluster else measured_cluster()
    rows = [measure(name, arguments.rounds, arguments.steps, cluster) for name in arguments.only]
    print(markdown(*table_of(rows)))
    if arguments.json:
        known = json.loads(arguments.json.read_text())["rows"] if arguments.json.exists() else []
        found = {row["model"]: row for row in [*known, *rows]}
        facts = {
            "system": system(),
            "processor": processor(sorted(os.sched_getaffinity(0))),
            "versions": versions("penstock", "torch", "numpy", "apache-tvm"),
        }
        write_json(arguments.json, {"facts": facts, "rows": [found[name] for name in CASES if name in found]})
    return int(any(row["error"] > TOLERANCE for row in rows))


if __name__ == "__main__":
    sys.exit(main())
