"""The input of a report: the program, its passes with their modules, plan, times, sources of kernels.

A compile has all of it in memory; reading.py reads it from files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.inspection.summary import RungFacts
from penstock.ir.graph import Module
from penstock.ir.schedule import Action
from penstock.runtime.telemetry.collective_times import CollectiveTotal

if TYPE_CHECKING:
    from penstock.planning.predict import Predicted


@dataclass(frozen=True)
class PassStep:
    """A pass of the pipeline; the first step is the pipeline's input.

    `module` is the result, None where nothing changed; `ms` is None where it was not measured.
    """

    number: int
    call: str
    ms: float | None
    module: Module | None

    @property
    def name(self) -> str:
        return self.call.partition("{")[0]


@dataclass(frozen=True)
class RunTrace:
    """A measured run, by rank: actions with start and duration, and (time, bytes held) where that was traced; and the
    totals of its collectives.

    Times are seconds from the first action of all.
    """

    actions: Mapping[int, list[tuple[Action, float, float]]]
    held: Mapping[int, list[tuple[float, int]]]
    collectives: Sequence[CollectiveTotal] = ()


@dataclass(frozen=True)
class Material:
    """The input of a report.

    `module` is the newest there is. `sources` are those of kernels by graph and name (`s0.F/k3`), `programs` those of
    whole stages by file. `failure` is the error that ended the pipeline, `predicted` the simulator's prediction from
    the module alone, if the caller has it. `rungs` are the sizes of a bundle with bounded dimensions.
    """

    module: Module
    steps: tuple[PassStep, ...] = ()
    plan: Mapping[str, Any] = field(default_factory=dict)
    trace: RunTrace | None = None
    sources: Mapping[str, str] = field(default_factory=dict)
    programs: Mapping[str, str] = field(default_factory=dict)
    failure: str = ""
    predicted: Predicted | None = None
    rungs: Sequence[RungFacts] = ()
