"""The model as an ONNX file that names the place of every node, for Netron and other readers of ONNX.

Every node has, in its `metadata_props`, `penstock.stage`, `penstock.device` and `penstock.kernel`: the places of its
operations in the forward pass, separated by commas. The model has `penstock.stages` and `penstock.schedule`.

    a bundle compiled from ONNX    the model that was compiled, with its weights, as `penstock export --onnx` writes it,
                                   and the metadata. It computes the same as the model. A node that was fused into the
                                   operation of another, as in attention, has the place of the operations that use all
                                   of its results. Nodes that do not depend on the inputs were folded away and have no
                                   metadata.
    anything else                  the operations of the forward pass as nodes of the domain `penstock`, variables as
                                   inputs: only for viewing
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto, helper

from penstock.inspection.subject import Subject
from penstock.ir.attrs import Attr
from penstock.ir.graph import Module, Value, Var
from penstock.ir.types import TensorType, numpy_dtype
from penstock.version import __version__

from .node_places import node_places
from .outputs import write_whole
from .placed import Placed, forward_graphs, placed_ops
from .weights import export

DOMAIN = "penstock"
STAGE, DEVICE, KERNEL = "penstock.stage", "penstock.device", "penstock.kernel"


def write_onnx(subject: Subject, path: Path, batches: int) -> list[Path]:
    """Write the ONNX file of a subject."""
    if subject.bundle is not None and subject.bundle.source_structure is not None:
        return list(
            export(subject.bundle.path, onnx=path, annotate=lambda model: annotate(model, subject.module)).files
        )
    model = program_model(subject.module)
    return write_whole(path, model.SerializeToString(deterministic=True))


def annotate(model: onnx.ModelProto, module: Module) -> None:
    """Write into the nodes of a model where they run.

    A node with graphs or a function inside has the places of these.
    """
    for node, ops in zip(model.graph.node, node_places(model, module), strict=True):
        _set(node.metadata_props, _metadata(ops))
    _set(model.metadata_props, _model_metadata(module))


def _metadata(ops: Iterable[Placed]) -> dict[str, str]:
    ops = list(ops)
    places: dict[str, Iterable[str]] = {
        STAGE: (str(p.stage) for p in ops if p.stage is not None),
        DEVICE: (device for p in ops for device in p.devices),
        KERNEL: (p.kernel for p in ops if p.kernel),
    }
    joined = {key: ", ".join(dict.fromkeys(values)) for key, values in places.items()}
    return {key: text for key, text in joined.items() if text}


def _model_metadata(module: Module) -> dict[str, str]:
    stages = "; ".join(f"{stage.index} on {' '.join(module.devices_of(stage.index))}" for stage in module.stages)
    schedule = "" if module.schedule is None else f"{module.schedule.name}, {module.schedule.microbatches} microbatches"
    return {key: text for key, text in (("penstock.stages", stages), ("penstock.schedule", schedule)) if text}


def _set(props: Any, metadata: Mapping[str, str]) -> None:
    other_properties = [(prop.key, prop.value) for prop in props if prop.key not in metadata]
    del props[:]
    props.extend(
        onnx.StringStringEntryProto(key=key, value=value) for key, value in [*other_properties, *metadata.items()]
    )


# ------------------------------------------------------------------------------------------------ without a source


def program_model(module: Module) -> onnx.ModelProto:
    """Return the forward pass as a model of Penstock's own operations."""
    nodes: list[onnx.NodeProto] = []
    inputs: dict[str, Value | Var] = {value.name: value for value in module.inputs}
    results: dict[str, Value] = {}
    for graph in forward_graphs(module):
        variables: dict[str, str] = {}
        for placed in placed_ops(module, graph):
            op = placed.op
            touched = f"@{op.var}" if "var" in op.attrs else ""
            if touched:
                inputs.setdefault(touched, module.vars[op.var])
            if op.kind == "read":
                variables[op.outs[0].name] = touched
                continue
            if op.outs and any(v.name in results for v in op.outs):
                continue  # computed on several stages: drawn once
            operands = [variables.get(v.name, v.name) for v in op.ins] + [touched] * bool(touched)
            node = helper.make_node(
                op.kind, operands, [v.name for v in op.outs], name=placed.name, doc_string=op.loc, domain=DOMAIN
            )
            node.attribute.extend(
                _attribute(name, value) for name, value in op.attrs.items() if name not in ("var", "kernel", "stage")
            )
            _set(node.metadata_props, _metadata([placed]))
            nodes.append(node)
            results |= {v.name: v for v in op.outs}
    known = {*inputs, *results}
    strays = {v.name: v for graph in forward_graphs(module) for v in graph.ins if v.name not in known}
    outputs = [results[name] for name in module.outputs if name in results]
    if not outputs:
        outputs = [v for graph in forward_graphs(module)[-1:] for v in graph.outs if v.name in results]
    infos = [_info(name, value.type) for name, value in {**inputs, **strays}.items()]
    body = helper.make_graph(
        nodes,
        module.name,
        infos,
        [_info(v.name, v.type) for v in outputs],
        value_info=[_info(v.name, v.type) for v in results.values() if v not in outputs],
    )
    model = helper.make_model(
        body,
        producer_name="penstock",
        producer_version=__version__,
        opset_imports=[helper.make_opsetid("", 20), helper.make_opsetid(DOMAIN, 1)],
    )
    _set(model.metadata_props, _model_metadata(module))
    return model


def _info(name: str, type: TensorType) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, _element(type.dtype), list(type.shape))


def _element(dtype: str) -> int:
    return int(TensorProto.BFLOAT16 if dtype == "bf16" else helper.np_dtype_to_tensor_dtype(numpy_dtype(dtype)))


def _attribute(name: str, value: Attr) -> onnx.AttributeProto:
    """Return an attribute of ONNX, whose lists have one type: mixed numbers become floats, an empty list is of
    integers.
    """
    if not isinstance(value, tuple):
        return helper.make_attribute(name, int(value) if isinstance(value, bool) else value)
    if any(isinstance(x, str) for x in value):
        return helper.make_attribute(name, [str(x) for x in value])
    if any(isinstance(x, float) for x in value):
        return helper.make_attribute(name, [float(x) for x in value])
    return helper.make_attribute(name, [int(x) for x in value], attr_type=onnx.AttributeProto.INTS)
