"""Computations and links of a chosen slowness change no number, and are as slow as they were asked to be. Upper bounds of time are not tested."""

from __future__ import annotations

import re

import numpy as np
import pytest
from oracles.classifier import make_batches, train_plainly

from penstock.ir.schedule import Action
from penstock.runtime.job.job import Job
from penstock.runtime.job.job import open as open_job
from penstock.runtime.worker.pace import Pace, times_of
from penstock.support.errors import UsageError

TIMEOUT = 20
PACE = {"F": 0.004, "B": 0.01}
LATENCY = 0.1


def test_a_slow_pipeline_computes_the_same_and_is_slow(bundle_of):
    batches = make_batches(3, 4)
    with Job(bundle_of(3, "eager-2bw", 4), timeout=TIMEOUT, pace=PACE, latency=LATENCY, trace=True) as job:
        found = [loss for step in job.steps(batches) for loss in step.losses]
        traces = job.traces
    np.testing.assert_allclose(found, train_plainly(3, batches, 4, 1), rtol=1e-5)
    at = {name: (start, end) for trace in traces for name, start, end in trace}
    for name, (start, end) in at.items():
        kind = re.sub(r"[^A-Z]", "", name)
        assert end - start >= PACE.get(kind, 0.0), name
        if received := re.fullmatch(r"(\d+)R([FB])(\d+)<(\d+)", name):
            stage, phase, mb, source = received.groups()
            assert end >= at[f"{source}S{phase}{mb}>{stage}"][0] + LATENCY, name
    # Sends do not wait for their link: a later one starts before an earlier one has arrived.
    assert any(at[f"0SF{mb + 1}>1"][1] < at[f"1RF{mb}<0"][1] for mb in range(3))


def test_without_weight_gradients_apart_b_is_the_whole_backward():
    whole, parted = Pace({"B": 0.04, "W": 0.01}, ("F", "B")), Pace({"B": 0.04, "W": 0.01}, ("F", "B", "W"))
    assert (whole.least(Action("B", 0, 0)), parted.least(Action("B", 0, 0)), parted.least(Action("W", 0, 0))) == (
        0.04,
        0.03,
        0.01,
    )
    assert whole.least(Action("SF", 0, 0, peer=1)) == 0


def test_a_stage_may_have_times_of_its_own():
    pace = {"F": 0.01, "U": 0.02, "1U": 0.3, "11F": 0.4}
    assert [times_of(pace, stage) for stage in (0, 1, 11)] == [
        {"F": 0.01, "U": 0.02},
        {"F": 0.01, "U": 0.3},
        {"F": 0.4, "U": 0.02},
    ]


def test_one_stage_alone_is_slow(bundle_of):
    with Job(bundle_of(2, "1f1b", 2), timeout=TIMEOUT, pace={"1U": 0.2}, trace=True) as job:
        list(job.steps(make_batches(2, 2)))
        traces = job.traces
    took = {name: end - start for trace in traces for name, start, end in trace if "U" in name}
    assert {name[0] for name in took} == {"0", "1"}
    assert all(seconds >= 0.2 for name, seconds in took.items() if name[0] == "1")
    # The control: the other stage has waited for nothing in one of its updates, at least.
    assert min(seconds for name, seconds in took.items() if name[0] == "0") < 0.2


@pytest.mark.parametrize(
    ("pace", "latency", "message"),
    [
        ({"X": 1.0}, 0.0, "pace is known of F, R, B, W, P, N, U, and of stages 0 to 1 as in 0F, not of 'X'"),
        ({"2U": 1.0}, 0.0, "and of stages 0 to 1 as in 0F, not of '2U'"),
        ({"1F": -1.0}, 0.0, "pace of 1F must be a number of seconds from 0 on, got -1"),
        ({"W": 0.2, "B": 0.3, "1B": 0.1}, 0.0, "pace of B is that of the whole backward, W included: 0.1 is less than"),
        ({"F": -1.0}, 0.0, "pace of F must be a number of seconds from 0 on, got -1"),
        ({"F": float("nan")}, 0.0, "pace of F must be"),
        ({"B": 0.1, "W": 0.2}, 0.0, "pace of B is that of the whole backward, W included: 0.1 is less than 0.2"),
        ({}, -0.1, "latency must be a number of seconds from 0 to less than the timeout"),
        ({}, 20.0, "latency must be"),
    ],
)
def test_paces_that_make_no_sense_are_refused(bundle_of, pace, latency, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        open_job(bundle_of(2, "1f1b", 2).path, timeout=TIMEOUT, pace=pace, latency=latency)
