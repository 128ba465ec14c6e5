"""The costs of layouts: a model as choices with options, for the search.

In: the whole program as `shard` is about to see it, the sizes of the axes of a mesh, and prices of operations and of
moves. Out: costs (search.py), and layouts as texts for the options that were chosen.

A choice stands for operations that are alike (alike.py), for all reads of a variable, or for an input. Its options are
ways of splitting the operation (ways.py), or layouts of the variable or input. Seconds of an option are:

    forward, backward    the seconds of the whole operation times the part that a device computes
    sums                 bringing partial results to the layout in which they lie, and their gradients back
    own forms            three sums of a number for each row, and two for gradients
    updates              the variable's share of an update, for one microbatch, times the part that a device has

Seconds of a crossing are those of moving the value to the layout that its taker needs, of adding its gradient up, and
of bringing that back. Bytes are variables with all that belongs to them, and values that the backward takes.

Known limits: parts of an operation are priced as so much of the whole. Nothing hides a collective here. Activations
count once, as if one microbatch were in flight.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from glob import escape
from math import inf

import numpy as np

from penstock.ir.graph import BUFFER, PARAM, Graph, Module, Op, Value
from penstock.ir.ops import OPS
from penstock.ir.sharding.paths import moves
from penstock.ir.sharding.rules import rule_of
from penstock.ir.types import FLOATS, TensorType
from penstock.passes.partition.chain import forward_graph

from .alike import alike_operations
from .search import LayoutCosts, MovedValue, Taker
from .ways import SplitWay, blocks_made, blocks_that_meet, layouts_of, ways_of

# Seconds of a collective: its kind, the type of a device's operand, and the axes that it goes over.
CollectivePrice = Callable[[str, TensorType, tuple[str, ...]], float]
# Sums of own forms forward and backward: a softmax finds the largest element, the sum of powers and, for gradients, the
# sum of products.
_OWN_SUMS, _OWN_GRADIENT_SUMS = 3, 2
_State = tuple[TensorType, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class LayoutPrices:
    """Prices on a device of a mesh: seconds of the operations of a graph, and of collectives. An update is for so many
    microbatches."""

    operations: Callable[[Graph], Sequence[float]]
    collective: CollectivePrice
    microbatches: int = 1

    def move(self, before: TensorType, after: TensorType, sizes: Mapping[str, int]) -> float:
        """Return the seconds of bringing a tensor from one layout to another."""
        seconds, at = 0.0, before
        for move in moves(before, after, sizes) if before != after else ():
            if move.sent:
                seconds += self.collective(move.kind, at.local(sizes), move.over)
            at = move.after
        return seconds


class LayoutModel:
    """A model as choices of layouts."""

    def __init__(self, module: Module, sizes: Mapping[str, int], prices: LayoutPrices) -> None:
        self.module, self.sizes, self.prices = module, dict(sizes), prices
        self.graph = forward_graph(module)
        self.trains = "B" in module.graphs
        self._choice_of = self._numbered()
        self._makers = {v.name: (op, place) for op in self.graph.ops for place, v in enumerate(op.outs)}
        self.members: dict[int, list[Op | Value]] = defaultdict(list)
        for value in self.graph.ins:
            self.members[self._choice_of[value.name]].append(value)
        for op in self.graph.ops:
            self.members[self._choice_of[id(op)]].append(op)
        self.ways = self._all_ways()

    # ------------------------------------------------------------------------------------------ choices

    def _numbered(self) -> dict[str | int, int]:
        """Return the choice of every operation by its id, and of every input by its name."""
        alike = alike_operations(self.graph)
        joined = list(range(len(alike)))

        def first(i: int) -> int:
            while joined[i] != i:
                i = joined[i]
            return i

        of_variable: dict[str, int] = {}
        for i, op in enumerate(self.graph.ops):
            joined[first(i)] = first(alike[i])
            if op.kind == "read":
                # A variable has one layout, whoever reads it.
                joined[first(i)] = first(of_variable.setdefault(op.var, i))
        numbers: dict[int, int] = {}
        choices: dict[str | int, int] = {v.name: i for i, v in enumerate(self.graph.ins)}
        for i, op in enumerate(self.graph.ops):
            choices[id(op)] = len(self.graph.ins) + numbers.setdefault(first(i), len(numbers))
        return choices

    def _key(self, value: Value) -> str:
        """Return a key of a value that is that of values alike."""
        if value.name not in self._makers:
            return value.name
        op, place = self._makers[value.name]
        return f"{self._choice_of[id(op)]}:{place}"

    def _all_ways(self) -> list[list[SplitWay]]:
        """Return the ways of each choice. Numbers of blocks spread from operations that take a dimension apart to those
        around them, until there are no new ones."""
        blocks: dict[tuple[str, int], set[int]] = defaultdict(set)
        ways: dict[int, list[SplitWay]] = {}
        named: dict[int, dict[str, set[int]]] = {}
        firsts = {choice: listed[0] for choice, listed in self.members.items()}
        changed = True
        while changed:
            changed = False
            for choice, first in firsts.items():
                keys, known = self._known_blocks(first, blocks)
                if choice in ways and known == named[choice]:
                    continue
                named[choice], ways[choice] = known, self._ways(first, known)
                for at, count in blocks_made(keys, ways[choice]):
                    if count not in blocks[at]:
                        blocks[at].add(count)
                        changed = True
        return [ways[choice] for choice in range(len(firsts))]

    def _known_blocks(
        self, first: Op | Value, blocks: Mapping[tuple[str, int], set[int]]
    ) -> tuple[list[str], dict[str, set[int]]]:
        """Return the keys of operands and results, and the numbers of blocks of each name, or each dimension of what
        no operation makes."""
        if isinstance(first, Value) or OPS[first.kind].family in ("state", "source"):
            values = [first] if isinstance(first, Value) else [*first.ins, *first.outs]
            keys = [self._key(v) for v in values]
            return keys, {str(dim): set(counts) for (key, dim), counts in blocks.items() if key in keys[-1:]}
        keys = [self._key(v) for v in (*first.ins, *first.outs)]
        return keys, blocks_that_meet(first, rule_of(first), keys, blocks, self.sizes)

    def _ways(self, first: Op | Value, known: Mapping[str, set[int]]) -> list[SplitWay]:
        whole = {v.name for v in self.graph.outs}
        if isinstance(first, Value):
            data = {v.name for v in self.module.data_inputs}
            types = self._laid(first.type, known) if first.name in data else [first.type.plain]
            return [_way_of(t, self.sizes) for t in types]
        if first.kind == "read":
            listed = [op for op in self.members[self._choice_of[id(first)]] if isinstance(op, Op)]
            fixed = any(self.module.vars[op.var].role not in (PARAM, BUFFER) for op in listed)
            moving = any(op.var in self._changed for op in listed) or any(op.outs[0].name in whole for op in listed)
            t = first.outs[0].type
            return [_way_of(t, self.sizes) for t in ([t.plain] if fixed or moving else self._laid(t, known))]
        if OPS[first.kind].family in ("state", "source"):
            plain = [tuple(v.type.plain for v in values) for values in (first.ins, first.outs)]
            return [SplitWay(plain[0], ((),) * len(plain[0]), plain[1], plain[1], 1.0)]
        return ways_of(first, rule_of(first), self.sizes, known, whole)

    def _laid(self, t: TensorType, known: Mapping[str, set[int]]) -> list[TensorType]:
        return layouts_of(t, self.sizes, {int(dim): counts for dim, counts in known.items()})

    @cached_property
    def _changed(self) -> set[str]:
        """Variables that the forward graph changes."""
        return {op.var for op in self.graph.ops if OPS[op.kind].effect and op.kind != "read"}

    # ------------------------------------------------------------------------------------------ costs

    def costs(self, room: float = inf) -> LayoutCosts:
        """Return the costs of all choices, with so many bytes on a device."""
        seconds, nbytes = [], []
        for choice, ways in enumerate(self.ways):
            spent = sum(self._spent[self._key_of(member)] for member in self.members[choice])
            updated = sum(self._updated.get(m.var, 0.0) for m in self._reads(choice))
            count = len(self.members[choice])
            of_rest = [self._sums(choice, way) * count for way in ways]
            seconds.append([(spent + updated) * way.part + added for way, added in zip(ways, of_rest, strict=True)])
            nbytes.append([self._bytes(choice, way) for way in ways])
        return LayoutCosts(seconds, nbytes, list(self._crossings()), room)

    def _reads(self, choice: int) -> list[Op]:
        """Return a read of each variable of a choice."""
        reads = [op for op in self.members[choice] if isinstance(op, Op) and op.kind == "read"]
        return list({op.var: op for op in reads}.values())

    def _is_repeated(self, choice: int) -> bool:
        """Return whether a choice stands for several operations, where reads of one variable count as one."""
        return len(self._reads(choice) or self.members[choice]) > 1

    @staticmethod
    def _key_of(member: Op | Value) -> str:
        return member.name if isinstance(member, Value) else f"op {id(member)}"

    @cached_property
    def _spent(self) -> dict[str, float]:
        """The seconds of each whole operation, forward and backward."""
        spent: dict[str, float] = defaultdict(float)
        reads = {op.var: op for op in self.graph.ops if op.kind == "read"}
        for op, seconds in zip(self.graph.ops, self.prices.operations(self.graph), strict=True):
            spent[self._key_of(op)] += seconds
        backward = self.module.graphs.get("B")
        for op, seconds in zip(backward.ops, self.prices.operations(backward), strict=True) if backward else ():
            variable = str(op.attrs.get("var", "")).removesuffix(".grad")
            owner, _ = self._makers.get(str(op.attrs.get("of", "")), (reads.get(variable), 0))
            if owner is not None:
                spent[self._key_of(owner)] += seconds
        return spent

    @cached_property
    def _updated(self) -> dict[str, float]:
        """The seconds of an update by parameter, for each microbatch: as its bytes are of all."""
        update = self.module.graphs.get("U")
        params = {var.name: var.type.nbytes for var in self.module.vars.values() if var.role == PARAM}
        if update is None or not params:
            return {}
        each = sum(self.prices.operations(update)) / self.prices.microbatches / sum(params.values())
        return {name: size * each for name, size in params.items()}

    def _sums(self, choice: int, way: SplitWay) -> float:
        """Return the seconds of bringing results to where they lie, and gradients back, and those of own forms."""
        first = self.members[choice][0]
        if isinstance(first, Value):
            return 0.0
        seconds = 0.0
        for value, raw, gives in zip(first.outs, way.raw, way.gives, strict=True):
            seconds += self.prices.move(raw, gives, self.sizes)
            if value.name in self._with_gradient and raw != gives:
                seconds += self.prices.move(gives, raw.laid(raw.axes, (), raw.blocks), self.sizes)
        if way.own:
            rows = TensorType("f32", (max(1, round(way.own_rows * way.part)),))
            sums = _OWN_SUMS + (_OWN_GRADIENT_SUMS if self.trains else 0)
            seconds += sums * self.prices.collective("all_reduce", rows, way.own)
        return seconds

    @cached_property
    def _with_gradient(self) -> set[str]:
        """Values that have a gradient: floats that parameters are behind."""
        names: set[str] = set()
        for op in self.graph.ops if self.trains else ():
            behind = op.kind == "read" and self.module.vars[op.var].role == PARAM
            if behind or any(v.name in names for v in op.ins):
                names |= {v.name for v in op.outs if v.type.dtype in FLOATS}
        return names

    @cached_property
    def _kept(self) -> set[str]:
        """Values of the forward graph that the backward takes."""
        backward = self.module.graphs.get("B")
        return {v.name for v in backward.ins} & self._makers.keys() if backward is not None else set()

    def _bytes(self, choice: int, way: SplitWay) -> float:
        held = 0.0
        for member in self.members[choice]:
            for value, t in zip(member.outs, way.gives, strict=True) if isinstance(member, Op) else ():
                held += t.local(self.sizes).nbytes if value.name in self._kept else 0
        return held + sum(self._copies * way.gives[0].local(self.sizes).nbytes for _ in self._reads(choice))

    @cached_property
    def _copies(self) -> float:
        """The bytes of all variables for each byte of parameters: gradients and optimiser state beside these."""
        params = sum(var.type.nbytes for var in self.module.vars.values() if var.role == PARAM)
        return sum(var.type.nbytes for var in self.module.vars.values()) / params if params else 1.0

    def _crossings(self) -> Iterator[MovedValue]:
        """Yield the values between operations, those that are alike as one."""
        takers: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for op in self.graph.ops:
            for place, value in enumerate(op.ins):
                takers[value.name].append((self._choice_of[id(op)], place))
        alike = Counter[tuple[int, int, tuple[tuple[int, int], ...], bool, bool]]()
        for name, listed in takers.items():
            producer = self._makers.get(name)
            maker, place = (
                (self._choice_of[name], 0) if producer is None else (self._choice_of[id(producer[0])], producer[1])
            )
            alike[maker, place, tuple(sorted(listed)), name in self._with_gradient, name in self._twice] += 1
        for (maker, place, readers, graded, twice), times in alike.items():
            yield self._crossing(maker, place, readers, graded, twice, times)

    @cached_property
    def _twice(self) -> set[str]:
        """Values that the backward takes as an operand did: it moves them once more."""
        names: set[str] = set()
        views: dict[str, str] = {}
        for op in self.module.graphs["B"].ops if self.trains else ():
            if OPS[op.kind].family == "layout" and op.ins:
                views[op.outs[0].name] = op.ins[0].name
            elif OPS[op.kind].family == "contract":
                names |= {views.get(v.name, v.name) for v in op.ins}
        return names

    def _crossing(
        self, maker: int, place: int, takers: Sequence[tuple[int, int]], graded: bool, twice: bool, times: int
    ) -> MovedValue:
        states_given: dict[TensorType, int] = {}
        needed: dict[_State, int] = {}
        gives = tuple(states_given.setdefault(way.gives[place], len(states_given)) for way in self.ways[maker])
        of_takers = []
        for choice, operand in takers:
            states = [(way.needs[operand], way.sums[operand] if graded else ()) for way in self.ways[choice]]
            of_takers.append(Taker(choice, tuple(needed.setdefault(state, len(needed)) for state in states)))
        seconds = np.zeros((len(states_given), len(needed)))
        for t, i in states_given.items():
            for (need, sums), k in needed.items():
                seconds[i, k] = times * self._moved(t, need, sums, graded, twice)
        return MovedValue(maker, gives, tuple(of_takers), seconds)

    def _moved(self, t: TensorType, need: TensorType, sums: tuple[str, ...], graded: bool, twice: bool) -> float:
        seconds = (2 if twice else 1) * self.prices.move(t, need, self.sizes)
        if graded:
            seconds += self.prices.move(need.laid(need.axes, sums, need.blocks), t, self.sizes)
        return seconds

    # ------------------------------------------------------------------------------------------ layouts

    def texts(self, options: Sequence[int], open_outside: bool = False) -> tuple[str, ...]:
        """Return the layouts of variables, inputs and values as texts, with an option for each choice. `open_outside`
        leaves out those of choices that are in no repeated block."""
        texts: dict[str, None] = {}
        for choice, option in enumerate(options):
            way = self.ways[choice][option]
            if open_outside and not self._is_repeated(choice):
                continue
            for member in self.members[choice]:
                if isinstance(member, Value):
                    named = [("%" + member.name, way.gives[0])] if way.gives[0] != member.type.plain else []
                elif member.kind == "read":
                    has_layout = self.module.vars[member.var].role in (PARAM, BUFFER)
                    named = [("@" + member.var, way.gives[0])] if has_layout else []
                elif OPS[member.kind].family in ("state", "source"):
                    named = []
                else:
                    named = [("%" + v.name, t) for v, t in zip(member.outs, way.gives, strict=True)]
                texts |= {f"{escape(name)}=[{','.join(_dimensions(t))}]": None for name, t in named if t.rank}
        return tuple(texts)


def _way_of(t: TensorType, sizes: Mapping[str, int]) -> SplitWay:
    """Return the way of a variable or an input that lies like this."""
    part = t.local(sizes).nbytes / t.plain.nbytes if t.plain.nbytes else 1.0
    return SplitWay((), (), (t,), (t,), part)


def _dimensions(t: TensorType) -> Iterator[str]:
    for dim in range(t.rank):
        blocks = f"{t.blocks_of(dim)}*" if t.blocks_of(dim) != 1 else ""
        yield blocks + "".join(f"/{axis}" for axis in t.axes_of(dim)) if t.axes_of(dim) else "_"
