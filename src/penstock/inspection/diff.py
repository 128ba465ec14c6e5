"""The differences between two modules, by name.

Each line is compared with the line of the same name, wherever it stands.

In: two modules. Out: the differences as data (`compare`) or as lines of text (`differences`), part by part: cluster,
stages, variables and edges; then graph after graph; schedule; notes. In the text `-` is gone, `+` is new, `~` has
changed, and the changed words are marked [-before-] {+after+}. An operation goes by the names of its results; one
without results goes by its kind and variable. Operations that moved to another graph, as where a model is cut into
stages, are counted, and listed only where they also changed.

Limits: a renamed line is gone and new. Lines that only stand elsewhere in their part are counted, not named.
"""

from __future__ import annotations

import difflib
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from penstock.ir.graph import Graph, Module, Op
from penstock.ir.memo import Derived
from penstock.ir.text import print_frame, print_head, print_op, print_schedule, print_var
from penstock.support.gc_pause import nothing_collected
from penstock.support.words import counted

# A word is a name or number, or the text between two of them. Longer runs of unchanged words are cut in the middle.
_WORDS = re.compile(r"[(),]|\s+|[^\s(),]+")
_SAME_WORDS = 40
# This many lines that changed alike are shown as one.
_ALIKE = 5
# The number of words that name a line of a module's head; two for kinds that are not here.
_NAMED_BY = {"module": 1, "link": 3, "edge": 3}
_MOST_WORDS = 2000

# The lines of a part by name, in order.
Named = Mapping[object, str]
Operations = Mapping[object, Op]
# Two lines as one, in parts: words that both have (""), that only the first has (-), that only the second has (+).
Words = list[tuple[str, str]]

T = TypeVar("T", str, Op)


@dataclass(frozen=True, slots=True)
class Lines(Generic[T]):
    """The differences between the lines, or operations, of one part.

    `moved` counts those that stand in another place.
    """

    gone: tuple[T, ...] = ()
    changed: tuple[tuple[T, T], ...] = ()
    new: tuple[T, ...] = ()
    moved: int = 0

    def __bool__(self) -> bool:
        return bool(self.gone or self.changed or self.new or self.moved)


@dataclass(frozen=True, slots=True)
class GraphDifference:
    """The differences of one graph.

    `mark` is ~ for a graph that both modules have, - for one that is gone, + for a new one. `went` and `came` count the
    operations that moved to other graphs or came from them, by the name of that graph.
    """

    name: str
    mark: str
    frame: Lines[str]
    ops: Lines[Op]
    went: Mapping[str, int]
    came: Mapping[str, int]

    def __bool__(self) -> bool:
        return bool(self.frame or self.ops or self.went or self.came)


@dataclass(frozen=True, slots=True)
class ModuleDifference:
    """The differences between two modules. `moved_graphs` counts the graphs that stand in another place."""

    head: Lines[str]
    graphs: tuple[GraphDifference, ...]
    moved_graphs: int
    schedule: Lines[str]
    notes: Lines[str]


def compare(a: Module, b: Module) -> ModuleDifference:
    """Compare two modules and return the differences as data. Objects that the modules share are skipped."""
    shared = a.schedule is b.schedule
    programs: list[Iterable[str]] = [
        print_schedule(m.schedule) if m.schedule is not None and not shared else [] for m in (a, b)
    ]
    return ModuleDifference(
        _lines(_head(a, b), _head(b, a)),
        tuple(_graphs(a.graphs, b.graphs)),
        _moved(list(a.graphs), list(b.graphs)),
        _lines(*(_named((line for line in lines if line.strip() != "}"), _schedule_name) for lines in programs)),
        _lines(*(_named((f"note {n.origin}: {n.text}" for n in m.notes), str) for m in (a, b))),
    )


def differences(a: Module, b: Module) -> Iterator[str]:
    """Yield the lines that lead from one module to the other; none where they print alike."""
    with nothing_collected():
        lines = list(_listed(compare(a, b)))
    yield from lines


def _listed(difference: ModuleDifference) -> Iterator[str]:
    yield from _difference_lines(difference.head, str, "", "line")
    for graph in difference.graphs:
        yield f"{graph.mark} graph @{graph.name}"
        yield from _difference_lines(graph.frame, str, "  ", "line")
        sent = [f"  > {counted(count, 'operation')} now in @{target}" for target, count in graph.went.items()]
        received = [f"  < {counted(count, 'operation')} before in @{source}" for source, count in graph.came.items()]
        yield from _difference_lines(graph.ops, print_op, "  ", "operation", (*sent, *received))
    if difference.moved_graphs:
        yield f"~ {counted(difference.moved_graphs, 'graph')} in another place"
    yield from _difference_lines(difference.schedule, str, "", "line")
    yield from _difference_lines(difference.notes, str, "", "line")


def _difference_lines(
    lines: Lines[T], show: Callable[[T], str], indent: str, what: str, between: Iterable[str] = ()
) -> Iterator[str]:
    yield from (f"{indent}- {show(line)}" for line in lines.gone)
    yield from between
    yield from _changed([(show(a), show(b)) for a, b in lines.changed], indent, what)
    yield from (f"{indent}+ {show(line)}" for line in lines.new)
    if lines.moved:
        yield f"{indent}~ {counted(lines.moved, what)} in another place"


def _changed(pairs: Sequence[tuple[str, str]], indent: str, what: str) -> Iterator[str]:
    """Yield changed lines, before and after; lines that changed alike are one, where the first of them stands."""
    parts = [words(*pair) for pair in pairs]
    marks = ["".join(_marked(*part) for part in pieces if part[0]) for pieces in parts]
    times = Counter(marks)
    last = {mark: i for i, mark in enumerate(marks)}
    shown: set[str] = set()
    for (line, _), pieces, mark in zip(pairs, parts, marks, strict=True):
        if times[mark] < _ALIKE:
            yield f"{indent}~ {''.join(_marked(*part) for part in pieces)}"
        elif mark not in shown:
            shown.add(mark)
            yield f"{indent}~ {counted(times[mark], what)}, {_start(line)} to {_start(pairs[last[mark]][0])}: {mark}"


def _marked(mark: str, text: str) -> str:
    return {"-": f"[-{text}-]", "+": f"{{+{text}+}}"}.get(mark, text)


def _start(line: str) -> str:
    """Return the beginning of a line, up to its first type or argument, as a name for it."""
    return re.split(r" [:=] |[(,]", line, maxsplit=1)[0]


# ------------------------------------------------------------------------------------------------ lines


def _head_name(line: str) -> object:
    parts = line.split()
    return tuple(parts[: _NAMED_BY.get(parts[0], 2)])


def _schedule_name(line: str) -> object:
    return "schedule" if line.lstrip().startswith("schedule") else line.partition(":")[0]


def _head(module: Module, other: Module) -> Named:
    """Return the lines above the graphs.

    A variable that both modules share as an object has its name alone, and none is listed where they share all: modules
    have many, and passes change few.
    """
    lines = _named(print_head(module), _head_name)
    if module.vars is not other.vars:
        for name, var in module.vars.items():
            lines["var", name] = "" if other.vars.get(name) is var else print_var(var)
    return lines


def _named(lines: Iterable[str], name: Callable[[str], object]) -> dict[object, str]:
    named: dict[object, str] = {}
    times: Counter[object] = Counter()
    for line in lines:
        key = name(line)
        times[key] += 1
        named[key, times[key]] = line.strip()
    return named


def _lines(before: Named, after: Named) -> Lines[str]:
    return Lines(
        tuple(line for key, line in before.items() if key not in after),
        tuple((line, after[key]) for key, line in before.items() if key in after and after[key] != line),
        tuple(line for key, line in after.items() if key not in before),
        _moved(list(before), list(after)),
    )


def _moved(before: Sequence[object], after: Sequence[object]) -> int:
    """Count the keys that have to be moved: all but the longest run of those that stand in the same order."""
    place = {key: i for i, key in enumerate(after)}
    common = [place[key] for key in before if key in place]
    if common == sorted(common):
        return 0
    tails: list[int] = []
    for at in common:
        i = bisect_left(tails, at)
        tails[i : i + 1] = [at]
    return len(common) - len(tails)


# ------------------------------------------------------------------------------------------------ graphs


def _graphs(before: Mapping[str, Graph], after: Mapping[str, Graph]) -> Iterator[GraphDifference]:
    # No operation moved from or to a graph that both modules share, or one whose operations all kept their places.
    a, b = (
        {name: g for name, g in graphs.items() if before.get(name) is not after.get(name)} for graphs in (before, after)
    )
    placed = {
        name: pairs for name, graph in a.items() if name in b and (pairs := _in_place(graph, b[name])) is not None
    }
    old, new = ({name: _operations(graph) for name, graph in graphs.items() if name not in placed} for graphs in (a, b))
    # The graphs that operations may have come from and gone to: those that lost or gained one of that name.
    sources = _elsewhere(old, new)
    targets = _elsewhere(new, old)
    for name in {**a, **b}:
        mark = "-" if name not in b else "~" if name in a else "+"
        frame = _frames(a.get(name), b.get(name))
        if name in placed:
            difference = GraphDifference(name, mark, frame, Lines(changed=tuple(placed[name])), {}, {})
        else:
            difference = GraphDifference(name, mark, frame, *_by_name(name, old, new, sources, targets))
        if difference:
            yield difference


def _in_place(before: Graph, after: Graph) -> list[tuple[Op, Op]] | None:
    """Return the operations that changed, before and after; None where the graphs name different operations."""
    if len(before.ops) != len(after.ops):
        return None
    pairs = [(was, op) for was, op in zip(before.ops, after.ops, strict=True) if was is not op]
    if not all((op.outs and was.outs is op.outs) or _name(was) == _name(op) for was, op in pairs):
        return None
    return [pair for pair in pairs if _prints_otherwise(*pair)]


def _name(op: Op) -> object:
    return tuple(v.name for v in op.outs) if op.outs else (op.kind, op.attrs.get("var"))


_OPERATIONS = Derived[Operations](__name__, "operations")


def _operations(graph: Graph) -> Operations:
    """Return the operations of a graph by name. The graph keeps them: a pass's output is the next pass's input."""
    return graph.keep(_OPERATIONS, _named_operations)


def _named_operations(graph: Graph) -> Operations:
    named: dict[object, Op] = {}
    times: Counter[object] = Counter()
    for op in graph.ops:
        if len(op.outs) == 1:
            named[op.outs[0].name] = op
        else:
            name = _name(op)
            times[name] += 1
            named[name, times[name]] = op
    return named


def _frames(before: Graph | None, after: Graph | None) -> Lines[str]:
    if (
        before is not None
        and after is not None
        and (before.ins, before.outs, before.saved) == (after.ins, after.outs, after.saved)
    ):
        return Lines()
    return _lines(*(_named_frame(graph) if graph is not None else {} for graph in (before, after)))


def _named_frame(graph: Graph) -> Named:
    return {line.split("(")[0].split(" ")[0]: line for line in map(str.strip, print_frame(graph))}


def _prints_otherwise(a: Op, b: Op) -> bool:
    """Return whether two operations print differently.

    Equal ones are compared as text: in Python True is 1, and 0.0 is -0.0.
    """
    if a.line is not None and b.line is not None:
        return a.line != b.line
    return a != b or print_op(a) != print_op(b)


def _elsewhere(graphs: Mapping[str, Operations], others: Mapping[str, Operations]) -> dict[object, str]:
    """Return, for operations that the graph of the same name in `others` lacks, the first graph that has them."""
    first_graph: dict[object, str] = {}
    for name, graph in graphs.items():
        for key in graph.keys() - others.get(name, {}).keys():
            first_graph.setdefault(key, name)
    return first_graph


def _by_name(
    name: str,
    old: Mapping[str, Operations],
    new: Mapping[str, Operations],
    sources: Mapping[object, str],
    targets: Mapping[object, str],
) -> tuple[Lines[Op], Mapping[str, int], Mapping[str, int]]:
    """Return the differences in the operations of a graph, and counts of those that went to and
    came from other graphs.
    """
    before, after = old.get(name, {}), new.get(name, {})
    lost: list[Op] = []
    fresh: list[Op] = []
    changed: list[tuple[Op, Op]] = []
    sent, received = Counter[str](), Counter[str]()
    for key, op in before.items():
        if key not in after:
            if key in targets:
                sent[targets[key]] += 1
            else:
                lost.append(op)
    for key, op in after.items():
        previous = before.get(key)
        if previous is None and key in sources:
            received[sources[key]] += 1
            previous = old[sources[key]][key]
        if previous is None:
            fresh.append(op)
        elif previous is not op and _prints_otherwise(previous, op):
            changed.append((previous, op))
    return Lines(tuple(lost), tuple(changed), tuple(fresh), _moved(list(before), list(after))), sent, received


# ------------------------------------------------------------------------------------------------ words


def words(before: str, after: str, most: int = _MOST_WORDS) -> Words:
    """Return two lines as one, in parts.

    Lines that differ in more words than `most` are not matched word by word: the time of that grows with the square of
    their number.
    """
    old, new = _WORDS.findall(before), _WORDS.findall(after)
    first = _alike(old, new)
    last = _alike(old[first:][::-1], new[first:][::-1])
    middle = _matched(old[first : len(old) - last], new[first : len(new) - last], most)
    return [("", _shortened(old[:first])), *middle, ("", _shortened(old[len(old) - last :]))]


def _alike(old: Sequence[str], new: Sequence[str]) -> int:
    """Count the words that both begin with."""
    return next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))


def _matched(old: list[str], new: list[str], most: int) -> Words:
    if max(len(old), len(new)) > most or {*old}.isdisjoint(new):
        return _replaced(old, new)
    codes = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    return [
        part
        for tag, i, i_end, j, j_end in codes
        for part in ([("", _shortened(old[i:i_end]))] if tag == "equal" else _replaced(old[i:i_end], new[j:j_end]))
    ]


def _replaced(old: list[str], new: list[str]) -> Words:
    return [(mark, _shortened(part)) for mark, part in (("-", old), ("+", new)) if part]


def _shortened(words: list[str]) -> str:
    return "".join(
        words if len(words) <= _SAME_WORDS else [*words[: _SAME_WORDS // 2], " ... ", *words[-_SAME_WORDS // 2 :]]
    )
