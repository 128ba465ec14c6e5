"""Processes for the ranks of one host, forked from one that has imported what they need: imports take seconds of every
rank, a fork milliseconds.

    python -P -m penstock.runtime.launch.forkserver --parent PID --backend NAME

is started with one end of a socket pair as its input. In: ranks to start, each with its descriptors. Out: the numbers
of processes, and their exit codes. The output of the imports is put into the log of every rank, as if it had imported
itself.

A server stays for the next run of its launcher. It ends when it has had no rank for a while, and when its launcher
ends; its ranks see that. A process inherits environment, directory, cores and limits. So a server serves only launches
that hand down the same.

A process that ended keeps its number until the launcher has heard of it, so that no signal meets a stranger. The server
has one thread and touches no device, since neither threads nor CUDA survive a fork.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import ctypes
import gc
import json
import os
import resource
import select
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, NoReturn

from penstock.backends.registry import backend_of
from penstock.runtime.messages.control import Rank
from penstock.runtime.messages.status import Deadline, is_stopped
from penstock.support.entry_points import ENTRY_POINTS, command_line, load
from penstock.support.errors import DoesNotFit, PeerLost, PenstockError
from penstock.support.out_of_memory import ended_out_of_memory

from .failures import ending
from .logs import tail
from .spawning import spawn

# Longer than imports and forks take on a busy machine.
_IMPORT_SECONDS, _FORK_SECONDS = 120.0, 30.0
_STOPPED_SECONDS, _TICK_SECONDS = 10.0, 0.5
# The seconds that a server waits for another run, and those between two looks for its launcher.
_IDLE_SECONDS, _LOOK_SECONDS = 30.0, 1.0
_LONGEST_MESSAGE = 1 << 12
_PR_SET_PDEATHSIG = 1
_SERVER = "the process that ranks are forked from"
_INHERITED_STATUS = ("Umask", "Uid", "Gid", "SigIgn", "CapEff", "Seccomp")


# ------------------------------------------------------------------------------------------------ the launcher's side


class Process:
    """A process that a server forked."""

    def __init__(self) -> None:
        self.pid = 0
        self.refusal = ""
        # A description of the server's end, if the process ended with the server.
        self.orphaned = ""
        self._code: int | None = None
        self._began, self._ended = threading.Event(), threading.Event()
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """Return its exit code, in subprocess's way; None while it runs."""
        return self._code

    def wait(self, seconds: float) -> None:
        """Wait until it has ended, or for so long."""
        self._ended.wait(seconds)

    def signal_group(self, number: int) -> None:
        """Send a signal to it, and to the processes it started, if it runs."""
        with self._lock:
            if self._code is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.pid, number)

    def has_begun(self, seconds: float) -> bool:
        return self._began.wait(seconds)

    def begin(self, pid: int) -> None:
        self.pid = pid
        self._began.set()

    def refuse(self, why: str) -> None:
        self.refusal = why
        self._began.set()

    def end(self, code: int, orphaned: str = "") -> None:
        with self._lock:
            self._code, self.orphaned = code, orphaned
        self._began.set()
        self._ended.set()


class Server:
    """A server that runs, seen from its launcher. A thread reads its messages until it ends."""

    def __init__(self, backend: str, environment: Mapping[str, str]) -> None:
        self.lost = False
        self.failure: PenstockError | None = None
        self._processes: dict[int, Process] = {}
        self._count = 0
        self._ready, self._gone = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._log = tempfile.TemporaryFile(prefix="penstock-imports-")  # noqa: SIM115 closed when the server has ended
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._server = spawn(
                [*command_line("forkserver"), "--parent", str(os.getpid()), "--backend", backend],
                f"{_SERVER} on {socket.gethostname()}",
                _STOPPED_SECONDS,
                env=environment,
                stdin=theirs.fileno(),
                stdout=self._log,
                stderr=self._log,
                start_new_session=True,
            )
        threading.Thread(target=self._read, name="forks", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._server.pid

    def fork(self, rank: Rank) -> Process | None:
        """Start the process of a rank; None if the server has ended, and `failure` says how."""
        process = Process()
        with self._lock:
            if self.lost:
                return None
            self._count += 1
            number = self._count
            order = {"start": number, "rank": rank.rank, "world": rank.world, "threads": rank.threads}
            try:
                socket.send_fds(self._socket, [json.dumps(order).encode()], [rank.control, rank.status, rank.log])
                self._processes[number] = process
            except (BrokenPipeError, ConnectionResetError):  # it is about to end
                process.refuse("")
            except OSError as error:
                raise DoesNotFit(
                    f"the system passes no connections on to rank {rank.rank}: {error.strerror}", where="launch"
                ) from error
        try:
            self._await_ready()
            deadline = Deadline(_FORK_SECONDS)
            while not process.has_begun(_TICK_SECONDS) and not deadline.is_over():
                continue
            if not process.has_begun(0):
                raise PeerLost(f"no process for rank {rank.rank} within {_FORK_SECONDS:g} s", where="launch")
        except BaseException:  # an interrupt, too: its caller does not wait for it
            self._server.kill()
            raise
        if not process.pid and not process.refusal:
            self._gone.wait(_FORK_SECONDS)
        if process.refusal:
            raise DoesNotFit(f"the system starts no process for rank {rank.rank}: {process.refusal}", where="launch")
        return process if process.pid else None

    def _await_ready(self) -> None:
        """Wait for the imports, which take any time on a busy machine; a process that is stopped gets on with none."""
        imports, stopped = Deadline(_IMPORT_SECONDS), Deadline(_STOPPED_SECONDS)
        while not self._ready.wait(_TICK_SECONDS):
            if not is_stopped(self.pid):
                stopped = Deadline(_STOPPED_SECONDS)
            if stopped.is_over():
                raise PeerLost(f"{self._named()} has been stopped for {_STOPPED_SECONDS:g} s", where="launch")
            if imports.is_over():
                raise PeerLost(f"imports took longer than {_IMPORT_SECONDS:g} s", where="launch")

    def _named(self) -> str:
        return f"{_SERVER} (process {self.pid} on {socket.gethostname()})"

    def wake(self) -> None:
        """Let a server go on that was stopped: it has ended ranks to bury, and an end of its own to come to."""
        if not self.lost and is_stopped(self.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGCONT)

    def _read(self) -> None:
        while message := self._receive():
            match message:
                case {"ready": True}:
                    self._ready.set()
                case {"started": number, "pid": pid}:
                    with self._lock:
                        self._processes[number].begin(pid)
                case {"refused": number, "why": why}:
                    with self._lock:
                        self._processes.pop(number).refuse(why)
                case {"ended": number, "code": code}:
                    with self._lock:
                        self._processes.pop(number).end(code)
                    with contextlib.suppress(OSError):
                        self._socket.send(json.dumps({"heard": number}).encode())
        code = self._server.wait()
        with self._lock:
            self.lost = True
            message = tail(self._log)
            self.failure = _describe_end(code, self._log)
            for process in self._processes.values():
                process.end(code, f"{self._named()} {ending(code)}, and all ranks with it\n{message}".rstrip())
            self._processes.clear()
            self._log.close()
            self._socket.close()
        self._ready.set()
        self._gone.set()

    def _receive(self) -> Any:
        try:
            data = self._socket.recv(_LONGEST_MESSAGE)
        except OSError:
            return None
        return json.loads(data) if data else None


_servers: dict[object, Server] = {}
_servers_lock = threading.Lock()


@atexit.register
def wake_servers() -> None:
    """Let all servers go on that were stopped. Nothing else would end them."""
    for server in list(_servers.values()):
        server.wake()


def fork_rank(rank: Rank, backend: str, environment: Mapping[str, str]) -> Process:
    """Start a process for a rank, from a server that hands down what this process would, with that environment."""
    key = (backend, *sorted(environment.items()), *_inherited())
    while True:
        with _servers_lock:
            for other in [other for other, server in _servers.items() if server.lost]:
                del _servers[other]
            known = _servers.get(key)
            server = _servers[key] = known or Server(backend, environment)
        if (process := server.fork(rank)) is not None:
            return process
        # A server that was there already may have ended for want of work before it read the message about this rank.
        if known is None:
            assert server.failure is not None
            raise server.failure


def _describe_end(code: int, log: IO[bytes]) -> PenstockError:
    """Return the error that the end of a server means for its launcher; `log` is its output."""
    what = f"{_SERVER} {ending(code)}"
    log.seek(0)
    if ended_out_of_memory(log.read().decode("utf-8", "replace")):
        hint = (
            "it loads libraries before there are any tensors; `ulimit -v` and the limits of a container have to "
            "leave room for them"
        )
        return DoesNotFit(f"the system gave no more memory: {what}", where="launch", hint=hint)
    return PeerLost(f"{what}\n{tail(log)}".rstrip(), where="launch")


def _inherited() -> tuple[object, ...]:
    """Return the other state that a process hands down to its children."""
    status = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    try:
        directory: str | None = os.getcwd()
    except FileNotFoundError:  # removed meanwhile
        directory = None
    return (
        os.getpid(),
        sys.executable,
        directory,
        frozenset(os.sched_getaffinity(0)),
        os.getpriority(os.PRIO_PROCESS, 0),
        Path("/proc/self/cgroup").read_text(encoding="utf-8"),
        *(resource.getrlimit(kind) for name, kind in vars(resource).items() if name.startswith("RLIMIT_")),
        *(line for line in status if line.partition(":")[0] in _INHERITED_STATUS),
    )


# ------------------------------------------------------------------------------------------------ the server


class _Children:
    """The processes that run, and those that ended of which the launcher has not heard yet."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._running: dict[int, tuple[int, int]] = {}
        self._ended: dict[int, int] = {}
        self.poll = select.poll()
        self.poll.register(connection, select.POLLIN)

    def __bool__(self) -> bool:
        return bool(self._running or self._ended)

    def start(self, order: Mapping[str, Any], descriptors: list[int]) -> None:
        try:
            parent, pid = os.getpid(), os.fork()
        except OSError as error:
            for descriptor in descriptors:
                os.close(descriptor)
            self._say({"refused": order["start"], "why": error.strerror})
            return
        if not pid:
            try:
                os.setpgid(0, 0)
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                self._connection.close()
                for other in self._running:
                    os.close(other)
                if os.getppid() == parent:
                    _become(Rank(order["rank"], order["world"], order["threads"], *descriptors), parent)
            finally:
                os._exit(1)
        for descriptor in descriptors:
            os.close(descriptor)
        # The process gets a group of its own before the launcher knows of it, because signals go to groups. It does not
        # have to run for that: one that was stopped at once is not waited for. The group stays in the session of this
        # process, so that the system ends one that is stopped when this process is gone.
        os.setpgid(pid, pid)
        watch = os.pidfd_open(pid)
        self._running[watch] = (order["start"], pid)
        self.poll.register(watch, select.POLLIN)
        self._say({"started": order["start"], "pid": pid})

    def end(self, watch: int) -> None:
        number, pid = self._running.pop(watch)
        self.poll.unregister(watch)
        os.close(watch)
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        self._ended[number] = pid
        self._say({"ended": number, "code": ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status})

    def bury(self, number: int) -> None:
        os.waitpid(self._ended.pop(number), 0)

    def _say(self, message: Mapping[str, Any]) -> None:
        self._connection.send(json.dumps(message).encode())


def main() -> None:
    parser = argparse.ArgumentParser(
        prog=ENTRY_POINTS["forkserver"], description="Forks the ranks of local runs; started by penstock run."
    )
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--backend", required=True)
    arguments = parser.parse_args()
    # Imported objects stay. Looking through them for garbage would take a fifth of the imports, and a process would
    # copy the pages that it looks through. A rank collects only the objects it makes itself.
    gc.disable()
    connection = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)

    load("rank")
    with contextlib.suppress(PenstockError):  # the rank that loads a stage meets it again, and reports it
        backend_of(arguments.backend).prepare()
    _name("forks")
    gc.freeze()
    sys.stdout.flush()
    sys.stderr.flush()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the launcher ended
        connection.send(json.dumps({"ready": True}).encode())
        _serve(connection, arguments.parent)
    # Ranks that still run see that their parent is gone.
    os._exit(0)


def _serve(connection: socket.socket, parent: int) -> None:
    """Serve until the launcher ends, or nothing was to be done for a while."""
    children, needed = _Children(connection), time.monotonic()
    while os.getppid() == parent:
        for descriptor, _ in children.poll.poll(1000 * _LOOK_SECONDS):
            if descriptor != connection.fileno():
                children.end(descriptor)
                continue
            data, descriptors, _, _ = socket.recv_fds(connection, _LONGEST_MESSAGE, 3)
            if not data:
                return
            message = json.loads(data)
            if "start" in message:
                children.start(message, descriptors)
            else:
                children.bury(message["heard"])
        if children:
            needed = time.monotonic()
        elif time.monotonic() - needed > _IDLE_SECONDS:
            return


def _name(role: str) -> None:
    """Set the name that `ps` and `top` show for this process."""
    Path("/proc/self/comm").write_text(f"penstock:{role}", encoding="ascii")


def _become(rank: Rank, parent: int) -> NoReturn:
    """Run as a rank from here on, in a process that was just forked."""
    code = 1
    try:
        earlier_output = os.pread(1, os.fstat(1).st_size, 0)
        for output in (1, 2):
            os.dup2(rank.log, output)
        os.close(rank.log)
        os.write(1, earlier_output)
        for descriptor in (rank.control, rank.status):
            os.set_inheritable(descriptor, False)
        _name(str(rank.rank))
        # Like any other signal, an interrupt of a rank alone ends it at once, and the launcher says by what.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        gc.enable()
        code = load("rank").serve_rank(rank, parent)
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            # A rank must not clean up what belongs to the server.
            os._exit(code)


if __name__ == "__main__":
    main()
