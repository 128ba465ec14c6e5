"""Tests of runs that continue with fewer devices: a plan for the remaining ones, and the same numbers as a run under
that plan from the same checkpoint."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from failure_runs import children, steps_in, wait_for
from namespaces import kill

import penstock as ps
from penstock.backends.bundle.format import open_bundle
from penstock.models import write_mlp
from penstock.planning.replan import replan
from penstock.runtime.job.run import run_bundle
from penstock.runtime.launch.elastic import devices_on
from penstock.runtime.launch.options import RunOptions
from penstock.runtime.launch.preflight import check_run
from penstock.support.errors import PeerLost, UsageError

from .two_ranks import finish, start

# A device that is lost once a first checkpoint is there, and every time after that: its worker kills itself.
LOST = """
import os, signal, sys, threading, time
def is_lost():
    parent = os.getppid()
    ranks = open(f"/proc/{parent}/task/{parent}/children").read().split()
    return os.path.exists(os.environ["LOST_AFTER"]) and open("/proc/self/comm").read() == "penstock:1\\n" and len(ranks) == 3
def watch():
    while not is_lost():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
if "penstock.runtime.launch.forkserver" in sys.orig_argv:
    os.register_at_fork(after_in_child=lambda: threading.Thread(target=watch, daemon=True).start())
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """compiled(devices, schedule) makes a bundle of one small model."""
    folder = tmp_path_factory.mktemp("elastic")
    model = ps.from_onnx(write_mlp(folder / "model.onnx", [16, 16, 16, 16, 16, 16, 16], batch=4))
    made = {}

    def make(devices, schedule="2bw"):
        key = (devices, schedule)
        if key not in made:
            cluster = ps.Cluster.local(4)
            cluster = replace(cluster, devices=tuple(map(cluster.device, devices)))
            training = ps.Training(loss="cross_entropy", optimizer=ps.AdamW(lr=0.01), microbatches=4)
            out = folder / "-".join([schedule, *devices]).replace(":", "")
            made[key] = ps.compile(ps.plan(model, cluster, training, schedule=schedule), out, backend="numpy")
        return made[key]

    return make


THREE, TWO = ("cpu:0", "cpu:1", "cpu:2"), ("cpu:0", "cpu:2")


def losing(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(LOST)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))
    monkeypatch.setenv("LOST_AFTER", str(tmp_path / "ckpt" / "latest"))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["2bw", "1f1b"])
def test_a_run_goes_on_without_a_device_that_does_not_come_back(compiled, tmp_path, monkeypatch, capsys, schedule):
    expected = run_bundle(compiled(THREE, schedule), steps=300, progress=False).losses
    losing(tmp_path, monkeypatch)
    options = {
        "steps": 300,
        "checkpoint": tmp_path / "ckpt",
        "checkpoint_every": 50,
        "metrics": tmp_path / "m.jsonl",
        "progress": False,
    }
    found = run_bundle(compiled(THREE, schedule), max_restarts=1, elastic=True, **options)
    said = capsys.readouterr().err
    told = re.search(
        r"cpu:1 of rank 1 failed again at once and is given up; planned anew: 2 stages on cpu:0 cpu:2, schedule (\w+) with 4 microbatches; "
        r"from checkpoint (\S+)",
        said,
    )
    assert told is not None, said
    assert told[1] == schedule
    first = int(Path(told[2]).name.removeprefix("step-"))
    assert 0 < first < 300
    assert found.restarts == 1
    # Under the plan of all devices up to the checkpoint, then as a run on the devices that are left, planned without any of this.
    assert found.losses[:first] == expected[:first]
    assert (
        found.losses[first:]
        == run_bundle(compiled(TWO, schedule), steps=300 - first, resume=told[2], progress=False).losses
    )
    records = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(300))
    assert [record["loss"] for record in records] == found.losses


def test_without_elastic_it_ends_with_one_error_that_names_it(compiled, tmp_path, monkeypatch):
    losing(tmp_path, monkeypatch)
    with pytest.raises(PeerLost, match=r"rank 1 .* was killed by SIGKILL") as caught:
        run_bundle(
            compiled(THREE),
            steps=300,
            checkpoint=tmp_path / "ckpt",
            checkpoint_every=50,
            max_restarts=1,
            progress=False,
        )
    assert "--elastic gives cpu:1 up and plans anew on what is left" in caught.value.hint


def test_a_group_with_fewer_ranks(compiled, tmp_path):
    """Two ranks of a bundle for three, as torchrun starts them where a host is gone."""
    path, ckpt = compiled(THREE), tmp_path / "ckpt"
    run_bundle(path, steps=10, checkpoint=ckpt, progress=False)
    said = finish(start(path, tmp_path, 10, more=("--checkpoint", str(ckpt))))
    assert "".join(said).count("penstock: error") == 1
    assert "the bundle is for 3 ranks, 2 were started" in said[0]
    assert "or fewer with --elastic" in said[0]
    running = start(
        path, tmp_path, 10, more=("--checkpoint", str(ckpt), "--resume", str(ckpt / "step-000010"), "--elastic")
    )
    said = finish(running, 120)
    assert [process.returncode for process in running] == [0, 0], said
    assert (
        "2 of 3 ranks are there; planned anew without device cpu:2 of rank 2: 2 stages on cpu:0 cpu:1, schedule 2bw"
        in said[0]
    )
    losses = [json.loads(line)["loss"] for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    expected = run_bundle(compiled(("cpu:0", "cpu:1")), steps=10, resume=ckpt / "step-000010", progress=False).losses
    assert losses == expected


@pytest.mark.slow
def test_stages_keep_the_devices_that_are_left(compiled, tmp_path):
    """Two stages on two devices each lose one device, or one stage loses both."""
    model = ps.from_onnx(write_mlp(tmp_path / "model.onnx", [16, 16, 16, 16], batch=4))
    training = ps.Training(loss="cross_entropy", optimizer=ps.SGD(lr=0.05), microbatches=4)
    path = ps.compile(ps.plan(model, ps.Cluster.local(4), training, replicas=2), tmp_path / "bundle", backend="numpy")
    bundle = open_bundle(path)
    assert replan(bundle, ["cpu:0", "cpu:2", "cpu:3"], tmp_path / "a").startswith("2 stages on cpu:0 cpu:2+cpu:3, ")
    assert open_bundle(tmp_path / "a").plan["stages"][1]["shares"] == [2, 2]
    assert replan(bundle, ["cpu:2", "cpu:3"], tmp_path / "b").startswith("2 stages on cpu:2 cpu:3, ")
    expected = run_bundle(path, steps=5, progress=False).losses
    for made in ("a", "b"):
        assert run_bundle(tmp_path / made, steps=5, progress=False).losses == pytest.approx(expected, abs=1e-6)
        # What is planned anew can be planned anew.
        assert open_bundle(tmp_path / made).reference == bundle.reference
    assert replan(open_bundle(tmp_path / "a"), ["cpu:3"], tmp_path / "c").startswith("1 stage on cpu:3, ")


def test_a_bundle_that_does_not_keep_its_model_is_refused(bundle_of, tmp_path):
    with pytest.raises(UsageError, match="does not have the model before it was cut"):
        replan(bundle_of(2, "1f1b", 2), ["cpu:0"], tmp_path / "out")


def test_which_devices_are_left(compiled):
    bundle = open_bundle(compiled(THREE))
    assert devices_on(bundle, ["a", "b"]) == ["cpu:0", "cpu:1"]
    assert devices_on(bundle, ["localhost", "localhost.domain"]) == ["cpu:0", "cpu:1"]
    with pytest.raises(UsageError, match="no device of the bundle for rank 1 on b"):
        devices_on(bundle, ["localhost", "b"])
    ranks = tuple(msgspec.structs.replace(entry, host=f"n{entry.rank // 2}") for entry in bundle.manifest.ranks)
    spread = replace(bundle, manifest=msgspec.structs.replace(bundle.manifest, ranks=ranks))
    assert devices_on(spread, ["n1", "n0"]) == ["cpu:2", "cpu:0"]


def test_what_it_needs(compiled, tmp_path):
    options = RunOptions(bundle=str(compiled(THREE)), steps=5, elastic=True)
    with pytest.raises(UsageError, match=r"--elastic needs --checkpoint DIR; --elastic needs --max-restarts N"):
        check_run(options)


@pytest.mark.slow
def test_torchrun_loses_a_host(compiled, tmp_path):
    """One of two agents is killed with all that it started; the other one goes on alone."""
    path, steps, metrics = compiled(TWO), 4000, tmp_path / "m.jsonl"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes=1:2",
        "--nproc-per-node=1",
        "--max-restarts=3",
        "--rdzv-backend=c10d",
    ]
    command += [
        f"--rdzv-endpoint=127.0.0.1:{port}",
        "--rdzv-id=job",
        "--rdzv-conf=last_call_timeout=3,keep_alive_interval=1",
    ]
    command += [
        "--local-addr=127.0.0.1",
        "--no-python",
        sys.executable,
        "-m",
        "penstock",
        "run",
        str(path),
        "--steps",
        str(steps),
    ]
    command += [
        "--metrics",
        str(metrics),
        "--checkpoint",
        str(tmp_path / "ckpt"),
        "--checkpoint-every",
        "100",
        "--elastic",
    ]
    agents, logs = [], []
    try:
        for number in range(2):
            logs.append((tmp_path / f"log{number}").open("w+"))
            agents.append(subprocess.Popen(command, stdout=logs[-1], stderr=logs[-1], start_new_session=True))
            # The first one serves the store where agents meet.
            assert wait_for(lambda: can_connect(port), 60), Path(logs[0].name).read_text()
        assert wait_for(lambda: steps_in(metrics) > 130), [Path(log.name).read_text() for log in logs]
        for pid in (agents[1].pid, *children(agents[1].pid)):
            os.kill(pid, signal.SIGKILL)
        assert agents[0].wait(240) == 0
    finally:
        for agent in agents:
            for pid in (*children(agent.pid), agent.pid):
                kill([pid])
            agent.wait(30)
        texts = []
        for log in logs:
            log.seek(0)
            texts.append(log.read())
            log.close()
    said = "".join(texts)
    assert "1 of 2 ranks are there; planned anew without device cpu:2 of rank 1: 1 stage on cpu:0, schedule 2bw" in said
    first = int(re.search(r"the run goes on from checkpoint \S+/step-(\d+)", said)[1])
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(steps))
    losses = run_bundle(path, steps=first, checkpoint=tmp_path / "own", progress=False).losses
    losses += run_bundle(compiled(("cpu:0",)), steps=steps - first, resume=tmp_path / "own", progress=False).losses
    assert [record["loss"] for record in records] == losses


def can_connect(port):
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True
