"""The model builders: valid files, the same numbers as onnxruntime, weights that depend on the seed alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import penstock.models
from penstock.frontends.onnx import import_onnx
from penstock.models import write_bert, write_cnn, write_gpt, write_mlp, write_resnet

from .onnx.cases import compare, draw, run

GPT = {"layers": 2, "width": 16, "heads": 2, "vocab": 29, "positions": 8}


def tokens(batch: int = 3) -> dict[str, np.ndarray]:
    return {"tokens": np.random.default_rng(0).integers(0, 29, (batch, 8))}


@pytest.mark.parametrize("batch", [3, None])
def test_gpt(tmp_path: Path, batch: int | None) -> None:
    path = write_gpt(tmp_path / "gpt.onnx", batch=batch, **GPT)
    onnx.checker.check_model(str(path), full_check=True)
    imported = compare(path, tokens(), 1e-4, dims={} if batch else {"batch": 3})
    per_block = 4 * 16 + (16 * 48 + 48) + (16 * 16 + 16) + (16 * 64 + 64) + (64 * 16 + 16)
    params = [var for var in imported.module.vars.values() if var.role == "param"]
    assert sum(var.type.size for var in params) == 2 * 29 * 16 + 8 * 16 + 2 * per_block + 2 * 16
    assert imported.weights["h.0.attn.qkv.weight"].std() == pytest.approx(0.02, rel=0.1)
    assert imported.weights["h.0.mlp.proj.weight"].std() == pytest.approx(0.02 / 2, rel=0.1)
    assert not imported.weights["h.1.mlp.fc.bias"].any()


def test_gpt_looks_only_back(tmp_path: Path) -> None:
    imported = import_onnx(write_gpt(tmp_path / "gpt.onnx", batch=3, **GPT))
    feeds = tokens()
    changed = {"tokens": feeds["tokens"].copy()}
    changed["tokens"][:, 5] = (changed["tokens"][:, 5] + 1) % 29
    (before,), (after,) = run(imported, feeds), run(imported, changed)
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert (np.abs(before[:, 5:] - after[:, 5:]).max(axis=-1) > 0).all()


@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_mlp(tmp_path: Path, dtype: str) -> None:
    path = write_mlp(tmp_path / "mlp.onnx", [6, 8, 3], None, dtype=dtype)
    onnx.checker.check_model(str(path), full_check=True)
    kind = np.dtype({"f32": np.float32, "f64": np.float64}[dtype])
    imported = compare(path, {"x": draw("x", kind, (4, 6))}, dims={"batch": 4})
    assert list(imported.module.vars) == ["fc1.weight", "fc1.bias", "y.weight", "y.bias"]
    assert {var.type.dtype for var in imported.module.vars.values()} == {dtype}


def test_resnet(tmp_path: Path) -> None:
    path = write_resnet(tmp_path / "resnet.onnx", 2, blocks=(1, 2), width=4, size=32, classes=5)
    onnx.checker.check_model(str(path), full_check=True)
    imported = compare(path, {"x": draw("x", np.dtype(np.float32), (2, 3, 32, 32))}, 1e-4)
    params = {var.name: var.type.dims for var in imported.module.vars.values() if var.role == "param"}
    assert params["stage2.0.conv2.weight"] == (8, 8, 3, 3)
    assert params["stage2.0.short.conv.weight"] == (32, 16, 1, 1)
    assert "stage2.1.short.conv.weight" not in params
    # Scales and offsets are trained, statistics are not.
    assert {name.rpartition(".")[2] for name in params} == {"weight", "bias"}
    stored = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(str(path)).graph.initializer}
    assert all((array > 0).all() for name, array in stored.items() if name.endswith(".var"))


def test_resnet_50_has_its_size(tmp_path: Path) -> None:
    module = import_onnx(write_resnet(tmp_path / "resnet.onnx", 1)).module
    assert sum(var.type.size for var in module.vars.values() if var.role == "param") == 25_557_032


def test_bert(tmp_path: Path) -> None:
    sizes = {"layers": 2, "width": 16, "heads": 2, "vocab": 29, "positions": 8, "classes": 3}
    path = write_bert(tmp_path / "bert.onnx", 3, **sizes)
    onnx.checker.check_model(str(path), full_check=True)
    imported = compare(path, tokens(), 1e-4)
    per_block = 4 * (16 * 16 + 16) + (16 * 64 + 64) + (64 * 16 + 16) + 4 * 16
    params = [var for var in imported.module.vars.values() if var.role == "param"]
    assert sum(var.type.size for var in params) == (29 + 8 + 1) * 16 + 2 * 16 + 2 * per_block + (16 * 16 + 16) + (
        16 * 3 + 3
    )
    with pytest.raises(ValueError, match="heads"):
        write_bert(tmp_path / "bert.onnx", **sizes | {"heads": 3})


def test_bert_looks_both_ways(tmp_path: Path) -> None:
    imported = import_onnx(write_bert(tmp_path / "bert.onnx", 3, layers=1, width=16, heads=2, vocab=29, positions=8))
    feeds = tokens()
    changed = {"tokens": feeds["tokens"].copy()}
    changed["tokens"][:, 7] = (changed["tokens"][:, 7] + 1) % 29
    (before,), (after,) = run(imported, feeds), run(imported, changed)
    assert (before != after).all()


def test_cnn(tmp_path: Path) -> None:
    path = write_cnn(tmp_path / "cnn.onnx", 2, size=12)
    onnx.checker.check_model(str(path), full_check=True)
    compare(path, {"x": draw("x", np.dtype(np.float32), (2, 1, 12, 12))}, 1e-4)


def test_weights_depend_on_the_seed_alone(tmp_path: Path) -> None:
    first, again, other = (
        write_gpt(tmp_path / f"{i}" / "gpt.onnx", batch=3, seed=seed, **GPT).read_bytes()
        for i, seed in enumerate((7, 7, 8))
    )
    assert first == again != other


def test_large_weights_lie_beside_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(penstock.models, "_EXTERNAL_FROM", 10_000)
    sizes = set()
    for _ in range(2):  # written twice, the data is replaced, not appended to
        path = write_gpt(tmp_path / "gpt.onnx", batch=3, **GPT)
        sizes.add(path.with_name("gpt.onnx.data").stat().st_size)
    assert len(sizes) == 1
    imported = compare(path, tokens(), 1e-4)
    monkeypatch.undo()
    inside = import_onnx(write_gpt(tmp_path / "inside.onnx", batch=3, **GPT))
    for name, array in inside.weights.items():
        np.testing.assert_array_equal(imported.weights[name], array)


def test_impossible_sizes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="width 10 does not divide into 3 heads"):
        write_gpt(tmp_path / "a.onnx", layers=1, width=10, heads=3, vocab=5, positions=4)
    with pytest.raises(ValueError, match="at least two sizes"):
        write_mlp(tmp_path / "a.onnx", [4])
    with pytest.raises(ValueError, match="too small"):
        write_cnn(tmp_path / "a.onnx", size=2)
    with pytest.raises(ValueError, match="dtype must be one of"):
        write_mlp(tmp_path / "a.onnx", [4, 2], dtype="i8")


def test_attributes_of_operations_and_annotations_have_different_names() -> None:
    """A planner's annotation must never land on what an operation means: pooling once lost its window to `fuse` that way."""
    from penstock.ir.graph import ANNOTATIONS
    from penstock.ir.ops import OPS

    assert not {(kind, name) for kind, row in OPS.items() for name in row.attrs if name in ANNOTATIONS}


@pytest.mark.parametrize("write", ["gpt", "mlp", "cnn"])
def test_models_go_through_all_passes_for_training(tmp_path: Path, write: str) -> None:
    import penstock

    path = tmp_path / f"{write}.onnx"
    match write:
        case "gpt":
            write_gpt(path, batch=2, **GPT)
        case "mlp":
            write_mlp(path, [6, 8, 8, 3], 2)
        case "cnn":
            write_cnn(path, 2, size=12)
    training = penstock.Training(loss="cross_entropy", optimizer=penstock.AdamW(lr=1e-3), microbatches=2)
    plan = penstock.plan(penstock.from_onnx(path), penstock.Cluster.local(2), training, schedule="2bw")
    assert {"s0.F", "s0.B", "s0.U", "s1.F", "s1.B", "s1.U"} <= set(plan.module.graphs)
