"""Building blocks of HTML for notebooks, and the fragment that shows a module.

In: data. Out: a fragment without scripts, styles of its own or links.

All text is escaped. Long parts are cut, with the number of lines or rows that are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from html import escape

from penstock.ir.graph import Module
from penstock.ir.text import print_module
from penstock.support.errors import PenstockError
from penstock.support.words import counted

from .views.schedule_grid import format_grid

_MOST_ROWS, _MOST_LINES = 60, 300
# Schedules of more ranks or microbatches are too large for a picture.
_MOST_RANKS, _MOST_MICROBATCHES = 32, 32


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table of text cells. Rows beyond sixty are only counted."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows[:_MOST_ROWS]
    )
    more = (
        f'<tr><td colspan="{len(header)}">and {counted(len(rows) - _MOST_ROWS, "more row")}</td></tr>'
        if len(rows) > _MOST_ROWS
        else ""
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}{more}</tbody></table>"


def title(text: str) -> str:
    """Return a line in bold."""
    return f"<div><b>{escape(text)}</b></div>"


def line(text: str) -> str:
    """Return a line of text."""
    return f"<div>{escape(text)}</div>"


def folded(summary: str, text: str) -> str:
    """Return preformatted text that is folded below a summary."""
    lines = text.split("\n")
    more = f"\n... {counted(len(lines) - _MOST_LINES, 'more line')}" if len(lines) > _MOST_LINES else ""
    return (
        f"<details><summary>{escape(summary)}</summary>"
        f"<pre>{escape(chr(10).join(lines[:_MOST_LINES]) + more)}</pre></details>"
    )


# ------------------------------------------------------------------------------------------------ modules


def describe(module: Module) -> str:
    """Describe a module in one line."""
    operations = sum(len(graph.ops) for graph in module.graphs.values())
    roles = Counter(var.role for var in module.vars.values())
    parts = [counted(len(module.stages), "stage")] if module.stages else []
    parts += [f"{counted(operations, 'operation')} in {counted(len(module.graphs), 'graph')}"]
    parts += [counted(number, "parameter" if role == "param" else f"{role} variable") for role, number in roles.items()]
    if module.schedule is not None:
        parts.append(f"schedule {module.schedule.name} of {counted(module.schedule.microbatches, 'microbatch')}")
    return f"module {module.name}: {', '.join(parts)}; facts: {', '.join(module.facts) or 'none'}"


def module_html(module: Module) -> str:
    """Return stages, graphs and edges of a module, and its schedule and text folded."""
    return f"<div>{''.join(_module(module))}</div>"


def _module(module: Module) -> Iterator[str]:
    yield title(describe(module))
    if module.stages:
        rows = [
            (stage.index, " ".join(module.devices_of(stage.index)), *_stage(module, stage.index))
            for stage in module.stages
        ]
        yield table(("stage", "devices", "operations", "parameters", "elements"), rows)
    graphs = [
        (graph.name, len(graph.ops), len(graph.ins), len(graph.outs), len(graph.saved))
        for graph in module.graphs.values()
    ]
    yield table(("graph", "operations", "inputs", "outputs", "saved"), graphs)
    if module.edges:
        yield table(
            ("edge", "phase", "values"),
            [(f"{e.src}>{e.dst}", e.phase, ", ".join(f"%{v.name} {v.type}" for v in e.values)) for e in module.edges],
        )
    if module.schedule is not None:
        yield folded("schedule", _grid(module))
    yield folded("text", print_module(module).rstrip())


def _stage(module: Module, stage: int) -> tuple[int, int, int]:
    operations = sum(len(graph.ops) for name, graph in module.graphs.items() if name.startswith(f"s{stage}."))
    params = [var for var in module.vars.values() if var.stage == stage and var.role == "param"]
    return operations, len(params), sum(var.type.size for var in params if var.type.is_static)


def _grid(module: Module) -> str:
    schedule = module.schedule
    assert schedule is not None
    if len(schedule.ranks) > _MOST_RANKS or schedule.microbatches > _MOST_MICROBATCHES:
        return (
            f"{counted(len(schedule.ranks), 'rank')}, {counted(schedule.microbatches, 'microbatch')} per batch: "
            "penstock inspect --schedule"
        )
    try:
        return format_grid(schedule, 2)
    except PenstockError as error:
        # The user may inspect a schedule because it waits for ever: its error is shown in its place.
        return str(error)
