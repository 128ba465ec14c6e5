"""Tests of failing ranks of a group: each is found and named once, no process is left, and the run goes on from its
checkpoint."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import failure_runs
import pytest

from penstock.runtime.group.trust import Trust
from penstock.runtime.job.run import run_bundle
from penstock.runtime.launch import restarts
from penstock.runtime.launch.keeper import Keeper
from penstock.runtime.launch.options import RunOptions
from penstock.runtime.launch.peers import PeerHello, Peers, Proof, Pulse, Told
from penstock.runtime.messages.control import Alive, Channel
from penstock.runtime.messages.status import Status, StatusBoard
from penstock.support.errors import UsageError

from ..waiting import is_running
from .two_ranks import finish, start

# ------------------------------------------------------------------------------------------------ on one host


@pytest.mark.slow
def test_without_heartbeats_a_stopped_rank_is_found_by_the_timeout(bundle_of, tmp_path):
    running = start(bundle_of(2, "1f1b", 2).path, tmp_path, 10**6, heartbeat=0, timeout=5)
    assert failure_runs.wait_for(lambda: failure_runs.steps_in(tmp_path / "m.jsonl") > 3)
    (worker,) = failure_runs.children(running[1].pid)
    os.kill(worker, signal.SIGSTOP)
    said = finish(running)
    assert [process.returncode for process in running] == [6, 6]
    assert "rank 1 (stage 1) did not answer within 5 s; waited for" in said[0]
    assert "penstock: error" not in said[1]
    assert failure_runs.wait_for(lambda: not is_running(worker), 5)


def test_a_rank_that_its_launcher_ends_ends_the_other_one_soon(bundle_of, tmp_path):
    """An evicted pod: its rank gets a signal, and the others none. They do not wait for a heartbeat to be missed."""
    running = start(bundle_of(2, "1f1b", 2).path, tmp_path, 10**6, heartbeat=30)
    assert failure_runs.wait_for(lambda: failure_runs.steps_in(tmp_path / "m.jsonl") > 3)
    running[1].terminate()
    said = finish(running, 20)
    assert [process.returncode for process in running] == [6, 143]
    assert "was ended by SIGTERM from its launcher" in said[0]


def command_of(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_a_worker_that_is_stopped_as_it_starts(bundle_of, tmp_path):
    """It has no heartbeat yet. Its own keeper sees it, and ends: the launcher is to end the other ranks."""
    running = start(bundle_of(2, "1f1b", 2).path, tmp_path, 10, heartbeat=2)
    keeper = running[1].pid

    def begun():
        """The worker once it is a program of its own: before that its keeper waits for it in the system."""
        return [pid for pid in failure_runs.children(keeper) if command_of(pid) not in (b"", command_of(keeper))]

    assert failure_runs.wait_for(begun)
    (worker,) = begun()
    os.kill(worker, signal.SIGSTOP)
    assert running[1].wait(20) == 6
    running[0].terminate()
    said = finish(running)
    assert re.search(r"rank 1 .* has been stopped for \d+ s during starting", said[1]), said[1]
    assert failure_runs.wait_for(lambda: not is_running(worker), 5)


AGENT = """
import os, subprocess, sys, time
ranks = [
    subprocess.Popen(sys.argv[1:], env=os.environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(2)
]
print(*[rank.pid for rank in ranks], flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("launcher", ["TORCHELASTIC_RUN_ID", "SOME_LAUNCHER"])
def test_a_group_ends_with_the_agent_that_started_it(bundle_of, tmp_path, launcher):
    """Where the agent is torchrun's: other programs may start ranks and end, which is the control."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "penstock", "run", str(bundle_of(2, "1f1b", 2).path), "--steps", str(10**6)]
    command += ["--metrics", str(tmp_path / "m.jsonl"), "--heartbeat", "30", "--timeout", "60"]
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), launcher: "test"}
    with (tmp_path / "said").open("w") as said:
        agent = subprocess.Popen(
            [sys.executable, "-c", AGENT, *command],
            env=os.environ | group,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
        )
    assert agent.stdout is not None
    ranks = [int(pid) for pid in agent.stdout.readline().split()]
    try:
        assert failure_runs.wait_for(lambda: failure_runs.steps_in(tmp_path / "m.jsonl") > 3)
        agent.kill()
        agent.wait()
        ended = failure_runs.wait_for(lambda: not any(map(is_running, ranks)), 10 if launcher != "SOME_LAUNCHER" else 4)
        assert ended == (launcher == "TORCHELASTIC_RUN_ID")
        text = (tmp_path / "said").read_text()
        assert text.count("penstock: error") == ended
        assert (f"has no launcher any longer: process {agent.pid} is gone" in text) == ended
    finally:
        for pid in ranks:
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)
        agent.stdout.close()


def test_an_exception_is_told_once(bundle_of, tmp_path):
    """The last stage meets a loss that is not finite; the other one loses its peer, and is quiet."""
    import numpy as np
    from oracles.classifier import make_batches

    batches = make_batches(4, 2)
    arrays = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
    arrays["x"][20] = np.nan
    np.savez(tmp_path / "data.npz", **arrays)
    running = start(
        bundle_of(2, "1f1b", 2).path, tmp_path, 20, more=("--nan", "stop", "--data", str(tmp_path / "data.npz"))
    )
    said = finish(running)
    assert [process.returncode for process in running] == [5, 5]
    assert "".join(said).count("penstock: error") == 1
    assert "rank 1, host " in said[0]
    assert "step 2 has a loss nan" in said[0]


@pytest.mark.slow
def test_a_group_goes_on_where_it_was(bundle_of, tmp_path):
    """Ended by its launcher and started again with the same name: what is left is trained; with another name it is another run."""
    path, steps = bundle_of(2, "2bw", 2).path, 1000
    more = ("--checkpoint", str(tmp_path / "ckpt"), "--checkpoint-every", "100")
    running = start(path, tmp_path, steps, more=more)
    assert failure_runs.wait_for(lambda: failure_runs.steps_in(tmp_path / "m.jsonl") > 130)
    with pytest.raises(UsageError, match=r"is in use: process .* saves checkpoints there"):
        run_bundle(path, steps=1, checkpoint=tmp_path / "ckpt", progress=False)
    for process in running:
        process.terminate()
    said = finish(running)
    assert [process.returncode for process in running] == [143, 143]
    assert re.search(
        rf"penstock: ended by SIGTERM: last finished step \d+, newest checkpoint .*; --resume {tmp_path}/ckpt goes on",
        said[0],
    )
    assert "ended by" not in said[1]
    assert (tmp_path / "ckpt" / restarts.FILE).exists()
    before = failure_runs.steps_in(tmp_path / "m.jsonl")
    assert before < steps
    running = start(path, tmp_path, steps, more=more)
    said = finish(running, 120)
    assert [process.returncode for process in running] == [0, 0], said
    assert "the run goes on from checkpoint" in said[0]
    records = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(steps))
    assert [record["loss"] for record in records] == run_bundle(path, steps=steps, progress=False).losses
    assert not (tmp_path / "ckpt" / restarts.FILE).exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--rdzv-id=job"], ["--master-port=29631"]]
)
def test_torchrun_starts_again(bundle_of, tmp_path, more):
    """A worker is killed; torchrun starts everybody again, and the run goes on as if nothing had been."""
    path, steps, metrics = str(bundle_of(2, "2bw", 2).path), 2000, tmp_path / "m.jsonl"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes=1",
        "--nproc-per-node=2",
        "--max-restarts=2",
        "--local-addr=127.0.0.1",
    ]
    command += [
        "--master-addr=127.0.0.1",
        *more,
        "--no-python",
        sys.executable,
        "-m",
        "penstock",
        "run",
        path,
        "--steps",
        str(steps),
    ]
    command += ["--metrics", str(metrics), "--checkpoint", str(tmp_path / "ckpt"), "--checkpoint-every", "100"]
    with (tmp_path / "log").open("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            assert failure_runs.wait_for(lambda: failure_runs.steps_in(metrics) > 130)
            keepers = failure_runs.children(process.pid)
            assert len(keepers) == 2
            (worker,) = failure_runs.children(keepers[1])
            os.kill(worker, signal.SIGKILL)
            assert process.wait(120) == 0
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        log.seek(0)
        said = log.read()
    assert said.count("penstock: error:") == 1
    assert "was killed by SIGKILL during" in said
    assert "the run goes on from checkpoint" in said
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(steps))
    assert [record["loss"] for record in records] == run_bundle(path, steps=steps, progress=False).losses
    assert not [pid for pid in (*keepers, worker) if is_running(pid)]


# ------------------------------------------------------------------------------------------------ parts


def test_a_keeper_is_light():
    """What it takes to become one imports no torch, which takes seconds and hundreds of MiB."""
    script = "import sys, penstock.runtime.job.run; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0


def test_a_launcher_that_is_gone_is_the_cause_of_what_its_ranks_lost():
    """It took the store with it. Nothing else replaces what was noticed first, which is the control."""

    def told(*kinds):
        keeper = Keeper.__new__(Keeper)
        keeper.rank, keeper._troubles, keeper._mesh, keeper._board = 0, {}, None, StatusBoard(1)
        for kind in kinds:
            keeper._own(kind, "PeerLost", "what")
        return keeper._troubles[0].kind

    assert told("symptom", "abandoned") == "abandoned"
    assert told("symptom", "died") == "symptom"
    assert told("error", "abandoned") == "error"
    assert told("died", "abandoned") == "died"


def test_a_rank_that_failed_says_how_far_it_came():
    """Right before what happened to it: the rank that finishes steps may be the only one that knows."""
    sent = []
    keeper = Keeper.__new__(Keeper)
    keeper.rank, keeper._troubles, keeper._board = 0, {}, StatusBoard(1)
    keeper._mesh = SimpleNamespace(send_all=sent.append)
    Status(keeper._board.descriptor, 0).finish(41)
    keeper._own("died", "PeerLost", "what")
    assert [type(record) for record in sent] == [Pulse, Told]
    assert sent[0].steps == 42


def test_which_run_is_unfinished(tmp_path):
    options = RunOptions(bundle="bundle", steps=10, checkpoint=str(tmp_path))
    assert restarts.find_unfinished(options, {}) is None
    restarts.write(options, restarts.UnfinishedRun("a", 5, 10, None, (restarts.BegunSave("step-000007"),)))
    for environment, expected in (
        ({"TORCHELASTIC_RUN_ID": "a"}, True),
        ({"TORCHELASTIC_RUN_ID": "b"}, False),
        ({"TORCHELASTIC_RUN_ID": "b", "TORCHELASTIC_RESTART_COUNT": "1"}, False),
        ({"SLURM_JOB_ID": "a"}, True),
        ({}, False),
    ):
        assert (restarts.find_unfinished(options, environment) is not None) is expected
    # torchrun's usual name says nothing, its count does.
    restarts.write(options, restarts.UnfinishedRun("", 5, 10))
    assert restarts.find_unfinished(options, {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0"}) is None
    assert (
        restarts.find_unfinished(options, {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "2"})
        is not None
    )


def test_saves_that_came_to_their_places(tmp_path):
    """What stood there before the save was begun, or never came, does not count; nor what a save of the same step has replaced."""
    options = RunOptions(bundle="bundle", steps=10, checkpoint=str(tmp_path))
    (tmp_path / "step-000002").mkdir()
    record = restarts.begin(options, 0)
    for step in (1, 2, 3):
        record = restarts.note_save(options, record, step)
    assert restarts.begin(options, 0) != record  # no name, no count: a new run
    restarts.write(options, record)

    def finished(record):
        return [
            place.name
            for place in restarts.finished_saves((tmp_path / save.name, save.before) for save in record.saves)
        ]

    assert finished(record) == []
    (tmp_path / "step-000001").mkdir()
    assert finished(record) == ["step-000001"]
    (tmp_path / "step-000002").rename(tmp_path / "old")
    (tmp_path / "step-000002").mkdir()
    assert finished(record) == ["step-000002", "step-000001"]
    again = restarts.note_save(options, record, 2)
    assert finished(again) == ["step-000001"]
    for step in range(4, 40):
        again = restarts.note_save(options, again, step)
    assert [save.name for save in again.saves] == [f"step-{step:06}" for step in range(32, 40)]


def test_who_does_not_read_holds_nobody_up():
    """What a keeper sends to a worker that is stopped without heartbeats."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(5)
        channel = Channel(ours)
        assert any(not channel.offer(Alive()) for _ in range(10**5))
        assert Channel(theirs).receive() == (Alive(), {})


def test_strangers_change_nothing():
    """Who comes without the token is cut off; who has it is heard; what is no record afterwards is told with its rank."""
    listeners = []
    for _ in range(2):
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listeners.append(listener)
    addresses = [listener.getsockname() for listener in listeners]
    mesh, friends = Peers(listeners[0], 0, addresses, "secret", 5, Trust()), []

    def hear(seconds=5.0):
        deadline, heard = time.monotonic() + seconds, []
        while not heard and time.monotonic() < deadline:
            heard = mesh.hear(0.05)
            for friend in friends:
                friend.hear(0.01)
        return heard

    def frame(record):
        data = mesh._encode(record)
        return struct.pack("<I", len(data)) + data

    for data in (
        b"GET / HTTP/1.1\r\n\r\n",
        frame(PeerHello(1, "nonce")) + frame(Pulse("x", 1)),
        frame(Proof("guess")),
        frame(Pulse("x", 1)),
        struct.pack("<I", 2**31),
        frame(PeerHello(7, "secret")),
    ):
        with socket.create_connection(addresses[0], 5) as stranger:
            stranger.settimeout(5)
            stranger.sendall(data)
            assert hear(0.5) == []
            assert len(stranger.recv(1 << 16)) < 200
            assert hear(0.1) == []
            with contextlib.suppress(ConnectionError):
                assert stranger.recv(1) == b""
    # More of them than anybody remembers, all with something to say.
    crowd = [socket.create_connection(addresses[0], 5) for _ in range(80)]
    for stranger in crowd:
        stranger.sendall(b"G")
    deadline = time.monotonic() + 1
    while time.monotonic() < deadline:
        assert mesh.hear(0.05) == []
    for stranger in crowd:
        stranger.close()
    friend = Peers(listeners[1], 1, addresses, "secret", 5, Trust())
    friends.append(friend)
    friend.send_all(Pulse("1F3", 4))
    assert hear() == [(0 + 1, Pulse("1F3", 4))]
    friend._links[0].connection.sendall(struct.pack("<I", 3) + b"\xff\xff\xff")
    heard = hear()
    assert heard[0][0] == 1
    assert isinstance(heard[0][1], str)
    assert heard[-1] == (1, None)
    friend.close()
    mesh.close()
