"""Tests of drawings of graphs: a reader that follows the rails from line to line finds how values flow."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.drawn_modules import graphs

from penstock.inspection.flow import FlowLine, draw
from penstock.inspection.subject import Subject
from penstock.inspection.views.text import show_flow
from penstock.ir.graph import Graph, Value

_DOWN, _UP = "●○│├┼┤╭┬╮", "│├┼┤╰┴╯"


class BrokenRailError(Exception):
    """A rail that comes from nowhere."""


def read_off(rows: Sequence[str]) -> set[tuple[int, int]]:
    """(maker, user) for every connection that the lines of a drawing make."""
    found = set()
    for y, row in enumerate(rows):
        (at,) = [x for x, glyph in enumerate(row) if glyph in "●■○□"]
        bar = [at]
        for step in (-1, 1):
            x = at
            while 0 <= x + step < len(row) and (
                row[x + step] == "─" or (row[x + step] in "│├┼┤╰┴╯╭┬╮" and _bar_goes_on(row, x + step, step))
            ):
                x += step
                bar.append(x)
        for x in bar:
            if row[x] in _UP.replace("│", "") or (x == at and row[at] in "●■" and _comes_down(rows, y, x)):
                found.add((_maker(rows, y, x), y))
    return found


def _bar_goes_on(row: str, x: int, step: int) -> bool:
    """Whether the bar reaches this rail at all: there is a dash between."""
    return row[x - step] == "─"


def _comes_down(rows: Sequence[str], y: int, x: int) -> bool:
    return y > 0 and x < len(rows[y - 1]) and rows[y - 1][x] in _DOWN


def _maker(rows: Sequence[str], y: int, x: int) -> int:
    """Up the rail, to the row of what it comes from."""
    while y > 0:
        y -= 1
        if rows[y][x] in "●○╭┬╮":
            return y
        if rows[y][x : x + 1] not in tuple("│├┼┤"):
            break
    raise BrokenRailError(f"in row {y}, column {x}: {rows[y]}")


def flows(graph: Graph, lines: Sequence[FlowLine]) -> set[tuple[int, int]]:
    """The same from the graph: an operand that is not named has a rail."""
    rows: dict[Value, int] = {v: y for y, line in enumerate(lines) for v in line.result}
    return {
        (rows[v], y)
        for y, line in enumerate(lines)
        if line.op is not None
        for v in line.op.ins
        if v in rows and f"%{v.name}" not in line.named
    }


@settings(deadline=None)
@given(graphs("g"), st.integers(1, 6))
def test_rails_say_how_values_flow(graph: Graph, most: int) -> None:
    lines = draw(graph, most)
    assert [line.op for line in lines if line.op is not None] == [
        op for op in graph.ops if op.kind not in ("read", "const")
    ]
    assert read_off([line.rails for line in lines]) == flows(graph, lines)
    assert all(len(line.rails) <= 2 * (most + 1 + max((len(op.outs) for op in graph.ops), default=0)) for line in lines)


def test_every_operand_has_a_rail_or_is_named(bundle: Subject) -> None:
    for graph in bundle.module.graphs.values():
        lines = draw(graph)
        drawn = read_off([line.rails for line in lines])
        assert drawn == flows(graph, lines)
        rows = {v: y for y, line in enumerate(lines) for v in line.result}
        reads = {v: f"@{op.var}" for op in graph.ops if op.kind == "read" for v in op.outs}
        constants = {v for op in graph.ops if op.kind == "const" for v in op.outs if v not in rows}
        for y, line in enumerate(lines):
            for v in line.op.ins if line.op is not None else ():
                assert v in constants or reads.get(v, f"%{v.name}") in line.named or (rows[v], y) in drawn


def test_a_rail_that_is_cut_or_joined_wrongly_is_noticed(bundle: Subject) -> None:
    graph = bundle.module.graphs["s0.F"]
    lines = draw(graph)
    rows = [line.rails for line in lines]
    told = flows(graph, lines)
    changed = [(y, x) for y, row in enumerate(rows) for x, glyph in enumerate(row) if glyph in "├╯"]
    assert changed
    for y, x in changed:
        wrong = [*rows]
        wrong[y] = rows[y][:x] + "│" + rows[y][x + 1 :]
        assert _reads_otherwise(wrong, told)


def _reads_otherwise(rows: Sequence[str], told: set[tuple[int, int]]) -> bool:
    try:
        return read_off(rows) != told
    except BrokenRailError:
        return True


def test_a_residual_is_a_rail_beside_the_branch(bundle: Subject) -> None:
    text = show_flow("s0.F", draw(bundle.module.graphs["s0.F"]))
    shown = {line.split("%")[1].split(" ")[0]: line for line in text.splitlines() if "%" in line}
    assert shown["h.0.ln_1"].startswith("├─● ")
    assert shown["h.0.attn.residual"].startswith("●─╯ ")
    assert "@h.0.attn.qkv.weight" in shown["h.0.attn.qkv.product"]


def test_lines_are_no_wider_than_the_terminal(bundle: Subject) -> None:
    lines = draw(bundle.module.graphs["s0.B"])
    assert max(map(len, show_flow("s0.B", lines).splitlines())) > 100
    assert max(map(len, show_flow("s0.B", lines, 100).splitlines())) <= 100
