"""Faults of one number: in models that are right, a weight or a constant is changed, and `verify` is asked.

`python tests/verification/faults.py [COUNT [SEED]]` draws so many, and prints which are found, of which nobody can tell,
and which are missed.

A fault counts where it has an effect on the inputs that were drawn; one without is drawn again. The judge of that is the
interpreter in float64, with the fault and without. An output must move by more than the tolerance of `verify`, and by
more than BEYOND times what rounding explains there. What rounding explains is SLACK times the largest move by noise
(roundings.py), in the runs that `verify` makes at most. A program in float32 is off by the effect and by its own
roundings, which are up to half of that: hence BEYOND.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest

if __name__ == "__main__":
    # Relative imports of a program start where its package is said to be.
    sys.path[0], __package__ = str(Path(__file__).resolve().parents[1]), "verification"

from penstock.commands.parser import main
from penstock.ir.graph import Module, Op, rewrite
from penstock.ir.interpreter.graphs import run_graph
from penstock.ir.interpreter.ops import F64
from penstock.ir.interpreter.store import DictStore, initial_arrays
from penstock.ir.types import FLOATS
from penstock.planning.model import Model, from_onnx
from penstock.planning.pipeline import plan_model
from penstock.planning.plan import Plan
from penstock.verification import checks
from penstock.verification.inputs import synthetic_batch
from penstock.verification.roundings import MORE_RUNS, RUNS, RoundingEffect, RoundingNoise, allowed_by, distance
from penstock.verification.verdicts import UNTOLD

from .families import FAMILIES, write_family

CHANGES = {"sign": lambda x: -x, "doubled": lambda x: 2 * x, "zero": lambda x: 0 * x, "a tenth more": lambda x: 1.1 * x}
FOUND, MISSED, NONE = "found", "missed", "no effect"
BEYOND = 1.5
# Faults without an effect in a row, after which the next family has its turn.
PATIENCE = 12
# The code of a model or the file that is read: what has the fault. The other has none.
PLACES = ("import", "code")


@dataclass(frozen=True)
class Fault:
    """One number of one model, what becomes of it, by how much that moves an output, and what `verify` answers."""

    family: str
    place: str
    number: str
    change: str
    effect: float
    verdict: str

    def __str__(self) -> str:
        return f"{self.verdict:12}{self.effect:8.1e}  {self.family:24}{self.place:8}{self.change:14}{self.number}"


def broken(model: Model, source: np.random.Generator, change: str) -> tuple[Model, str]:
    """Return a model with one other number, and the name of the number: as likely a constant as a weight."""
    module, weights = model.module, model.imported.weights
    floats = {name: array for name, array in weights.items() if array.dtype.kind == "f" and np.any(array)}
    constants = [op for op in module.graphs["main"].ops if op.kind == "const" and _numbers(op) and any(_numbers(op))]
    if constants and (not floats or source.random() < 0.5):
        op = constants[int(source.integers(len(constants)))]
        return _with_constant(model, op, source, change), f"constant %{op.outs[0].name}"
    name = sorted(floats)[int(source.integers(len(floats)))]
    array = floats[name].copy()
    places = np.flatnonzero(array)
    at = int(places[source.integers(len(places))])
    array.reshape(-1)[at] = CHANGES[change](array.reshape(-1)[at])
    return Model(replace(model.imported, weights={**weights, name: array})), f"@{name}[{at}]"


def _numbers(op: Op) -> list[float]:
    if op.outs[0].type.dtype not in FLOATS:
        return []
    value = op.attrs["value"]
    return [float(x) for x in (value if isinstance(value, tuple) else (value,))]  # type: ignore[arg-type]


def _with_constant(model: Model, op: Op, source: np.random.Generator, change: str) -> Model:
    numbers = _numbers(op)
    places = [i for i, x in enumerate(numbers) if x]
    at = places[int(source.integers(len(places)))]
    numbers[at] = CHANGES[change](numbers[at])
    value = tuple(numbers) if isinstance(op.attrs["value"], tuple) else numbers[0]
    module = model.module
    graph = rewrite(module.graphs["main"], lambda other: [other.with_attrs(value=value)] if other is op else None)
    changed: Module = module.but(graphs={**module.graphs, "main": graph})
    return Model(replace(model.imported, module=changed))


def draw(
    count: int,
    seed: int,
    folder: Path,
    backend: str = "numpy",
    families: Sequence[str] = tuple(FAMILIES),
    write: Callable[[str, int, Path], tuple[Path, Path]] = write_family,
    places: Sequence[str] = PLACES,
) -> Iterator[Fault]:
    """Yield so many faults that have an effect, with their verdicts; those without have the verdict NONE.

    Families take turns. A turn ends with an effect, or after PATIENCE faults without one: some models scale what their
    layers add down so far that hardly a number shows.
    """
    source = np.random.default_rng(seed)
    number = effects = turn = tries = 0
    while effects < count:
        family, place = families[turn % len(families)], places[int(source.integers(len(places)))]
        change = list(CHANGES)[int(source.integers(len(CHANGES)))]
        path, _ = write(family, int(source.integers(1000)), folder)
        right = from_onnx(path)
        wrong, name = broken(right, source, change)
        number += 1
        effect, shows = effect_of(*((right, wrong) if place == "code" else (wrong, right)), number)
        answer = asked(path, wrong, place, backend, number) if shows else NONE
        effects += shows
        tries = 0 if shows else tries + 1
        if shows or tries == PATIENCE:
            turn, tries = turn + 1, 0
        yield Fault(family, place, name, change, effect, answer)


def asked(path: Path, wrong: Model, place: str, backend: str, seed: int) -> str:
    """Return what `verify` says of a file whose import, or whose code, is that of another model."""
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        if place == "import":
            patch.setattr(checks, "from_onnx", _giving(wrong))
        else:
            patch.setattr("penstock.planning.pipeline.plan_model", _planning(wrong))
        code = main(["verify", str(path), "--backend", backend, "--seed", str(seed)])
    assert code in (0, 5), err.getvalue()
    return FOUND if code == 5 else UNTOLD if UNTOLD in out.getvalue() else MISSED


def _giving(wrong: Model) -> Callable[..., Model]:
    return lambda *given, **named: wrong


def _planning(wrong: Model) -> Callable[..., Plan]:
    return lambda model, *given, **named: plan_model(wrong, *given, **named)


def effect_of(judge: Model, other: Model, seed: int) -> tuple[float, bool]:
    """Return how far the outputs of another model are from a judge's in float64, and whether that shows beside rounding."""
    inputs = synthetic_batch(judge.module, 1, seed)
    exact, moved = _outputs(judge, inputs), _outputs(other, inputs)
    apart = {name: distance(moved[name], array) for name, array in exact.items()}
    off = {name: one for name, one in apart.items() if one.worst > checks.TOLERANCE}
    largest = max(one.worst for one in apart.values())
    if not off:
        return largest, False
    noisy = RoundingEffect(lambda noise: _outputs(judge, inputs, noise), exact, seed).moved(RUNS + MORE_RUNS)
    return largest, any(not one.within(allowed_by(noisy[name]).times(BEYOND)) for name, one in off.items())


def _outputs(
    model: Model, inputs: Mapping[str, np.ndarray], noise: RoundingNoise | None = None
) -> dict[str, np.ndarray]:
    graph = model.module.graphs["main"]
    store = DictStore(initial_arrays(model.module, model.imported.weights, list(model.module.vars), F64))
    results = run_graph(graph, inputs, store, F64, None, noise)
    return {v.name: np.asarray(array) for v, array in zip(graph.results, results, strict=True)}


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    with TemporaryDirectory() as scratch:
        numbers = [int(word) for word in sys.argv[1:]]
        faults = []
        for fault in draw(*(numbers or [50]), *([0] if len(numbers) < 2 else []), Path(scratch)):
            faults.append(fault)
            print(fault, flush=True)
    print(dict(Counter(fault.verdict for fault in faults)))
