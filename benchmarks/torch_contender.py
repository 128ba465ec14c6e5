"""The same GPT in plain torch: two pipeline ranks under Schedule1F1B over gloo, or one process with two threads.

Written in the form that is fastest for torch on a CPU: fused attention (scaled_dot_product_attention), fused AdamW, gradients dropped
rather than zeroed, float32 or autocast to bfloat16. The head is not tied to the embedding. First weights are those of the ONNX file that Penstock compiles.

    python torch_contender.py SHAPE_JSON MODEL.onnx pipeline WARMUP RANK PORT SPLIT         SPLIT: blocks on rank 0
    python torch_contender.py SHAPE_JSON MODEL.onnx whole|accumulated WARMUP THREADS        a batch at once, or in microbatches
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from turns import Shape, batches, serve


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        d = shape.width
        self.heads = shape.heads
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.projection = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, positions, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, positions, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(batch, positions, d))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Part(nn.Module):
    """Blocks `first` to `last` of the model, with the embedding in front of block 0 and the head behind the last one."""

    def __init__(self, shape: Shape, first: int, last: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab, shape.width) if first == 0 else None
        self.position = nn.Embedding(shape.positions, shape.width) if first == 0 else None
        self.blocks = nn.Sequential(*(Block(shape) for _ in range(first, last)))
        self.norm = nn.LayerNorm(shape.width) if last == shape.layers else None
        self.head = nn.Linear(shape.width, shape.vocab, bias=False) if last == shape.layers else None
        self.is_low = shape.precision == "bf16"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.is_low):
            return self.run(x)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        if self.embedding is not None and self.position is not None:
            x = self.embedding(x) + self.position.weight[: x.shape[1]]
        x = self.blocks(x)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def copy_weights(part: Part, first: int, path: Path) -> None:
    """Take over the initializers of the ONNX file. Its matrices are [in, out], torch's [out, in]."""
    import onnx
    from onnx import numpy_helper

    folder = str(path.parent)
    tensors = {t.name: t for t in onnx.load(str(path), load_external_data=False).graph.initializer}
    prefixes = {"embedding": "wte", "position": "wpe", "norm": "ln_f", "head": "lm_head"}
    modules = {"norm1": "ln_1", "norm2": "ln_2", "qkv": "attn.qkv", "projection": "attn.proj", "up": "mlp.fc", "down": "mlp.proj"}
    with torch.no_grad():
        for name, parameter in part.named_parameters():
            owner, *middle, kind = name.split(".")
            source = f"h.{first + int(middle[0])}.{modules[middle[1]]}" if owner == "blocks" else prefixes[owner]
            array = torch.tensor(numpy_helper.to_array(tensors[f"{source}.{kind}"], base_dir=folder))
            turned = kind == "weight" and parameter.dim() == 2 and owner not in ("embedding", "position")
            parameter.copy_(array.T if turned else array)


def optimizer_of(model: nn.Module, shape: Shape) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=shape.lr, weight_decay=shape.weight_decay, fused=True)


def train_alone(shape: Shape, model_file: Path, form: str, warmup: int, threads: int) -> None:
    torch.set_num_threads(threads)
    model = Part(shape, 0, shape.layers)
    copy_weights(model, 0, model_file)
    optimizer = optimizer_of(model, shape)
    data = batches(shape)
    pieces = 1 if form == "whole" else shape.microbatches

    def step() -> float:
        tokens, labels = map(torch.from_numpy, next(data))
        total = 0.0
        for x, y in zip(tokens.chunk(pieces), labels.chunk(pieces), strict=True):
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


def train_in_pipeline(shape: Shape, model_file: Path, warmup: int, rank: int, port: int, split: int) -> None:
    import torch.distributed as distributed
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    model = Part(shape, 0, split) if rank == 0 else Part(shape, split, shape.layers)
    copy_weights(model, 0 if rank == 0 else split, model_file)
    stage = PipelineStage(model, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, shape.microbatches, loss_fn=loss_of)
    optimizer = optimizer_of(model, shape)
    data = batches(shape)

    def step() -> float | None:
        tokens, labels = map(torch.from_numpy, next(data))
        losses: list[Any] = []
        if rank == 0:
            schedule.step(tokens)
        else:
            schedule.step(target=labels, losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        return sum(loss.item() for loss in losses) / len(losses) if losses else None

    def run(steps: int) -> list[float]:
        return [loss for loss in (step() for _ in range(steps)) if loss is not None]

    losses = run(warmup)
    serve({f"rank {rank}": os.getpid()}, {"blocks": f"{split}+{shape.layers - split}", "losses": losses}, run)
    distributed.destroy_process_group()


def main() -> None:
    shape, model_file, form, warmup, *rest = Shape.from_json(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), *sys.argv[5:]
    if form == "pipeline":
        train_in_pipeline(shape, model_file, warmup, *map(int, rest))
    else:
        train_alone(shape, model_file, form, warmup, *map(int, rest))


if __name__ == "__main__":
    main()
