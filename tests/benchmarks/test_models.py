"""The benchmark of whole models runs in small, all contenders compute the same, and it fails when one of them does not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from oracles.repository import BENCHMARKS

QUICK = ("--tiny", "--rounds", "2", "--compile-limit", "0")

# Torch trains with another rate, and infers with other weights: faster or not, that does not count.
BROKEN = """
import sys
sys.path.insert(0, {folder!r})
import model_contenders
import models

made, built = model_contenders.torch_optimizer, model_contenders.build

def other_rate(spec, model):
    optimizer = made(spec, model)
    optimizer.param_groups[0]["lr"] *= 1.5
    return optimizer

def other_weights(kind, sizes, file):
    model = built(kind, sizes, file)
    if kind == "bert" and not spoilt:
        spoilt.append(model.y.bias.data.add_(0.01))
    return model

spoilt = []
model_contenders.torch_optimizer, model_contenders.build = other_rate, other_weights
sys.exit(models.main())
"""


def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
def test_all_contenders_compute_the_same(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = run(BENCHMARKS / "models.py", *QUICK, "--json", report)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all numbers agree" in done.stdout
    rows = {row["model"]: row for row in json.loads(report.read_text())["rows"]}
    assert list(rows) == [
        "resnet50-train",
        "bert-base-train",
        *(f"{name}-infer" for name in ("gpt2-small", "bert-base", "resnet50", "cnn", "mlp")),
    ]
    for name, row in rows.items():
        others = {"torch"} if name.endswith("train") else {"torch", "onnxruntime"}
        # OpenVINO is there where it is installed, and named as absent where it is not.
        openvino = {"openvino"} if name.endswith("infer") else set()
        assert set(row["contenders"]) - openvino == {"penstock"} | others
        assert openvino == openvino & {*row["contenders"], *row["absent"]}
        assert f"| {name} |" in done.stdout
        assert row["gflop"] > 0
        for side in row["contenders"].values():
            assert len(side["turn_s"]) == 2
            assert side["error"] < 1e-4
    losses = rows["resnet50-train"]["contenders"]["penstock"]["losses"]
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.slow
def test_numbers_that_disagree_are_an_error(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text(BROKEN.format(folder=str(BENCHMARKS)))
    done = run(script, *QUICK, "--models", "resnet50-train", "bert-base-infer", "gpt2-small-infer")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "WRONG resnet50-train: penstock is off by" in done.stdout
    assert "WRONG bert-base-infer: torch is off by" in done.stdout
    assert "gpt2-small-infer:" not in done.stdout
