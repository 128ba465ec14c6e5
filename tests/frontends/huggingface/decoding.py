"""A folder as the frontend gives it, in the interpreter: the judge of families and of texts."""

from __future__ import annotations

from pathlib import Path

from oracles.caches.decoders import InterpretedDecoder

from penstock.frontends.huggingface import DecoderSizes, import_folder, open_folder


def interpreted(folder: Path, sizes: DecoderSizes, words: int) -> InterpretedDecoder:
    return InterpretedDecoder(import_folder(open_folder(folder), sizes), sizes, words, str(folder))
