"""The place where two runs part: the first value that differs from the value of the same name.

Values are taken in the order of execution.

Values are compared by name, which passes keep: a value without a counterpart is not judged. Of copies that several
stages or ranks have, the first counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from penstock.ir.action_kinds import FORWARD
from penstock.ir.graph import Op, graph_kind, graph_stage
from penstock.ir.interpreter.ops import Array
from penstock.ir.schedule import PER_BATCH, READERS
from penstock.ir.text import print_op
from penstock.support.words import counted
from penstock.verification.roundings import relative_error
from penstock.verification.tolerance import Allowed

# The kind of a graph, a microbatch (of an update: a batch), and the name of a value.
Key = tuple[str, int, str]


@dataclass(frozen=True)
class Spot:
    """A value that is off, and where it is made. `kernel` computes it, where there is one."""

    graph: str
    op: Op | None
    tensor: str
    unit: str
    error: float
    allowed: Allowed
    kernel: str = ""

    @property
    def stage(self) -> int | None:
        """The stage of the graph, if the model is cut into stages."""
        return graph_stage(self.graph)

    def lines(self, source: str = "") -> list[str]:
        """Return lines for people: stage, kernel, graph, operation, tensor, error, and the tolerance with its reason.

        `source` is what the model calls the maker of the tensor, where that is known.
        """
        rows = [
            ("stage", "none: the model is whole" if self.stage is None else str(self.stage)),
            ("graph", f"@{self.graph}"),
            ("kernel", self.kernel),
            ("op", "" if self.op is None else print_op(self.op).strip()),
            ("tensor", self.tensor + (f" of {self.unit}" if self.unit else "")),
            ("model", source),
            ("error", told(self.error)),
            ("allowed", str(self.allowed)),
        ]
        return [f"  {name:8} {text}" for name, text in rows if text]


@dataclass(frozen=True)
class Errors:
    """The errors of values.

    `unjudged` ones have no limit: where the interpreter, rounding as the types say, has other elements finite than in
    float64, or none, its own error is infinite. `blurred` ones cannot be judged either: rounding moves them too far.
    """

    largest: float = 0.0
    unjudged: int = 0
    blurred: int = 0

    @classmethod
    def of(cls, error: float, allowed: Allowed) -> Errors:
        """Return the error of one value, unjudged where its limit is infinite."""
        return cls(error, blurred=int(allowed.blurred)) if np.isfinite(allowed.error) else cls(unjudged=1)

    def __add__(self, other: Errors) -> Errors:
        return Errors(max(self.largest, other.largest), self.unjudged + other.unjudged, self.blurred + other.blurred)

    @property
    def verdict(self) -> str:
        """The verdict where no value is off."""
        parts = ["ok"]
        if self.unjudged:
            parts.append(f"{counted(self.unjudged, 'value')} not judged: not finite in the interpreter")
        if self.blurred:
            parts.append(f"cannot tell of {counted(self.blurred, 'value')}, as rounding alone moves them too far")
        return "; ".join(parts)


def told(error: float) -> str:
    """Return an error as text."""
    return f"{error:.2g} of the largest element" if np.isfinite(error) else "another shape, or not finite"


@dataclass
class Seen:
    """The results of the operations of a run, in the order in which they were done."""

    values: dict[Key, Array] = field(default_factory=dict)
    makers: dict[Key, tuple[str, Op]] = field(default_factory=dict)

    def watch(self, graph: str, number: int, op: Op, results: Sequence[Array]) -> None:
        """Record the results of an operation."""
        kind = graph_kind(graph)
        for value, array in zip(op.outs, results, strict=True):
            self.values.setdefault((kind, number, value.name), np.array(array))
            self.makers.setdefault((kind, number, value.name), (graph, op))

    def first(self) -> dict[str, Array]:
        """Return the values of the first microbatch by name."""
        return {name: array for (_, number, name), array in self.values.items() if not number}

    def spot(self, key: Key, error: float, allowed: Allowed) -> Spot:
        """Return a recorded value that is off, with its maker."""
        graph, op = self.makers[key]
        unit = f"{'batch' if key[0] in PER_BATCH else 'microbatch'} {key[1]}"
        return Spot(graph, op, f"%{key[2]}", unit, error, allowed)

    def off(self, right: Mapping[Key, Array], judge: Callable[[Key, float], Allowed]) -> Iterator[Spot]:
        """Yield all values that differ from `right`, in the order of execution."""
        for key, array in self.values.items():
            # A value that a backward graph computes again is compared with that of the forward graph.
            twin = key if key in right else (FORWARD, *key[1:])
            if twin in right and (key[0] in READERS or twin == key):
                error = relative_error(array, right[twin])
                # nan is off, too.
                if not error <= (allowed := judge(twin, error)).error:
                    yield self.spot(key, error, allowed)
