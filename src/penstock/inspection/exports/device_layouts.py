"""The layouts of a bundle's tensors, written into its ONNX model as a device configuration.

The configuration is called like the mesh, such as `dp=2,tp=2`, and has the devices of all stages, stage after stage.
Every node of the model has its pipeline stage, where there are several, and how its parameters, the model's inputs that
it reads, and its results lie. Replicas along dp hold the same shards. A dimension of blocks is written as its factors:
3*256 over two devices is [3 in 1 shard, 256 in 2].

Not written are tensors in folded order, values that are sums still to be added up, and nodes inside of others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

import onnx

from penstock.backends.bundle.format import Bundle
from penstock.ir.graph import BUFFER, PARAM, Mesh, Module
from penstock.ir.sharding.device_lists import device_layout
from penstock.ir.types import TensorType
from penstock.passes.sharding.given import mesh_text

from .node_places import node_places

# The first version of ONNX's format with device configurations.
_IR_VERSION = 11


def write_layouts(model: onnx.ModelProto, bundle: Bundle, whole: Module) -> None:
    """Write how the tensors of a bundle lie into its model; `whole` is the program before it was cut."""
    module = bundle.module
    name = mesh_text(module)
    meshes = [module.mesh_of(stage.index) for stage in module.stages]
    firsts = [0, *accumulate(len(mesh.devices) for mesh in meshes)]
    stored, values = _types(whole, bundle.source_names or {})
    others = [entry for entry in model.configuration if entry.name != name]
    devices = module.rank_devices()
    del model.configuration[:]
    model.configuration.append(onnx.DeviceConfigurationProto(name=name, num_devices=len(devices), device=list(devices)))
    model.configuration.extend(others)
    model.ir_version = max(model.ir_version, _IR_VERSION)
    for node, ops in zip(model.graph.node, node_places(model, module), strict=True):
        kept = [entry for entry in node.device_configurations if entry.configuration_id != name]
        del node.device_configurations[:]
        stage = next((op.stage for op in ops if op.stage is not None), None)
        if stage is not None:
            specs = _specs(node, stored, values, meshes[stage], firsts[stage])
            place: dict[str, Any] = {"pipeline_stage": stage} if len(module.stages) > 1 else {}
            entry = onnx.NodeDeviceConfigurationProto(configuration_id=name, sharding_spec=list(specs), **place)
            node.device_configurations.append(entry)
        node.device_configurations.extend(kept)


def _types(whole: Module, names: Mapping[str, list[str]]) -> tuple[dict[str, TensorType], dict[str, TensorType]]:
    """Return the types of what the program is given, variables and inputs, and of values, by the model's names."""
    graph = whole.graphs.get("F") or whole.graphs["main"]
    stored: dict[str, TensorType] = {}
    for name, var in whole.vars.items():
        if var.role in (PARAM, BUFFER):
            stored |= dict.fromkeys(names.get(name, ()), var.type)
    stored |= {names.get(v.name, [v.name])[0]: v.type for v in whole.data_inputs}
    values: dict[str, TensorType] = {}
    for value in (v for op in graph.ops for v in op.outs):
        theirs = names.get(f"%{value.name}") or (names.get(value.name) if value.name not in whole.vars else None)
        values[theirs[0] if theirs else value.name] = value.type
    return stored, values


def _specs(
    node: onnx.NodeProto, stored: Mapping[str, TensorType], values: Mapping[str, TensorType], mesh: Mesh, first: int
) -> Iterator[onnx.ShardingSpecProto]:
    """Yield the layouts of a node's tensors; `first` is the first device of its stage."""
    operands = [(name, stored.get(name)) for name in node.input]
    results = [(name, values.get(name)) for name in node.output]
    for name, t in dict([*operands, *results]).items():
        if t is not None and t.rank and not t.partial and min(t.blocks, default=1) > 0:
            yield _spec(name, t, mesh, first)


def _spec(name: str, t: TensorType, mesh: Mesh, first: int) -> onnx.ShardingSpecProto:
    layout = device_layout(t, mesh)
    spec = onnx.ShardingSpecProto(tensor_name=name)
    for number, group in enumerate(layout.holders):
        devices = [first + place for place in group]
        if len(devices) == 1:
            spec.device.append(devices[0])
        else:
            # Groups have numbers that no device has.
            spec.device.append(-1 - number)
            spec.index_to_device_group_map.append(onnx.IntIntListEntryProto(key=-1 - number, value=devices))
    for shards in layout.shards:
        n = t.dims[shards.dim]
        factors = [(shards.blocks, 1)] * (shards.blocks > 1) + [(n // shards.blocks, shards.parts)]
        parts = [onnx.SimpleShardedDimProto(dim_value=size, num_shards=count) for size, count in factors]
        spec.sharded_dim.append(onnx.ShardedDimProto(axis=shards.dim, simple_sharding=parts))
    return spec
