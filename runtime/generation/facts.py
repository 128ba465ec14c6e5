"""The facts of a bundle about text: the sizes of turns, ends of a text, and how tokens are drawn by default.

It lies in the bundle as `generation/facts.json`, beside the files of the tokenizer.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from penstock.support.errors import UsageError, VerifyError

from .batcher import Limits
from .blocks import blocks_for

FOLDER, FACTS = "generation", "facts.json"


class GenerationFacts(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The content of `facts.json`.

    `rungs` are the rows of turns, `words` the tokens that the model knows, `ends` those that end a text. `temperature`,
    `top_k` and `top_p` are the model's own, if it has some.
    """

    context: int
    sequences: int
    rungs: tuple[int, ...]
    words: int
    ends: tuple[int, ...] = ()
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    @property
    def limits(self) -> Limits:
        each = blocks_for(self.context)
        return Limits(tuple(sorted(self.rungs)), self.sequences, self.sequences * each, each)

    def encode(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self, order="sorted"), indent=2) + b"\n"


def generates(bundle: Path) -> bool:
    """Return whether a folder is that of a bundle that generates text."""
    return (bundle / FOLDER / FACTS).is_file()


def read_facts(bundle: Path) -> GenerationFacts:
    """Read the facts of a bundle. Raise UsageError where it was not compiled to generate."""
    path = bundle / FOLDER / FACTS
    if not generates(bundle):
        raise UsageError(
            "the bundle does not generate text",
            where=str(bundle),
            hint="`penstock compile hf:FOLDER -o BUNDLE --generate` makes one that does, also of MODEL.onnx",
        )
    try:
        return msgspec.json.decode(path.read_bytes(), type=GenerationFacts)
    except msgspec.MsgspecError as error:
        raise VerifyError(str(error), where=str(path)) from error
