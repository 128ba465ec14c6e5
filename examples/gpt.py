"""Pre-train a small GPT from an ONNX file on your own text, with PipeDream-2BW and with 1F1B.

Shows all steps: text as a file of tokens, a model file, a bundle of two stages, training with warm-up and a cosine,
clipping, a held-out text, metrics and checkpoints, and the trained weights back in the ONNX file. 2bw applies every
gradient one update late, so that its pipeline never drains. The same training under 1f1b, without that delay, is the
comparison.

Prints the held-out loss of both as they train, in nats per byte. Fails unless both get below the entropy of single
bytes, which is the loss of a model that knows only how frequent each byte is, and unless 2bw ends within 15 % of 1f1b.

Takes about two minutes on two cores (README.md).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

import numpy as np

import penstock as ps
from penstock.models import write_gpt

DOCS = Path(__file__).resolve().parents[1] / "docs"
MICROBATCH, MICROBATCHES = 4, 4


def write_tokens(text: bytes, folder: Path) -> None:
    """Write bytes as tokens of 16 bits, as larger vocabularies need: nine tenths to train on, one to evaluate on."""
    tokens = np.frombuffer(text, np.uint8).astype("<u2")
    at = len(tokens) * 9 // 10
    tokens[:at].tofile(folder / "train.bin")
    tokens[at:].tofile(folder / "held-out.bin")


def entropy(text: bytes) -> float:
    """Compute the entropy of single bytes, in nats."""
    counts = np.bincount(np.frombuffer(text, np.uint8))
    shares = counts[counts > 0] / len(text)
    return float(-(shares * np.log(shares)).sum())


def train(model: ps.Model, schedule: str, folder: Path, options: argparse.Namespace) -> dict[int, float]:
    """Train, and return held-out losses by the number of steps done."""
    training = ps.Training(
        loss="cross_entropy",
        optimizer=ps.AdamW(lr=options.lr),
        microbatches=MICROBATCHES,
        rate=ps.Cosine(steps=options.steps, warmup=options.steps // 5, end=0.1),
        groups=(ps.Group("bias|ln_", weight_decay=0.0),),
        clip=1.0,
    )
    plan = ps.plan(model, ps.Cluster.local(2), training, schedule=schedule)
    bundle = ps.compile(plan, folder / schedule / "bundle", backend=options.backend)
    metrics = folder / schedule / "metrics.jsonl"
    every = max(1, options.steps // 4)
    print(
        f"{schedule}: {options.steps} steps of {MICROBATCH * MICROBATCHES} sequences on two processes", file=sys.stderr
    )
    summary = ps.run_bundle(
        bundle,
        data=f"{folder / 'train.bin'}:u16",
        steps=options.steps,
        shuffle=True,
        metrics=metrics,
        checkpoint=folder / schedule / "checkpoints",
        checkpoint_every=every,
        keep_last=2,
        eval_data=f"{folder / 'held-out.bin'}:u16",
        eval_every=every,
    )
    print(f"{schedule}: {summary.samples_per_second:.0f} sequences per second")
    rows = map(json.loads, metrics.read_text().splitlines())
    return {row["step"] + 1: row["eval_loss"] for row in rows if "eval_loss" in row}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, help="keep model, bundles, metrics and checkpoints in this folder (default: keep nothing)"
    )
    parser.add_argument(
        "--text",
        type=Path,
        nargs="+",
        default=sorted(DOCS.glob("*.md")),
        help="default: the pages of Penstock's documentation",
    )
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--positions", type=int, default=64)
    parser.add_argument(
        "--backend",
        default="tvm",
        choices=("tvm", "numpy"),
        help="numpy interprets stages instead of compiling them: slow steps, at once",
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() if options.out is None else nullcontext(options.out) as place:
        folder = Path(place)
        folder.mkdir(parents=True, exist_ok=True)
        text = b"".join(path.read_bytes() for path in options.text)
        write_tokens(text, folder)
        sizes = {
            "layers": options.layers,
            "width": options.width,
            "heads": 4,
            "vocab": 256,
            "positions": options.positions,
        }
        model = ps.from_onnx(write_gpt(folder / "gpt.onnx", **sizes), dims={"batch": MICROBATCH})
        losses = {schedule: train(model, schedule, folder, options) for schedule in ("1f1b", "2bw")}
        ps.export(folder / "2bw" / "bundle", checkpoint=folder / "2bw" / "checkpoints", onnx=folder / "trained.onnx")

    print("steps   1f1b    2bw")
    for step, loss in losses["1f1b"].items():
        print(f"{step:5} {loss:6.3f} {losses['2bw'][step]:6.3f}")
    plain, late = (list(by_step.values())[-1] for by_step in losses.values())
    bound = entropy(text)
    print(f"entropy of single bytes: {bound:.3f}")
    problems = {
        "the model learned no more than how frequent each byte is: train for more --steps": max(plain, late) >= bound,
        f"2bw ended {late / plain - 1:.0%} above 1f1b: try a smaller --lr, or a longer warm-up": late > 1.15 * plain,
    }
    if any(problems.values()):
        sys.exit("; ".join(problem for problem, holds in problems.items() if holds))


if __name__ == "__main__":
    main()
