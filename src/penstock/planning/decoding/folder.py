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
from penstock.runtime.generation.turn import TOKENS
from penstock.support.errors import UsageError
from penstock.support.words import counted

# Tokens of turns. A turn of the smaller ones takes as long as its weights take to be read.
RUNGS = (1, 4, 16, 64, 256)
_LONGEST_CONTEXT = 4096


def load_decoder(source: str, settings: GenerationSettings, feedback: Feedback = SILENT) -> dict[int, Model]:
    """Import a folder. Return the model for each number of tokens of a turn, the smallest first."""
    from penstock.frontends.huggingface import DecoderSizes, import_folder, longest_context, open_folder  # lazy: heavy

    with feedback.step("import") as said:
        folder = open_folder(source.removeprefix(FOLDER_PREFIX))
        longest = longest_context(folder.config)
        context = settings.context or min(longest or _LONGEST_CONTEXT, _LONGEST_CONTEXT)
        rungs = rungs_for(context, settings.sequences)
        imported = import_folder(folder, DecoderSizes(context, settings.sequences, rungs, settings.logits))
        largest = imported[rungs[-1]]
        facts = facts_of(folder.config, folder.generation, context, settings.sequences, rungs, largest.module)
        files = {FACTS: facts.encode(), **folder.texts}
        attachments = {f"{FOLDER}/{name}": data for name, data in files.items()}
        said += largest.report
        return {rung: Model(replace(one, attachments=attachments)) for rung, one in imported.items()}


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
    listed = ends if isinstance(ends, list) else [ends]
    words = config.get("vocab_size")
    if not isinstance(words, int) or words < 1:
        raise UsageError(f"vocab_size is {words!r}, expected a number", where=module.name)
    draws = generation.get("do_sample") is True
    return GenerationFacts(
        context,
        sequences,
        rungs,
        words,
        tuple(end for end in listed if isinstance(end, int)),
        _number(generation, "temperature", 1.0) if draws else 0.0,
        int(_number(generation, "top_k", 0)) if draws else 0,
        _number(generation, "top_p", 1.0) if draws else 1.0,
    )


def _number(settings: Mapping[str, Any], name: str, default: float) -> float:
    value = settings.get(name)
    return float(value) if isinstance(value, int | float) else default
