"""Text of a bundle that generates: what a loaded model and a job have in common for it.

    for piece in model.generate("Once", tokens=64): ...
    for token in model.generate([1, 7, 2], tokens=64): ...          without a tokenizer

Several iterators may be open at once; only one of them computes at a time, and going from one to another costs time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from penstock.backends.bundle.format import Bundle
from penstock.runtime.generation.facts import FOLDER, GenerationFacts, read_facts
from penstock.runtime.generation.generator import GenerationOptions, Prompt, TextGenerator, TextPiece
from penstock.runtime.generation.text import read_codec
from penstock.runtime.generation.turn import PICKED
from penstock.support.errors import UsageError

# Computes a turn of so many rows.
Compute = Callable[[int, Mapping[str, np.ndarray]], Mapping[str, Any]]


def generator_of(bundle: Bundle, compute: Compute) -> TextGenerator:
    """Return the generator of a bundle. Raise UsageError where the bundle was not compiled to generate."""
    facts: GenerationFacts = read_facts(bundle.path)

    def decode(rung: int, inputs: dict[str, np.ndarray]) -> np.ndarray:
        return np.asarray(compute(rung, inputs)[PICKED])

    return TextGenerator(decode, facts, read_codec(bundle.path / FOLDER), str(bundle.path))


class GeneratesText:
    """The verbs of text, over `generator`."""

    @property
    def generator(self) -> TextGenerator:
        """The generator of the bundle, with the rates of what it computed."""
        raise NotImplementedError

    def generate(
        self,
        prompt: Prompt,
        tokens: int = 256,
        *,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
    ) -> Iterator[str] | Iterator[int]:
        """Continue a prompt by up to so many tokens. Yield its text in pieces as they come; the tokens, if the prompt
        is given as tokens.

        What is None is the model's own. Temperature 0 takes the likeliest token; else tokens are drawn by the seed and
        their position, so that a text is the same whatever is computed beside it.
        """
        return self.generator.generate(prompt, GenerationOptions(tokens, temperature, top_k, top_p, seed))

    def generate_many(
        self,
        prompts: Sequence[Prompt],
        tokens: int = 256,
        *,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
    ) -> Iterator[TextPiece]:
        """Continue several prompts together. Yield pieces as they come, each with the number of its prompt."""
        return self.generator.generate_many(prompts, GenerationOptions(tokens, temperature, top_k, top_p, seed))


class JobText(GeneratesText):
    """The verbs of text of a job whose only rank is its own process."""

    bundle: Bundle
    workers: Any
    _closed: bool

    @property
    def generator(self) -> TextGenerator:
        """The generator of the bundle, with the rates of what it computed."""
        if self._closed:
            raise UsageError("the job is closed")
        read_facts(self.bundle.path)
        generator: TextGenerator | None = getattr(self.workers, "generator", None)
        if generator is None:
            raise UsageError(
                "text is generated in the process of the job",
                where=str(self.bundle.path),
                hint="open the bundle without settings that need processes of their own",
            )
        return generator
