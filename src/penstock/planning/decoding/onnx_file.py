"""Decoders of ONNX files: a model for each number of tokens of a turn, with what the files beside it say of text.

genai_config.json                      as onnxruntime-genai writes it: names of inputs, context, ends, draws
generation_config.json, config.json    as for folders of Hugging Face; genai_config.json counts more
tokenizer.json, ...                    what travels with the bundle (frontends/side_files.py)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.frontends.decoder_sizes import DecoderSizes
from penstock.frontends.side_files import CONFIG, GENERATION, read_settings, texts_beside
from penstock.planning.model import Model
from penstock.planning.options import GenerationSettings
from penstock.planning.watching import SILENT, Feedback
from penstock.support.errors import UsageError

from .folder import NOT_FOLLOWED, context_of, facts_of, rungs_for, with_texts

GENAI = "genai_config.json"
_DRAWS = ("do_sample", "temperature", "top_k", "top_p")
# The names of inputs and the output by what genai_config.json calls them.
_NAMES = {"input_ids": "tokens", "attention_mask": "mask", "position_ids": "positions", "logits": "logits"}


@dataclass(frozen=True)
class _Beside:
    """The settings beside a file. `longest` is the context that they name, `config` and `generation` as for folders."""

    names: Mapping[str, str]
    longest: int | None
    config: Mapping[str, Any]
    generation: Mapping[str, Any]


def load_onnx_decoder(path: str, settings: GenerationSettings, feedback: Feedback = SILENT) -> dict[int, Model]:
    """Import a file. Return the model for each number of tokens of a turn, the smallest first."""
    from penstock.frontends.onnx.decoding import DecoderNames, import_decoder, open_decoder  # lazy: heavy

    with feedback.step("import") as said:
        root = Path(path).parent
        beside = _read_beside(root)
        decoder = open_decoder(path, DecoderNames(**beside.names))
        longest = min((size for size in (beside.longest, decoder.longest) if size is not None), default=None)
        context = context_of(settings, longest, path)
        rungs = rungs_for(context, settings.sequences)
        sizes = DecoderSizes(context, settings.sequences, rungs, settings.logits, settings.cache)
        imported = import_decoder(replace(decoder, longest=longest), sizes)
        largest = imported[rungs[-1]]
        config = {**beside.config, "vocab_size": decoder.words}
        facts = facts_of(config, beside.generation, context, settings.sequences, rungs, largest.module)
        attachments, notes = with_texts(texts_beside(root), facts, beside.generation, str(root))
        lines = (*largest.report, *notes)
        said += lines
        return {rung: Model(replace(one, attachments=attachments, report=lines)) for rung, one in imported.items()}


def _read_beside(root: Path) -> _Beside:
    """Read the settings beside a file, where there are some."""
    config, generation = read_settings(root, CONFIG) or {}, read_settings(root, GENERATION) or {}
    genai = read_settings(root, GENAI)
    sizes = [config.get("max_position_embeddings"), config.get("n_positions")]
    names: dict[str, str] = {}
    if genai is not None:
        where = str(root / GENAI)
        model, search = _object(genai, "model", where), _object(genai, "search", where)
        decoder = _object(model, "decoder", where)
        called = {**_object(decoder, "inputs", where), **_object(decoder, "outputs", where)}
        names = {ours: str(called[theirs]) for theirs, ours in _NAMES.items() if theirs in called}
        sizes = [model.get("context_length")]
        generation = {name: value for name, value in search.items() if name in _DRAWS or name in NOT_FOLLOWED}
        config = {"eos_token_id": model["eos_token_id"]} if "eos_token_id" in model else {}
    longest = next((size for size in sizes if type(size) is int and size > 0), None)
    return _Beside(names, longest, config, generation)


def _object(settings: Mapping[str, Any], name: str, where: str) -> Mapping[str, Any]:
    """Return an object of settings, an empty one where it is missing."""
    inner = settings.get(name, {})
    if not isinstance(inner, dict):
        raise UsageError(f"{name} is {inner!r}, expected an object", where=where)
    return inner
