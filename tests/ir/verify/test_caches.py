"""The verifier about caches: one put for a variable, attend alone looks at them, and what trains has none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from oracles.caches.turns import Shape, turn_graph, turn_module

from penstock.ir.graph import Graph, Module, Op, Stage, Value
from penstock.ir.ops import make
from penstock.ir.types import parse_type
from penstock.ir.verify.verifier import verify
from penstock.passes.partition.chain import chain_of, moving_spans
from penstock.support.errors import VerifyError

SHAPE = Shape(rows=5, sequences=2, blocks=8)


def changed(change: Callable[[Graph], Graph]) -> Module:
    module = turn_module(SHAPE)
    return module.with_graph(change(module.graphs["main"]))


def refused(module: Module) -> str:
    with pytest.raises(VerifyError) as caught:
        verify(module)
    return str(caught.value)


def test_a_turn_is_legal() -> None:
    verify(turn_module(SHAPE))


def test_one_put_for_a_cache() -> None:
    def again(graph: Graph) -> Graph:
        first = graph.ops[0]
        return replace(
            graph, ops=(first, Op("put", first.ins, (Value("again", first.outs[0].type),), first.attrs), *graph.ops[1:])
        )

    assert "@l0.k was already put into above" in refused(changed(again))


def test_nothing_else_touches_a_cache() -> None:
    def read(graph: Graph) -> Graph:
        value = Value("old", graph.ops[0].outs[0].type)
        return replace(graph, ops=(Op("read", (), (value,), {"var": "l0.k"}), *graph.ops))

    assert "read of @l0.k, a cache; only put may touch it" in refused(changed(read))


@pytest.mark.parametrize("role", ["buffer", "param", "state"])
def test_puts_go_into_caches(role: str) -> None:
    module = turn_module(SHAPE)
    var = replace(module.vars["l0.k"], role=role)
    assert f"puts into @l0.k, a {role}; expected a cache" in refused(module.but(vars={**module.vars, "l0.k": var}))


def test_attend_looks_at_what_put_gave() -> None:
    def swapped(graph: Graph) -> Graph:
        given = Value("given", graph.ops[0].outs[0].type)
        attend = graph.ops[2]
        ins = (attend.ins[0], given, *attend.ins[2:])
        return replace(graph, ins=(*graph.ins, given), ops=(*graph.ops[:2], attend.with_ins(ins)))

    assert "looks at %given, which no put of this graph gives" in refused(changed(swapped))


def test_what_put_gave_goes_nowhere_else() -> None:
    def copied(graph: Graph) -> Graph:
        return replace(graph, ops=(*graph.ops, make("neg", (graph.ops[0].outs[0],), ["copy"])))

    assert "takes %k.all, the cache @l0.k itself" in refused(changed(copied))
    assert "returns %k.all, which is the cache @l0.k itself" in refused(
        changed(lambda graph: replace(graph, outs=(*graph.outs, graph.ops[0].outs[0])))
    )
    assert "saves %v.all, which is the cache @l0.v itself" in refused(
        changed(lambda graph: replace(graph, saved=(graph.ops[1].outs[0],)))
    )


def test_a_cache_begins_with_zeros_and_does_not_train() -> None:
    module = turn_module(SHAPE)
    var = replace(module.vars["l0.k"], init="file")
    assert "expected zeros" in refused(module.but(vars={**module.vars, "l0.k": var}))
    update = Graph("U", (), (), ())
    assert "@l0.k: is a cache, but the module trains" in refused(module.with_graph(update))


@pytest.mark.parametrize(
    ("operand", "kind", "message"),
    [
        (0, "f32[5,2,9]", "rows for @l0.k"),
        (0, "f16[5,2,8]", "rows for @l0.k"),
        (1, "i64[5]", "places of"),
        (1, "i32[4]", "places of"),
    ],
)
def test_rows_and_places_fit_the_cache(operand: int, kind: str, message: str) -> None:
    def retyped(graph: Graph) -> Graph:
        put = graph.ops[0]
        old = put.ins[operand]
        new = Value(old.name, parse_type(kind))
        table = {old: new}
        ins = tuple(table.get(v, v) for v in graph.ins)
        return replace(
            graph, ins=ins, ops=tuple(op.with_ins(tuple(table.get(v, v) for v in op.ins)) for op in graph.ops)
        )

    module = changed(retyped)
    assert message in refused(module.but(inputs=module.graphs["main"].ins))


def test_a_cache_is_in_blocks_of_16() -> None:
    module = turn_module(SHAPE)
    var = replace(module.vars["l0.k"], type=parse_type("f32[8,8,2,8]"))
    assert "a cache is f32 or bf16 [blocks, 16, heads, size]" in refused(module.but(vars={**module.vars, "l0.k": var}))


def test_no_stage_begins_between_a_put_and_what_looks_at_it() -> None:
    chain = chain_of(turn_module(SHAPE))
    assert moving_spans(chain) == {"l0.k": (0, 2), "l0.v": (1, 2)}


def test_stages_of_several_ranks_may_have_caches() -> None:
    """A cache moves with no order of microbatches: it is none of the running statistics."""
    from penstock.ir.graph import written_vars

    graph = turn_graph(SHAPE, "s0.F")
    assert not written_vars(graph)
    module = turn_module(SHAPE).but(graphs={graph.name: graph}, stages=(Stage(0, "cpu:0"),))
    verify(module)
