"""Local launch: one process per rank, watched until the end.

In: a checked bundle and a Setup. Out: messages of the workers, or one error.

Every worker has a socket pair for commands and reports, a line on the status board, and a group of its own in a session
without a terminal. So an interrupt from the terminal reaches the launcher alone. All of them end when the launcher
does, because their control connection ends. When one fails, the other workers are ended: terminated, and killed after
two seconds. One error names rank, stage and action of the one that failed first. A process that died is the cause of
its peers' broken connections, not the other way round.

Output of the workers goes to unnamed files. That of ranks that were asked for is shown as it comes, the end of any
when it dies without a report.
"""

from __future__ import annotations

import contextlib
import os
import queue
import resource
import secrets
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from typing import IO, NoReturn

import msgspec
import numpy as np

from penstock.backends.bundle.format import Bundle
from penstock.runtime.messages.control import (
    Arrays,
    Channel,
    Failed,
    Hosting,
    Join,
    Message,
    Rank,
    Ready,
    Record,
    Setup,
    Wake,
)
from penstock.runtime.messages.defaults import HEARTBEAT
from penstock.runtime.messages.status import Deadline, Patience, StatusBoard, await_saves, describe_line, is_stopped
from penstock.support.errors import PeerLost, PenstockError, UsageError, VerifyError
from penstock.support.words import counted

from .failures import ending, error_of, named, others, place, reached, waits_for
from .forkserver import Process, fork_rank, wake_servers
from .logs import Follower, tail

# Loading, beside the timeout for the group to meet.
START_SECONDS = 120.0
# The seconds to look for the cause after the first sign of a failure. A broken connection is noticed faster than a dead
# process.
_CAUSE_SECONDS = 1.5
_TERMINATE_SECONDS = 2.0
_POLL_SECONDS = 0.2
# The system ends processes where it has no more.
_MEMORY_HINT = "if memory ran out, use more stages or smaller microbatches"

# What libraries and the run itself open, and what each further rank adds.
_DESCRIPTORS, _DESCRIPTORS_PER_RANK = 24, 4

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TVM_NUM_THREADS")


def thread_environment(threads: int) -> dict[str, str]:
    """Return the variables that must be set before a worker imports anything."""
    return dict.fromkeys(THREAD_VARIABLES, str(threads))


def check_descriptors(world: int) -> None:
    """Allow this process and those it starts as many open files as a run needs; UsageError where the system forbids it.

    A run with fewer fails somewhere in a library, or waits.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _DESCRIPTORS + _DESCRIPTORS_PER_RANK * world
    if soft != resource.RLIM_INFINITY and soft < needed:
        if hard != resource.RLIM_INFINITY and hard < needed:
            raise UsageError(
                f"a process may have {hard} open files here, and a run of {counted(world, 'rank')} needs {needed}",
                hint=f"ulimit -n {needed}",
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


class Workers:
    """The processes of one local run."""

    def __init__(
        self, bundle: Bundle, setup: Setup, heartbeat: float = HEARTBEAT, log_ranks: Collection[int] = ()
    ) -> None:
        self.bundle = bundle
        self.count = bundle.world_size
        # The most microbatches of requests that the ranks may hold at once.
        self.most_in_flight = 2 * self.count + 2
        self._board = StatusBoard(self.count)
        self._messages: queue.SimpleQueue[tuple[int, Message | None, Arrays]] = queue.SimpleQueue()
        self._processes: list[Process] = []
        self._channels: list[Channel] = []
        self._logs: list[IO[bytes]] = []
        self._follower: Follower | None = None
        self._closed = False
        self._ending = False
        # Longer than any wait of a rank for another one, because the error of a rank is the better message.
        self._patience = 2 * setup.timeout + 10
        self._silence = Patience(heartbeat)
        # The directory of checkpoints, when there is one, for messages.
        self.checkpoints: str | None = None
        check_descriptors(self.count)
        try:
            for rank in range(self.count):
                self._start(rank)
            stages = {rank: entry.stages for rank, entry in enumerate(bundle.manifest.ranks)}
            self._follower = Follower(dict(enumerate(self._logs)), stages, log_ranks)
            self._meet(setup)
        except BaseException:
            self.end()
            raise

    # -------------------------------------------------------------------------------------------- start

    def _start(self, rank: int) -> None:
        entry = self.bundle.rank(rank)
        ours, theirs = socket.socketpair()
        log = tempfile.TemporaryFile(prefix="penstock-worker-")  # noqa: SIM115 closed by end()
        self._channels.append(Channel(ours))
        self._logs.append(log)
        environment = os.environ | thread_environment(entry.threads) | {"GLOO_SOCKET_IFNAME": loopback_name()}
        start = Rank(rank, self.count, entry.threads, theirs.fileno(), self._board.descriptor, log.fileno())
        with theirs:
            self._processes.append(fork_rank(start, self.bundle.manifest.backend, environment))
        # From here on a worker without signs of life counts as silent.
        self._board.beat(rank)
        threading.Thread(target=self._read, args=(rank, self._channels[-1]), name=f"rank {rank}", daemon=True).start()

    def _meet(self, setup: Setup) -> None:
        # New in every start, and known to no other process: it goes over inherited connections.
        setup = msgspec.structs.replace(setup, secret=secrets.token_hex(32))
        for rank in range(self.count):
            self.send(rank, setup)
        waiting, deadline = set(range(self.count)), Deadline(START_SECONDS + setup.timeout)
        while waiting:
            if deadline.is_over():
                missing = ", ".join(f"rank {r} ({self._board.read(r) or 'starting'})" for r in sorted(waiting))
                raise PeerLost(f"not ready after {START_SECONDS + setup.timeout:g} s: {missing}", where="launch")
            received = self.poll()
            match received:
                case (_, Hosting(port), _):
                    for rank in range(1, self.count):
                        self.send(rank, Join(port))
                case (rank, Ready(), _):
                    waiting.discard(rank)

    def _read(self, rank: int, channel: Channel) -> None:
        try:
            while (received := channel.receive()) is not None:
                self._messages.put((rank, *received))
            self._messages.put((rank, None, {}))
        except OSError:  # a connection that broke, or that was closed from here
            self._messages.put((rank, None, {}))
        except VerifyError as error:
            self._messages.put(
                (rank, Failed(VerifyError.__name__, f"what rank {rank} says cannot be understood: {error}"), {})
            )

    # -------------------------------------------------------------------------------------------- talk

    def send(self, rank: int, message: Record, arrays: Mapping[str, np.ndarray] | None = None) -> None:
        try:
            self._channels[rank].send(message, arrays)
        except OSError:
            self._fail()

    def send_all(self, message: Record) -> None:
        for rank in range(self.count):
            self.send(rank, message)

    def expect_end(self) -> None:
        """Accept from here on that workers end: the first of them is gone before the last one has answered."""
        self._ending = True

    @property
    def _fine(self) -> tuple[int | None, ...]:
        """The exit codes that are no failure."""
        return (None, 0) if self._ending else (None,)

    def poll(self) -> tuple[int, Message, Arrays] | None:
        """Return the next message, or None after a short while without one. Raises when a worker failed, after ending
        all of them."""
        self._silence.look()
        silent = [rank for rank in range(self.count) if self._is_silent(rank)]
        if silent:
            self._fail(silent[0])
        try:
            rank, message, arrays = self._messages.get(timeout=_POLL_SECONDS)
        except queue.Empty:
            if any(process.poll() not in self._fine for process in self._processes):
                self._fail()
            return None
        if message is None and self._processes[rank].poll() in self._fine and self._ending:
            return None
        if message is None or isinstance(message, Failed):
            self._fail(rank, message)
        assert message is not None
        return rank, message, arrays

    def _is_silent(self, rank: int) -> bool:
        return self._processes[rank].poll() is None and self._silence.over(self._board.last_beat(rank))

    def wake(self) -> None:
        """Wake a thread that waits for a message, because another thread has a message for it."""
        self._messages.put((-1, Wake(), {}))

    def receive(self) -> tuple[int, Message, Arrays]:
        """Return the next message. Ranks have deadlines of their own; when no rank moves for longer than those, the run
        is given up."""
        lines, deadline = None, Deadline(self._patience)
        while (received := self.poll()) is None:
            now = [self._board.read(rank) for rank in range(self.count)]
            if now != lines:
                lines, deadline = now, Deadline(self._patience)
            elif deadline.is_over():
                self.end()
                listed = "; ".join(others(dict(enumerate(now))))
                raise PeerLost(
                    f"no rank got further for {self._patience:g} s; {listed}",
                    where=self._place(0, now[0]),
                    hint="give a longer --timeout",
                )
        return received

    # -------------------------------------------------------------------------------------------- end

    def close(self) -> None:
        """End workers that were told to stop, and wait for them."""
        deadline = time.monotonic() + 10
        for process in self._processes:
            process.wait(max(0.0, deadline - time.monotonic()))
        self.end()

    def end(self) -> None:
        """End all workers within a few seconds, whatever they are doing."""
        if self._closed:
            return
        self._closed = True
        for kind, seconds in ((signal.SIGTERM, _TERMINATE_SECONDS), (signal.SIGKILL, 10.0)):
            deadline = time.monotonic() + seconds
            for process in self._processes:
                # One that is stopped would not hear of its end.
                process.signal_group(signal.SIGKILL if is_stopped(process.pid) else kind)
            wake_servers()
            for process in self._processes:
                process.wait(max(0.0, deadline - time.monotonic()))
        for channel in self._channels:
            channel.close()
        if self._follower is not None:
            self._follower.close()
        for log in self._logs:
            log.close()
        self._board.close()

    def saves(self, silent: Sequence[int] = ()) -> list[float]:
        """Return how far the ranks are with a checkpoint that is being written. Nothing where none is, or where it
        cannot come to its end. Rank 0 has to live for that, and every other rank that has not done its part."""
        if self._closed:
            return []
        saves = [self._board.save_of(rank) for rank in range(self.count)]
        ended = [r for r, process in enumerate(self._processes) if process.poll() is not None or r in silent]
        return [] if 0 in ended or not saves[0] or any(saves[r] > 0 for r in ended) else saves

    def await_saves(self, silent: Sequence[int] = ()) -> None:
        """Wait for a checkpoint that is being written, as long as it gets on."""
        await_saves(lambda: self.saves(silent))

    def busy_seconds(self) -> list[float]:
        """Return the seconds that each rank has computed so far."""
        return [] if self._closed else [self._board.busy(rank) for rank in range(self.count)]

    @property
    def ended(self) -> bool:
        """True once all workers have ended."""
        return self._closed

    def process_ids(self) -> list[int]:
        return [process.pid for process in self._processes]

    # -------------------------------------------------------------------------------------------- failure

    def _fail(self, rank: int | None = None, message: Failed | None = None) -> NoReturn:
        """Find the cause, end all workers, raise it."""
        cause, error = self._cause(rank, message)
        error.rank = cause
        raise error

    def _cause(self, rank: int | None, message: Failed | None) -> tuple[int | None, PenstockError]:
        """Find the rank that is the cause of a failure, and its error; all workers have ended then."""
        reports: dict[int, Failed] = {} if rank is None or message is None else {rank: message}
        # A rank that is stopped is the cause of what others report of their peers: only reports that are here are read.
        watched = rank is None and self._silence.limit > 0
        known = watched and any(is_stopped(process.pid) for process in self._processes)
        deadline = time.monotonic() + _CAUSE_SECONDS
        settled = False
        while time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                other, received, _ = self._messages.get(timeout=0.0 if known else 0.05)
                if isinstance(received, Failed):
                    reports.setdefault(other, received)
                continue
            # A worker reports before it ends, so one quiet round after its end shows that there is no report.
            if settled or known:
                break
            died = any(process.poll() is not None and r not in reports for r, process in enumerate(self._processes))
            settled = died or any(report.error != PeerLost.__name__ for report in reports.values())
        doing = {r: self._board.read(r) or "starting" for r in range(self.count)}
        # Codes before anything is ended from here.
        codes = [process.poll() for process in self._processes]
        tails = [tail(log) for log in self._logs]
        # A stopped process is the cause of what its peers report, whether or not its silence has lasted long enough.
        stopped = [
            r
            for r, process in enumerate(self._processes)
            if codes[r] is None and self._silence.limit and is_stopped(process.pid)
        ]
        silent = stopped or [r for r in range(self.count) if codes[r] is None and self._is_silent(r)]
        self.await_saves(silent)
        note = reached(self._board.last_step(), self.checkpoints)
        heard = {r: self._board.last_beat(r) for r in silent}
        self.end()
        # A worker that ended well got the order to end, because other workers ended.
        dead = sorted(
            (r for r in range(self.count) if codes[r] is not None and r not in reports), key=lambda r: codes[r] == 0
        )
        causes = [r for r, report in reports.items() if report.error != PeerLost.__name__]
        # The system kills all ranks with the process that they were forked from. A rank that ended before may have
        # caused that.
        alone = [r for r in dead if not self._processes[r].orphaned]
        if dead and not alone:
            return None, self._orphans(dead[0], codes[dead[0]], doing, note)
        if alone:
            return alone[0], self._death(alone[0], codes[alone[0]], doing, note, tails[alone[0]])
        if silent and not causes:
            return silent[0], self._stillness(silent[0], heard[silent[0]], silent[0] in stopped, doing, note)
        first = min(reports, key=lambda r: (reports[r].error == PeerLost.__name__, r != rank), default=None)
        if first is None:
            return None, PeerLost("; ".join(["a control connection broke", note, *others(doing)]), where="launch")
        cause = waits_for(first, doing) if reports[first].error == PeerLost.__name__ else first
        return cause, error_of(reports[first], self._place(first, doing[first]), doing, first, note)

    def _place(self, rank: int, action: str) -> str:
        return place(rank, self.bundle.rank(rank).stages, action)

    def _named(self, rank: int) -> str:
        return named(rank, self.bundle.rank(rank).stages, self._processes[rank].pid, socket.gethostname())

    def _death(self, rank: int, code: int | None, doing: dict[int, str], note: str, tail: str) -> PeerLost:
        assert code is not None
        what = f"{self._named(rank)} {ending(code)} during {describe_line(doing[rank])}"
        hint = _MEMORY_HINT if code == -signal.SIGKILL else ""
        message = "; ".join([what, note, *others(doing, rank)]) + (f"\n{tail}" if tail else "")
        return PeerLost(message, where=self._place(rank, doing[rank]), hint=hint)

    def _orphans(self, rank: int, code: int | None, doing: dict[int, str], note: str) -> PeerLost:
        first, *lines = self._processes[rank].orphaned.splitlines()
        message = "; ".join([first, note, *others(doing)])
        return PeerLost(
            "\n".join([message, *lines]), where="launch", hint=_MEMORY_HINT if code == -signal.SIGKILL else ""
        )

    def _stillness(self, rank: int, heard: float, stopped: bool, doing: dict[int, str], note: str) -> PeerLost:
        seconds = time.monotonic() - heard
        state = "is stopped" if stopped else "hangs"
        what = f"{self._named(rank)} {state}: no sign of life for {seconds:.0f} s during {describe_line(doing[rank])}"
        return PeerLost("; ".join([what, note, *others(doing, rank)]), where=self._place(rank, doing[rank]))


def loopback_name() -> str:
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), names[0])
