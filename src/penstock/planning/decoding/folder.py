"""Decoders: a folder of Hugging Face as a model for each number of tokens of a turn, with what text needs beside it.

The tokens of a turn are a ladder of rungs. The largest is that of prompts, the smallest decodes one sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from penstock.ir.cluster.cluster import Cluster
from penstock.ir.graph import Module
from penstock.ir.ladder.ladder import Ladder, Rung
from penstock.planning.model import Model
from penstock.planning.options import FOLDER_PREFIX, GenerationSettings, PlanOptions
from penstock.planning.pipeline import plan_model
from penstock.planning.plan import Plan
from penstock.planning.watching import SILENT, Feedback
from penstock.runtime.generation.facts import FACTS, FOLDER, GenerationFacts
from penstock.runtime.generation.text import TOKENIZER, TextCodec
from penstock.runtime.generation.turn import TOKENS
from penstock.support.errors import UsageError
from penstock.support.words import counted, itemised

# Tokens of turns. A turn of the smaller ones takes as long as its weights take to be read.
RUNGS = (1, 4, 16, 64, 256)
_LONGEST_CONTEXT = 4096


def load_decoder(source: str, settings: GenerationSettings, feedback: Feedback = SILENT) -> dict[int, Model]:
    """Import a folder. Return the model for each number of tokens of a turn, the smallest first."""
    from penstock.frontends.huggingface import DecoderSizes, import_folder, longest_context, open_folder  # lazy: heavy

    with feedback.step("import") as said:
        folder = open_folder(source.removeprefix(FOLDER_PREFIX))
        context = context_of(settings, longest_context(folder.config), str(folder.path))
        rungs = rungs_for(context, settings.sequences)
        sizes = DecoderSizes(context, settings.sequences, rungs, settings.logits, settings.cache)
        imported = import_folder(folder, sizes)
        largest = imported[rungs[-1]]
        facts = facts_of(folder.config, folder.generation, context, settings.sequences, rungs, largest.module)
        attachments, notes = with_texts(folder.texts, facts, folder.generation, str(folder.path))
        lines = (*largest.report, *notes)
        said += lines
        return {rung: Model(replace(one, attachments=attachments, report=lines)) for rung, one in imported.items()}


def plan_decoder(
    models: Mapping[int, Model], cluster: Cluster, options: PlanOptions, feedback: Feedback = SILENT
) -> Plan:
    """Plan a decoder for each number of tokens of a turn. All of them have the same variables."""
    plans = {}
    for number, (rung, model) in enumerate(models.items(), 1):
        if feedback.progress is not None:
            feedback.progress(number, len(models), f"turns of {counted(rung, 'token')}")
        largest = number == len(models)
        plans[rung] = plan_model(model, cluster, None, options, feedback if largest else SILENT)
    plan = plans[max(plans)]
    assert all(one.module.vars == plan.module.vars for one in plans.values()), "all rungs have the same variables"
    return replace(plan, ladder=Ladder([Rung({TOKENS: rung}, one.module) for rung, one in plans.items()]))


def context_of(settings: GenerationSettings, longest: int | None, where: str) -> int:
    """Return the context that is asked for, by default the longest of the model, but not more than 4096."""
    context = settings.context or min(longest or _LONGEST_CONTEXT, _LONGEST_CONTEXT)
    if context < 2:
        raise UsageError("a context of 1 leaves no token for a text", where=where, hint="--context 2")
    return context


def rungs_for(context: int, sequences: int) -> tuple[int, ...]:
    """Return the tokens of turns: enough for one of each sequence, and no more than a context has."""
    fitting = [rung for rung in RUNGS if rung < min(context, RUNGS[-1])]
    largest = min(context, RUNGS[-1])
    return (*fitting, max(largest, sequences))


def facts_of(
    config: Mapping[str, Any],
    generation: Mapping[str, Any],
    context: int,
    sequences: int,
    rungs: tuple[int, ...],
    module: Module,
) -> GenerationFacts:
    """Return what a bundle knows about text. generation_config.json counts more than config.json."""
    ends = generation.get("eos_token_id", config.get("eos_token_id"))
    listed = [] if ends is None else ends if isinstance(ends, list) else [ends]
    words = config.get("vocab_size")
    if not isinstance(words, int) or words < 1:
        raise UsageError(f"vocab_size is {words!r}, expected a number", where=module.name)
    problems = [
        f"eos_token_id {end!r}, expected a token from 0 to {words - 1}"
        for end in listed
        if type(end) is not int or not 0 <= end < words
    ]
    if (draws := generation.get("do_sample")) not in (True, False, None):
        problems.append(f"do_sample {draws!r}, expected true or false")
    chosen = dict(_GREEDY)
    if draws is True:
        chosen = {
            name: default if (value := generation.get(name)) is None else value for name, default in _DRAWN.items()
        }
        problems += [
            f"{name} {value!r}, expected {_RANGES[name]}"
            for name, value in chosen.items()
            if not _in_range(name, value)
        ]
    if problems:
        raise UsageError("settings of text do not fit:" + itemised(problems), where=module.name)
    ending = tuple(dict.fromkeys(listed))
    how = (float(chosen["temperature"]), int(chosen["top_k"]), float(chosen["top_p"]))
    return GenerationFacts(context, sequences, rungs, words, ending, *how)


# How tokens are chosen where a model says nothing else: the likeliest one, or a draw from all.
_GREEDY = {"temperature": 0.0, "top_k": 0, "top_p": 1.0}
_DRAWN = {**_GREEDY, "temperature": 1.0}
_RANGES = {
    "temperature": "a number of 0 or more",
    "top_k": "a whole number of 0 or more",
    "top_p": "a number above 0 and at most 1",
}


def _in_range(name: str, value: object) -> bool:
    """Return whether a file's value of a setting is one that `_RANGES` describes."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    if name == "top_k":
        return isinstance(value, int) and 0 <= value < 1 << 31
    return 0 <= value < float("inf") if name == "temperature" else 0 < value <= 1


# Settings of transformers that change which token is chosen, each with the values that change nothing.
NOT_FOLLOWED: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty", "typical_p", "top_h"), (1.0,)),
    **dict.fromkeys(("min_p", "epsilon_cutoff", "eta_cutoff", "no_repeat_ngram_size"), (0,)),
    **dict.fromkeys(("encoder_no_repeat_ngram_size", "min_length", "min_new_tokens"), (0,)),
    **dict.fromkeys(("num_beams", "num_beam_groups", "guidance_scale"), (1,)),
    **dict.fromkeys(("bad_words_ids", "force_words_ids", "sequence_bias", "constraints"), ([], {})),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens", "stop_strings", "watermarking_config"), ([], {})),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty"), ([],)),
    **dict.fromkeys(("penalty_alpha", "dola_layers", "token_healing"), (0,)),
}
# Those that matter where tokens are drawn, and nowhere else.
_OF_DRAWS = frozenset(("min_p", "typical_p", "top_h", "epsilon_cutoff", "eta_cutoff"))


def not_followed(generation: Mapping[str, Any]) -> list[str]:
    """Return a line that names the settings of a file that would choose other tokens, and that are not followed."""
    draws = generation.get("do_sample") is True
    names = [
        f"{name} {value!r:.40}"
        for name, neutral in NOT_FOLLOWED.items()
        if (value := generation.get(name)) is not None and value not in neutral and (draws or name not in _OF_DRAWS)
    ]
    if not names:
        return []
    return [f"settings of text that are not followed, so that texts differ from transformers': {', '.join(names)}"]


def with_texts(
    texts: Mapping[str, bytes], facts: GenerationFacts, generation: Mapping[str, Any], where: str
) -> tuple[dict[str, bytes], list[str]]:
    """Return what travels with a bundle that generates text, and lines of the report. `generation` are the settings
    of its texts."""
    files = {FACTS: facts.encode(), **texts}
    lines = [*_check_text(files, facts, where), *not_followed(generation)]
    return {f"{FOLDER}/{name}": data for name, data in files.items()}, lines


def _check_text(files: Mapping[str, bytes], facts: GenerationFacts, where: str) -> list[str]:
    """Read the tokenizer of a folder, so that an error in it ends the compile. Return lines of the report."""
    if TOKENIZER not in files:
        return ["no tokenizer.json: prompts are lists of tokens"]
    words = TextCodec(files[TOKENIZER], f"{where}/{TOKENIZER}").words
    if words > facts.words:
        return [f"the tokenizer knows {words} tokens, the model {facts.words}: prompts with the others are refused"]
    return []
