"""Nothing is left behind: not by many steps, many requests and many saves in the same workers, nor by opening and closing jobs.

Counted from outside (held.py): descriptors, threads, processes, maps, files in /dev/shm; and memory, within what an allocator keeps.
"""

from __future__ import annotations

import gc
import mmap
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from oracles.classifier import make_batches

import penstock as ps
from penstock.runtime.job.job import Job
from penstock.runtime.launch import forkserver

from ..waiting import wait_until
from .held import below, grown, held, private_bytes

TIMEOUT = 60
# What allocators of a launcher and two workers may map more while they settle, and what they may keep.
MAPS, BYTES = 30, 6 << 20
SERVING_BYTES = 1 << 20
# Seconds.
PATIENCE = 2.0


@pytest.fixture(autouse=True)
def _no_server_of_others():
    """One that earlier tests left would end in the middle of counting."""
    servers = list(forkserver._servers.values())
    for server in servers:
        if not server.lost:
            os.kill(server.pid, signal.SIGKILL)
    assert wait_until(lambda: all(server.lost for server in servers))


def _after(
    work: Callable[[], object], settle: int = 1, rounds: int = 1, patience: float = PATIENCE
) -> tuple[dict[str, int], int]:
    """What rounds of work left, and by how much memory grew; rounds to settle come first. Threads that have done their work may need
    a moment to end. What a library starts once, whenever it likes, is not left by rounds: the same rounds again would leave more."""
    for _ in range(settle):
        work()
    gc.collect()
    pids = below(os.getpid())
    bytes_before = private_bytes(pids)

    def left() -> dict[str, int]:
        before = held()
        for _ in range(rounds):
            work()
        gc.collect()
        wait_until(lambda: not grown(before, held(), MAPS), patience)
        return grown(before, held(), MAPS)

    found, more = left(), private_bytes(pids) - bytes_before
    if found:
        again = left()
        found = {what: count for what, count in found.items() if what in again}
    return found, more


def _train(job: Job, steps: int, folder: Path) -> Callable[[], None]:
    batches = make_batches(8, 4)

    def work() -> None:
        for _ in job.run(batches[i % 8] for i in range(steps)):
            pass
        for background in (True, False):
            job.save(folder, background=background, keep_last=1)
        job.step(batches[0])

    return work


def test_steps_and_saves_leave_nothing(bundle_of, tmp_path):
    with ps.open(bundle_of(2, "2bw", 4).path, timeout=TIMEOUT) as job:
        left, more = _after(_train(job, 60, tmp_path), rounds=4)
    assert left == {}
    assert more < BYTES


def test_requests_leave_nothing(bundle_of):
    rows = [np.random.default_rng(i).standard_normal((1 + i % 9, 8)).astype(np.float32) for i in range(40)]
    with ps.open(bundle_of(2, "forward", 2).path, timeout=TIMEOUT) as job:

        def ask() -> None:
            for future in [job.submit({"x": x}) for x in rows]:
                future.result(TIMEOUT)
            for _ in job.stream({"x": x} for x in rows * 25):
                pass
            with pytest.raises(ps.PenstockError):
                job.submit({"x": rows[0].astype(np.float64)})

        left, more = _after(ask, settle=2, rounds=5)
    assert left == {}
    # Workers that serve take nothing new: hundreds of bytes per microbatch would be seen.
    assert more < SERVING_BYTES


def _open_and_close(path: Path, batch: dict[str, np.ndarray]) -> Callable[[], None]:
    def work() -> None:
        with ps.open(path, timeout=TIMEOUT) as job:
            job.step(batch)
        with pytest.raises(KeyError), ps.open(path, timeout=TIMEOUT) as job:
            raise KeyError("an error of the user's")

    return work


def test_opening_and_closing_leaves_nothing(bundle_of):
    left, _ = _after(_open_and_close(bundle_of(2, "2bw", 4).path, make_batches(1, 4)[0]))
    assert left == {}


@pytest.mark.slow
def test_opening_and_closing_many_times_leaves_nothing(bundle_of):
    left, more = _after(_open_and_close(bundle_of(2, "2bw", 4).path, make_batches(1, 4)[0]), settle=2, rounds=15)
    assert left == {}
    assert more < BYTES


def test_control_what_is_left_is_counted(tmp_path):
    """Each kind of leak, one in a round, is seen; a process that has ended is none, nor what is there once, however often the rounds.

    Three rounds: what earlier tests in this process had open may be closed meanwhile, and one for one would hide a leak.
    """
    kept: list[object] = []
    more: list[Callable[[], None]] = []

    def leak_thread() -> None:
        stop = threading.Event()
        thread = threading.Thread(target=stop.wait, args=(TIMEOUT,))
        thread.start()
        more.append(lambda: (stop.set(), thread.join())[1])

    def leak_process() -> None:
        process = subprocess.Popen(
            [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"], stdin=subprocess.PIPE, stdout=-1
        )
        assert process.stdout is not None
        process.stdout.readline()
        more.append(lambda: process.communicate(timeout=TIMEOUT) and None)

    def leak_file() -> None:
        handle = os.open(tmp_path / "x", os.O_CREAT | os.O_WRONLY)
        more.append(lambda: os.close(handle))

    def leak_pipe() -> None:
        ends = os.pipe()
        more.append(lambda: [os.close(end) for end in ends] and None)

    def leak_maps() -> None:
        # Neighbours that may do the same become one: every second one may not be written.
        kept.append([mmap.mmap(-1, 4096, prot=mmap.PROT_READ | (i % 2 and mmap.PROT_WRITE)) for i in range(2 * MAPS)])

    def leak_shared() -> None:
        place = Path(f"/dev/shm/penstock-test-{os.getpid()}-{len(more)}")
        place.write_text("x")
        more.append(place.unlink)

    def leak_memory() -> None:
        # So much that what is given back meanwhile does not hide it, and not out of memory that the allocator has at hand.
        block = mmap.mmap(-1, 8 * BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        np.frombuffer(block, np.uint8)[:] = 1
        kept.append(block)

    try:
        own = Path("/proc/self/comm").read_text(encoding="utf-8").strip()
        expected = {
            leak_thread: f"threads of {own}",
            leak_process: "processes",
            leak_file: "descriptors of files",
            leak_pipe: "descriptors of pipe",
        }
        expected |= {leak_maps: "maps", leak_shared: "files in /dev/shm"}
        for leak, what in expected.items():
            assert what in _after(leak, settle=0, rounds=3, patience=0.1)[0]
        assert _after(leak_memory, settle=0)[1] > BYTES
        assert _after(lambda: subprocess.run(["true"], check=True), rounds=2)[0] == {}
        once = [leak_thread]
        assert _after(lambda: once and once.pop()(), settle=0, patience=0.1)[0] == {}
    finally:
        for undo in more:
            undo()
