"""Training on a GPU, and on a processor and a GPU together, against training on processors: the same losses, and the same bits in every run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import api
from penstock.frontends.training import Training
from penstock.ir.cluster.cluster import Cluster
from penstock.ir.training.optimizers import AdamW
from penstock.models import write_cnn, write_gpt
from penstock.runtime.job.run import run_bundle

STEPS = 4


def losses(
    model: api.Model,
    cluster: Cluster,
    folder: Path,
    schedule: str,
    precision: str = "f32",
    library: str = "torch",
    **options: Any,
) -> list[float]:
    training = Training(loss="cross_entropy", optimizer=AdamW(lr=1e-3), microbatches=2)
    plan = api.plan(model, cluster, training, schedule=schedule, precision=precision, cuda_libraries=library, **options)
    bundle = api.compile(plan, folder / "bundle")
    run_bundle(
        bundle, data="synthetic", steps=STEPS, metrics=folder / "metrics.jsonl", checkpoint=folder / "checkpoint"
    )
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def write(name: str, folder: Path) -> api.Model:
    if name == "gpt":
        path = write_gpt(folder / "gpt.onnx", layers=2, width=64, heads=2, vocab=100, positions=32)
    else:
        path = write_cnn(folder / "cnn.onnx")
    return api.from_onnx(path, dims={"batch": 4})


@pytest.mark.parametrize("library", ["torch", "none"])
@pytest.mark.parametrize("name", ["gpt", "cnn"])
def test_a_gpu_trains_like_a_processor(name: str, library: str, architecture: str, tmp_path: Path) -> None:
    model = write(name, tmp_path)
    expected = losses(model, Cluster.local(1), tmp_path / "cpu", "1f1b")
    found = losses(model, Cluster.listed(architecture), tmp_path / "gpu", "1f1b", library=library)
    assert len(found) == STEPS
    assert np.allclose(found, expected, rtol=2e-4)


def test_a_pipeline_over_a_processor_and_a_gpu(architecture: str, tmp_path: Path) -> None:
    model = write("gpt", tmp_path)
    expected = losses(model, Cluster.local(2), tmp_path / "cpu", "2bw")
    found = losses(model, Cluster.listed(f"cpu,{architecture}"), tmp_path / "mixed", "2bw")
    assert np.allclose(found, expected, rtol=2e-4)
    turned = losses(model, Cluster.listed(f"{architecture},cpu"), tmp_path / "turned", "2bw")
    assert np.allclose(turned, expected, rtol=2e-4)


def test_bfloat16(architecture: str, tmp_path: Path) -> None:
    model = write("gpt", tmp_path)
    expected = losses(model, Cluster.local(1), tmp_path / "cpu", "1f1b")
    found = losses(model, Cluster.listed(architecture), tmp_path / "gpu", "1f1b", precision="bf16")
    assert np.allclose(found, expected, rtol=2e-2)


def test_a_run_is_repeated_bit_by_bit_with_our_kernels(architecture: str, tmp_path: Path) -> None:
    model = write("gpt", tmp_path)
    cluster = Cluster.listed(architecture)
    first, second = (losses(model, cluster, tmp_path / name, "1f1b", library="none") for name in ("a", "b"))
    assert first == second


@pytest.mark.parametrize(
    ("schedule", "packs", "kind"), [("1f1b", 1, "state"), ("interleaved", 3, "state"), ("interleaved", 3, "weights")]
)
def test_what_is_in_memory_of_the_host_between_its_uses_trains_the_same_bits(
    schedule: str, packs: int, kind: str, architecture: str, tmp_path: Path
) -> None:
    model, cluster = write("gpt", tmp_path), Cluster.listed(architecture)
    kept, moved = (
        losses(model, cluster, tmp_path / what, schedule, library="none", packs=packs, offload=what)
        for what in ("none", kind)
    )
    assert len(moved) == STEPS
    assert moved == kept
