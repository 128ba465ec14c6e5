"""Forward operations that are done again, in one of two places.

In: the graphs of a stage, and the operations whose results its forward shall not keep. Out: the graphs with copies of
these operations, marked `recompute`.

  * `apart`: the copies are a graph of their own, R, which makes at once all that the backward takes of them. B and W
    stay as they are. `again` puts the actions into a schedule: R in front of the receive of the gradient, so that it
    runs while the rank would wait.
  * `repeat`: the copies stand in B, each right before its first use. That needs less memory where the results of a few
    of them are there at a time, and always takes its time after the gradient has come.

A copy keeps its names, so that the rest of the graphs stays as it is. Its reads say `version=mb`, so that it sees the
weights that F saw. Random draws, collectives and operations with effects are never done again. Their results are saved
where a copy needs them, and so is what comes from a variable that F changes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from penstock.ir.action_kinds import AGAIN, BACKWARD, FORWARD, LET_GO
from penstock.ir.graph import COORDINATE, Graph, Op, Value
from penstock.ir.liveness import drop_dead
from penstock.ir.ops import EXCHANGES, OPS
from penstock.ir.schedule import COMPUTE, HANDS, RECEIVES, SENDS, Action, Program, Schedule

DRAWS = ("random", "random_key")


@dataclass(frozen=True)
class Repeated:
    """The graphs of a stage when the results of some operations are not kept, and the copies that stand in B or R
    because of it. Without copies in R there is no R. It runs for microbatches with these `numbers` in their batch.
    With `lets_go`, F saves what R makes for the others."""

    forward: Graph
    backward: Graph
    copies: tuple[Op, ...]
    again: Graph | None = None
    numbers: frozenset[int] = frozenset()
    lets_go: bool = False

    @property
    def graphs(self) -> dict[str, Graph]:
        graphs = (self.forward, self.backward, *([] if self.again is None else [self.again]))
        return {graph.name: graph for graph in graphs}

    def scheduled(self, schedule: Schedule, stage: int) -> Schedule:
        """Return the schedule with the actions that R needs."""
        return schedule if self.again is None else again(schedule, stage, self.numbers, lets_go=self.lets_go)


def may_repeat(forward: Graph) -> Callable[[Op], bool]:
    """Return a predicate: an operation of the forward graph gives the same result again in the backward pass, without
    other effects."""
    changed = {op.var for op in forward.ops if OPS[op.kind].effect and op.kind != "read"}

    def safe(op: Op) -> bool:
        if op.kind == "read":
            return op.var not in changed
        return op.kind not in (*DRAWS, *EXCHANGES) and not OPS[op.kind].effect

    return safe


def _copy(op: Op) -> Op:
    return op.with_attrs(recompute=True, of=op.outs[0].name)


# ------------------------------------------------------------------------------------------------ a graph of its own


def apart(
    forward: Graph, backward: Graph, dropped: Iterable[Op], numbers: frozenset[int], *, lets_go: bool = False
) -> Repeated:
    """Make R of some operations of F whose results are saved, for microbatches with these numbers in their batch. F
    saves the results no longer, or, with `lets_go`, for the microbatches that keep them."""
    makers, safe = forward.producers(), may_repeat(forward)
    results = {v for op in dropped for v in op.outs if v in forward.saved}
    if not results:
        return Repeated(forward, backward, ())
    kept, operands = set(forward.saved) - results, set[Value]()
    copies: dict[int, Op] = {}
    waiting = list(results)
    while waiting:
        value = waiting.pop()
        maker = makers.get(value)
        if maker is None or value in kept or not safe(maker):
            assert value not in results, f"{value} cannot be made again"
            operands.add(value)
        elif id(maker) not in copies:
            copies[id(maker)] = maker
            waiting += maker.ins
    order = (*forward.ins, *(v for op in forward.ops for v in op.outs))
    ops = tuple(_copy(op) for op in forward.ops if id(op) in copies)
    graph = Graph(
        forward.name[: -len(FORWARD)] + AGAIN,
        tuple(v for v in order if v in operands),
        (),
        ops,
        tuple(v for v in order if v in results),
    )
    needed = kept | {v for v in operands if not v.name.startswith(COORDINATE)} | (results if lets_go else set())
    saving = replace(forward, saved=tuple(v for v in order if v in needed))
    return Repeated(drop_dead(saving), backward, ops, graph, numbers, lets_go)


def again(schedule: Schedule, stage: int, numbers: Collection[int], *, lets_go: bool) -> Schedule:
    """Put the R of a stage into the schedule, for microbatches with these numbers in their batch: in front of what the
    backward waits for. With `lets_go`, L comes behind the sends of the forward."""

    def rewritten(actions: Sequence[Action]) -> tuple[Action, ...]:
        before: dict[int, Action] = {}
        behind: dict[int, Action] = {}
        for at, action in enumerate(actions):
            if action.stage != stage or action.mb % schedule.microbatches not in numbers:
                continue
            if action.kind == BACKWARD:
                first = at
                while first and _moves(actions[first - 1], action, (*RECEIVES, *HANDS)):
                    first -= 1
                before[first] = Action(AGAIN, stage, action.mb, action.version)
            elif action.kind == FORWARD and lets_go:
                last = at
                while last + 1 < len(actions) and _moves(actions[last + 1], action, SENDS):
                    last += 1
                behind[last] = Action(LET_GO, stage, action.mb)
        result: list[Action] = []
        for at, action in enumerate(actions):
            result += [before[at]] if at in before else []
            result.append(action)
            result += [behind[at]] if at in behind else []
        return tuple(result)

    ranks = {
        rank: Program(rewritten(program.start), rewritten(program.batch)) for rank, program in schedule.ranks.items()
    }
    return Schedule(schedule.name, schedule.microbatches, ranks)


def _moves(message: Action, action: Action, kinds: Collection[str]) -> bool:
    """Return whether an action is a message of the same stage and microbatch."""
    return message.kind in kinds and (message.stage, message.mb) == (action.stage, action.mb)


def waiting_numbers(schedule: Schedule, stage: int) -> frozenset[int]:
    """Return the microbatches of a batch, by number, between whose forward and backward their rank computes something
    else. Others hold what they saved for no longer than the backward takes."""
    numbers: set[int] = set()
    for rank, program in schedule.ranks.items():
        computed = [a for a in (*program.start, *program.batch) if a.kind in COMPUTE]
        if stage in schedule.stages_of(rank):
            backwards = {a.mb % schedule.microbatches for a in computed if (a.kind, a.stage) == (BACKWARD, stage)}
            at_once = {
                a.mb % schedule.microbatches
                for a, following in pairwise(computed)
                if (a.kind, a.stage) == (FORWARD, stage) and following[:3] == (BACKWARD, stage, a.mb)
            }
            numbers |= backwards - at_once
    return frozenset(numbers)


# ------------------------------------------------------------------------------------------------ within B


def repeat(forward: Graph, backward: Graph, dropped: Iterable[Op]) -> Repeated:
    """Drop the saved results of some operations of F. B computes them again, with all they need that is not saved.

    What B makes again anyway (layout changes, what depends on variables alone) is placed anew with the copies.
    """
    makers, safe = forward.producers(), may_repeat(forward)
    saved, remade = set(forward.saved), {v: op for op in backward.ops for v in op.outs if v in makers}
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
            present = remade.get(value)
            if present is None or (present.kind, present.ins) != (maker.kind, maker.ins):
                waiting.append(maker)
    sources = remade | {v: _copy(op) for op in copies.values() for v in op.outs}
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
