"""Trials of four ranks on four hosts: a worker or its keeper is killed or stopped, or its host is cut off.

Each rank runs in a network namespace of its own (root, iproute2), started with the variables of srun.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import time

from failure_runs import ERROR, GIVE_UP, RANKS, Place, Result, children, record_problems, steps_in, wait_for
from namespaces import Hosts, kill

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


class HostTrial:
    """One run in namespaces that fails once."""

    def __init__(self, place: Place, seed: int) -> None:
        self.place, self.folder, self.metrics, self.steps = place, place.folder, place.metrics, place.shared.steps
        self.command = place.command()
        self.slurm = {
            "SLURM_NTASKS": str(RANKS),
            "SLURM_NODELIST": f"n[0-{RANKS - 1}]",
            "SLURM_JOB_ID": str(seed),
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
        return [text[text.index(ERROR) :].strip() if ERROR in text else "" for text in texts]

    def run(self, kind: str, rank: int, target: str, after: int) -> Result:
        shared, problems = self.place.shared, []
        # A killed process is missed at once, one that is stopped or cut off when its heartbeat is.
        within = 2.0 if kind == "kill" else shared.heartbeat + 2.0
        with Hosts([f"n{rank}" for rank in range(RANKS)]) as hosts:
            running = self.start(hosts)
            try:
                if not wait_for(lambda: steps_in(self.metrics) >= after):
                    problems.append(f"step {after} was not reached: {self.said()}")
                begin = time.monotonic()
                self.fail(hosts, running[rank].pid, kind, rank, target)
                wait_for(lambda: not self.alive(running, hosts), (within + shared.slack) * 2)
                seconds = time.monotonic() - begin
                left = self.alive(running, hosts)
                if left:
                    problems.append(f"{left} processes were left behind")
            finally:
                self.end(running, hosts)
            if seconds > within + shared.slack:
                problems.append(f"it took {seconds:.1f} s, and {within:g} s are promised")
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
            again = self._resume(hosts) if shared.losses is not None and not finished else 0.0
            problems += record_problems(self.metrics, self.steps, shared.losses)
        return Result(kind, target, rank, after, seconds, within, again, problems, inside[0] if inside else "")

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
            process.wait(GIVE_UP)


def fail_host(kind: str, place: Place, chance: random.Random) -> Result:
    """Run one trial of a kind: `kill`, `stop` or `cut`."""
    target = "host" if kind == "cut" else chance.choice(("worker", "worker", "keeper"))
    after = chance.randrange(1, max(2, place.shared.steps // 2))
    return HostTrial(place, chance.randrange(10**6)).run(kind, chance.randrange(RANKS), target, after)
