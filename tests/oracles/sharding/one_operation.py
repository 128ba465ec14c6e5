"""One operation with its dimensions split: its types, its local form, and what the ranks of a mesh make of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.ir.graph import Graph, Mesh, Module, Op, Stage, Value
from penstock.ir.interpreter.graphs import run_graph, run_team
from penstock.ir.sharding.splits import Split, SplitRule, laid_out
from penstock.ir.types import FLOATS, TensorType
from penstock.passes.sharding.localize import localize
from penstock.passes.sharding.propagate import fits, is_alone

from .laid_out import cut_out, put_together


def types_of(op: Op, rule: SplitRule, splits: dict[str, Split], sizes: dict[str, int]) -> list[TensorType] | None:
    """Return the types of operands and results with these splits; None where they cannot be."""
    for dims in rule.operands():
        for factors in dims:
            for name in factors:
                alone = is_alone(rule, name, factors)
                if name in splits and not alone and not fits(splits[name], rule.sizes[name], sizes, alone):
                    return None
    types: list[TensorType] = []
    for i, (value, dims) in enumerate(zip((*op.ins, *op.outs), rule.operands(), strict=True)):
        t = laid_out(value.type, dims, splits, rule.sizes)
        if t is None:
            return None
        own = {name for factors in dims for name in factors}
        lacking = [name for name in splits if name not in own and rule.leaves_sums(name)]
        partial = [axis for name in lacking for axis in splits[name].axes] if i >= len(op.ins) else []
        types.append(t.laid(t.axes, partial, t.blocks))
    return types


def local_module(op: Op, types: Sequence[TensorType], mesh: Mesh) -> tuple[Graph, Module]:
    """Return the graph of one operation in whole form, and the module with the same graph in local form."""
    values = [Value(v.name, t) for v, t in zip((*op.ins, *op.outs), types, strict=True)]
    ins, outs = tuple(values[: len(op.ins)]), tuple(values[len(op.ins) :])
    whole = Graph("s0.F", ins, outs, (Op(op.kind, ins, outs, op.attrs),))
    module = Module("one", meshes=(mesh,), stages=(Stage(0, "m"),), graphs={"s0.F": whole})
    return whole, localize(module)


def compare(
    op: Op,
    arrays: Sequence[np.ndarray],
    mesh: Mesh,
    types: Sequence[TensorType],
    local: Graph | None = None,
    tolerance: float = 1e-11,
    padding: float = 0.0,
) -> None:
    """Hold what all ranks together compute, in double precision, against the whole operation. `padding` is what the
    padding of operands holds."""
    wide = [x.astype(np.float64) if v.type.dtype in FLOATS else x for x, v in zip(arrays, op.ins, strict=True)]
    whole, module = local_module(op, types, mesh)
    expected = run_graph(Graph("whole", op.ins, op.outs, (op,)), wide, precision="f64")
    parts = [
        {v.name: _padded_part(x, v.type, mesh, place, padding) for v, x in zip(whole.ins, wide, strict=True)}
        for place in range(len(mesh.devices))
    ]
    results = run_team(local or module.graphs["s0.F"], parts, mesh, precision="f64")
    for i, (value, right) in enumerate(zip(whole.outs, expected, strict=True)):
        got = put_together([outs[i] for outs in results], value.type, mesh)
        np.testing.assert_allclose(
            got, right.astype(got.dtype), rtol=tolerance, atol=tolerance / 10, err_msg=f"{op} {types}"
        )


def _padded_part(whole: np.ndarray, t: TensorType, mesh: Mesh, place: int, padding: float) -> np.ndarray:
    part = cut_out(whole, t, mesh, place)
    if padding and t.dtype in FLOATS and not t.partial:
        part[~cut_out(np.ones(whole.shape, bool), t, mesh, place)] = padding
    return part
