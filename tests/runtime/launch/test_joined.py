"""The same command under torchrun: every process becomes its rank, rank 0 writes metrics and checkpoints."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

import penstock as ps
from penstock.models import write_mlp
from penstock.runtime.job.run import run_bundle

from .torchrun import SCRIPT, torchrun


def test_the_same_losses_as_a_local_run(bundle_of, tmp_path):
    path = str(bundle_of(2, "2bw", 2).path)
    files = {
        "metrics": str(tmp_path / "m.jsonl"),
        "checkpoint": str(tmp_path / "ckpt"),
        "trace": str(tmp_path / "t.json"),
    }
    code, log = torchrun(tmp_path, 2, path=path, steps=5, checkpoint_every=3, timeout=20, **files)
    assert code == 0, log
    expected = run_bundle(path, steps=5, timeout=20, progress=False)
    *records, last = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert (last["step"], last["messages"]) == (4, 2 * 2 * 5)
    assert [r["loss"] for r in records] == expected.losses
    assert [r["grad_norm"] for r in records] == [None] * 5
    assert sorted(p.name for p in (tmp_path / "ckpt").iterdir()) == ["latest", "step-000003", "step-000005"]
    assert "step 5/5  loss" in log
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert {e["pid"] for e in events} == {0, 1}
    resumed = run_bundle(path, steps=2, timeout=20, resume=tmp_path / "ckpt" / "step-000003", progress=False)
    assert resumed.losses == expected.losses[3:]


@pytest.mark.slow
def test_the_same_norms_as_a_local_run(tmp_path):
    """Updates are clipped and one is left out; the rank of the loss is not the one that writes the metrics."""
    rows, m, steps, spoiled = 4, 2, 4, 2
    model = ps.from_onnx(write_mlp(tmp_path / "mlp.onnx", [6, 8, 5], None, seed=1), dims={"batch": rows})
    training = ps.Training("cross_entropy", ps.SGD(lr=0.1), m, clip=0.5)
    path = str(
        ps.compile(ps.plan(model, ps.Cluster.local(2), training, schedule="2bw"), tmp_path / "bundle", backend="numpy")
    )
    rng = np.random.default_rng(3)
    x = rng.standard_normal((steps * rows * m, 6)).astype(np.float32)
    x[spoiled * rows * m + 1, 2] = np.nan
    np.savez(tmp_path / "data.npz", x=x, labels=rng.integers(0, 5, len(x)))
    options = {"steps": steps, "timeout": 20, "data": str(tmp_path / "data.npz")}
    code, log = torchrun(tmp_path, 2, path=path, metrics=str(tmp_path / "joined"), **options)
    assert code == 0, log
    run_bundle(path, metrics=str(tmp_path / "local"), progress=False, **options)
    joined, local = (
        [json.loads(line)["grad_norm"] for line in (tmp_path / name).read_text().splitlines()]
        for name in ("joined", "local")
    )
    assert joined == local
    assert [isinstance(norm, float) for norm in joined] == [i != spoiled for i in range(steps)]
    assert joined[spoiled] == "nan"
    assert f"the loss of step {spoiled} is nan; its update is skipped" in log


def test_a_wrong_number_of_processes(bundle_of, tmp_path):
    code, log = torchrun(tmp_path, 3, path=str(bundle_of(2, "2bw", 2).path), steps=1, timeout=10)
    assert code != 0
    assert "the bundle is for 2 ranks, 3 were started" in log


def test_ranks_with_different_bundles(bundle_of, tmp_path):
    """Rank 1 has a bundle of another schedule: refused before the first action."""
    paths = [str(bundle_of(2, kind, 2).path) for kind in ("2bw", "1f1b")]
    processes = []
    from penstock.runtime.launch.local import thread_environment

    script = tmp_path / "run.py"
    script.write_text(SCRIPT)
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for rank, path in enumerate(paths):
        group = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [sys.executable, str(script), json.dumps({"path": path, "steps": 1, "timeout": 20})]
        processes.append(
            subprocess.Popen(command, env=os.environ | group | thread_environment(1), stderr=subprocess.PIPE, text=True)
        )
    try:
        said = [process.communicate(timeout=60)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert any(process.returncode == 5 for process in processes)
    assert all(process.returncode != 0 for process in processes)
    assert "the ranks do not have the same module.ir" in "".join(said)


@pytest.mark.parametrize("name", ["checkpoint", "metrics"])
def test_options_travel_as_absolute_paths(name, tmp_path, monkeypatch):
    from penstock.runtime.job import run as jobs

    seen = []
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setattr(jobs, "become_rank", lambda options: seen.append(options) or sys.exit(0))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        run_bundle("bundle", **{name: "out"})
    assert getattr(seen[0], name) == str(tmp_path / "out")
    assert seen[0].bundle == str(tmp_path / "bundle")
