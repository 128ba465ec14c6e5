"""What differs between two modules, by name: every line is compared with the one of the same name, wherever either stands.

In: two modules. Out: lines of text, part by part: cluster, stages, variables and edges; then graph after graph; schedule; notes. `-` is gone, `+` is
new, `~` has changed, with the words that did marked [-before-] {+after+}. Operations go by the names of their results, those that have none by what
they do to which variable. What went from one graph into others, as where a model is cut into stages, is counted, and listed only where it changed on the way.

Limits: what was renamed is gone and new. Of lines that only stand elsewhere in their part the number is told, not which.
"""

from __future__ import annotations

import difflib
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from penstock.ir.graph import Graph, Module, Op
from penstock.ir.text import print_frame, print_head, print_op, print_schedule
from penstock.ir.words import counted

# A word is a name or number, or what stands between two of them. Longer stretches of unchanged words are cut in the middle.
_WORDS = re.compile(r"[(),]|\s+|[^\s(),]+")
_SAME_WORDS = 40
# So many lines that changed alike are shown as one.
_ALIKE = 5
# What names a line of a module's head, in words; two for what is not here.
_NAMED_BY = {"module": 1, "link": 3, "edge": 3}
# Of lines that differ in more words than this, words are not matched: that takes up to the square of their number.
_MOST_WORDS = 2000

# The lines of a part by what names them, in their order.
Lines = Mapping[object, str]


def differences(a: Module, b: Module) -> Iterator[str]:
    """Lines that say how to get from one module to the other; none where they print alike."""
    yield from _changes(_named(print_head(module), _head_name) for module in (a, b))
    yield from _graphs(a.graphs, b.graphs)
    programs: list[Iterable[str]] = [print_schedule(m.schedule) if m.schedule is not None else [] for m in (a, b)]
    yield from _changes(_named((line for line in lines if line.strip() != "}"), _schedule_name) for lines in programs)
    yield from _changes(_named((f"note {n.origin}: {n.text}" for n in m.notes), str) for m in (a, b))


def _head_name(line: str) -> object:
    words = line.split()
    return tuple(words[: _NAMED_BY.get(words[0], 2)])


def _schedule_name(line: str) -> object:
    return "schedule" if line.lstrip().startswith("schedule") else line.partition(":")[0]


def _named(lines: Iterable[str], name: Callable[[str], object]) -> dict[object, str]:
    found: dict[object, str] = {}
    times: Counter[object] = Counter()
    for line in lines:
        key = name(line)
        times[key] += 1
        found[key, times[key]] = line.strip()
    return found


def _changes(sides: Iterable[Lines], indent: str = "") -> Iterator[str]:
    before, after = sides
    yield from (f"{indent}- {line}" for key, line in before.items() if key not in after)
    yield from _changed([(line, after[key]) for key, line in before.items() if key in after and after[key] != line], indent, "line")
    yield from (f"{indent}+ {line}" for key, line in after.items() if key not in before)
    yield from _order(list(before), list(after), indent, "line")


def _changed(pairs: Sequence[tuple[str, str]], indent: str, what: str) -> Iterator[str]:
    """Lines before and after; those that changed alike together, where the first of them stands."""
    parts = [_parts(*pair) for pair in pairs]
    marks = ["".join(part for part, is_marked in each if is_marked) for each in parts]
    times = Counter(marks)
    last = {mark: i for i, mark in enumerate(marks)}
    told: set[str] = set()
    for (line, _), each, mark in zip(pairs, parts, marks, strict=True):
        if times[mark] < _ALIKE:
            yield f"{indent}~ {''.join(part for part, _ in each)}"
        elif mark not in told:
            told.add(mark)
            yield f"{indent}~ {counted(times[mark], what)}, {_start(line)} to {_start(pairs[last[mark]][0])}: {mark}"


def _start(line: str) -> str:
    """What a line begins with, to name it by: as far as its first type or argument."""
    return re.split(r" [:=] |[(,]", line, maxsplit=1)[0]


def _order(before: Sequence[object], after: Sequence[object], indent: str, what: str) -> Iterator[str]:
    """How many have to be moved: all but the longest run of those that stand in the same order."""
    place = {key: i for i, key in enumerate(after)}
    common = [place[key] for key in before if key in place]
    tails: list[int] = []
    for at in common:
        i = bisect_left(tails, at)
        tails[i : i + 1] = [at]
    moved = len(common) - len(tails)
    if moved:
        yield f"{indent}~ {counted(moved, what)} in another place"


# ------------------------------------------------------------------------------------------------ graphs


class _Operations:
    """The operations of one graph by name."""

    def __init__(self, graph: Graph) -> None:
        self.named: dict[object, Op] = {}
        times: Counter[object] = Counter()
        for op in graph.ops:
            key: object = tuple(v.name for v in op.outs)
            if not op.outs:
                key = op.kind, op.attrs.get("var")
                times[key] += 1
                key = key, times[key]
            self.named[key] = op
        self.frame: dict[object, str] = {line.split("(")[0].split(" ")[0]: line for line in map(str.strip, print_frame(graph))}


def _graphs(before: Mapping[str, Graph], after: Mapping[str, Graph]) -> Iterator[str]:
    old, new = ({name: _Operations(graph) for name, graph in graphs.items()} for graphs in (before, after))
    # Where operations may have come from, and gone to: graphs that have no more, or did not have yet, one of that name.
    gone = _elsewhere(old, new)
    come = _elsewhere(new, old)
    for name in [*before, *(name for name in after if name not in before)]:
        lines = list(_one_graph(name, old, new, gone, come))
        if lines:
            yield f"{'~' if name in old and name in new else '-' if name in old else '+'} graph @{name}"
            yield from lines
    yield from _order(list(before), list(after), "", "graph")


def _elsewhere(these: Mapping[str, _Operations], others: Mapping[str, _Operations]) -> dict[object, str]:
    """Of operations that the graph of the same name on the other side has not: the first graph that has them."""
    found: dict[object, str] = {}
    for name, graph in these.items():
        there = others[name].named if name in others else {}
        for key in graph.named:
            if key not in there:
                found.setdefault(key, name)
    return found


def _one_graph(
    name: str, old: Mapping[str, _Operations], new: Mapping[str, _Operations], gone: Mapping[object, str], come: Mapping[object, str]
) -> Iterator[str]:
    a, b = old.get(name), new.get(name)
    frames: list[Lines] = [graph.frame if graph else {} for graph in (a, b)]
    yield from _changes(frames, "  ")
    named: list[Mapping[object, Op]] = [graph.named if graph else {} for graph in (a, b)]
    before, after = named
    left = {key: op for key, op in before.items() if key not in after}
    yield from (f"  - {print_op(op)}" for key, op in left.items() if key not in come)
    moved = Counter(come[key] for key in left if key in come)
    yield from (f"  > {counted(count, 'operation')} now in @{target}" for target, count in moved.items())
    # Each operation with what it was, here or where it came from.
    known = [(before[key] if key in before else old[gone[key]].named[key], op) for key, op in after.items() if key in before or key in gone]
    arrived = Counter(gone[key] for key in after if key not in before and key in gone)
    yield from (f"  < {counted(count, 'operation')} before in @{source}" for source, count in arrived.items())
    # As text: to Python True is 1, and 0.0 is -0.0.
    lines = [(print_op(was), print_op(op)) for was, op in known]
    yield from _changed([pair for pair in lines if pair[0] != pair[1]], "  ", "operation")
    yield from (f"  + {print_op(op)}" for key, op in after.items() if key not in before and key not in gone)
    yield from _order(list(before), list(after), "  ", "operation")


# ------------------------------------------------------------------------------------------------ words


def _parts(before: str, after: str) -> list[tuple[str, bool]]:
    """One line for two, in parts: the words that changed are marked."""
    old, new = _WORDS.findall(before), _WORDS.findall(after)
    first = _alike(old, new)
    last = _alike(old[first:][::-1], new[first:][::-1])
    middle = _matched(old[first : len(old) - last], new[first : len(new) - last])
    return [(_shortened(old[:first]), False), *middle, (_shortened(old[len(old) - last :]), False)]


def _alike(old: Sequence[str], new: Sequence[str]) -> int:
    """How many words both begin with."""
    count = 0
    for a, b in zip(old, new, strict=False):
        if a != b:
            break
        count += 1
    return count


def _matched(old: list[str], new: list[str]) -> list[tuple[str, bool]]:
    if not old or not new or max(len(old), len(new)) > _MOST_WORDS:
        return [(_marked(old, new), True)]
    codes = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    return [
        (_shortened(old[i:i_end]), False) if tag == "equal" else (_marked(old[i:i_end], new[j:j_end]), True)
        for tag, i, i_end, j, j_end in codes
    ]


def _marked(old: list[str], new: list[str]) -> str:
    return f"[-{_shortened(old)}-]" * bool(old) + f"{{+{_shortened(new)}+}}" * bool(new)


def _shortened(words: list[str]) -> str:
    return "".join(words if len(words) <= _SAME_WORDS else [*words[: _SAME_WORDS // 2], " ... ", *words[-_SAME_WORDS // 2 :]])
