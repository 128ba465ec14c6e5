"""The model as a graph for Graphviz: operations as boxes, stages as clusters, values between stages with their bytes.

In: a module. Out: text in the DOT language. Only the forward pass is drawn; the backward pass mirrors it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from penstock.inspection.subject import Subject
from penstock.ir.graph import Module
from penstock.support.words import shown_bytes

from .outputs import write_whole
from .placed import Placed, forward_graphs, placed_ops, told_operands

_COLOURS = ("#dce8f6", "#fbe8cf", "#dff0d8", "#f3dcec", "#e8e4f5", "#f6f1cf", "#d9f0ee", "#f5dcd8")


def write_dot(subject: Subject, path: Path, batches: int) -> list[Path]:
    """Write the DOT file of a subject."""
    return write_whole(path, dot_text(subject.module))


def dot_text(module: Module) -> str:
    """Return the forward graphs of a module in the DOT language."""
    return "\n".join(_lines(module)) + "\n"


def _lines(module: Module) -> Iterator[str]:
    yield f"digraph {_quoted(module.name)} {{"
    yield '  node [shape=box, style="filled,rounded", fillcolor=white, fontname="Helvetica", fontsize=10];'
    yield '  edge [fontname="Helvetica", fontsize=9];'
    maker: dict[str, Placed | None] = {}
    for value in module.inputs:
        maker[value.name] = None
        yield f"  {_quoted(f'input {value.name}')} [label={_quoted(value.name, str(value.type))}, shape=ellipse];"
    arrows: list[str] = []
    clusters: dict[int | None, list[str]] = {}
    for graph in forward_graphs(module):
        labels = told_operands(graph)
        for placed in placed_ops(module, graph):
            if placed.op.outs and all(v.name in labels for v in placed.op.outs):
                continue
            clusters.setdefault(placed.stage, []).append(_box(placed, labels))
            for value in dict.fromkeys(placed.op.ins):
                if value.name in labels or value.name not in maker:
                    continue
                source = maker[value.name]
                start = f"input {value.name}" if source is None else source.name
                crosses = source is not None and source.stage != placed.stage
                style = (
                    f" [label={_quoted(f'%{value.name}', shown_bytes(value.type.nbytes))}, style=bold, "
                    f"color={_quoted('#b03a2e')}]"
                    if crosses
                    else ""
                )
                arrows.append(f"  {_quoted(start)} -> {_quoted(placed.name)}{style};")
            maker |= {v.name: placed for v in placed.op.outs}
    for stage, boxes in clusters.items():
        if stage is None:
            yield from (f"  {box}" for box in boxes)
            continue
        places = " ".join(module.devices_of(stage)) if stage < len(module.stages) else ""
        yield f"  subgraph {_quoted(f'cluster_s{stage}')} {{"
        yield f"    label={_quoted(f'stage {stage}' + (f' on {places}' if places else ''))};"
        yield f'    style="filled,rounded"; color={_quoted(_COLOURS[stage % len(_COLOURS)])};'
        yield from (f"    {box}" for box in boxes)
        yield "  }"
    yield from arrows
    yield "}"


def _box(placed: Placed, labels: Mapping[str, str]) -> str:
    op = placed.op
    variables = [f"@{op.var}"] if "var" in op.attrs else []
    operands = " ".join([*variables, *(labels[v.name] for v in dict.fromkeys(op.ins) if v.name in labels)])
    results = [f"%{v.name} {v.type}" for v in op.outs[:1]]
    label = _quoted(" ".join(filter(None, [op.kind, operands])), *results)
    return (
        f"{_quoted(placed.name)} [label={label}, "
        f"tooltip={_quoted(' '.join(filter(None, [op.loc, placed.kernel])) or op.kind)}];"
    )


def _quoted(*lines: str) -> str:
    """Return a string of DOT whose lines stand below each other."""
    return '"' + "\\n".join(line.replace("\\", "\\\\").replace('"', '\\"') for line in lines) + '"'
