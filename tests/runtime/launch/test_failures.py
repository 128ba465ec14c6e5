"""A lost rank ends the job in a bounded time with one message that names it, and no process is left behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
from oracles.classifier import ROWS, make_batches

from penstock.backends.bundle.format import Bundle, open_bundle
from penstock.runtime.job.job import Job
from penstock.runtime.job.run import run_bundle
from penstock.runtime.launch import local as launch
from penstock.runtime.launch.failures import error_of, waits_for
from penstock.runtime.launch.local import HEARTBEAT
from penstock.runtime.messages.control import Channel, DataSpec, Failed, RunCommand, Stop
from penstock.runtime.messages.status import Patience
from penstock.support.errors import PeerLost, UsageError, VerifyError

from ..waiting import BOUND, is_running, wait_until


def lose(bundle, rank, number, timeout, heartbeat=HEARTBEAT):
    """Train, send a signal to one worker in the middle; the error and the seconds until it came."""
    job = Job(bundle, timeout=timeout, heartbeat=heartbeat)
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


def test_a_worker_that_is_interrupted(bundle_of):
    """An interrupt of a rank alone is a signal like others: no traceback of a place that it happened to be at."""
    error, _ = lose(bundle_of(3, "2bw", 3), 1, signal.SIGINT, timeout=60)
    assert "was killed by SIGINT during" in str(error)
    assert "Traceback" not in str(error)


def test_a_worker_that_is_stopped(bundle_of):
    """Its peers would wait for a long time, but it has no heartbeat."""
    error, seconds = lose(bundle_of(3, "2bw", 3), 1, signal.SIGSTOP, timeout=600, heartbeat=2)
    assert seconds < BOUND
    assert re.search(r"rank 1 \(stage 1, process \d+ on .*\) is stopped: no sign of life for \d s during 1", error.what)
    assert "; last finished step " in error.what
    assert error.where.startswith("rank 1, stage 1, action 1")


def test_a_worker_that_is_stopped_as_it_starts(bundle_of, monkeypatch):
    fork, started = launch.fork_rank, []

    def stopped(*told):
        started.append(fork(*told))
        if len(started) == 2:
            os.kill(started[-1].pid, signal.SIGSTOP)
        return started[-1]

    monkeypatch.setattr(launch, "fork_rank", stopped)
    begin = time.monotonic()
    with pytest.raises(
        PeerLost, match=r"rank 1 \(stage 1, process \d+ on .*\) is stopped: no sign of life for [2-9] s"
    ):
        Job(bundle_of(2, "2bw", 3), timeout=600, heartbeat=2)
    assert time.monotonic() - begin < BOUND


@pytest.mark.slow
def test_without_heartbeats_only_the_timeout_finds_it(bundle_of):
    error, seconds = lose(bundle_of(3, "2bw", 3), 1, signal.SIGSTOP, timeout=3, heartbeat=0)
    assert seconds < BOUND
    assert "rank 1 (stage 1) did not answer within 3 s; waited for" in str(error)
    assert "rank 1), which carries %h" in str(error)


def test_a_slow_worker_lives(bundle_of):
    """One computation takes longer than any silence would be borne."""
    with Job(bundle_of(2, "1f1b", 2), timeout=60, heartbeat=1, pace={"F": 1.5}) as job:
        assert len(list(job.run(make_batches(1, 2)))) == 1


def test_a_silence_that_is_the_watchers_own():
    """Time in which nobody looked does not count."""
    patience = Patience(3.0)
    heard = time.monotonic() - 100
    patience._since = patience._looked = time.monotonic() - 50
    patience.look()
    assert not patience.over(heard)
    patience._since -= 4
    patience.look()
    assert patience.over(heard)
    assert not patience.over(time.monotonic())
    endless = Patience(0)
    endless._since -= 1e6
    endless.look()
    assert not endless.over(heard)


def test_who_waits_for_whom():
    doing = {0: "0RB3<1", 1: "1RB3<2", 2: "2F5@1", 3: "idle"}
    assert waits_for(0, doing) == 2
    assert waits_for(3, doing) == 3
    assert waits_for(0, {0: "0RB3<1", 1: "1RF3<0"}) == 1
    failed = Failed("PeerLost", "rank 1 did not answer")
    error = error_of(failed, "rank 0", doing, 0, "last finished step 4")
    assert str(error).startswith(
        "rank 0: rank 1 did not answer; all wait for rank 2, which was at 2F5@1 (forward of microbatch 5); last"
    )


@pytest.mark.parametrize("data", [struct.pack("<II", 3, 0) + b"abc", struct.pack("<II", 2**31, 0)])
def test_a_damaged_message(bundle_of, data):
    """Both ends of the control connection refuse what is no message, and say so."""
    job = Job(bundle_of(2, "1f1b", 2), timeout=20)
    pids = job.workers.process_ids()
    job.workers._channels[1]._socket.sendall(data)
    with pytest.raises(VerifyError, match="a damaged message") as caught:
        job.workers.receive()
    assert caught.value.where.startswith("rank 1")
    assert not [pid for pid in pids if is_running(pid)]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(data)
        with pytest.raises(VerifyError, match="a damaged message"):
            Channel(theirs).receive()


@pytest.fixture(scope="module")
def spoiled(tmp_path_factory):
    """Data whose seventh batch has a nan in it."""
    batches = make_batches(12, 2)
    arrays = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
    arrays["x"][6 * ROWS * 2] = np.nan
    path = tmp_path_factory.mktemp("spoiled") / "data.npz"
    np.savez(path, **arrays)
    return str(path)


def test_a_loss_that_is_not_finite(bundle_of, spoiled, tmp_path):
    """`stop` ends the run at that step, before a checkpoint of it; `warn` goes on; `skip` needs a bundle that can."""
    options = {
        "data": spoiled,
        "steps": 12,
        "timeout": 20,
        "progress": False,
        "checkpoint": tmp_path / "ckpt",
        "checkpoint_every": 3,
    }
    # A run that ends with an error does not wait for a checkpoint that is being written.
    options["checkpoint_wait"] = True
    path = bundle_of(2, "2bw", 2).path
    with pytest.raises(VerifyError, match="step 6 has a loss nan") as caught:
        run_bundle(path, nan="stop", max_restarts=3, **options)
    assert caught.value.where.startswith("rank 1, stage 1, action 1U")
    assert (tmp_path / "ckpt" / "latest").read_text() == "step-000006\n"
    assert len(run_bundle(path, **options).losses) == 12
    with pytest.raises(UsageError, match="the bundle leaves no update out"):
        run_bundle(path, nan="skip", **options)


class Killer:
    """Stands in for the message that a step is finished, and loses a worker where it is told to."""

    def __init__(self, monkeypatch, rank, number, at):
        self.at, self.found, self.lost = list(at), [], []
        original = Job.steps_from_data

        def steps(job, count):
            self.found.append(job.workers.process_ids())
            for step in original(job, count):
                victim = job.workers.process_ids()[rank]
                if step.step in self.at and victim not in self.lost:
                    self.at.remove(step.step)
                    self.lost.append(victim)
                    os.kill(victim, number)
                yield step

        monkeypatch.setattr(Job, "steps_from_data", steps)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["1f1b", "2bw"])
def test_recovery(bundle_of, tmp_path, monkeypatch, capfd, kind):
    """Killed before and after the first checkpoint, and stopped: the run computes what it would have anyway, and tells each step once."""
    path = bundle_of(2, kind, 2).path
    options = {
        "steps": 12,
        "timeout": 60,
        "heartbeat": 2,
        "progress": False,
        "checkpoint_every": 4,
        "checkpoint_wait": True,
    }
    expected = run_bundle(path, steps=12, timeout=60, progress=False)
    killer = Killer(monkeypatch, 1, signal.SIGKILL if kind == "1f1b" else signal.SIGSTOP, [2, 6])
    found = run_bundle(path, checkpoint=tmp_path / "ckpt", metrics=tmp_path / "m.jsonl", max_restarts=2, **options)
    assert found.losses == expected.losses
    assert found.restarts == 2
    records = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(12))
    assert [record["loss"] for record in records] == expected.losses
    said = capfd.readouterr().err
    assert "restart 1 of 2, from where the run began" in said
    assert "restart 2 of 2, from checkpoint" in said
    assert not [pid for pids in killer.found for pid in pids if is_running(pid)]


def test_no_more_restarts_than_asked_for(bundle_of, tmp_path, monkeypatch):
    Killer(monkeypatch, 0, signal.SIGKILL, [2, 3, 4])
    with pytest.raises(PeerLost, match="was killed by SIGKILL"):
        run_bundle(bundle_of(2, "1f1b", 2).path, steps=8, timeout=60, progress=False, max_restarts=1)


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


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_no_orphans_when_the_launcher_ends(bundle_of, tmp_path, number):
    script = (
        # Whoever started the tests in the background may have left the interrupt ignored, which children inherit.
        "import signal, sys\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from pathlib import Path\nfrom penstock.runtime.job.job import Job\nfrom penstock.backends.bundle.format import open_bundle\n"
        "with Job(open_bundle(sys.argv[1]), timeout=60) as job:\n"
        "    Path(sys.argv[2]).write_text(' '.join(map(str, job.workers.process_ids())))\n"
        "    Path(sys.argv[2]).rename(sys.argv[2] + '.done')\n"
        "    job.workers.receive()\n"
    )
    pids = tmp_path / "pids.done"
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(bundle_of(2, "1f1b", 2).path), str(tmp_path / "pids")],
        stderr=subprocess.DEVNULL,
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
    job.workers.send_all(RunCommand(5, 1))
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
        rows = [
            line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
        ]
        listening = {row[1].split(":")[0] for row in rows if row[3] == "0A" and row[9] in owned}
    assert listening == {"0100007F"}


def test_bundles_of_another_size(bundle_of):
    bundle = bundle_of(2, "1f1b", 2)
    one = Bundle(
        bundle.path,
        type(bundle.manifest)(
            **{f: getattr(bundle.manifest, f) for f in bundle.manifest.__struct_fields__}
            | {"ranks": bundle.manifest.ranks[:1]}
        ),
    )
    with pytest.raises(VerifyError, match="lists other ranks than module"):
        Job(one, timeout=20)
