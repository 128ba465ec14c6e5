"""Every row of the op table over every legal split: the ranks of a mesh together compute what one device does.

Padding of operands is nan, so that none reaches a result."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations

import numpy as np
import pytest
from oracles.sharding.laid_out import cut_out
from oracles.sharding.one_operation import compare, local_module, types_of
from samples import SAMPLES, Sample

from penstock.ir.graph import Mesh, Op, Value
from penstock.ir.interpreter.graphs import run_team
from penstock.ir.ops import OPS, make
from penstock.ir.sharding.rules import rule_of
from penstock.ir.sharding.splits import Split, SplitRule
from penstock.ir.types import TensorType, numpy_dtype
from penstock.passes.sharding.propagate import allowed

MESHES = [
    Mesh("m", (("a", 2),), ("c0", "c1")),
    Mesh("m", (("a", 4),), tuple(f"c{i}" for i in range(4))),
    Mesh("m", (("a", 2), ("b", 2)), tuple(f"c{i}" for i in range(4))),
]
# Of the samples of a row that differ in element type alone, one is enough.
_SEEN: set[object] = set()


def _is_first(s: Sample) -> bool:
    key = (s.kind, s.pattern[0], str(sorted(s.pattern[1].items(), key=str)))
    fresh = key not in _SEEN
    _SEEN.add(key)
    return fresh


CHOSEN = [s for s in SAMPLES if _is_first(s) and sum(v.type.size for v in s.op.ins) < 20_000]


def splits_of(op: Op, rule: SplitRule, mesh: Mesh) -> Iterator[dict[str, Split]]:
    """Yield all ways to give the mesh's axes to the operation's names."""
    axes = [axis for axis, _ in mesh.axes]
    ways = [(axes,)] if len(axes) == 1 else [(axes,), (axes[::-1],), ([axes[0]], [axes[1]])]
    for way in ways:
        for names in permutations(rule.sizes, len(way)):
            splits = {name: Split(tuple(part)) for name, part in zip(names, way, strict=True)}
            if all(allowed(op, rule, name) and rule.sizes[name] for name in names):
                yield splits


def compare_sample(s: Sample, mesh: Mesh, types: list[TensorType]) -> None:
    compare(s.op, s.arrays(), mesh, types, padding=np.nan)


@pytest.mark.parametrize("s", CHOSEN, ids=str)
def test_every_legal_split_computes_what_one_device_does(s: Sample) -> None:
    op = s.op
    rule = rule_of(op)
    for mesh in MESHES:
        for splits in splits_of(op, rule, mesh):
            types = types_of(op, rule, splits, mesh.sizes)
            if types is not None:
                compare_sample(s, mesh, types)


@pytest.mark.parametrize("dtype", ["i64", "i8", "u8", "f32"])
def test_the_largest_of_an_uneven_part_is_never_padding(dtype: str) -> None:
    """All numbers are as low as can be."""
    low = np.iinfo(numpy_dtype(dtype)).min if dtype != "f32" else -np.inf
    x = Value("x0", TensorType(dtype, (5,)))
    op = make("max", (x,), ["y0"], axes=(0,))
    mesh = MESHES[1]
    _, module = local_module(op, [x.type.laid([("a",)]), op.outs[0].type], mesh)
    array = np.full(5, low, numpy_dtype(dtype))
    parts = [{"x0": cut_out(array, x.type.laid([("a",)]), mesh, place)} for place in range(4)]
    assert {results[0].item() for results in run_team(module.graphs["s0.F"], parts, mesh)} == {
        float(low) if dtype == "f32" else int(low)
    }


# Operands of 4096 rows whose sum is beyond the largest number of f16, their mean is not; and the name that is split.
LONG = {
    "mean": ("mean", [("f16", (4096,))], {"axes": (0,)}, "n0"),
    "mse": ("mse", [("f16", (4096,)), ("f16", (4096,))], {}, "b1"),
    "cross_entropy": ("cross_entropy", [("f16", (4096, 4)), ("i64", (4096,))], {}, "b1"),
    "cross_entropy of split classes": ("cross_entropy", [("f16", (4096, 4)), ("i64", (4096,))], {}, "n"),
}


@pytest.mark.parametrize("name", LONG)
def test_means_of_16_bit_numbers_are_added_up_in_32_bits(name: str) -> None:
    kind, listed, attrs, split = LONG[name]
    ins = tuple(Value(f"x{i}", TensorType(dtype, shape)) for i, (dtype, shape) in enumerate(listed))
    op = make(kind, ins, ["y", "lse"] if kind == "cross_entropy" else ["y"], "", **attrs)
    arrays = [
        np.full(v.type.dims, -60 * i if v.type.dtype == "f16" else 0, numpy_dtype(v.type.dtype))
        for i, v in enumerate(ins)
    ]
    # Every sample has a loss of 60: the logit of its label is -60, the others are zero.
    if kind == "mean":
        arrays[0][:] = 60
    elif kind == "cross_entropy":
        arrays[0][:, 0] = -60
    right = {"mean": 60.0, "mse": 3600.0, "cross_entropy": 60 + np.log(3)}[kind]
    types = types_of(op, rule_of(op), {split: Split(("a",))}, MESHES[0].sizes)
    assert types is not None
    whole, module = local_module(op, types, MESHES[0])
    parts = [
        {v.name: cut_out(x, v.type, MESHES[0], place) for v, x in zip(whole.ins, arrays, strict=True)}
        for place in range(2)
    ]
    summands = [float(results[0]) for results in run_team(module.graphs["s0.F"], parts, MESHES[0])]
    total = sum(summands) if types[len(ins)].partial else summands[0]
    assert total == pytest.approx(right, rel=2e-3)


def test_means_and_quotients_of_whole_numbers_are_no_sums_of_parts() -> None:
    x = Value("x", TensorType("i64", (6,)))
    mean, quotient = make("mean", (x,), ["y"], axes=(0,)), make("div", (x, x), ["y"])
    assert not rule_of(mean).may_split("n0")
    assert rule_of(mean).linear == rule_of(quotient).linear == ()
    halves = make("mean", (Value("x", TensorType("f64", (6,))),), ["y"], axes=(0,))
    assert rule_of(halves).may_split("n0")


def test_most_rows_can_be_split() -> None:
    """All but those that the note of the rule excludes whole have some legal split among the samples."""
    split = {s.kind for s in CHOSEN for names in splits_of(s.op, rule_of(s.op), MESHES[0]) if names}
    never = {row.name for row in OPS.values() if row.family not in ("state", "collective")} - split
    assert never == {"ramp"}


def test_control_a_wrong_rule_is_noticed() -> None:
    """A product whose inner dimension is split, and whose result is taken for the sum."""
    s = next(s for s in CHOSEN if s.kind == "matmul" and len(s.op.ins[0].type.dims) == 2)
    rule = rule_of(s.op)
    types = types_of(s.op, rule, {"k": Split(("a",))}, MESHES[0].sizes)
    assert types is not None
    assert types[2].partial == ("a",)
    compare_sample(s, MESHES[0], types)
    with pytest.raises(AssertionError):
        compare_sample(s, MESHES[0], [*types[:2], types[2].plain])


def test_control_splits_that_the_rule_refuses_are_wrong() -> None:
    """The keys and values of an attention, split along positions, which has no own form."""
    s = next(s for s in CHOSEN if s.kind == "attention" and s.op.ins[1].type.dims[2] > 3)
    laid = [v.type for v in (*s.op.ins, *s.op.outs)]
    for i in (1, 2):
        laid[i] = laid[i].laid([(), (), ("a",), ()])
    assert not rule_of(s.op).may_split("t")
    with pytest.raises(AssertionError):
        compare_sample(s, MESHES[0], laid)
