"""Save less between forward and backward where memory is short, and compute it again: the pass `recompute`.

In: staged, wired graphs. Out: the same with fewer values saved by F, and copies of forward operations in B, each right
before its first use there, marked `recompute`.

A copy keeps its names, so that the rest of B stays as it is. Its reads say `version=mb`, so that it sees the weights
that F saw. What B makes again anyway (layout changes, what depends on variables alone) is placed anew with the copies.
Random draws, collectives and operations with effects are never done again. Their results are saved where a copy needs
them, and so is what comes from a variable that F changes.

Modes: `none`; `all`: a stage keeps its inputs, draws, and nothing else; `auto`: a stage with a predicted peak within
its budget stays as it is. Otherwise it computes again the cheapest set with a predicted peak that fits. Peaks are those
of ir/memory/predict.py on fused graphs, seconds those of passes/costs/prices.py on the stage's device. Sets that are
tried:

  * the chain planner (recompute_chain.py) on the stage as a chain: where a single value crosses from earlier to later
    operations, that value is an element, and all that is saved between two of them is one;
  * single operations, those that cost least for their bytes first, alone and on top of chain choices;
  * of the cheapest of these that fits, what can be kept after all.

Limits: the chain model is exact on chains, the choice on graphs is not; a stage whose backward is in two parts (W) is
left as it is. A note says so where the caller asks for `all` or the stage does not fit.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from penstock.ir.cluster.cluster import Device
from penstock.ir.cluster.gpus import CONTEXT, WORKSPACES
from penstock.ir.graph import Graph, Module, Op, Value
from penstock.ir.liveness import drop_dead, from_state_alone
from penstock.ir.memory.predict import Memory, measure_memory
from penstock.ir.ops import EXCHANGES, OPS
from penstock.ir.schedule import Schedule
from penstock.passes.costs.prices import op_seconds
from penstock.passes.kernels.fuse import FuseOptions, fuse
from penstock.support.errors import DoesNotFit, UsageError
from penstock.support.words import exact_bytes, itemised, shown_bytes

from .recompute_chain import Element, cheapest

MODES = ("auto", "none", "all")
DRAWS = ("random", "random_key")
# The number of budgets that the chain planner solves for, and of operations that it tries to keep after all.
_CHAIN_BUDGETS = 8
_SECOND_THOUGHTS = 24


@dataclass(frozen=True, slots=True)
class RecomputeOptions:
    """Options of `recompute`. `mode` is auto, none or all. `budget` is in bytes for each stage; 0 means the memory of
    its device."""

    mode: str = "auto"
    budget: int = 0


def recompute(module: Module, options: RecomputeOptions = RecomputeOptions()) -> Module:
    """Save less for the backward pass where memory is short, and compute it again there."""
    if options.mode not in MODES:
        raise UsageError(f"unknown mode {options.mode!r}, expected one of {', '.join(MODES)}", where="recompute")
    if module.schedule is None:
        raise UsageError("the module has no schedule", where="recompute", hint="run the schedule pass first")
    if options.mode == "none":
        return module
    notes, problems, graphs = [], [], dict(module.graphs)
    excess: dict[int, float] = {}
    fused: Module | None = None
    for stage in module.stages:
        device = _device(module, stage.index)
        place = ", ".join(module.devices_of(stage.index))
        budget = options.budget or _room_on(device)
        forward, backward = module.stage_graph(stage.index, "F"), module.stage_graph(stage.index, "B")
        if forward is None or backward is None or (options.mode == "auto" and not budget):
            continue
        fused = fused or fuse(module, FuseOptions())
        if module.stage_graph(stage.index, "W") is not None:
            peak = max(memory.peak for memory in measure_memory(_alone(fused, stage.index)).values())
            why = (
                f", predicted peak {exact_bytes(peak)}, budget {exact_bytes(budget)}" if options.mode == "auto" else ""
            )
            if options.mode == "all" or peak > budget:
                notes.append(
                    f"stage {stage.index} saves all it needs{why}: its weight gradients are apart, "
                    "and operations would be done twice again"
                )
            continue
        planner = _SavedValuesSearch(fused, stage.index, forward, backward, device)
        chosen = planner.everything() if options.mode == "all" else planner.choose(budget)
        if options.mode == "auto" and chosen.peak > budget:
            excess[stage.index] = chosen.peak / budget
            problems.append(
                f"stage {stage.index} on {place} needs {exact_bytes(chosen.peak)} at the worst moment, even if "
                f"{len(chosen.dropped)} operations are "
                f"done again in the backward pass; it has {exact_bytes(budget)}\n    {_listed(chosen.memory)}"
            )
        if chosen.dropped:
            graphs[forward.name], graphs[backward.name] = chosen.forward, chosen.backward
            notes.append(planner.describe(chosen, place, budget if options.mode == "auto" else 0))
    if problems:
        hint = "more stages, fewer microbatches in flight or smaller microbatches (--dim) need less"
        raise DoesNotFit("no plan fits into memory:" + itemised(problems), hint=hint, excess=excess)
    if not notes:
        return module
    return module.but(graphs=graphs).noted("recompute", *notes)


def _listed(memory: Memory) -> str:
    """Format the bytes of a stage at its peak by purpose."""
    return ", ".join(f"{purpose} {shown_bytes(count)}" for purpose, count in memory.at_peak().items() if count)


def _room_on(device: Device) -> int:
    """Return the bytes of a device for a stage: on a GPU what CUDA and its libraries leave of them. 0 stands for no
    limit."""
    if not device.memory or device.kind != "cuda":
        return device.memory or 0
    return max(device.memory - CONTEXT - WORKSPACES, 1)


def _device(module: Module, stage: int) -> Device:
    """Return the device of a stage. Of several it is the one with the least memory, as all run the same graphs."""
    names = module.devices_of(stage)
    if module.cluster is None:
        return Device(names[0])
    return min(map(module.cluster.device, names), key=lambda device: device.memory or math.inf)


def _alone(module: Module, index: int) -> Module:
    """Return the module with only the programs of one stage's ranks."""
    schedule = module.schedule
    assert schedule is not None
    programs = {
        rank: program
        for rank, program in schedule.ranks.items()
        if any(a.stage == index for a in (*program.start, *program.batch))
    }
    return module.but(schedule=Schedule(schedule.name, schedule.microbatches, programs))


# ------------------------------------------------------------------------------------------------ graphs


@dataclass(frozen=True)
class Repeated:
    """Both graphs of a stage when the results of some operations are not saved, and the copies that stand in B because
    of it."""

    forward: Graph
    backward: Graph
    copies: tuple[Op, ...]


def may_repeat(forward: Graph) -> Callable[[Op], bool]:
    """Return a predicate: an operation of the forward graph gives the same result again in the backward pass, without
    other effects."""
    changed = {op.var for op in forward.ops if OPS[op.kind].effect and op.kind != "read"}

    def safe(op: Op) -> bool:
        if op.kind == "read":
            return op.var not in changed
        return op.kind not in (*DRAWS, *EXCHANGES) and not OPS[op.kind].effect

    return safe


def repeat(forward: Graph, backward: Graph, dropped: Iterable[Op]) -> Repeated:
    """Drop the saved results of some operations of F. B computes them again, with all they need that is not saved."""
    makers, safe = forward.producers(), may_repeat(forward)
    saved, again = set(forward.saved), {v: op for op in backward.ops for v in op.outs if v in makers}
    copies: dict[int, Op] = {}
    waiting = list(dropped)
    while waiting:
        op = waiting.pop()
        if id(op) in copies:
            continue
        assert safe(op), f"{op.kind} cannot be done again"
        copies[id(op)] = op
        for value in op.ins:
            maker = makers.get(value)
            if maker is None or value in saved or not safe(maker):
                continue
            present = again.get(value)
            if present is None or (present.kind, present.ins) != (maker.kind, maker.ins):
                waiting.append(maker)
    sources = again | {v: op.with_attrs(recompute=True, of=op.outs[0].name) for op in copies.values() for v in op.outs}
    ops = _placed(backward.ops, sources, makers)
    defined = {v for op in ops for v in op.outs}
    used = {v for op in ops for v in op.ins} - defined
    order = (*forward.ins, *(v for op in forward.ops for v in op.outs))
    kept = tuple(v for v in order if v in used and v not in backward.ins) + tuple(v for v in forward.saved if v in used)
    kept = tuple(sorted(dict.fromkeys(kept), key={v: i for i, v in enumerate(order)}.__getitem__))
    received = tuple(v for v in backward.ins if v not in saved)
    after = Graph(backward.name, received + kept, backward.outs, ops, backward.saved)
    return Repeated(drop_dead(replace(forward, saved=kept)), after, tuple(op for op in ops if "recompute" in op.attrs))


def _placed(ops: Sequence[Op], sources: Mapping[Value, Op], forward: Mapping[Value, Op]) -> tuple[Op, ...]:
    """Return the operations of B that are no forward operations, in their order, each behind the operations of
    `sources` that it needs.

    An operation that is placed earlier than it was may need a constant that stood in between.
    """
    sources = {v: op for op in ops for v in op.outs} | dict(sources)
    placed: list[Op] = []
    emitted: set[Value] = set()
    for op in ops:
        if op.outs and all(v in forward for v in op.outs):
            continue
        waiting = [op]
        while waiting:
            first = waiting[-1]
            missing = [sources[v] for v in first.ins if v in sources and v not in emitted]
            if missing:
                waiting += missing[::-1]
                continue
            waiting.pop()
            if first.outs and emitted.issuperset(first.outs):
                continue
            placed.append(first)
            emitted.update(first.outs)
    return tuple(placed)


# ------------------------------------------------------------------------------------------------ choosing


@dataclass(frozen=True)
class RecomputedStage:
    """A stage with some operations done again."""

    dropped: tuple[Op, ...]
    forward: Graph
    backward: Graph
    copies: tuple[Op, ...]
    memory: Memory
    seconds: float

    @property
    def peak(self) -> int:
        return self.memory.peak


class _SavedValuesSearch:
    """The search for what one stage saves. `fused` is the whole module with kernels, for measuring."""

    def __init__(self, fused: Module, index: int, forward: Graph, backward: Graph, device: Device) -> None:
        self.index, self.forward, self.backward, self.device = index, forward, backward, device
        self.module = _alone(fused, index)
        self.free = from_state_alone(forward)
        safe, saved = may_repeat(forward), set(forward.saved)
        self.units = [
            op for op in forward.ops if safe(op) and not saved.isdisjoint(op.outs) and not self.free.issuperset(op.outs)
        ]
        # The seconds of each operation in its kernel, by its first result: copies take the same.
        self.price = {
            op.outs[0]: spent for op, spent in zip(forward.ops, op_seconds(forward, device), strict=True) if op.outs
        }
        self.tried: dict[frozenset[int], RecomputedStage] = {}
        self.before = self.plan(())

    def plan(self, dropped: Iterable[Op]) -> RecomputedStage:
        chosen = tuple(dropped)
        key = frozenset(map(id, chosen))
        if key not in self.tried:
            repeated = (
                repeat(self.forward, self.backward, chosen) if chosen else Repeated(self.forward, self.backward, ())
            )
            cost = sum(self.price[op.outs[0]] for op in repeated.copies)
            self.tried[key] = RecomputedStage(
                chosen, repeated.forward, repeated.backward, repeated.copies, self.memory(repeated), cost
            )
        return self.tried[key]

    def memory(self, repeated: Repeated) -> Memory:
        graphs = {repeated.forward.name: repeated.forward, repeated.backward.name: repeated.backward}
        alone = fuse(self.module.but(graphs=graphs), FuseOptions())
        rows = measure_memory(self.module.but(graphs={**self.module.graphs, **alone.graphs})).values()
        return max(rows, key=lambda row: row.peak)

    def everything(self) -> RecomputedStage:
        return self.plan(self.units)

    def choose(self, budget: int) -> RecomputedStage:
        """Return the cheapest plan found that fits, or else the one with the lowest peak."""
        if self.before.peak <= budget:
            return self.before
        cheap = self._by_price()
        for base in [(), *self._chain_choices()]:
            have = set(map(id, base))
            remaining = [op for op in cheap if id(op) not in have]
            self._shortest(base, remaining, budget)
        self.plan(self.units)
        return self._second_thoughts(budget)

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
            repeated = repeat(self.forward, self.backward, (op,))
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
        """Return what the chain planner drops, for budgets between the least and all."""
        chain, groups = self._chain()
        in_flight = max(1, self.memory(Repeated(self.forward, self.backward, ())).in_flight)
        most = in_flight * sum(e.bytes for e in chain)
        choices: dict[tuple[int, ...], tuple[Op, ...]] = {}
        for step in range(_CHAIN_BUDGETS):
            choice = cheapest(chain, in_flight, most * step // _CHAIN_BUDGETS)
            if choice is not None:
                choices[choice.kept] = tuple(
                    op for i, group in enumerate(groups) if i not in choice.kept for op in group
                )
        return list(choices.values())

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

    def describe(self, plan: RecomputedStage, place: str, budget: int) -> str:
        saved = [sum(v.type.nbytes for v in graph.saved) for graph in (self.forward, plan.forward)]
        kinds = Counter(op.kind for op in plan.copies if not self.free.issuperset(op.outs))
        listed = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items(), key=lambda kv: (-kv[1], kv[0])))
        why = f", budget {shown_bytes(budget)}" if budget else ""
        return (
            f"stage {self.index} on {place} computes again in the backward pass: {listed}. "
            f"It saves {shown_bytes(saved[1])} per microbatch instead of {shown_bytes(saved[0])}, "
            f"predicted peak {shown_bytes(plan.peak)} instead of {shown_bytes(self.before.peak)}{why}, "
            f"{plan.seconds * 1e3:.3f} ms more per microbatch"
        )


def _element(ops: Sequence[Op], spent: float, forward: Graph) -> Element:
    saved = set(forward.saved)
    return Element(sum(v.type.nbytes for op in ops for v in op.outs if v in saved), spent)
