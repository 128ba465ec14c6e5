"""The same model in plain torch: two pipeline ranks over gloo under a torch schedule, or one process with two threads.

It has the form that is fastest for torch on a CPU: fused attention (scaled_dot_product_attention), fused optimisers,
gradients dropped rather than zeroed, float32 or autocast to bfloat16. First weights are those of the ONNX file that
Penstock compiles. Schedules are those of torch.distributed.pipelining.

    python torch_contender.py SHAPE_JSON MODEL.onnx SCHEDULE WARMUP RANK PORT  a rank; SCHEDULE is one of SCHEDULES
    python torch_contender.py SHAPE_JSON MODEL.onnx whole|accumulated WARMUP THREADS
        a batch at once, or in microbatches

The first rank of a pipeline measures where to cut it: a microbatch forward and backward and a share of the update,
piece by piece, on one thread. The cut with the least time of the busiest rank counts.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch_models import build
from training_shape import MOMENTUM, Shape, batches
from turns import serve

# Name of the class, and stages on each of the two ranks.
SCHEDULES = {
    "1f1b": ("Schedule1F1B", 1),
    "gpipe": ("ScheduleGPipe", 1),
    "interleaved-zb": ("ScheduleInterleavedZeroBubble", 2),
    "interleaved": ("ScheduleInterleaved1F1B", 2),
    "zb-v": ("ScheduleZBVZeroBubble", 2),
}
RANKS = 2
# The first one warms up.
TRIES = 2


class Stage(nn.Module):
    """Some pieces of the model, one after the other, at the precision of the shape."""

    def __init__(self, pieces: Sequence[nn.Module], shape: Shape) -> None:
        super().__init__()
        self.pieces, self.is_low = nn.Sequential(*pieces), shape.precision == "bf16"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.is_low):
            return self.pieces(x)


def loss_of(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Compute the loss of a result for each sample, or for each position of each sample."""
    return F.cross_entropy(outputs.flatten(0, -2).float(), labels.flatten())


def pieces_of(shape: Shape, model_file: Path) -> list[nn.Module]:
    return build(shape.model, shape.sizes, model_file).pieces()


def optimizer_of(parameters: Sequence[nn.Parameter], shape: Shape) -> torch.optim.Optimizer:
    if shape.has_images:
        return torch.optim.SGD(parameters, shape.lr, MOMENTUM, weight_decay=shape.weight_decay, fused=True)
    return torch.optim.AdamW(parameters, lr=shape.lr, weight_decay=shape.weight_decay, fused=True)


def train_alone(shape: Shape, model_file: Path, form: str, warmup: int, threads: int) -> None:
    torch.set_num_threads(threads)
    model = Stage(pieces_of(shape, model_file), shape)
    optimizer = optimizer_of(list(model.parameters()), shape)
    data = batches(shape)
    pieces = 1 if form == "whole" else shape.microbatches

    def step() -> float:
        inputs, labels = map(torch.from_numpy, next(data))
        total = 0.0
        for x, y in zip(inputs.chunk(pieces), labels.chunk(pieces), strict=True):
            loss = loss_of(model(x), y) / pieces
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        return total

    def run(steps: int) -> list[float]:
        return [step() for _ in range(steps)]

    losses = run(warmup)
    serve({"process": os.getpid()}, {"form": form, "losses": losses}, run)


# ------------------------------------------------------------------------------------------------ pipelines


def time_pieces(pieces: Sequence[nn.Module], shape: Shape) -> list[float]:
    """Return seconds of a microbatch in each piece, forward and backward, with its share of the update.

    Weights and gradients stay as they are.
    """
    x, labels = (torch.from_numpy(array)[: shape.microbatch_samples] for array in next(batches(shape)))
    seconds = []
    for piece in pieces:
        stage, times = Stage([piece], shape), []
        for _ in range(TRIES):
            leaf = x.detach().requires_grad_(x.is_floating_point())
            begin = time.perf_counter()
            result = stage(leaf)
            (loss_of(result, labels) if piece is pieces[-1] else result.sum()).backward()
            times.append(time.perf_counter() - begin)
        # On copies: the update is timed, not done.
        weights = [nn.Parameter(p.detach().clone()) for p in stage.parameters()]
        for weight, p in zip(weights, stage.parameters(), strict=True):
            weight.grad, p.grad = p.grad, None
        optimizer = optimizer_of(weights, shape)
        optimizer.step()
        begin = time.perf_counter()
        optimizer.step()
        seconds.append(min(times) + (time.perf_counter() - begin) / shape.microbatches)
        x = result.detach()
    return seconds


def best_cut(seconds: Sequence[float], ranks: Sequence[Sequence[int]]) -> list[int]:
    """Choose the beginnings of stages and the end of the last one. `ranks` are the stages of each.

    The busiest rank has as little to do as possible, then the longest stage.
    """

    def cost(cut: Sequence[int]) -> tuple[float, float]:
        parts = [sum(seconds[a:b]) for a, b in pairwise(cut)]
        return max(sum(parts[i] for i in of_rank) for of_rank in ranks), max(parts)

    return list(
        min(
            ((0, *inner, len(seconds)) for inner in combinations(range(1, len(seconds)), sum(map(len, ranks)) - 1)),
            key=cost,
        )
    )


def _stages_of(schedule_name: str, rank: int) -> list[int]:
    """Return the stages of a rank: dealt round, or under zb-v down and up again."""
    per_rank = SCHEDULES[schedule_name][1]
    if schedule_name == "zb-v":
        return [rank, 2 * RANKS - 1 - rank]
    return list(range(rank, per_rank * RANKS, RANKS))


def train_in_pipeline(shape: Shape, model_file: Path, schedule_name: str, warmup: int, rank: int, port: int) -> None:
    import torch.distributed as distributed
    from torch.distributed import pipelining
    from torch.distributed.pipelining import schedules

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    name, per_rank = SCHEDULES[schedule_name]
    count = per_rank * RANKS
    pieces = pieces_of(shape, model_file)
    ranks = [_stages_of(schedule_name, other) for other in range(RANKS)]
    shared: list[Any] = [best_cut(time_pieces(pieces, shape), ranks) if rank == 0 else None]
    distributed.broadcast_object_list(shared)
    cut: list[int] = shared[0]
    stages = [
        pipelining.PipelineStage(Stage(pieces[cut[i] : cut[i + 1]], shape), i, count, torch.device("cpu"))
        for i in _stages_of(schedule_name, rank)
    ]
    del pieces
    kind = getattr(schedules, name)
    schedule = kind(stages[0] if per_rank == 1 else stages, shape.microbatches, loss_fn=loss_of)
    optimizer = optimizer_of([p for stage in stages for p in stage.submod.parameters()], shape)
    data = batches(shape)

    def step() -> float | None:
        inputs, labels = map(torch.from_numpy, next(data))
        losses: list[Any] = []
        fed = (inputs,) if stages[0].is_first else ()
        judged = {"target": labels, "losses": losses} if stages[-1].is_last else {}
        schedule.step(*fed, **judged)
        optimizer.step()
        optimizer.zero_grad()
        return sum(loss.item() for loss in losses) / len(losses) if losses else None

    def run(steps: int) -> list[float]:
        return [loss for loss in (step() for _ in range(steps)) if loss is not None]

    losses = run(warmup)
    pieces_each = "+".join(str(b - a) for a, b in pairwise(cut))
    serve({f"rank {rank}": os.getpid()}, {"pieces": pieces_each, "losses": losses}, run)
    distributed.destroy_process_group()


def main() -> None:
    shape, model_file, form, warmup, *numbers = (
        Shape.from_json(sys.argv[1]),
        Path(sys.argv[2]),
        sys.argv[3],
        int(sys.argv[4]),
        *sys.argv[5:],
    )
    if form in SCHEDULES:
        train_in_pipeline(shape, model_file, form, warmup, *map(int, numbers))
    else:
        train_alone(shape, model_file, form, warmup, *map(int, numbers))


if __name__ == "__main__":
    main()
