"""Part every stage's backward graph in two: the pass `split-backward`.

In: a module of stage graphs F, B, U. Out: B with what the gradients sent to other stages need, and W with the rest:
weight gradients and their `accum`.

    sN.B    the operations that its results depend on; saves what W takes of it: what it makes, and what it received for
            W
    sN.W    all others, once per microbatch after B; returns nothing

So the operand and the gradient of each weight's product stand in W, and a schedule may run W where the pipeline would
wait. B then W do what the backward graph did: every operation once, in the old order. W does again, instead of saving,
only what autodiff does again in B as well: what depends on constants and variables alone, and layout changes, which
cost nothing where they are read.

A backward graph that sends nothing (that of the first stage) has no results that are needed early. One that accumulates
nothing has no work that could wait. Both stay whole. So does that of a module without stages. What W needs lives longer
than under a whole backward.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from penstock.ir.graph import Graph, Module, Op, Value, made_values
from penstock.passes.training.autodiff import is_repeated


@dataclass(frozen=True, slots=True)
class SplitBackwardOptions:
    """Options of `split-backward`, which has none."""


def split_backward(module: Module, options: SplitBackwardOptions = SplitBackwardOptions()) -> Module:
    """Divide each stage's backward graph into B, which other stages wait for, and W, the gradients of weights."""
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
    """Divide one backward graph in two. `received` are the inputs that come from other stages: they arrive for B, which
    saves them for W."""
    early, used = _needed(backward.ops, backward.outs, ())
    early_values = made_values(early)
    late, late_uses = _needed(backward.ops, (), early_values - _done_again(backward))
    late_uses -= made_values(late)
    order = [*backward.ins, *(v for op in backward.ops for v in op.outs)]
    ins = tuple(v for v in backward.ins if v in used or v in received)
    saved = tuple(v for v in order if v in late_uses and (v in early_values or v in received))
    weights = Graph(backward.name[:-1] + "W", tuple(v for v in order if v in late_uses), (), late)
    return Graph(backward.name, ins, backward.outs, early, saved), weights


def _needed(
    ops: Sequence[Op], results: Collection[Value], available: Collection[Value]
) -> tuple[tuple[Op, ...], set[Value]]:
    """Return the operations that `results` depend on, and every value that they use.

    Without results they are the operations that `accum` depends on. Operations whose results are all `available` are
    left out.
    """
    used, kept = set(results), []
    for op in reversed(ops):
        effect = op.kind == "accum" and not results
        if effect or any(v in used and v not in available for v in op.outs):
            kept.append(op)
            used.update(op.ins)
    return tuple(kept[::-1]), used


def _done_again(graph: Graph) -> set[Value]:
    """Return the values that are cheaper to make a second time than to keep."""
    fixed: set[Value] = set()
    again: set[Value] = set()
    for op in graph.ops:
        if op.kind != "accum" and all(v in fixed for v in op.ins):
            fixed.update(op.outs)
        elif is_repeated(op):
            again.update(op.outs)
    return fixed | again
