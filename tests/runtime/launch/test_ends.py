"""How launchers and keepers end what is left of a run, held against processes and reports that are made up."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.runtime.launch import keeper
from penstock.runtime.launch.local import Workers
from penstock.runtime.messages.control import Failed
from penstock.runtime.messages.status import Patience, StatusBoard
from penstock.support.errors import PenstockError


class Rank:
    """A worker of a launcher: a process, and the exit code that it had."""

    orphaned = False

    def __init__(self, pid: int, code: int | None) -> None:
        self.pid, self._code = pid, code

    def poll(self) -> int | None:
        return self._code


@pytest.fixture
def halted() -> Iterator[int]:
    process = subprocess.Popen(["sleep", "600"])
    os.kill(process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    yield process.pid
    process.kill()
    process.wait()


def cause(first: int, heartbeat: float, reports: list[Failed], monkeypatch: pytest.MonkeyPatch, log: Path) -> str:
    """Return the error of a run whose rank 0 is a process, and whose rank 1 ended with exit code 1."""
    workers = object.__new__(Workers)
    workers.count, workers._board, workers._messages = 2, StatusBoard(2), queue.SimpleQueue()
    workers._processes = [Rank(first, None), Rank(2**22, 1)]
    workers._silence, workers._closed, workers.checkpoints = Patience(heartbeat), True, None
    workers.bundle = SimpleNamespace(rank=lambda rank: SimpleNamespace(stages=[rank]))
    log.touch()
    for report in reports:
        workers._messages.put((1, report, 0.0))
    with log.open("rb") as first_log, log.open("rb") as second:
        workers._logs = [first_log, second]
        monkeypatch.setattr(workers, "end", lambda: None)
        _, error = workers._cause(None, None)
    assert isinstance(error, PenstockError)
    return str(error)


@pytest.mark.parametrize("heartbeat", [10.0, 0.0])
def test_a_report_counts_beside_a_rank_that_is_stopped(
    halted: int, heartbeat: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    report = Failed("DoesNotFit", "the stage needs 9 GiB")
    for first in (halted, os.getpid()):
        text = cause(first, heartbeat, [report], monkeypatch, tmp_path / "log")
        assert "the stage needs 9 GiB" in text
    # Control: what a rank says of its peers is no cause while one of them is stopped.
    lost = Failed("PeerLost", "rank 0 did not answer")
    assert ("is stopped" in cause(halted, heartbeat, [lost], monkeypatch, tmp_path / "log")) == (heartbeat > 0)


@pytest.mark.parametrize(("kind", "waits"), [("ended", True), ("abandoned", True), ("error", True), ("died", False)])
def test_a_save_that_is_being_written_is_waited_for(kind: str, waits: bool) -> None:
    """A worker that died has no save that could become whole: the control."""
    left, killed = [5.0], []

    def save_of(rank: int) -> float:
        left[0] = max(0.0, left[0] - 1)
        return 6 - left[0] if left[0] else 0.0

    class Worker:
        pid = os.getpid()

        def poll(self) -> int | None:
            return -9 if killed else None

        def kill(self) -> None:
            killed.append(left[0])

        def wait(self, seconds: float) -> None: ...

    closes = SimpleNamespace(close=lambda: None)
    rank = object.__new__(keeper.Keeper)
    rank._process, rank._board = Worker(), SimpleNamespace(save_of=save_of)
    rank._follower = rank._listener = rank._channel = closes
    rank._log = rank._mesh = None
    rank._troubles = {0: keeper.Trouble(kind, 0.0, "", "PeerLost", "lost")}
    rank.end()
    assert killed == ([0.0] if waits else [5.0])
