"""The mean loss over a set of samples with the newest weights.

In: the executors of a rank between two runs, its pipeline empty; files of samples. Out: a loss for every portion of
them, and their mean.

The forward graphs of training serve, so nothing more is compiled. Microbatches go through them with the newest
version of every weight, nothing is kept for a backward, nothing is written. So the forward may depend on nothing but
weights and inputs. One that draws random numbers (dropout) or changes running statistics is refused, because neither
can be turned off in code that is compiled.

Every sample counts once. Shapes are fixed, so the samples behind the last whole microbatch go through in portions. A
portion has d samples, each b/d times, for a divisor d of the b samples of a microbatch. The mean over such a microbatch
is that of its d samples. The rank that runs microbatch k of a batch runs the k-th portion.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from penstock.ir.action_kinds import DROP, FORWARD
from penstock.ir.batch_shares import loss_stage, microbatch_size
from penstock.ir.graph import MICROBATCH, Edge, Module
from penstock.ir.ops import OPS
from penstock.ir.schedule import HAND_OF, RECEIVE_OF, RECEIVES, SEND_OF, Action, Routes
from penstock.ir.sharding.tile_messages import tile_messages
from penstock.runtime.data.samples import FileSamples, check_data
from penstock.runtime.messages.control import DataSpec
from penstock.runtime.messages.defaults import SYNTHETIC, WRAP
from penstock.support.errors import UsageError

from .feeds import InputCuts

if TYPE_CHECKING:
    import torch

    from penstock.runtime.state.store import Store

    from .executor import Executor


class Portion(NamedTuple):
    """Samples first .. first+number-1, which fill a microbatch as often as it takes."""

    first: int
    number: int


def portions(samples: int, size: int) -> list[Portion]:
    """Cut all samples into microbatches of `size`, each exactly once but for being repeated in a microbatch of its
    own."""
    cut = [Portion(first, size) for first in range(0, samples - size + 1, size)]
    first = len(cut) * size
    while first < samples:
        count = max(d for d in range(1, samples - first + 1) if size % d == 0)
        cut.append(Portion(first, count))
        first += count
    return cut


def mean_loss(samples: int, size: int, losses: Mapping[int, float]) -> float:
    """Return the mean over the samples, from the losses of the portions by their numbers."""
    return sum(losses[i] * portion.number for i, portion in enumerate(portions(samples, size))) / samples


def evaluation_problems(module: Module, spec: DataSpec) -> list[str]:
    """List the reasons why a bundle cannot be evaluated between steps."""
    if loss_stage(module) is None:
        return ["the bundle is for inference, there is no loss to evaluate"]
    problems = [] if spec.source != SYNTHETIC else ["noise is nothing to evaluate on: give a file"]
    if spec.last != WRAP or spec.shuffle:
        problems.append("every sample of an evaluation counts once, in order")
    graphs = [
        graph for graph in (module.stage_graph(stage.index, FORWARD) for stage in module.stages) if graph is not None
    ]
    hint = "it can be exported and evaluated as an inference bundle that is compiled from the model at rest"
    if any(value.name == MICROBATCH for graph in graphs for value in graph.ins):
        problems.append(
            f"the forward pass draws random numbers (dropout), which compiled code cannot leave out; {hint}"
        )
    if any(OPS[op.kind].effect and op.kind != "read" for graph in graphs for op in graph.ops):
        problems.append(f"the forward pass changes what it has stored (running statistics); {hint}")
    return problems


def count_evaluation(
    module: Module, spec: DataSpec, renamed: Mapping[str, str], names: Sequence[str] | None = None
) -> int:
    """Count the samples to evaluate on; UsageError where that cannot be. With `names`, only those inputs are
    checked."""
    if problems := evaluation_problems(module, spec):
        raise UsageError("; ".join(problems), where="evaluation")
    count = check_data(module, spec, renamed, names)
    assert count is not None
    return count


class PortionFeed:
    """Inputs of portions by their number."""

    def __init__(self, samples: FileSamples | None, portions: Sequence[Portion], size: int, cuts: InputCuts) -> None:
        self._samples, self._portions, self._size, self._cuts = samples, portions, size, cuts

    def exists(self, batch: int) -> bool:
        raise AssertionError("portions make no batches")

    def wait(self, batch: int) -> None:
        raise AssertionError("all portions are known")

    def microbatch(self, mb: int, name: str) -> np.ndarray:
        assert self._samples is not None, f"input {name} was asked for on a rank that has no data"
        first, number = self._portions[mb]
        places = np.tile(np.arange(first, first + number), self._size // number)
        return self._cuts(name, self._samples.take(places, name))

    def finish(self, batch: int) -> None:
        pass


def evaluate(executor: Executor, samples: FileSamples | None, count: int, cuts: InputCuts) -> dict[int, float]:
    """Run this rank's part of an evaluation of `count` samples; return losses by number of portion, where they are
    computed. `executor` is that of any stage of the rank."""
    with nullcontext() if executor.ledger is None else executor.ledger.paused():
        return _evaluate(executor, samples, count, cuts)


def _evaluate(executor: Executor, samples: FileSamples | None, count: int, cuts: InputCuts) -> dict[int, float]:
    module, transport, stages = executor.module, executor.transport, executor.stages
    size = microbatch_size(module)
    cut = portions(count, size)
    feed = PortionFeed(samples, cut, size, cuts)
    for stage in stages.values():
        stage.feed = feed
    sent = {
        stage: frozenset(
            value.name for edge in _leaving(module, stage) if edge.dst not in stages for value in edge.values
        )
        for stage in stages
    }
    losses: dict[int, torch.Tensor] = {}
    program = _program(module, executor.rank, len(cut))
    following = next(program, None)
    while following is not None:
        actions, following = following, next(program, None)
        for receive in (action for action in (*actions, *(following or ())) if action.kind in RECEIVES):
            transport.post(receive)
        for action in actions:
            executor.status.show(action)
            stage = stages[action.stage]
            if action.kind == FORWARD:
                with _present(stage.store, stage.touched.get(FORWARD, ())):
                    results = stage.compute(FORWARD, action)
                if stage.is_loss_stage:
                    losses[action.mb] = results[module.outputs[0]]
                stage.store.keep_only(action.mb, sent[action.stage])
            else:
                stage.perform(action)
    executor.status.show(None)
    transport.flush()
    # Read in one piece: a GPU would be waited for at each.
    import torch  # lazy: heavy

    values = torch.stack(list(losses.values())).tolist() if losses else []
    return dict(zip(losses, values, strict=True))


def _leaving(module: Module, stage: int) -> list[Edge]:
    return [edge for edge in module.edges if edge.src == stage and edge.phase == FORWARD]


def _program(module: Module, rank: int, count: int) -> Iterator[list[Action]]:
    """Yield what a rank does, a list for each portion and stage. All ranks take groups of portions in turn, of a group
    one stage behind the other, and of a stage one portion behind the other. What comes first in that order waits for
    nothing behind it, so none waits for ever."""
    assert module.schedule is not None
    stages = sorted(module.rank_packs()[rank])
    # As many portions as packs are on their way before a rank goes on with its next stage, as in training.
    group = len({*module.packs}) or 1
    m, runners = module.schedule.microbatches, module.schedule.runners()
    routes = Routes(module.schedule)
    for first in range(0, count, group):
        portions_of_group = range(first, min(count, first + group))
        for stage, mb in itertools.product(stages, portions_of_group):
            if rank in runners.get((stage, mb % m), ()):
                yield list(_actions(module, routes, rank, stage, mb))


def _actions(module: Module, routes: Routes, rank: int, stage: int, mb: int) -> Iterator[Action]:
    """Yield what a rank does for a portion on one of its stages. Stages of one rank hand values on without messages."""

    def end(other: int) -> int | None:
        return other if module.packs else None

    tiles = tile_messages(module)

    def sources(edge: Edge, taker: int) -> tuple[int, ...]:
        ends = (edge.src, edge.dst, edge.phase)
        if ends in tiles:
            return tiles.senders(ends, taker, mb)
        return (routes.source(taker, FORWARD, edge.src, mb),)

    fellows = [other for other in routes.team(rank) if other != rank]
    for edge in module.edges:
        if edge.dst == stage and edge.phase == FORWARD:
            for peer in sources(edge, rank):
                if peer != rank:
                    handed = peer in fellows
                    yield Action(RECEIVE_OF[FORWARD], stage, mb, peer=peer, end=edge.src if handed else end(edge.src))
    for edge in module.edges:
        if (edge.src, stage, FORWARD) in tiles and (edge.dst, edge.phase) == (stage, FORWARD):
            for peer in fellows:
                if rank in sources(edge, peer):
                    yield Action(HAND_OF[FORWARD], stage, mb, peer=peer, end=edge.src)
    yield Action(FORWARD, stage, mb)
    for edge in _leaving(module, stage):
        for peer in routes.takers(FORWARD, edge.dst, mb):
            if peer != rank and rank in sources(edge, peer):
                yield Action(SEND_OF[FORWARD], stage, mb, peer=peer, end=end(edge.dst))
    yield Action(DROP, stage, mb)


@contextmanager
def _present(store: Store, names: Iterable[str]) -> Iterator[None]:
    """Have items on the device that a computation reads, which are at home between two steps."""
    brought = store.away(names)
    for name in brought:
        store.bring(name, "")
    store.await_items(brought)
    yield
    for name in brought:
        store.let_item_go(name)
