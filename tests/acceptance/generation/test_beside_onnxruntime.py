"""Texts behind prompts of 1 to 900 tokens through compiled code and caches are onnxruntime's, which runs the same file
with its own keys and values, and which computes whole sequences without any.

A text is compared up to the first position where the two largest logits are within 1e-4 of each other.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracles.caches.decoders import OnnxruntimeDecoder
from samples.decoders.grouped import WORDS, DecoderForm, write_decoder

import penstock as ps
from penstock.commands.parser import main

pytestmark = pytest.mark.slow

CONTEXT, SEQUENCES, TOKENS, NEAR = 1280, 4, 256, 1e-4
# Around the edges of rungs, and prompts of several turns.
LENGTHS = (1, 2, 3, 4, 5, 15, 16, 17, 63, 64, 65, 255, 256, 257, 512, 600, 900)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_decoder(tmp_path_factory.mktemp("long") / "model.onnx", DecoderForm(context=CONTEXT))


@pytest.fixture(scope="module")
def model(file: Path) -> Any:
    words = ["--generate", "--context", str(CONTEXT), "--sequences", str(SEQUENCES)]
    assert main(["compile", str(file), "-o", str(file.with_name("b")), *words]) == 0
    return ps.load(file.with_name("b"))


def until_tie(logits: np.ndarray) -> int:
    two = np.sort(logits, axis=-1)[:, -2:]
    return int(np.argmin(np.concatenate([two[:, 1] - two[:, 0] > NEAR, [False]])))


def test_texts_are_those_of_onnxruntime_with_and_without_a_cache(file: Path, model: Any) -> None:
    """The control is the text behind another prompt."""
    draw = np.random.default_rng(11)
    prompts = [draw.integers(0, WORDS, length).tolist() for length in LENGTHS]
    texts: list[list[int]] = [[] for _ in prompts]
    for piece in model.generate_many(prompts, tokens=TOKENS):
        texts[piece.prompt].append(piece.token)
    judge, compared, off = OnnxruntimeDecoder(file), 0, 0
    for prompt, text in zip(prompts, texts, strict=True):
        assert len(text) == TOKENS
        # What chose each token: the text itself, as one sequence, and piece by piece.
        sequence = prompt + text[:-1]
        whole = judge.logits(sequence, [len(sequence)])[len(prompt) - 1 :]
        piecewise = judge.logits(sequence, [len(prompt), *[1] * (TOKENS - 1)])[len(prompt) - 1 :]
        for logits in (whole, piecewise):
            until = until_tie(logits)
            assert text[:until] == logits.argmax(-1)[:until].tolist(), len(prompt)
            compared += until
        off += texts[-1][:until] != logits.argmax(-1)[:until].tolist()
    assert compared > TOKENS * len(prompts), "nearly all positions were ties"
    assert off >= len(prompts) - 1
