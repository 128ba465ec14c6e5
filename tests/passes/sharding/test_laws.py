"""Laws of layouts: a reshard between any two of them reaches the second and means the same, and the rule of an operation
of any shape holds."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.sharding.laid_out import cut_out, put_together
from oracles.sharding.one_operation import compare, local_module, types_of

from penstock.ir.collective_calls import calls_of, sent_bytes
from penstock.ir.graph import Mesh, Op, Value
from penstock.ir.interpreter.graphs import run_team
from penstock.ir.ops import make
from penstock.ir.sharding.paths import COLLECTIVE
from penstock.ir.sharding.rules import rule_of
from penstock.ir.sharding.splits import Split, SplitRule
from penstock.ir.types import TensorType
from penstock.passes.sharding import reshard
from penstock.passes.sharding.propagate import allowed, fits

MESHES = tuple(
    Mesh("m", axes, tuple(f"c{i}" for i in range(prod(n for _, n in axes))))
    for axes in ((("a", 2),), (("a", 3),), (("a", 2), ("b", 2)), (("a", 2), ("b", 3)), (("a", 2), ("b", 2), ("c", 2)))
)
SIZES = st.integers(1, 7)

# ------------------------------------------------------------------------------------------------ reshards


@st.composite
def layouts(draw: st.DrawFn, mesh: Mesh, shape: tuple[int, ...], summed: tuple[str, ...] | None = None) -> TensorType:
    """Draw a layout: an axis splits a dimension, leaves a partial sum (of those in `summed`, if given), or neither."""
    axes: list[list[str]] = [[] for _ in shape]
    partial = []
    for axis, _ in draw(st.permutations(mesh.axes)):
        where = draw(st.integers(-2, len(shape) - 1))
        if where >= 0:
            axes[where].append(axis)
        elif where == -2 and (summed is None or axis in summed):
            partial.append(axis)
    blocks = []
    for n, listed in zip(shape, axes, strict=True):
        parts = prod(mesh.sizes[axis] for axis in listed)
        fitting = [k for k in (2, 3, -2, -4) if listed and n % (k * parts) == 0]
        blocks.append(draw(st.sampled_from([1, *fitting])))
    return TensorType("f64", shape).laid([tuple(listed) for listed in axes], tuple(partial), blocks)


@st.composite
def reshards(draw: st.DrawFn) -> tuple[Mesh, TensorType, TensorType]:
    mesh = draw(st.sampled_from(MESHES))
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 5, 6, 8, 12]), min_size=1, max_size=3)))
    before = draw(layouts(mesh, shape))
    return mesh, before, draw(layouts(mesh, shape, before.partial))


def moved(before: TensorType, after: TensorType, mesh: Mesh, x: np.ndarray) -> tuple[np.ndarray, int]:
    """Return the whole tensor that all parts make after a reshard, and what it costs: the bytes that a rank sends, and
    those that its collectives count."""
    ins, outs = (Value("x", before),), (Value("y", after),)
    op = Op("reshard", ins, outs, {"to": str(after)})
    graph = local_module(op, [before, after], mesh)[1].graphs["s0.F"]
    parts = [{"x": cut_out(x, before, mesh, place)} for place in range(len(mesh.devices))]
    results = [outs[0] for outs in run_team(graph, parts, mesh, precision="f64")]
    cost = sum(sent_bytes(call.op, len(mesh.group(0, call.over))) + COLLECTIVE for call in calls_of(graph))
    return put_together(results, after, mesh), cost


@settings(max_examples=150)
@given(reshards())
def test_a_reshard_reaches_its_layout_and_means_the_same(case: tuple[Mesh, TensorType, TensorType]) -> None:
    mesh, before, after = case
    x = np.random.default_rng(0).standard_normal(before.dims)
    got, cost = moved(before, after, mesh, x)
    np.testing.assert_allclose(got, x, rtol=1e-12)
    # Without padding it never costs more than adding everything up and gathering it all would, of which every rank could
    # take its part.
    whole = before.plain.laid([()] * before.rank, after.partial, [1] * before.rank)
    if before.size and all(n % prod(mesh.sizes.values()) == 0 for n in before.dims):
        assert cost <= moved(before, whole, mesh, x)[1]


def test_control_the_part_of_another_rank_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = reshard.own_part
    monkeypatch.setattr(reshard, "own_part", lambda b, x, dim, axes, *more: right(b, x, dim, axes[::-1], *more))
    t = TensorType("f64", (4,))
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(moved(t, t.laid([("a", "b")]), MESHES[2], np.arange(4.0))[0], np.arange(4.0))


# ------------------------------------------------------------------------------------------------ rules


def value(name: str, *shape: int) -> Value:
    return Value(name, TensorType("f64", shape))


@st.composite
def operations(draw: st.DrawFn) -> Op:
    """Draw an operation of a random shape."""
    kind = draw(st.sampled_from(["matmul", "add", "reshape", "transpose", "sum", "mean", "concat", "softmax", "max"]))
    shape = tuple(draw(st.lists(SIZES, min_size=2, max_size=4)))
    x = value("x", *shape)
    if kind == "matmul":
        ta, tb, n = draw(st.booleans()), draw(st.booleans()), draw(SIZES)
        inner = shape[-2] if ta else shape[-1]
        lead = draw(st.sampled_from([(), shape[:-2], (1,) * (len(shape) - 2)]))
        return make(kind, (x, value("w", *lead, *((n, inner) if tb else (inner, n)))), ["y"], ta=ta, tb=tb)
    if kind == "add":
        first = draw(st.integers(0, len(shape)))
        other = tuple(draw(st.sampled_from([n, 1])) for n in shape[first:])
        return make(kind, (x, value("z", *other)), ["y"])
    if kind == "reshape":
        factors = [f for n in shape for f in ([2, n // 2] if n % 2 == 0 and draw(st.booleans()) else [n])]
        at = draw(st.integers(0, len(factors) - 1))
        joined = [*factors[:at], prod(factors[at : at + 2]), *factors[at + 2 :]]
        return make(kind, (x,), ["y"], shape=tuple(joined))
    if kind == "transpose":
        return make(kind, (x,), ["y"], perm=tuple(draw(st.permutations(range(len(shape))))))
    axis = draw(st.integers(0, len(shape) - 1))
    if kind in ("sum", "mean", "max"):
        axes = tuple(sorted(draw(st.sets(st.integers(0, len(shape) - 1), min_size=1))))
        return make(kind, (x,), ["y"], axes=axes, keep=draw(st.booleans()))
    if kind == "concat":
        longer = value("z", *(n + draw(st.integers(0, 1)) if i == axis else n for i, n in enumerate(shape)))
        return make(kind, (x, longer), ["y"], axis=axis)
    return make(kind, (x,), ["y"], axis=axis)


def check_shape(op: Op, rule: SplitRule) -> None:
    """Check that every dimension has as many elements as its factors together, and that marks are of known names."""
    assert rule.marks.keys() <= rule.sizes.keys()
    for v, dimensions in zip((*op.ins, *op.outs), rule.operands(), strict=True):
        for n, factors in zip(v.type.dims, dimensions, strict=True):
            assert not factors or prod(rule.sizes[name] for name in factors) == n


@settings(max_examples=150)
@given(operations(), st.sampled_from(MESHES), st.data())
def test_the_rule_of_an_operation_of_any_shape_holds(op: Op, mesh: Mesh, data: st.DataObject) -> None:
    rule = rule_of(op)
    check_shape(op, rule)
    names = [
        name
        for name, n in rule.sizes.items()
        if allowed(op, rule, name) and fits(Split(tuple(mesh.sizes)), n, mesh.sizes, alone=True)
    ]
    if names:
        splits = {data.draw(st.sampled_from(names)): Split(tuple(data.draw(st.permutations(list(mesh.sizes)))))}
        types = types_of(op, rule, splits, mesh.sizes)
        if types is not None:
            arrays = [np.random.default_rng(i).standard_normal(v.type.dims) for i, v in enumerate(op.ins)]
            compare(op, arrays, mesh, types)


def test_control_a_rule_with_swapped_names_is_noticed() -> None:
    op = make("matmul", (value("x", 4, 6), value("w", 6, 2)), ["y"])
    rule = rule_of(op)
    check_shape(op, rule)
    turned = SplitRule((rule.ins[0][::-1], rule.ins[1]), rule.outs, rule.sizes, rule.marks)
    with pytest.raises(AssertionError):
        check_shape(op, turned)
