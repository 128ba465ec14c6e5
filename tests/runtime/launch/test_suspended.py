"""A run that lost nothing goes on after its machine stood still; a rank that does not come back is found."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time

import failure_runs
import pytest

from penstock.runtime.job.run import run_bundle
from penstock.runtime.launch.local import Workers
from penstock.runtime.messages import status
from penstock.runtime.messages.control import Setup
from penstock.runtime.messages.status import Deadline, Patience
from penstock.support.errors import PeerLost

from ..waiting import BOUND, is_running, wait_until
from .suspended import end, suspend
from .two_ranks import finish, start

STEPS, HEARTBEAT, TIMEOUT = 800, 1.5, 3
# Longer than the heartbeat, and than any wait of a rank for another one.
SECONDS = 4.5


def start_local(path, folder):
    command = [sys.executable, "-m", "penstock", "run", str(path), f"--steps={STEPS}", f"--metrics={folder}/m.jsonl"]
    command += [f"--heartbeat={HEARTBEAT}", f"--timeout={TIMEOUT}"]
    return [subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})]


def start_group(path, folder):
    # Reports go over gloo, whose waits know no clock but the system's.
    return start(path, folder, STEPS, heartbeat=HEARTBEAT, timeout=60)


STARTS = {"local": start_local, "group": start_group}


def workers_of(running):
    """Return the process of each rank."""
    return (
        failure_runs.workers(running[0].pid)
        if len(running) == 1
        else [failure_runs.children(p.pid)[0] for p in running]
    )


def steps_told(folder):
    return [json.loads(line) for line in (folder / "m.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("kind", STARTS)
def test_a_run_goes_on_after_its_machine_stood_still(bundle_of, tmp_path, kind):
    path = bundle_of(2, "2bw", 2).path
    running = STARTS[kind](path, tmp_path)
    stopped = []
    try:
        assert failure_runs.wait_for(lambda: failure_runs.steps_in(tmp_path / "m.jsonl") > 100)
        stopped = suspend([process.pid for process in running], SECONDS, random.Random(7))
        said = finish(running)
    finally:
        end(pid for pid in stopped if is_running(pid))
    assert [process.returncode for process in running] == [0] * len(running), said
    assert "penstock: error" not in "".join(said)
    assert [row["step"] for row in steps_told(tmp_path)] == list(range(STEPS))
    assert [row["loss"] for row in steps_told(tmp_path)] == run_bundle(path, steps=STEPS, progress=False).losses


@pytest.mark.slow
@pytest.mark.parametrize("kind", STARTS)
@pytest.mark.parametrize("seed", range(6))
def test_a_run_that_stood_still_as_it_started(bundle_of, tmp_path, kind, seed):
    """At any moment of it: imports, forks, the meeting of the ranks, the first steps."""
    chance = random.Random(seed)
    running = STARTS[kind](bundle_of(2, "2bw", 2).path, tmp_path)
    stopped = []
    try:
        time.sleep(chance.uniform(0, 4))
        stopped = suspend([process.pid for process in running], SECONDS, chance)
        said = finish(running)
    finally:
        end(pid for pid in stopped if is_running(pid))
    assert [process.returncode for process in running] == [0] * len(running), said


@pytest.mark.parametrize("kind", STARTS)
def test_control_a_rank_that_does_not_come_back_is_found(bundle_of, tmp_path, kind):
    running = STARTS[kind](bundle_of(2, "2bw", 2).path, tmp_path)
    stopped = []
    try:
        assert failure_runs.wait_for(lambda: failure_runs.steps_in(tmp_path / "m.jsonl") > 100)
        victim = workers_of(running)[1]
        stopped = suspend([process.pid for process in running], SECONDS, random.Random(1), besides=[victim])
        began = time.monotonic()
        said = "".join(finish(running, BOUND))
        assert time.monotonic() - began < BOUND
        assert wait_until(lambda: not is_running(victim))
    finally:
        end(pid for pid in stopped if is_running(pid))
    assert [process.returncode for process in running] == [6] * len(running)
    assert said.count("penstock: error") == 1
    assert re.search(rf"rank 1 \(stage 1, process {victim} on .*\) is stopped: no sign of life", said), said


def is_borne(bundle) -> bool:
    """Return whether a launcher bears workers that were stopped as long as it did not look itself, and go on later."""
    workers = Workers(bundle, Setup(str(bundle.path), 30.0), heartbeat=1.0)
    pids = workers.process_ids()
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(2.0)
        workers.poll()
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        time.sleep(0.5)
        workers.poll()
    except PeerLost:
        return False
    finally:
        workers.end()
    return True


def test_a_launcher_that_goes_on_first_waits_for_the_others(bundle_of, monkeypatch):
    assert is_borne(bundle_of(2, "2bw", 2))
    # Control: one that takes time in which it stood still itself for the silence of others.
    monkeypatch.setattr(Patience, "look", lambda patience: setattr(patience, "_looked", time.monotonic()))
    assert not is_borne(bundle_of(2, "2bw", 2))


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


def test_deadlines_count_the_time_in_which_they_are_looked_at(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(status, "time", clock)
    deadline = Deadline(5.0)
    for _ in range(4):
        clock.now += 1.0
        assert not deadline.is_over()
    clock.now += 1000.0
    assert not Deadline(5.0).is_over()
    # Of a gap, two looks count.
    assert deadline.left() == pytest.approx(-1.0)
    long = Deadline(10.0)
    clock.now += 1000.0
    assert long.left() == pytest.approx(8.0)
    # Control: what is looked at comes to its end.
    for _ in range(9):
        clock.now += 1.0
        long.left()
    assert long.is_over()
