"""A decoder as the frontend gives it, in the interpreter: the judge of families and of texts."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from penstock.frontends.huggingface import DecoderSizes, import_folder, open_folder
from penstock.ir.interpreter.graphs import run_graph
from penstock.ir.interpreter.store import DictStore
from penstock.ir.types import numpy_dtype
from penstock.runtime.generation.facts import GenerationFacts
from penstock.runtime.generation.generator import TextGenerator
from penstock.runtime.generation.turn import LOGITS, PICKED


class InterpretedDecoder:
    """A folder, interpreted. `logits` holds those of each turn, for the sequences that it has."""

    def __init__(self, folder: Path, sizes: DecoderSizes, words: int) -> None:
        self.imported = import_folder(open_folder(folder), sizes)
        module = next(iter(self.imported.values())).module
        weights = next(iter(self.imported.values())).weights
        arrays = {
            name: np.zeros(var.type.dims, numpy_dtype(var.type.dtype))
            if var.init == "zeros"
            else np.asarray(weights[name])
            for name, var in module.vars.items()
        }
        self._store = DictStore(arrays)
        self.logits: list[np.ndarray] = []
        facts = GenerationFacts(sizes.context, sizes.sequences, sizes.rungs, words)
        self.generator = TextGenerator(self.decode, facts, None, str(folder))

    def decode(self, rung: int, inputs: dict[str, np.ndarray]) -> np.ndarray:
        graph = self.imported[rung].module.graphs["main"]
        results = run_graph(graph, [inputs[value.name] for value in graph.ins], self._store)
        named = dict(zip((value.name for value in graph.outs), results, strict=True))
        if LOGITS in named:
            self.logits.append(named[LOGITS])
        return named[PICKED]
