"""Failures of random ranks at random moments: whether the job ends in time, says why, and resumes exactly.

    python benchmarks/failures.py --trials 30 --json failures.json      # kill -9, SIGSTOP and network cuts of 4 ranks
    python benchmarks/failures.py --soak 2000 --every 200               # a local run that loses workers, and its memory

A trial starts four ranks with the variables of srun, each in its own network namespace (root, iproute2), and fails one
of them: its worker or the worker's keeper is killed or stopped, or its host is taken off the bridge. It measures the
seconds until every process on all hosts has ended. Then the same command starts again and has to finish. Its losses
must be those of a run without failure, bit for bit, each step once. The exit code is 1 if any of that does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from machine import write_json
from namespaces import Hosts, available, kill
from processes import resident_bytes

import penstock as ps
from penstock.models import write_mlp
from penstock.runtime.job.run import run_bundle

KINDS = ("kill", "stop", "cut")
RANKS = 4
LIMIT = 20.0
# Seconds after which a wait is given up and the processes are ended; and seconds for processes to end after a launcher
# has.
_GIVE_UP, _END_SECONDS = 120.0, 10.0
_WORDS = {
    ("kill", "worker"): "was killed by SIGKILL during",
    ("kill", "keeper"): "ended without a word",
    ("stop", "worker"): "is stopped: no sign of life for",
    ("stop", "keeper"): "nothing was heard for",
    ("cut", "host"): "nothing was heard for",
}

# The action of a rank; messages name the peer.
_ACTION = re.compile(
    r"(?:during|which was at) (?:\d+[A-Z]+\d+\S* \((?:(?:send|receive) [^)]* rank \d|(?!send|receive)[^)]*)\)"
    r"|idle|saving|joining|loading)"
)


def make_bundle(folder: Path, ranks: int) -> str:
    """Compile a small training for as many stages as there are ranks."""
    model = ps.from_onnx(write_mlp(folder / "model.onnx", [16] * (ranks + 1), batch=4))
    training = ps.Training(loss="cross_entropy", optimizer=ps.SGD(lr=0.05), microbatches=ranks)
    return str(ps.compile(ps.plan(model, ps.Cluster.local(ranks), training), folder / "bundle", backend="numpy"))


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def workers(pid: int) -> list[int]:
    """List the ranks of a launcher on one host, which its children fork."""
    return [rank for server in children(pid) for rank in children(server)]


def steps_in(metrics: Path) -> int:
    return metrics.read_text().count("\n") if metrics.exists() else 0


def wait_for(condition: Any, seconds: float = _GIVE_UP) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


class Trial:
    """One run in namespaces that fails once."""

    def __init__(self, bundle: str, folder: Path, steps: int, heartbeat: float, seed: int) -> None:
        self.folder, self.heartbeat, self.steps = folder, heartbeat, steps
        self.metrics = folder / "metrics.jsonl"
        self.command = [
            sys.executable,
            "-m",
            "penstock",
            "run",
            bundle,
            "--steps",
            str(steps),
            "--heartbeat",
            str(heartbeat),
        ]
        self.command += [
            "--metrics",
            str(self.metrics),
            "--checkpoint",
            str(folder / "ckpt"),
            "--checkpoint-every",
            str(max(1, steps // 10)),
        ]
        self.slurm = {
            "SLURM_NTASKS": str(RANKS),
            "SLURM_NODELIST": f"n[0-{RANKS - 1}]",
            "SLURM_JOB_ID": str(1000 + seed),
            "SLURM_STEP_ID": "0",
        }
        self.started = 0

    def start(self, hosts: Hosts) -> list[subprocess.Popen[str]]:
        self.started += 1
        base = {k: v for k, v in os.environ.items() if k != "GLOO_SOCKET_IFNAME"} | {"OMP_NUM_THREADS": "1"}
        running = []
        for rank in range(RANKS):
            with (self.folder / f"log{self.started}.{rank}").open("w") as log:
                running.append(hosts.start(rank, self.command, base | self.slurm | {"SLURM_PROCID": str(rank)}, log))
        return running

    def said(self) -> list[str]:
        """Return the error of each rank of the last start, "" where it had none."""
        texts = [(self.folder / f"log{self.started}.{rank}").read_text() for rank in range(RANKS)]
        return [text[text.index("penstock: error:") :].strip() if "penstock: error:" in text else "" for text in texts]

    def run(self, kind: str, rank: int, target: str, after: int, losses: list[float] | None) -> dict[str, Any]:
        problems = []
        with Hosts([f"n{rank}" for rank in range(RANKS)]) as hosts:
            running = self.start(hosts)
            try:
                if not wait_for(lambda: steps_in(self.metrics) >= after):
                    problems.append(f"step {after} was not reached: {self.said()}")
                begin = time.monotonic()
                self.fail(hosts, running[rank].pid, kind, rank, target)
                wait_for(lambda: not self.alive(running, hosts), LIMIT * 2)
                seconds = time.monotonic() - begin
                left = self.alive(running, hosts)
                if left:
                    problems.append(f"{left} processes were left behind")
            finally:
                self.end(running, hosts)
            if seconds > LIMIT:
                problems.append(f"it took {seconds:.1f} s")
            said = self.said()
            finished = steps_in(self.metrics) == self.steps and not any(said)
            # In a cut network, each half reports what it knows.
            inside = [text for r, text in enumerate(said) if text and not (kind == "cut" and r == rank)]
            if finished and target == "keeper":
                # A rank whose keeper is stopped goes on working: it may be done before its keeper is missed.
                inside = ["finished"]
            else:
                problems += self._message_problems(inside, kind, rank, target)
            if kind == "cut":
                hosts.mend(rank)
            again = 0.0
            if losses is not None and not finished:
                again = self._resume(hosts)
            if losses is not None:
                problems += self._record_problems(losses)
        return {
            "kind": kind,
            "target": target,
            "rank": rank,
            "after": after,
            "seconds": seconds,
            "again_s": again,
            "problems": problems,
            "said": inside[0] if inside else "",
        }

    def _message_problems(self, inside: list[str], kind: str, rank: int, target: str) -> list[str]:
        """Return what is wrong with the errors of the ranks that still reach each other: there must be one."""
        if (
            len(inside) != 1
            or f"rank {rank} (stage {rank}, process" not in inside[0]
            or _WORDS[kind, target] not in inside[0]
        ):
            return [f"not the one right message: {inside}"]
        if "last finished step" not in inside[0] or f"n{rank}" not in inside[0]:
            return [f"no last step or host: {inside[0]}"]
        return [] if _ACTION.search(inside[0]) else [f"no action with its peer: {inside[0]}"]

    def _resume(self, hosts: Hosts) -> float:
        """Start again and run to the end. Return the seconds until the first step."""
        reached, begin = steps_in(self.metrics), time.monotonic()
        running = self.start(hosts)
        try:
            wait_for(lambda: steps_in(self.metrics) > reached or not self.alive(running, hosts))
            seconds = time.monotonic() - begin
            wait_for(lambda: not self.alive(running, hosts))
        finally:
            self.end(running, hosts)
        return seconds

    def _record_problems(self, losses: list[float]) -> list[str]:
        """Return what differs from the steps and losses of a run without failure."""
        records = [json.loads(line) for line in self.metrics.read_text().splitlines()]
        steps = [record["step"] for record in records]
        if steps != list(range(self.steps)):
            return [f"steps {steps[:5]}... of {len(records)}: {self.said()}"]
        if [record["loss"] for record in records] != losses:
            return ["other losses than without the failure"]
        return []

    def fail(self, hosts: Hosts, keeper: int, kind: str, rank: int, target: str) -> None:
        if kind == "cut":
            hosts.cut(rank)
            return
        pid = keeper if target == "keeper" else next(iter(children(keeper)), keeper)
        os.kill(pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)

    def alive(self, running: list[subprocess.Popen[str]], hosts: Hosts) -> int:
        return sum(process.poll() is None for process in running) or len(hosts.processes())

    def end(self, running: list[subprocess.Popen[str]], hosts: Hosts) -> None:
        kill(hosts.processes())
        for process in running:
            process.wait(_GIVE_UP)


def trials(
    count: int, seed: int, steps: int, heartbeat: float, recover: bool = True, kinds: Sequence[str] = KINDS
) -> list[dict[str, Any]]:
    """Run trials with kinds in turn and everything else by chance."""
    chance = random.Random(seed)
    results = []
    with tempfile.TemporaryDirectory(prefix="penstock-failures-") as root:
        folder = Path(root)
        bundle = make_bundle(folder, RANKS)
        losses = run_bundle(bundle, steps=steps, progress=False).losses if recover else None
        for i in range(count):
            kind = kinds[i % len(kinds)]
            target = "host" if kind == "cut" else chance.choice(("worker", "worker", "keeper"))
            place = folder / str(i)
            place.mkdir()
            trial = Trial(bundle, place, steps, heartbeat, seed * 1000 + i)
            result = trial.run(kind, chance.randrange(RANKS), target, chance.randrange(1, max(2, steps // 2)), losses)
            results.append(result)
            outcome = "ok" if not result["problems"] else "; ".join(result["problems"])
            line = (
                f"{i + 1:3} {kind:4} {target:6} rank {result['rank']} after step {result['after']:4}: ended in "
                f"{result['seconds']:5.1f} s"
            )
            print(f"{line}, went on in {result['again_s']:5.1f} s: {outcome}", flush=True)
    return results


# The steepest growth that passes, in MiB per 100 steps.
STEEPEST = 1.0
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
        if said.count(_WORDS["kill", "worker"]) != self.lost:
            self.problems.append(f"{self.lost} workers were killed, and the run said otherwise: {said[-2000:]}")
        wait_for(lambda: not any(map(is_there, seen)), _END_SECONDS)
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


def _end(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--steps", type=int, default=400, help="of every trial")
    parser.add_argument("--heartbeat", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--soak", type=int, metavar="STEPS", help="instead of trials")
    parser.add_argument("--every", type=int, default=200, help="steps between two losses of --soak")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    # Unwinds everything: processes, namespaces, folders.
    signal.signal(signal.SIGTERM, _end)
    if arguments.soak:
        result: dict[str, Any] = soak(arguments.soak, arguments.every, arguments.seed)
        failed = bool(result["problems"])
    else:
        if reason := available():
            print(f"no network namespaces here: {reason}", file=sys.stderr)
            return 2
        results = trials(arguments.trials, arguments.seed, arguments.steps, arguments.heartbeat)
        seconds = sorted(trial["seconds"] for trial in results)
        failed = any(trial["problems"] for trial in results)
        result = {
            "trials": results,
            "failed": sum(bool(t["problems"]) for t in results),
            "median_s": seconds[len(seconds) // 2],
            "worst_s": seconds[-1],
        }
        print(
            f"{len(results)} trials, {result['failed']} failed, ended in {result['median_s']:.1f} s (median), "
            f"{result['worst_s']:.1f} s (worst)"
        )
    write_json(arguments.json, result)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
