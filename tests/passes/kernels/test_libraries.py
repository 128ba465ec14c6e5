"""Which operations a library computes: only on GPUs, only floats, visible in the IR, and fused with nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock import api
from penstock.frontends.training import Training
from penstock.ir.cluster.cluster import Cluster
from penstock.ir.graph import Module, Op
from penstock.ir.training.optimizers import SGD
from penstock.models import write_gpt
from penstock.passes.kernels.libraries import KINDS, LibrariesOptions, libraries
from penstock.support.errors import UsageError


def planned(folder: Path, devices: str, library: str) -> Module:
    path = write_gpt(folder / "gpt.onnx", layers=2, width=16, heads=2, vocab=20, positions=32)
    model = api.from_onnx(path, dims={"batch": 2})
    training = Training(loss="cross_entropy", optimizer=SGD(lr=0.1))
    cuts = ["h.1.ln_1"] if "," in devices else []
    return api.plan(model, Cluster.listed(devices), training, cuda_libraries=library, split_at=cuts).module


def ops_of(module: Module, stage: int) -> list[Op]:
    return [op for name, graph in module.graphs.items() if name.startswith(f"s{stage}.") for op in graph.ops]


def test_only_stages_on_gpus_are_annotated_and_only_sums_are_fused_behind(tmp_path: Path) -> None:
    module = planned(tmp_path, "cpu,sm_90", "torch")
    assert not any("library" in op.attrs for op in ops_of(module, 0))
    chosen = [op for op in ops_of(module, 1) if "library" in op.attrs]
    assert {op.kind for op in chosen} == {"matmul", "attention", "attention_grad"}
    assert {op.attrs["library"] for op in chosen} == {"torch"}
    assert not any(op.kind in KINDS and "library" not in op.attrs for op in ops_of(module, 1))
    for name in ("s1.F", "s1.B"):
        kernels: dict[Any, list[str]] = {}
        for op in module.graphs[name].ops:
            kernels.setdefault(op.attrs.get("kernel"), []).append(op.kind)
        together = [kernels[op.attrs["kernel"]] for op in module.graphs[name].ops if "library" in op.attrs]
        # Products are added to gradients of weights.
        assert all(len(kinds) == 1 or kinds == ["matmul", "accum"] for kinds in together)
        assert (["matmul", "accum"] in together) == (name == "s1.B")
    assert any(note.origin == "libraries" and "matmul by torch" in note.text for note in module.notes)


def test_kernels_of_ours_for_everything(tmp_path: Path) -> None:
    module = planned(tmp_path, "sm_90", "none")
    assert not any("library" in op.attrs for op in ops_of(module, 0))
    # Attention of ours would read keys once per query.
    assert "attention" not in {op.kind for op in ops_of(module, 0)}
    # The pass takes back what it wrote before.
    annotated = libraries(module, LibrariesOptions())
    assert any("library" in op.attrs for op in ops_of(annotated, 0))
    assert libraries(annotated, LibrariesOptions("none")).graphs == module.graphs
    with pytest.raises(UsageError, match="unknown library 'cublas'"):
        libraries(module, LibrariesOptions("cublas"))


def test_processors_are_left_alone(tmp_path: Path) -> None:
    module = planned(tmp_path, "cpu,cpu", "torch")
    assert libraries(module, LibrariesOptions()) is module
    assert not any(note.origin == "libraries" for note in module.notes)
