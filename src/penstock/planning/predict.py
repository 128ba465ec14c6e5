"""Predictions of the simulator for a planned program.

In: a planned module. Out: a `Predicted`: the simulated run, and the seconds of a batch that every rank computes. A
plain prediction depends on the module alone; another one knows what was measured on this machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from penstock.calibration.corrections import Corrected, best_prices, corrected, known_times
from penstock.calibration.measured import Measured, stage_times
from penstock.ir.graph import Module
from penstock.passes.costs.prices import rank_seconds
from penstock.passes.simulator.forecast import BATCHES, Forecast, forecast, seconds_of


@dataclass(frozen=True)
class Predicted:
    """A simulated program. `times` are seconds of the computations of every rank by kind, of which so many were
    `measured`; `busy` are those of a batch."""

    forecast: Forecast
    step: float
    busy: dict[int, float]
    times: dict[tuple[int, str], float]
    measured: int = 0
    correction: Corrected | None = None

    @property
    def pace(self) -> float:
        """The seconds of the rank that computes longest."""
        return max(self.busy.values(), default=0.0)


def predict(module: Module) -> Predicted:
    """Simulate a planned module on its own cluster, with estimates that depend on the module alone."""
    return _simulated(module, rank_seconds(module))


def predict_here(module: Module, plain: Predicted | None = None) -> Predicted:
    """Simulate a planned module with all that is known on this machine: measured times of its stages, else estimates.
    Where that is no more than the `plain` prediction knew, the plain one is returned."""
    times, estimated = stage_times(module, Measured(store=known_times()), best_prices())
    correction = corrected() if estimated else None
    if plain is not None and times == plain.times:
        return replace(plain, measured=len(times) - estimated, correction=correction)
    return _simulated(module, times, len(times) - estimated, correction)


def predict_timed(module: Module, rows: Sequence[Mapping[str, float]]) -> Predicted:
    """Simulate a planned module with times of its computations that were measured, a row for each rank."""
    times = rank_seconds(module)
    known = {(rank, kind): row[kind] for rank, kind in times if kind in (row := rows[rank])}
    return _simulated(module, times | known, len(known))


def _simulated(
    module: Module, times: dict[tuple[int, str], float], measured: int = 0, correction: Corrected | None = None
) -> Predicted:
    assert module.schedule is not None
    seconds = seconds_of(module, times)
    run = forecast(module, seconds, BATCHES)
    busy = {rank: sum(seconds(rank, a) for a in program.batch) for rank, program in module.schedule.ranks.items()}
    return Predicted(run, run.step, busy, times, measured, correction)
