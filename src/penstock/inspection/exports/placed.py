"""The forward part of a module as nodes with their places, for pictures of the model.

Reads of variables and constants belong to the operations that use them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from penstock.inspection.finding import stage_and_devices
from penstock.inspection.flow import told_operand
from penstock.ir.graph import Graph, Module, Op, graph_kind
from penstock.ir.memory.workspace import is_inline


@dataclass(frozen=True)
class Placed:
    """An operation with a unique name and its place; `kernel` is empty where it has none."""

    name: str
    op: Op
    stage: int | None
    devices: tuple[str, ...]
    kernel: str


def forward_graphs(module: Module) -> list[Graph]:
    """Return the forward graphs of stages, or the graph of the uncut model, in the order in which values flow."""
    left = [graph for name, graph in module.graphs.items() if graph_kind(name) == "F"]
    known = {v.name for v in module.inputs}
    ordered: list[Graph] = []
    while left:
        graph = next((g for g in left if all(v.name in known for v in g.ins)), left[0])
        left.remove(graph)
        ordered.append(graph)
        known |= {v.name for op in graph.ops for v in op.outs}
    return ordered


def placed_ops(module: Module, graph: Graph) -> Iterator[Placed]:
    """Yield the operations of a graph with their places."""
    for position, op in enumerate(graph.ops):
        stage, devices = stage_and_devices(module, graph.name, op)
        kernel = "" if is_inline(op) or "kernel" not in op.attrs else f"{graph.name}/{op.attrs['kernel']}"
        yield Placed(f"{graph.name}/{position}", op, stage, devices, kernel)


def told_operands(graph: Graph) -> Mapping[str, str]:
    """Return the labels of operands that are no nodes, variables and single constants, by the name of their value."""
    return {op.outs[0].name: label for op in graph.ops if (label := told_operand(op)) is not None}
