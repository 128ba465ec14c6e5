"""A Hugging Face model from its configuration, without a file and without a download: trained on two processes, and its weights taken back to torch.

python train_hugging_face.py [FOLDER]      leaves bundle, checkpoint and weights there (default: train-hugging-face-out); needs transformers
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel

import penstock as ps

VOCAB, LENGTH, MICROBATCH, MICROBATCHES = 32, 16, 8, 4


def batches(count: int, seed: int) -> Iterator[dict[str, np.ndarray]]:
    """Sequences that count upwards from anywhere, each by a step of its own; the label of a token is the next one."""
    random = np.random.default_rng(seed)
    for _ in range(count):
        start, step = (random.integers(0, high, (MICROBATCH * MICROBATCHES, 1)) for high in (VOCAB, 4))
        line = (start + step * np.arange(LENGTH + 1)) % VOCAB
        yield {"input_ids": line[:, :-1], "labels": line[:, 1:]}


def main() -> None:
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "train-hugging-face-out")
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCAB, n_positions=LENGTH, n_embd=64, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0, use_cache=False
    )
    net = GPT2LMHeadModel(config).eval()  # eval: dropout needs random numbers, which are not there yet
    example = {"input_ids": torch.zeros(MICROBATCH, LENGTH, dtype=torch.long)}

    model = ps.from_torch(net, kwargs=example)
    print("\n".join(model.imported.report))
    training = ps.Training(loss="cross_entropy", optimizer=ps.AdamW(lr=3e-3), microbatches=MICROBATCHES)
    bundle = ps.compile(ps.plan(model, ps.Cluster.local(2), training, schedule="1f1b"), out / "bundle")
    with ps.open(bundle) as job:
        losses = list(job.run(batches(150, seed=0)))
        print(f"150 steps: loss {np.mean(losses[:5]):.3f} -> {np.mean(losses[-5:]):.3f}")
        job.save(out / "checkpoint")

    ps.export(bundle, checkpoint=out / "checkpoint", safetensors=out / "weights.safetensors")
    net.load_state_dict(load_file(out / "weights.safetensors"), strict=False)
    batch = next(batches(1, seed=1))
    with torch.no_grad():
        guesses = net(torch.from_numpy(batch["input_ids"])).logits.argmax(-1).numpy()
    print(f"torch, with these weights: {(guesses == batch['labels'])[:, 4:].mean():.0%} of the next tokens are right")


if __name__ == "__main__":
    main()
