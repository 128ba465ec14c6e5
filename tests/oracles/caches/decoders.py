"""Judges of decoders: one in the interpreter, as a frontend gives it, and an ONNX file in onnxruntime."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from penstock.frontends.decoder_sizes import DecoderSizes
from penstock.frontends.imported import Imported
from penstock.ir.interpreter.graphs import run_graph
from penstock.ir.interpreter.store import DictStore
from penstock.ir.types import numpy_dtype
from penstock.runtime.generation.facts import GenerationFacts
from penstock.runtime.generation.generator import TextGenerator
from penstock.runtime.generation.turn import LOGITS, PICKED

Arrays = dict[str, np.ndarray]


class InterpretedDecoder:
    """An imported decoder, interpreted. `logits` holds those of each turn, for the sequences that it has.

    `change` may give other inputs of a turn, for controls.
    """

    change: Callable[[Arrays], Arrays] | None = None

    def __init__(self, imported: Mapping[int, Imported], sizes: DecoderSizes, words: int, where: str) -> None:
        self.imported = imported
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
        self.generator = TextGenerator(self.decode, facts, None, where)

    def decode(self, rung: int, inputs: dict[str, np.ndarray]) -> np.ndarray:
        graph = self.imported[rung].module.graphs["main"]
        inputs = self.change(inputs) if self.change is not None else inputs
        results = run_graph(graph, [inputs[value.name] for value in graph.ins], self._store)
        named = dict(zip((value.name for value in graph.outs), results, strict=True))
        if LOGITS in named:
            self.logits.append(named[LOGITS])
        return named[PICKED]


class OnnxruntimeDecoder:
    """A file in onnxruntime, with its own past of keys and values.

    `shift` is added to positions where the file takes them: a decoder that is off by one, for controls. `size` is that
    of heads, where the file leaves it open.
    """

    def __init__(self, path: Path, shift: int = 0, size: int = 0) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self._inputs = {value.name: value.shape for value in self._session.get_inputs()}
        self._outputs = [value.name for value in self._session.get_outputs()]
        self._shift, self._size = shift, size

    def logits(self, tokens: Sequence[int], pieces: Sequence[int]) -> np.ndarray:
        """Compute the logits of all positions, in pieces of so many tokens one after the other."""
        past = {
            name: np.zeros((1, shape[1], 0, self._size or shape[3]), np.float32)
            for name, shape in self._inputs.items()
            if len(shape) == 4
        }
        rows, done = [], 0
        for count in pieces:
            end = done + count
            feeds = {
                "input_ids": np.array([tokens[done:end]], np.int64),
                "attention_mask": np.ones((1, end), np.int64),
                "position_ids": np.arange(done, end)[None] + self._shift,
            }
            feeds = {name: array for name, array in feeds.items() if name in self._inputs}
            results = dict(zip(self._outputs, self._session.run(None, {**feeds, **past}), strict=True))
            past = {name: results[name.replace("past_key_values", "present")] for name in past}
            rows.append(results["logits"][0])
            done = end
        return np.concatenate(rows)

    def continued(self, prompt: Sequence[int], count: int) -> tuple[list[int], np.ndarray]:
        """Continue a prompt by the likeliest tokens, one by one. Return them, and the logits of each."""
        text = list(prompt)
        for _ in range(count):
            pieces = [len(prompt), *[1] * (len(text) - len(prompt))]
            text.append(int(self.logits(text, pieces)[-1].argmax()))
        logits = (
            self.logits(text, [len(prompt), *[1] * (count - 1)]) if count > 1 else self.logits(prompt, [len(prompt)])
        )
        return text[len(prompt) :], logits[len(prompt) - 1 :]
