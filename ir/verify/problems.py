"""The problems that a checker reports, and the one error that a list of them becomes: place, finding and expectation,
lines around it, what would help."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from penstock.ir.graph import Graph
from penstock.ir.schedule import Action
from penstock.ir.text import print_op
from penstock.support.errors import DoesNotFit, VerifyError

LIMIT = 20
AROUND = 3


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem that a checker reports. `where` names file, graph and op, or rank, step and action; `what` says found
    and expected; `excerpt` shows the lines around."""

    where: str
    what: str
    excerpt: str = ""
    hint: str = ""
    # The module is right, but a device is too small for it; the bytes that it would have to have, by its name.
    memory: bool = False
    needs: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        parts = (
            [f"{self.where}: {self.what}"]
            + ([self.excerpt] if self.excerpt else [])
            + ([f"  hint: {self.hint}"] if self.hint else [])
        )
        return "\n".join(parts)


def to_error(name: str, problems: Sequence[Problem]) -> VerifyError | DoesNotFit:
    """Return one error for all problems of module `name`: DoesNotFit when all of them are of memory."""
    needs = dict(need for problem in problems for need in problem.needs)
    kind = partial(DoesNotFit, needs=needs) if all(problem.memory for problem in problems) else VerifyError
    if len(problems) == 1:
        (only,) = problems
        return kind(
            only.what + (f"\n{only.excerpt}" if only.excerpt else ""), where=f"@{name} {only.where}", hint=only.hint
        )
    more = " (the first ones)" if len(problems) == LIMIT else ""
    listed = "\n".join(f"{i}. {problem}" for i, problem in enumerate(problems, 1))
    return kind(f"{len(problems)} problems{more}\n{listed}", where=f"@{name}")


def window(lines: Iterable[str], at: int) -> str:
    """Return the lines around number `at`, with that one marked. Only these lines are formatted, so big graphs cost
    nothing."""
    shown = []
    for i, line in enumerate(lines):
        if i > at + AROUND:
            break
        if i >= at - AROUND:
            shown.append(f"  {'>' if i == at else ' '} {i:5d} | {line}")
    return "\n".join(shown)


def op_window(graph: Graph, at: int) -> str:
    """Return operation `at` of a graph and its neighbours, as text."""
    first = max(0, at - AROUND)
    lines = [print_op(op).strip() for op in graph.ops[first : at + AROUND + 1]]
    return "\n".join(f"  {'>' if first + i == at else ' '} {first + i:5d} | {line}" for i, line in enumerate(lines))


def step_window(actions: Sequence[Action], at: int) -> str:
    """Return step `at` of a rank's program and its neighbours."""
    return window(map(str, actions), at)


def op_place(graph: Graph, i: int) -> str:
    """Name the place of an operation: its graph, its number, its kind and its source."""
    op = graph.ops[i]
    return f"@{graph.name} op {i} ({op.kind}{f' from {op.loc}' if op.loc else ''})"
