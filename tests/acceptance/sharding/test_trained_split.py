"""Whole models on meshes, asked for in three flags: they train as on one device, and go back to ONNX."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from replay import models as corpus

import penstock as ps
from penstock.commands.parser import main
from penstock.models import write_gpt, write_resnet

VOCABULARY, POSITIONS, BATCH = 64, 8, 8


def data_file(folder: Path) -> Path:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCABULARY, (4 * BATCH, POSITIONS + 1))
    path = folder / "data.npz"
    np.savez(path, tokens=tokens[:, :-1], labels=tokens[:, 1:])
    return path


def train_by_commands(model: Path, data: Path, out: Path, *flags: str) -> Path:
    """Compile, run, and export by the command line; return the trained model."""
    shared = ["--loss", "cross_entropy", "--optimizer", "adamw", "--lr", "1e-2", "--microbatches", "4"]
    assert main(["compile", str(model), "-o", str(out / "bundle"), "--dim", "batch=2", *shared, *flags]) == 0
    assert (
        main(["run", str(out / "bundle"), "--data", str(data), "--steps", "6", "--checkpoint", str(out / "state")]) == 0
    )
    trained = out / "trained.onnx"
    assert main(["export", str(out / "bundle"), "--checkpoint", str(out / "state"), "--onnx", str(trained)]) == 0
    return trained


def test_a_decoder_of_onnx_trains_split_and_goes_back_to_onnx(tmp_path: Path) -> None:
    model, data = tmp_path / "gpt.onnx", data_file(tmp_path)
    write_gpt(model, layers=2, width=32, heads=4, vocab=VOCABULARY, positions=POSITIONS)
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    one = train_by_commands(model, data, tmp_path / "one", "--devices", "1")
    two = train_by_commands(
        model, data, tmp_path / "two", "--devices", "2", "--mesh", "tp=2", "--shard", "preset:megatron"
    )
    tokens = np.random.default_rng(5).integers(0, VOCABULARY, (3, POSITIONS))
    before, alone, split = (
        onnxruntime.InferenceSession(path).run(None, {"tokens": tokens})[0] for path in (model, one, two)
    )
    np.testing.assert_allclose(split, alone, rtol=0, atol=2e-4 * np.abs(alone).max())
    # Control: training moved the outputs by far more than that.
    assert np.abs(before - alone).max() > 0.05 * np.abs(alone).max()


def losses(
    module_model: ps.Model, out: Path, feed: list[dict[str, np.ndarray]], devices: int, **asked: object
) -> list[float]:
    training = ps.Training(loss="cross_entropy", optimizer=ps.AdamW(lr=1e-2), microbatches=2)
    plan = ps.plan(module_model, ps.Cluster.local(devices), training, **asked)  # type: ignore[arg-type]
    ps.compile(plan, out)
    with ps.open(out) as job:
        return list(job.run(iter(feed)))


@pytest.mark.parametrize(
    ("name", "devices", "asked"),
    [
        ("llama", 2, {"mesh": "tp=2", "shard": "preset:megatron"}),
        ("resnet", 2, {"mesh": "bp=2", "shard": "preset:batch"}),
        pytest.param("resnet", 3, {"mesh": "tp=3", "shard": "preset:spatial"}, marks=pytest.mark.slow),
        pytest.param("llama", 4, {"mesh": "dp=2,tp=2", "shard": "preset:sequence"}, marks=pytest.mark.slow),
        pytest.param("llama", 4, {"mesh": "tp=2", "stages": 2, "shard": "preset:megatron"}, marks=pytest.mark.slow),
    ],
)
def test_models_train_split_as_on_one_device(name: str, devices: int, asked: dict[str, object], tmp_path: Path) -> None:
    torch.manual_seed(0)
    made = corpus.llama() if name == "llama" else corpus.resnet()
    module = ps.plan(made, ps.Cluster.local(1), ps.Training(loss="cross_entropy", optimizer=ps.SGD(lr=0.1))).module
    rng = np.random.default_rng(2)
    feed = [
        {
            v.name: rng.integers(0, 4, (2 * v.type.dims[0], *v.type.dims[1:]))
            if v.type.dtype == "i64"
            else rng.normal(size=(2 * v.type.dims[0], *v.type.dims[1:])).astype(np.float32)
            for v in module.data_inputs
        }
        for _ in range(4)
    ]
    alone = losses(made, tmp_path / "one", feed, 1)
    split = losses(made, tmp_path / "split", feed, devices, **asked)
    np.testing.assert_allclose(split, alone, rtol=2e-5)
    assert len(set(alone)) > 1


@pytest.mark.slow
def test_images_of_onnx_split_along_their_height_are_compiled_and_verified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, bundle = tmp_path / "resnet.onnx", tmp_path / "bundle"
    write_resnet(model, blocks=(1,), width=4, size=16, classes=3)
    asked = ["--devices", "2", "--mesh", "tp=2", "--shard", "preset:spatial", "--dim", "batch=2"]
    assert (
        main(["compile", str(model), "-o", str(bundle), *asked, "--loss", "cross_entropy", "--optimizer", "sgd"]) == 0
    )
    assert " and 1 of 2 inputs split, " in capsys.readouterr().out
    assert main(["verify", str(bundle)]) == 0
    assert "values of 2 ranks in float64 are those of the whole program" in capsys.readouterr().err
