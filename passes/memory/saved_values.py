"""Search for the values that one stage keeps from a forward to its backward: the cheapest choice that fits into memory.

In: the module with kernels, a stage, and where copies of operations stand: in B, or in a graph R. Out: the stage with
less saved, its predicted memory, and the seconds of what it computes again. recompute.py says what is tried.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from penstock.ir.action_kinds import BACKWARD, FORWARD
from penstock.ir.cluster.cluster import Device
from penstock.ir.graph import Graph, Module, Op, Value
from penstock.ir.liveness import from_state_alone
from penstock.ir.memory.predict import BATCHES, Memory, rank_memory
from penstock.ir.memory.saved_sets import most_sets_here, saved_set
from penstock.ir.memory.walk import actions_of
from penstock.passes.costs.prices import op_seconds
from penstock.passes.kernels.fuse import FuseOptions, fuse
from penstock.support.words import shown_bytes

from .recompute_chain import Element, cheapest, least_bytes
from .repeated import Repeated, apart, may_repeat, repeat, waiting_numbers

# The number of budgets that the chain planner solves for, and of operations that it tries to keep after all.
_CHAIN_BUDGETS = 8
_SECOND_THOUGHTS = 24


@dataclass(frozen=True)
class RecomputedStage:
    """A stage with the results of some operations not kept, and its memory. `seconds` are what it computes again in a
    batch."""

    dropped: tuple[Op, ...]
    repeated: Repeated
    memory: Memory
    seconds: float

    @property
    def peak(self) -> int:
        return self.memory.peak


class SavedValuesSearch:
    """The search for what one stage saves. `fused` is the whole module with kernels, for measuring. Copies stand in B,
    or in R."""

    def __init__(
        self, fused: Module, index: int, graphs: Mapping[str, Graph], device: Device, *, in_backward: bool
    ) -> None:
        self.index, self.forward, self.backward = index, graphs[FORWARD], graphs[BACKWARD]
        self.device, self.in_backward = device, in_backward
        assert fused.schedule is not None
        self.module, self.schedule = fused, fused.schedule
        self.ranks = self.schedule.members()[index]
        # All microbatches of a batch, and those for which something is computed again.
        self.every = frozenset(range(self.schedule.microbatches))
        self.numbers = self.every if in_backward else waiting_numbers(self.schedule, index)
        self.free = from_state_alone(self.forward)
        safe, saved = may_repeat(self.forward), set(self.forward.saved)
        self.units = [
            op
            for op in self.forward.ops
            if safe(op) and not saved.isdisjoint(op.outs) and not self.free.issuperset(op.outs)
        ]
        # The seconds of each operation in its kernel, by its first result: copies take the same.
        spent = op_seconds(self.forward, device)
        self.price = {op.outs[0]: s for op, s in zip(self.forward.ops, spent, strict=True) if op.outs}
        self.tried: dict[tuple[frozenset[int], frozenset[int]], RecomputedStage] = {}
        self.before = self.plan(())

    def plan(self, dropped: Iterable[Op], numbers: frozenset[int] | None = None) -> RecomputedStage:
        """Measure a stage that does these operations again; with R, for these microbatches of a batch."""
        chosen = tuple(dropped)
        numbers = self.numbers if numbers is None else numbers
        key = (frozenset(map(id, chosen)), numbers)
        if key not in self.tried:
            repeated = self._repeated(chosen, numbers)
            times = len(self.every) if repeated.again is None else len(numbers)
            cost = times * sum(self.price[op.outs[0]] for op in repeated.copies)
            self.tried[key] = RecomputedStage(chosen, repeated, self._memory(repeated), cost)
        return self.tried[key]

    def _repeated(self, dropped: Sequence[Op], numbers: frozenset[int]) -> Repeated:
        if not dropped or not numbers:
            return Repeated(self.forward, self.backward, ())
        if self.in_backward:
            return repeat(self.forward, self.backward, dropped)
        return apart(self.forward, self.backward, dropped, numbers, lets_go=numbers < self.every)

    def _memory(self, repeated: Repeated) -> Memory:
        alone = fuse(self.module.but(graphs=repeated.graphs), FuseOptions())
        schedule = repeated.scheduled(self.schedule, self.index)
        module = self.module.but(graphs={**self.module.graphs, **alone.graphs}, schedule=schedule)
        return max((rank_memory(module, rank) for rank in self.ranks), key=lambda row: row.peak)

    def everything(self) -> RecomputedStage:
        """Return the stage that keeps as little as can be, without what need not wait for its backward."""
        return self.plan(self.units if self.numbers else ())

    def choose(self, budget: int) -> RecomputedStage:
        """Return the cheapest plan found that fits, or else the one with the lowest peak."""
        if self.before.peak <= budget or not self.numbers:
            return self.before
        cheap = self._by_price()
        for base in [(), *self._chain_choices()]:
            have = set(map(id, base))
            remaining = [op for op in cheap if id(op) not in have]
            self._shortest(base, remaining, budget)
        self.plan(self.units)
        return self._fewest_microbatches(self._second_thoughts(budget), budget)

    def _best(self, budget: int) -> RecomputedStage:
        fits = [plan for plan in self.tried.values() if plan.peak <= budget]
        if fits:
            return min(fits, key=lambda plan: (plan.seconds, plan.peak))
        return min(self.tried.values(), key=lambda plan: (plan.peak, plan.seconds))

    def _by_price(self) -> list[Op]:
        """Sort the operations by seconds per byte saved if dropped alone. Operations that save nothing are left out."""
        size = sum(v.type.nbytes for v in self.forward.saved)
        prices: dict[int, float] = {}
        for op in self.units:
            repeated = self._repeated((op,), self.every)
            gain = size - sum(v.type.nbytes for v in repeated.forward.saved)
            if gain > 0:
                prices[id(op)] = sum(self.price[copy.outs[0]] for copy in repeated.copies) / gain
        return sorted((op for op in self.units if id(op) in prices), key=lambda op: prices[id(op)])

    def _shortest(self, base: Sequence[Op], remaining: Sequence[Op], budget: int) -> None:
        """Try `base` with the shortest start of `remaining` that fits, by bisection: more operations mean less memory,
        mostly."""
        low, high = 0, len(remaining)
        while low < high:
            middle = (low + high) // 2
            if self.plan((*base, *remaining[:middle])).peak <= budget:
                high = middle
            else:
                low = middle + 1
        self.plan((*base, *remaining[:low]))

    def _chain_choices(self) -> list[tuple[Op, ...]]:
        """Return what the chain planner drops, for budgets between the least and all. Of sets that are elsewhere those
        count that are on the device."""
        chain, groups = self._chain()
        is_away = saved_set(self.module, self.index) is not None
        in_flight = max(1, self._most_sets_here() if is_away else self.before.memory.in_flight)
        least, most = least_bytes(chain, in_flight) if is_away else 0, in_flight * sum(e.bytes for e in chain)
        choices: dict[tuple[int, ...], tuple[Op, ...]] = {}
        for step in range(_CHAIN_BUDGETS):
            choice = cheapest(chain, in_flight, least + (most - least) * step // _CHAIN_BUDGETS)
            if choice is not None:
                choices[choice.kept] = tuple(
                    op for i, group in enumerate(groups) if i not in choice.kept for op in group
                )
        return list(choices.values())

    def _most_sets_here(self) -> int:
        return max(most_sets_here(actions_of(self.schedule, rank, BATCHES), self.index) for rank in self.ranks)

    def _chain(self) -> tuple[list[Element], list[list[Op]]]:
        """Group saved operations in order into the elements of a chain: those between two crossings are one.

        The seconds of an element are those of all operations up to its last one.
        """
        unit, crossings = set(map(id, self.units)), self._crossings()
        elements: list[Element] = []
        groups: list[list[Op]] = []
        spent = 0.0
        inside: list[Op] = []

        def close() -> None:
            nonlocal inside, spent
            elements.append(_element(inside, spent, self.forward))
            groups.append(inside)
            inside, spent = [], 0.0

        for op in self.forward.ops:
            if id(op) in crossings and inside:
                close()
            if not self.free.issuperset(op.outs):
                spent += self.price[op.outs[0]] if op.outs else 0.0
            if id(op) in unit:
                inside.append(op)
                if id(op) in crossings:
                    close()
        if inside:
            close()
        return elements, groups

    def _crossings(self) -> set[int]:
        """Return the saved operations whose results are all that later operations take of earlier ones, variables and
        inputs aside."""
        last = {v: i for i, op in enumerate(self.forward.ops) for v in op.ins}
        safe = may_repeat(self.forward)
        unit, alive, crossings = set(map(id, self.units)), set[Value](), set[int]()
        for i, op in enumerate(self.forward.ops):
            alive = {v for v in alive if last[v] > i}
            if self.free.isdisjoint(op.outs) and safe(op):
                alive |= {v for v in op.outs if last.get(v, -1) > i}
            if id(op) in unit and alive and alive.issubset(op.outs):
                crossings.add(id(op))
        return crossings

    def _second_thoughts(self, budget: int) -> RecomputedStage:
        """Save again the values for which there is room, the most expensive first."""
        best = self._best(budget)
        if best.peak > budget:
            return best
        dear = sorted(best.dropped, key=lambda op: -self.price[op.outs[0]])[:_SECOND_THOUGHTS]
        for op in dear:
            fewer = self.plan(other for other in best.dropped if other is not op)
            if fewer.peak <= budget and fewer.seconds < best.seconds:
                best = fewer
        return best

    def _fewest_microbatches(self, best: RecomputedStage, budget: int) -> RecomputedStage:
        """Let as many microbatches of a batch keep everything as there is room for, evenly spread over it."""
        if best.peak > budget or best.repeated.again is None:
            return best
        order = sorted(self.numbers)
        low, high = 1, len(order)
        while low < high:
            middle = (low + high) // 2
            fewer = self.plan(best.dropped, frozenset(order[i * len(order) // middle] for i in range(middle)))
            if fewer.peak <= budget:
                best, high = fewer, middle
            else:
                low = middle + 1
        return best

    def describe(self, way: RecomputedStage, place: str, budget: int, peak: int) -> str:
        """Say what a stage computes again, when, and what that takes; `peak` is that of its rank in the end."""
        saved = [sum(v.type.nbytes for v in graph.saved) for graph in (self.forward, way.repeated.forward)]
        kinds = Counter(op.kind for op in way.repeated.copies if not self.free.issuperset(op.outs))
        listed = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items(), key=lambda kv: (-kv[1], kv[0])))
        why = f", budget {shown_bytes(budget)}" if budget else ""
        when, some, times = "in the backward pass", "", len(self.every)
        if (graph := way.repeated.again) is not None:
            when, times = "ahead of the backward pass", len(way.repeated.numbers)
            if way.repeated.lets_go:
                some = f" for {times} of {len(self.every)} microbatches"
                saved[1] -= sum(v.type.nbytes for v in graph.saved)
        return (
            f"stage {self.index} on {place} computes again {when}{some}: {listed}. "
            f"It saves {shown_bytes(saved[1])} per microbatch instead of {shown_bytes(saved[0])}, "
            f"predicted peak {shown_bytes(peak)} instead of {shown_bytes(self.before.peak)}{why}, "
            f"{way.seconds / times * 1e3:.3f} ms more per microbatch"
        )


def _element(ops: Sequence[Op], spent: float, forward: Graph) -> Element:
    saved = set(forward.saved)
    return Element(sum(v.type.nbytes for op in ops for v in op.outs if v in saved), spent)
