"""Tests of `inspect --sharding`: bytes of tensors are those of arrays cut into tiles, bytes of collectives those of sums
that are counted by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest

import penstock as ps
from penstock.commands.parser import main
from penstock.inspection.sharding.layouts import INPUT, split_facts
from penstock.inspection.views.sharding import show_sharding
from penstock.ir.sharding.tiles import cut
from penstock.ir.text import parse_module, print_module
from penstock.ir.types import numpy_dtype
from penstock.models import write_mlp
from penstock.support.errors import UsageError
from penstock.support.terminal import terminal_width

ROWS, WIDTH, HIDDEN, TP, MICROBATCHES = 4, 8, 34, 2, 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("split")
    write_mlp(folder / "mlp.onnx", [16, HIDDEN, WIDTH, HIDDEN, WIDTH])
    return folder


@pytest.fixture(scope="module")
def module(folder):
    """Two pairs of split products, on two teams of two."""
    training = ps.Training(loss="mse", optimizer=ps.SGD(lr=0.1), microbatches=MICROBATCHES)
    plan = ps.plan(
        ps.from_onnx(folder / "mlp.onnx", dims={"batch": ROWS}),
        ps.Cluster.local(4),
        training,
        stages=1,
        mesh=f"dp=2,tp={TP}",
        shard="preset:megatron",
    )
    return plan.module


def test_bytes_of_tensors_are_those_of_their_arrays(module):
    mesh = module.mesh_of(0)
    types = {var.name: var.type for var in module.vars.values()} | {v.name: v.type for v in module.inputs}
    facts = split_facts(module)
    assert {t.name for t in facts.tensors} == types.keys()
    assert {t.name for t in facts.tensors if t.role == INPUT} == {"x", "labels"}
    for t in facts.tensors:
        array = np.zeros(types[t.name].dims, numpy_dtype(types[t.name].dtype))
        parts = [cut(array, types[t.name], mesh, place) for place in range(len(mesh.devices))]
        assert t.device_bytes == max(part.nbytes for part in parts)
        assert (t.whole_bytes, t.copies) == (array.nbytes, sum(part.nbytes for part in parts))
    # The control: some tensors are split, and not all.
    split = {t.name for t in facts.tensors if t.device_bytes < t.whole_bytes}
    assert {"fc1.weight", "fc1.bias", "fc2.weight", "fc2.weight.grad"} <= split
    assert split.isdisjoint({"fc2.bias", "x", "lr"})


def test_bytes_of_collectives_are_those_counted_by_hand(module):
    facts = split_facts(module)
    # Each pair adds its result up in the forward; the second one adds up the gradient of what it takes.
    assert [(use.graph, use.kind, use.over, use.members) for use in facts.collectives] == [
        (graph, "all_reduce", ("tp",), TP) for graph in ("s0.F", "s0.F", "s0.B")
    ]
    one = ROWS * WIDTH * 4 * (TP - 1)
    assert [use.sent for use in facts.collectives] == [one] * 3
    # The gradient is added up behind the relu, through which sums pass in the backward.
    assert [use.behind.split()[0] for use in facts.collectives] == ["matmul", "matmul", "relu_grad"]
    assert [use.reader.split()[0] for use in facts.collectives[:2]] == ["add", "add"]
    # Of three microbatches one team runs two.
    assert [(g.graph, g.sent, g.batch, g.ranks) for g in facts.graphs] == [
        (name, count * one, 2 * count * one, MICROBATCHES * TP * count * one)
        for name, count in (("s0.F", 2), ("s0.B", 1))
    ]
    assert (facts.rank_bytes, facts.all_bytes) == (6 * one, 3 * MICROBATCHES * TP * one)


def test_a_collective_less_is_seen(module):
    """The control: without one sum the counts differ."""
    graph = module.graphs["s0.F"]
    kept = [op for op in graph.ops if op.kind != "all_reduce"]
    last = next(op for op in graph.ops if op.kind == "all_reduce")
    fewer = type(graph)(graph.name, graph.ins, graph.outs, (*kept, last), graph.saved)
    facts = split_facts(module.but(graphs={**module.graphs, "s0.F": fewer}))
    assert len(facts.collectives) == 2
    assert facts.all_bytes < split_facts(module).all_bytes


def test_the_command_shows_it(module, folder, capsys):
    path = folder / "local.ir"
    path.write_text(print_module(module))
    assert main(["inspect", str(path), "--sharding", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    facts = split_facts(parse_module(path.read_text()))
    assert [t["local"] for t in shown["tensors"]] == [t.local for t in facts.tensors]
    assert shown["all_bytes"] == facts.all_bytes
    assert main(["inspect", str(path), "--sharding"]) == 0
    text = capsys.readouterr().out
    assert text == show_sharding(facts, terminal_width()) + "\n"
    assert f"f32[16,{HIDDEN}/tp]" in text
    assert f"f32[16,{HIDDEN // TP}]" in text


def test_a_module_without_split_tensors_is_refused(folder):
    whole = ps.plan(ps.from_onnx(folder / "mlp.onnx", dims={"batch": ROWS}), ps.Cluster.local(1)).module
    with pytest.raises(UsageError, match="no tensor"):
        split_facts(whole)
