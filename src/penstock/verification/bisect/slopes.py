"""The check of derivatives by differences: along a drawn direction, the loss is computed a little to either side.

In: the whole output of `autodiff`, and a store of variables. Out: a derivative that is off. The derivative of the loss
by a parameter is compared with the effect of moving the parameter. Inside the backward graph, each derivative is
compared with the effect of moving its value, for the first microbatch only.

The loss may have kinks nearby, many of them where a layer of ReLUs is wide: a derivative that is off is tried again
with smaller steps, between which there are fewer. A kink may be where nothing moves (a ReLU of exactly zero): then
differences to both sides differ, and by that much the derivative may be off. Where rounding moves the loss as much as
the steps do, slopes of different steps differ, and by SAFETY times that much it may be off, too. A derivative that has
several parts (a value with several readers) is judged by their sum alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from typing import Protocol

import numpy as np

from penstock.ir.graph import PARAM, Graph, Module, Namer, Value, substitute
from penstock.ir.interpreter.graphs import run_graph
from penstock.ir.interpreter.ops import F64, Array
from penstock.ir.interpreter.recurrence import Watch
from penstock.ir.interpreter.store import DictStore
from penstock.ir.ops import make
from penstock.ir.types import FLOATS, UNIT_ROUNDOFF
from penstock.verification.tolerance import Allowed

from .values import Seen, Spot

# The move of a value for a difference, relative to its size: the error of the difference goes with the square, that of
# rounding with the inverse. A right derivative is right at one of these.
_MOVES = (1e-5, 1e-6, 1e-7, 1e-8)
# How many times their own difference two slopes may be off.
SAFETY = 4.0
# The microbatches that are used: with two of them it shows whether they are added up.
_MOST = 2
ALLOWED = Allowed(
    1e-5,
    f"central differences in float64 with steps of {_MOVES[0]:g}: their square and rounding over the step are "
    "the error, one step "
    "is allowed",
)


class Runs(Protocol):
    """The same batches through any module, as a `Trial` runs them."""

    parts: list[dict[str, Array]]
    seed: int
    microbatches: int
    loss_scale: float

    def store(self, module: Module) -> DictStore: ...

    def forward(self, module: Module, k: int, store: DictStore) -> Mapping[str, Array]: ...

    def backward(self, module: Module, watch: Watch | None = None, most: int | None = None) -> DictStore: ...


class Slopes:
    """The derivatives of one module, which has forward and backward graph."""

    def __init__(self, trial: Runs, module: Module) -> None:
        self.trial, self.module = trial, module
        self.forward = module.graphs["F"]

    def of_parameters(self) -> Iterator[tuple[str, float]]:
        """Yield the parameters whose derivative is off, with their errors."""
        start, store = self.trial.store(self.module), self.trial.backward(self.module, most=_MOST)
        for name, var in self.module.vars.items():
            gradient = store.arrays.get(f"{name}.grad")
            if var.role == PARAM and var.type.dtype in FLOATS and gradient is not None:
                at = start.arrays[name]
                gradient = gradient / self.trial.loss_scale
                error = self._error(f"@{name}.grad", gradient, at, partial(self._loss_with, name, at))
                if not error <= ALLOWED.error:
                    yield f"@{name}.grad", error

    def first(self) -> Spot | None:
        """Return the first derivative in the order of the backward graph that is off."""
        seen = Seen()
        self.trial.backward(self.module, seen.watch, most=1)
        values = {v.name: v for op in self.forward.ops for v in op.outs if v.type.dtype in FLOATS}
        for key, array in seen.values.items():
            name = key[2].removesuffix(".grad")
            # Where a derivative has several parts, no part equals the sum.
            if key[1] or name not in values or not key[2].endswith(".grad") or ("B", 0, f"{key[2]}.1") in seen.values:
                continue
            value = values[name]
            # Derivatives are those of the scaled loss.
            error = self._error(
                f"%{key[2]}",
                array / self.trial.loss_scale,
                np.zeros(value.type.dims),
                partial(self._loss_moving, value),
            )
            if not error <= ALLOWED.error:
                return seen.spot(key, error, ALLOWED)
        return None

    def _error(self, what: str, gradient: Array, at: Array, loss: Callable[[Array], float]) -> float:
        direction: Array = np.asarray(
            np.random.default_rng([self.trial.seed, zlib.crc32(what.encode())]).standard_normal(at.shape)
        )
        predicted, size, middle = (
            float(np.sum(gradient * direction)),
            float(np.linalg.norm(gradient)),
            loss(0.0 * direction),
        )
        if not np.isfinite(middle):
            # A loss that is not finite has no slope, whatever its derivative says.
            return 0.0
        slopes: list[float] = []
        kinks: list[float] = []
        for move in _MOVES:
            move *= max(1.0, float(np.abs(at).max(initial=0.0)))
            left, right = loss(-move * direction), loss(move * direction)
            slopes.append((right - left) / (2 * move))
            kinks.append(abs(right - 2 * middle + left) / (2 * move))
            difference = abs(predicted - slopes[-1]) / max(abs(slopes[-1]), size, 1e-8)
            if difference <= ALLOWED.error:
                return difference
        # The two moves that agree best say what the slope is, to within the difference of their slopes.
        pairs = [abs(a - b) for a, b in pairwise(slopes)]
        at_best = pairs.index(min(pairs))
        (one, other), kink = slopes[at_best : at_best + 2], min(kinks[at_best : at_best + 2])
        rounding = 2 * UNIT_ROUNDOFF["f64"] * abs(middle) / _MOVES[0]
        excess = min(abs(predicted - one), abs(predicted - other))
        excess -= max(kink, SAFETY * abs(one - other), SAFETY * rounding)
        return 0.0 if excess <= 0 else excess / max(abs(other), size, 1e-8)

    def _loss_with(self, name: str, at: Array, added: Array) -> float:
        """Return the share of the first microbatches in the mean loss of the first batch, with `added` added to a
        variable.
        """
        total = 0.0
        for k in range(min(_MOST, self.trial.microbatches)):
            store = self.trial.store(self.module)
            store.arrays[name] = at + added
            total += float(self.trial.forward(self.module, k, store)[self.module.outputs[0]])
        return total / self.trial.microbatches

    def _loss_moving(self, value: Value, added: Array) -> float:
        """Return the share of the first microbatch in the mean loss, with `added` added to a value in the middle."""
        namer = Namer.of(self.forward)
        more = Value(namer.fresh("added"), value.type)
        moved = make("add", (value, more), [namer.fresh(value.name)])
        at = next(i for i, op in enumerate(self.forward.ops) if value in op.outs) + 1
        changed: Mapping[Value, Value] = {value: moved.outs[0]}
        later = [op.with_ins(substitute(op.ins, changed)) for op in self.forward.ops[at:]]
        outs = substitute(self.forward.outs, changed)
        again = Graph(self.forward.name, (*self.forward.ins, more), outs, (*self.forward.ops[:at], moved, *later))
        results = run_graph(again, {**self.trial.parts[0], more.name: added}, self.trial.store(self.module), F64)
        return (
            float(results[[v.name for v in self.forward.outs].index(self.module.outputs[0])]) / self.trial.microbatches
        )
