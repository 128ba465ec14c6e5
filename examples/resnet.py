"""Train a residual network on generated images, and evaluate it with its running statistics.

The network is a plain torch module with batch norms in training mode: their running statistics change with every
microbatch, on the stage that computes them. Afterwards the weights return to torch, `eval()` is called, and a second
bundle, for inference, classifies held-out images in a pipeline.

Prints the losses, and how many images are classified correctly: with the statistics of the training, and with fresh
ones for comparison. Fails unless at least 90 % are right, every batch norm has counted all microbatches, and torch
computes the same scores as the pipeline.

Takes about half a minute on two cores (README.md).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import penstock as ps

SIZE, SHAPES = 32, ("disc", "square", "cross", "ring")
MICROBATCH, MICROBATCHES = 16, 2
BATCH = MICROBATCH * MICROBATCHES


def images(count: int, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draw shapes of any colour and size, anywhere, in front of noise. Return the images and the shapes' numbers."""
    labels = random.integers(0, len(SHAPES), count)
    radius = random.uniform(5, 9, (count, 1, 1))
    place = random.uniform(9, SIZE - 9, (2, count, 1, 1))
    rows, columns = np.arange(SIZE)[None, :, None] - place[0], np.arange(SIZE)[None, None, :] - place[1]
    far, wide = np.hypot(rows, columns), np.maximum(abs(rows), abs(columns))
    thin = np.minimum(abs(rows), abs(columns))
    masks = np.stack(
        [
            far < radius,
            wide < 0.85 * radius,
            (wide < radius) & (thin < 0.3 * radius),
            (far < radius) & (far > 0.6 * radius),
        ]
    )
    mask = masks[labels, np.arange(count)][:, None]
    colour = random.uniform(0.5, 2.0, (count, 3, 1, 1))
    return (np.where(mask, colour, 0) + random.normal(0, 0.3, (count, 3, SIZE, SIZE))).astype(np.float32), labels


class Block(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after)
        self.conv2, self.norm2 = nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after)
        same = before == after and stride == 1
        self.short = (
            nn.Identity()
            if same
            else nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))
        )

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(y)) + self.short(x))


def resnet(width: int, blocks: int) -> nn.Sequential:
    """Build a network with three sizes of image and `blocks` blocks for each."""
    parts: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    for i in range(3):
        before, after = width * 2 ** max(0, i - 1), width * 2**i
        parts += [Block(before if j == 0 else after, after, 2 if i and j == 0 else 1) for j in range(blocks)]
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, len(SHAPES)))


def batches(count: int, random: np.random.Generator) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield arrays in the order of the bundle's inputs: images, then labels."""
    for _ in range(count):
        yield images(BATCH, random)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, help="keep bundles, checkpoint and weights in this folder (default: keep nothing)"
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--blocks", type=int, default=1, help="of each of three sizes of image")
    parser.add_argument(
        "--backend",
        default="tvm",
        choices=("tvm", "numpy"),
        help="numpy interprets stages instead of compiling them: slow steps, at once",
    )
    return parser.parse_args()


def main() -> None:
    options = arguments()
    torch.manual_seed(0)
    net, example = resnet(options.width, options.blocks), (torch.zeros(MICROBATCH, 3, SIZE, SIZE),)

    with tempfile.TemporaryDirectory() if options.out is None else nullcontext(options.out) as place:
        folder = Path(place)
        rate = ps.Cosine(steps=options.steps, warmup=options.steps // 10)
        training = ps.Training("cross_entropy", ps.AdamW(lr=options.lr), MICROBATCHES, rate=rate)
        bundle = ps.compile(
            ps.plan(ps.from_torch(net, example), ps.Cluster.local(2), training),
            folder / "training",
            backend=options.backend,
        )
        losses = []
        with ps.open(bundle) as job:
            for step in job.steps(batches(options.steps, np.random.default_rng(0))):
                losses.append(step.loss)
                if step.step % 25 == 0:
                    print(f"step {step.step}  loss {step.loss:.3f}", file=sys.stderr)
            job.save(folder / "checkpoints")
        ps.export(bundle, checkpoint=folder / "checkpoints", safetensors=folder / "weights.safetensors")
        net.load_state_dict(load_file(folder / "weights.safetensors"))

        tests, wanted = images(512, np.random.default_rng(1))
        serving = ps.compile(
            ps.plan(ps.from_torch(net.eval(), example), ps.Cluster.local(2)),
            folder / "inference",
            backend=options.backend,
        )
        with ps.open(serving) as job:
            scores = np.concatenate(
                [answer["output"] for answer in job.stream({"input": part} for part in np.split(tests, 16))]
            )

    with torch.no_grad():
        theirs = net(torch.from_numpy(tests)).numpy()
        norms = [module for module in net.modules() if isinstance(module, nn.BatchNorm2d)]
        counted = {int(norm.num_batches_tracked) for norm in norms}
        for norm in norms:
            norm.reset_running_stats()
        fresh = net(torch.from_numpy(tests)).numpy()
    right, unmoved = ((rows.argmax(1) == wanted).mean() for rows in (scores, fresh))
    off = abs(scores - theirs).max() / abs(theirs).max()
    print(f"{options.steps} steps of {BATCH} images: loss {np.mean(losses[:5]):.3f} -> {np.mean(losses[-5:]):.3f}")
    print(f"held-out images classified correctly: {right:.1%}; with fresh statistics: {unmoved:.1%}")
    print(
        f"{len(norms)} batch norms have counted {counted} microbatches; "
        f"the pipeline's scores are torch's within {off:.1e}"
    )
    problems = {
        "fewer than 90 % are right: train for more --steps": right < 0.9,
        "batch norms did not count all microbatches": counted != {options.steps * MICROBATCHES},
        "torch computes other scores with these weights": off > 1e-4,
    }
    if any(problems.values()):
        sys.exit("; ".join(problem for problem, holds in problems.items() if holds))


if __name__ == "__main__":
    main()
