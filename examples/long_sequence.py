"""Train a sequence that no rank could hold: 32,768 positions, shared out by four ranks.

A small decoder in torch is trained for a few steps on one sequence, whose second half repeats the first. `preset:context`
splits its positions over ranks: each has a quarter of all activations, and keys and values go round for attention. The
system limits the private memory of every process (RLIMIT_DATA) to what a worker has when it starts, and --limit MiB
more.

Prints the losses and the memory that ranks took. Fails unless four ranks train under the limit, one device is stopped by
it, and without the limit has the same losses within 1e-5.

Takes about a minute and a half on two cores (README.md).
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

import penstock as ps

VOCAB, WIDTH, LAYERS = 64, 32, 2
MIB = 1 << 20


class Block(nn.Module):
    """A layer of a decoder with one head."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unsqueeze(1) for part in self.qkv(self.norm1(x)).split(WIDTH, 2))
        x = x + self.proj(scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1))
        return x + self.fc2(gelu(self.fc1(self.norm2(x))))


class Decoder(nn.Module):
    """A decoder of so many positions."""

    def __init__(self, positions: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(positions, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def write_bundle(positions: int, ranks: int, path: Path, backend: str) -> None:
    """Compile the decoder for so many ranks."""
    torch.manual_seed(0)
    model = ps.from_torch(Decoder(positions), (torch.zeros(1, positions, dtype=torch.int64),))
    training = ps.Training(loss="cross_entropy", optimizer=ps.AdamW(lr=1e-2), microbatches=1)
    split = {"mesh": f"cp={ranks}", "shard": "preset:context"} if ranks > 1 else {}
    ps.compile(ps.plan(model, ps.Cluster.local(ranks), training, **split), path, backend=backend)


def train(bundle: str, limit: int, steps: int) -> None:
    """Train under a limit of private memory, 0 for none, and print what came of it. In a process of its own, whose limit
    its workers inherit."""
    if limit:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    with ps.open(bundle, timeout=300) as job:
        first = job.workers.process_ids()[0]
        status = Path(f"/proc/{first}/status").read_text(encoding="ascii")
        match = re.search(r"VmData:\s+(\d+)", status)
        begun = int(match[1]) * 1024 if match else 0
        inputs = job.bundle.module.data_inputs
        half = np.random.default_rng(0).integers(0, VOCAB, inputs[0].type.dims[1] // 2)
        line = np.concatenate([half, half, half[:1]])[None]
        feed = [dict(zip([v.name for v in inputs], (line[:, :-1], line[:, 1:]), strict=True))] * steps
        losses = list(job.run(iter(feed)))
        taken = [peak - base for peak, base in zip(job.peak_bytes, job.base_bytes, strict=True)]
    print(json.dumps({"losses": losses, "begun": begun, "taken": taken}))


def run(bundle: Path, limit: int, steps: int) -> dict[str, Any] | str:
    """Train in a process of its own; return what it printed, or its error."""
    command = [sys.executable, __file__, "--train", str(bundle), str(limit), "--steps", str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="keep the bundles in this folder (default: keep nothing)")
    parser.add_argument("--positions", type=int, default=32768)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument(
        "--limit", type=int, default=160, metavar="MIB", help="memory beyond that at the start; 0: without a limit"
    )
    parser.add_argument(
        "--backend",
        default="tvm",
        choices=("tvm", "numpy"),
        help="numpy interprets stages instead of compiling them: slow steps, at once",
    )
    parser.add_argument("--train", nargs=2, metavar=("BUNDLE", "BYTES"), help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = arguments()
    if options.train:
        train(options.train[0], int(options.train[1]), options.steps)
        return
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() if options.out is None else nullcontext(options.out) as place:
        bundles = {ranks: Path(place) / f"{ranks}-ranks" for ranks in (options.ranks, 1)}
        for ranks, bundle in bundles.items():
            print(f"compiling for {ranks} ranks", file=sys.stderr)
            write_bundle(options.positions, ranks, bundle, options.backend)
        several, one = bundles[options.ranks], bundles[1]
        limit = 0
        if options.limit:
            started = run(several, 0, 0)
            if isinstance(started, str):
                sys.exit(started)
            limit = started["begun"] + options.limit * MIB
        shared, alone = run(several, limit, options.steps), run(one, 0, options.steps)
        if isinstance(shared, str) or isinstance(alone, str):
            sys.exit(f"training failed:\n{shared if isinstance(shared, str) else alone}")
        for name, result in ((f"{options.ranks} ranks", shared), ("one device, without a limit", alone)):
            taken = max(result["taken"]) / MIB
            print(f"{name}: losses {' '.join(f'{x:.6f}' for x in result['losses'])}, {taken:.0f} MiB each")
        if not np.allclose(shared["losses"], alone["losses"], rtol=1e-5):
            wrong.append("losses are not those of one device")
        if not shared["losses"][-1] < shared["losses"][0]:
            wrong.append("the loss did not fall")
        if options.limit:
            stopped = run(one, limit, options.steps)
            if isinstance(stopped, str) and "gave no more memory" in stopped:
                print(f"one device, under the same limit of {options.limit} MiB: the system gave no more memory")
            else:
                wrong.append(f"one device was not stopped by {options.limit} MiB")
    if wrong:
        sys.exit("; ".join(wrong))


if __name__ == "__main__":
    main()
