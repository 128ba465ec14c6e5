"""A lost rank ends the job in a bounded time with one message that names it, and no process is left behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from itertools import cycle
from pathlib import Path

import pytest

from penstock.backends.bundle import Bundle, open_bundle
from penstock.ir.errors import PeerLost, VerifyError
from penstock.runtime.control import DataSpec, Run, Stop
from penstock.runtime.job import Job

from .conftest import is_running, make_batches

BOUND = 15.0


def wait_until(condition, seconds=BOUND):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def lose(bundle, rank, number, timeout):
    """Train, send a signal to one worker in the middle; the error and the seconds until it came."""
    job = Job(bundle, timeout=timeout)
    pids = job.workers.process_ids()
    losses = job.run(cycle(make_batches(4, 3)))
    for _ in range(5):
        next(losses)
    os.kill(pids[rank], number)
    started = time.monotonic()
    with pytest.raises(PeerLost) as caught:
        deque(losses, maxlen=0)
    seconds = time.monotonic() - started
    # Nothing more was done to end them, and nothing is left to do.
    assert not [pid for pid in pids if is_running(pid)]
    job.close()
    return caught.value, seconds


def test_workers_may_end_one_after_another(bundle_of, monkeypatch):
    """One that answers late, on a busy machine, finds the others gone; that is no failure."""
    job = Job(bundle_of(2, "2bw", 2), timeout=30)
    pids = job.workers.process_ids()
    list(job.run(make_batches(2, 2)))

    def send_late(message):
        job.workers.send(0, message)
        assert wait_until(lambda: not is_running(pids[0]))
        late.start()

    late = threading.Timer(1.0, lambda: job.workers.send(1, Stop()))
    monkeypatch.setattr(job.workers, "send_all", send_late)
    job.close()
    late.join()
    assert not [pid for pid in pids if is_running(pid)]


def test_a_worker_that_is_killed_at_the_end_is_told(bundle_of):
    job = Job(bundle_of(2, "2bw", 2), timeout=30)
    os.kill(job.workers.process_ids()[1], signal.SIGKILL)
    with pytest.raises(PeerLost, match="was killed by SIGKILL"):
        job.close()


@pytest.mark.parametrize("rank", [0, 2])
def test_a_killed_worker(bundle_of, rank):
    error, seconds = lose(bundle_of(3, "2bw", 3), rank, signal.SIGKILL, timeout=60)
    assert seconds < BOUND
    assert error.exit_code == 6
    assert f"rank {rank} (stage {rank}, process" in str(error)
    assert "was killed by SIGKILL during" in str(error)
    assert error.where.startswith(f"rank {rank}, stage {rank}, action {rank}")


def test_a_worker_that_hangs(bundle_of):
    error, seconds = lose(bundle_of(3, "2bw", 3), 1, signal.SIGSTOP, timeout=3)
    assert seconds < BOUND
    assert "rank 1 (stage 1) did not answer within 3 s; waited for" in str(error)
    assert "rank 1), which carries %h" in str(error)


def test_a_worker_that_hangs_alone(bundle_of):
    """No other rank waits for it, so the launcher has to notice."""
    job = Job(bundle_of(1, "1f1b", 2), timeout=20)
    (pid,) = job.workers.process_ids()
    assert job.workers._patience > 2 * 20
    job.workers._patience = 1
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(PeerLost, match="no rank got further for 1 s; rank 0 was at idle"):
        job.parameters()
    assert not is_running(pid)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_orphans_when_the_launcher_ends(bundle_of, tmp_path, number):
    script = (
        # Whoever started the tests in the background may have left the interrupt ignored, which children inherit.
        "import signal, sys\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from pathlib import Path\nfrom penstock.runtime.job import Job\nfrom penstock.backends.bundle import open_bundle\n"
        "with Job(open_bundle(sys.argv[1]), timeout=60) as job:\n"
        "    Path(sys.argv[2]).write_text(' '.join(map(str, job.workers.process_ids())))\n"
        "    Path(sys.argv[2]).rename(sys.argv[2] + '.done')\n"
        "    job.workers.receive()\n"
    )
    pids = tmp_path / "pids.done"
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(bundle_of(2, "1f1b", 2).path), str(tmp_path / "pids")], stderr=subprocess.DEVNULL
    )
    try:
        assert wait_until(pids.exists, 60)
        workers = [int(pid) for pid in pids.read_text().split()]
        assert len(workers) == 2
        assert all(map(is_running, workers))
        process.send_signal(number)
        process.wait(BOUND)
        assert wait_until(lambda: not any(map(is_running, workers)))
    finally:
        process.kill()
        process.wait()


def test_workers_refuse_what_changed_after_the_launcher_looked(bundle_of, tmp_path):
    path = tmp_path / "bundle"
    shutil.copytree(bundle_of(2, "1f1b", 2).path, path)
    bundle = open_bundle(path)
    weights = path / "weights/s1.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(VerifyError, match=r"weights/s1\.safetensors: SHA-256 is") as caught:
        Job(bundle, timeout=20)
    assert caught.value.exit_code == 5
    assert caught.value.where.startswith("rank 1, stage 1, starting: ")


def test_an_error_inside_a_worker_comes_with_its_place(bundle_of):
    """The worker's own error is shown, not the broken connections that follow from it."""
    job = Job(bundle_of(2, "2bw", 4), timeout=20, data=DataSpec())
    job.workers.send_all(Run(5, 1))
    with pytest.raises(VerifyError, match="version 4 was asked for, versions present: 0") as caught:
        job.workers.receive()
    assert caught.value.where == "rank 0, stage 0, action 0F20@4: @w0"


def test_a_port_on_loopback_only(bundle_of):
    """Neither the meeting point nor gloo listens on another interface."""
    with Job(bundle_of(2, "1f1b", 2), timeout=20) as job:
        owned = set()
        for pid in job.workers.process_ids():
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                target = os.readlink(descriptor)
                if target.startswith("socket:["):
                    owned.add(target[8:-1])
        rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
        listening = {row[1].split(":")[0] for row in rows if row[3] == "0A" and row[9] in owned}
    assert listening == {"0100007F"}


def test_bundles_of_another_size(bundle_of):
    bundle = bundle_of(2, "1f1b", 2)
    one = Bundle(
        bundle.path,
        type(bundle.manifest)(
            **{f: getattr(bundle.manifest, f) for f in bundle.manifest.__struct_fields__} | {"ranks": bundle.manifest.ranks[:1]}
        ),
    )
    with pytest.raises(VerifyError, match="the bundle is for 2 ranks, 1 were started"):
        Job(one, timeout=20)
