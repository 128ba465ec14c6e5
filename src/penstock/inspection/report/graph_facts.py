"""The graphs of a module as data: operations with their operands, by number.

    {"values": [[name, type, bytes], ...], "graphs": [{"name", "kind", "stage", "ins", "outs", "saved", "ops"}, ...]}
    operation = [kind, results, operands, source location, other attributes, kernel, variable, stage]

Names, types and other texts are numbers of the report's strings, values are numbers of `values`. An unknown stage is
-1, an empty text the number of "". The same name means the same tensor in all graphs of a module, so it is one value.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from penstock.ir.attrs import print_literal
from penstock.ir.graph import Module, Op, Value, graph_kind, graph_stage

from .strings import Strings

# Attributes with their own field, or with the same content as another.
_APART = ("kernel", "var", "stage", "mesh")


def graph_facts(module: Module, strings: Strings) -> dict[str, Any]:
    """Return all graphs in the order of the module."""
    numbers: dict[str, int] = {}
    values: list[list[int]] = []

    def listed(used: Collection[Value]) -> list[int]:
        for value in used:
            if value.name not in numbers:
                numbers[value.name] = len(values)
                values.append(
                    [strings[value.name], strings[str(value.type)], value.type.nbytes if value.type.is_static else 0]
                )
        return [numbers[value.name] for value in used]

    def row(op: Op, home: int) -> list[Any]:
        attrs = op.attrs
        others = ", ".join([f"{k}={print_literal(v)}" for k, v in attrs.items() if k not in _APART])
        kernel, var = str(attrs.get("kernel", "")), str(attrs.get("var", ""))
        kind, outs = strings[op.kind], listed(op.outs)
        # Each operand has a number: it was made above, or is an input of the graph.
        ins = [numbers[value.name] for value in op.ins]
        return [
            kind,
            outs,
            ins,
            strings[op.loc],
            strings[others],
            strings[kernel],
            strings[var],
            attrs.get("stage", home),
        ]

    graphs = []
    for graph in module.graphs.values():
        home, kind = _home(graph.name)
        graphs.append(
            {
                "name": graph.name,
                "kind": kind,
                "stage": home,
                "ins": listed(graph.ins),
                "outs": listed(graph.outs),
                "saved": listed(graph.saved),
                "ops": [row(op, home) for op in graph.ops],
            }
        )
    return {"values": values, "graphs": graphs}


def _home(name: str) -> tuple[int, str]:
    """Return stage and kind of a graph: `s1.B` is B of stage 1.

    Before the cut there are F, B and U, and before that one graph.
    """
    stage = graph_stage(name)
    return (-1, name) if stage is None else (stage, graph_kind(name))
