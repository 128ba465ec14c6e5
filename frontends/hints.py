"""Placement hints of a model file: the pipeline stages and layers that it names for its nodes, and the devices that it
splits its tensors over. A plan may follow them.

A node is identified by the `loc` of its operations, which every pass keeps. A model may describe several pipelines,
each a stage number for some of its nodes, and several lists of devices that share tensors. It may also name the layer
of a node. Nothing is checked here: src/penstock/planning/hints.py decides which hints can be followed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.ir.sharding.device_lists import DeviceShards


@dataclass(frozen=True)
class TensorHint:
    """The layout of one tensor over devices of a configuration, as the node `loc` of a pipeline stage has it. `made`
    says that the node makes the tensor. Names are those of the module."""

    name: str
    shape: tuple[int, ...]
    layout: DeviceShards
    loc: str
    stage: int | None
    made: bool


@dataclass(frozen=True)
class DeviceConfiguration:
    """The tensors that a model splits over a number of devices, and what of it cannot be said by meshes."""

    devices: int
    tensors: tuple[TensorHint, ...]
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class Hints:
    """The hints of one model.

    `pipelines`: name of a configuration -> loc -> stage. `layers`: loc -> name of the layer. `configurations` are those
    that split tensors, by name.
    """

    pipelines: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    layers: Mapping[str, str] = field(default_factory=dict)
    configurations: Mapping[str, DeviceConfiguration] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.pipelines or self.layers)

    def of_stages(self) -> str:
        """Name the hints that say where stages start."""
        kinds = {"pipeline stages": self.pipelines, "layers": self.layers}
        return " and ".join(name for name, hints in kinds.items() if hints)

    def report(self) -> list[str]:
        """Write lines for the user that count the hints."""
        lines = [
            f"configuration {name!r} of the model places {len(stages)} nodes "
            f"in {len(set(stages.values()))} pipeline stages"
            for name, stages in self.pipelines.items()
        ]
        lines += [
            f"configuration {name!r} of the model lays {len({hint.name for hint in listed.tensors})} tensors out "
            f"over {listed.devices} devices"
            for name, listed in self.configurations.items()
        ]
        if self.layers:
            lines.append(f"{len(self.layers)} nodes are annotated with {len(set(self.layers.values()))} layers")
        return lines
