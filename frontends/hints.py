"""What a model file says about where its nodes should run: hints, which a plan may follow.

Nodes are known by the `loc` of the operations they became, which every pass keeps. A model may describe several pipelines, each a
stage number for some of its nodes; and it may name the layer that a node is part of. Nothing here is checked:
penstock/placement_hints.py decides what can be followed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Hints:
    """`pipelines`: name of a configuration -> loc -> stage. `layers`: loc -> name of the layer."""

    pipelines: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    layers: Mapping[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.pipelines or self.layers)

    def report(self) -> list[str]:
        """Lines for the user: what hints there are."""
        lines = [
            f"configuration {name!r} of the model places {len(stages)} nodes in {len(set(stages.values()))} pipeline stages"
            for name, stages in self.pipelines.items()
        ]
        if self.layers:
            lines.append(f"{len(self.layers)} nodes are annotated with {len(set(self.layers.values()))} layers")
        return lines
