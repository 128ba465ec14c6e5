"""Caches with their heads split over the ranks of a team: what they compute together is what one device does."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from oracles.caches.turns import Sequences, Shape, turn_module
from oracles.sharding.laid_out import cut_out

import penstock as ps
from penstock.frontends.imported import Imported
from penstock.ir.graph import Value
from penstock.ir.interpreter.graphs import run_team
from penstock.ir.interpreter.store import DictStore
from penstock.ir.ops import make
from penstock.ir.types import parse_type
from penstock.ir.verify.verifier import verify
from penstock.planning.model import Model
from penstock.support.errors import VerifyError

SHAPE = Shape(rows=9, sequences=4, blocks=24, heads=8, cache_heads=4)


def test_heads_are_split_over_a_team() -> None:
    model = Model(Imported(turn_module(SHAPE), {}, "none"))
    plan = ps.plan(model, ps.Cluster.local(2, threads=[1, 1]), mesh="tp=2", shard=["l0.k=[_,_,/tp,_]"])
    module = plan.module
    graph = module.graphs["s0.F"]
    types = {name: module.local_type(var.type, 0).dims for name, var in module.vars.items()}
    assert {t[2] for t in types.values()} == {2}, types
    stores = [DictStore({name: np.zeros(dims, np.float32) for name, dims in types.items()}) for _ in range(2)]

    def run(feed):
        mesh = module.mesh_of(0)
        parts = [{v.name: cut_out(feed[v.name], v.type, mesh, place) for v in module.data_inputs} for place in range(2)]
        results = run_team(graph, parts, mesh, stores)
        assert results[0][0].tobytes() == results[1][0].tobytes()
        return results[0]

    sequences = Sequences(SHAPE, [70, 33, 16, 1, 48])
    sequences.play(run)
    assert sequences.worst() < 2e-6


def test_control_a_rank_that_stores_other_rows_is_noticed() -> None:
    """The verifier knows that both ranks must store the same rows where a cache is whole."""
    module = turn_module(SHAPE)
    plan = ps.plan(
        Model(Imported(module, {}, "none")), ps.Cluster.local(2, threads=[1, 1]), mesh="tp=2", shard=["q=[_,/tp,_]"]
    )
    verify(plan.module)
    graph = plan.module.graphs["s0.F"]
    at = Value("mesh.tp", parse_type("i64[]"))
    rank = make("cast", (at,), ["rank"], dtype="i32")
    broken = make("add", (graph.ops[0].ins[1], rank.outs[0]), ["other.places"])
    puts = [op.with_ins((op.ins[0], broken.outs[0])) if op.kind == "put" else op for op in graph.ops]
    ins = graph.ins if at in graph.ins else (*graph.ins, at)
    with pytest.raises(VerifyError, match=r"%other.places may differ along tp between the ranks of a team, but @l0.k"):
        verify(plan.module.with_graph(replace(graph, ins=ins, ops=(rank, broken, *puts))))
