"""Long texts through compiled code and caches: the text of the model at once, and many turns of requests that come and
go.

The judge is transformers, which computes whole sequences without a cache. A text is compared up to the first position
where the two largest logits are within 1e-4 of each other.
"""

from __future__ import annotations

import random
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")

import torch
from samples.huggingface.folders import write_folder

import penstock as ps
from penstock.commands.parser import main
from penstock.runtime.generation.batcher import Batcher
from penstock.runtime.generation.generator import TextGenerator
from penstock.runtime.generation.turn import Draw

pytestmark = pytest.mark.slow

WORDS, CONTEXT, SEQUENCES = 512, 1280, 4
LENGTHS = (1, 5, 16, 63, 64, 257, 600, 900)
TOKENS = 256
NEAR = 1e-4
TURNS = 10_000


@pytest.fixture(scope="module")
def model_and_bundle(tmp_path_factory) -> tuple[Any, Path]:
    """A model of the form of GPT-2, compiled for a context of a thousand tokens."""
    folder, bundle = tmp_path_factory.mktemp("long") / "model", tmp_path_factory.mktemp("long") / "bundle"
    sizes = {"n_embd": 64, "n_head": 4, "n_positions": CONTEXT, "vocab_size": WORDS}
    model = write_folder(folder, "gpt2", **sizes)
    words = ["--generate", "--context", str(CONTEXT), "--sequences", str(SEQUENCES)]
    assert main(["compile", f"hf:{folder}", "-o", str(bundle), *words]) == 0
    return model, bundle


def differing(model: Any, prompt: list[int], text: list[int]) -> tuple[int, int]:
    """Return how many tokens were compared, and how many are not those of the model."""
    with torch.no_grad():
        logits = model(torch.tensor(prompt + text)[None]).logits[0].numpy()[len(prompt) - 1 : -1]
    two = np.sort(logits, axis=-1)[:, -2:]
    clear = np.concatenate([two[:, 1] - two[:, 0] > NEAR, [False]])
    until = int(np.argmin(clear))
    return until, int(np.sum(np.asarray(text[:until]) != logits.argmax(-1)[:until]))


def test_texts_of_256_tokens_behind_prompts_of_all_lengths(model_and_bundle):
    """Eight prompts, four at a time, in chunks of many sizes."""
    model, bundle = model_and_bundle
    draw = np.random.default_rng(7)
    prompts = [draw.integers(0, WORDS, length).tolist() for length in LENGTHS]
    texts: list[list[int]] = [[] for _ in prompts]
    for piece in ps.load(bundle).generate_many(prompts, tokens=TOKENS):
        texts[piece.prompt].append(piece.token)
    assert [len(text) for text in texts] == [TOKENS] * len(prompts)
    results = [differing(model, prompt, text) for prompt, text in zip(prompts, texts, strict=True)]
    assert sum(wrong for _, wrong in results) == 0
    assert sum(compared for compared, _ in results) > 0.5 * TOKENS * len(prompts), "nearly all positions were ties"
    # The control: a text behind the prompt of another one.
    assert sum(differing(model, prompt, texts[-1])[1] for prompt in prompts[:-1]) > 0


class Requests:
    """Requests that come and go at random in a batcher that never ends: sometimes one, sometimes more than fit, with
    short prompts and with long ones."""

    def __init__(self, generator: TextGenerator) -> None:
        self.generator, self.chance = generator, random.Random(3)
        self.batcher = Batcher(generator.facts.limits)
        self.prompts: dict[int, list[int]] = {}
        self.texts: dict[int, list[int]] = {}
        self.ended: list[int] = []
        self.rungs: Counter[int] = Counter()

    def arrive(self) -> None:
        """Add a request of a random prompt and length."""
        length = min(int(self.chance.expovariate(1 / self.chance.choice((8, 24, 200)))) + 1, 900)
        prompt = [self.chance.randrange(WORDS) for _ in range(length)]
        number = self.batcher.add(prompt, self.chance.randint(1, 40), Draw(), ())
        self.prompts[number], self.texts[number] = prompt, []

    def turns(self, count: int) -> Iterator[None]:
        """Compute so many turns."""
        most = 1
        for number in range(count):
            if number % 100 == 0:
                most = self.chance.choice((1, 2, SEQUENCES, 2 * SEQUENCES))
            while len(self.prompts) - len(self.ended) < self.chance.randint(1, most):
                self.arrive()
            turn = self.batcher.plan()
            assert turn is not None
            self.rungs[turn.rung] += 1
            limits = self.batcher.limits
            picked = self.generator.decode(turn.rung, turn.arrays(min(turn.rung, limits.sequences), limits.blocks_each))
            for chosen in self.batcher.take(turn, picked.tolist()):
                self.texts[chosen.sequence].append(chosen.token)
                if chosen.ended:
                    self.ended.append(chosen.sequence)
            yield


def resident() -> int:
    """Return the bytes of memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_ten_thousand_turns_compile_nothing(model_and_bundle, monkeypatch):
    """Every rung is used, memory stays as it was after a tenth of them, and the texts are those of the model."""
    model, bundle = model_and_bundle
    requests = Requests(ps.load(bundle).generator)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    early = 0
    for number, _ in enumerate(requests.turns(TURNS)):
        if number == TURNS // 10:
            early = resident()
    assert resident() - early < 16 << 20
    assert set(requests.rungs) == set(requests.generator.facts.rungs)
    assert len(requests.ended) > TURNS / 50
    chosen = random.Random(4).sample(requests.ended, 60)
    assert sum(differing(model, requests.prompts[n], requests.texts[n])[1] for n in chosen) == 0
