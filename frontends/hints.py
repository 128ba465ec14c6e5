"""Placement hints of a model file: the pipeline stages and layers that it names for its nodes. A plan may follow them.

A node is identified by the `loc` of its operations, which every pass keeps. A model may describe several pipelines,
each a stage number for some of its nodes. It may also name the layer of a node. Nothing is checked here:
src/penstock/planning/hints.py decides which hints can be followed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Hints:
    """The hints of one model.

    `pipelines`: name of a configuration -> loc -> stage. `layers`: loc -> name of the layer.
    """

    pipelines: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    layers: Mapping[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.pipelines or self.layers)

    def report(self) -> list[str]:
        """Write lines for the user that count the hints."""
        lines = [
            f"configuration {name!r} of the model places {len(stages)} nodes "
            f"in {len(set(stages.values()))} pipeline stages"
            for name, stages in self.pipelines.items()
        ]
        if self.layers:
            lines.append(f"{len(self.layers)} nodes are annotated with {len(set(self.layers.values()))} layers")
        return lines
