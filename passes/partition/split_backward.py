"""split-backward: part every stage's backward graph in two. In: a module of stage graphs F, B, U. Out: B with what the gradients sent to
other stages need, and W with the rest: weight gradients and their `accum`.

    sN.B    the operations that its results depend on; saves what W takes of it: what it makes, and what it received for W
    sN.W    all others, once per microbatch after B; returns nothing

so that the operand and the gradient of each weight's product stand in W, and a schedule may run W where the pipeline would wait. B then W
do what the backward graph did: every operation once, in the old order. Done again in W, not saved, is only what autodiff does again in B
as well: what depends on constants and variables alone, and layout changes, which cost nothing where they are read.

A backward graph that sends nothing (that of the first stage) has nothing that is wanted early, and one that accumulates nothing has nothing
that could wait: both stay whole. So does that of a module without stages. What W needs lives longer than under a whole backward.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from penstock.ir.graph import Graph, Module, Op, Value, made_values
from penstock.passes.training.autodiff import is_repeated


@dataclass(frozen=True, slots=True)
class SplitBackwardOptions:
    """Nothing to choose."""


def split_backward(module: Module, options: SplitBackwardOptions = SplitBackwardOptions()) -> Module:
    """Part each stage's backward graph into B, which other stages wait for, and W, the gradients of weights."""
    parts: dict[str, tuple[Graph, Graph]] = {}
    for stage in module.stages:
        backward = module.stage_graph(stage.index, "B")
        if backward is None or module.stage_graph(stage.index, "W") is not None:
            continue
        if backward.outs and any(op.kind == "accum" for op in backward.ops):
            forward = module.stage_graph(stage.index, "F")
            kept = {*module.inputs, *(forward.saved if forward is not None else ())}
            parts[backward.name] = _part(backward, {v for v in backward.ins if v not in kept})
    if not parts:
        return module
    graphs: dict[str, Graph] = {}
    for name, graph in module.graphs.items():
        graphs |= {g.name: g for g in parts[name]} if name in parts else {name: graph}
    return module.but(graphs=graphs)


def _part(backward: Graph, received: Collection[Value]) -> tuple[Graph, Graph]:
    """`received` are the inputs that come from other stages: they arrive for B, and W has them from it."""
    early, used = _needed(backward.ops, backward.outs, ())
    made = made_values(early)
    late, given = _needed(backward.ops, (), made - _done_again(backward))
    given -= made_values(late)
    order = [*backward.ins, *(v for op in backward.ops for v in op.outs)]
    ins = tuple(v for v in backward.ins if v in used or v in received)
    saved = tuple(v for v in order if v in given and (v in made or v in received))
    weights = Graph(backward.name[:-1] + "W", tuple(v for v in order if v in given), (), late)
    return Graph(backward.name, ins, backward.outs, early, saved), weights


def _needed(
    ops: Sequence[Op], results: Collection[Value], there: Collection[Value]
) -> tuple[tuple[Op, ...], set[Value]]:
    """The operations that `results` depend on, or without any, those that `accum` does, as far as their results are not `there`; and
    every value that they use."""
    used, kept = set(results), []
    for op in reversed(ops):
        effect = op.kind == "accum" and not results
        if effect or any(v in used and v not in there for v in op.outs):
            kept.append(op)
            used.update(op.ins)
    return tuple(kept[::-1]), used


def _done_again(graph: Graph) -> set[Value]:
    """What is cheaper to make a second time than to keep."""
    fixed: set[Value] = set()
    again: set[Value] = set()
    for op in graph.ops:
        if op.kind != "accum" and all(v in fixed for v in op.ins):
            fixed.update(op.outs)
        elif is_repeated(op):
            again.update(op.outs)
    return fixed | again
