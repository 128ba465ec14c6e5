"""Resume from a checkpoint under another plan.

Trains a small GPT on two stages, and keeps a checkpoint of every quarter. Then resumes from the middle under four
plans: the same one, three stages, zero-bubble 1F1B, and half as many microbatches of twice the size. Data, optimiser
and learning rate continue where they were.

Prints how far the losses of each plan are from those of the uninterrupted run, relative to them. Fails unless the same
plan repeats them bit for bit, and the others within 1e-4: they add up in another order.

Takes about a minute on two cores (README.md).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

import numpy as np

import penstock as ps
from penstock.models import write_gpt

VOCAB, POSITIONS, BATCH = 64, 32, 16
# Stages, schedule, and the number of microbatches in a batch.
PLANS = {
    "the same plan": (2, "1f1b", 4),
    "three stages": (3, "1f1b", 4),
    "zero-bubble": (2, "zb-1f1b", 4),
    "larger microbatches": (2, "gpipe", 2),
}


def write_data(path: Path, sequences: int) -> None:
    """Write sequences that count upwards from any number, each by its own step, with some noise."""
    random = np.random.default_rng(0)
    start, step = (random.integers(0, high, (sequences, 1)) for high in (VOCAB, 5))
    lines = start + step * np.arange(POSITIONS + 1) + (random.random((sequences, POSITIONS + 1)) < 0.1)
    lines %= VOCAB
    np.savez(path, tokens=lines[:, :-1], labels=lines[:, 1:])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, help="keep model, data, bundles and checkpoints in this folder (default: keep nothing)"
    )
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument(
        "--checkpoint", type=Path, help="go on from this one instead: of another step, losses differ, and this fails"
    )
    parser.add_argument(
        "--plans",
        nargs="+",
        choices=PLANS,
        default=list(PLANS),
        metavar="PLAN",
        help=f"of {', '.join(map(repr, PLANS))}",
    )
    parser.add_argument(
        "--backend",
        default="tvm",
        choices=("tvm", "numpy"),
        help="numpy interprets stages instead of compiling them: slow steps, at once",
    )
    return parser.parse_args()


def main() -> None:
    options = arguments()
    middle = options.steps // 2

    with tempfile.TemporaryDirectory() if options.out is None else nullcontext(options.out) as place:
        folder = Path(place)
        folder.mkdir(parents=True, exist_ok=True)
        write_data(folder / "data.npz", BATCH * (options.steps - middle // 2))  # the second epoch begins before the end
        write_gpt(
            folder / "gpt.onnx", layers=4, width=options.width, heads=4, vocab=VOCAB, positions=POSITIONS, batch=None
        )

        def compiled(name: str) -> Path:
            stages, schedule, microbatches = PLANS[name]
            model = ps.from_onnx(folder / "gpt.onnx", dims={"batch": BATCH // microbatches})
            rate = ps.Cosine(steps=options.steps, warmup=middle // 4)
            training = ps.Training("cross_entropy", ps.AdamW(lr=2e-3), microbatches, rate=rate, clip=1.0)
            plan = ps.plan(model, ps.Cluster.local(stages), training, schedule=schedule)
            return ps.compile(plan, folder / "bundles" / name.replace(" ", "-"), backend=options.backend)

        data = {"data": folder / "data.npz", "shuffle": True, "seed": 7}
        first = compiled("the same plan")
        whole = ps.run_bundle(
            first, steps=options.steps, checkpoint=folder / "checkpoints", checkpoint_every=middle // 2, **data
        )
        start = options.checkpoint or folder / "checkpoints" / f"step-{middle:06}"
        resumed = {}
        for name in options.plans:
            print(f"{name}: going on from {start.name}", file=sys.stderr)
            resumed[name] = ps.run_bundle(compiled(name), steps=options.steps - middle, resume=start, **data).losses

    expected = np.array(whole.losses[middle:])
    print(f"{options.steps} steps on two stages: loss {whole.losses[0]:.3f} -> {whole.losses[-1]:.3f}")
    print(f"largest difference of the last {len(expected)} losses")
    problems = []
    for name, losses in resumed.items():
        off = float((abs(np.array(losses) - expected) / expected).max())
        print(f"  {name:20} {off:.1e}")
        if off > (0 if name == "the same plan" else 1e-4):
            problems.append(name)
    if problems:
        sys.exit(f"losses are not those of the run that was not interrupted: {', '.join(problems)}")


if __name__ == "__main__":
    main()
