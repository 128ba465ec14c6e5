"""Modules of torch as files of several exporters, and which of their parameters an import trains."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from torch import Tensor, nn

from penstock.frontends.onnx import Imported, import_onnx
from penstock.ir.graph import PARAM


def export(module: nn.Module, path: Path, *inputs: Tensor) -> Path:
    """Write a module by torch's exporter that needs no further package."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        names = [f"x{i}" for i in range(len(inputs))]
        torch.onnx.export(module.eval(), inputs, str(path), input_names=names, opset_version=17, dynamo=False)
    return path


def lifted(path: Path, *, other: bool, rank_0: bool = False) -> Path:
    """Make initializers of the floats in Constant nodes, of one element where they are numbers, as optimisers of files do.

    With `rank_0` these have no dimension.

    With `other` the file says that it is of another exporter, and these have short names.
    """
    model = onnx.load(path)
    names: dict[str, str] = {}
    for node in [node for node in model.graph.node if node.op_type == "Constant"]:
        array = numpy_helper.to_array(node.attribute[0].t)
        if array.dtype != np.float32 or _limits_clip(model, node.output[0]):
            continue
        names[node.output[0]] = f"k{len(names)}" if other else node.output[0]
        array = array.reshape(() if rank_0 else (1,)) if array.size == 1 else array
        model.graph.initializer.append(numpy_helper.from_array(array, names[node.output[0]]))
        model.graph.node.remove(node)
    _rename(model, names)
    if other:
        model.producer_name = "other"
    onnx.save(model, path)
    return path


def without_names(path: Path) -> Path:
    """Give all initializers names that say nothing, as an exporter other than torch's."""
    return renamed(path, {tensor.name: f"t{i}" for i, tensor in enumerate(onnx.load(path).graph.initializer)})


def renamed(path: Path, names: dict[str, str]) -> Path:
    """Call initializers otherwise, in a file of an exporter other than torch's."""
    model = onnx.load(path)
    _rename(model, names)
    model.producer_name = "other"
    onnx.save(model, path)
    return path


def _limits_clip(model: onnx.ModelProto, name: str) -> bool:
    """Tell whether Clip reads a tensor as a limit, which has to be of rank 0."""
    return any(node.op_type == "Clip" and name in node.input[1:] for node in model.graph.node)


def _rename(model: onnx.ModelProto, names: dict[str, str]) -> None:
    for tensor in model.graph.initializer:
        tensor.name = names.get(tensor.name, tensor.name)
    for node in model.graph.node:
        for i, name in enumerate(node.input):
            node.input[i] = names.get(name, name)


def trained_by(path: Path, **options: str) -> tuple[Imported, set[str]]:
    imported = import_onnx(path, **options)  # type: ignore[arg-type]
    names = imported.names
    return imported, {names.get(v.name, v.name) for v in imported.module.vars.values() if v.role == PARAM}


def torch_names(imported: Imported, trained: set[str], module: nn.Module) -> set[str]:
    """Map variables to torch's names: by the name, and where the exporter made one up, by the elements."""
    parameters = {name: p.detach().numpy() for name, p in module.named_parameters() if p.requires_grad}
    known = {ours: imported.names.get(ours, ours) for ours in imported.module.vars}
    result = set()
    for ours, theirs in known.items():
        if theirs in trained:
            same = [n for n in _same(imported.weights[ours], parameters) if n not in trained]
            result.add(theirs if theirs in parameters or not same else same[0])
    return result


def _same(array: np.ndarray, parameters: dict[str, np.ndarray]) -> Iterator[str]:
    """Name the parameters with these elements, turned or with further dimensions of size 1."""
    for name, parameter in parameters.items():
        if any(np.array_equal(np.squeeze(array), np.squeeze(form)) for form in (parameter, parameter.T)):
            yield name


def asked_of_torch(module: nn.Module) -> set[str]:
    """Name the parameters that torch trains: the oracle."""
    return {name for name, parameter in module.named_parameters() if parameter.requires_grad}
