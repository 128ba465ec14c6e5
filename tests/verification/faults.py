"""Faults of one number: in models that are right, a weight or a constant is changed, and `verify` is asked.

`python tests/verification/faults.py [COUNT [SEED]]` draws so many, and prints which are found, of which nobody can tell,
and which are missed.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator
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

from .families import FAMILIES, write_family

CHANGES = {"sign": lambda x: -x, "doubled": lambda x: 2 * x, "zero": lambda x: 0 * x, "a tenth more": lambda x: 1.1 * x}
# The code of a model or the file that is read: what has the fault. The other has none.
PLACES = ("import", "code")


@dataclass(frozen=True)
class Fault:
    """One number of one model, what becomes of it, and what became of that."""

    family: str
    place: str
    number: str
    change: str
    effect: float
    answer: str

    @property
    def verdict(self) -> str:
        """What came of it; `no effect` where results in float64 stay within the tolerance on the inputs that were drawn."""
        return "no effect" if self.answer == "missed" and self.effect <= checks.TOLERANCE else self.answer

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


def draw(count: int, seed: int, folder: Path, backend: str = "numpy") -> Iterator[Fault]:
    """Yield so many faults with their verdicts."""
    source = np.random.default_rng(seed)
    families = list(FAMILIES)
    for number in range(count):
        family, place = families[number % len(families)], PLACES[int(source.integers(2))]
        change = list(CHANGES)[int(source.integers(len(CHANGES)))]
        path, _ = write_family(family, int(source.integers(1000)), folder)
        right = from_onnx(path)
        wrong, name = broken(right, source, change)
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()):
            if place == "import":
                patch.setattr(checks, "from_onnx", _giving(wrong))
            else:
                patch.setattr("penstock.planning.pipeline.plan_model", _planning(wrong))
            code = main(["verify", str(path), "--backend", backend, "--seed", str(number)])
        assert code in (0, 5)
        answer = "found" if code == 5 else "cannot tell" if "cannot tell" in out.getvalue() else "missed"
        yield Fault(family, place, name, change, _effect(right, wrong, number), answer)


def _giving(wrong: Model) -> Callable[..., Model]:
    return lambda *given, **named: wrong


def _planning(wrong: Model) -> Callable[..., Plan]:
    return lambda model, *given, **named: plan_model(wrong, *given, **named)


def _effect(right: Model, wrong: Model, seed: int) -> float:
    """How far the fault moves the outputs in float64, at most, over their largest magnitude."""
    inputs = synthetic_batch(right.module, 1, seed)
    results = []
    for model in (right, wrong):
        store = DictStore(initial_arrays(model.module, model.imported.weights, list(model.module.vars), F64))
        results.append(run_graph(model.module.graphs["main"], inputs, store, F64))
    return max(checks.relative_error(b, a) for a, b in zip(*results, strict=True))


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    with TemporaryDirectory() as scratch:
        numbers = [int(word) for word in sys.argv[1:]]
        faults = []
        for fault in draw(*(numbers or [50]), *([0] if len(numbers) < 2 else []), Path(scratch)):
            faults.append(fault)
            print(fault, flush=True)
    print(dict(Counter(fault.verdict for fault in faults)))
