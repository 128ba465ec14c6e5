"""A graph as text: one line per operation, and beside it rails along which its values flow.

    ○      input  %x f32[32,64]
    ├─●    layer_norm  %h f32[32,64]  k0
    │ ●    matmul  %q f32[32,64]  @w  k1
    ●─╯    add  %y f32[32,64]  k1

In: a graph. Out: FlowLines. `●` is an operation, `○` an input; a rail runs down from the operation that makes a value
to its last use. `├` and `┤` use a value that is used again below. `╯` and `╰` use it for the last time. `╮` and `╭` are
further results. A rail that only passes behind is drawn through. `■` is an operation without a rail below: it changes a
variable, or its results leave the graph. An operation continues the rail of an operand that ends in it. So a chain is
one straight rail, with a residual connection on the rail beside it.

Operands without a rail are named: variables, constants, inputs where there are many, and values for which no rail was
left (`most`). Backward graphs have many of these, because they use everything that was saved. Reads of variables and
constants have no lines of their own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count

from penstock.ir.attrs import print_literal
from penstock.ir.graph import Graph, Op, Value

MOST_RAILS = 12
# More inputs than these are named where they are used.
_FEW = 3
_HIDDEN = ("var", "kernel", "of", "stage", "mesh", "sharding", "library", "packed")


@dataclass(frozen=True)
class FlowLine:
    """A line of the drawing.

    `op` is None for an input. `named` are operands without a rail, `result` the values it makes. `saved` says whether
    it is kept for the backward graph, `returned` whether it is an output.
    """

    rails: str
    op: Op | None
    kind: str
    result: tuple[Value, ...]
    named: tuple[str, ...]
    kernel: str
    saved: bool
    returned: bool


def draw(graph: Graph, most: int = MOST_RAILS) -> list[FlowLine]:
    """Return the lines of a graph, in the order of its operations."""
    quiet = {v: name for op in graph.ops if (name := told_operand(op)) is not None for v in op.outs}
    shown = [op for op in graph.ops if not all(v in quiet for v in op.outs) or not op.outs]
    uses: dict[Value, int] = {}
    for i, op in enumerate(shown):
        uses |= dict.fromkeys(op.ins, i)
    rails = _Rails(uses, most)
    saved, returned = set(graph.saved), set(graph.outs)
    lines = []
    for value in graph.ins if len(graph.ins) <= _FEW else ():
        drawn = rails.begin(value)
        lines.append(FlowLine(drawn, None, "input", (value,), (), "", value in saved, value in returned))
    for i, op in enumerate(shown):
        operands = dict.fromkeys(op.ins)
        named = tuple(quiet.get(v, f"%{v.name}") for v in operands if v in quiet or not rails.has(v))
        drawn = rails.step(i, op)
        kept = bool(saved.intersection(op.outs)), bool(returned.intersection(op.outs))
        lines.append(
            FlowLine(drawn, op, op.kind, op.outs, (*_details(op), *named), str(op.attrs.get("kernel", "")), *kept)
        )
    width = max((len(line.rails) for line in lines), default=0)
    return [replace(line, rails=line.rails.ljust(width)) for line in lines]


def told_operand(op: Op) -> str | None:
    """Return the label of a read of a variable or a single constant, which have no lines of their
    own; None for others.
    """
    if op.kind == "read":
        return f"@{op.var}"
    if op.kind == "const" and not isinstance(op.attrs["value"], tuple):
        return print_literal(op.attrs["value"])
    return None


def _details(op: Op) -> Iterator[str]:
    if "var" in op.attrs:
        yield f"@{op.var}"
    for name, value in op.attrs.items():
        if name not in _HIDDEN:
            text = print_literal(value)
            yield f"{name}={text if len(text) <= 24 else text[:21] + '...'}"


class _Rails:
    """The value that each rail carries; None where a rail is free."""

    def __init__(self, uses: Mapping[Value, int], most: int) -> None:
        self._uses, self._most = uses, most
        self._carried: list[Value | None] = []

    def has(self, value: Value) -> bool:
        """Return whether a value has a rail."""
        return value in self._carried

    def begin(self, value: Value) -> str:
        """Draw the row of an input, which has a rail from here on, if it is used at all."""
        at = self._free(())
        flows = value in self._uses and at < self._most
        drawn = self._row(at, "○" if flows else "□", {})
        if flows:
            self._take(at, value)
        return drawn

    def step(self, position: int, op: Op) -> str:
        """Draw the row of an operation, whose results have rails from here on, where they are used below."""
        carried = {i: value for i, value in enumerate(self._carried) if value is not None and value in op.ins}
        ended = [i for i, value in carried.items() if self._uses[value] == position]
        at = ended[0] if ended else self._free(())
        begun: dict[int, Value] = {}
        for value in (v for v in op.outs if v in self._uses):
            rail = self._free([at, *begun]) if begun else at
            if rail < self._most:
                begun[rail] = value
        joints = {**dict.fromkeys(carried, _USED), **dict.fromkeys(ended, _ENDED), **dict.fromkeys(begun, _BEGUN)}
        joints.pop(at, None)
        drawn = self._row(at, "●" if begun else "■", joints)
        for i in ended:
            self._carried[i] = None
        for rail, value in begun.items():
            self._take(rail, value)
        while self._carried and self._carried[-1] is None:
            self._carried.pop()
        return drawn

    def _free(self, excluded: Collection[int]) -> int:
        """Return the first rail that carries nothing."""
        return next(i for i in count() if i not in excluded and (i >= len(self._carried) or self._carried[i] is None))

    def _take(self, rail: int, value: Value) -> None:
        self._carried += [None] * (rail + 1 - len(self._carried))
        self._carried[rail] = value

    def _row(self, at: int, mark: str, joints: Mapping[int, str]) -> str:
        """Draw one line of rails: the mark, and a bar from it to every rail it touches.

        A joint is three characters: its shape at the left end of the bar, within it and at the right end.
        """
        first, last = min([at, *joints]), max([at, *joints])
        cells = []
        for i in range(max(len(self._carried), last + 1)):
            if i == at:
                cell = mark
            elif i in joints:
                cell = joints[i][0 if i == first else 2 if i == last else 1]
            elif i < len(self._carried) and self._carried[i] is not None:
                cell = "│"
            else:
                cell = "─" if first < i < last else " "
            cells.append(cell + ("─" if first <= i < last else " "))
        return "".join(cells).rstrip()


_USED, _ENDED, _BEGUN = "├┼┤", "╰┴╯", "╭┬╮"
