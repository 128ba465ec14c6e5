"""How a contender takes its turns: it says which processes it trains in, then sleeps on its standard input until it is told to run.

Protocol, one JSON object per line. Contender to coordinator, once it has warmed up: {"processes": {label: pid}, "about": {...}}.
Coordinator: {"run": STEPS}; answer {"losses": [...]}, one loss per optimiser step where the process knows them, after everything
the steps ask for is done. End of input ends the contender. Everything else a contender prints goes to its standard error.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import numpy as np


@dataclass(frozen=True)
class Shape:
    """The model, the data and the optimiser, the same for all contenders."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    vocab: int = 50257
    positions: int = 128
    microbatches: int = 4
    microbatch_samples: int = 2
    lr: float = 3e-4
    weight_decay: float = 0.01
    seed: int = 0
    # bf16: Penstock with --precision bf16, torch with autocast.
    precision: str = "f32"

    @property
    def tokens_per_step(self) -> int:
        return self.microbatches * self.microbatch_samples * self.positions

    @property
    def parameters(self) -> int:
        block = 12 * self.width * self.width + 13 * self.width
        return self.layers * block + (2 * self.vocab + self.positions + 2) * self.width

    @property
    def products_per_step(self) -> float:
        """Floating-point operations of matrix products with weights in a step, a multiplication and an addition being two: forwards the four of a
        block (3, 1, 4 and 4 times width x width) and the head; backwards twice as many, for operands and for weights."""
        multiply_adds = self.layers * 12 * self.width**2 + self.vocab * self.width
        return 3 * 2.0 * self.tokens_per_step * multiply_adds

    @property
    def attention_per_step(self) -> float:
        """Those of attention: scores and weighted sums forwards, twice as many backwards, of (positions + 1) / 2 positions that one sees on
        average. Scores that a contender computes again backwards, or computes and hides, are work of its own and do not count."""
        return 3 * 2.0 * self.tokens_per_step * self.layers * (self.positions + 1) * self.width

    @property
    def flops_per_step(self) -> float:
        """What is counted of a step. Left out are norms, softmax, gelu, the loss, embeddings and the optimiser: they are bound by memory."""
        return self.products_per_step + self.attention_per_step

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Shape:
        return Shape(**json.loads(text))


def batches(shape: Shape) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Random tokens [samples, positions] without end; the label of a position is the token after it."""
    random = np.random.default_rng(shape.seed)
    while True:
        tokens = random.integers(0, shape.vocab, (shape.microbatches * shape.microbatch_samples, shape.positions + 1))
        yield np.ascontiguousarray(tokens[:, :-1]), np.ascontiguousarray(tokens[:, 1:])


def serve(processes: dict[str, int], about: dict[str, object], run: Callable[[int], list[float]]) -> None:
    """Answer the coordinator until it hangs up."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print must not mix with the protocol
    print(json.dumps({"processes": processes, "about": about}), file=out, flush=True)
    for line in sys.stdin:
        steps = json.loads(line)["run"]
        print(json.dumps({"losses": run(steps)}), file=out, flush=True)
