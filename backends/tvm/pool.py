"""Sharing jobs out: to worker processes, or to this process where that is quicker.

In: jobs (messages.py). Out: an answer for each, in order, as they would come from `jobs.do`. A worker is a fresh interpreter with pipes for
input and output; one job at a time is written to it as a line of JSON. Workers start with the first jobs that are worth it, stay for the next,
and are killed when the pool closes, whatever the reason: an error, an interrupt, or the end.

In this process: when it has TVM loaded already and there is little to do. There are never more workers than cores that this process may use.

Invariant: when `close` returns, no process that the pool started is left. Workers are not in the terminal's foreground group, so that an
interrupt reaches this process alone, which then ends them. A worker whose parent was killed reads the end of its input and ends by itself.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

import msgspec

from penstock.ir.cluster import usable_cores
from penstock.ir.errors import PenstockError, UsageError

from .fingerprint import source_fingerprint
from .messages import Answer, Failed, Hello, Job, title

# Fewer jobs than this are not worth another process, which takes as long to start as several kernels take to compile.
_PER_WORKER = 4
# How long a process that closed its output may take to say how it ended.
_LAST_WORDS_S = 5.0
_COMMAND = (sys.executable, "-P", "-m", f"{__package__}.worker")
_ANSWERS = msgspec.json.Decoder(Answer)


class BuildError(PenstockError):
    """The compiler or the linker failed on a stage."""


def environment() -> dict[str, str]:
    """For a process of our own: whatever way this one found the package, it shall find the same."""
    home = str(Path(__file__).absolute().parents[3])
    paths = [home, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


class _Worker:
    """One process and what it is busy with."""

    def __init__(self, command: Sequence[str]) -> None:
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment(), process_group=0)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.send, self.receive = self.process.stdin, self.process.stdout
        self.number = -1
        self.job: Job | None = None
        self.ready = False

    def begin(self, number: int, job: Job) -> None:
        self.number, self.job = number, job
        try:
            self.send.write(msgspec.json.encode(job) + b"\n")
            self.send.flush()
        except BrokenPipeError:
            raise self.lost() from None

    def greet(self) -> None:
        """Read the first line: the worker must run the very sources that the keys of the cache are made from."""
        line = self.receive.readline()
        if not line:
            raise self.lost()
        if msgspec.json.decode(line, type=Hello).fingerprint != source_fingerprint():
            raise BuildError("the sources of the compiler changed while it ran", hint="run the command again")
        self.ready = True

    def finish(self) -> tuple[int, Job, Answer]:
        line = self.receive.readline()
        if not line.endswith(b"\n"):
            raise self.lost()
        assert self.job is not None
        job, self.job = self.job, None
        return self.number, job, _ANSWERS.decode(line)

    def lost(self) -> BuildError:
        """The error for a worker that is no more."""
        try:
            code = self.process.wait(_LAST_WORDS_S)
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        except subprocess.TimeoutExpired:
            how = "closed its output"
        doing = f" on {title(self.job)}" if self.job is not None else " as it started"
        return BuildError(f"a compiler process {how}{doing}", hint="was memory short? `--jobs 1` compiles in one process")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.receive.close()
        with contextlib.suppress(BrokenPipeError):  # what was not sent yet needs not be
            self.send.close()


class Pool:
    """A context: `with Pool() as pool: answers = pool.run(jobs)`."""

    def __init__(self, most: int | None = None, command: Sequence[str] = _COMMAND) -> None:
        if most is not None and most < 1:
            raise UsageError(f"{most} compiler processes", hint="at least 1")
        self.most = min(most or usable_cores(), usable_cores())
        self._command = command
        self._workers: list[_Worker] = []

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        while self._workers:
            self._workers.pop().kill()

    def run(self, jobs: Sequence[Job], on_done: Callable[[Job], None] | None = None, expected: int = 0) -> list[Answer]:
        """An answer for every job. Jobs are begun in order; the first failure ends the pool, and is raised. `expected` more jobs are about
        to come: workers for them start now."""
        report = on_done or (lambda job: None)
        here = not self._workers and "tvm" in sys.modules and (self.most == 1 or len(jobs) <= _PER_WORKER)
        try:
            return self._run_here(jobs, report) if here or not jobs else self._run_apart(jobs, report, len(jobs) + expected)
        except BaseException:
            self.close()
            raise

    def _run_here(self, jobs: Sequence[Job], report: Callable[[Job], None]) -> list[Answer]:
        if not jobs:
            return []
        from .jobs import do

        answers = []
        for job in jobs:
            answers.append(_checked(job, do(job)))
            report(job)
        return answers

    def _run_apart(self, jobs: Sequence[Job], report: Callable[[Job], None], expected: int) -> list[Answer]:
        answers: dict[int, Answer] = {}
        waiting = deque(enumerate(jobs))
        wanted = min(self.most, -(-expected // _PER_WORKER))
        while len(self._workers) < wanted:
            self._workers.append(_Worker(self._command))
        with selectors.DefaultSelector() as ready:
            for worker in self._workers:
                ready.register(worker.receive, selectors.EVENT_READ, worker)
                if worker.ready and waiting:
                    worker.begin(*waiting.popleft())
            while len(answers) < len(jobs):
                for event, _ in ready.select():
                    worker = event.data
                    if not worker.ready:
                        worker.greet()
                    else:
                        number, job, answer = worker.finish()
                        answers[number] = _checked(job, answer)
                        report(job)
                    if waiting:
                        worker.begin(*waiting.popleft())
        return [answers[i] for i in range(len(jobs))]


def _checked(job: Job, answer: Answer) -> Answer:
    if not isinstance(answer, Failed):
        return answer
    if answer.traceback:
        raise AssertionError(f"{title(job)}: {answer.traceback}")
    kind = UsageError if answer.usage else BuildError
    raise kind(answer.what, where="" if answer.usage else title(job), hint=answer.hint)


__all__ = ["BuildError", "Pool"]
