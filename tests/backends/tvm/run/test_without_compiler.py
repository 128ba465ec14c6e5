"""A bundle with TVM's runtime trains and infers in an environment that has neither TVM nor ONNX.

The environment is a real one: it holds what requirements-runtime.txt lists, with what that needs, and nothing else. The
oracle is torch, in this process. The controls are the same bundle without the runtime, and a plan in that place.
"""

from __future__ import annotations

import json
import os
import subprocess
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from oracles.repository import ROOT, bare_python

import penstock as ps
from penstock.backends.tvm.run import runtime_library
from penstock.support.errors import UsageError

SAMPLES, STEPS, RATE = 8, 3, 0.1
REQUIREMENTS = [
    line for line in (ROOT / "requirements-runtime.txt").read_text().splitlines() if line and not line.startswith("#")
]


class Network(torch.nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


class WithLoss(torch.nn.Module):
    """The network, and its distance from what is wanted."""

    def __init__(self) -> None:
        super().__init__()
        self.network = Network()

    def forward(self, x: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.network(x), wanted)


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the runtime's requirements alone."""
    return bare_python(tmp_path_factory.mktemp("environment"), REQUIREMENTS)


def said(python: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run Python in the environment, with Penstock from its sources."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment |= {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [python, *words], capture_output=True, text=True, timeout=120, check=False, env=environment, cwd=python.parent
    )


def test_the_environment_lacks_what_it_should(python: Path) -> None:
    for module in ("tvm", "onnx", "onnxruntime", "highspy", "yaml", "pytest"):
        assert f"No module named '{module}'" in said(python, "-c", f"import {module}").stderr


def test_training_without_a_compiler(python: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, data = WithLoss(), (torch.randn(SAMPLES, 8), torch.randn(SAMPLES, 4))
    read = ps.from_torch(model, tuple(x[: SAMPLES // 2] for x in data))
    training = ps.Training(f"output:{read.module.outputs[0]}", ps.SGD(RATE), microbatches=2)
    plan = ps.plan(read, ps.Cluster.local(threads=(1, 1)), training=training)
    bundle = ps.compile(plan, tmp_path / "bundle", with_runtime=True)
    np.savez(tmp_path / "data.npz", **{v.name: x.numpy() for v, x in zip(read.module.data_inputs, data, strict=True)})

    run = ["-m", "penstock", "run", bundle, "--data", tmp_path / "data.npz", "--steps", str(STEPS)]
    done = said(python, *run, "--metrics", tmp_path / "metrics.jsonl")
    assert done.returncode == 0, done.stderr

    losses, optimizer = [], torch.optim.SGD(model.parameters(), RATE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(*data)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    np.testing.assert_allclose([row["loss"] for row in rows if "loss" in row], losses, rtol=1e-5)


def test_inference_without_a_compiler(python: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Network(), torch.randn(SAMPLES, 8)
    read = ps.from_torch(model, (x,))
    plan = ps.plan(read, ps.Cluster.local(threads=(1,)))
    bundle, bare = (ps.compile(plan, tmp_path / name, with_runtime=name == "whole") for name in ("whole", "bare"))
    (name,), out = [v.name for v in read.module.data_inputs], tmp_path / "out.npz"
    np.savez(tmp_path / "in.npz", **{name: x.numpy()})
    infer = ["-m", "penstock", "infer", "--input", tmp_path / "in.npz", "--output", out]
    done = said(python, *infer, bundle)
    assert done.returncode == 0, done.stderr
    (result,) = np.load(out).values()
    np.testing.assert_allclose(result, model(x).detach().numpy(), rtol=1e-5, atol=1e-6)

    # The licence goes with the library.
    terms = (bundle / "stages" / runtime_library.LICENSE).read_text(encoding="utf-8")
    assert "Apache License" in terms
    assert "NOTICE of Apache TVM" in terms

    # The controls: the same code without what runs it, and a command that needs the compiler.
    refused = said(python, *infer, bare)
    assert refused.returncode == UsageError.exit_code
    assert "TVM's runtime is missing" in refused.stderr
    assert "--with-runtime" in refused.stderr
    refused = said(python, "-m", "penstock", "plan", tmp_path / "model.onnx", "--devices", "1")
    assert refused.returncode == UsageError.exit_code
    assert "the package onnx is not installed" in refused.stderr


def test_a_process_takes_one_runtime(tmp_path: Path) -> None:
    """Where TVM is not installed, the copies of two bundles have to be the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime_library, "_installed", lambda: None)
        patch.setattr(runtime_library, "_LOADED", [])
        with pytest.raises(UsageError, match="TVM's runtime is missing"):
            runtime_library.load_runtime()
        mine, same, other = (tmp_path / name / runtime_library.LIBRARY for name in ("a", "b", "c"))
        for path, content in ((mine, b"x"), (same, b"x"), (other, b"y")):
            path.parent.mkdir()
            path.write_bytes(content)
        runtime_library._LOADED.append(mine)
        assert runtime_library.load_runtime() == runtime_library.load_runtime([same]) == mine
        with pytest.raises(UsageError, match="carries another runtime of TVM"):
            runtime_library.load_runtime([other])


def test_the_list_is_a_part_of_what_the_package_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(REQUIREMENTS) <= set(project["dependencies"])
    # The control: it is not all.
    assert not any(line.startswith(("apache-tvm==", "onnx")) for line in REQUIREMENTS)
