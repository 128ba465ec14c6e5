"""The forward part of a module as nodes with their places: what pictures of the model show. Reads of variables and constants belong to those who use them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from penstock.inspecting.why import stage_of
from penstock.ir.graph import Graph, Module, Op
from penstock.ir.literals import print_literal
from penstock.passes.fuse import INLINE


@dataclass(frozen=True)
class Placed:
    """An operation with a name that is its alone, and where it runs; `kernel` is empty where it has none."""

    name: str
    op: Op
    stage: int | None
    devices: tuple[str, ...]
    kernel: str


def forward_graphs(module: Module) -> list[Graph]:
    """The graphs of the model itself, each after those whose values it takes: forward parts of stages, or the model before it was cut."""
    left = [graph for name, graph in module.graphs.items() if name.rpartition(".")[2] in ("F", "main")]
    known = {v.name for v in module.inputs}
    found: list[Graph] = []
    while left:
        graph = next((g for g in left if all(v.name in known for v in g.ins)), left[0])
        left.remove(graph)
        found.append(graph)
        known |= {v.name for op in graph.ops for v in op.outs}
    return found


def placed_ops(module: Module, graph: Graph) -> Iterator[Placed]:
    for position, op in enumerate(graph.ops):
        stage = stage_of(graph.name)
        if stage is None and "stage" in op.attrs:
            stage = int(str(op.attrs["stage"]))
        devices = module.devices_of(stage) if stage is not None and stage < len(module.stages) else ()
        kernel = str(op.attrs.get("kernel", ""))
        yield Placed(
            f"{graph.name}/{position}", op, stage, devices, "" if not kernel or kernel.startswith(INLINE) else f"{graph.name}/{kernel}"
        )


def told_operands(graph: Graph) -> Mapping[str, str]:
    """How operands are told that are no nodes: variables and single constants, by the name of their value."""
    found = {}
    for op in graph.ops:
        if op.kind == "read":
            found[op.outs[0].name] = f"@{op.var}"
        elif op.kind == "const" and not isinstance(op.attrs["value"], tuple):
            found[op.outs[0].name] = print_literal(op.attrs["value"])
    return found
