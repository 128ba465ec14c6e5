"""A model and its pipeline trained on the same drawn weights and batches: the pipeline as its schedule runs, verified after every pass, and the model
as it was before it was cut, by the recurrence of plain training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.ir.graph import Module
from penstock.ir.interpreter.recurrence import InterpretedRun, run_recurrence
from penstock.ir.interpreter.schedules import run_schedule
from penstock.passes.manager import Call, run_passes
from penstock.passes.pipelines import PASSES

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Trained:
    """`module` is the pipeline and `found` what it computed."""

    module: Module
    found: InterpretedRun
    whole: Module
    weights: Arrays
    batches: list[Arrays]

    def expected(self, delay: int) -> InterpretedRun:
        return run_recurrence(self.whole, self.weights, self.batches, delay=delay)


def train(model: Module, calls: Sequence[Call], *, seed: int, samples: int, batches: int) -> Trained:
    seen: list[Module] = []

    def remember(call: Call, before: Module) -> Call:
        if call.name == "partition":
            seen.append(before)
        return call

    module = run_passes(model, calls, PASSES, before=remember)
    rng = np.random.default_rng(seed)
    weights = {name: rng.standard_normal(v.type.shape) / 4 for name, v in model.vars.items()}
    drawn = [{v.name: rng.standard_normal((samples, v.type.dims[1])) for v in model.inputs} for _ in range(batches)]
    return Trained(module, run_schedule(module, weights, drawn, precision="f64"), seen[0], weights, drawn)
