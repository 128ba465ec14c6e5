"""Runs that end as soon as they repeat themselves, beside whole runs."""

from __future__ import annotations

from random import Random

import pytest

from penstock.ir.schedule import Schedule
from penstock.passes.schedules.late_updates import sum_late
from penstock.passes.schedules.schedule import PACK_SCHEDULES, SCHEDULES, build_packs, build_schedule
from penstock.passes.simulator import periods
from penstock.passes.simulator.machine import Route, Seat, SimulatedMachine
from penstock.passes.simulator.simulate import simulate, step_seconds
from penstock.passes.simulator.wiring import wire_chain

BATCHES = 6
KINDS = [kind for kind, row in (SCHEDULES | PACK_SCHEDULES).items() if kind != "forward" and not row.delay]


def drawn(rng: Random, kind: str) -> tuple[Schedule, SimulatedMachine, dict[tuple[int, str, int], float]]:
    """Return a program, a machine of ranks with quotas, cards and links, and the seconds of actions."""
    ranks = rng.randint(2, 5)
    if kind in PACK_SCHEDULES:
        row = PACK_SCHEDULES[kind]
        program = wire_chain(build_packs(kind, row.packs(ranks, row.each[0]), ranks * rng.randint(1, 3)))
    else:
        count = rng.randint(2, 9)
        shares = [(count,) if rng.random() < 0.7 else (count - 1, 1) for _ in range(ranks)]
        program = wire_chain(sum_late(build_schedule(kind, ranks, count, shares), 0))
    cards = rng.random() < 0.5
    rate = rng.choice([0.5, 2.0, 20.0])

    def route(source: int, target: int) -> Route:
        own = (f"{source}>{target}", 2 * rate)
        return Route((own, (f"{source} out", rate), (f"{target} in", rate)) if cards else (own,), 0.01)

    seats = {}
    if rng.random() < 0.5:
        seats = {rank: Seat("h", 99, quota=rng.choice([0.25, 0.5, 1.0]), period=0.1) for rank in program.ranks}
    seconds = {
        (rank, kind, stage): rng.choice([0.1, 0.3, 1.0]) * rng.uniform(0.5, 2.0)
        for rank in program.ranks
        for kind in "FBWU"
        for stage in range(ranks * 4)
    }
    return program, SimulatedMachine(route, seats), seconds


def worst(kind: str, seed: int) -> float:
    """Return by which part steps of short runs are off at most."""
    rng, off = Random(seed), [0.0]
    for _ in range(20):
        program, machine, lasts = drawn(rng, kind)

        def seconds(rank: int, action: object, lasts: dict[tuple[int, str, int], float] = lasts) -> float:
            return lasts.get((rank, action.kind, action.stage), 0.0)  # type: ignore[attr-defined]

        def nbytes(phase: str, source: int, target: int) -> float:
            return 0.2 + 0.1 * target

        whole = simulate(program, BATCHES, seconds, nbytes, machine, reduced=lambda stage: 0.3).step_seconds
        short = step_seconds(program, BATCHES, seconds, nbytes, machine, lambda stage: 0.3)
        off.append(abs(short / whole - 1))
    return max(off)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_repeats_itself_takes_as_long_as_a_whole_one(kind: str) -> None:
    assert worst(kind, 7) < 1e-6


def test_runs_that_only_nearly_repeat_themselves_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: times of two periods may differ by half."""
    monkeypatch.setattr(periods, "_SAME", 0.5)
    assert max(worst(kind, 7) for kind in KINDS) > 0.01


def test_under_delayed_schedules_ranks_still_get_ahead() -> None:
    """So these are not run short."""
    assert worst("2bw", 7) > 0.01
