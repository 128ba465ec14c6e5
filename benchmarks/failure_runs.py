"""Runs that fail, seen from outside: how they are started, which processes are theirs, what they said and wrote.

Every process of a trial has a variable with the trial's token in its environment, and is found by that in /proc,
whoever its parent is by now. Linux only.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import penstock as ps
from penstock.models import write_mlp
from penstock.runtime.job.run import run_bundle

RANKS = 4
# The schedules of bundles with several stages on a rank.
PACKED = ("interleaved", "zb-v", "interleaved-2bw")
# Seconds after which a wait is given up and the processes are ended; and seconds for processes to end after a launcher
# has.
GIVE_UP, END_SECONDS = 120.0, 10.0
ERROR = "penstock: error:"
_TOKEN = "PENSTOCK_TRIAL"


def make_bundle(folder: Path, ranks: int, schedule: str = "1f1b", packs: int = 1) -> str:
    """Compile a small training for so many ranks, each with so many stages."""
    model = ps.from_onnx(write_mlp(folder / "model.onnx", [16] * (ranks * packs + 1), batch=4))
    # Packs that are never drained need more microbatches than there are ranks.
    count = ranks if packs == 1 else 2 * ranks
    training = ps.Training(loss="cross_entropy", optimizer=ps.SGD(lr=0.05), microbatches=count)
    plan = ps.plan(model, ps.Cluster.local(ranks), training, schedule=schedule, packs=packs)
    return str(ps.compile(plan, folder / f"bundle-{schedule}", backend="numpy"))


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def environment_of(pid: int) -> bytes:
    """Read the environment of a process: empty while it is being started, once it has ended, and of strangers."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def workers(pid: int) -> list[int]:
    """List the ranks of a launcher on one host, which its children fork."""
    return [rank for server in children(pid) for rank in children(server)]


def steps_in(metrics: Path) -> int:
    return metrics.read_text().count("\n") if metrics.exists() else 0


def wait_for(condition: Any, seconds: float = GIVE_UP) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@dataclass
class Result:
    """What came of a trial. `seconds` are those until every process had ended, None where the run was to go on;
    `within` are those that docs/runtime.md promises."""

    kind: str
    target: str = ""
    rank: int = 0
    after: int = 0
    seconds: float | None = None
    within: float | None = None
    again_s: float = 0.0
    problems: list[str] = field(default_factory=list)
    said: str = ""


@dataclass(frozen=True)
class Shared:
    """What trials have in common: a bundle, the losses of a run without failure (None: nothing is compared), and a
    folder with the checkpoints and metrics of half a run. `slack` are the seconds that a busy machine may add to those
    that are promised. `packed` is the same for bundles whose ranks run two stages each, by schedule, where they are
    asked for."""

    bundle: str
    steps: int
    heartbeat: float
    losses: list[float] | None
    half: Path
    slack: float
    packed: Mapping[str, Shared] = field(default_factory=dict)

    @property
    def every(self) -> int:
        return max(1, self.steps // 10)

    @property
    def half_steps(self) -> int:
        return self.every * 5


def prepare(folder: Path, steps: int, heartbeat: float, recover: bool, slack: float, packs: bool = False) -> Shared:
    """Compile the bundle, and compute what trials are compared with; the same for `packs`, if they are asked for."""
    half = folder / "half"

    def compared(schedule: str, packs: int) -> Shared:
        bundle = make_bundle(folder, RANKS, schedule, packs)
        losses = run_bundle(bundle, steps=steps, progress=False).losses if recover else None
        return Shared(bundle, steps, heartbeat, losses, half, slack)

    packed = {schedule: compared(schedule, 2) for schedule in (PACKED if packs else ())}
    shared = replace(compared("1f1b", 1), packed=packed)
    half.mkdir()
    run_bundle(
        shared.bundle,
        steps=shared.half_steps,
        progress=False,
        metrics=half / "metrics.jsonl",
        checkpoint=half / "ckpt",
        checkpoint_every=shared.every,
    )
    return shared


def record_problems(metrics: Path, steps: int, losses: list[float] | None) -> list[str]:
    """Return what differs from the steps and losses of a run without failure."""
    if losses is None:
        return []
    records = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    found = [record["step"] for record in records]
    if found != list(range(steps)):
        return [f"steps {found[:5]}... of {len(found)}"]
    return [] if [record["loss"] for record in records] == losses else ["other losses than without the failure"]


def errors_in(text: str) -> list[str]:
    """Return the errors in what a run said, each to the end of its line."""
    return [line for line in text.splitlines() if line.startswith(ERROR)]


class Place:
    """The folder and the processes of one trial."""

    def __init__(self, shared: Shared, folder: Path) -> None:
        self.shared, self.folder = shared, folder
        self.metrics, self.checkpoints = folder / "metrics.jsonl", folder / "ckpt"
        self._token = secrets.token_hex(16)
        self._starts = 0
        self.problems: list[str] = []

    # -------------------------------------------------------------------------------------------- starting

    def command(self, *more: str, steps: int | None = None, checkpoints: Path | None = None) -> list[str]:
        shared = self.shared
        return [
            *(sys.executable, "-m", "penstock", "run", shared.bundle),
            *("--steps", str(shared.steps if steps is None else steps), "--heartbeat", str(shared.heartbeat)),
            *("--metrics", str(self.metrics), "--checkpoint", str(checkpoints or self.checkpoints)),
            *("--checkpoint-every", str(shared.every), *more),
        ]

    def spawn(
        self,
        command: Sequence[str],
        more: Mapping[str, str] | None = None,
        stderr: Any = None,
        stdin: Any = subprocess.DEVNULL,
    ) -> Started:
        """Start one command. What it says goes into a file, unless its stderr is given."""
        self._starts += 1
        environment = {k: v for k, v in os.environ.items() if k != "GLOO_SOCKET_IFNAME"}
        environment |= {"OMP_NUM_THREADS": "1", _TOKEN: self._token, **(more or {})}
        log = self.folder / f"log{self._starts}"
        with log.open("w") as out:
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=stdin,
                stdout=out,
                stderr=out if stderr is None else stderr,
                start_new_session=True,
                text=True,
            )
        # Popen returns before the kernel has laid out the environment, by which `everyone` knows the process.
        wait_for(lambda: process.poll() is not None or environment_of(process.pid), END_SECONDS)
        return Started([process], [log])

    def local(self, *more: str, steps: int | None = None) -> Started:
        """Start a run of one launcher."""
        return self.spawn(self.command(*more, steps=steps))

    def group(self, *more: str, stderr: Any = None, before: Sequence[str] = ()) -> Started:
        """Start each rank by its own command, as a launcher of several hosts does."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        base = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        base["PENSTOCK_RUN_ID"] = self.folder.name
        starts = [
            self.spawn([*before, *self.command(*more)], base | {"RANK": str(r), "LOCAL_RANK": str(r)}, stderr)
            for r in range(RANKS)
        ]
        return Started([start.processes[0] for start in starts], [start.logs[0] for start in starts])

    def torchrun(self) -> Started:
        """Start an agent that starts the ranks."""
        words = ["--nnodes=1", f"--nproc-per-node={RANKS}", "--max-restarts=0", "--local-addr=127.0.0.1"]
        words += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", f"--rdzv-id={self.folder.name}", "--no-python"]
        return self.spawn([sys.executable, "-m", "torch.distributed.run", *words, *self.command()])

    # -------------------------------------------------------------------------------------------- looking

    def everyone(self) -> list[int]:
        """List all processes of this trial that live, whoever their parent is."""
        mark = f"{_TOKEN}={self._token}".encode()
        pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
        return [pid for pid in pids if mark in environment_of(pid)]

    def reached(self, after: int, run: Started) -> bool:
        """Wait until a step is told; note a problem where it does not come."""
        wait_for(lambda: steps_in(self.metrics) >= after or not run.lives())
        if steps_in(self.metrics) < after:
            self.problems.append(f"step {after} was not reached: {run.text()[-500:]}")
        return steps_in(self.metrics) >= after

    def await_end(self, within: float | None = None) -> float:
        """Wait until nobody is left; return the seconds. Processes that stay, and too many seconds, are problems."""
        begin = time.monotonic()
        wait_for(lambda: not self.everyone(), GIVE_UP if within is None else within + self.shared.slack + END_SECONDS)
        seconds, left = time.monotonic() - begin, self.everyone()
        if left:
            self.problems.append(f"{len(left)} processes were left behind: {', '.join(map(name_of, left))}")
        if within is not None and seconds > within + self.shared.slack:
            self.problems.append(f"it took {seconds:.1f} s, and {within:g} s are promised")
        return seconds

    def clear(self) -> None:
        """Kill what is left."""
        for _ in range(3):
            for pid in self.everyone():
                send(pid, signal.SIGKILL)

    # -------------------------------------------------------------------------------------------- judging

    def expect(self, run: Started, codes: Iterable[int], words: str) -> str:
        """Judge the end of a run that failed: its exit codes, and the one error that it printed. Return that."""
        # One that is ending has no environment any more, and no exit code yet.
        wait_for(lambda: not run.lives(), END_SECONDS)
        allowed, errors = set(codes), errors_in(run.text())
        if found := [code for code in run.codes() if code not in allowed]:
            self.problems.append(f"exit codes {found}, expected {sorted(allowed)}: {run.text()[-500:]}")
        if len(errors) != 1 or words not in run.text():
            self.problems.append(f"not the one error with {words!r}: {errors or run.text()[-500:]}")
        return errors[0] if errors else ""

    def expect_well(self, run: Started) -> None:
        """Judge a run that was to come to its end: exit codes, steps, losses, and its last checkpoint."""
        wait_for(lambda: not run.lives())
        if any(run.codes()):
            self.problems.append(f"exit codes {run.codes()}: {run.text()[-500:]}")
        self.problems += record_problems(self.metrics, self.shared.steps, self.shared.losses)
        latest = self.checkpoints / "latest"
        if not latest.is_file() or latest.read_text() != f"step-{self.shared.steps:06}\n":
            self.problems.append("the last checkpoint is missing")
        # Processes that end with the launcher need a moment, and no more.
        self.await_end(2.0)

    def go_on(self, form: Callable[[], Started] | None = None) -> float:
        """Start again and run to the end. Return the seconds until the first step. A local run goes on from the newest
        checkpoint, other forms find it by their name."""
        if self.shared.losses is None:
            return 0.0
        before, begin = self._identity(), time.monotonic()
        run = self._again() if form is None else form()
        try:
            wait_for(lambda: self._identity() != before or not run.lives())
            seconds = time.monotonic() - begin
            self.expect_well(run)
        finally:
            self.clear()
        return seconds

    def _identity(self) -> int:
        return self.metrics.stat().st_mtime_ns if self.metrics.exists() else 0

    def _again(self) -> Started:
        latest = self.checkpoints / "latest"
        if not latest.is_file():
            return self.local()
        done = int(latest.read_text().removeprefix("step-"))
        return self.local("--resume", str(self.checkpoints), steps=self.shared.steps - done)

    def take_half(self) -> None:
        """Begin with the checkpoints and metrics of half a run."""
        shutil.copytree(self.shared.half, self.folder, dirs_exist_ok=True)


@dataclass
class Started:
    """The processes of one start, and the files with what they say."""

    processes: list[subprocess.Popen[str]]
    logs: list[Path]

    @property
    def pid(self) -> int:
        return self.processes[0].pid

    def lives(self) -> bool:
        return None in self.codes()

    def codes(self) -> list[int | None]:
        return [process.poll() for process in self.processes]

    def text(self) -> str:
        return "".join(log.read_text(errors="replace") for log in self.logs)


def name_of(pid: int) -> str:
    """Return the name that `ps` shows for a process; its number once it has ended."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return str(pid)


def send(pid: int, number: int) -> None:
    """Send a signal to a process that may have ended."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
