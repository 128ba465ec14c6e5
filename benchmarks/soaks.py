"""Long runs: what they need stays flat, with losses of workers and beside requests."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from failure_runs import (
    END_SECONDS,
    Place,
    Started,
    children,
    is_there,
    make_bundle,
    name_of,
    prepare,
    send,
    steps_in,
    wait_for,
    workers,
)
from processes import resident_bytes

import penstock as ps

# The steepest growth that passes, in MiB per 100 steps.
STEEPEST = 1.0
KILLED = "was killed by SIGKILL during"
Samples = list[tuple[int, int]]


class Watched:
    """A local run from the command line, with samples (step, bytes) of its processes' memory."""

    def __init__(self, bundle: str, folder: Path, steps: int, more: Sequence[str] = ()) -> None:
        self.folder, self.steps, self.metrics = folder, steps, folder / "metrics.jsonl"
        self.command = [
            sys.executable,
            "-m",
            "penstock",
            "run",
            bundle,
            "--steps",
            str(steps),
            "--metrics",
            str(self.metrics),
            *more,
        ]
        self.launcher: Samples = []
        # For each start the samples of every worker.
        self.lives: list[list[Samples]] = [[]]
        self.lost = 0
        self.problems: list[str] = []

    def run(self, every: int | None, chance: random.Random) -> list[dict[str, Any]]:
        """Run to the end, kill a worker every so many steps, and return the records of the steps."""
        ranks: list[int] = []
        seen: set[int] = set()
        with (self.folder / "log").open("w+") as log:
            process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
            try:
                while process.poll() is None:
                    time.sleep(0.05)
                    done, ranks = steps_in(self.metrics), workers(process.pid) or ranks
                    seen |= {*ranks, *children(process.pid)}
                    self.launcher.append((done, resident_bytes(process.pid)))
                    for number, pid in enumerate(ranks):
                        if number == len(self.lives[-1]):
                            self.lives[-1].append([])
                        self.lives[-1][number].append((done, resident_bytes(pid)))
                    if every is not None and (self.lost + 1) * every <= done < self.steps:
                        os.kill(chance.choice(ranks), signal.SIGKILL)
                        self.lost += 1
                        self.lives.append([])
                        old = set(ranks)
                        wait_for(
                            lambda old=old: process.poll() is not None or not old & {*(workers(process.pid) or old)}
                        )  # type: ignore[misc]
            finally:
                if process.poll() is None:
                    process.kill()
                process.wait()
            log.seek(0)
            said = log.read()
        if process.returncode:
            self.problems.append(f"exit code {process.returncode}: {said[-2000:]}")
        if said.count(KILLED) != self.lost:
            self.problems.append(f"{self.lost} workers were killed, and the run said otherwise: {said[-2000:]}")
        wait_for(lambda: not any(map(is_there, seen)), END_SECONDS)
        self.problems += [f"process {pid} is left" for pid in seen if is_there(pid)]
        return [json.loads(line) for line in self.metrics.read_text().splitlines()]


def soak(steps: int, every: int, seed: int, ranks: int = 2) -> dict[str, Any]:
    """Compare a local run that loses a random worker every so many steps with one that loses none.

    The result has slopes of memory in MiB per 100 steps: of the launcher, which lives throughout; of the workers' last
    samples before each loss, over their lives; and of workers in the run without losses.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-soak-") as root:
        folder = Path(root)
        bundle = make_bundle(folder, ranks)
        saves = [
            "--checkpoint",
            str(folder / "ckpt"),
            "--checkpoint-every",
            str(max(1, every // 4)),
            "--keep-last",
            "2",
        ]
        (folder / "calm").mkdir()
        calm = Watched(bundle, folder / "calm", steps)
        expected = calm.run(None, random.Random(seed))
        run = Watched(bundle, folder, steps, [*saves, "--max-restarts", str(steps // every + 1)])
        records = run.run(every, random.Random(seed))
        problems = calm.problems + run.problems
        if [record["step"] for record in records] != list(range(steps)):
            problems.append("other steps than without failures")
        if [record["loss"] for record in records] != [record["loss"] for record in expected]:
            problems.append("other losses than without failures")
        checkpoints = sorted(path.name for path in (folder / "ckpt").iterdir())
        if checkpoints != ["latest", *(f"step-{step:06}" for step in (steps - max(1, every // 4), steps))]:
            problems.append(f"left in the directory of checkpoints: {checkpoints}")
    # A killed process has no pages: those samples are 0.
    ends = [max((step, size) for samples in life for step, size in samples if size) for life in run.lives if any(life)]
    slopes = {
        "launcher": slope(run.launcher),
        "lives": slope(ends, 0.0),
        "calm": max((slope(samples) for samples in calm.lives[0]), default=0.0),
    }
    if steps >= 1000:
        problems += [
            f"memory grows by {growth:.2f} MiB per 100 steps: {name}"
            for name, growth in slopes.items()
            if growth >= STEEPEST
        ]
    growth = {"steps": steps, "lost": run.lost, "problems": problems, "slopes": slopes}
    print(json.dumps(growth), flush=True)
    return growth


def slope(samples: Samples, without: float = 0.25) -> float:
    """Return MiB per 100 steps by least squares, without the first part of the steps, in which caches fill."""
    last = max((step for step, _ in samples), default=0)
    used = [(step, size) for step, size in samples if size and step >= last * without]
    if len({step for step, _ in used}) < 3:
        return 0.0
    steps, sizes = zip(*used, strict=True)
    return float(np.polyfit(steps, sizes, 1)[0]) * 100 / 2**20


# ------------------------------------------------------------------------------------------------ side by side

# Answers requests from three threads and in a stream, until its input ends.
_SERVE = """
import sys, threading
import numpy as np
import penstock as ps

def ask(job, size, count):
    x = np.random.default_rng(size).standard_normal((size, 16)).astype(np.float32)
    while not done.is_set():
        job.submit({"x": x}).result(60)
        count[0] += 1

done, counts = threading.Event(), [[0] for _ in range(3)]
with ps.open(sys.argv[1], timeout=60) as job:
    threads = [threading.Thread(target=ask, args=(job, 1 + 3 * i, count)) for i, count in enumerate(counts)]
    for thread in threads:
        thread.start()
    sys.stdin.read()
    done.set()
    for thread in threads:
        thread.join()
print("answered", sum(count[0] for count in counts))
"""
# What may be gained in a minute and in 1000 steps, in MiB; descriptors and threads gain nothing.
STEEPEST_MINUTE = 1.0


class Sampled:
    """What one process had, second by second: MiB, descriptors, threads."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.rows: list[tuple[float, float, int, int]] = []

    def look(self, pid: int, at: float) -> None:
        try:
            descriptors, threads = (len(os.listdir(f"/proc/{pid}/{what}")) for what in ("fd", "task"))
        except OSError:  # it has ended
            return
        if size := resident_bytes(pid):
            self.rows.append((at, size / 2**20, descriptors, threads))

    def summary(self) -> dict[str, Any]:
        """Return slopes per minute without the first quarter, and what the last quarter had more than the second."""
        end = self.rows[-1][0]
        used = [row for row in self.rows if row[0] >= end / 4]
        late, early = ([row for row in used if (row[0] >= end * 3 / 4) == last] for last in (True, False))
        times, sizes, descriptors, threads = zip(*used, strict=True)
        columns = {"mib": sizes, "descriptors": descriptors, "threads": threads}
        slopes = {name: float(np.polyfit(times, column, 1)[0]) * 60 for name, column in columns.items()}
        more = [max(row[i] for row in late) - max(row[i] for row in early) for i in (2, 3)]
        return {"process": self.name, "mib": sizes[-1], "per_minute": slopes, "more": more}


def together(seconds: float, seed: int) -> dict[str, Any]:
    """Train and answer requests side by side for so long. Return what each process gained per minute."""
    with tempfile.TemporaryDirectory(prefix="penstock-together-") as root:
        folder = Path(root)
        place = Place(prepare(folder, 200, 10.0, False, 0.0), folder)
        model = ps.from_onnx(folder / "model.onnx")
        served = ps.compile(ps.plan(model, ps.Cluster.local(2)), folder / "served", backend="numpy")
        read, write = os.pipe()
        try:
            training = place.local("--keep-last", "2", steps=10**7)
            serving = place.spawn([sys.executable, "-c", _SERVE, str(served)], stdin=read)
            sampled = _sample(place, seconds, [training, serving])
            os.close(write)
            steps = steps_in(place.metrics)
            send(training.pid, signal.SIGINT)
            wait_for(lambda: not training.lives() and not serving.lives())
            place.await_end(END_SECONDS)
        finally:
            place.clear()
            os.close(read)
        problems = list(place.problems)
        if training.codes() + serving.codes() != [130, 0]:
            problems.append(f"exit codes {training.codes() + serving.codes()}: {training.text()} {serving.text()}")
        answered = int(serving.text().rpartition("answered ")[2] or 0)
    found = [one.summary() for one in sampled.values() if len(one.rows) > seconds / 2]
    for one in found:
        if one["per_minute"]["mib"] > STEEPEST_MINUTE and seconds >= 300:
            problems.append(f"{one['process']} gains {one['per_minute']['mib']:.2f} MiB per minute")
        problems += [
            f"{one['process']} has {one['more'][i]} more {what}"
            for i, what in enumerate(("descriptors", "threads"))
            if one["more"][i] > 0
        ]
        slopes = ", ".join(f"{name} {value:+.3f}" for name, value in one["per_minute"].items())
        print(f"{one['process']:28} {one['mib']:7.1f} MiB; per minute: {slopes}", flush=True)
    print(f"{steps} steps and {answered} requests in {seconds:.0f} s; {'; '.join(problems) or 'ok'}", flush=True)
    return {"seconds": seconds, "steps": steps, "requests": answered, "processes": found, "problems": problems}


def _sample(place: Place, seconds: float, runs: list[Started]) -> dict[int, Sampled]:
    """Look at all processes of a place every second."""
    sampled: dict[int, Sampled] = {}
    roles = {run.pid: role for run, role in zip(runs, ("training", "serving"), strict=True)}
    begin = time.monotonic()
    while (at := time.monotonic() - begin) < seconds and all(run.lives() for run in runs):
        for pid in place.everyone():
            one = sampled.setdefault(pid, Sampled(""))
            # A process gets its name some time after its number.
            one.name = f"{_role(pid, roles)}, {name_of(pid)}"
            one.look(pid, at)
        time.sleep(1.0)
    return sampled


def _role(pid: int, roles: dict[int, str]) -> str:
    """Return which of the runs a process belongs to."""
    while pid not in roles and pid > 1:
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            break
    return roles.get(pid, "other")
