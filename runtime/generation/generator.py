"""Text from prompts, in the thread of the caller: turns are planned, computed and answered one after the other.

    generator = TextGenerator(decode, facts, codec)
    for piece in generator.generate("Once", GenerationOptions(tokens=64)): ...

`decode` computes a turn: it takes a rung and the inputs by name, and returns the chosen tokens. Pieces come as soon as
a token is chosen; those of several prompts are told apart by their number. A text depends on its prompt, its settings
and its seed, and on nothing that is computed beside it.

Iterators of one generator share its caches, in one thread or several. One that goes on after another one computes its
tokens again, and chooses at least one more before the next one may. Taking turns costs time, and changes no text.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import SupportsIndex

import numpy as np

from penstock.support.errors import UsageError
from penstock.support.words import itemised

from .batcher import Batcher, ChosenToken
from .facts import GenerationFacts
from .text import TextCodec, TextStream
from .turn import Draw, TokenTurn

# Computes a turn of a rung: inputs by name, the token of each sequence.
Decode = Callable[[int, dict[str, np.ndarray]], np.ndarray]
Prompt = str | Sequence[int]

_MOST_SEED = 1 << 64
# Temperatures beyond these draw as these do, and their quotients are numbers of 32 bits.
_COLDEST, _HOTTEST = 1e-30, 1e30


@dataclass(frozen=True)
class GenerationOptions:
    """Settings of texts. What is None is the model's own. `tokens` is the most of each text."""

    tokens: int = 256
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def draw(self, facts: GenerationFacts) -> Draw:
        """Return how tokens are chosen, with the model's own where nothing else is said. Raise UsageError otherwise."""
        whole = {"tokens": self.tokens, "top_k": self.top_k or 0, "seed": self.seed}
        if broken := [f"{name} {value!r}" for name, value in whole.items() if not isinstance(value, SupportsIndex)]:
            raise UsageError(f"{', '.join(broken)}, expected whole numbers", where="generate")
        temperature = facts.temperature if self.temperature is None else float(self.temperature)
        top_k = facts.top_k if self.top_k is None else self.top_k
        top_p = facts.top_p if self.top_p is None else float(self.top_p)
        problems = [
            text
            for wrong, text in (
                (not 0 <= temperature < float("inf"), f"temperature {temperature}, expected 0 or more"),
                (not 0 <= top_k < 1 << 31, f"top_k {top_k}, expected 0 or more"),
                (not 0 < top_p <= 1, f"top_p {top_p}, expected more than 0 and at most 1"),
                (not 0 <= self.seed < _MOST_SEED, f"seed {self.seed}, expected 0 to 2^64-1"),
                (self.tokens < 1, f"tokens {self.tokens}, expected 1 or more"),
            )
            if wrong
        ]
        if problems:
            raise UsageError("; ".join(problems), where="generate")
        if temperature > 0:
            temperature = min(max(temperature, _COLDEST), _HOTTEST)
        return Draw(temperature, top_k, top_p, self.seed)


@dataclass(frozen=True)
class TextPiece:
    """A part of the text of a prompt: its number, what was added, the token, and why the text ended, if it did."""

    prompt: int
    text: str
    token: int
    ended: str = ""


@dataclass
class TextRates:
    """The work that was done, and the time it took: turns with rows of prompts, and turns of decoding alone."""

    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    tokens: int = 0
    seconds: float = 0.0
    turns: int = 0
    first_token_seconds: list[float] = field(default_factory=list)

    def lines(self) -> str:
        """Return the rates in words."""
        prompt = self.prompt_tokens / max(self.prompt_seconds, 1e-9)
        decode = f", {self.tokens / max(self.seconds, 1e-9):.1f} tokens/s" if self.seconds else ""
        return f"{self.prompt_tokens} tokens of prompts: {prompt:.1f} tokens/s; {self.tokens} tokens decoded{decode}"


class TextGenerator:
    """A decoder with its tokenizer. Any thread may call; one call computes at a time."""

    def __init__(self, decode: Decode, facts: GenerationFacts, codec: TextCodec | None, where: str) -> None:
        self.facts, self.codec, self.rates = facts, codec, TextRates()
        self.decode, self._where = decode, where
        self._lock = threading.Lock()
        # The batcher whose sequences lie in the caches.
        self._owner: Batcher | None = None

    def generate(self, prompt: Prompt, options: GenerationOptions) -> Iterator[str] | Iterator[int]:
        """Yield the text of a prompt in pieces, or its tokens if the prompt is given as tokens."""
        pieces = self.generate_many([prompt], options)
        if isinstance(prompt, str):
            return (piece.text for piece in pieces if piece.text)
        return (piece.token for piece in pieces if piece.ended != "stop")

    def generate_many(self, prompts: Sequence[Prompt], options: GenerationOptions) -> Iterator[TextPiece]:
        """Yield the texts of several prompts, piece by piece, as they come. All that does not fit is one error."""
        draw, facts = options.draw(self.facts), self.facts
        tokens = [self._tokens(prompt) for prompt in prompts]
        problems = [
            f"prompt {number + 1}: {problem}"
            for number, prompt in enumerate(tokens)
            if (problem := _problem(prompt, facts))
        ]
        if problems:
            raise UsageError(
                "prompts do not fit:" + itemised(problems),
                where=self._where,
                hint=f"the bundle has a context of {facts.context} tokens (compile --context)",
            )
        return self._texts(tokens, options.tokens, draw)

    def _tokens(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            return [index(token) for token in prompt]
        if self.codec is None:
            raise UsageError(
                "the bundle has no tokenizer", where=self._where, hint="give prompts as lists of token ids"
            )
        return self.codec.encode(prompt)

    def _texts(self, prompts: Sequence[Sequence[int]], most: int, draw: Draw) -> Iterator[TextPiece]:
        facts, limits = self.facts, self.facts.limits
        batcher = Batcher(limits)
        for prompt in prompts:
            batcher.add(prompt, min(most, facts.context - len(prompt)), draw, facts.ends)
        streams = [None if self.codec is None else TextStream(self.codec) for _ in prompts]
        began = time.monotonic()
        first: set[int] = set()
        while tokens := self._next(batcher):
            for chosen in tokens:
                if chosen.sequence not in first:
                    first.add(chosen.sequence)
                    self.rates.first_token_seconds.append(time.monotonic() - began)
                yield _piece(chosen, streams[chosen.sequence])

    def _next(self, batcher: Batcher) -> list[ChosenToken]:
        """Compute turns until tokens are chosen. Return them, none where all sequences ended."""
        with self._lock:
            if self._owner is not batcher:
                batcher.rewind()
                self._owner = batcher
            while (turn := batcher.plan()) is not None:
                if tokens := self._compute(batcher, turn):
                    return tokens
        return []

    def _compute(self, batcher: Batcher, turn: TokenTurn) -> list[ChosenToken]:
        """Compute a turn, and count it."""
        limits, began = batcher.limits, time.monotonic()
        count = min(turn.rung, limits.sequences)
        picked = self.decode(turn.rung, turn.arrays(count, limits.blocks_each))
        chosen = batcher.take(turn, picked.tolist())
        rates, seconds = self.rates, time.monotonic() - began
        rows = sum(len(share.tokens) for share in turn.shares if not share.chooses or len(share.tokens) > 1)
        rates.turns += 1
        if rows:
            rates.prompt_tokens += rows
            rates.prompt_seconds += seconds
        else:
            rates.tokens += len(chosen)
            rates.seconds += seconds
        return chosen


def _problem(prompt: Sequence[int], facts: GenerationFacts) -> str:
    """Return why a prompt cannot be continued, "" if it can."""
    if not prompt:
        return "has no tokens"
    if len(prompt) >= facts.context:
        return f"has {len(prompt)} tokens, which leaves none for its text"
    strange = [token for token in prompt if not 0 <= token < facts.words]
    return f"token {strange[0]} is not in 0..{facts.words - 1}" if strange else ""


def _piece(chosen: ChosenToken, stream: TextStream | None) -> TextPiece:
    if stream is None:
        return TextPiece(chosen.sequence, "", chosen.token, chosen.ended)
    text = "" if chosen.ended == "stop" else stream.put(chosen.token)
    if chosen.ended:
        text += stream.end()
    return TextPiece(chosen.sequence, text, chosen.token, chosen.ended)
