"""The rule of an operation for splitting tensors: a name for each dimension of its operands and results.

In: an operation with whole shapes. Out: its rule. Dimensions with one name are split alike. A name's mark says what a
split means. Without one it asks for nothing else. `+` leaves sums to be added up: results that lack the name are
partial. `^` is refused, and `*` needs the operation's own local form. `=` asks for equal parts.

The rule comes from the row's dimension string, made concrete by the operation's shapes and attributes. Rows whose
dimensions depend on attributes in other ways have a function in computed.py.

    ... m k+ ~ta       one name per dimension; `...` is any number of leading dimensions, which broadcast; ~ta swaps
                       the last two where the attribute says so
    a... r^@axis z...  several groups have names of their listed_names; @axis is the dimension that the attribute names
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from penstock.ir.attrs import Attrs
from penstock.ir.graph import Op, Value
from penstock.ir.ops import Exact, attrs_of, complete_attrs, definition, exact_attrs
from penstock.ir.types import FLOATS, TensorType

from .computed import COMPUTED, attention_apart
from .splits import WHOLE, SplitRule, build


class _Token(NamedTuple):
    """One word of a dimension string. A group stands for any number of dimensions."""

    name: str
    group: bool
    mark: str
    at: str


# Operations that divide: quotients of whole numbers are truncated, and do not add up to the quotient of the sum.
_TRUNCATING = ("div", "mean")
_TOKEN = re.compile(r"([A-Za-z]\w*)?(\.\.\.)?([\^+*=]*)(?:@(\w+))?")


@lru_cache(maxsize=256)
def _parsed(text: str) -> tuple[tuple[tuple[tuple[_Token, ...], str], ...], int]:
    """Return the patterns of operands and results, each with the attribute that swaps its last two dimensions, and the
    number of operands."""
    left, _, right = text.partition("->")
    patterns = []
    count = 0
    for side in (left, right):
        for part in side.split(","):
            words = part.split()
            swap = words.pop()[1:] if words and words[-1].startswith("~") else ""
            tokens = []
            for word in words:
                match = _TOKEN.fullmatch(word)
                assert match is not None, f"bad word {word!r} of dimensions {text!r}"
                tokens.append(_Token(match[1] or ".", bool(match[2]), match[3], match[4] or ""))
            patterns.append((tuple(tokens), swap))
        count = count or len(patterns)
    return tuple(patterns), count


def rule_of(op: Op) -> SplitRule:
    """Return the rule of an operation. Axes in its types change nothing."""
    if definition(op.kind).family in ("source", "state"):
        # Constants may hold tables, whose hash takes longer than their rule.
        return _rule(op)
    ins, outs = ([v.type.plain for v in values] for values in (op.ins, op.outs))
    return _known_rule(op.kind, tuple(ins), tuple(outs), exact_attrs(op.attrs))


# Large modules have few different operations, but for names.
@lru_cache(maxsize=1 << 14)
def _known_rule(kind: str, ins: tuple[TensorType, ...], outs: tuple[TensorType, ...], attrs: Exact) -> SplitRule:
    values = [tuple(Value(f"x{i}", t) for i, t in enumerate(types)) for types in (ins, outs)]
    return _rule(Op(kind, values[0], values[1], attrs_of(attrs)))


def rule_apart(op: Op) -> SplitRule:
    """Return the rule of an operation in which the queries and the keys of an attention have names of their own."""
    return attention_apart(op, complete_attrs(op)) if op.kind == "attention" else rule_of(op)


def _rule(op: Op) -> SplitRule:
    row, attrs = definition(op.kind), complete_attrs(op)
    if op.kind in COMPUTED:
        rule = COMPUTED[op.kind](op, attrs)
    elif row.family == "state":
        rule = _alike(op)
    elif not row.dims:
        rule = _broadcast(op)
    else:
        rule = _from_string(op, row.dims, attrs)
    if op.kind in _TRUNCATING and op.outs[0].type.dtype not in FLOATS:
        return SplitRule(rule.ins, rule.outs, rule.sizes, {name: WHOLE for name, mark in rule.marks.items() if mark})
    return SplitRule(rule.ins, rule.outs, rule.sizes, rule.marks, linear_of(row.linear, len(op.ins)))


@lru_cache(maxsize=256)
def linear_of(text: str, operands: int) -> tuple[frozenset[int], ...]:
    """Return the sets of operands through which a partial sum passes jointly: `0 1` each alone, `0+1` both, `all`."""
    if text == "all":
        return (frozenset(range(operands)),)
    return tuple(frozenset(map(int, part.split("+"))) for part in text.split())


def _alike(op: Op) -> SplitRule:
    """Return the rule of an operation that reads or changes a variable."""
    values = op.ins or op.outs
    names = tuple((f"d{i}",) for i in range(values[0].type.rank))
    sizes = {f"d{i}": n for i, n in enumerate(values[0].type.dims)}
    return SplitRule((names,) * len(op.ins), (names,) * len(op.outs), sizes)


def _broadcast(op: Op) -> SplitRule:
    """Return the rule of an operation whose operands broadcast as in NumPy."""
    shapes = [v.type.dims for v in (*op.ins, *op.outs)]
    return build([[f"d{len(shape) - i}" for i in range(len(shape))] for shape in shapes], shapes, len(op.ins))


def _from_string(op: Op, text: str, attrs: Attrs) -> SplitRule:
    patterns, count = _parsed(text)
    assert count == len(op.ins) or not op.ins, f"{op.kind} has {len(op.ins)} operands, its dimensions {text!r}"
    shapes = [v.type.dims for v in (*op.ins, *op.outs)]
    shown = patterns if op.ins else patterns[-len(op.outs) :]
    lengths = _group_lengths(shown, shapes, attrs)
    names, marks = [], dict[str, str]()
    for (tokens, swap), shape in zip(shown, shapes, strict=True):
        listed: list[str] = []
        for token in tokens:
            if token.group:
                # Named from the right, so that groups of several lengths are aligned as they broadcast.
                length = lengths.get(token.name, len(shape) - sum(not t.group for t in tokens))
                listed_names = [f"{token.name}{length - i}" for i in range(length)]
            else:
                listed_names = [token.name]
            listed += listed_names
            marks |= dict.fromkeys(listed_names, token.mark) if token.mark else {}
        if swap and attrs[swap]:
            listed[-2:] = listed[:-3:-1]
        names.append(listed)
    return build(names, shapes, len(op.ins), marks)


def _group_lengths(
    patterns: Sequence[tuple[tuple[_Token, ...], str]], shapes: Sequence[tuple[int, ...]], attrs: Attrs
) -> dict[str, int]:
    """Return the lengths of named groups; those of `...` differ from operand to operand."""
    lengths: dict[str, int] = {}
    for _ in patterns:
        for (tokens, _swap), shape in zip(patterns, shapes, strict=True):
            for i, token in enumerate(tokens):
                if token.at and i and tokens[i - 1].group:
                    lengths[tokens[i - 1].name] = int(str(attrs[token.at])) % len(shape) - (i - 1)
            unknown = [t.name for t in tokens if t.group and t.name not in lengths and t.name != "."]
            if len(unknown) == 1:
                known = sum(lengths[t.name] if t.group else 1 for t in tokens if t.name != unknown[0])
                lengths[unknown[0]] = len(shape) - known
    return lengths
