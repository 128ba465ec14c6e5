"""Let collectives move while a rank computes: the pass `overlap` changes the order of operations, and nothing else.

A collective begins where it stands, and is waited for where its result is first read
(runtime/transport/collectives.py). So what stands between the two hides it. In: stage graphs with collectives. Out: the
same operations in another order.

Each collective moves up to right behind the operation that makes its operand. Of the operations before it, back to the
first reader of the collective before, products that it does not need are computed behind it, with what follows from
them. Where that is not enough to hide it, its first reader moves down behind products that do not need its result.
Other operations stay where they are: they become parts of the kernels before them, which would be held up.

A collective that needs variables alone, as those that gather weights, begins ahead, with the reads that it needs:
before as many products as would hide it, behind the collective before.

Links of a chain, collectives whose operand another one makes, as those of a ring, stand where they are: what is to hide
them was written between them.

Kept are the order of collectives, of what reads and what changes one variable, and of definition and use. So results
are the same to the last bit. Where a move would let the largest sum of temporaries alive at once grow by more than
`growth`, fewer products are put off, or none.

Limits: work and bytes are compared by fixed rates (_FLOP, _TOUCHED, _MEETING), those of a core and of memory that two
processes share. A graph without products beside its collectives stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from penstock.ir.graph import Graph, Module, Op, Value, graph_stage
from penstock.ir.ops import EXCHANGES, OPS, cost_of

# What a floating-point operation and a touched byte count beside a byte that is moved, and a meeting of ranks in bytes.
_FLOP, _TOUCHED, _MEETING = 1 / 50, 1 / 8, float(1 << 18)
_READS = "read"


@dataclass(frozen=True, slots=True)
class OverlapOptions:
    """Options of `overlap`. `growth` is the share by which a graph's temporaries may grow."""

    growth: float = 0.125


def overlap(module: Module, options: OverlapOptions = OverlapOptions()) -> Module:
    """Begin collectives early and read their results late, so that computations hide them."""
    graphs, notes = dict(module.graphs), []
    for name, graph in module.graphs.items():
        if graph_stage(name) is None or not any(op.kind in EXCHANGES for op in graph.ops):
            continue
        ordered = _Order(graph, options.growth).run()
        if ordered != graph.ops:
            graphs[name] = replace(graph, ops=ordered)
            moved = sum(a is not b for a, b in zip(graph.ops, ordered, strict=True))
            notes.append(f"@{name}: {moved} of {len(ordered)} operations stand elsewhere")
    if all(graphs[name] is module.graphs[name] for name in graphs):
        return module
    return module.but(graphs=graphs).noted("overlap", *notes)


def must_follow(ops: Sequence[Op]) -> list[set[int]]:
    """Return, for each operation, the numbers of those that stay before it: makers of its operands, and what reads or
    changes its variable where one of the two changes it."""
    maker = {value: i for i, op in enumerate(ops) for value in op.outs}
    readers: dict[str, list[int]] = {}
    changer: dict[str, int] = {}
    needs: list[set[int]] = []
    for i, op in enumerate(ops):
        before = {maker[value] for value in op.ins if value in maker}
        if OPS[op.kind].effect:
            if op.var in changer:
                before.add(changer[op.var])
            if op.kind == _READS:
                readers.setdefault(op.var, []).append(i)
            else:
                before.update(readers.pop(op.var, ()))
                changer[op.var] = i
        needs.append(before)
    return needs


def live_peak(ops: Sequence[Op], outside: Iterable[Value]) -> int:
    """Return the largest sum of bytes of temporaries that are alive at once, every operation by itself. The operand of
    a collective lives until the result is first read."""
    first_reader: dict[Value, int] = {}
    last = {}
    for i, op in enumerate(ops):
        for value in op.ins:
            last[value] = i
            first_reader.setdefault(value, i)
    for op in ops:
        if op.kind in EXCHANGES:
            operand = op.ins[0]
            last[operand] = max(last[operand], first_reader.get(op.outs[0], len(ops) - 1))
    elsewhere = set(outside)
    now = peak = 0
    ending: dict[int, int] = {}
    for i, op in enumerate(ops):
        if op.kind not in (_READS, "take"):
            for value in op.outs:
                if value not in elsewhere and value in last:
                    now += value.type.nbytes
                    ending[last[value]] = ending.get(last[value], 0) + value.type.nbytes
        peak = max(peak, now)
        now -= ending.pop(i, 0)
    return peak


class _Order:
    """The order of one graph's operations, by their numbers in it. Moves are tried one collective after the other."""

    def __init__(self, graph: Graph, growth: float) -> None:
        self.graph, self.ops = graph, graph.ops
        self.needs = must_follow(graph.ops)
        self.order = list(range(len(graph.ops)))
        self.collectives = [i for i, op in enumerate(graph.ops) if op.kind in EXCHANGES]
        self.readers = {i: [k for k, before in enumerate(self.needs) if i in before] for i in self.collectives}
        self.work = [0.0 if op.kind in EXCHANGES else _work(op) for op in graph.ops]
        self.outside = (*graph.ins, *graph.results)
        self._products_put_off = 0
        self.limit = live_peak(graph.ops, self.outside) * (1 + growth)

    def run(self) -> tuple[Op, ...]:
        for number, collective in enumerate(self.collectives):
            if self._is_link(collective):
                continue
            before = self.collectives[:number]
            most = len(self.order)
            # Half as many products put off, where memory does not hold the operands of all.
            while not self._try(self._begun_early(collective, before, most)) and most:
                most = min(most, self._products_put_off) // 2
            if not any(self._is_link(k) for k in self.readers[collective]):
                self._try(self._read_late(collective))
            ahead = self._places_ahead(collective, before)
            while ahead and not self._try(self._begun_at(collective, ahead[-1])):
                ahead = ahead[: len(ahead) // 2]
        return tuple(self.ops[i] for i in self.order)

    def _is_link(self, i: int) -> bool:
        """Return whether an operation is a collective whose operand another one makes."""
        return self.ops[i].kind in EXCHANGES and any(self.ops[k].kind in EXCHANGES for k in self.needs[i])

    def _try(self, order: list[int] | None) -> bool:
        """Take an order if memory allows; return whether it is taken."""
        if order is None or order == self.order:
            return True
        fits = live_peak([self.ops[i] for i in order], self.outside) <= self.limit
        if fits:
            self.order = order
        return fits

    def _begun_early(self, collective: int, before: Sequence[int], most: int) -> list[int]:
        """Return the order in which the collective stands behind the maker of its operand, and the last products that
        it does not need stand behind it, at `most` so many."""
        order = self.order
        place = {i: at for at, i in enumerate(order)}
        end = place[collective]
        start = max((place[i] + 1 for i in before), default=0)
        for other in before:
            start = max((start, *(place[k] + 1 for k in self.readers[other] if place[k] < end)))
        needed = self._needed(collective, order[start:end])
        products = [i for i in order[start:end] if i not in needed and _is_product(self.ops[i])]
        self._products_put_off = min(most, len(products))
        last = set(products[len(products) - self._products_put_off :])
        early: list[int] = []
        late: list[int] = []
        put_off: set[int] = set()
        for i in order[start:end]:
            if i in last or put_off & self.needs[i]:
                put_off.add(i)
                late.append(i)
            else:
                early.append(i)
        behind = max((at + 1 for at, i in enumerate(early) if i in self.needs[collective]), default=0)
        if behind == len(early) and not late:
            return order
        return [*order[:start], *early[:behind], collective, *early[behind:], *late, *order[end + 1 :]]

    def _places_ahead(self, collective: int, before: Sequence[int]) -> list[int]:
        """Return the places in front of products that would hide what is not hidden of a collective, the nearest first.
        They go back to the collective before, or to what it needs other than reads, as far as work is missing."""
        place = {i: at for at, i in enumerate(self.order)}
        begun = place[collective]
        read = min((place[k] for k in self.readers[collective]), default=len(self.order))
        missing = _moved(self.ops[collective]) - sum(self.work[i] for i in self.order[begun:read])
        first = max((place[i] + 1 for i in before[-1:]), default=0)
        needed = self._needed(collective, self.order[first:begun])
        places = []
        for at in range(begun - 1, first - 1, -1):
            i = self.order[at]
            if missing <= 0 or (i in needed and self.ops[i].kind != _READS):
                break
            if self.work[i]:
                places.append(at)
                missing -= self.work[i]
        return places

    def _begun_at(self, collective: int, at: int) -> list[int]:
        """Return the order in which a collective begins at an earlier place, behind the reads that it needs."""
        end = self.order.index(collective)
        needed = self._needed(collective, self.order[at:end])
        early, late = ([i for i in self.order[at:end] if (i in needed) is first] for first in (True, False))
        return [*self.order[:at], *early, collective, *late, *self.order[end + 1 :]]

    def _needed(self, collective: int, window: Sequence[int]) -> set[int]:
        """Return what the collective needs, be it through others, of some operations in front of it."""
        needed = set(self.needs[collective])
        for i in reversed(window):
            if i in needed:
                needed |= self.needs[i]
        return needed

    def _read_late(self, collective: int) -> list[int] | None:
        """Return the order in which products that do not need the collective stand before its first reader; None where
        there are none, or it is hidden anyway."""
        order = self.order
        place = {i: at for at, i in enumerate(order)}
        begun = place[collective]
        read = min((place[k] for k in self.readers[collective]), default=len(order))
        missing = _moved(self.ops[collective]) - sum(self.work[i] for i in order[begun:read])
        if missing <= 0:
            return None
        moved_up = list(self._fillers(order[read:], missing))
        if not any(_is_product(self.ops[i]) for i in moved_up):
            return None
        chosen = set(moved_up)
        return [*order[:read], *moved_up, *(i for i in order[read:] if i not in chosen)]

    def _fillers(self, behind: Sequence[int], missing: float) -> Iterator[int]:
        """Yield operations that can move in front of the first of `behind`, until their work hides what is missing;
        then what follows from them, up to the next product. Other collectives keep their place."""
        held = set(behind[:1])
        moved_up: set[int] = set()
        for i in behind[1:]:
            op = self.ops[i]
            if op.kind in EXCHANGES or held & self.needs[i]:
                held.add(i)
                continue
            if missing <= 0 and (_is_product(op) or not moved_up & self.needs[i]):
                if _is_product(op):
                    return
                held.add(i)
                continue
            moved_up.add(i)
            missing -= self.work[i]
            yield i


def _is_product(op: Op) -> bool:
    return OPS[op.kind].family == "contract" or op.kind in ("attention", "attention_grad")


def _work(op: Op) -> float:
    """Return the work of an operation beside a byte that is moved. Only products count: others may cost nothing in
    their kernels."""
    if not _is_product(op):
        return 0.0
    cost = cost_of(op)
    return cost.flops * _FLOP + cost.bytes * _TOUCHED


def _moved(op: Op) -> float:
    """Return the bytes that a rank of a large group moves in a collective, and its meetings as bytes."""
    rounds = 2 if op.kind == "all_reduce" else 1
    return rounds * (op.ins[0].type.nbytes + _MEETING)
