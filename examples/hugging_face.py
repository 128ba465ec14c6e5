"""Train a model of transformers, made from its configuration: no file, no download.

Imports a GPT-2 as a torch module, trains it on two stages with its dropout, and loads the weights back into the model
of transformers, which then continues sequences. Needs `pip install -e '.[models]'`; without transformers it says so and
ends with exit code 77.

Prints the losses, and how many tokens torch then guesses correctly. Fails unless at least 80 % are right.
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

import penstock as ps

CANNOT_RUN = 77
VOCAB, LENGTH, MICROBATCH, MICROBATCHES = 32, 16, 8, 4


def batches(count: int, seed: int) -> Iterator[dict[str, np.ndarray]]:
    """Draw sequences that count upwards from any number, each by its own step. The label of a token is the next one."""
    random = np.random.default_rng(seed)
    for _ in range(count):
        start, step = (random.integers(0, high, (MICROBATCH * MICROBATCHES, 1)) for high in (VOCAB, 4))
        line = (start + step * np.arange(LENGTH + 1)) % VOCAB
        yield {"input_ids": line[:, :-1], "labels": line[:, 1:]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, help="keep bundle, checkpoint and weights in this folder (default: keep nothing)"
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--backend",
        default="tvm",
        choices=("tvm", "numpy"),
        help="numpy interprets stages instead of compiling them: slow steps, at once",
    )
    options = parser.parse_args()
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError:
        print("needs transformers: pip install -e '.[models]'", file=sys.stderr)
        sys.exit(CANNOT_RUN)

    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "n_positions": LENGTH, "n_embd": 64, "n_layer": 4, "n_head": 4}
    net = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, use_cache=False)).train()
    model = ps.from_torch(net, kwargs={"input_ids": torch.zeros(MICROBATCH, LENGTH, dtype=torch.long)})
    print("\n".join(model.imported.report), file=sys.stderr)
    with tempfile.TemporaryDirectory() if options.out is None else nullcontext(options.out) as place:
        folder = Path(place)
        training = ps.Training("cross_entropy", ps.AdamW(lr=3e-3), MICROBATCHES)
        bundle = ps.compile(ps.plan(model, ps.Cluster.local(2), training), folder / "bundle", backend=options.backend)
        with ps.open(bundle) as job:
            losses = list(job.run(batches(options.steps, seed=0)))
            job.save(folder / "checkpoints")
        ps.export(bundle, checkpoint=folder / "checkpoints", safetensors=folder / "weights.safetensors")
        net.load_state_dict(load_file(folder / "weights.safetensors"), strict=False)

    batch = next(batches(1, seed=1))
    with torch.no_grad():
        guesses = net.eval()(torch.from_numpy(batch["input_ids"])).logits.argmax(-1).numpy()
    right = (guesses == batch["labels"])[:, 4:].mean()
    print(f"{options.steps} steps: loss {np.mean(losses[:5]):.3f} -> {np.mean(losses[-5:]):.3f}")
    print(f"transformers, with these weights: {right:.0%} of the next tokens are right")
    if right < 0.8:
        sys.exit("fewer than 80 % of the next tokens are right: train for more --steps")


if __name__ == "__main__":
    main()
