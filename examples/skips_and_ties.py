"""Train models with values that skip stages and weights on several stages: a U-Net, and an encoder-decoder like T5.

The U-Net removes noise from images. Values of the way down are used again on the way up, so they skip the stages in
between. The encoder-decoder reverses sequences. Every block of the decoder attends to the encoder's result. One
embedding is used by the encoder, the decoder and the scores, so each of these stages has a copy, and they exchange its
gradients. Neither model mentions stages: each is cut where that is cheapest.

Prints which values skip stages, which weights are on several, and both losses. Fails unless the first 20 losses of
three stages are those of torch within 1e-3, something skips a stage, and the losses fell by a third. torch trains on
the same batches in one process. Later losses are not compared: where a model learns quickly, roundings grow, and torch
is then as far from itself with weights that are changed by a ten-millionth.

Takes about a minute on two cores (README.md).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import penstock as ps

MICROBATCH, MICROBATCHES, STAGES, LR, COMPARED = 8, 4, 3, 2e-3, 20
BATCH = MICROBATCH * MICROBATCHES
SIZE, LENGTH, VOCAB, WIDTH = 16, 8, 32, 64


class UNet(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.enter, self.leave = nn.Conv2d(1, width, 3, padding=1), nn.Conv2d(2 * width, 1, 3, padding=1)
        self.down1, self.down2 = nn.Conv2d(width, 2 * width, 3, 2, 1), nn.Conv2d(2 * width, 4 * width, 3, 2, 1)
        self.norm1, self.norm2 = nn.GroupNorm(4, 2 * width), nn.GroupNorm(4, 4 * width)
        self.up2, self.up1 = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2), nn.ConvTranspose2d(4 * width, width, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        large = F.silu(self.enter(x))
        middle = F.silu(self.norm1(self.down1(large)))
        small = F.silu(self.norm2(self.down2(middle)))
        up = torch.cat([F.silu(self.up2(small)), middle], 1)
        return x - self.leave(torch.cat([F.silu(self.up1(up)), large], 1))


class Attention(nn.Module):
    def __init__(self, causal: bool = False) -> None:
        super().__init__()
        self.causal = causal
        self.q, self.kv, self.merge = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in (self.q(x), *self.kv(seen).chunk(2, -1)))
        return self.merge(F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A block of the encoder, or of the decoder, which also attends to the encoder's result."""

    def __init__(self, decodes: bool) -> None:
        super().__init__()
        self.own, self.cross = Attention(decodes), Attention() if decodes else None
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(3))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        y = self.norms[0](x)
        x = x + self.own(y, y)
        if self.cross is not None:
            x = x + self.cross(self.norms[1](x), seen)
        return x + self.down(F.relu(self.up(self.norms[2](x))))


class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared, self.place = nn.Embedding(VOCAB, WIDTH), nn.Parameter(0.1 * torch.randn(LENGTH, WIDTH))
        self.encoder = nn.ModuleList(Block(decodes=False) for _ in range(2))
        self.decoder = nn.ModuleList(Block(decodes=True) for _ in range(4))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        nn.init.normal_(self.shared.weight, std=WIDTH**-0.5)
        self.head.weight = self.shared.weight

    def forward(self, source: Tensor, shifted: Tensor) -> Tensor:
        seen, x = self.shared(source) + self.place, self.shared(shifted) + self.place
        for block in self.encoder:
            seen = block(seen, seen)
        for block in self.decoder:
            x = block(x, seen)
        return self.head(self.norm(x))


def noisy(random: np.random.Generator) -> dict[str, np.ndarray]:
    """Draw waves of any direction, and the same with noise."""
    u, v, shift = (random.uniform(low, high, (BATCH, 1, 1, 1)) for low, high in ((-0.8, 0.8), (-0.8, 0.8), (0, 6.3)))
    waves = np.sin(u * np.arange(SIZE)[:, None] + v * np.arange(SIZE) + shift)
    return {"x": (waves + random.normal(0, 0.7, waves.shape)).astype(np.float32), "labels": waves.astype(np.float32)}


def turned(random: np.random.Generator) -> dict[str, np.ndarray]:
    source = random.integers(1, VOCAB, (BATCH, LENGTH))
    labels = source[:, ::-1]
    return {"source": source, "shifted": np.pad(labels[:, :-1], ((0, 0), (1, 0))), "labels": labels}


@dataclass(frozen=True)
class Task:
    make: Callable[[], nn.Module]
    batch: Callable[[np.random.Generator], dict[str, np.ndarray]]
    loss: str


TASKS = {"unet": Task(UNet, noisy, "mse"), "encoder-decoder": Task(EncoderDecoder, turned, "cross_entropy")}


def train_in_torch(net: nn.Module, task: Task, batches: list[dict[str, np.ndarray]]) -> list[float]:
    optimizer, losses = torch.optim.AdamW(net.parameters(), lr=LR), []
    for batch in batches:
        *inputs, labels = map(torch.from_numpy, map(np.ascontiguousarray, batch.values()))
        result = net(*inputs)
        loss = (
            F.mse_loss(result, labels)
            if task.loss == "mse"
            else F.cross_entropy(result.flatten(0, 1), labels.flatten())
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="keep the bundles in this folder (default: keep nothing)")
    parser.add_argument(
        "--models", nargs="+", choices=TASKS, default=list(TASKS), metavar="MODEL", help=f"of {', '.join(TASKS)}"
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument(
        "--backend",
        default="tvm",
        choices=("tvm", "numpy"),
        help="numpy interprets stages instead of compiling them: slow steps, at once",
    )
    options = parser.parse_args()
    problems = []
    with tempfile.TemporaryDirectory() if options.out is None else nullcontext(options.out) as place:
        for name in options.models:
            task, random = TASKS[name], np.random.default_rng(0)
            torch.manual_seed(0)
            net, batches = task.make(), [task.batch(random) for _ in range(options.steps)]
            example = tuple(
                torch.from_numpy(np.ascontiguousarray(array[:MICROBATCH])) for array in list(batches[0].values())[:-1]
            )
            training = ps.Training(task.loss, ps.AdamW(lr=LR), MICROBATCHES)
            plan = ps.plan(ps.from_torch(net, example), ps.Cluster.local(STAGES), training)
            skips = [edge for edge in plan.module.edges if edge.phase == "F" and edge.dst - edge.src > 1]
            print(f"{name}: {STAGES} stages")
            for edge in skips:
                print(f"  from stage {edge.src} to stage {edge.dst}: {', '.join(map(str, edge.values))}")
            for note in plan.as_dict()["notes"]:
                if "is read on stages" in note:
                    print(f"  {note.removeprefix('partition: ')}")
            print(f"{name}: training", file=sys.stderr)
            with ps.open(ps.compile(plan, Path(place) / name, backend=options.backend)) as job:
                ours = np.array(list(job.run(batches)))
            theirs = np.array(train_in_torch(net, task, batches[:COMPARED]))
            off = (abs(ours[:COMPARED] - theirs) / theirs).max()
            start, end = ours[:5].mean(), ours[-5:].mean()
            print(f"  loss {start:.3f} -> {end:.3f}, the first {len(theirs)} at most {off:.1e} from torch's")
            wrong = {
                "losses are not torch's": off > 1e-3,
                "nothing skips a stage": not skips,
                "losses fell too little": end > start * 2 / 3,
            }
            problems += [f"{name}: {problem}" for problem, holds in wrong.items() if holds]
    if problems:
        sys.exit("; ".join(problems))


if __name__ == "__main__":
    main()
