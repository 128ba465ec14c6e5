"""Each family against transformers on random weights: logits within 1e-4 at three lengths, and 64 greedy tokens.

A text is compared up to the first position where the two largest logits are within 1e-4 of each other.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers")

import torch
from samples.huggingface.folders import FAMILIES, WORDS, write_folder

from penstock.frontends.huggingface import DecoderSizes
from penstock.frontends.huggingface import families as supported
from penstock.runtime.generation.generator import GenerationOptions

from .decoding import interpreted

LENGTHS = (1, 7, 21)
TOKENS = 64
NEAR = 1e-4
SIZES = DecoderSizes(context=96, sequences=3, rungs=(1, 4, 16), logits=True)


def test_every_family_is_tried():
    assert sorted(FAMILIES) == sorted(supported.FAMILIES)
    assert len(FAMILIES) >= 14


def whole(model: object, tokens: list[int]) -> np.ndarray:
    """The logits of every position, computed at once."""
    with torch.no_grad():
        return model(torch.tensor(tokens)[None]).logits[0].numpy()


QUICK = ("gemma2", "gpt2", "llama")


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in sorted(FAMILIES)]
)
def test_logits_and_text_equal_transformers(family: str, tmp_path: Path):
    model = write_folder(tmp_path, family)
    decoder = interpreted(tmp_path, SIZES, WORDS)
    rng = np.random.default_rng(5)
    prompts = [rng.integers(2, WORDS, length).tolist() for length in LENGTHS]
    for prompt in prompts:
        decoder.logits.clear()
        list(decoder.generator.generate(prompt, GenerationOptions(1)))
        np.testing.assert_allclose(decoder.logits[-1][0], whole(model, prompt)[-1], atol=1e-4, rtol=0)
    texts: list[list[int]] = [[] for _ in prompts]
    for piece in decoder.generator.generate_many(prompts, GenerationOptions(TOKENS)):
        texts[piece.prompt].append(piece.token)
    compared = 0
    for prompt, text in zip(prompts, texts, strict=True):
        assert len(text) == TOKENS
        logits = whole(model, prompt + text)[len(prompt) - 1 : -1]
        two = np.sort(logits, axis=-1)[:, -2:]
        clear = np.concatenate([two[:, 1] - two[:, 0] > NEAR, [False]])
        until = int(np.argmin(clear))
        compared += until
        assert text[:until] == logits.argmax(-1)[:until].tolist(), family
    assert compared > TOKENS, "nearly all positions were ties"


def test_another_text_is_noticed(tmp_path: Path):
    """The control: a window that is off by one gives other logits."""
    model = write_folder(tmp_path, "mistral", sliding_window=8)
    config = (tmp_path / "config.json").read_text().replace('"sliding_window": 8', '"sliding_window": 9')
    (tmp_path / "config.json").write_text(config)
    decoder = interpreted(tmp_path, SIZES, WORDS)
    prompt = np.random.default_rng(5).integers(2, WORDS, 21).tolist()
    list(decoder.generator.generate(prompt, GenerationOptions(1)))
    assert np.abs(decoder.logits[-1][0] - whole(model, prompt)[-1]).max() > 1e-3


def test_caches_of_16_bits_round_keys_and_values_alone(tmp_path: Path):
    """The control: caches of 32 bits are a hundred times as close."""
    model = write_folder(tmp_path, "llama")
    prompt = np.random.default_rng(5).integers(2, WORDS, 21).tolist()
    expected, worst = whole(model, prompt)[-1], {}
    for dtype in ("f32", "bf16"):
        decoder = interpreted(tmp_path, replace(SIZES, cache=dtype), WORDS)
        list(decoder.generator.generate(prompt, GenerationOptions(1)))
        worst[dtype] = np.abs(decoder.logits[-1][0] - expected).max() / np.ptp(expected)
    assert worst["bf16"] < 1e-2
    assert worst["f32"] < worst["bf16"] / 100
