"""The trial of modules: their results in the interpreter in float64, compared with those they should have.

In: the modules, weights (drawn from a seed where there are none), batches. Out: for a module its fault, and the first
value that is off.

    forward alone      outputs are those of the first module
    gradients          the derivative of the loss by every parameter is the effect of moving the parameter a little
                       (slopes.py); where the first module has derivatives already, those of the first
    updates            outputs and variables of some steps are those of the recurrence of the first module with updates,
                       at the schedule's delay; where that module is cut into stages already, those of its own schedule

Every module is verified statically first: a refusal by the verifier needs no numbers. All is computed in float64, so
that only the order of sums may differ; penstock.verification.tolerance says by how much.

Limits: a schedule with a delay is not run before weights have versions. Its faults are found after `weight-versions`,
if the verifier does not see them at once. The rule of an update, and its guard, are not judged, only the changes that
passes make to them. A backward graph that was parted before it stood in one piece is judged by its effect on the
variables.
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
from penstock.ir.interpreter.graphs import Noise, run_graph
from penstock.ir.interpreter.ops import F64, Array, array_dtype
from penstock.ir.interpreter.recurrence import InterpretedRun, Watch, microbatches_of, run_recurrence
from penstock.ir.interpreter.schedules import run_schedule
from penstock.ir.interpreter.store import DictStore, initial_arrays
from penstock.ir.schedule_names import INFERENCE, TRAINING
from penstock.ir.types import FLOATS, UNIT_ROUNDOFF
from penstock.ir.verify.verifier import verify
from penstock.passes.partition.chain import forward_graph
from penstock.passes.schedules.schedule import SCHEDULES, ScheduleOptions, schedule
from penstock.support.errors import PenstockError, VerifyError
from penstock.support.words import counted
from penstock.verification.checks import delay_of
from penstock.verification.inputs import synthetic_batch
from penstock.verification.roundings import ConstantNoise, changed_by, relative_error, same_gaps
from penstock.verification.tolerance import Allowed, asked, in_float64

from .slopes import ALLOWED as SLOPE_ALLOWED
from .slopes import Slopes
from .steps import TrailStep
from .values import Key, Seen, Spot

# A pass that is meant to change the effect of an update.
_MEANT = r"guard\b"

# The results of a run: outputs by ("output", microbatch, name), variables at its end by ("variable", 0, name),
# derivatives by ("gradient", 0, name).
Result = tuple[str, int, str]


@dataclass(frozen=True)
class Off:
    """A result of a module that is off."""

    what: str
    error: float
    allowed: Allowed

    def __str__(self) -> str:
        if np.isfinite(self.error):
            return f"{self.what} is off by {self.error:.2g} (allowed {self.allowed.error:.2g})"
        return f"{self.what} has another shape, or is not finite"


class Trial:
    """Weights and batches, and the results of modules with them. Missing `weights` are drawn; `batches` too."""

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
        self.microbatches, self.loss_scale = microbatches_per_batch(steps), _loss_scale(steps)
        # The first module with its final updates: all later ones are compared with it. Those before it are judged by
        # their derivatives alone.
        begin = next((i for i, step in enumerate(steps) if updates(step.module)), len(steps))
        begin = next((i for i, step in enumerate(steps) if re.match(_MEANT, step.call)), begin)
        self.trained = steps[begin].module if begin < len(steps) else None
        self._later = {id(step.module) for step in steps[begin + 1 :]}
        self.weights: dict[str, Array] = {name: np.asarray(array) for name, array in (weights or {}).items()}
        variables = {name: var for step in reversed(steps) for name, var in step.module.vars.items()}
        for name, var in variables.items():
            # What is computed from another variable has no elements of its own.
            if var.init == "file" and var.source not in variables:
                self.weights.setdefault(name, drawn(var, np.random.default_rng([seed, zlib.crc32(name.encode())])))
        self.batches = list(batches) or [synthetic_batch(self.first, self.microbatches, seed, t) for t in range(count)]
        self.parts = microbatches_of(self.first, self.batches[0])
        # Results without a finite element, as they should be: nobody can tell whether they are right.
        self.gaps: set[str] = set()
        self.noise: Noise | None = None

    # -------------------------------------------------------------------------------------------- faults of a module

    def problem(self, module: Module) -> Off | PenstockError | None:
        """Return the fault of a module, or None."""
        try:
            verify(module)
            return next(self._differences(module), None)
        except PenstockError as error:
            return error

    def run_first(self) -> None:
        """Run the first module; raise PenstockError where the weights and batches are not for it.

        A module that cannot be run yet (can_run) is not run.
        """
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
            results = _results(self.execute(module))
            yield from self._off({key: array for key, array in results.items() if key[0] == "output"}, self._wanted)
        if self.compares_training(module):
            yield from self._off(
                _results(self.execute(module)), _results(self.recurrence(_delay(module))), _delay(module), module
            )

    def _derives(self, module: Module) -> bool:
        """Return whether derivatives of this module were computed by passes of the trail.

        Those that the first module came with may be by a part of the loss, or of a multiple of it: then no slope
        predicts them.
        """
        return "B" in module.graphs and (module is self.first or "B" not in self.first.graphs)

    def compares_training(self, module: Module) -> bool:
        """Return whether there is a module to compare its training with."""
        return id(module) in self._later and updates(module)

    def _off(
        self,
        computed: Mapping[Result, Array],
        wanted: Mapping[Result, Array],
        delay: int | None = None,
        module: Module | None = None,
    ) -> Iterator[Off]:
        for key, array in wanted.items():
            kind, number, name = key
            if kind != "output" and module is not None and name not in module.vars:
                continue
            if key in computed and same_gaps(computed[key], array):
                self.gaps.add(self._said(kind, number, name))
                continue
            error = relative_error(computed[key], array) if key in computed else float("inf")
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
        """Return the wider tolerance: the reference's error when its numbers are changed by one rounding."""
        if self.tolerance is not None:
            return self._allowed
        movement = self._moved(delay).get(key, 0.0)
        return self._allowed.widened(
            movement,
            "what the reference moves by when weights and inputs are changed by a rounding of float64, and constants "
            "by one of their type",
        )

    def _moved(self, delay: int | None) -> Mapping[Result | Key, float]:
        """Return how far each result and value of the reference moves."""
        if delay not in self._moves:
            plain_values, shaken_values = Seen(), Seen()
            shaker = self._shaken
            if delay is None:
                pairs: dict[Result | Key, tuple[Array, Array]] = {}
                for trial, seen in ((self, plain_values), (shaker, shaken_values)):
                    trial._run(trial.first, seen)
                shaken_results = shaker._outputs(shaker.first)
                wanted = self._wanted
                if is_whole(self.first) and "B" in self.first.graphs:
                    shaken_results, wanted = (
                        shaken_results | shaker._gradients(shaker.first),
                        wanted | self._gradients(self.first),
                    )
                pairs |= {key: (shaken_results[key], array) for key, array in wanted.items()}
            else:
                plain_run, shaken_run = (
                    self.recurrence(delay, plain_values.watch),
                    shaker.recurrence(delay, shaken_values.watch),
                )
                shaken_results = _results(shaken_run)
                pairs = {key: (shaken_results[key], array) for key, array in _results(plain_run).items()}
            pairs |= {key: (shaken_values.values[key], array) for key, array in plain_values.values.items()}
            self._moves[delay] = {key: relative_error(a, b) for key, (a, b) in pairs.items()}
        return self._moves[delay]

    @cached_property
    def _moves(self) -> dict[int | None, dict[Result | Key, float]]:
        return {}

    @cached_property
    def _shaken(self) -> Trial:
        """The same trial with numbers that are each changed by one rounding.

        A constant like the square root of 2 was rounded to its type when it was written. A pass that knows the formula
        may take the number itself.
        """
        source = np.random.default_rng([self.seed, 1])

        def shake(array: Array) -> Array:
            return changed_by(2 * UNIT_ROUNDOFF["f64"], array, source)

        other = copy(self)
        other.noise = ConstantNoise(self.seed)
        # Cached results of this trial are not those of the other.
        for cached in ("_wanted", "_moves"):
            vars(other).pop(cached, None)
        other.weights = {name: shake(array) for name, array in self.weights.items()}
        other.batches = [{name: shake(np.asarray(array)) for name, array in batch.items()} for batch in self.batches]
        other.parts = microbatches_of(self.first, other.batches[0])
        return other

    # -------------------------------------------------------------------------------------------- runs

    @cached_property
    def _wanted(self) -> dict[Result, Array]:
        """The results of the first module for the first batch."""
        return self._outputs(self.first)

    def _outputs(self, module: Module) -> dict[Result, Array]:
        if not is_whole(module):
            return {key: array for key, array in _results(self.execute(module)).items() if key[0] == "output"}
        outputs: dict[Result, Array] = {}
        for k in range(self.microbatches):
            results = self.forward(module, k)
            outputs |= {("output", k, name): results[name] for name in module.outputs if name in results}
        return outputs

    def forward(self, module: Module, microbatch: int, store: DictStore | None = None) -> dict[str, Array]:
        """Run the forward graph for one microbatch, and return its results by name."""
        graph = forward_graph(module)
        results = run_graph(
            graph, self.parts[microbatch], self.store(module) if store is None else store, F64, noise=self.noise
        )
        return {v.name: array for v, array in zip(graph.results, results, strict=True)}

    def backward(self, module: Module, watch: Watch | None = None, most: int | None = None) -> DictStore:
        """Return the variables after forward and backward of the first batch, or of its first microbatches."""
        store = self.store(module)
        for k, part in enumerate(self.parts[:most]):
            inputs = {**part, **self.forward(module, k, store)}
            seen = None if watch is None else partial(watch, "B", k)
            run_graph(module.graphs["B"], inputs, store, F64, seen, self.noise)
        return store

    def _gradients(self, module: Module) -> dict[Result, Array]:
        """Return the gradients that the backward graph of a module in one piece adds up over the first batch."""
        arrays = self.backward(module).arrays
        return {("gradient", 0, name): arrays[name] for name, var in module.vars.items() if var.role == GRAD}

    def store(self, module: Module) -> DictStore:
        """Return a store of the module's variables with the weights of the trial."""
        return DictStore(initial_arrays(module, self.weights, list(module.vars), F64))

    def recurrence(self, delay: int, watch: Watch | None = None) -> InterpretedRun:
        """Run plain training with the delay of a schedule.

        Stages run their own schedule, which has to have the same delay.
        """
        assert self.trained is not None
        if not is_whole(self.trained):
            return self.execute(self.trained, watch)
        return run_recurrence(self.trained, self.weights, self.batches, delay=delay, watch=watch, noise=self.noise)

    def execute(self, module: Module, watch: Watch | None = None) -> InterpretedRun:
        """Train as the module says; stages that have no schedule yet get one."""
        if is_whole(module):
            return run_recurrence(module, self.weights, self.batches, watch=watch, noise=self.noise)
        if module.schedule is None:
            module = schedule(module, ScheduleOptions(_plainest(module), self.microbatches))
        return run_schedule(module, self.weights, self.batches if updates(module) else self.batches[:1], watch=watch)

    def _run(self, module: Module, seen: Seen) -> None:
        """Run the first batch, without updates where the module is in one piece."""
        if not is_whole(module):
            self.execute(module, seen.watch)
            return
        graph = forward_graph(module)
        for k, part in enumerate(self.parts):
            run_graph(graph, part, self.store(module), F64, partial(seen.watch, graph.name, k), self.noise)
        if "B" in module.graphs:
            self.backward(module, seen.watch)

    # -------------------------------------------------------------------------------------------- first values

    def spots(self, bad: Module, before: Module | None) -> list[Spot]:
        """Return the values that differ from those of the same name, in the order of execution; none where nothing is
        comparable.
        """
        if is_whole(bad) and self._derives(bad) and (spot := Slopes(self, bad).first()):
            return [spot]
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
        """Return all values of a run, as far as it goes."""
        seen = Seen()
        with suppress(VerifyError):
            if updates(module):
                self.execute(module, seen.watch)
            else:
                self._run(module, seen)
        return seen


def is_whole(module: Module) -> bool:
    """Return whether the model is in one piece."""
    return "main" in module.graphs or "F" in module.graphs


def updates(module: Module) -> bool:
    """Return whether a module has updates."""
    return any(graph_kind(name) == "U" for name in module.graphs)


def can_run(module: Module) -> bool:
    """Return whether a module can be run with its own delay: a schedule with one means little before weights have
    versions.
    """
    return module.schedule is None or "versioned" in module.facts or not _delay(module)


def _results(run: InterpretedRun) -> dict[Result, Array]:
    outputs_by_key: dict[Result, Array] = {
        ("output", k, name): array for k, outputs in run.outputs.items() for name, array in outputs.items()
    }
    return outputs_by_key | {("variable", 0, name): array for name, array in run.variables.items()}


def _plainest(module: Module) -> str:
    """Return a schedule without delay for stages that have none yet."""
    if not updates(module):
        return INFERENCE
    split = any(module.stage_graph(stage.index, WEIGHTS) for stage in module.stages)
    return next(name for name in TRAINING if SCHEDULES[name].splits == split)


def comparable(first: Module, module: Module) -> bool:
    """Return whether the first module predicts the results of the other: stages have only one delay, that of their
    schedule.
    """
    return is_whole(first) or not updates(module) or _delay(first) == _delay(module)


def _delay(module: Module) -> int:
    return delay_of(module) if module.schedule is not None else 0


def microbatches_per_batch(steps: Sequence[TrailStep]) -> int:
    """Return the microbatches of the schedule, or else those in the call of autodiff."""
    planned = [step.module.schedule.microbatches for step in steps if step.module.schedule is not None]
    return next(iter([*planned, *map(int, _options(steps, r"\bmicrobatches=(\d+)"))]), 1)


def _loss_scale(steps: Sequence[TrailStep]) -> float:
    """Return the loss scale in the call of autodiff, which it needs where 16 bits are too few for its gradients."""
    return next(map(float, _options(steps, r"\bloss_scale=([\d.e+]+)")), 0.0) or 1.0


def _options(steps: Sequence[TrailStep], pattern: str) -> Iterable[str]:
    return [match[1] for step in steps if (match := re.search(pattern, step.call))]


def drawn(var: Var, source: np.random.Generator) -> Array:
    """Draw a variable: products keep the size of their operands; statistics, which are not trained, are positive.
    Weights of bytes are any bytes."""
    if var.role == PARAM and var.type.dtype in ("i8", "u8"):
        low, high = (-127, 128) if var.type.dtype == "i8" else (0, 256)
        return source.integers(low, high, var.type.dims, np.dtype(f"{'u' * (low == 0)}int8"))
    if var.type.dtype not in FLOATS:
        return np.zeros(var.type.dims, array_dtype(var.type.dtype, F64))
    normal = source.standard_normal(var.type.dims) * max(1, prod(var.type.dims)) ** -0.25
    array: Array = (normal if var.role == PARAM else np.abs(normal) + 0.5).astype(np.float32)
    return array
