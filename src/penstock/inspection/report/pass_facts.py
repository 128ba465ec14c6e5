"""The changes of each pass, by names, as data.

    {"number", "name", "call", "does", "ms", "ops", "changed",
     "parts": [{"title", "mark", "rows", "went", "came", "moved"}, ...]}
    row = [mark, names, text] of a line that is gone (-) or new (+), [~, names, [[mark, text], ...]] of a changed line

`names` are the results of the operations in a row, so that the page finds every pass that touched a value. Operations
whose attributes alone changed show only these; lines that changed alike are one row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from penstock.inspection.diff import Lines, ModuleDifference, T, Words, compare, words
from penstock.ir.attrs import Attr, print_literal
from penstock.ir.graph import Module, Op
from penstock.ir.text import print_op
from penstock.passes.manager import count_ops
from penstock.passes.pipelines import PASSES

from .material import PassStep
from .strings import Strings

# Lines in which more words changed are not matched by words: schedules have a view of their own.
_MOST_WORDS = 300
# This many lines that changed alike are one row, as in `penstock diff`.
_ALIKE = 5


def pass_facts(steps: Sequence[PassStep], strings: Strings) -> list[dict[str, Any]]:
    """Return one entry per step; the first describes the pipeline's input."""
    facts = []
    before: Module | None = None
    for step in steps:
        changed = step.module is not None and step.module is not before
        after = step.module if step.module is not None else before
        definition = PASSES.get(step.name)
        facts.append(
            {
                "number": step.number,
                "name": step.name,
                "call": step.call,
                "does": definition.doc if definition is not None else "",
                "ms": step.ms,
                "ops": count_ops(after) if after is not None else 0,
                "facts": list(after.facts) if after is not None else [],
                "changed": changed,
                "parts": list(_parts(compare(before, after), strings))
                if changed and before is not None and after is not None
                else [],
            }
        )
        before = after
    return facts


def _parts(difference: ModuleDifference, strings: Strings) -> Iterator[dict[str, Any]]:
    def part(title: str, mark: str, rows: list[Any], moved: int, **more: Any) -> dict[str, Any]:
        return {"title": title, "mark": mark, "rows": rows, "moved": moved, "went": {}, "came": {}} | more

    if difference.head:
        yield part("head", "~", list(_lines(difference.head)), difference.head.moved)
    for graph in difference.graphs:
        rows = [*_lines(graph.frame), *_ops(graph.ops, strings)]
        yield part(f"@{graph.name}", graph.mark, rows, graph.ops.moved, went=dict(graph.went), came=dict(graph.came))
    for title, lines in (("schedule", difference.schedule), ("notes", difference.notes)):
        if lines:
            yield part(title, "~", list(_lines(lines)), lines.moved)


def _lines(lines: Lines[str]) -> Iterator[list[Any]]:
    return _rows(lines, str, lambda line: [], _begin, lambda a, b: words(a, b, _MOST_WORDS), lambda line, parts: parts)


def _ops(lines: Lines[Op], strings: Strings) -> Iterator[list[Any]]:
    return _rows(
        lines, print_op, lambda op: [strings[v.name] for v in op.outs] or [strings[op.var]], _called, _op_words, _whole
    )


def _rows(
    lines: Lines[T],
    show: Callable[[T], str],
    names: Callable[[T], list[int]],
    called: Callable[[T], str],
    say: Callable[[T, T], Words],
    whole: Callable[[T, Words], Words],
) -> Iterator[list[Any]]:
    yield from (["-", names(line), show(line)] for line in lines.gone)
    alike: dict[tuple[tuple[str, str], ...], list[tuple[T, Words]]] = {}
    for a, b in lines.changed:
        parts = say(a, b)
        alike.setdefault(tuple([part for part in parts if part[0]]), []).append((b, parts))
    marked: tuple[tuple[str, str], ...]
    for marked, group in alike.items():
        if len(group) < _ALIKE:
            yield from (["~", names(line), whole(line, parts)] for line, parts in group)
        else:
            about = f"{len(group)} alike, {called(group[0][0])} to {called(group[-1][0])}: "
            yield ["~", [n for line, _ in group for n in names(line)], [("", about), *marked]]
    yield from (["+", names(line), show(line)] for line in lines.new)


def _begin(line: str) -> str:
    return line.split(" : ", 1)[0].split("(", 1)[0]


def _called(op: Op) -> str:
    return f"%{op.outs[0].name}" if op.outs else f"{op.kind} @{op.var}"


def _op_words(a: Op, b: Op) -> Words:
    """Return the attributes that changed where nothing else did, and otherwise all words of the two lines."""
    if a.ins != b.ins or a.outs != b.outs or a.kind != b.kind or a.loc != b.loc:
        return words(print_op(a), print_op(b), _MOST_WORDS)
    old, new = a.attrs, b.attrs
    # Most attributes are the same object in both.
    removed = [
        ("-", f"{k}={print_literal(v)}")
        for k, v in old.items()
        if new.get(k) is not v and not _is_printed(v, new.get(k))
    ]
    added = [
        ("+", f"{k}={print_literal(v)}")
        for k, v in new.items()
        if old.get(k) is not v and not _is_printed(v, old.get(k))
    ]
    return removed + added


def _is_printed(value: Attr, other: Attr | None) -> bool:
    return other is not None and print_literal(value) == print_literal(other)


def _whole(op: Op, parts: Words) -> Words:
    """Insert the operation before its changed attributes, and spaces between them."""
    if parts and not parts[0][0]:
        return parts
    begin = f"{', '.join([f'%{v.name}' for v in op.outs])} = " if op.outs else ""
    return [("", f"{begin}{op.kind} "), *(text for part in parts for text in (part, ("", " ")))]
