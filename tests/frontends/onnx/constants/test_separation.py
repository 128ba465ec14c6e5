"""New batch norms: torch's exporter writes equal tensors once, and the import takes them apart."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import penstock as ps
from penstock.frontends.onnx import import_onnx, importer

from ..cases import compare, judge
from .exported import asked_of_torch, export, torch_names, trained_by


def new_norms() -> nn.Module:
    """Two norms whose scales, offsets, means and variances are all ones or zeros."""
    return nn.Sequential(nn.Conv1d(3, 4, 1), nn.Tanh(), nn.BatchNorm1d(4), nn.Tanh(), nn.BatchNorm1d(4))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    return export(new_norms(), tmp_path / "model.onnx", torch.randn(2, 3, 5))


def test_new_norms_are_trained_and_their_statistics_are_not(path: Path) -> None:
    names = [t.name for t in onnx.load(path).graph.initializer]
    assert not [name for name in names if "running" in name], "torch writes one tensor of all ones"
    imported, trained = trained_by(path)
    expected = {name for name in asked_of_torch(new_norms()) if not name.startswith("4.")}
    assert torch_names(imported, trained, new_norms()) >= expected
    assert compare(path, {"x0": np.random.default_rng(0).standard_normal((2, 3, 5)).astype(np.float32)})
    (op,) = [op for op in imported.module.graphs["main"].ops if op.kind == "batch_norm"][:1]
    read = {op.outs[0]: op.var for op in imported.module.graphs["main"].ops if op.kind == "read"}
    assert [v in read for v in op.ins[1:]] == [True, True, False, False]


@pytest.mark.parametrize("version", [3, 8])
def test_the_bundle_gives_back_a_valid_file(path: Path, version: int) -> None:
    """Files of IR version 3 list every initializer as an input."""
    model = onnx.load(path)
    model.ir_version = version
    for tensor in model.graph.initializer if version < 4 else ():
        model.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    onnx.save(model, path)
    ps.compile(ps.plan(ps.from_onnx(path), ps.Cluster.local(1)), path.parent / "bundle", backend="numpy")
    ps.export(path.parent / "bundle", onnx=path.parent / "out.onnx")
    onnx.checker.check_model(path.parent / "out.onnx", full_check=True)
    x = np.random.default_rng(0).standard_normal((2, 3, 5)).astype(np.float32)
    np.testing.assert_array_equal(*(judge(file, {"x0": x})[0] for file in (path, path.parent / "out.onnx")))


class OneOffset(nn.Module):
    """A layer norm whose new offset equals the new mean of a batch norm that has no offset of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.batch = nn.LayerNorm(4), nn.BatchNorm1d(4, affine=False)
        self.batch.running_var.fill_(2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.batch(self.norm(x).tanh())


def test_another_weight_may_share_the_tensor(tmp_path: Path) -> None:
    path = export(OneOffset(), tmp_path / "model.onnx", torch.randn(3, 4))
    assert "batch.running_mean" not in {t.name for t in onnx.load(path).graph.initializer}
    assert trained_by(path)[1] >= {"norm.weight", "norm.bias"}


def test_without_the_separation_they_are_not_trained(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    monkeypatch.setattr(importer, "separate_statistics", lambda _: None)
    assert not {name for name in trained_by(path)[1] if name.startswith("2.")}


def test_a_model_whose_statistics_are_their_own_stays_as_it_is(tmp_path: Path) -> None:
    module = new_norms()
    for state in module.state_dict().values():
        if state.is_floating_point():
            state.copy_(torch.rand(state.shape))
    path = export(module, tmp_path / "model.onnx", torch.randn(2, 3, 5))
    stored = {tensor.name for tensor in onnx.load(path).graph.initializer}
    structure = import_onnx(path).structure
    assert structure is not None
    assert {tensor.name for tensor in onnx.ModelProto.FromString(structure.model).graph.initializer} == stored
