"""What the modules of one compilation compute, in the interpreter in float64, and whether it is what it should be.

In: the modules, weights (drawn from a seed where there are none), batches. Out: for a module what is
wrong with it, and the first value that is.

    forward alone      outputs are those of the first module
    gradients          the derivative of the loss by every parameter is what moving the parameter a little shows (slopes.py); where the first module has
                       derivatives already, those of the first
    updates            outputs and variables of some steps are those of the recurrence of the first module with updates, at the schedule's delay;
                       where that module is cut into stages already, those of its own schedule

Every module is verified statically first: what the verifier refuses needs no numbers. All is computed in float64, so that only the order of
sums may differ; allowed.py says by how much.

Limits: a schedule with a delay is not run before weights have versions, so that what is wrong with it is found after `weight-versions`, if
the verifier does not see it at once; the rule of an update, and what guards it, are not judged, only what passes make of them; a backward
graph that was parted before it stood in one piece is judged by what it does to the variables.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod

import numpy as np

from penstock.ir.action_kinds import WEIGHTS
from penstock.ir.graph import GRAD, PARAM, Module, Var, graph_kind
from penstock.ir.interpreter.interpreter import (
    DictStore,
    InterpretedRun,
    Watch,
    initial_arrays,
    microbatches_of,
    run_graph,
    run_recurrence,
    run_schedule,
)
from penstock.ir.interpreter.ops import F64, Array, array_dtype
from penstock.ir.schedule_names import INFERENCE, TRAINING
from penstock.ir.types import FLOATS, UNIT_ROUNDOFF
from penstock.ir.verify.verifier import verify
from penstock.passes.partition.chain import forward_graph
from penstock.passes.schedules.schedule import SCHEDULES, ScheduleOptions, schedule
from penstock.support.errors import PenstockError, VerifyError
from penstock.support.words import counted
from penstock.verification.checks import changed_by, delay_of, relative_error, synthetic_batch
from penstock.verification.tolerance import Allowed, asked, in_float64

from .slopes import ALLOWED as SLOPE_ALLOWED
from .slopes import Slopes
from .steps import TrailStep
from .values import Key, Seen, Spot, told

# A pass that changes what an update does, and is meant to.
_MEANT = r"guard\b"

# What a run gave: outputs by ("output", microbatch, name), variables at its end by ("variable", 0,
# name), derivatives by ("gradient", 0, name).
Result = tuple[str, int, str]


@dataclass(frozen=True)
class Off:
    """Something a module gives that is not what it should be."""

    what: str
    error: float
    allowed: Allowed

    def __str__(self) -> str:
        if np.isfinite(self.error):
            return f"{self.what} is off by {self.error:.2g} (allowed {self.allowed.error:.2g})"
        return f"{self.what} has another shape, or is not finite"


class Trial:
    """Weights and batches, and what modules make of them. `weights` that are not given are drawn; `batches` too."""

    def __init__(
        self,
        steps: Sequence[TrailStep],
        count: int,
        seed: int,
        tolerance: float | None = None,
        weights: Mapping[str, Array] | None = None,
        batches: Sequence[Mapping[str, Array]] = (),
    ) -> None:
        self.first, self.seed, self.tolerance = steps[0].module, seed, tolerance
        self.microbatches, self.loss_scale = _microbatches(steps), _loss_scale(steps)
        # The first module that updates, as it means to: what all later ones are compared with. Those before it
        # are judged by their derivatives alone.
        begin = next((i for i, step in enumerate(steps) if updates(step.module)), len(steps))
        begin = next((i for i, step in enumerate(steps) if re.match(_MEANT, step.call)), begin)
        self.trained = steps[begin].module if begin < len(steps) else None
        self._later = {id(step.module) for step in steps[begin + 1 :]}
        self.weights: dict[str, Array] = {name: np.asarray(array) for name, array in (weights or {}).items()}
        for name, var in ((name, var) for step in steps for name, var in step.module.vars.items()):
            if var.init == "file":
                self.weights.setdefault(name, drawn(var, np.random.default_rng([seed, zlib.crc32(name.encode())])))
        self.batches = list(batches) or [synthetic_batch(self.first, self.microbatches, seed, t) for t in range(count)]
        self.parts = microbatches_of(self.first, self.batches[0])

    # -------------------------------------------------------------------------------------------- what is wrong with a module

    def problem(self, module: Module) -> Off | PenstockError | None:
        try:
            verify(module)
            return next(self._differences(module), None)
        except PenstockError as error:
            return error

    def run_first(self) -> None:
        """The first module with the weights and batches; PenstockError where these are not for it. One that
        means nothing yet (can_run) is not run."""
        if is_whole(self.first):
            self.store(self.first)
            self._wanted  # noqa: B018
        elif can_run(self.first):
            self.execute(self.first)

    def _differences(self, module: Module) -> Iterator[Off]:
        if is_whole(module):
            yield from self._off(self._outputs(module), self._wanted)
            if self._derives(module):
                for name, error in Slopes(self, module).of_parameters():
                    yield Off(f"the derivative {name}", error, SLOPE_ALLOWED)
            elif "B" in module.graphs:
                yield from self._off(self._gradients(module), self._gradients(self.first), module=module)
        elif not updates(module):
            found = _results(self.execute(module))
            yield from self._off({key: array for key, array in found.items() if key[0] == "output"}, self._wanted)
        if self.compares_training(module):
            yield from self._off(
                _results(self.execute(module)), _results(self.recurrence(_delay(module))), _delay(module), module
            )

    def _derives(self, module: Module) -> bool:
        """Whether derivatives of this module were taken by passes that are looked at. Those that the first module came with may be by a
        part of the loss, or of a multiple of it: then no slope says what they should be."""
        return "B" in module.graphs and (module is self.first or "B" not in self.first.graphs)

    def compares_training(self, module: Module) -> bool:
        """Whether there is a module to compare its training with."""
        return id(module) in self._later and updates(module)

    def _off(
        self,
        found: Mapping[Result, Array],
        wanted: Mapping[Result, Array],
        delay: int | None = None,
        module: Module | None = None,
    ) -> Iterator[Off]:
        for key, array in wanted.items():
            kind, number, name = key
            if kind != "output" and module is not None and name not in module.vars:
                continue
            error = relative_error(found[key], array) if key in found else float("inf")
            allowed = self._allowed if error <= self._allowed.error else self._allowed_for(key, delay)
            if not error <= allowed.error:
                yield Off(self._said(kind, number, name), error, allowed)

    def _said(self, kind: str, number: int, name: str) -> str:
        if kind == "output":
            return f"%{name} of microbatch {number}"
        return (
            f"the derivative @{name}" if kind == "gradient" else f"@{name} after {counted(len(self.batches), 'step')}"
        )

    @cached_property
    def _allowed(self) -> Allowed:
        if self.tolerance is not None:
            return asked(self.tolerance)
        module = self.trained or self.first
        return in_float64(module.graphs.values(), len(self.batches) if self.trained is not None else 1)

    def _allowed_for(self, key: Result | Key, delay: int | None) -> Allowed:
        """Where that is not enough: what the reference does when its numbers are changed by one rounding."""
        if self.tolerance is not None:
            return self._allowed
        own = self._moved(delay).get(key, 0.0)
        return self._allowed.widened(
            own, "what the reference moves by when all weights and inputs are changed by one rounding of float64"
        )

    def _moved(self, delay: int | None) -> Mapping[Result | Key, float]:
        """How far each result and value of the reference moves."""
        if delay not in self._moves:
            calm, shaken = Seen(), Seen()
            shaker = self._shaken
            if delay is None:
                pairs: dict[Result | Key, tuple[Array, Array]] = {}
                for trial, seen in ((self, calm), (shaker, shaken)):
                    trial._run(trial.first, seen)
                others = shaker._outputs(shaker.first)
                wanted = self._wanted
                if is_whole(self.first) and "B" in self.first.graphs:
                    others, wanted = others | shaker._gradients(shaker.first), wanted | self._gradients(self.first)
                pairs |= {key: (others[key], array) for key, array in wanted.items()}
            else:
                one, other = self.recurrence(delay, calm.watch), shaker.recurrence(delay, shaken.watch)
                others = _results(other)
                pairs = {key: (others[key], array) for key, array in _results(one).items()}
            pairs |= {key: (shaken.values[key], array) for key, array in calm.values.items()}
            self._moves[delay] = {key: relative_error(a, b) for key, (a, b) in pairs.items()}
        return self._moves[delay]

    @cached_property
    def _moves(self) -> dict[int | None, dict[Result | Key, float]]:
        return {}

    @cached_property
    def _shaken(self) -> Trial:
        """The same trial with numbers that are each changed by one rounding."""
        source = np.random.default_rng([self.seed, 1])

        def shake(array: Array) -> Array:
            return changed_by(2 * UNIT_ROUNDOFF["f64"], array, source)

        other = copy(self)
        # What this one has found out is not true of the other.
        for found in ("_wanted", "_moves"):
            vars(other).pop(found, None)
        other.weights = {name: shake(array) for name, array in self.weights.items()}
        other.batches = [{name: shake(np.asarray(array)) for name, array in batch.items()} for batch in self.batches]
        other.parts = microbatches_of(self.first, other.batches[0])
        return other

    # -------------------------------------------------------------------------------------------- runs

    @cached_property
    def _wanted(self) -> dict[Result, Array]:
        """What the first module gives for the first batch."""
        return self._outputs(self.first)

    def _outputs(self, module: Module) -> dict[Result, Array]:
        if not is_whole(module):
            return {key: array for key, array in _results(self.execute(module)).items() if key[0] == "output"}
        found: dict[Result, Array] = {}
        for k in range(self.microbatches):
            results = self.forward(module, k)
            found |= {("output", k, name): results[name] for name in module.outputs if name in results}
        return found

    def forward(self, module: Module, microbatch: int, store: DictStore | None = None) -> dict[str, Array]:
        graph = forward_graph(module)
        results = run_graph(graph, self.parts[microbatch], self.store(module) if store is None else store, F64)
        return {v.name: array for v, array in zip(graph.results, results, strict=True)}

    def backward(self, module: Module, watch: Watch | None = None, most: int | None = None) -> DictStore:
        """The variables after forward and backward of the first batch, or of the first microbatches of it."""
        store = self.store(module)
        for k, part in enumerate(self.parts[:most]):
            given = {**part, **self.forward(module, k, store)}
            run_graph(module.graphs["B"], given, store, F64, None if watch is None else partial(watch, "B", k))
        return store

    def _gradients(self, module: Module) -> dict[Result, Array]:
        """What the backward graph of a module in one piece adds up over the first batch."""
        arrays = self.backward(module).arrays
        return {("gradient", 0, name): arrays[name] for name, var in module.vars.items() if var.role == GRAD}

    def store(self, module: Module) -> DictStore:
        return DictStore(initial_arrays(module, self.weights, list(module.vars), F64))

    def recurrence(self, delay: int, watch: Watch | None = None) -> InterpretedRun:
        """Plain training, as late as a schedule is. Stages do what their own schedule says, which has to be as late."""
        assert self.trained is not None
        if not is_whole(self.trained):
            return self.execute(self.trained, watch)
        return run_recurrence(self.trained, self.weights, self.batches, delay=delay, watch=watch)

    def execute(self, module: Module, watch: Watch | None = None) -> InterpretedRun:
        """Training as the module says; stages that have no schedule yet get one."""
        if is_whole(module):
            return run_recurrence(module, self.weights, self.batches, watch=watch)
        if module.schedule is None:
            module = schedule(module, ScheduleOptions(_plainest(module), self.microbatches))
        return run_schedule(module, self.weights, self.batches if updates(module) else self.batches[:1], watch=watch)

    def _run(self, module: Module, seen: Seen) -> None:
        """The first batch, without updates where the module is in one piece."""
        if not is_whole(module):
            self.execute(module, seen.watch)
            return
        graph = forward_graph(module)
        for k, part in enumerate(self.parts):
            run_graph(graph, part, self.store(module), F64, partial(seen.watch, graph.name, k))
        if "B" in module.graphs:
            self.backward(module, seen.watch)

    # -------------------------------------------------------------------------------------------- where it shows first

    def spots(self, bad: Module, before: Module | None) -> list[Spot]:
        """The values that are not what those of their names should be, in the order of execution; none where no value is comparable."""
        if is_whole(bad) and self._derives(bad) and (found := Slopes(self, bad).first()):
            return [found]
        right: dict[Key, Array] = {}
        if before is not None and (_delay(before) == _delay(bad) or not updates(bad)):
            right |= self._observe(before).values
        trains = self.trained is not None and updates(bad)
        if trains:
            wanted = Seen()
            self.recurrence(_delay(bad), wanted.watch)
            right |= wanted.values

        def judge(key: Key, error: float) -> Allowed:
            return (
                self._allowed
                if error <= self._allowed.error
                else self._allowed_for(key, _delay(bad) if trains else None)
            )

        return list(self._observe(bad).off(right, judge))

    def _observe(self, module: Module) -> Seen:
        """All values of a run, as far as it goes."""
        seen = Seen()
        with suppress(VerifyError):
            if updates(module):
                self.execute(module, seen.watch)
            else:
                self._run(module, seen)
        return seen


def is_whole(module: Module) -> bool:
    return "main" in module.graphs or "F" in module.graphs


def updates(module: Module) -> bool:
    return any(graph_kind(name) == "U" for name in module.graphs)


def can_run(module: Module) -> bool:
    """Whether it can be run with its own delay: a schedule with one means little before weights have versions."""
    return module.schedule is None or "versioned" in module.facts or not _delay(module)


def _results(run: InterpretedRun) -> dict[Result, Array]:
    found: dict[Result, Array] = {
        ("output", k, name): array for k, outputs in run.outputs.items() for name, array in outputs.items()
    }
    return found | {("variable", 0, name): array for name, array in run.variables.items()}


def _plainest(module: Module) -> str:
    """A schedule without delay that stages can be run by which have none yet."""
    if not updates(module):
        return INFERENCE
    split = any(module.stage_graph(stage.index, WEIGHTS) for stage in module.stages)
    return next(name for name in TRAINING if SCHEDULES[name].splits == split)


def comparable(first: Module, module: Module) -> bool:
    """Whether the first module can say what the other one should give: stages have but one delay, that of their schedule."""
    return is_whole(first) or not updates(module) or _delay(first) == _delay(module)


def _delay(module: Module) -> int:
    return delay_of(module) if module.schedule is not None else 0


def _microbatches(steps: Sequence[TrailStep]) -> int:
    """As the schedule says, or else as autodiff was told."""
    planned = [step.module.schedule.microbatches for step in steps if step.module.schedule is not None]
    return next(iter([*planned, *map(int, _options(steps, r"\bmicrobatches=(\d+)"))]), 1)


def _loss_scale(steps: Sequence[TrailStep]) -> float:
    """What autodiff was told to multiply the loss by, where 16 bits are too few for its gradients."""
    return next(map(float, _options(steps, r"\bloss_scale=([\d.e+]+)")), 0.0) or 1.0


def _options(steps: Sequence[TrailStep], pattern: str) -> Iterable[str]:
    return [found[1] for step in steps if (found := re.search(pattern, step.call))]


def drawn(var: Var, source: np.random.Generator) -> Array:
    """Products keep the size of what goes through them; statistics, which nobody trains, are positive."""
    if var.type.dtype not in FLOATS:
        return np.zeros(var.type.dims, array_dtype(var.type.dtype, F64))
    normal = source.standard_normal(var.type.dims) * max(1, prod(var.type.dims)) ** -0.25
    found: Array = (normal if var.role == PARAM else np.abs(normal) + 0.5).astype(np.float32)
    return found


__all__ = ["Off", "Trial", "can_run", "comparable", "drawn", "is_whole", "told", "updates"]
