"""The model as an ONNX file that says where everything runs, for Netron and other readers of ONNX.

Every node has, in its `metadata_props`, `penstock.stage`, `penstock.device` and `penstock.kernel`: where what came of it runs in the
forward pass, several with commas between. The model has `penstock.stages` and `penstock.schedule`.

    of a bundle that was compiled from ONNX    the model that was compiled, with its weights: what `penstock export --onnx` writes, and the metadata.
                                               It computes what the model computes. A node that became part of the operation of
                                               another, as those of an attention do, is where that runs: where all of its results are taken.
                                               What does not depend on the inputs was folded away and has no metadata.
    of anything else                           the operations of the forward pass as nodes of the domain `penstock`, variables as inputs: to be looked at
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto, helper

from penstock.frontends.names import legal
from penstock.frontends.onnx.source import node_name
from penstock.inspection.subject import Subject
from penstock.ir.attrs import Attr
from penstock.ir.graph import Module, Value, Var
from penstock.ir.types import TensorType, numpy_dtype
from penstock.version import __version__

from .outputs import write_whole
from .placed import Placed, forward_graphs, placed_ops
from .weights import export

DOMAIN = "penstock"
STAGE, DEVICE, KERNEL = "penstock.stage", "penstock.device", "penstock.kernel"


def write_onnx(subject: Subject, path: Path, batches: int) -> list[Path]:
    if subject.bundle is not None and subject.bundle.source_structure is not None:
        return list(
            export(subject.bundle.path, onnx=path, annotate=lambda model: annotate(model, subject.module)).files
        )
    model = program_model(subject.module)
    return write_whole(path, model.SerializeToString(deterministic=True))


def annotate(model: onnx.ModelProto, module: Module) -> None:
    """Write into the nodes of a model where they run. A node with a graph or function of its own runs where what is inside of it does."""
    found: dict[str, list[Placed]] = {}
    for graph in forward_graphs(module):
        for placed in placed_ops(module, graph):
            path = placed.op.loc
            while path:
                found.setdefault(path, []).append(placed)
                path = path.rpartition("/")[0]
    places = [found.get(legal(node_name(node, index)), []) for index, node in enumerate(model.graph.node)]
    for node, ops in zip(model.graph.node, _absorbed(model.graph, places), strict=True):
        _set(node.metadata_props, _metadata(ops))
    _set(model.metadata_props, _model_metadata(module))


def _absorbed(graph: onnx.GraphProto, places: Sequence[list[Placed]]) -> list[list[Placed]]:
    """The operations of every node. One that has none of its own, though it depends on the inputs, has those of the nodes that take its
    results, if these are of the same stages."""
    takers: dict[str, list[int]] = {}
    # Shapes are known when a model is compiled: what is computed from them is folded away.
    varies = {value.name for value in graph.input} - {tensor.name for tensor in graph.initializer}
    for index, node in enumerate(graph.node):
        taken = _taken(node)
        if node.op_type not in ("Shape", "Size") and any(name in varies for name in taken):
            varies.update(node.output)
            for name in dict.fromkeys(taken):
                takers.setdefault(name, []).append(index)
    found = list(places)
    # Nodes stand after those whose results they take.
    for index in reversed(range(len(found))):
        results = [name for name in graph.node[index].output if name in varies]
        after = [found[taker] for name in results for taker in takers.get(name, ())]
        if not found[index] and len({frozenset(op.stage for op in ops) for ops in after}) == 1:
            found[index] = [op for ops in after for op in ops]
    return found


def _taken(node: onnx.NodeProto) -> list[str]:
    """Names that a node takes, those of graphs inside of it among them."""
    inner = (
        graph
        for attribute in node.attribute
        for graph in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs)
    )
    return [name for name in node.input if name] + [
        name for graph in inner for each in graph.node for name in _taken(each)
    ]


def _metadata(ops: Iterable[Placed]) -> dict[str, str]:
    ops = list(ops)
    told: dict[str, Iterable[str]] = {
        STAGE: (str(p.stage) for p in ops if p.stage is not None),
        DEVICE: (device for p in ops for device in p.devices),
        KERNEL: (p.kernel for p in ops if p.kernel),
    }
    joined = {key: ", ".join(dict.fromkeys(values)) for key, values in told.items()}
    return {key: text for key, text in joined.items() if text}


def _model_metadata(module: Module) -> dict[str, str]:
    stages = "; ".join(f"{stage.index} on {' '.join(module.devices_of(stage.index))}" for stage in module.stages)
    schedule = "" if module.schedule is None else f"{module.schedule.name}, {module.schedule.microbatches} microbatches"
    return {key: text for key, text in (("penstock.stages", stages), ("penstock.schedule", schedule)) if text}


def _set(props: Any, told: Mapping[str, str]) -> None:
    kept = [(prop.key, prop.value) for prop in props if prop.key not in told]
    del props[:]
    props.extend(onnx.StringStringEntryProto(key=key, value=value) for key, value in [*kept, *told.items()])


# ------------------------------------------------------------------------------------------------ programs without a source


def program_model(module: Module) -> onnx.ModelProto:
    """The forward pass as a model of operations that only we know."""
    nodes: list[onnx.NodeProto] = []
    inputs: dict[str, Value | Var] = {value.name: value for value in module.inputs}
    made: dict[str, Value] = {}
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
            if op.outs and any(v.name in made for v in op.outs):
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
            made |= {v.name: v for v in op.outs}
    known = {*inputs, *made}
    strays = {v.name: v for graph in forward_graphs(module) for v in graph.ins if v.name not in known}
    outputs = [made[name] for name in module.outputs if name in made]
    if not outputs:
        outputs = [v for graph in forward_graphs(module)[-1:] for v in graph.outs if v.name in made]
    infos = [_info(name, value.type) for name, value in {**inputs, **strays}.items()]
    body = helper.make_graph(
        nodes,
        module.name,
        infos,
        [_info(v.name, v.type) for v in outputs],
        value_info=[_info(v.name, v.type) for v in made.values() if v not in outputs],
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
    """Lists have one type in ONNX: numbers of both kinds become floats, and an empty one is of integers."""
    if not isinstance(value, tuple):
        return helper.make_attribute(name, int(value) if isinstance(value, bool) else value)
    if any(isinstance(x, str) for x in value):
        return helper.make_attribute(name, [str(x) for x in value])
    if any(isinstance(x, float) for x in value):
        return helper.make_attribute(name, [float(x) for x in value])
    return helper.make_attribute(name, [int(x) for x in value], attr_type=onnx.AttributeProto.INTS)
