"""Devices within quotas of their host's cores: several that are busy at once take no more than their quotas, and one
that waited has saved time up, as a model of the kernel's periods has it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.ir.cluster.cluster import Cluster
from penstock.ir.schedule import Action, Program, Schedule
from penstock.models import write_mlp
from penstock.passes.simulator import forecast
from penstock.passes.simulator.machine import Seat, SimulatedMachine
from penstock.passes.simulator.quotas import SavedTime
from penstock.passes.simulator.simulate import simulate
from penstock.planning.predict import predict

TRAINING = ps.Training(loss="mse", optimizer=ps.AdamW(lr=1e-3), microbatches=4)


@pytest.fixture
def model(tmp_path: Path) -> ps.Model:
    return ps.from_onnx(write_mlp(tmp_path / "mlp.onnx", [256] * 5, batch=64))


def seconds(model: ps.Model, quotas: tuple[float, ...], period: float = 0.0) -> float:
    """Return the prediction of stages on devices of the same rates, whose quotas are these."""
    local = Cluster.local(len(quotas), threads=(1,) * len(quotas))
    devices = tuple(replace(d, quota=q, quota_period=period) for d, q in zip(local.devices, quotas, strict=True))
    names = [[device.name] for device in devices]
    return predict(
        ps.plan(model, replace(local, devices=devices), TRAINING, devices=names, schedule="1f1b").module
    ).step


def test_devices_within_quotas_do_not_wait_for_cores(model: ps.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four of a quarter of a core each, on two cores, take what they take on a host with a core for each. The control:
    four that may have whole cores share the two."""
    monkeypatch.setattr(forecast, "usable_cores", lambda: 2)
    shared, whole = seconds(model, (0.25,) * 4), seconds(model, (1.0,) * 4)
    monkeypatch.setattr(forecast, "usable_cores", lambda: 8)
    assert shared == pytest.approx(seconds(model, (0.25,) * 4), rel=0.01)
    assert whole > 1.2 * shared


def test_quotas_that_are_more_than_the_cores_wait(model: ps.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three devices of 0.9 of a core are more than two cores have."""
    monkeypatch.setattr(forecast, "usable_cores", lambda: 2)
    crowded = seconds(model, (0.9,) * 3)
    monkeypatch.setattr(forecast, "usable_cores", lambda: 8)
    assert crowded > 1.05 * seconds(model, (0.9,) * 3)


# ------------------------------------------------------------------------------------------------ saved-up time


def granted_by_periods(actions: Sequence[tuple[float, float]], quota: float, begins: float) -> float:
    """Return the seconds that actions take whose quota is granted by periods of a second, the first of which begins
    then. Each action waits, and then takes so many seconds of a core."""
    now, left, until, taken = 0.0, quota, begins, 0.0
    for waits, work in actions:
        now += waits
        begin, remains = now, work
        while remains > 1e-9:
            while now >= until - 1e-9:
                left, until = quota, until + 1
            step = min(remains, left, until - now)
            remains, left, now = remains - step, left - step, now + step
            if remains > 1e-9 and left <= 1e-9:
                now = until
        taken += now - begin
    return taken


def saving(actions: Sequence[tuple[float, float]], quota: float) -> float:
    """Return the seconds that the simulation takes for them."""
    rank, now, taken = SavedTime(Seat("here", 1, 1, quota, 1.0)), 0.0, 0.0
    for waits, work in actions:
        now += waits
        lasts = rank.shortened(now, work / quota)
        now, taken = now + lasts, taken + lasts
    return taken


@given(
    st.lists(st.tuples(st.floats(0, 4), st.floats(1.5, 12)), min_size=30, max_size=60),
    st.floats(0.1, 0.9),
)
@settings(max_examples=40, deadline=None)
def test_saved_time_is_that_of_periods_on_average(actions: list[tuple[float, float]], quota: float) -> None:
    """Over all times at which periods may begin. Actions take 1.5 to 12 periods within the quota."""
    work = [(waits, lasts * quota) for waits, lasts in actions]
    kernel = statistics.mean(granted_by_periods(work, quota, (i + 0.5) / 20) for i in range(20))
    assert saving(work, quota) == pytest.approx(kernel, rel=0.06)


def test_without_saved_time_actions_are_predicted_too_long() -> None:
    """The control of the last test: a quarter of a core, and waits of a period or more before actions of some three."""
    actions = [(1.0 + 0.37 * (i % 3), (2.5 + i % 11 / 10) * 0.25) for i in range(44)]
    kernel = statistics.mean(granted_by_periods(actions, 0.25, (i + 0.5) / 20) for i in range(20))
    assert saving(actions, 0.25) == pytest.approx(kernel, rel=0.05)
    assert sum(work / 0.25 for _, work in actions) > 1.2 * kernel


def test_a_rank_that_never_waits_goes_as_its_quota() -> None:
    actions = [(0.0, 0.5)] * 50
    assert saving(actions, 0.25) == pytest.approx(50 * 2, rel=0.01)


def test_plans_of_stages_that_wait_are_shorter_by_what_they_save(model: ps.Model) -> None:
    """Stages in a row wait for each other; a stage by itself does not, and is predicted as without a period."""
    row, alone = (0.25, 0.5, 0.25), (0.25,)
    assert seconds(model, row, period=5e-4) < 0.97 * seconds(model, row)
    assert seconds(model, row, period=1e-9) == pytest.approx(seconds(model, row), rel=1e-3)
    for period in (5e-4, 0.1, 1.0):
        assert seconds(model, alone, period=period) == pytest.approx(seconds(model, alone), rel=1e-6)


def test_ends_of_messages_are_no_faster_than_at_full_speed() -> None:
    """Two threads within a core: a computation has half of each, a message a whole one. So it saves nothing."""
    rank = SavedTime(Seat("here", 4, 2, 0.5, 1.0))
    assert rank.shortened(10.0, 0.3, is_message=True) == 0.3
    assert rank.shortened(20.0, 0.3) == pytest.approx(0.15)
    alone = SavedTime(Seat("here", 4, 1, 0.5, 1.0))
    assert alone.shortened(10.0, 0.3, is_message=True) == pytest.approx(0.15)


def test_time_of_networks_is_not_shortened() -> None:
    """An action of 8 seconds, of which 6 are those of values that travel, and one of 2 behind a wait of 6."""
    program = Schedule("by hand", 1, {0: Program((), (Action("F", 0, 1), Action("B", 0, 1)))})
    seats = {0: Seat("here", 4, 1, 0.5, 100.0)}
    machine = SimulatedMachine(seats=seats, exchanged=lambda rank, action: 6.0 if action.kind == "F" else 0.0)
    found = simulate(program, 2, lambda rank, action: 2.0, lambda *_: 0.0, machine)
    lasts = [end - begin for _, begin, end in found.timed(0)]
    # While values travel the rank saves up for its next computations.
    assert lasts == pytest.approx([8.0, 1.0, 7.0, 1.0])
