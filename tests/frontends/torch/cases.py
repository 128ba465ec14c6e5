"""The comparison that tests of the torch frontend rest on: our import run by the NumPy interpreter, against the module itself run by torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from penstock.frontends.imported import Imported
from penstock.frontends.torch import import_torch
from penstock.frontends.torch.arrays import array_of
from penstock.frontends.training import Training, attach_loss
from penstock.ir.graph import Module
from penstock.ir.interpreter.graphs import run_graph
from penstock.ir.interpreter.store import DictStore
from penstock.ir.text import parse_module, print_module
from penstock.ir.training.optimizers import SGD
from penstock.ir.verify.verifier import check
from penstock.passes.training.autodiff import AutodiffOptions, autodiff


def tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def run(imported: Imported, fed: Any) -> list[np.ndarray]:
    with np.errstate(all="ignore"):
        return run_graph(
            imported.module.graphs["main"], [array_of(t) for t in tensors(fed)], DictStore(dict(imported.weights))
        )


def compare(
    source: torch.nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    tolerance: float = 2e-5,
    **options: Any,
) -> Imported:
    """Import, check, print and parse, run, and compare every output with torch's."""
    kwargs = kwargs or {}
    imported = import_torch(source, args, kwargs, **options)
    expected = tensors(source(*args, **kwargs))
    judge(imported, (args, kwargs), expected, tolerance)
    return imported


def judge(imported: Imported, fed: Any, expected: Sequence[torch.Tensor], tolerance: float = 2e-5) -> None:
    check(imported.module, ("typed",))
    assert parse_module(print_module(imported.module)) == imported.module
    assert set(imported.weights) == set(imported.module.vars)
    found = run(imported, fed)
    assert len(found) == len(expected)
    for want, got in zip(map(array_of, expected), found, strict=True):
        assert got.dtype == want.dtype
        assert got.shape == want.shape
        if want.dtype.kind in "fV":
            np.testing.assert_allclose(got.astype(np.float64), want.astype(np.float64), rtol=tolerance, atol=tolerance)
        else:
            np.testing.assert_array_equal(got, want)


def gradients(imported: Imported, fed: Any) -> tuple[dict[str, np.ndarray], float]:
    """Of the mean squared difference between the first output and labels, by F and B; and the loss."""
    module = attach_loss(imported.module, Training(loss="mse", optimizer=SGD()))
    labels = labels_of(imported.module)
    return _backward(module, imported, [*map(array_of, tensors(fed)), labels])


def labels_of(module: Module) -> np.ndarray:
    first = next(v for v in module.graphs["main"].outs)
    return np.random.default_rng(7).standard_normal(first.type.dims).astype(np.float32)


def _backward(module: Module, imported: Imported, feeds: Sequence[np.ndarray]) -> tuple[dict[str, np.ndarray], float]:
    found = autodiff(module, AutodiffOptions(1))
    check(found, ("typed", "differentiated"))
    store = DictStore({name: array for name, array in imported.weights.items() if name in found.vars})
    forward, backward = found.graphs["F"], found.graphs["B"]
    with np.errstate(all="ignore"):
        results = run_graph(forward, list(feeds), store, "f64")
        values = {v.name: x for v, x in zip((*forward.ins, *forward.results), (*feeds, *results), strict=True)}
        run_graph(backward, [values[v.name] for v in backward.ins], store, "f64")
    return {
        name: store.arrays[f"{name}.grad"] for name in imported.module.vars if f"{name}.grad" in store.arrays
    }, float(results[0])


def compare_gradients(source: torch.nn.Module, args: Sequence[Any], imported: Imported | None = None) -> Imported:
    """All gradients against torch's, in relation to the largest element of each; `imported` is the source where that was done."""
    imported = imported or import_torch(source, args)
    found, loss = gradients(imported, args)
    source.zero_grad()
    output = tensors(source(*args))[0]
    torch_loss = torch.nn.functional.mse_loss(output, torch.from_numpy(labels_of(imported.module)).to(output.dtype))
    torch_loss.backward()
    assert abs(loss - torch_loss.item()) < 1e-4 * max(1.0, abs(loss))
    theirs = {name: p.grad for name, p in source.named_parameters() if p.grad is not None}
    ours = {theirs: name for name, theirs in imported.names.items()}
    assert {name for name, var in imported.module.vars.items() if var.role == "param"} == {
        ours.get(name, name) for name in theirs
    }
    for name, grad in theirs.items():
        want = array_of(grad)
        scale = max(float(np.abs(want).max(initial=0.0)), 1e-3)
        np.testing.assert_allclose(found[ours.get(name, name)] / scale, want / scale, rtol=0, atol=1e-4, err_msg=name)
    return imported
