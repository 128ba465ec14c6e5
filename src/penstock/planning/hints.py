"""Follow the placement hints of a model where they can be followed, and say so, or say why not.

In: hints, the module as `partition` is about to see it, and a number of stages. Out: options for `partition`, and
notes.

    pipeline stages   followed when there are as many as stages are asked for, and each is one contiguous stretch of
                      operations, in their order: stages start where the model says
    layers            followed when there are enough places between layers: stages start at such places, and the search
                      chooses among them

Pipeline stages go before layers, and of several configurations the first that fits is taken. An operation without a
hint goes with the one before it. Hints are for nodes in the order of the file; a model whose nodes are in an order that
mixes stages is not reordered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from penstock.frontends.hints import Hints
from penstock.ir.attrs import Attr
from penstock.ir.graph import Module, Op
from penstock.passes.partition.chain import chain_of, names_to_split_at

Changes = dict[str, Attr]


def follow_hints(hints: Hints, module: Module, stages: int) -> tuple[Changes, list[str]]:
    """Return options for `partition` that follow the hints, empty if none can be followed; and notes for the user."""
    notes: list[str] = []
    chain = chain_of(module)
    for name, stage_of in hints.pipelines.items():
        starts, problem = _pipeline_starts(chain, stage_of, stages)
        if not problem:
            return {"split_at": _names(chain, starts)}, [
                *notes,
                f"stages are those of configuration {name!r} of the model",
            ]
        notes.append(f"the pipeline stages of configuration {name!r} of the model are not followed: {problem}")
    if hints.layers:
        starts = _changes(chain, hints.layers)
        if len(starts) >= stages - 1:
            return {"only_at": _names(chain, starts)}, [
                *notes,
                f"stages start between layers of the model, at one of {len(starts)} places",
            ]
        notes.append(
            f"the layers of the model are not followed: {stages} stages need {stages - 1} places between them, there "
            f"are {len(starts)}"
        )
    return {}, notes


def _pipeline_starts(chain: Sequence[Op], stage_of: Mapping[str, int], stages: int) -> tuple[list[int], str]:
    """Return the first operation of every stage but the first, and why the stages cannot be followed, if so."""
    hinted = [op for op in chain if op.loc in stage_of]
    count = len({stage_of[op.loc] for op in hinted})
    if count != stages:
        return [], f"it has {count} stages, {stages} are asked for"
    for before, after in pairwise(hinted):
        if stage_of[after.loc] < stage_of[before.loc]:
            order = (
                f"{before.loc} of stage {stage_of[before.loc]} stands before {after.loc} of stage {stage_of[after.loc]}"
            )
            return [], f"its stages are not contiguous in the order of the model, {order}"
    return _changes(chain, stage_of), ""


def _changes(chain: Sequence[Op], hint_of: Mapping[str, int] | Mapping[str, str]) -> list[int]:
    """Return the places in the chain whose hint is another one than before."""
    hinted = [(i, hint_of[op.loc]) for i, op in enumerate(chain) if op.loc in hint_of]
    return [i for (_, before), (i, after) in pairwise(hinted) if after != before]


def stage_starts(reference: Module, planned: Module) -> list[str | None]:
    """Name the operation that each stage of a planned module begins with, as `partition` takes it for `split_at`; None
    for the first. `reference` is the model before it was cut."""
    chain = chain_of(reference)
    starts: list[str | None] = [None]
    for stage in planned.stages[1:]:
        graph = planned.stage_graph(stage.index, "F")
        results = {v.name for op in graph.ops for v in op.outs} if graph is not None else set()
        starts.append(
            _names(chain, [next(i for i, op in enumerate(chain) if any(v.name in results for v in op.outs))])[0]
        )
    return starts


def _names(chain: Sequence[Op], starts: Sequence[int]) -> tuple[str, ...]:
    """Name these operations as `partition` understands them: by the nodes that begin with them, or else by their
    results."""
    names = names_to_split_at(chain)
    return tuple(names[i] for i in starts)
