"""Let collectives move while a rank computes: the pass `overlap` changes the order of operations, and nothing else.

A collective begins where it stands, and is waited for where its result is first read
(runtime/transport/collectives.py). So what stands between the two hides it. In: stage graphs with collectives. Out: the
same operations in another order.

Each collective moves up to right behind the operation that makes its operand. Of the operations before it, back to the
first reader of the collective before, products that it does not need are computed behind it, with what follows from
them. Where that is not enough to hide it, its first reader moves down behind products that do not need its result.
Other operations stay where they are: they become parts of the kernels before them, which would be held up.

Links of a chain, collectives whose operand another one makes, as those of a ring, stand where they are: what is to hide
them was written between them.

Variables whose parts replicas hold (`--zero 2` and 3) wait for nothing. A weight is gathered before earlier products,
and the sum of a gradient is added to its variable behind later ones. They are so many that ranks wait less for
collectives, which move one after the other. Then each ends a product before it is needed, as far as memory allows:
ranks are a product apart now and then. They are no more, because both take memory.

Kept are the order of what reads and what changes one variable, and of definition and use. So results are the same to
the last bit. Where a move would let the largest sum of temporaries alive at once grow by more than `growth`, fewer
products are put off, or none. With growth, there may be one more gathered weight and one more gradient besides;
passes/memory/overlap_that_fits.py looks whether devices have room for them.

Limits: inside of a team work and bytes are compared by fixed rates (_RATES), those of a core and of memory that two
processes share; over replicas by those of the cluster. A graph without products beside its collectives stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, islice
from typing import NamedTuple

from penstock.ir.collective_calls import sent_bytes
from penstock.ir.graph import REPLICAS, Graph, Module, Op, Value, graph_stage
from penstock.ir.ops import EXCHANGES, OPS, axes_over, cost_of

_READS = "read"
# The most products that a gathered weight comes before its time, or a gradient behind it.
_FURTHEST = 6


class _InBytes(NamedTuple):
    """Bytes that move between two ranks while one does a floating-point operation, touches a byte, or meets others."""

    flop: float
    touched: float
    meeting: float


_RATES = _InBytes(1 / 50, 1 / 8, float(1 << 18))


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
        ordered = _Order(graph, options.growth, *_replicas_of(module, graph)).run()
        if ordered != graph.ops:
            graphs[name] = replace(graph, ops=ordered)
            moved = sum(a is not b for a, b in zip(graph.ops, ordered, strict=True))
            notes.append(f"@{name}: {moved} of {len(ordered)} operations stand elsewhere")
    if all(graphs[name] is module.graphs[name] for name in graphs):
        return module
    return module.but(graphs=graphs).noted("overlap", *notes)


def _replicas_of(module: Module, graph: Graph) -> tuple[int, _InBytes]:
    """Return the replicas of a graph's stage, and what counts beside the bytes that move between two of them."""
    stage = graph_stage(graph.name)
    mesh = module.mesh_of(stage) if stage is not None and module.cluster is not None else None
    if mesh is None or module.cluster is None or mesh.sizes.get(REPLICAS, 1) == 1:
        return 1, _RATES
    names = [mesh.devices[place] for place in mesh.group(0, (REPLICAS,))]
    links = [module.cluster.message_link(a, b) for a, b in combinations(names, 2)]
    device, slowest = module.cluster.device(names[0]), min(link.bandwidth for link in links)
    meeting = slowest * max(link.latency for link in links)
    return len(names), _InBytes(slowest / device.flops, slowest / device.bandwidth, meeting)


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
    return _Temporaries(ops, outside).peak(range(len(ops)))


class _Temporaries:
    """The values of a graph by number: those that each operation takes, and those that it makes, with their bytes."""

    def __init__(self, ops: Sequence[Op], outside: Iterable[Value]) -> None:
        numbers: dict[Value, int] = {}
        elsewhere = set(outside)
        self.ins: list[list[int]] = []
        self.outs: list[list[tuple[int, int]]] = []
        self.exchanges = [op.kind in EXCHANGES for op in ops]
        for op in ops:
            temporary = op.kind not in (_READS, "take")
            self.ins.append([numbers.setdefault(value, len(numbers)) for value in op.ins])
            self.outs.append(
                [
                    (
                        numbers.setdefault(value, len(numbers)),
                        value.type.nbytes if temporary and value not in elsewhere else 0,
                    )
                    for value in op.outs
                ]
            )
        self.count = len(numbers)

    def peak(self, order: Sequence[int]) -> int:
        """Return the largest sum of bytes that are alive at once in an order of the operations."""
        first, last, end = [-1] * self.count, [-1] * self.count, len(order) - 1
        for at, i in enumerate(order):
            for value in self.ins[i]:
                last[value] = at
                if first[value] < 0:
                    first[value] = at
        for i in order:
            if self.exchanges[i]:
                read = first[self.outs[i][0][0]]
                last[self.ins[i][0]] = max(last[self.ins[i][0]], read if read >= 0 else end)
        now = peak = 0
        ending = [0] * len(order)
        for at, i in enumerate(order):
            for value, nbytes in self.outs[i]:
                if nbytes and last[value] >= 0:
                    now += nbytes
                    ending[last[value]] += nbytes
            peak = max(peak, now)
            now -= ending[at]
        return peak


class _Order:
    """The order of one graph's operations, by their numbers in it. Moves are tried one collective after the other."""

    def __init__(self, graph: Graph, growth: float, replicas: int, rates: _InBytes) -> None:
        self.graph, self.ops = graph, graph.ops
        self.needs = must_follow(graph.ops)
        self.order = list(range(len(graph.ops)))
        self.collectives = [i for i, op in enumerate(graph.ops) if op.kind in EXCHANGES]
        self.readers = {i: [k for k, before in enumerate(self.needs) if i in before] for i in self.collectives}
        self.work = [0.0 if op.kind in EXCHANGES else _work(op) for op in graph.ops]
        self._products_put_off = 0
        self.temporaries = _Temporaries(graph.ops, (*graph.ins, *graph.results))
        self.grows, self.limit = growth > 0, self.temporaries.peak(self.order) * (1 + growth)
        # Of collectives over replicas, what each moves, and those that an operation waits for; and what others hide.
        self.sent = {
            i: sent_bytes(self.ops[i], replicas) + rates.meeting for i in self.collectives if self._of_replicas(i)
        }
        self.awaited = self._awaited()
        self.hiding = [0.0 if op.kind in EXCHANGES else _work(op, rates) for op in graph.ops]

    def _awaited(self) -> list[list[int]]:
        """Return the collectives over replicas that each operation waits for. What an elementwise operation behind a
        product reads is waited for in front of that product: both are one kernel."""
        awaited: list[list[int]] = [[] for _ in self.ops]
        # The product of the kernel that an operation is likely to be in.
        heads: dict[int, int] = {}
        product = -1
        for i, op in enumerate(self.ops):
            if _is_product(op):
                product = heads[i] = i
            elif OPS[op.kind].family == "elementwise" and product in {heads.get(k, -2) for k in self.needs[i]}:
                heads[i] = product
            awaited[heads.get(i, i)] += [k for k in self.needs[i] if k in self.sent]
        return awaited

    def run(self) -> tuple[Op, ...]:
        inside = [i for i in self.collectives if not self._of_replicas(i)]
        for number, collective in enumerate(inside):
            if self._is_link(collective):
                continue
            before = inside[:number]
            most = len(self.order)
            # Half as many products put off, where memory does not hold the operands of all.
            while not self._try(self._begun_early(collective, before, most)) and most:
                most = min(most, self._products_put_off) // 2
            if not any(self._is_link(k) for k in self.readers[collective]):
                self._try(self._read_late(collective))
        self._move_variables()
        return tuple(self.ops[i] for i in self.order)

    def _is_link(self, i: int) -> bool:
        """Return whether an operation is a collective whose operand another one makes."""
        return self.ops[i].kind in EXCHANGES and any(self.ops[k].kind in EXCHANGES for k in self.needs[i])

    def _try(self, order: list[int] | None) -> bool:
        """Take an order if memory allows; return whether it is taken."""
        if order is None or order == self.order:
            return True
        fits = self._fits(order)
        if fits:
            self.order = order
        return fits

    def _fits(self, order: Sequence[int]) -> bool:
        return self.temporaries.peak(order) <= self.limit

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

    # ------------------------------------------------------------------------------- variables over replicas

    def _of_replicas(self, collective: int) -> bool:
        return REPLICAS in axes_over(self.ops[collective].attrs["over"])

    def _move_variables(self) -> None:
        """Gather weights earlier, and add gradients up later, one collective after the other, as far as ranks wait less
        for it and memory allows."""
        gathers = {i: needed for i in self.sent if (needed := self._of_variable(i)) is not None}
        sums = {i: sinks for i in self.sent if (sinks := self._into_variable(i)) is not None}
        if self.grows:
            self.limit += max((self.ops[i].outs[0].type.nbytes for i in gathers), default=0)
            self.limit += max((self.ops[i].ins[0].type.nbytes for i in sums), default=0)
        place = {i: at for at, i in enumerate(self.order)}
        for i in self.order:
            for collective in self.awaited[i]:
                if collective in gathers and place[collective] > place[i]:
                    # In front of the kernel that reads it, and of what is gathered ahead there.
                    self._try(next(self._earlier(collective, gathers[collective])))
        # Ranks are a product apart now and then: once nothing is waited for, collectives end a product ahead.
        for slack in (0.0, max((self.hiding[i] for i in self.order), default=0.0)):
            for collective in sorted({*gathers, *sums}, key=self._read_at):
                tried = (
                    self._earlier(collective, gathers[collective])
                    if collective in gathers
                    else self._later(collective, sums[collective])
                )
                self._move(collective, islice(tried, _FURTHEST), slack)

    def _move(self, collective: int, tried: Iterable[list[int]], slack: float) -> None:
        """Take those of some orders that leave less to be waited for with a slack, and no more without."""
        # Where all together wait as long, those that come later may still be moved.
        least, bare = _waited(self._waits(self.order, slack), collective), sum(self._waits(self.order).values())
        for order in tried:
            if not least[1]:
                break
            waited, there = _waited(self._waits(order, slack), collective), sum(self._waits(order).values())
            if waited < least and there <= bare and self._fits(order):
                least, bare, self.order = waited, there, order

    def _of_variable(self, collective: int) -> set[int] | None:
        """Return the reads, and views of them, that a gather needs; None where it needs more."""
        needed = self._needed(collective, range(collective))
        kinds = {self.ops[i].kind for i in needed}
        gathers = self.ops[collective].kind == "all_gather" and _READS in kinds
        return needed if gathers and all(kind == _READS or _is_view(kind) for kind in kinds) else None

    def _into_variable(self, collective: int) -> set[int] | None:
        """Return what adds a sum to a variable, with views of the sum; None where something else reads it."""
        if self.ops[collective].kind not in ("reduce_scatter", "all_reduce"):
            return None
        reached = {collective}
        for i in range(collective + 1, len(self.ops)):
            if not self.needs[i].isdisjoint(reached):
                if self.ops[i].kind != "accum" and not _is_view(self.ops[i].kind):
                    return None
                reached.add(i)
        return reached - {collective}

    def _read_at(self, collective: int) -> int:
        return min((self.order.index(k) for k in self.readers[collective]), default=len(self.order))

    def _earlier(self, collective: int, needed: set[int]) -> Iterator[list[int]]:
        """Yield orders in which a gather, with what it needs, stands in front of earlier and earlier products."""
        order = list(self.order)
        block = [*(i for i in order if i in needed), collective]
        moved = set(block)
        for at in range(order.index(collective) - 1, -1, -1):
            if _is_product(self.ops[order[at]]):
                yield [*(i for i in order[:at] if i not in moved), *block, *(i for i in order[at:] if i not in moved)]

    def _later(self, collective: int, sinks: set[int]) -> Iterator[list[int]]:
        """Yield orders in which what takes a sum stands behind later and later products: each time in front of the next
        one, so that no kernel of a product is held up."""
        order = list(self.order)
        block = [i for i in order if i in sinks]
        products = [at for at in range(self._read_at(collective), len(order)) if _is_product(self.ops[order[at]])]
        for at in [*products[1:], len(order)] if products else []:
            yield [*(i for i in order[:at] if i not in sinks), *block, *(i for i in order[at:] if i not in sinks)]

    def _waits(self, order: Sequence[int], slack: float = 0.0) -> dict[int, float]:
        """Return what of each collective over replicas is waited for, in bytes: they move one after the other, in the
        order in which they begin. With a slack each is to end so much before it is needed."""
        now = link = 0.0
        ends: dict[int, float] = {}
        waits: dict[int, float] = {}
        for i in order:
            for before in self.awaited[i]:
                if before not in ends:
                    # It begins in front of the kernel that has its reader.
                    ends[before] = link = max(link, now) + self.sent[before]
                if before not in waits:
                    waits[before] = max(0.0, ends[before] + slack - now)
                    now = max(now, ends[before])
            if i in self.sent:
                if i not in ends:
                    ends[i] = link = max(link, now) + self.sent[i]
            else:
                now += self.hiding[i]
        return waits


def _waited(waits: Mapping[int, float], collective: int) -> tuple[float, float]:
    """Return what all collectives are waited for, and one of them."""
    return sum(waits.values()), waits.get(collective, 0.0)


def _is_view(kind: str) -> bool:
    return OPS[kind].family == "layout"


def _is_product(op: Op) -> bool:
    return OPS[op.kind].family == "contract" or op.kind in ("attention", "attention_grad")


def _work(op: Op, rates: _InBytes = _RATES) -> float:
    """Return the work of an operation beside a byte that is moved. Only products count: others may cost nothing in
    their kernels."""
    if not _is_product(op):
        return 0.0
    cost = cost_of(op)
    return cost.flops * rates.flop + cost.bytes * rates.touched


def _moved(op: Op) -> float:
    """Return the bytes that a rank of a large group moves in a collective, and its meetings as bytes."""
    rounds = 2 if op.kind == "all_reduce" else 1
    return rounds * (op.ins[0].type.nbytes + _RATES.meeting)
