"""Failures of random ranks at random moments, and whether the job ends in time, says the right thing, leaves nobody behind and goes on as if
nothing had been.

    python benchmarks/failures.py --trials 30 --json failures.json      # kill -9, SIGSTOP and network cuts of 4 ranks in network namespaces
    python benchmarks/failures.py --soak 2000 --every 200               # a local run that loses a worker every so often

A trial starts four ranks with the variables of srun, each in a namespace of its own (root, iproute2), and fails one of them: its worker or the
keeper of it is killed or stopped, or its host is taken off the bridge. It measures the seconds until every process on all hosts has ended. Then
the same command starts again and has to finish; its losses must be those of a run without failure, bit for bit, each step once. Exit code 1 if
any of that does not hold.
"""

from __future__ import annotations

import argparse
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
from types import FrameType
from typing import Any

import numpy as np
from namespaces import Hosts, available, kill
from processes import resident_bytes

import penstock as ps
from penstock.models import write_mlp
from penstock.runtime.running import run_bundle

KINDS = ("kill", "stop", "cut")
RANKS = 4
LIMIT = 20.0
# How long anything may take here before it is given up and ended.
_GIVE_UP = 120.0
_WORDS = {
    ("kill", "worker"): "was killed by SIGKILL during",
    ("kill", "keeper"): "ended without a word",
    ("stop", "worker"): "is stopped: no sign of life for",
    ("stop", "keeper"): "nothing was heard for",
    ("cut", "host"): "nothing was heard for",
}


def make_bundle(folder: Path, ranks: int) -> str:
    """A small training, compiled for as many stages as there are ranks."""
    model = ps.from_onnx(write_mlp(folder / "model.onnx", [16] * (ranks + 1), batch=4))
    training = ps.Training(loss="cross_entropy", optimizer=ps.SGD(lr=0.05), microbatches=ranks)
    return str(ps.compile(ps.plan(model, ps.Cluster.local(ranks), training), folder / "bundle", backend="numpy"))


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


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
        self.command = [sys.executable, "-m", "penstock", "run", bundle, "--steps", str(steps), "--heartbeat", str(heartbeat)]
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
        """What the ranks of the last start said, the error of each if it had one."""
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
            # In a cut network, each half says what it knows.
            finished = steps_in(self.metrics) == self.steps and not any(said)
            inside = [text for r, text in enumerate(said) if text and not (kind == "cut" and r == rank)]
            if finished and target == "keeper":
                # A rank whose keeper is stopped goes on working: it may be done before anybody misses it.
                inside = ["finished"]
            elif len(inside) != 1 or f"rank {rank} (stage {rank}, process" not in inside[0] or _WORDS[kind, target] not in inside[0]:
                problems.append(f"not the one right message: {inside}")
            elif "last finished step" not in inside[0] or f"n{rank}" not in inside[0]:
                problems.append(f"no last step or host: {inside[0]}")
            if kind == "cut":
                hosts.mend(rank)
            again = 0.0
            if losses is not None and not finished:
                reached, begin = steps_in(self.metrics), time.monotonic()
                running = self.start(hosts)
                try:
                    wait_for(lambda: steps_in(self.metrics) > reached or not self.alive(running, hosts))
                    again = time.monotonic() - begin
                    wait_for(lambda: not self.alive(running, hosts))
                finally:
                    self.end(running, hosts)
            if losses is not None:
                records = [json.loads(line) for line in self.metrics.read_text().splitlines()]
                if [record["step"] for record in records] != list(range(self.steps)):
                    problems.append(f"steps {[record['step'] for record in records][:5]}... of {len(records)}: {self.said()}")
                elif [record["loss"] for record in records] != losses:
                    problems.append("other losses than without the failure")
        told = inside[0] if inside else ""
        return {
            "kind": kind,
            "target": target,
            "rank": rank,
            "after": after,
            "seconds": seconds,
            "again_s": again,
            "problems": problems,
            "said": told,
        }

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


def trials(count: int, seed: int, steps: int, heartbeat: float, recover: bool = True, kinds: Sequence[str] = KINDS) -> list[dict[str, Any]]:
    """As many trials, kinds in turn, everything else by chance."""
    chance = random.Random(seed)
    found = []
    with tempfile.TemporaryDirectory(prefix="penstock-failures-") as root:
        folder = Path(root)
        bundle = make_bundle(folder, RANKS)
        losses = run_bundle(bundle, steps=steps, progress=False).losses if recover else None
        for i in range(count):
            kind = kinds[i % len(kinds)]
            target = "host" if kind == "cut" else chance.choice(("worker", "worker", "keeper"))
            own = folder / str(i)
            own.mkdir()
            trial = Trial(bundle, own, steps, heartbeat, seed * 1000 + i)
            result = trial.run(kind, chance.randrange(RANKS), target, chance.randrange(1, max(2, steps // 2)), losses)
            found.append(result)
            told = "ok" if not result["problems"] else "; ".join(result["problems"])
            line = (
                f"{i + 1:3} {kind:4} {target:6} rank {result['rank']} after step {result['after']:4}: ended in {result['seconds']:5.1f} s"
            )
            print(f"{line}, went on in {result['again_s']:5.1f} s: {told}", flush=True)
    return found


def soak(steps: int, every: int, seed: int, ranks: int = 2) -> dict[str, Any]:
    """A local run that loses a random worker every so many steps. The slope of memory is that of the launcher, which lives through all of it, and
    of workers between two losses, in MiB per 100 steps."""
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="penstock-soak-") as root:
        folder = Path(root)
        bundle = make_bundle(folder, ranks)
        losses = run_bundle(bundle, steps=steps, progress=False).losses
        metrics = folder / "metrics.jsonl"
        command = [sys.executable, "-m", "penstock", "run", bundle, "--steps", str(steps), "--max-restarts", str(steps // every + 1)]
        command += ["--metrics", str(metrics), "--checkpoint", str(folder / "ckpt"), "--checkpoint-every", str(max(1, every // 4))]
        lost, launcher, workers = 0, [], []
        life: list[tuple[int, int]] = []
        slopes: list[float] = []
        with (folder / "log").open("w+") as log:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
            try:
                while process.poll() is None:
                    time.sleep(0.1)
                    done, own = steps_in(metrics), children(process.pid)
                    launcher.append((done, resident_bytes(process.pid)))
                    if own:
                        life.append((done, resident_bytes(own[0])))
                    workers = own or workers
                    if done >= (lost + 1) * every and own and done < steps:
                        os.kill(chance.choice(own), signal.SIGKILL)
                        lost += 1
                        slopes += _slope(life)
                        life.clear()
            finally:
                if process.poll() is None:
                    process.kill()
                process.wait()
            log.seek(0)
            said = log.read()
        records = [json.loads(line) for line in metrics.read_text().splitlines()]
        problems = [] if process.returncode == 0 else [f"exit code {process.returncode}: {said[-2000:]}"]
        if [record["step"] for record in records] != list(range(steps)) or [record["loss"] for record in records] != losses:
            problems.append("other steps or losses than without failures")
        problems += [f"process {pid} is left" for pid in workers if Path(f"/proc/{pid}").exists()]
    found = {"steps": steps, "lost": lost, "problems": problems, "launcher_slope": (_slope(launcher) or [0.0])[0], "worker_slopes": slopes}
    print(json.dumps(found), flush=True)
    return found


def _slope(samples: list[tuple[int, int]]) -> list[float]:
    """MiB per 100 steps, over the second half: the first one is for caches to fill."""
    half = [(step, size) for step, size in samples[len(samples) // 2 :] if size]
    if len({step for step, _ in half}) < 3:
        return []
    steps, sizes = zip(*half, strict=True)
    return [float(np.polyfit(steps, sizes, 1)[0]) * 100 / 2**20]


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
        found = trials(arguments.trials, arguments.seed, arguments.steps, arguments.heartbeat)
        seconds = sorted(trial["seconds"] for trial in found)
        failed = any(trial["problems"] for trial in found)
        result = {
            "trials": found,
            "failed": sum(bool(t["problems"]) for t in found),
            "median_s": seconds[len(seconds) // 2],
            "worst_s": seconds[-1],
        }
        print(
            f"{len(found)} trials, {result['failed']} failed, ended in {result['median_s']:.1f} s (median), {result['worst_s']:.1f} s (worst)"
        )
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(result, indent=2) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
