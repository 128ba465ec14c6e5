"""The pool that shares jobs out: to worker processes, or to this process where that is quicker.

In: jobs (messages.py). Out: an answer for each, in order, as they would come from `jobs.do`. A worker is a fresh
interpreter with pipes for input and output; one job at a time is written to it as a line of JSON. Workers start with
the first jobs that are worth it, and stay for the next. They are killed when the pool closes, be it for an error, an
interrupt, or the end. This process works itself when it has TVM loaded already and there is little to do. There are
never more workers than cores that this process may use.

A worker that writes nothing for far longer than a job takes is hung: that ends the pool with an error which names the
job. Not watched: jobs in this process, and the time that a worker takes to read its next job after an answer.

Invariant: when `close` returns, no process that the pool started is left. Workers are not in the terminal's foreground
group, so that an interrupt reaches this process alone, which then ends them. A worker whose parent was killed reads the
end of its input and ends by itself.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType

import msgspec

from penstock.backends.tvm.fingerprint import source_fingerprint
from penstock.backends.tvm.messages import Answer, CompilerHello, Job, JobFailed, LinkStage, title
from penstock.backends.tvm.processes import environment
from penstock.support.entry_points import command_line
from penstock.support.errors import DoesNotFit, PenstockError, UsageError
from penstock.support.hardware import usable_cores

# Fewer jobs than this are not worth another process, which takes as long to start as several kernels take to compile.
_PER_WORKER = 4
# A folder with less room than this is full: objects and libraries take more.
_ROOM = 1 << 16
# The seconds after which a process that closed its output must have ended.
_LAST_WORDS_S = 5.0
# The limits for the start of a worker, a kernel, and a library. Kernels take seconds, large stages a minute, and busy
# machines several times as long.
_STARTS_S, _COMPILES_S, _LINKS_S = 900.0, 900.0, 3600.0
# The capacity of a pipe.
_PIPE = 1 << 16
_ANSWERS = msgspec.json.Decoder(Answer)


class BuildError(PenstockError):
    """The failure of the compiler or the linker on a stage."""


class _Worker:
    """A process and the job that it works on."""

    def __init__(self, command: Sequence[str]) -> None:
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment(), process_group=0
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.send, self.receive = self.process.stdin, self.process.stdout
        self.number = -1
        self.job: Job | None = None
        self.ready = False
        self.since = time.monotonic()
        self._said = b""

    def begin(self, number: int, job: Job) -> None:
        """Send a job to the worker."""
        self.number, self.job, self.since = number, job, time.monotonic()
        try:
            self.send.write(msgspec.json.encode(job) + b"\n")
            self.send.flush()
        except BrokenPipeError:
            raise self.lost() from None

    def left(self) -> float:
        """Return the seconds until the worker counts as hung; infinite for one without a job."""
        if not self.ready:
            return self.since + _STARTS_S - time.monotonic()
        if self.job is None:
            return math.inf
        return self.since + (_LINKS_S if isinstance(self.job, LinkStage) else _COMPILES_S) - time.monotonic()

    def hear(self) -> bytes | None:
        """Read from the worker without waiting, and return its line; None while there is only a part of it. There is
        never more than one on its way."""
        data = os.read(self.receive.fileno(), _PIPE)
        if not data:
            raise self.lost()
        self._said += data
        if not self._said.endswith(b"\n"):
            return None
        line, self._said = self._said, b""
        return line

    def greet(self, line: bytes) -> None:
        """Read the first line: the worker must run the very sources that the keys of the cache are made from."""
        if msgspec.json.decode(line, type=CompilerHello).fingerprint != source_fingerprint():
            raise BuildError("the sources of the compiler changed while it ran", hint="run the command again")
        self.ready = True

    def finish(self, line: bytes) -> tuple[int, Job, Answer]:
        """Return the number of the job, the job and its answer; the worker is free for another."""
        assert self.job is not None
        job, self.job = self.job, None
        return self.number, job, _ANSWERS.decode(line)

    def lost(self) -> BuildError:
        """Return the error for a worker that has ended."""
        try:
            code = self.process.wait(_LAST_WORDS_S)
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        except subprocess.TimeoutExpired:
            how = "closed its output"
        # LLVM ends its process where it cannot write.
        folder = tempfile.gettempdir()
        if shutil.disk_usage(folder).free < _ROOM:
            return BuildError(
                f"No space left on device: a compiler process {how}{self._doing()}",
                where=folder,
                hint="TMPDIR names another folder for temporary files",
            )
        return BuildError(
            f"a compiler process {how}{self._doing()}", hint="was memory short? `--jobs 1` compiles in one process"
        )

    def hung(self) -> BuildError:
        """Return the error for a worker that has stopped answering."""
        took = time.monotonic() - self.since
        return BuildError(
            f"a compiler process said nothing for {took:.0f} s{self._doing()}, and was ended",
            hint="run the command again",
        )

    def _doing(self) -> str:
        return f" on {title(self.job)}" if self.job is not None else " as it started"

    def kill(self) -> None:
        """End the worker, and the linker that it may have started."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.receive.close()
        with contextlib.suppress(BrokenPipeError):  # bytes that were not sent yet are of no use
            self.send.close()


class WorkerPool:
    """A pool of workers, as a context: `with WorkerPool() as pool: answers = pool.run(jobs)`."""

    def __init__(self, most: int | None = None, command: Sequence[str] = tuple(command_line("compile"))) -> None:
        if most is not None and most < 1:
            raise UsageError(f"{most} compiler processes", hint="at least 1")
        self.most = min(most or usable_cores(), usable_cores())
        self._command = command
        self._workers: list[_Worker] = []

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all workers."""
        while self._workers:
            self._workers.pop().kill()

    def run(self, jobs: Sequence[Job], on_done: Callable[[Job], None] | None = None, expected: int = 0) -> list[Answer]:
        """Run every job and return the answers. Jobs begin in order; the first failure ends the pool, and is raised.
        `expected` is the number of jobs that follow these: workers for them start at once."""
        report = on_done or (lambda job: None)
        in_process = not self._workers and "tvm" in sys.modules and (self.most == 1 or len(jobs) <= _PER_WORKER)
        try:
            return (
                self._run_here(jobs, report)
                if in_process or not jobs
                else self._run_apart(jobs, report, len(jobs) + expected)
            )
        except BaseException:
            self.close()
            raise

    def _run_here(self, jobs: Sequence[Job], report: Callable[[Job], None]) -> list[Answer]:
        if not jobs:
            return []
        from .jobs import do  # lazy: heavy

        answers = []
        for job in jobs:
            answers.append(_checked(job, do(job)))
            report(job)
        return answers

    def _run_apart(self, jobs: Sequence[Job], report: Callable[[Job], None], expected: int) -> list[Answer]:
        answers: dict[int, Answer] = {}
        waiting = deque(enumerate(jobs))
        workers = min(self.most, -(-expected // _PER_WORKER))
        while len(self._workers) < workers:
            self._workers.append(_Worker(self._command))
        with selectors.DefaultSelector() as ready:
            for worker in self._workers:
                ready.register(worker.receive, selectors.EVENT_READ, worker)
                if worker.ready and waiting:
                    worker.begin(*waiting.popleft())
            while len(answers) < len(jobs):
                timeout = min(worker.left() for worker in self._workers)
                answering = [event.data for event, _ in ready.select(max(timeout, 0) if timeout < math.inf else None)]
                for worker in answering:
                    line = worker.hear()
                    if line is None:
                        continue
                    if not worker.ready:
                        worker.greet(line)
                    else:
                        number, job, answer = worker.finish(line)
                        answers[number] = _checked(job, answer)
                        report(job)
                    if waiting:
                        worker.begin(*waiting.popleft())
                for worker in self._workers:
                    # A worker that has just answered may only have waited for this process.
                    if worker not in answering and worker.left() <= 0:
                        raise worker.hung()
        return [answers[i] for i in range(len(jobs))]


def _checked(job: Job, answer: Answer) -> Answer:
    """Return an answer, or raise the error that it reports."""
    if not isinstance(answer, JobFailed):
        return answer
    cause = AssertionError(f"{title(job)}: {answer.traceback}") if answer.traceback else None
    if cause is not None and not answer.rule:
        raise cause
    kind = UsageError if answer.usage else DoesNotFit if answer.memory else BuildError
    raise kind(answer.what, where="" if answer.usage else title(job), hint=answer.hint) from cause
