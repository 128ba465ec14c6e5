"""Fine-tune a BERT-like encoder from torch: plain torch modules, nothing downloaded.

Pre-trains the encoder on sentences without labels by guessing masked words, and returns its weights to torch. Puts a
classifier on top, and fine-tunes that on few labelled sentences with groups of parameters: embeddings frozen, the
encoder at a tenth of the head's learning rate. Then returns the weights to torch again.

Prints both losses and how many sentences of a held-out set torch classifies correctly. Fails unless all of this holds:
masked words are guessed better than by how frequent each word is, frozen embeddings are unchanged bit for bit, torch's
loss with these weights is Penstock's, and at least 90 % are right.

Takes about a minute on two cores (README.md).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

import penstock as ps

WORDS, LENGTH, TOPICS, OWN, HIDDEN, MASK = 100, 24, 4, 10, 4, 0
MICROBATCH, MICROBATCHES = 16, 2
BATCH = MICROBATCH * MICROBATCHES


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.qkv, self.merge = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        x = x + self.merge(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Encoder(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, width), nn.Parameter(0.02 * torch.randn(LENGTH, width))
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)

    def forward(self, words: Tensor) -> Tensor:
        return self.norm(self.blocks(self.words(words) + self.positions))


class MaskedWords(nn.Module):
    """A model that scores all words for those at `places`, [sentences, HIDDEN, WORDS]."""

    def __init__(self, encoder: Encoder, width: int) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(width, WORDS)

    def forward(self, words: Tensor, places: Tensor) -> Tensor:
        x = self.encoder(words)
        return self.head(x.gather(1, places[:, :, None].expand(-1, -1, x.shape[2])))


class Classifier(nn.Module):
    def __init__(self, encoder: Encoder, width: int) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(width, TOPICS)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.encoder(words).mean(1))


def sentences(count: int, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draw sentences and their topics: about every other word is one of the topic's, the others are any."""
    topics = random.integers(0, TOPICS, count)
    typical = 1 + topics[:, None] * OWN + random.integers(0, OWN, (count, LENGTH))
    return np.where(random.random((count, LENGTH)) < 0.5, typical, random.integers(1, WORDS, (count, LENGTH))), topics


def entropy(words: np.ndarray) -> float:
    """Compute the entropy of single words, in nats: the loss of a model that knows only how frequent each word is."""
    counts = np.bincount(words.ravel())
    shares = counts[counts > 0] / words.size
    return float(-(shares * np.log(shares)).sum())


def masked(random: np.random.Generator) -> dict[str, np.ndarray]:
    words, _ = sentences(BATCH, random)
    places = np.argsort(random.random((BATCH, LENGTH)), axis=1)[:, :HIDDEN]
    labels = np.take_along_axis(words, places, 1)
    np.put_along_axis(words, places, MASK, 1)
    return {"words": words, "places": places, "labels": labels}


def train(
    net: nn.Module,
    example: tuple[Tensor, ...],
    training: ps.Training,
    batches: Iterable[dict[str, np.ndarray]],
    folder: Path,
    backend: str,
) -> list[float]:
    """Train on two stages, return the weights to the module, and return the losses."""
    bundle = ps.compile(
        ps.plan(ps.from_torch(net, example), ps.Cluster.local(2), training), folder / "bundle", backend=backend
    )
    losses = []
    with ps.open(bundle) as job:
        for step in job.steps(batches):
            losses.append(step.loss)
            if step.step % 50 == 0:
                print(f"{folder.name}: step {step.step}  loss {step.loss:.3f}  lr {step.lr:.2e}", file=sys.stderr)
        job.save(folder / "checkpoints")
    ps.export(bundle, checkpoint=folder / "checkpoints", safetensors=folder / "weights.safetensors")
    net.load_state_dict(load_file(folder / "weights.safetensors"))
    return losses


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, help="keep bundles, checkpoints and weights in this folder (default: keep nothing)"
    )
    parser.add_argument("--steps", type=int, default=400, help="of pre-training; fine-tuning takes a quarter of them")
    parser.add_argument("--lr", type=float, default=2e-3, help="of pre-training")
    parser.add_argument("--labelled", type=int, default=256, help="sentences to fine-tune on")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
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
    random = np.random.default_rng(0)
    words = torch.ones(MICROBATCH, LENGTH, dtype=torch.long)

    with tempfile.TemporaryDirectory() if options.out is None else nullcontext(options.out) as place:
        encoder = Encoder(options.width, options.layers)
        steps = options.steps
        training = ps.Training(
            "cross_entropy", ps.AdamW(lr=options.lr), MICROBATCHES, rate=ps.Linear(steps=steps, warmup=steps // 20)
        )
        masks = (masked(random) for _ in range(steps))
        guesses = train(
            MaskedWords(encoder, options.width),
            (words, words[:, :HIDDEN]),
            training,
            masks,
            Path(place) / "pre-training",
            options.backend,
        )

        net, steps = Classifier(encoder, options.width), steps // 4
        before = encoder.words.weight.detach().clone()
        groups = (ps.Group(r"^encoder\.(words|positions)", frozen=True), ps.Group(r"^encoder\.", lr=0.1))
        training = ps.Training(
            "cross_entropy", ps.AdamW(lr=5e-3), MICROBATCHES, rate=ps.Linear(steps=steps), groups=groups
        )
        examples, topics = sentences(options.labelled, random)
        chosen = (random.integers(0, len(examples), BATCH) for _ in range(steps))
        labelled = ({"words": examples[rows], "labels": topics[rows]} for rows in chosen)
        losses = train(net, (words,), training, labelled, Path(place) / "fine-tuning", options.backend)

        # The loss of the next batch, before its update: with the weights that torch has.
        tests, wanted = sentences(1024, random)
        with ps.open(Path(place) / "fine-tuning" / "bundle", resume=Path(place) / "fine-tuning" / "checkpoints") as job:
            ours = job.step({"words": tests[:BATCH], "labels": wanted[:BATCH]})

    with torch.no_grad():
        scores = net(torch.from_numpy(tests))
    theirs = F.cross_entropy(scores[:BATCH], torch.from_numpy(wanted[:BATCH])).item()
    right = (scores.argmax(1).numpy() == wanted).mean()
    start, end, bound = np.mean(guesses[:10]), np.mean(guesses[-10:]), entropy(sentences(10000, random)[0])
    print(f"pre-training: loss of masked words {start:.3f} -> {end:.3f}, entropy of single words {bound:.3f}")
    print(f"fine-tuning: loss {losses[0]:.3f} -> {np.mean(losses[-10:]):.3f}")
    print(f"held-out batch: loss {ours:.6f}, by torch with these weights {theirs:.6f}")
    print(f"held-out sentences that torch classifies correctly: {right:.1%}")
    problems = {
        "pre-training learned no more than how frequent each word is": end >= bound,
        "frozen embeddings changed": not torch.equal(before, encoder.words.weight),
        "torch computes another loss with these weights": abs(ours - theirs) > 1e-4 * theirs,
        "fewer than 90 % are right": right < 0.9,
    }
    if any(problems.values()):
        sys.exit("; ".join(problem for problem, holds in problems.items() if holds))


if __name__ == "__main__":
    main()
