"""Propagation of layouts: from those that were given to all tensors that can lie alike.

In: the graphs of a whole program, and the given layouts of variables and values. Out: for each of them, the split of
every dimension that something suggests. Given layouts never change.

An operation's rule names its dimensions (ir/sharding/rules.py): a split of one of them is suggested for all that have
its name. Elementwise operations and views come first until nothing changes, then products and reductions, then all
others: so that a layout follows the data before it follows a contraction. A dimension takes the first split that is
suggested, and no axis twice. The forward graph is done before the others, and gradients lie as their values do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from penstock.ir.graph import GRAD, Graph, Module, Op, Value
from penstock.ir.ops import OPS
from penstock.ir.sharding.rules import rule_of
from penstock.ir.sharding.splits import UNSPLIT, Factors, Split, SplitRule, read_split, split_of

from .forms import FORMS, takes_blocks
from .given import Layout

_FIRST = ("elementwise", "optimizer", "layout", "state", "source")
_SECOND = ("contract", "reduce")
# The names of gradients of values, and of their summands.
_GRADIENT = re.compile(r"(.+)\.grad(?:\.\d+)?")


def rank_of(op: Op) -> int:
    """Return when an operation takes part in propagation: 0 first."""
    family = OPS[op.kind].family
    return 0 if family in _FIRST else 1 if family in _SECOND else 2


def allowed(op: Op, rule: SplitRule, name: str) -> bool:
    """Return whether a name of an operation may be split here."""
    return rule.may_split(name) and (not rule.has_own_form(name) or op.kind in FORMS)


def bears(op: Op, rule: SplitRule, name: str, split: Split) -> bool:
    """Return whether a name of an operation may be split so: most own forms take no blocks."""
    in_parts = split.blocks == 1 or not rule.has_own_form(name) or takes_blocks(op.kind, name, split.blocks)
    return in_parts and allowed(op, rule, name)


def is_alone(rule: SplitRule, name: str, factors: Factors) -> bool:
    """Return whether parts of a name may differ in size, as far as its operation and this dimension say."""
    return len(factors) == 1 and not rule.needs_equal(name)


def fits(split: Split, size: int, sizes: Mapping[str, int], alone: bool) -> bool:
    """Return whether a factor of this size can be split so. Where it is not `alone` in its dimension, and in blocks,
    parts have to be equal."""
    parts = prod(sizes.get(axis, 1) for axis in split.axes)
    if size < parts * abs(split.blocks):
        return False
    return (alone and split.blocks == 1) or size % (parts * split.blocks) == 0


@dataclass(slots=True)
class _Link:
    """An operation, and where the dimensions of each name are: node, dimension, its factors."""

    op: Op
    rule: SplitRule
    places: dict[str, list[tuple[str, int, Factors]]]


class Suggestions:
    """The splits that are suggested for the dimensions of variables, as `@name`, and values, as `%name`."""

    def __init__(self, module: Module, graphs: Sequence[Graph], given: Mapping[str, Layout], sizes: dict[str, int]):
        self.sizes = sizes
        self.given = given
        self.splits: dict[str, list[Split | None]] = {}
        for graph in graphs:
            for value in (*graph.ins, *(v for op in graph.ops for v in op.outs)):
                self.splits.setdefault(f"%{value.name}", [None] * value.type.rank)
        for var in module.vars.values():
            self.splits[f"@{var.name}"] = [None] * var.type.rank
        for node, layout in given.items():
            self.splits[node] = list(layout)
        rules = [(op, rule_of(op)) for graph in graphs for op in graph.ops if op.kind != "reshard"]
        self.rules = {id(op): rule for op, rule in rules}
        forward = {id(op) for op in graphs[0].ops}
        self._forward = [_link(op, rule) for op, rule in rules if id(op) in forward]
        self._links = [_link(op, rule) for op, rule in rules] + [*_gradients(module), *_gradients_of_values(graphs)]

    def of(self, value: Value) -> list[Split | None]:
        return self.splits[f"%{value.name}"]

    def spread(self) -> None:
        """Suggest splits until nothing changes: in the first graph, then in all, so that gradients follow values."""
        for links in (self._forward, self._links):
            by_rank = [[link for link in links if rank_of(link.op) <= rank] for rank in range(3)]
            rank = 0
            while rank < 3:
                here = by_rank[rank]
                changed = sum([self._suggest(link) for link in here]) + sum(
                    [self._suggest(link) for link in here[::-1]]
                )
                rank = 0 if changed and rank else rank if changed else rank + 1

    def _suggest(self, link: _Link) -> bool:
        changed = False
        for name, places in link.places.items():
            split = self._known(link, name, places)
            if split is None or not bears(link.op, link.rule, name, split):
                continue
            for node, dim, factors in places:
                if self.splits[node][dim] is None and self._take(link, node, dim, factors, {name: split}):
                    changed = True
        return changed

    def _known(self, link: _Link, name: str, places: Sequence[tuple[str, int, Factors]]) -> Split | None:
        for node, dim, factors in places:
            split = self.splits[node][dim]
            if split is not None and split.axes:
                parts = prod(self.sizes.get(axis, 1) for axis in split.axes)
                read = read_split(factors, split, link.rule.sizes, parts)
                if read is not None and read[0] == name:
                    return read[1]
        return None

    def _take(self, link: _Link, node: str, dim: int, factors: Factors, splits: Mapping[str, Split]) -> bool:
        sizes = link.rule.sizes
        name, split = next(iter(splits.items()))
        whole = split_of(factors, splits, sizes)
        if whole is None or not fits(split, sizes[name], self.sizes, is_alone(link.rule, name, factors)):
            return False
        used = {axis for other in self.splits[node] if other for axis in other.axes}
        if not used.isdisjoint(whole.axes):
            return False
        self.splits[node][dim] = whole
        return True


def _link(op: Op, rule: SplitRule) -> _Link:
    variable = [f"@{op.var}"] if OPS[op.kind].family == "state" else []
    nodes = [f"%{v.name}" for v in (*op.ins, *op.outs)]
    dimensions = list(rule.operands())
    # A variable lies as what is read from it or stored in it; a `put` gives it.
    of_variable = dimensions[-1:] if op.kind == "put" else dimensions[:1]
    return _joined(op, rule, [*nodes, *variable], [*dimensions, *of_variable * len(variable)])


def _joined(op: Op, rule: SplitRule, nodes: Sequence[str], dimensions: Sequence[tuple[Factors, ...]]) -> _Link:
    places: dict[str, list[tuple[str, int, Factors]]] = {}
    for node, listed in zip(nodes, dimensions, strict=True):
        for dim, factors in enumerate(listed):
            for name in factors:
                places.setdefault(name, []).append((node, dim, factors))
    return _Link(op, rule, places)


def _gradients(module: Module) -> Iterator[_Link]:
    """Yield links between parameters and their gradients, which lie alike."""
    for var in module.vars.values():
        owner = var.name.removesuffix(".grad")
        if var.role == GRAD and owner in module.vars and module.vars[owner].type.shape == var.type.shape:
            op = Op("read", (), (Value(owner, module.vars[owner].type),), {"var": owner})
            rule = rule_of(op)
            yield _joined(op, rule, [f"@{owner}", f"@{var.name}"], [rule.outs[0]] * 2)


def _gradients_of_values(graphs: Sequence[Graph]) -> Iterator[_Link]:
    """Yield links between values and their gradients, or the summands of these, which lie alike."""
    values = {v.name: v for graph in graphs for v in (*graph.ins, *(x for op in graph.ops for x in op.outs))}
    for value in values.values():
        match = _GRADIENT.fullmatch(value.name)
        owner = values.get(match[1]) if match is not None else None
        if owner is not None and owner.type.shape == value.type.shape and owner.type.rank:
            op = Op("read", (), (owner,), {"var": ""})
            rule = rule_of(op)
            yield _joined(op, rule, [f"%{owner.name}", f"%{value.name}"], [rule.outs[0]] * 2)


def settled(splits: Sequence[Split | None]) -> tuple[Split, ...]:
    """Return the splits of a tensor; dimensions without a suggestion are whole."""
    return tuple(split or UNSPLIT for split in splits)
