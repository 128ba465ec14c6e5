"""A bundle with bounded dimensions in the calling process: one model for each rung of its ladder, with one stage.

    model = penstock.load("bundle/")       the bundle was compiled with --dim 'batch<=32' or --dim 'seq<=512'
    model({"ids": ids})                    any size up to the bound; nothing is compiled
    model.at({"seq": 64})                  the model of exactly one rung, without padding

In: a request of any size. A dimension whose rows do not see each other is cut into pieces that rungs take without
padding, 17 = 16 + 1, by the predicted times of rungs. Every other one is filled up with zeros to the next rung, and
its size goes to the masks of the program. Out: outputs of the request's own size.

Code and variables are loaded once. What a rung needs besides is made with the first request that takes it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from penstock.backends.bundle.format import Bundle, open_bundle
from penstock.ir.batch_shares import loss_stage
from penstock.ir.graph import Module
from penstock.ir.ladder.bounds import Bounded, print_sizes
from penstock.ir.ladder.ladder import Rung
from penstock.runtime.checkpoint.finding import choose
from penstock.runtime.checkpoint.resuming import Start, start_from
from penstock.runtime.generation.generator import TextGenerator
from penstock.runtime.generation.turn import TOKENS
from penstock.runtime.messages.control import Arrays
from penstock.support.errors import UsageError

from .in_process import LoadedModel, LoadedStage
from .sized_requests import SizedRequests
from .texts import GeneratesText, generator_of


class LoadedLadder(GeneratesText):
    """A bundle of one rank with bounded dimensions, ready to compute in this process. Any thread may call it."""

    def __init__(self, bundle: Bundle, start: Start, stage: LoadedStage | None = None) -> None:
        self.bundle, self.warnings, self._start = bundle, start.warnings, start
        self.requests = SizedRequests(bundle)
        self._stage = stage or LoadedStage(bundle, start)
        self.store, self.base_bytes = self._stage.store, self._stage.base_bytes
        self._models: dict[str, LoadedModel] = {}
        self._lock = threading.Lock()
        self.layout = self._of(bundle.ladder.largest).layout

    def __repr__(self) -> str:
        bounds = ", ".join(f"{name} <= {most}" for name, most in self.bundle.ladder.most.items())
        return f"<penstock model {self.bundle.manifest.name}: {bounds}, {len(self.bundle.ladder)} sizes>"

    def __call__(self, *inputs: Any) -> Arrays:
        """Return all outputs by the model's names, of the size of the inputs. Inputs are a dict by name, or arrays in
        the order of the inputs."""
        request = inputs[0] if len(inputs) == 1 else inputs
        arrays = self.requests.named(request)
        sizes = self.requests.sizes(arrays)
        if sizes is None:
            # The checks of one size say what is wrong.
            return self._of(self.bundle.ladder.largest)(request)
        parts, start = [], 0
        for rung, part in self.requests.split(sizes):
            model = self._of(rung)
            padded = self.requests.padded(arrays, rung, start, part)
            results = model.answer(padded, _live(self.requests.bounds, part))
            parts.append(self.requests.cut(results, rung, part) if part != dict(rung.sizes) else results)
            start += part.get(self.requests.rows or "", 0)
        return self.requests.joined(parts)

    @cached_property
    def generator(self) -> TextGenerator:
        """The generator of the bundle, with the rates of what it computed."""
        return generator_of(self.bundle, lambda rows, inputs: self.at({TOKENS: rows}).compute(inputs))

    def at(self, sizes: Mapping[str, int]) -> LoadedModel:
        """Return the model of exactly these sizes, which pads nothing."""
        rung = self.bundle.ladder.at(sizes)
        if rung is None:
            listed = "; ".join(print_sizes(rung.sizes) for rung in self.bundle.ladder)
            raise UsageError(f"there is no rung of {print_sizes(sizes)}", hint=f"the sizes are {listed}")
        return self._of(rung)

    def _of(self, rung: Rung[Module]) -> LoadedModel:
        with self._lock:
            if rung.name not in self._models:
                self._models[rung.name] = LoadedModel(self.bundle, self._start, self._stage, rung)
            return self._models[rung.name]


def _live(bounds: Sequence[Bounded], sizes: Mapping[str, int]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor(sizes[bound.name], dtype=torch.int64) for bound in bounds)


# ------------------------------------------------------------------------------------------------ the way in


def load(
    path: str | os.PathLike[str], *, checkpoint: str | os.PathLike[str] | None = None
) -> LoadedModel | LoadedLadder:
    """Check a bundle for inference and load it into this process. It must be of one stage on one device.

    `checkpoint` is a checkpoint of a training of the model, or a directory of them, of which the newest is chosen: its
    weights stand in for those of the bundle.
    """
    bundle = open_bundle(path)
    if loss_stage(bundle.module) is not None:
        raise UsageError(
            "the bundle is for training",
            where=str(bundle.path),
            hint="compile the model without a loss for inference, or train it with `penstock.open`",
        )
    if bundle.world_size > 1:
        raise UsageError(
            f"the bundle is for {bundle.world_size} processes, and a loaded model is one",
            where=str(bundle.path),
            hint="`penstock.open` starts them, and `job.infer` asks them; or compile it for one device",
        )
    chosen = None if checkpoint is None else choose(checkpoint)
    return load_bundle(bundle, start_from(bundle, None, chosen, None, None))


def load_bundle(bundle: Bundle, start: Start) -> LoadedModel | LoadedLadder:
    """Load an opened bundle of one rank at a start."""
    return LoadedLadder(bundle, start) if bundle.module.bounds else LoadedModel(bundle, start)
