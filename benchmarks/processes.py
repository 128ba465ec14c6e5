"""Contender processes seen from outside, through /proc: the cores they may use, their memory, and their processor time.

Linux only. Everything here treats all contenders alike: none of them takes part in being measured.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

TICKS = os.sysconf("SC_CLK_TCK")


class ContenderFailed(Exception):
    """An exception for a contender that died or answered nonsense."""


def allowed_cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def pin(pid: int, cores: Sequence[int]) -> None:
    """Bind every thread of a process."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        try:
            os.sched_setaffinity(int(thread.name), cores)
        except ProcessLookupError:  # the thread ended meanwhile
            continue


def forget_peak(pid: int) -> None:
    """Reset the kernel's record of the largest resident set."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def peak_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise ContenderFailed(f"no VmHWM for process {pid}")


def resident_bytes(pid: int) -> int:
    """Return the present resident set of a process, 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:")), 0)


def cpu_seconds(pid: int) -> float:
    """Return user and system time of all threads of a process so far."""
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(after_name[11]) + int(after_name[12])) / TICKS


@contextmanager
def awake() -> Iterator[bool]:
    """Keep the cores from halting while processes sleep, as computing would: a core of a virtual machine that halted
    takes long to wake. The system is asked for no latency at all, which Linux lets root do. Yield whether it does."""
    try:
        asked = os.open("/dev/cpu_dma_latency", os.O_WRONLY)
    except OSError:
        yield False
        return
    try:
        os.write(asked, struct.pack("i", 0))
        yield True
    finally:
        os.close(asked)


@dataclass
class Contender:
    """Processes that train together and take their turns together. The i-th training process may run on `cores[i]`."""

    name: str
    commands: list[list[str]]
    cores: list[list[int]]
    threads: int
    environment: dict[str, str] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)
    processes: dict[str, int] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    startup_peaks: dict[str, int] = field(default_factory=dict)
    _children: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self) -> None:
        """Start, wait for the warm-up, bind to cores. Time and memory until here do not count."""
        threads = {name: str(self.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TVM_NUM_THREADS")}
        environment = os.environ | threads | self.environment
        for number, command in enumerate(self.commands):
            cores = self.cores[number] if len(self.commands) > 1 else sorted({c for group in self.cores for c in group})
            child = subprocess.Popen(
                [sys.executable, *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
                start_new_session=True,
                preexec_fn=lambda cores=cores: os.sched_setaffinity(0, cores),
            )
            self._children.append(child)
        for child in self._children:
            answer = self._answer(child)
            self.processes |= answer["processes"]
            losses = answer["about"].pop("losses", [])
            self.losses += losses
            self.about |= answer["about"]
        for pid, cores in zip(self.processes.values(), self.cores, strict=True):
            if len(cores) == 1:  # with several, its own threads are bound by OpenMP
                pin(pid, cores)
        self.startup_peaks = {label: peak_bytes(pid) for label, pid in self.processes.items()}
        for pid in self.processes.values():
            forget_peak(pid)

    def run(self, steps: int) -> float:
        """Run one turn, and return the wall time from the order to the last answer."""
        begin = time.perf_counter()
        for child in self._children:
            _input(child).write(json.dumps({"run": steps}) + "\n")
            _input(child).flush()
        answers = [self._answer(child) for child in self._children]
        elapsed = time.perf_counter() - begin
        self.losses += [loss for answer in answers for loss in answer["losses"]]
        return elapsed

    def cpu_seconds(self) -> float:
        return sum(map(cpu_seconds, self.processes.values()))

    def peaks(self) -> dict[str, int]:
        return {label: peak_bytes(pid) for label, pid in self.processes.items()}

    def stop(self) -> None:
        for child in self._children:
            if child.stdin is not None:
                child.stdin.close()
        for child in self._children:
            try:
                child.wait(timeout=20)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        self._children.clear()

    def _answer(self, child: subprocess.Popen[str]) -> dict[str, Any]:
        assert child.stdout is not None
        line = child.stdout.readline()
        if not line:
            raise ContenderFailed(f"{self.name} ended with exit code {child.wait()}; its messages stand above")
        answer: dict[str, Any] = json.loads(line)
        return answer


def _input(child: subprocess.Popen[str]) -> IO[str]:
    assert child.stdin is not None
    return child.stdin
