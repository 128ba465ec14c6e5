"""A training step of two replicas that share variables out, beside torch's FSDP2 and ZeroRedundancyOptimizer over gloo.

    python benchmarks/zero.py --bundles DIR                    all groups on two cores: about eight minutes
    python benchmarks/zero.py --bundles DIR --only parts --rounds 7 --json zero.json

    replicas    levels 0 and 1 of `--zero`, and DistributedDataParallel with ZeroRedundancyOptimizer
    parts       levels 2 and 3, and FSDP2 (`fully_shard` of each block), which keeps weights whole between forward and
                backward (`fsdp2-2`) or not (`fsdp2`)
    elsewhere   level 3 with `--offload state` into the host's memory, and FSDP2 with `CPUOffloadPolicy`
    updates     replicas whose weights a third process updates (`--update-on`), and the same of FSDP2

The model is a decoder like GPT-2 small: 12 blocks, 768 wide, 12 heads, with a vocabulary of 50,257 (`tiny` shows in a
minute that all of it runs, and `half` is 8 blocks of 512). All train it with AdamW in float32 from one set of weights, on two processes of one thread
each, one sequence of 128 tokens per process. The losses of the first steps are compared: exit code 1 where they differ.
Contenders of a group take turns of some steps each. The figure of a turn is its time per step, that of a contender the
median of its turns.

Memory is what a process holds at most, beyond what it held before it loaded anything; `predicted` is the plan's. State
is what of the optimiser's state a rank holds. Memory that two processes share counts for both of them.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import load, markdown, processor, system, versions, write_json
from tensor_parallel import RATE, Decoder
from torch import nn
from torch.nn import functional as F
from torch_ranks import TorchRanks

import penstock as ps
from penstock.ir.graph import STATE
from penstock.ir.memory.predict import measure_memory
from penstock.runtime.telemetry.resident import peak_bytes, resident_bytes

RANKS, TOLERANCE = 2, 2e-3
# Vocabulary, positions, width, heads, layers.
SIZES = {"gpt2": (50257, 128, 768, 12, 12), "half": (16384, 128, 512, 8, 8), "tiny": (64, 16, 32, 4, 2)}
GROUPS = {
    "replicas": ("level 0", "level 1", "zero redundancy"),
    "parts": ("level 2", "level 3", "fsdp2-2", "fsdp2"),
    "elsewhere": ("level 3, state elsewhere", "fsdp2, offloaded"),
    "updates": ("updates elsewhere", "fsdp2, updates on the CPU"),
}
# How Penstock's contenders are planned.
PLANS: dict[str, dict[str, Any]] = {
    **{f"level {level}": {"zero": level} for level in range(4)},
    "level 3, state elsewhere": {"zero": 3, "offload": "state", "spill": "/dev/shm/"},
    "updates elsewhere": {"update_on": f"cpu:{RANKS}", "devices": [[f"cpu:{rank}" for rank in range(RANKS)]]},
}


def make(model: str) -> nn.Module:
    torch.manual_seed(0)
    return Decoder(*SIZES[model])


def batch(model: str, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens and labels of a step, a sequence for each rank."""
    vocabulary, positions = SIZES[model][:2]
    tokens = np.random.default_rng(step).integers(0, vocabulary, (RANKS, positions + 1))
    return tokens[:, :-1].copy(), tokens[:, 1:].copy()


# ------------------------------------------------------------------------------------------------ torch


def fully_sharded(module: nn.Module, again: bool, offloaded: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return FSDP2's module, which gathers weights `again` for backward or keeps them, and its optimiser."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    mesh = init_device_mesh("cpu", (RANKS,))
    # Without CUDA no memory can be pinned.
    policy = CPUOffloadPolicy(pin_memory=False) if offloaded else OffloadPolicy()
    for block in module.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=again, offload_policy=policy)
    fully_shard(module, mesh=mesh, reshard_after_forward=again, offload_policy=policy)
    return module, torch.optim.AdamW(module.parameters(), lr=RATE, weight_decay=0.01)


def zero_redundancy(module: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a module whose gradients are summed in buckets, and an optimiser whose state is shared out."""
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    whole = DistributedDataParallel(module, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        whole.parameters(), optimizer_class=torch.optim.AdamW, lr=RATE, weight_decay=0.01
    )
    return whole, optimizer


WAYS: dict[str, Callable[[nn.Module], tuple[nn.Module, torch.optim.Optimizer]]] = {
    "zero redundancy": zero_redundancy,
    "fsdp2-2": partial(fully_sharded, again=False),
    "fsdp2": partial(fully_sharded, again=True),
    "fsdp2, offloaded": partial(fully_sharded, again=True, offloaded=True),
    "fsdp2, updates on the CPU": partial(fully_sharded, again=True, offloaded=True),
}


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of the optimiser's state on this rank."""
    inner = getattr(optimizer, "optim", optimizer)
    tensors = [x for state in inner.state.values() for x in state.values() if isinstance(x, torch.Tensor)]
    return sum(getattr(x, "_local_tensor", x).nbytes for x in tensors if x.dim())


def torch_rank(rank: int, port: int, way: str, model: str, calls: Any) -> None:
    """Train as one rank of torch: as many steps as each call says."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    dist.init_process_group("gloo")
    base = resident_bytes()
    module, optimizer = WAYS[way](make(model))
    gc.collect()
    step = 0
    while (count := calls.recv()) is not None:
        losses = []
        begin = time.perf_counter()
        for _ in range(count):
            tokens, labels = (torch.from_numpy(x[rank : rank + 1]) for x in batch(model, step))
            loss = F.cross_entropy(module(tokens).flatten(0, 1), labels.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            step += 1
        calls.send(((time.perf_counter() - begin) / count, losses, peak_bytes() - base, state_bytes(optimizer)))
    dist.destroy_process_group()


class TorchContender(TorchRanks):
    """Two processes of torch. Both are to be asked, as each knows the loss of its own sequence."""

    predicted = 0

    def __init__(self, way: str, model: str) -> None:
        super().__init__(torch_rank, RANKS, way, model)
        self.peak = self.state = 0

    def run(self, count: int) -> tuple[float, list[float]]:
        answers = self.ask(count)
        self.peak = max(answer[2] for answer in answers)
        self.state = max(answer[3] for answer in answers)
        return max(answer[0] for answer in answers), np.mean([answer[1] for answer in answers], axis=0).tolist()


# ------------------------------------------------------------------------------------------------ Penstock


def compiled(model: str, who: str, folder: Path) -> Path:
    """Return the bundle of a contender, compiled if it is not there."""
    bundle = folder / f"{model} {who}".replace(" ", "-").replace(",", "")
    if not bundle.exists():
        example = torch.from_numpy(batch(model, 0)[0][:1])
        training = ps.Training(loss="cross_entropy", optimizer=ps.AdamW(lr=RATE, weight_decay=0.01), microbatches=RANKS)
        source = ps.from_torch(make(model), (example,))
        options = {"stages": 1, **PLANS[who]}
        cluster = ps.Cluster.local(RANKS + ("update_on" in options))
        if "devices" in options:
            del options["stages"]
        plan = ps.plan(source, cluster, training, replicas=RANKS, **options)
        ps.compile(plan, bundle)
    return bundle


class PenstockContender:
    """A job of two replicas that share variables out."""

    def __init__(self, who: str, model: str, folder: Path) -> None:
        self.job, self.model, self.step, self.peak = ps.open(compiled(model, who, folder)), model, 0, 0
        module = self.job.module
        self.names = [value.name for value in module.data_inputs]
        self.predicted = max(row.peak for row in measure_memory(module).values())
        held = [module.local_type(var.type, 0).nbytes for var in module.vars.values() if var.role == STATE]
        self.state = sum(held)

    def run(self, count: int) -> tuple[float, list[float]]:
        steps = range(self.step, self.step + count)
        batches = [dict(zip(self.names, batch(self.model, step), strict=True)) for step in steps]
        self.step += count
        begin = time.perf_counter()
        losses = list(self.job.run(iter(batches)))
        seconds = (time.perf_counter() - begin) / count
        self.peak = max(peak - base for peak, base in zip(self.job.peak_bytes, self.job.base_bytes, strict=True))
        return seconds, losses

    def close(self) -> None:
        self.job.close()


# ------------------------------------------------------------------------------------------------ measuring


def opened(who: str, model: str, folder: Path) -> Any:
    return TorchContender(who, model) if who in WAYS else PenstockContender(who, model, folder)


def measure(group: str, model: str, rounds: int, steps: int, folder: Path) -> list[dict[str, Any]]:
    """Measure the contenders of a group; the first turn of each warms up and says its losses."""
    before, contenders = load(), dict[str, Any]()
    turns: dict[str, list[float]] = {who: [] for who in GROUPS[group]}
    try:
        for who in GROUPS[group]:
            contenders[who] = opened(who, model, folder)
        first = {who: contender.run(steps)[1] for who, contender in contenders.items()}
        for _ in range(rounds):
            for who, contender in contenders.items():
                turns[who].append(contender.run(steps)[0])
    finally:
        for contender in contenders.values():
            contender.close()
    leader = GROUPS[group][0]
    rows = []
    for who, contender in contenders.items():
        pairs = [mine / other for mine, other in zip(turns[who], turns[leader], strict=True)]
        error = max(abs(a - b) / abs(b) for a, b in zip(first[who], first[leader], strict=True))
        rows.append(
            {
                "group": group,
                "contender": who,
                "ms": 1e3 * statistics.median(turns[who]),
                "over_leader": statistics.median(pairs),
                "state": contender.state,
                "peak": contender.peak,
                "predicted": contender.predicted,
                "losses": first[who],
                "error": error,
                "turns": turns[who],
                "load": [before, load()],
            }
        )
    return rows


def table_of(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return the heads and lines of the table."""
    head = [
        "contender",
        "step ms",
        "of the first of its group",
        "state MiB",
        "peak MiB",
        "predicted / peak",
        "loss error",
    ]
    lines = [
        [
            row["contender"],
            f"{row['ms']:.0f}",
            f"{row['over_leader']:.2f}",
            f"{row['state'] / 2**20:.0f}",
            f"{row['peak'] / 2**20:.0f}",
            f"{row['predicted'] / row['peak']:.2f}" if row["predicted"] else "-",
            f"{row['error']:.0e}",
        ]
        for row in rows
    ]
    return head, lines


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=SIZES, default="gpt2")
    parser.add_argument("--only", nargs="*", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contender (default: 5)")
    parser.add_argument("--steps", type=int, default=3, help="steps of a turn (default: 3)")
    parser.add_argument("--bundles", type=Path, help="folder of bundles, which are compiled if they are not there")
    parser.add_argument("--compile", action="store_true", help="compile all bundles, and measure nothing")
    parser.add_argument("--json", type=Path, help="write all figures here, beside those of the other group")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.bundles or Path(temporary)
        if arguments.compile:
            for who in PLANS:
                compiled(arguments.model, who, folder)
            return 0
        rows = [
            row
            for group in arguments.only
            for row in measure(group, arguments.model, arguments.rounds, arguments.steps, folder)
        ]
    print(markdown(*table_of(rows)))
    if arguments.json:
        known = json.loads(arguments.json.read_text())["rows"] if arguments.json.exists() else []
        by_name = {row["contender"]: row for row in [*known, *rows]}
        facts = {
            "system": system(),
            "processor": processor(sorted(os.sched_getaffinity(0))),
            "versions": versions("penstock", "torch", "numpy", "apache-tvm"),
        }
        order = [who for group in GROUPS.values() for who in group]
        write_json(arguments.json, {"facts": facts, "rows": [by_name[who] for who in order if who in by_name]})
    return int(any(row["error"] > TOLERANCE for row in rows))


if __name__ == "__main__":
    sys.exit(main())
