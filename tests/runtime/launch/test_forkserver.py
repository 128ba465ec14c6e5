"""Ranks that are forked from one process: what they inherit, how they end, and that nothing of it is left behind."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import threading
import time
from itertools import cycle
from pathlib import Path

import pytest
from oracles.classifier import make_batches

from penstock.runtime.job.job import Job
from penstock.runtime.launch import forkserver
from penstock.runtime.launch import local as launch
from penstock.runtime.launch.forkserver import Server, fork_rank
from penstock.runtime.launch.spawning import spawn
from penstock.runtime.messages.control import Rank
from penstock.runtime.messages.status import is_stopped
from penstock.support.errors import DoesNotFit, PeerLost, PenstockError

from ..waiting import is_running, wait_until


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def stopped_children() -> list[int]:
    pid = os.getpid()
    found = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return [child for child in found if is_stopped(child)]


def servers() -> list[Server]:
    return [server for server in forkserver._servers.values() if not server.lost]


def test_one_server_for_all_ranks_and_the_next_run(bundle_of):
    """It has one thread, and its processes are named; losses do not depend on who was forked when."""
    found, losses = [], []
    for _ in range(2):
        with Job(bundle_of(2, "1f1b", 2), timeout=30) as job:
            pids = job.workers.process_ids()
            assert [Path(f"/proc/{pid}/comm").read_text() for pid in pids] == ["penstock:0\n", "penstock:1\n"]
            found += map(parent_of, pids)
            losses.append(list(job.run(make_batches(3, 2))))
        assert not [pid for pid in pids if is_running(pid)]
        assert wait_until(lambda pids=pids: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    assert len(set(found)) == 1
    assert losses[0] == losses[1]
    assert "\nThreads:\t1\n" in Path(f"/proc/{found[0]}/status").read_text()
    assert found[0] in [server.pid for server in servers()]
    assert "PYTEST_CURRENT_TEST" not in os.environ, "or else each test waits for imports"


def test_what_is_inherited_decides_on_the_server(bundle_of, tmp_path, monkeypatch):
    """A run from a place that hands down something else has another server, and hands that down."""

    def server_of(job: Job) -> int:
        return parent_of(job.workers.process_ids()[0])

    bundle = bundle_of(1, "1f1b", 2)
    with Job(bundle, timeout=30) as job:
        first = server_of(job)
    monkeypatch.setenv("PENSTOCK_A_TEST", "here")
    with Job(bundle, timeout=30) as job:
        (pid,) = job.workers.process_ids()
        assert server_of(job) != first
        assert b"PENSTOCK_A_TEST=here" in Path(f"/proc/{parent_of(pid)}/environ").read_bytes().split(b"\0")
    monkeypatch.delenv("PENSTOCK_A_TEST")
    with Job(bundle, timeout=30) as job:
        assert server_of(job) == first


def test_cores_limits_directory_and_mask_are_inherited(tmp_path, monkeypatch):
    """What decides on the server names each of them; the control is that nothing else moves it."""
    known = forkserver._inherited()
    assert forkserver._inherited() == known
    monkeypatch.chdir(tmp_path)
    assert forkserver._inherited() != known
    monkeypatch.undo()
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0 if soft else min(4096, hard) if hard > 0 else 4096, hard))
    try:
        assert soft == hard == 0 or forkserver._inherited() != known
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))
    mask = os.umask(0o137)
    try:
        assert forkserver._inherited() != known
    finally:
        os.umask(mask)
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        assert len(cores) == 1 or forkserver._inherited() != known
    finally:
        os.sched_setaffinity(0, cores)
    assert forkserver._inherited() == known


def test_a_server_that_ended_is_replaced(bundle_of):
    """Also when nobody has noticed yet that it did."""
    with Job(bundle_of(2, "1f1b", 2), timeout=30) as job:
        expected = list(job.run(make_batches(2, 2)))
    for server in servers():
        os.kill(server.pid, signal.SIGKILL)
    with Job(bundle_of(2, "1f1b", 2), timeout=30) as job:
        assert list(job.run(make_batches(2, 2))) == expected


def test_a_server_that_is_stopped_goes_on_at_the_end(bundle_of, monkeypatch):
    """It has ranks to bury, and would stay behind with them."""
    monkeypatch.setenv("PENSTOCK_A_TEST", "a server of its own")
    job = Job(bundle_of(2, "1f1b", 2), timeout=30)
    pids = job.workers.process_ids()
    server = parent_of(pids[0])
    os.kill(server, signal.SIGSTOP)
    job.close()
    assert wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    assert not is_stopped(server)


def test_a_server_that_is_stopped_as_it_starts(bundle_of, monkeypatch):
    monkeypatch.setenv("PENSTOCK_A_TEST", "another server")
    monkeypatch.setattr(forkserver, "_STOPPED_SECONDS", 1.0)

    def stopped(*words, **options):
        process = spawn(*words, **options)
        process.send_signal(signal.SIGSTOP)
        return process

    monkeypatch.setattr(forkserver, "spawn", stopped)
    with pytest.raises(PeerLost, match=r"forked from \(process \d+ on .*\) has been stopped for"):
        Job(bundle_of(2, "1f1b", 2), timeout=30)


def test_a_program_that_is_stopped_before_it_begins():
    """The system lets a parent wait for it. The control is one that is stopped, and goes on in time."""
    stop = {"preexec_fn": lambda: os.kill(os.getpid(), signal.SIGSTOP), "stdin": subprocess.DEVNULL}
    with pytest.raises(PeerLost, match=r"the sleeper was stopped for 0\.5 s before it began"):
        spawn(["sleep", "600"], "the sleeper", 0.5, **stop)
    assert not stopped_children()
    done = threading.Event()

    def go_on():
        while not done.wait(0.05):
            for pid in stopped_children():
                os.kill(pid, signal.SIGCONT)

    threading.Thread(target=go_on, daemon=True).start()
    process = spawn(["sleep", "600"], "the sleeper", 30, **stop)
    done.set()
    assert process.poll() is None
    process.kill()
    process.wait()


def test_a_program_that_is_not_there_is_said_to_be():
    with pytest.raises(FileNotFoundError):
        spawn(["/no/such/program"], "nothing", 5, stdin=subprocess.DEVNULL)


STOPPED = """
import os, signal
fork, count = os.fork, []
def stopped():
    count.append(0)
    pid = fork()
    if not pid and len(count) == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    return pid
os.fork = stopped
"""


@pytest.fixture
def stopped_at_once(tmp_path, monkeypatch):
    """Stop the second rank before it has done anything."""
    (tmp_path / "sitecustomize.py").write_text(STOPPED)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))


@pytest.mark.usefixtures("stopped_at_once")
def test_a_rank_that_is_stopped_at_once_is_found_as_any_other(bundle_of):
    """The server does not wait for it, and it is not left behind."""
    with pytest.raises(
        PeerLost, match=r"rank 1 \(stage 1, process \d+ on .*\) is stopped: no sign of life for"
    ) as caught:
        Job(bundle_of(2, "1f1b", 2), timeout=600, heartbeat=2)
    pid = int(str(caught.value).partition("process ")[2].split()[0])
    assert wait_until(lambda: not is_running(pid))


@pytest.mark.usefixtures("stopped_at_once")
def test_a_rank_that_is_stopped_at_once_ends_with_its_server(bundle_of, monkeypatch):
    """It had no time to ask the system for that."""
    started, fork = [], launch.fork_rank

    def forked(*said):
        started.append(fork(*said))
        if len(started) == 2:
            assert wait_until(lambda: is_stopped(started[1].pid))
            os.kill(parent_of(started[1].pid), signal.SIGKILL)
        return started[-1]

    monkeypatch.setattr(launch, "fork_rank", forked)
    with pytest.raises(PeerLost, match="was killed by SIGKILL, and all ranks with it"):
        Job(bundle_of(2, "1f1b", 2), timeout=600, heartbeat=30)
    assert wait_until(lambda: not any(is_running(process.pid) for process in started))


def test_ranks_end_with_their_server(bundle_of):
    job = Job(bundle_of(2, "1f1b", 2), timeout=30)
    pids = job.workers.process_ids()
    losses = job.run(cycle(make_batches(4, 2)))
    next(losses)
    told = rf"^launch: the process that ranks are forked from \(process {parent_of(pids[0])} on .*\) was killed by SIGKILL, and all ranks with it; last finished step"
    os.kill(parent_of(pids[0]), signal.SIGKILL)
    with pytest.raises(PeerLost, match=told) as caught:
        for _ in losses:
            pass
    assert caught.value.rank is None
    assert "if memory ran out" in caught.value.hint
    assert wait_until(lambda: not [pid for pid in pids if is_running(pid)])
    job.close()


def test_a_stopped_rank_does_not_outlive_its_server(bundle_of):
    """It reads nothing and sees nothing; the system ends it."""
    job = Job(bundle_of(2, "1f1b", 2), timeout=30)
    pids = job.workers.process_ids()
    os.kill(pids[1], signal.SIGSTOP)
    os.kill(parent_of(pids[0]), signal.SIGKILL)
    assert wait_until(lambda: not [pid for pid in pids if is_running(pid)])
    with pytest.raises(PeerLost):
        job.step(make_batches(1, 2)[0])
    job.close()


def test_imports_that_fail(bundle_of, tmp_path, monkeypatch):
    """One error, with what was said; and no second try."""
    (tmp_path / "torch.py").write_text("raise ImportError('no such torch')\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))
    with pytest.raises(PeerLost) as caught:
        Job(bundle_of(2, "1f1b", 2), timeout=30)
    assert caught.value.where == "launch"
    assert caught.value.what.startswith("the process that ranks are forked from ended with exit code 1\n")
    assert "ImportError: no such torch" in caught.value.what


ABORT = """
import os
os.write(2, b"terminate called after throwing an instance of 'std::bad_alloc'\\n  what():  std::bad_alloc\\n")
os.abort()
"""


@pytest.mark.parametrize(
    ("code", "ended"),
    [
        ("raise ImportError('libtorch_cpu.so: failed to map segment from shared object')", "ended with exit code 1"),
        ("raise MemoryError", "ended with exit code 1"),
        (ABORT, "was killed by SIGABRT"),
    ],
)
def test_memory_that_ends_while_importing(bundle_of, tmp_path, monkeypatch, code, ended):
    """Too little memory, and no lost rank; imports that fail for another reason (above) are the control."""
    (tmp_path / "torch.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))
    with pytest.raises(DoesNotFit) as caught:
        Job(bundle_of(2, "1f1b", 2), timeout=30)
    assert caught.value.where == "launch"
    assert caught.value.what == f"the system gave no more memory: the process that ranks are forked from {ended}"


NO_FORK = """
import errno, os, sys
def fork():
    raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
if "penstock.runtime.launch.forkserver" in sys.orig_argv:
    os.fork = fork
"""


@pytest.mark.parametrize(
    "code", [NO_FORK, NO_FORK.replace("raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))", "os._exit(7)")]
)
def test_a_system_that_starts_no_process(bundle_of, tmp_path, monkeypatch, code):
    """The server says so, or ends at it: one error, and no endless tries."""
    (tmp_path / "sitecustomize.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))
    expected = (
        "the process that ranks are forked from ended with exit code 7"
        if code != NO_FORK
        else "starts no process for rank 0: Resource temp"
    )
    with pytest.raises(PenstockError, match=expected) as caught:
        Job(bundle_of(2, "1f1b", 2), timeout=30)
    assert caught.value.where == "launch"


def test_codes_and_late_signals():
    """A process is there until its end was heard of; a signal after that goes nowhere. Here to something that reads no command: it gets none."""
    ours, theirs = socket.socketpair()
    with ours, theirs, open(os.devnull, "r+b") as nothing:
        told = Rank(0, 1, 1, theirs.fileno(), nothing.fileno(), nothing.fileno())
        environment = os.environ | {"PENSTOCK_A_TEST": "codes"}
        process = fork_rank(told, "numpy", environment)
        # A board of no size cannot be mapped: the process ends with an error.
        process.wait(30)
        assert process.poll() == 1
        assert wait_until(lambda: not Path(f"/proc/{process.pid}").exists())
        process.signal_group(signal.SIGKILL)


def test_runs_at_the_same_time(bundle_of):
    """Several threads of one launcher, one server: each has its own ranks."""
    bundle, found = bundle_of(2, "1f1b", 2), {}
    expected = None

    def run(name):
        with Job(bundle, timeout=60) as job:
            found[name] = (job.workers.process_ids(), list(job.run(make_batches(3, 2))))

    threads = [threading.Thread(target=run, args=(name,)) for name in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len({pid for pids, _ in found.values() for pid in pids}) == 6
    for _, losses in found.values():
        expected = expected or losses
        assert losses == expected


def test_a_server_without_work_ends(monkeypatch):
    """So does one whose launcher is gone; the control serves on."""
    monkeypatch.setattr(forkserver, "_LOOK_SECONDS", 0.05)
    monkeypatch.setattr(forkserver, "_IDLE_SECONDS", 0.2)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        began = time.monotonic()
        forkserver._serve(theirs, os.getppid())
        assert time.monotonic() - began >= 0.2
        monkeypatch.setattr(forkserver, "_IDLE_SECONDS", 600.0)
        forkserver._serve(theirs, os.getpid())
        serving = threading.Thread(target=forkserver._serve, args=(theirs, os.getppid()), daemon=True)
        serving.start()
        serving.join(0.5)
        assert serving.is_alive()
        ours.close()
        serving.join(10)
        assert not serving.is_alive()
