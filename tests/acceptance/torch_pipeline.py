"""Torch's own Schedule1F1B, training the MLP of the acceptance tests in float64: an independent judge of 1f1b.

    python torch_pipeline.py WORLD PORT IN.npz OUT.npz

Each rank is a process; those behind the first are forked off once torch is imported, and the exit code is 0 if all of them ended well.

IN holds x, labels (one row per sample, all batches), the weights by name, and the settings; rank WORLD-1 writes the microbatch losses.
"""

from __future__ import annotations

import os
import sys
import traceback
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B


class Part(torch.nn.Module):
    """Some of the linear layers, with relu after each but the model's last."""

    def __init__(self, weights: list[torch.Tensor], biases: list[torch.Tensor], ends: bool) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(weights)
        self.biases = torch.nn.ParameterList(biases)
        self.ends = ends

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = x @ weight + bias
            if not (self.ends and i == len(self.weights) - 1):
                x = torch.relu(x)
        return x


def run(rank: int, world: int, port: int, source: str, target: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    data = np.load(source)
    m, layers, lr = int(data["microbatches"]), int(data["layers"]), float(data["lr"])
    names = ["y" if i == layers - 1 else f"fc{i + 1}" for i in range(layers)]
    mine = names[rank * layers // world : (rank + 1) * layers // world]
    part = Part(
        [torch.from_numpy(data[f"{n}.weight"]) for n in mine],
        [torch.from_numpy(data[f"{n}.bias"]) for n in mine],
        rank == world - 1,
    )
    stage = PipelineStage(part, rank, world, torch.device("cpu"))
    schedule = Schedule1F1B(stage, m, loss_fn=torch.nn.functional.cross_entropy, scale_grads=True)
    optimizer = torch.optim.SGD(part.parameters(), lr=lr)
    found: list[float] = []
    rows = int(data["rows"]) * m
    for start in range(0, len(data["x"]), rows):
        x, labels = (
            torch.from_numpy(data["x"][start : start + rows]),
            torch.from_numpy(data["labels"][start : start + rows]),
        )
        losses: list[torch.Tensor] = []
        optimizer.zero_grad()
        schedule.step(*([x] if rank == 0 else []), target=labels if rank == world - 1 else None, losses=losses)
        optimizer.step()
        found += [float(loss) for loss in losses]
    if rank == world - 1:
        np.savez(target, losses=np.array(found))
    dist.destroy_process_group()


def fork(rank: int, *given: Any) -> int:
    """A process that is one rank; its id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        run(rank, *given)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def main(world: int, port: int, source: str, target: str) -> int:
    others = [fork(rank, world, port, source, target) for rank in range(1, world)]
    run(0, world, port, source, target)
    return int(any(os.waitpid(child, 0)[1] for child in others))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]))
