"""Text in pieces: joined they are what decoding at once gives, and none holds half a character."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

pytest.importorskip("tokenizers")

from samples.huggingface.folders import write_tokenizer

from penstock.runtime.generation.text import TextCodec, TextStream, read_codec
from penstock.support.errors import UsageError

# Blocks of characters with one to four bytes, and those that tokenizers treat specially.
_RANGES = ((0x20, 0x7F), (0xA0, 0x250), (0x370, 0x400), (0x4E00, 0x9FFF), (0x1F300, 0x1F700), (0x900, 0x980))
_SPECIAL = ("\n", "  ", "\t", "'s", " n't", "\u200d", "\u0301", "▁", "\ufeff", "\r\n", "<0x41>")


def drawn(seed: int) -> str:
    draw = random.Random(seed)
    pieces = []
    for _ in range(draw.choice([1, 3, 10, 30])):
        low, high = draw.choice(_RANGES)
        pieces.append(draw.choice(_SPECIAL) if draw.random() < 0.2 else chr(draw.randrange(low, high)))
    return "".join(pieces)


@pytest.fixture(scope="module", params=["bytes", "pieces"])
def codec(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    folder = tmp_path_factory.mktemp(request.param)
    write_tokenizer(folder, request.param)
    read = read_codec(folder)
    assert read is not None
    return read


def streamed(codec: TextCodec, tokens: list[int]) -> list[str]:
    stream = TextStream(codec)
    return [*(stream.put(token) for token in tokens), stream.end()]


def test_pieces_of_ten_thousand_strings_join(codec: TextCodec):
    for seed in range(10_000):
        text = drawn(seed)
        tokens = codec.encode(text)
        pieces = streamed(codec, tokens)
        assert "".join(pieces) == codec.decode(tokens), repr(text)
        assert not any("\ufffd" in piece for piece in pieces), repr(text)


def test_texts_beyond_the_window_join(codec: TextCodec):
    for seed in range(20):
        text = "".join(drawn(1000 * seed + i) for i in range(40))
        tokens = codec.encode(text)
        assert len(tokens) > 300
        assert "".join(streamed(codec, tokens)) == codec.decode(tokens)


def test_any_tokens_join(codec: TextCodec):
    """Also those that are no text: bytes that belong to no character."""
    draw = random.Random(3)
    for _ in range(300):
        tokens = [draw.randrange(codec.words) for _ in range(draw.choice([1, 5, 40, 250]))]
        assert "".join(streamed(codec, tokens)) == codec.decode(tokens)


def test_token_by_token_would_break_characters(codec: TextCodec):
    """The control."""
    tokens = codec.encode("你好 🙂 été")
    assert "".join(codec.decode([token]) for token in tokens) != codec.decode(tokens)


def test_a_text_comes_early(codec: TextCodec):
    """A piece is held back for no longer than its character."""
    tokens = codec.encode("the lazy dog jumps over the fox")
    pieces = streamed(codec, tokens)
    assert all(pieces[1:-1])
    assert pieces[-1] == ""


def test_a_tokenizer_that_is_none(tmp_path: Path):
    assert read_codec(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UsageError, match="the tokenizer cannot be read"):
        read_codec(tmp_path)
