"""Trials of failures, in small: each kind keeps its promise, and a promise that is broken on purpose is told."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from oracles.repository import BENCHMARKS

sys.path.append(str(BENCHMARKS))

import failure_kinds
import failure_runs
import failures
import soaks
from failure_tables import table_of
from hostile_index import WAYS
from namespaces import available

# Kinds of a few seconds; the others are tried with the slow tests.
QUICK = ("descriptors", "pipe", "index", "launcher")
NO_NAMESPACES = available()
needs_namespaces = pytest.mark.skipif(bool(NO_NAMESPACES), reason=f"no network namespaces: {NO_NAMESPACES}")


def reason(kind: str) -> str:
    return failure_kinds.NEEDS[kind]() if kind in failure_kinds.NEEDS else ""


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.slow) for kind in failure_kinds.KINDS]
)
def test_a_trial_of_each_kind(kind: str) -> None:
    if why := reason(kind):
        pytest.skip(why)
    (trial,) = failures.trials(1, seed=3, steps=150, heartbeat=3, kinds=[kind])
    assert trial.kind == kind
    assert trial.problems == []


@needs_namespaces
def test_a_cut_network() -> None:
    """Four ranks in namespaces; a shorter heartbeat than usual."""
    (trial,) = failures.trials(1, seed=3, steps=150, heartbeat=3, recover=False, kinds=["cut"])
    assert trial.problems == []


@pytest.mark.slow
@needs_namespaces
def test_many_trials_of_hosts() -> None:
    found = failures.trials(30, seed=1, steps=400, heartbeat=10, kinds=["kill", "stop", "cut"])
    assert not [trial for trial in found if trial.problems]


def test_kinds_come_in_turns() -> None:
    order = failures.order_of(["a", "b", "c"], 8, random.Random(1))
    assert all(sorted(order[i : i + 3]) == ["a", "b", "c"] for i in (0, 3))
    assert len(order) == 8
    assert order != failures.order_of(["a", "b", "c"], 8, random.Random(2))


def test_only_kinds_that_there_are() -> None:
    assert failures.chosen_kinds("pipe,index") == (["pipe", "index"], [])
    with pytest.raises(SystemExit, match="there is no kind 'pip'"):
        failures.chosen_kinds("pip")


# ------------------------------------------------------------------------------------------------ broken promises

BROKEN = """
import sys
sys.path.insert(0, {folder!r})
import failure_kinds, failure_runs, failures
from unittest.mock import patch

{kinds}
sys.argv[1:] = ["--trials", {trials!r}, "--kinds", {names!r}, "--steps", "30", "--json", {out!r}]
sys.exit(failures.main())
"""
KIND = """
def broken(place, chance):
{lines}
    return failure_runs.Result({name!r})

failures.KINDS[{name!r}] = broken
"""
STAYS = "place.spawn([sys.executable, '-c', 'import time; time.sleep(60)'])"
# What is changed for one trial is what it was for the next.
WAYS_TO_BREAK = {
    "exit code": (
        ["run = place.spawn(place.command('--steps', '-1'))", "run.processes[0].wait()", "place.expect(run, [0], '')"],
        "exit codes [2], expected [0]",
    ),
    "words": (["run = place.local()", "run.processes[0].wait()", "place.expect(run, [0], 'x')"], "not the one error"),
    "a process": (
        [
            "with patch.dict(place.await_end.__func__.__globals__, END_SECONDS=0.5):",
            f"    {STAYS}",
            "    place.await_end(0.0)",
        ],
        "left",
    ),
    "seconds": (
        [
            "with patch.dict(place.shared.__dict__, slack=0.0):",
            f"    {STAYS.replace('60', '2')}",
            "    place.await_end(0.5)",
        ],
        "it took",
    ),
    "losses": (
        [
            "losses = list(place.shared.losses)",
            "losses[7] += 1e-12",
            "with patch.dict(place.shared.__dict__, losses=losses):",
            "    place.expect_well(place.local())",
        ],
        "other losses than without the failure",
    ),
    "steps": (["place.expect_well(place.local(steps=29))"], "steps [0, 1, 2, 3, 4]... of 29"),
}


def told(folder: Path, ways: dict[str, list[str]]) -> tuple[int, str, dict[str, str], int]:
    """Try kinds of failures with these lines; return the exit code, the output, the problems of each, and how many failed."""
    script, out = folder / "broken.py", folder / "out.json"
    kinds = [KIND.format(name=name, lines="\n".join(f"    {line}" for line in lines)) for name, lines in ways.items()]
    script.write_text(
        BROKEN.format(
            folder=str(BENCHMARKS), kinds="".join(kinds), trials=str(len(ways)), names=",".join(ways), out=str(out)
        )
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    document = json.loads(out.read_text())
    problems = {trial["kind"]: "; ".join(trial["problems"]) for trial in document["trials"]}
    return done.returncode, done.stdout, problems, document["failed"]


def test_control_a_broken_promise_is_told(tmp_path: Path) -> None:
    """Each of them, among trials that fail for another reason."""
    code, output, problems, failed = told(tmp_path, {name: lines for name, (lines, _) in WAYS_TO_BREAK.items()})
    assert code == 1
    assert problems.keys() == WAYS_TO_BREAK.keys()
    for name, (_, problem) in WAYS_TO_BREAK.items():
        assert problem in problems[name], name
        assert re.search(rf"\| {name} \| 1 \| 1 \|", output), name
    assert failed == len(WAYS_TO_BREAK)
    assert f"{failed} trials, {failed} failed" in output


def test_control_a_trial_that_breaks_nothing_has_no_problem(tmp_path: Path) -> None:
    code, output, problems, failed = told(tmp_path, {"nothing": []})
    assert (code, problems, failed) == (0, {"nothing": ""}, 0)
    assert "1 trials, 0 failed" in output
    assert re.search(r"\| nothing \| 1 \| 0 \|", output)


def test_processes_are_found_whoever_their_parent_is(tmp_path: Path) -> None:
    """One that its parent left is found and killed; the control is one without the mark."""
    shared = failure_runs.Shared("", 10, 1.0, None, tmp_path, 0.0)
    place = failure_runs.Place(shared, tmp_path)
    stranger = subprocess.Popen(["sleep", "60"])
    try:
        started = place.spawn(["sh", "-c", "sleep 60 & exit 0"])
        started.processes[0].wait(10)
        assert failure_runs.wait_for(lambda: len(place.everyone()) == 1, 10)
        assert stranger.pid not in place.everyone()
        place.clear()
        assert failure_runs.wait_for(lambda: not place.everyone(), 10)
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_the_table_has_the_worst_of_each_kind() -> None:
    """By the seconds beyond those that are promised, not by seconds alone."""
    rows = [
        failure_runs.Result("stop", seconds=11.0, within=12.0, again_s=3.0),
        failure_runs.Result("signals", seconds=3.0, within=4.0),
        failure_runs.Result("signals", seconds=2.5, within=2.0, problems=["it took 2.5 s"]),
        failure_runs.Result("stderr"),
    ]
    assert table_of(rows).splitlines()[2:] == [
        "| signals | 2 | 1 | 2.5 of 2 |  |",
        "| stderr | 1 | 0 |  |  |",
        "| stop | 1 | 0 | 11.0 of 12 | 3.0 |",
    ]


def test_every_way_to_spoil_an_index_changes_it() -> None:
    index = {"format": 2, "step": 3, "microbatches": 4, "files": {"rank0.safetensors": {"size": 1, "sha256": ""}}}
    whole = json.dumps(index).encode()
    assert all(spoil(index, random.Random(i)) != whole for spoil in WAYS.values() for i in range(9))


# ------------------------------------------------------------------------------------------------ long runs


@needs_namespaces
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_who_is_ended_leaves_no_namespaces(number: signal.Signals) -> None:
    """Nor what ran in them."""
    script = "import time; from namespaces import Hosts\nwith Hosts(['a']) as hosts:\n"
    script += (
        "    print(hosts._prefix, hosts.start(0, ['sleep', '100'], {}, None).pid, flush=True)\n    time.sleep(100)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], cwd=BENCHMARKS, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        prefix, sleeper = process.stdout.readline().split()
        assert prefix in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
        process.send_signal(number)
        process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert prefix not in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert failure_runs.wait_for(lambda: not failure_runs.is_there(int(sleeper)), 5)


@pytest.mark.slow
def test_a_short_soak() -> None:
    found = soaks.soak(40, 20, seed=2)
    assert found["problems"] == []
    assert found["lost"] == 1


@pytest.mark.slow
def test_a_long_soak() -> None:
    found = soaks.soak(2000, 200, seed=2)
    assert found["problems"] == []
    assert found["lost"] >= 9
    assert max(found["slopes"].values()) < soaks.STEEPEST


@pytest.mark.slow
def test_training_and_requests_side_by_side() -> None:
    found = soaks.together(20, seed=1)
    assert found["problems"] == []
    assert found["steps"] > 0
    assert found["requests"] > 0
    assert {one["process"].split(",")[0] for one in found["processes"]} == {"training", "serving"}


def test_what_is_gained_is_seen() -> None:
    """The control: a process that opens a file every second."""
    sampled = soaks.Sampled("own")
    flat, kept = soaks.Sampled("flat"), []
    for second in range(20):
        flat.rows.append((float(second), 100.0, 5, 2))
        kept.append(os.open(os.devnull, os.O_RDONLY))
        sampled.look(os.getpid(), float(second))
    for descriptor in kept:
        os.close(descriptor)
    summary = sampled.summary()
    assert summary["per_minute"]["descriptors"] == pytest.approx(60.0)
    assert summary["more"][0] > 0
    assert flat.summary()["per_minute"] == pytest.approx({"mib": 0.0, "descriptors": 0.0, "threads": 0.0})
    assert flat.summary()["more"] == [0, 0]
