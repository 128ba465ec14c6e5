"""Lower `stage=` annotations: graphs F, B, N and U become one graph per stage, s0.F, s0.B, s0.U, s1.F, ...

A value that another stage uses leaves its stage as a result and enters the other as an input under the same name;
`communicate` wires them later. Operations without a stage are copied into every stage that uses their results. What is
added to a variable without a stage is added on every stage whose update takes it. A backward operation on stage s that
needs a forward value finds it in stage s: made there, or received there by the forward pass, and saved for the
microbatch, or made again there.

passes/training/shared_gradients.py lowers the exchanges once per batch (graphs P and N).

Invariant: taken together, the stage graphs hold every annotated operation exactly once, and name every value as before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from penstock.ir.graph import GRAD, Graph, Module, Op, Value, made_values, touched_vars
from penstock.passes.training.shared_gradients import apart, exchange, for_themselves
from penstock.support.errors import VerifyError

from .chain import forward_graph


@dataclass(frozen=True, slots=True)
class SplitOptions:
    """Options of `split`, which has none: the annotations decide."""


def split(module: Module, options: SplitOptions) -> Module:
    """Turn the annotated graphs into one forward, backward and update graph per stage."""
    stages = [stage.index for stage in module.stages]
    forward, backward, update = forward_graph(module), module.graphs.get("B"), module.graphs.get("U")
    graphs = {name: g for name, g in module.graphs.items() if name not in (forward.name, "B", "N", "U")}
    saved: dict[int, tuple[Value, ...]] = {}
    backward_parts: dict[int, Graph] = {}
    owner, alone = _owners(forward, stages), set[str]()
    gradient_owner: dict[Value, int] = {}
    if backward is not None:
        backward = apart(
            backward, (name for name, var in module.vars.items() if var.role == GRAD and var.stage is None)
        )
        alone = for_themselves(backward)
        gradient_owner = _owners(backward, stages)
        for stage in stages:
            part, saved[stage] = _backward_part(_without(backward, alone), stage, gradient_owner, forward, owner)
            backward_parts[stage] = part
    wanted = {stage: _wanted(forward, stage, owner, saved.get(stage, ())) for stage in stages}
    forward_parts = {stage: _forward_part(forward, stage, owner, wanted, saved.get(stage, ())) for stage in stages}
    ends: dict[int, list[Graph]] = {}
    if update is not None:
        reported = {s: update.outs if forward.outs[0] in _own_outs(forward, s, owner) else () for s in stages}

        def updated(stage: int) -> Graph:
            read = touched_vars(forward_parts[stage], "read") | touched_vars(backward_parts[stage], "read")
            return _update_part(update, stage, read, reported[stage])

        updates = {s: updated(s) for s in stages}
        for stage in (s for s in stages if alone & touched_vars(updates[s], "take")):
            # Its update needs what every stage adds for itself.
            assert backward is not None, "what updates take, backward adds"
            backward_parts[stage], _ = _backward_part(backward, stage, gradient_owner, forward, owner)
            updates[stage] = updated(stage)
        norms = (
            {s: part for s in stages if (part := _norm_part(module.graphs["N"], s)).ops} if "N" in module.graphs else {}
        )
        ends = exchange(module, backward_parts, norms, updates)
    for stage in stages:
        parts = [
            forward_parts[stage],
            *([backward_parts[stage]] if stage in backward_parts else []),
            *ends.get(stage, ()),
        ]
        graphs |= {part.name: part for part in parts}
    # Sums over stages are values in stage graphs.
    sums = {op.var for op in module.graphs["N"].ops if op.kind == "accum"} if "N" in module.graphs else set()
    return module.but(graphs=graphs, vars={name: var for name, var in module.vars.items() if name not in sums})


def _without(backward: Graph, names: set[str]) -> Graph:
    """Return the backward graph without what is added to some variables."""
    if not names:
        return backward
    return replace(backward, ops=tuple(op for op in backward.ops if op.kind != "accum" or op.var not in names))


def _owners(graph: Graph, stages: list[int]) -> dict[Value, int]:
    """Return the stage that makes each value. Values of operations that run everywhere, and inputs, are not in it."""
    owner: dict[Value, int] = {}
    for op in graph.ops:
        stage = op.attrs.get("stage")
        if stage is None:
            continue
        if stage not in stages:
            raise VerifyError(
                f"{op.kind} is annotated with stage {stage}, the module has stages {stages}", where=f"@{graph.name}"
            )
        owner |= dict.fromkeys(op.outs, int(stage))
    return owner


def _needed_ops(graph: Graph, stage: int, results: Iterable[Value]) -> tuple[list[Op], set[Value]]:
    """Return the operations of one stage plus the copies of unannotated ones they need, in order, and every value these
    use."""
    used: set[Value] = set(results)
    kept: list[Op] = []
    for op in reversed(graph.ops):
        where = op.attrs.get("stage")
        mine = where == stage or (where is None and (any(v in used for v in op.outs) or not op.outs))
        if mine:
            kept.append(op.with_attrs(stage=None))
            used.update(op.ins)
    return kept[::-1], used


def _wanted(forward: Graph, stage: int, owner: Mapping[Value, int], saved: Iterable[Value]) -> set[Value]:
    """Return the values of other stages, and inputs, that the forward graph of a stage takes."""
    ops, used = _needed_ops(forward, stage, (*saved, *_own_outs(forward, stage, owner)))
    return used - made_values(ops)


def _own_outs(forward: Graph, stage: int, owner: Mapping[Value, int]) -> list[Value]:
    """Return the outputs of the model that this stage returns; those that no stage owns come from the last."""
    last = max(owner.values(), default=0)
    return [v for v in forward.outs if owner.get(v, last) == stage]


def _forward_part(
    forward: Graph, stage: int, owner: Mapping[Value, int], wanted: Mapping[int, set[Value]], saved: tuple[Value, ...]
) -> Graph:
    outs = _own_outs(forward, stage, owner)
    exported = [
        v
        for op in forward.ops
        for v in op.outs
        if owner.get(v) == stage and any(v in w for s, w in wanted.items() if s != stage)
    ]
    outs += [v for v in exported if v not in outs]
    ops, _ = _needed_ops(forward, stage, (*saved, *outs))
    order = [*forward.ins, *(v for op in forward.ops for v in op.outs)]
    ins = tuple(v for v in order if v in wanted[stage])
    return Graph(f"s{stage}.F", ins, tuple(outs), tuple(ops), saved)


def _backward_part(
    backward: Graph, stage: int, owner: Mapping[Value, int], forward: Graph, forward_owner: Mapping[Value, int]
) -> tuple[Graph, tuple[Value, ...]]:
    """Return the backward graph of a stage, and the forward values it needs saved.

    A forward value that B computes again is computed again only where the forward pass made it, and not from results of
    a later stage. Otherwise it is saved.
    """

    def is_done_here(op: Op) -> bool:
        again = any(v in forward_owner for v in op.outs)
        return not again or (
            all(forward_owner[v] == stage for v in op.outs)
            and all(forward_owner.get(v, stage) <= stage for v in op.ins)
        )

    ops = tuple(op for op in backward.ops if is_done_here(op))
    exported = _used_elsewhere(backward, stage)
    outs = tuple(v for op in ops for v in op.outs if owner.get(v) == stage and v in exported)
    kept, used = _needed_ops(Graph(backward.name, backward.ins, outs, ops), stage, outs)
    needed = used - made_values(kept)
    saved = tuple(v for v in (*forward.ins, *(v for op in forward.ops for v in op.outs)) if v in needed)
    received = tuple(v for op in backward.ops for v in op.outs if v in needed and v not in saved)
    return Graph(f"s{stage}.B", received + saved, outs, tuple(kept)), saved


def _used_elsewhere(graph: Graph, stage: int) -> set[Value]:
    return {v for op in graph.ops if op.attrs.get("stage") not in (None, stage) for v in op.ins}


def _norm_part(norm: Graph, stage: int) -> Graph:
    """Return the part of N that one stage runs."""
    ops, _ = _needed_ops(
        Graph(norm.name, (), (), tuple(op for op in norm.ops if op.outs or op.attrs.get("stage") == stage)), stage, ()
    )
    return Graph(f"s{stage}.N", (), (), tuple(ops))


def _update_part(update: Graph, stage: int, read: set[str], outs: tuple[Value, ...]) -> Graph:
    """Return the updates of one stage, with `outs` as results.

    State without a stage is updated on every stage that uses it: parameters and other state that forward or backward
    `read` there, and the state that their updates use, such as the step counter.
    """
    ops = [op for op in update.ops if op.attrs.get("stage") == stage]
    ops += [op for op in update.ops if op.kind == "write" and "stage" not in op.attrs and op.var in read]
    used = _closure(update, (*outs, *(v for op in ops for v in op.ins)))
    touched = {op.var for op in update.ops if op.kind == "read" and op.outs[0] in used}
    shared_writes = [op for op in update.ops if op.kind == "write" and "stage" not in op.attrs and op.var in touched]
    used |= _closure(update, (v for op in shared_writes for v in op.ins))
    shared = {id(op) for op in (*ops, *shared_writes)}
    kept = [
        op for op in update.ops if id(op) in shared or ("stage" not in op.attrs and any(v in used for v in op.outs))
    ]
    return Graph(f"s{stage}.U", (), outs, tuple(op.with_attrs(stage=None) for op in kept))


def _closure(graph: Graph, values: Iterable[Value]) -> set[Value]:
    """Return the values, and all that unannotated operations need to make them."""
    used = set(values)
    for op in reversed(graph.ops):
        if "stage" not in op.attrs and any(v in used for v in op.outs):
            used.update(op.ins)
    return used
