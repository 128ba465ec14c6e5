"""Exchange once per batch: gradients that several stages add to, and sums that all stages need before an update.

In: the graphs of the whole model, annotated with stages, where a variable with role grad and without a stage is
*shared*: each stage adds its part to it, and its sum is what N reads and U takes. There are two kinds:

    the gradient of a parameter that several stages use    each stage has a copy of the parameter and sums the gradients
                                                           of its uses
    a sum over all gradients, such as their squares        N adds the part of its stage

Out, per stage: P returns the parts of the first kind, N of the second; where N or U needs the sum it adds up the parts
of all stages, in the order of stages. So every copy is updated by the same numbers, and copies stay equal bit by bit.

What every stage adds for itself (`for_themselves`), the factors on the loss, is no part of a sum, and stays where it
is.

A value may be summed before it gets to the variable, or go through a cast or a change of layout on the way there.
`apart` divides it by stage again. So no gradient travels with every microbatch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from penstock.ir.graph import GRAD, Graph, Module, Namer, Op, Value, substitute, touched_vars
from penstock.ir.liveness import drop_dead
from penstock.ir.ops import integer

# Operations that may as well be done on each part of a sum.
_LINEAR = ("cast", "reshape", "transpose")


def for_themselves(backward: Graph) -> set[str]:
    """Return the variables to which every stage adds the same value, for itself."""
    return {op.var for op in backward.ops if op.kind == "accum" and "stage" not in op.attrs}


def apart(backward: Graph, shared: Iterable[str]) -> Graph:
    """Rewrite the backward graph so that every stage adds its part to a shared gradient."""
    names = set(shared) - for_themselves(backward)
    if not any(op.kind == "accum" and op.var in names for op in backward.ops):
        return backward
    namer, makers, ops = Namer.of(backward), backward.producers(), list[Op]()

    def emit_part(value: Value, stage: int, like: Op, *ins: Value) -> Value:
        out = Value(namer.fresh(f"{value.name}.s{stage}"), value.type)
        ops.append(Op(like.kind, ins, (out,), {**like.attrs, "stage": stage}, like.loc))
        return out

    def widened(part: Value, stage: int, total: Value, loc: str) -> Value:
        """Broadcast an operand of a sum that is repeated along dimensions of the other one, or of 1, to the shape of
        the sum."""
        if part.type.dims == total.type.dims:
            return part
        out = Value(namer.fresh(f"{total.name}.s{stage}"), total.type)
        ops.append(Op("broadcast", (part,), (out,), {"shape": total.type.dims, "stage": stage}, loc))
        return out

    # The contributions of stages to a value, each of its type, where there is more than one stage.
    parts: dict[Value, dict[int, Value]] = {}

    def parts_of(value: Value, stage: int) -> dict[int, Value]:
        """Return the parts of a value that is used on a stage. A value that depends on variables only is computed on
        that stage."""
        maker = makers.get(value)
        home = maker.attrs.get("stage", stage) if maker is not None else stage
        return parts.get(value) or {int(home): value}  # type: ignore[arg-type]

    def taken_apart(op: Op) -> dict[int, Value]:
        (value,), stage = op.outs, integer(op.attrs["stage"])
        if op.kind == "add":
            left, right = (parts_of(v, stage) for v in op.ins)
            return {
                s: emit_part(value, s, op, left[s], right[s])
                if s in left and s in right
                else widened((left | right)[s], s, value, op.loc)
                for s in (sorted({*left, *right}) if len({*left, *right}) > 1 else ())
            }
        scaled = op.kind == "mul" and "stage" not in makers[op.ins[1]].attrs
        stage_parts = parts.get(op.ins[0], {}) if op.kind in _LINEAR or scaled else {}
        return {s: emit_part(value, s, op, part, *op.ins[1:]) for s, part in stage_parts.items()}

    for op in backward.ops:
        if op.kind == "accum" and op.var in names:
            home = integer(op.attrs["stage"])
            ops += [
                Op("accum", (part,), (), {**op.attrs, "stage": s}, op.loc)
                for s, part in parts_of(op.ins[0], home).items()
            ]
            continue
        ops.append(op)
        if len(op.outs) == 1 and "stage" in op.attrs and "of" not in op.attrs and (stage_parts := taken_apart(op)):
            parts[op.outs[0]] = stage_parts
    return drop_dead(Graph(backward.name, backward.ins, backward.outs, tuple(ops), backward.saved))


def exchange(
    module: Module, backward: Mapping[int, Graph], norm: Mapping[int, Graph], update: Mapping[int, Graph]
) -> dict[int, list[Graph]]:
    """Return the graphs P, N and U of each stage, from the backward graphs and the parts of N and U on each."""
    added = {stage: touched_vars(graph, "accum") for stage, graph in backward.items()}
    counted = {stage: touched_vars(graph, "accum") for stage, graph in norm.items()}
    users: dict[str, set[int]] = {}
    for by_stage in (norm, update):
        for stage, graph in by_stage.items():
            for name in touched_vars(graph, "take", "read"):
                users.setdefault(name, set()).add(stage)
    shared = {name for name, var in module.vars.items() if var.role == GRAD and var.stage is None}
    shared -= for_themselves(module.graphs["B"])
    early = {name: [s for s, names in added.items() if name in names] for name in shared}
    # A gradient that is summed and used on one stage only needs no exchange.
    early = {
        name: stages for name, stages in early.items() if stages and {*stages, *users.get(name, ())} != {stages[0]}
    }
    late = {name: stages for name in sorted(shared) if (stages := [s for s, names in counted.items() if name in names])}
    parts = {name: [_part(module, name, s) for s in stages] for name, stages in (early | late).items()}
    graphs_of_stage: dict[int, list[Graph]] = {}
    for stage in sorted(update):
        graphs = graphs_of_stage.setdefault(stage, [])
        mine = [name for name in module.vars if stage in early.get(name, ())]
        if mine:
            ops = [Op("take", (), (_part(module, name, stage),), {"var": name}) for name in mine]
            graphs.append(Graph(f"s{stage}.P", (), tuple(v for op in ops for v in op.outs), tuple(ops)))
        if stage in norm:
            graphs.append(_handing_out(module, _summed(norm[stage], parts), stage))
        graphs.append(_summed(update[stage], parts))
    return graphs_of_stage


def _part(module: Module, name: str, stage: int) -> Value:
    return Value(f"{name}.s{stage}", module.vars[name].type)


def _summed(graph: Graph, parts: Mapping[str, Sequence[Value]]) -> Graph:
    """Replace reads and takes of shared variables by sums of parts, which become inputs of the graph."""
    namer = Namer(v.name for op in graph.ops for v in op.outs)
    ins: dict[Value, None] = dict.fromkeys(graph.ins)
    ops: list[Op] = []
    table: dict[Value, Value] = {}
    for op in graph.ops:
        op = op.with_ins(substitute(op.ins, table))
        if op.kind not in ("take", "read") or op.var not in parts:
            ops.append(op)
            continue
        ins |= dict.fromkeys(parts[op.var])
        total, *others = parts[op.var]
        for i, part in enumerate(others):
            last = i == len(others) - 1
            out = op.outs[0] if last else Value(namer.fresh(f"{op.outs[0].name}.to{i + 1}"), total.type)
            ops.append(Op("add", (total, part), (out,)))
            total = out
        table[op.outs[0]] = total
    return Graph(graph.name, tuple(ins), substitute(graph.outs, table), tuple(ops), graph.saved)


def _handing_out(module: Module, graph: Graph, stage: int) -> Graph:
    """Return the sums that the graph adds to variables as results instead, as the parts of its stage."""
    ops: list[Op] = []
    sums: dict[str, Value] = {}
    addends: dict[str, list[Value]] = {}
    for op in graph.ops:
        if op.kind == "accum":
            addends.setdefault(op.var, []).append(op.ins[0])
        else:
            ops.append(op)
    namer = Namer(v.name for op in graph.ops for v in op.outs)
    for name, (first, *others) in addends.items():
        out, total = _part(module, name, stage), first
        if not others:
            zero = Value(namer.fresh(f"{name}.none"), first.type)
            ops.append(Op("const", (), (zero,), {"value": 0.0, "dtype": first.type.dtype}))
            others = [zero]
        for i, value in enumerate(others):
            partial = out if i == len(others) - 1 else Value(namer.fresh(f"{name}.to{i + 1}"), total.type)
            ops.append(Op("add", (total, value), (partial,)))
            total = partial
        sums[name] = out
    return Graph(graph.name, graph.ins, tuple(sums.values()), tuple(ops))
