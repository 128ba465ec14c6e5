"""`penstock verify DUMPS --bisect`: which pass changed what a model computes, and where it shows first.

In: a dump folder of `compile --dump-ir`. Every module in it can be executed, and is, by the interpreter, in float64, on weights and batches drawn from
a seed. Out: the first pass after which the numbers are wrong, and the first value in the order of execution that is, with its operation, graph,
microbatch and error. Passes are searched by halves: what one breaks stays broken.

    before autodiff    outputs are those of the first module
    gradients          the derivative of the loss by every parameter is what moving the parameter a little shows (central differences)
    updates            outputs and variables of some steps are those of the recurrence of the first module with updates, at the schedule's delay

Every module is verified statically first: what the verifier refuses needs no numbers. Values are compared by name, which passes keep. Those of a new backward
graph have none to be compared with: each derivative is compared with differences by the value that it belongs to.

Limits: the rule of an update is not judged, only what passes make of it; kernels are not run (`penstock verify BUNDLE` runs them); a backward graph that was
parted before it stood in one piece is judged by what it does to the variables.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import prod
from pathlib import Path

import numpy as np

from penstock.checks import delay_of, relative_error, synthetic_batch
from penstock.ir.errors import PenstockError, UsageError, VerifyError
from penstock.ir.graph import PARAM, Graph, Module, Namer, Op, Value, Var, substitute
from penstock.ir.interp import DictStore, Run, Watch, initial_arrays, microbatches_of, run_graph, run_recurrence, run_schedule
from penstock.ir.numpy_ops import F64, Array, array_dtype
from penstock.ir.ops import make
from penstock.ir.text import parse_module, print_op
from penstock.ir.types import FLOATS
from penstock.ir.verify import verify
from penstock.ir.words import counted
from penstock.passes.schedules import ScheduleOptions, schedule
from penstock.terminal import say, table

# All is computed in float64, so that only the order of sums may differ; differences are good to some digits less.
TOLERANCE, SLOPE_TOLERANCE = 1e-9, 1e-5
# How far a value is moved for a difference, of its own size: the error of the difference goes with the square, that of rounding with the inverse.
_MOVE = 1e-5
_FILE = re.compile(r"(\d+)_([a-z0-9\-]+)\.ir")

# The kind of a graph, a microbatch (of an update: a batch), and the name of a value.
Key = tuple[str, int, str]


@dataclass(frozen=True)
class Dump:
    """A module of the folder, and the call that made it."""

    path: Path
    call: str
    module: Module


@dataclass(frozen=True)
class Off:
    """A value that is not what it should be."""

    what: str
    error: float
    tolerance: float

    def __str__(self) -> str:
        if np.isfinite(self.error):
            return f"{self.what} is off by {self.error:.2g} (allowed {self.tolerance:g})"
        return f"{self.what} has another shape, or is not finite"


@dataclass
class Seen:
    """What the operations of a run gave, in the order in which they were done. Of copies that several stages or ranks have, the first."""

    values: dict[Key, Array] = field(default_factory=dict)
    makers: dict[Key, tuple[str, Op]] = field(default_factory=dict)

    def watch(self, graph: str, number: int, op: Op, results: Sequence[Array]) -> None:
        kind = "F" if graph == "main" else graph.rpartition(".")[2]
        for value, array in zip(op.outs, results, strict=True):
            self.values.setdefault((kind, number, value.name), np.array(array))
            self.makers.setdefault((kind, number, value.name), (graph, op))

    def told(self, key: Key, error: float) -> str:
        graph, op = self.makers[key]
        number = f"{'batch' if key[0] in 'UN' else 'microbatch'} {key[1]}"
        return f"%{key[2]} of {number} in @{graph}, off by {error:.2g}:\n    {print_op(op)}"


class Trial:
    """Drawn weights and batches, and what modules make of them."""

    def __init__(self, dumps: Sequence[Dump], steps: int, seed: int, tolerance: float | None) -> None:
        self.first, self.steps, self.seed = dumps[0].module, steps, seed
        self.tolerance = TOLERANCE if tolerance is None else tolerance
        self.microbatches = _microbatches(dumps)
        # The first module that updates: what all later ones are compared with.
        self.trained = next((dump.module for dump in dumps if _updates(dump.module)), None)
        self.weights: dict[str, Array] = {}
        for name, var in ((name, var) for dump in dumps for name, var in dump.module.vars.items()):
            if var.init == "file":
                self.weights.setdefault(name, _drawn(var, np.random.default_rng([seed, zlib.crc32(name.encode())])))
        self.batches = [synthetic_batch(self.first, self.microbatches, seed, t) for t in range(steps)]
        self.parts = microbatches_of(self.first, self.batches[0])

    # -------------------------------------------------------------------------------------------- what is wrong with a module

    def problem(self, module: Module) -> Off | PenstockError | None:
        try:
            verify(module)
            return next(self._differences(module), None)
        except PenstockError as error:
            return error

    def _differences(self, module: Module) -> Iterator[Off]:
        if _is_whole(module):
            for k, wanted in enumerate(self._wanted):
                found = self._forward(module, k)
                yield from self._far((f"%{name} of microbatch {k}", found.get(name), wanted[name]) for name in module.outputs)
            if "B" in module.graphs:
                yield from self._slopes(module)
        if self.trained is None or not _updates(module) or module is self.trained:
            return
        wanted_run, run = self.recurrence(_delay(module)), self.execute(module)
        for number, outputs in wanted_run.outputs.items():
            found = run.outputs.get(number, {})
            yield from self._far((f"%{name} of microbatch {number}", found.get(name), array) for name, array in outputs.items())
        yield from self._far(
            (f"@{name} after {counted(self.steps, 'step')}", run.variables.get(name), array)
            for name, array in wanted_run.variables.items()
            if name in module.vars
        )

    def _far(self, rows: Iterable[tuple[str, Array | None, Array]]) -> Iterator[Off]:
        for what, found, wanted in rows:
            error = float("inf") if found is None else relative_error(found, wanted)
            if not error <= self.tolerance:
                yield Off(what, error, self.tolerance)

    @cached_property
    def _wanted(self) -> list[dict[str, Array]]:
        """What the first module gives for every microbatch of the first batch."""
        return [self._forward(self.first, k) for k in range(self.microbatches)]

    def _forward(self, module: Module, microbatch: int, store: DictStore | None = None) -> dict[str, Array]:
        graph = _forward_graph(module)
        results = run_graph(graph, self.parts[microbatch], self._store(module) if store is None else store, F64)
        return {v.name: array for v, array in zip(graph.results, results, strict=True)}

    def _store(self, module: Module) -> DictStore:
        return DictStore(initial_arrays(module, self.weights, list(module.vars), F64))

    def recurrence(self, delay: int, watch: Watch | None = None) -> Run:
        """Plain training, as late as a schedule is."""
        assert self.trained is not None
        return run_recurrence(self.trained, self.weights, self.batches, delay=delay, watch=watch)

    def execute(self, module: Module, watch: Watch | None = None) -> Run:
        """Training as the module says; stages that have no schedule yet get one."""
        if _is_whole(module):
            return run_recurrence(module, self.weights, self.batches, watch=watch)
        if module.schedule is None:
            module = schedule(module, ScheduleOptions("1f1b", self.microbatches))
        return run_schedule(module, self.weights, self.batches, watch=watch)

    # -------------------------------------------------------------------------------------------- derivatives

    def _slopes(self, module: Module) -> Iterator[Off]:
        """Derivatives of the first batch's loss by the parameters, against differences of it."""
        start, store = self._store(module), self._backward(module)
        for name, var in module.vars.items():
            gradient = store.arrays.get(f"{name}.grad")
            if var.role == PARAM and var.type.dtype in FLOATS and gradient is not None:
                at = start.arrays[name]
                off = self._slope_off(f"@{name}.grad", gradient, at, partial(self._loss_with, module, name, at))
                yield from [off] if off is not None else []

    def _backward(self, module: Module, watch: Watch | None = None) -> DictStore:
        """The variables after forward and backward of the first batch."""
        store = self._store(module)
        for k, part in enumerate(self.parts):
            given = {**part, **self._forward(module, k, store)}
            run_graph(module.graphs["B"], given, store, F64, None if watch is None else partial(watch, "B", k))
        return store

    def _slope_off(self, what: str, gradient: Array, at: Array, loss: Callable[[Array], float]) -> Off | None:
        """Along a drawn direction. Where the loss has a kink nearby, differences to both sides differ, by which the derivative may be off."""
        direction: Array = np.asarray(np.random.default_rng([self.seed, zlib.crc32(what.encode())]).standard_normal(at.shape))
        move = _MOVE * max(1.0, float(np.abs(at).max(initial=0.0)))
        left, middle, right = loss(-move * direction), loss(0.0 * direction), loss(move * direction)
        slope, found = (right - left) / (2 * move), float(np.sum(gradient * direction))
        kink = abs(right - 2 * middle + left) / move
        size = max(abs(slope), float(np.linalg.norm(gradient)), 1e-8)
        error = max(0.0, abs(found - slope) - kink) / size
        return None if error <= SLOPE_TOLERANCE else Off(what, error, SLOPE_TOLERANCE)

    def _loss_with(self, module: Module, name: str, at: Array, added: Array) -> float:
        """The mean over the first batch, something added to a variable."""
        found = []
        for k in range(self.microbatches):
            store = self._store(module)
            store.arrays[name] = at + added
            found.append(self._forward(module, k, store)[module.outputs[0]])
        return float(np.mean(found))

    def _loss_moving(self, module: Module, value: Value, added: Array) -> float:
        """That of the first microbatch, something added to a value in the middle; as it counts in a batch."""
        graph = _forward_graph(module)
        namer = Namer.of(graph)
        more = Value(namer.fresh("added"), value.type)
        moved = make("add", (value, more), [namer.fresh(value.name)])
        at = next(i for i, op in enumerate(graph.ops) if value in op.outs) + 1
        changed: Mapping[Value, Value] = {value: moved.outs[0]}
        later = [Op(op.kind, substitute(op.ins, changed), op.outs, op.attrs, op.loc) for op in graph.ops[at:]]
        outs = substitute(graph.outs, changed)
        again = Graph(graph.name, (*graph.ins, more), outs, (*graph.ops[:at], moved, *later))
        results = run_graph(again, {**self.parts[0], more.name: added}, self._store(module), F64)
        return float(results[[v.name for v in graph.outs].index(module.outputs[0])]) / self.microbatches

    # -------------------------------------------------------------------------------------------- where it shows first

    def first_value(self, bad: Module, before: Module | None) -> str:
        """The first value that is not what the one of its name should be; empty where there is none."""
        if _is_whole(bad) and "B" in bad.graphs and (found := self._first_slope(bad)):
            return found
        right: dict[Key, Array] = {}
        if before is not None and (_delay(before) == _delay(bad) or not _updates(bad)):
            right |= self._observe(before).values
        if self.trained is not None and _updates(bad):
            wanted = Seen()
            self.recurrence(_delay(bad), wanted.watch)
            right |= wanted.values
        seen = self._observe(bad)
        errors = ((key, relative_error(array, right[key])) for key, array in seen.values.items() if key in right)
        return next((seen.told(key, error) for key, error in errors if not error <= self.tolerance), "")

    def _observe(self, module: Module) -> Seen:
        """All values of a run, as far as it goes."""
        seen = Seen()
        with suppress(VerifyError):
            if _updates(module):
                self.execute(module, seen.watch)
                return seen
            for k, part in enumerate(self.parts):
                run_graph(_forward_graph(module), part, self._store(module), F64, partial(seen.watch, "F", k))
            if "B" in module.graphs:
                self._backward(module, seen.watch)
        return seen

    def _first_slope(self, module: Module) -> str:
        """The first derivative in the order of the backward graph that is not what differences show."""
        seen = Seen()
        self._backward(module, seen.watch)
        values = {v.name: v for op in _forward_graph(module).ops for v in op.outs if v.type.dtype in FLOATS}
        for key, array in seen.values.items():
            name = key[2].removesuffix(".grad")
            # Where a derivative has several parts, none of them is the whole.
            if key[1] or name not in values or not key[2].endswith(".grad") or ("B", 0, f"{key[2]}.1") in seen.values:
                continue
            value = values[name]
            off = self._slope_off(f"%{key[2]}", array, np.zeros(value.type.dims), partial(self._loss_moving, module, value))
            if off is not None:
                return seen.told(key, off.error)
        return ""


def _is_whole(module: Module) -> bool:
    return "main" in module.graphs or "F" in module.graphs


def _forward_graph(module: Module) -> Graph:
    return module.graphs.get("F") or module.graphs["main"]


def _updates(module: Module) -> bool:
    return any(name.rpartition(".")[2] == "U" for name in module.graphs)


def _delay(module: Module) -> int:
    return delay_of(module) if module.schedule is not None else 0


def _microbatches(dumps: Sequence[Dump]) -> int:
    """As the schedule says, or else as autodiff was told."""
    planned = [dump.module.schedule.microbatches for dump in dumps if dump.module.schedule is not None]
    told = [int(found[1]) for dump in dumps if (found := re.search(r"\bmicrobatches=(\d+)", dump.call))]
    return next(iter([*planned, *told]), 1)


def _drawn(var: Var, source: np.random.Generator) -> Array:
    """Products keep the size of what goes through them; statistics, which nobody trains, are positive."""
    if var.type.dtype not in FLOATS:
        return np.zeros(var.type.dims, array_dtype(var.type.dtype, F64))
    drawn = source.standard_normal(var.type.dims) * max(1, prod(var.type.dims)) ** -0.25
    found: Array = (drawn if var.role == PARAM else np.abs(drawn) + 0.5).astype(np.float32)
    return found


# ------------------------------------------------------------------------------------------------ the search


def read_dumps(folder: str | Path) -> list[Dump]:
    """The modules of a dump folder in the order of the passes."""
    named = sorted((int(match[1]), match[2], path) for path in Path(folder).glob("*.ir") if (match := _FILE.fullmatch(path.name)))
    if not named or named[0][:2] != (0, "input"):
        raise UsageError("there is no 00_input.ir", where=str(folder), hint="give a folder that `penstock compile --dump-ir` wrote")
    try:
        rows = [line.split("\t") for line in (Path(folder) / "passes.tsv").read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise UsageError(f"cannot read passes.tsv: {error}", where=str(folder)) from error
    calls = {int(row[0]): row[1] for row in rows if len(row) > 1 and row[0].isdigit()}
    return [Dump(path, calls.get(number, name), parse_module(path.read_text(encoding="utf-8"), str(path))) for number, name, path in named]


def bisect(folder: str | Path, *, steps: int, seed: int, tolerance: float | None) -> int:
    """Say which pass of a dump folder changes the numbers, and where; VerifyError if one does."""
    dumps = read_dumps(folder)
    trial = Trial(dumps, steps, seed, tolerance)
    problems: dict[int, Off | PenstockError | None] = {}

    def is_bad(i: int) -> bool:
        if i not in problems:
            say(f"running {dumps[i].path.name}")
            problems[i] = trial.problem(dumps[i].module)
        return problems[i] is not None

    # What everything later is compared with is judged first.
    judge = next((i for i, dump in enumerate(dumps) if _updates(dump.module)), len(dumps) - 1)
    high = judge if is_bad(judge) else len(dumps) - 1
    low = -1 if is_bad(0) else 0
    while is_bad(high) and high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_bad(middle) else (middle, high)
    print(table(["module", "verdict"], [[dumps[i].path.name, _verdict(problem)] for i, problem in sorted(problems.items())]))
    problem, culprit = problems[high], dumps[high]
    if problem is None:
        print(f"no pass changes what {trial.first.name} computes")
        return 0
    if not high:
        raise VerifyError(f"the model itself is wrong: {problem}", where=str(culprit.path))
    before = dumps[high - 1]
    print(f"first wrong after: {culprit.call}\n  {problem}")
    shown = trial.first_value(culprit.module, before.module)
    print(f"first value that is off: {shown}" if shown else "no single value is off that had one of its name before")
    raise VerifyError(
        f"pass {culprit.call} changes what {trial.first.name} computes",
        where=str(culprit.path),
        hint=f"penstock opt {before.path} -p '{culprit.call}' -o again.ir; penstock diff {before.path} {culprit.path}",
    )


def _verdict(problem: Off | PenstockError | None) -> str:
    return "ok" if problem is None else str(problem).splitlines()[0]
