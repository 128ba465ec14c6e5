"""Placement hints of an ONNX model: the pipeline stages of its device configurations, and the layers that metadata names.

From IR version 11 on, a model may list configurations of devices, and a node may say for each in which pipeline stage it runs
(`NodeProto.device_configurations`). The metadata key `layer_ann` of a node names the layer it is part of. A node inside a function, loop or
branch has its own hints, or else those of the node it is written out for.

Not kept are how tensors are sharded over devices, and the names of devices: stage i runs on device i of the cluster.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx

from penstock.frontends.hints import Hints
from penstock.ir.graph import Op

LAYER = "layer_ann"


class Marks:
    """Hints as they are found, node by node; what is inside a node is seen before the node itself."""

    def __init__(self) -> None:
        self._pipelines: dict[str, dict[str, int]] = {}
        self._layers: dict[str, str] = {}

    def take(self, node: onnx.NodeProto, ops: Iterable[Op]) -> None:
        """Note the hints of a node for the operations that it became. What it reads may be anybody's."""
        locs = {op.loc for op in ops if op.kind not in ("read", "const")}
        for entry in node.device_configurations:
            if entry.HasField("pipeline_stage"):
                stages = self._pipelines.setdefault(entry.configuration_id, {})
                stages.update((loc, entry.pipeline_stage) for loc in locs - stages.keys())
        layer = next((entry.value for entry in node.metadata_props if entry.key == LAYER), "")
        if layer:
            self._layers.update((loc, layer) for loc in locs - self._layers.keys())

    def hints(self) -> Hints:
        return Hints(self._pipelines, self._layers)
