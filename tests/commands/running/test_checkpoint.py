"""Tests of `penstock checkpoint`: its list is complete, its verdicts on damage are right, and its exports are the
trained weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import penstock as ps
from penstock.commands import parser as cli

TIMEOUT = 30


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    """Checkpoints after 2 and 3 steps under 2bw of a torch model with a tied weight and running statistics, and the state dict at the end."""
    folder = tmp_path_factory.mktemp("trained")

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.second = torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 8)
            self.second.weight = self.first.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.second(torch.relu(self.norm(self.first(x))))
            return out

    torch.manual_seed(0)
    model = ps.from_torch(Network().train(), (torch.zeros(4, 8),))
    training = ps.Training(loss="cross_entropy", optimizer=ps.Momentum(lr=0.1), microbatches=2)
    plan = ps.plan(model, ps.Cluster.local(1), training, schedule="2bw")
    bundle = ps.compile(plan, folder / "bundle", backend="numpy")
    with ps.open(bundle, data="synthetic", timeout=TIMEOUT) as job:
        list(job.steps_from_data(2))
        job.save(folder / "ckpt")
        list(job.steps_from_data(1))
        job.save(folder / "ckpt")
    ps.export(bundle, checkpoint=folder / "ckpt", safetensors=folder / "whole.safetensors")
    return folder / "ckpt", load_file(folder / "whole.safetensors")


def call(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = cli.main(["checkpoint", *map(str, words)])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_listing(
    trained: tuple[Path, dict[str, np.ndarray]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    ckpt, _ = trained
    code, out, _ = call(capsys, "ls", ckpt, "--json")
    rows = json.loads(out)
    assert code == 0
    assert [(row["step"], row["samples"], row["schedule"], row["latest"], row["problems"]) for row in rows] == [
        (2, 16, "2bw", False, []),
        (3, 24, "2bw", True, []),
    ]
    assert rows[0]["bytes"] == sum(path.stat().st_size for path in (ckpt / "step-000002").glob("*.safetensors"))
    copy = shutil.copytree(ckpt, tmp_path / "copy")
    (copy / "step-000003" / "index.sha256").unlink()
    code, out, err = call(capsys, "ls", copy)
    assert code == 0
    assert "complete" in out.splitlines()[2]
    assert "damaged" in out.splitlines()[3]
    assert "warning: step-000003: cannot read the checkpoint" in err
    code, _, err = call(capsys, "ls", tmp_path)
    assert code == 2
    assert "there is no checkpoint" in err


def test_verifying(
    trained: tuple[Path, dict[str, np.ndarray]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    ckpt, _ = trained
    assert call(capsys, "verify", ckpt) == (0, "step-000002: whole\nstep-000003: whole\n", "")
    copy = shutil.copytree(ckpt, tmp_path / "copy")
    file = next((copy / "step-000002").glob("*.older.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    (copy / ".step-000004.00ff.tmp").mkdir()
    code, out, err = call(capsys, "verify", copy, "--json")
    assert code == 5
    assert [bool(row["problems"]) for row in json.loads(out)["checkpoints"]] == [True, False]
    assert f"step-000002: {file.name}: SHA-256 is" in err
    assert ".step-000004.00ff.tmp was left by a save" in err
    assert call(capsys, "verify", copy / "step-000003")[0] == 0
    assert call(capsys, "ls", copy / "latest")[1] == call(capsys, "ls", copy)[1]
    shutil.rmtree(copy / "step-000003")
    assert "latest names 'step-000003', which is not there" in call(capsys, "verify", copy)[2]


def test_exporting(
    trained: tuple[Path, dict[str, np.ndarray]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Without the bundle, what the export with the bundle has: parameters, tied ones under both names, and running statistics."""
    ckpt, whole = trained
    copy = shutil.copytree(ckpt, tmp_path / "copy")
    code, out, _ = call(capsys, "export", copy, "--to", tmp_path / "w.safetensors", "--json")
    assert code == 0
    assert json.loads(out)["step"] == 3
    found = load_file(tmp_path / "w.safetensors")
    assert {"first.weight", "second.weight", "second.bias", "norm.weight", "norm.running_mean"} <= found.keys()
    assert all(np.array_equal(array, whole[name]) for name, array in found.items())
    assert call(capsys, "export", copy / "step-000002", "--to", tmp_path / "early.safetensors")[0] == 0
    assert not np.array_equal(load_file(tmp_path / "early.safetensors")["first.weight"], found["first.weight"])
    code, _, err = call(capsys, "export", copy, "--to", copy / "step-000003" / "w.safetensors")
    assert code == 2
    assert "lies in the checkpoint" in err
    file = copy / "step-000003" / "rank0.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    code, _, err = call(capsys, "export", copy, "--to", tmp_path / "x.safetensors")
    assert code == 5
    assert "the checkpoint is damaged: rank0.safetensors" in err
    assert not list(tmp_path.glob("*x.safetensors*"))
