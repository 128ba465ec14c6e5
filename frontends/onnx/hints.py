"""Placement hints of an ONNX model: its device configurations, and the layers in its metadata.

From IR version 11 on, a model may list configurations of devices. A node may give in each its pipeline stage, and the
shards of its operands and results (`NodeProto.device_configurations`). The metadata key `layer_ann` of a node names its
layer. A node inside a function, loop or branch has its own hints, or else the stage and layer of the node around it.

Several `simple_sharding` entries of a dimension are factors of it, the major one first: [3 in 1 shard, 256 in 2] is a
dimension of 3 blocks, each of them in 2 shards. A list of devices without any shards holds the whole tensor. The names
of devices are not kept: stage i runs on device i of the cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import prod

import onnx

from penstock.frontends.hints import DeviceConfiguration, Hints, TensorHint
from penstock.ir.graph import Op, Value
from penstock.ir.sharding.device_lists import DeviceShards, DimensionShards

from .tensors import KnownTensor, OnnxWeight, Tensor

LAYER = "layer_ann"

Tensors = Mapping[str, Tensor | None]


class Marks:
    """A collector of hints, node by node. Nodes inside a node come before the node itself. `named` gives our name of a
    stored tensor."""

    def __init__(self, model: onnx.ModelProto, named: Callable[[str], str]) -> None:
        self._devices = {entry.name: entry.num_devices for entry in model.configuration}
        self._named = named
        self._pipelines: dict[str, dict[str, int]] = {}
        self._layers: dict[str, str] = {}
        self._tensors: dict[str, list[TensorHint]] = {}
        self._problems: dict[str, list[str]] = {}

    def take(self, node: onnx.NodeProto, ops: Iterable[Op], tensors: Tensors, name: str) -> None:
        """Record the hints of a node for its operations, except reads and constants, which other nodes may share, and
        those for its `tensors`. `name` is the node's."""
        locs = {op.loc for op in ops if op.kind not in ("read", "const")}
        for entry in node.device_configurations:
            if entry.HasField("pipeline_stage"):
                stages = self._pipelines.setdefault(entry.configuration_id, {})
                stages.update((loc, entry.pipeline_stage) for loc in locs - stages.keys())
            for spec in entry.sharding_spec:
                self._take_spec(entry, spec, node, tensors, name)
        layer = next((entry.value for entry in node.metadata_props if entry.key == LAYER), "")
        if layer:
            self._layers.update((loc, layer) for loc in locs - self._layers.keys())

    def _take_spec(
        self,
        entry: onnx.NodeDeviceConfigurationProto,
        spec: onnx.ShardingSpecProto,
        node: onnx.NodeProto,
        tensors: Tensors,
        loc: str,
    ) -> None:
        configuration, stage = (
            entry.configuration_id,
            entry.pipeline_stage if entry.HasField("pipeline_stage") else None,
        )
        try:
            name, shape = self._tensor(spec.tensor_name, node, tensors)
            layout = _layout(spec, shape, self._devices.get(configuration, 0))
        except ValueError as error:
            self._problems.setdefault(configuration, []).append(f"{spec.tensor_name or 'a tensor'} of {loc} {error}")
            return
        hint = TensorHint(name, shape, layout, loc, stage, spec.tensor_name in node.output)
        self._tensors.setdefault(configuration, []).append(hint)

    def _tensor(self, name: str, node: onnx.NodeProto, tensors: Tensors) -> tuple[str, tuple[int, ...]]:
        tensor = tensors.get(name) if name in (*node.input, *node.output) else None
        if isinstance(tensor, Value):
            return tensor.name, tensor.type.dims
        if isinstance(tensor, OnnxWeight):
            return self._named(tensor.name), tensor.type.dims
        if isinstance(tensor, KnownTensor):
            return self._named(tensor.name), tensor.array.shape
        raise ValueError("is no operand or result of it")

    def hints(self) -> Hints:
        """Return the hints, of configurations in the order in which the model lists them."""
        listed = [name for name in self._devices if name in self._tensors or name in self._problems]
        laid_out = {
            name: DeviceConfiguration(
                self._devices[name], tuple(self._tensors.get(name, ())), tuple(self._problems.get(name, ()))
            )
            for name in listed
        }
        return Hints(self._pipelines, self._layers, laid_out)


def _layout(spec: onnx.ShardingSpecProto, shape: tuple[int, ...], devices: int) -> DeviceShards:
    """Return the layout that a specification says. A ValueError says what it cannot mean."""
    shards = [_shards(entry, shape) for entry in spec.sharded_dim]
    if len({each.dim for each in shards}) < len(shards):
        raise ValueError("has two lists of shards for one dimension")
    groups = {entry.key: tuple(entry.value) for entry in spec.index_to_device_group_map}
    holders = [groups.get(device, (device,)) for device in spec.device or range(devices)]
    count, split = prod(each.parts for each in shards), tuple(each for each in shards if each.parts > 1)
    if count == 1:
        holders = [tuple(device for group in holders for device in group)]
    if len(holders) != count:
        raise ValueError(f"is in {count} shards, but {len(holders)} holders of shards are listed")
    strange = sorted({device for group in holders for device in group if not 0 <= device < devices})
    if strange:
        raise ValueError(f"lies on device {strange[0]}, of {devices}")
    return DeviceShards(split, tuple(holders))


def _shards(entry: onnx.ShardedDimProto, shape: tuple[int, ...]) -> DimensionShards:
    rank = len(shape)
    if not -rank <= entry.axis < rank:
        raise ValueError(f"has no dimension {entry.axis}, it has {rank}")
    dim = entry.axis % rank
    factors = _factors(entry, shape[dim], dim)
    blocks = behind = 1
    while len(factors) > 1 and factors[0][1] == 1:
        blocks *= factors.pop(0)[0]
    while len(factors) > 1 and factors[-1][1] == 1:
        behind *= factors.pop()[0]
    while len(factors) > 1:
        # A factor in as many shards as it is large goes on in the next one.
        (n, count), (inner, more) = factors[:2]
        if n != count:
            raise ValueError(f"has dimension {dim} in shards that are no parts of it in order")
        factors[:2] = [(n * inner, count * more)]
    n, count = factors[0] if factors else (shape[dim], 1)
    if (blocks > 1 or behind > 1) and n % count:
        raise ValueError(f"has dimension {dim} in {count} uneven shards of {n} each")
    if count > n * behind:
        raise ValueError(f"has dimension {dim} of {n * behind} elements in {count} shards")
    return DimensionShards(dim, count, blocks if count > 1 else 1)


def _factors(entry: onnx.ShardedDimProto, n: int, dim: int) -> list[tuple[int, int]]:
    """Return the size of every factor of a dimension, and its number of shards."""
    sizes = [part.dim_value if part.HasField("dim_value") else 0 for part in entry.simple_sharding]
    if any(part.num_shards < 1 for part in entry.simple_sharding):
        raise ValueError(f"does not say into how many shards dimension {dim} is split")
    known = prod(size for size in sizes if size)
    if sizes.count(0) == 1 and n % known == 0:
        sizes[sizes.index(0)] = n // known
    if entry.simple_sharding and prod(sizes) != n:
        raise ValueError(f"has {n} elements in dimension {dim}, its shards are of {'x'.join(map(str, sizes))}")
    return [(size, part.num_shards) for size, part in zip(sizes, entry.simple_sharding, strict=True)]
