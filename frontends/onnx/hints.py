"""Placement hints of an ONNX model: the pipeline stages of its device configurations, and the layers in its metadata.

From IR version 11 on, a model may list configurations of devices, and a node may give its pipeline stage in each
(`NodeProto.device_configurations`). The metadata key `layer_ann` of a node names its layer. A node inside a function,
loop or branch has its own hints, or else those of the node around it.

How tensors are sharded over devices and the names of devices are not kept: stage i runs on device i of the cluster.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx

from penstock.frontends.hints import Hints
from penstock.ir.graph import Op

LAYER = "layer_ann"


class Marks:
    """A collector of hints, node by node. Nodes inside a node come before the node itself."""

    def __init__(self) -> None:
        self._pipelines: dict[str, dict[str, int]] = {}
        self._layers: dict[str, str] = {}

    def take(self, node: onnx.NodeProto, ops: Iterable[Op]) -> None:
        """Record the hints of a node for its operations, except reads and constants, which other nodes may share."""
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
