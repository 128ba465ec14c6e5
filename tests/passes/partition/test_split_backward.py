"""B and W apart do what the whole backward graph did, bit for bit; every operation stands in one of them, but for the cheap ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.ir.graph import Graph, Module, Stage
from penstock.ir.interpreter.graphs import run_graph
from penstock.ir.interpreter.ops import TYPED
from penstock.ir.interpreter.schedules import run_schedule
from penstock.ir.interpreter.store import DictStore
from penstock.ir.memory.predict import measure_memory
from penstock.ir.memory.workspace import planned_blocks
from penstock.ir.text import parse_module, print_module
from penstock.ir.verify.verifier import check, verify
from penstock.models import write_gpt
from penstock.passes.partition.split_backward import split_backward
from penstock.support.errors import VerifyError

GPT = {"layers": 3, "width": 16, "heads": 2, "vocab": 24, "positions": 6}
CUTS = ("h.1.attn.residual", "h.2.attn.residual")
MICROBATCHES = 4


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ps.Plan]:
    """One model and one cut under both schedules."""
    path = write_gpt(tmp_path_factory.mktemp("model") / "gpt.onnx", **GPT, seed=1)
    model = ps.from_onnx(path, dims={"batch": 2})
    training = ps.Training(loss="cross_entropy", optimizer=ps.AdamW(lr=0.01), microbatches=MICROBATCHES)
    return {
        kind: ps.plan(model, ps.Cluster.local(3), training, schedule=kind, split_at=CUTS, hints=False)
        for kind in ("1f1b", "zb-1f1b")
    }


def batches(count: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(5)
    shape = (2 * MICROBATCHES, GPT["positions"])
    return [{name: rng.integers(0, GPT["vocab"], shape) for name in ("tokens", "labels")} for _ in range(count)]


def backward_parts(module: Module) -> dict[int, list[Graph]]:
    found = {s.index: [module.stage_graph(s.index, kind) for kind in "BW"] for s in module.stages}
    return {stage: [graph for graph in graphs if graph is not None] for stage, graphs in found.items()}


def test_training_is_the_same_bit_for_bit(plans: dict[str, ps.Plan]) -> None:
    runs = {
        kind: run_schedule(p.module, p.model.imported.weights, batches(3), precision=TYPED) for kind, p in plans.items()
    }
    whole, apart = runs["1f1b"], runs["zb-1f1b"]
    assert whole.losses == apart.losses
    assert whole.variables.keys() == apart.variables.keys()
    for name, array in whole.variables.items():
        assert np.array_equal(array, apart.variables[name]), name
    assert {phase for _, _, phase, _ in apart.log} == {"F", "B", "W"}


def test_weight_gradients_stand_in_w_and_what_is_sent_in_b(plans: dict[str, ps.Plan]) -> None:
    whole, apart = (backward_parts(plans[kind].module) for kind in ("1f1b", "zb-1f1b"))
    assert [len(apart[s]) for s in (0, 1, 2)] == [1, 2, 2], "the first stage sends nothing"
    for stage in (1, 2):
        (before,), (b, w) = whole[stage], apart[stage]
        assert b.outs == before.outs
        assert not w.outs
        assert all(op.kind != "accum" for op in b.ops)
        assert [op.var for op in w.ops if op.kind == "accum"] == [op.var for op in before.ops if op.kind == "accum"]
        # A weight's gradient is a product of what F saved and what B kept.
        products = [op for op in w.ops if op.kind == "matmul" and op.outs[0].name.endswith("weight.grad")]
        assert products
        made = {v.name for op in w.ops for v in op.outs}
        assert all(v in w.ins or v.name in made for op in products for v in op.ins)
        assert set(b.saved) <= set(w.ins)


def test_nothing_is_computed_twice_but_constants_reads_and_copies(plans: dict[str, ps.Plan]) -> None:
    for stage, parts in backward_parts(plans["zb-1f1b"].module).items():
        if len(parts) == 2:
            both = {v for op in parts[0].ops for v in op.outs} & {v for op in parts[1].ops for v in op.outs}
            kinds = {op.kind for op in parts[1].ops if not both.isdisjoint(op.outs)}
            assert kinds <= {"const", "read", "iota", "reshape", "broadcast", "transpose", "cast"}, stage


def test_it_says_nothing_new_where_nothing_is_sent_or_trained(toy) -> None:
    assert split_backward(toy(1)) is toy(1) or split_backward(toy(1)) == toy(1)
    once = split_backward(toy(3, skip=True))
    assert sorted(once.graphs) == sorted([f"s{s}.{kind}" for s in range(3) for kind in "FBU"] + ["s1.W", "s2.W"])
    assert split_backward(once) is once
    verify(once)
    assert parse_module(print_module(once), "once.ir") == once


RECEIVED = """module @m facts(differentiated, staged) {
  stage 0 on cpu:0
  stage 1 on cpu:1
  stage 2 on cpu:2
  input %x : f32[4]
  output %c
  var @w : f32[4] stage 1 param
  var @w.grad : f32[4] stage 1 grad init zeros
  graph @s0.F(%x : f32[4]) {
    %a : f32[4] = neg(%x)
    return %a
  }
  graph @s1.F(%a : f32[4]) {
    %w.value : f32[4] = read(@w)
    %b : f32[4] = mul(%a, %w.value)
    save %a
    return %b, %w.value
  }
  graph @s1.B(%b.grad : f32[4], %w.value.grad : f32[4], %a : f32[4]) {
    %w.part : f32[4] = mul(%a, %b.grad)
    %w.total : f32[4] = add(%w.part, %w.value.grad)
    accum(%w.total, @w.grad)
    %twice : f32[4] = add(%b.grad, %b.grad)
    return %twice
  }
}
"""


def test_what_arrives_for_w_alone_still_arrives_for_b() -> None:
    """The gradient of a weight that travels is received with the others, and kept."""
    found = split_backward(parse_module(RECEIVED, "received.ir"))
    b, w = found.graphs["s1.B"], found.graphs["s1.W"]
    assert [v.name for v in b.ins] == ["b.grad", "w.value.grad"]
    assert [v.name for v in b.saved] == ["b.grad", "w.value.grad"]
    assert [v.name for v in w.ins] == ["b.grad", "w.value.grad", "a"]
    assert [op.kind for op in b.ops] == ["add"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("graph @s1.W(%h0 : f32[4], %h1.grad : f32[4])", "graph @s1.W(%h0 : f32[4], %h1.grad : f32[4], %other : f32[4])"), "nobody provides"),
        (("    save %h1.grad\n", ""), "which nobody provides: not an input of the module, not saved by @s1.F"),
        (("    %h0.grad : f32[4] = mul(%h1.grad, %w)\n", "    %h0.grad : f32[4] = mul(%h1.grad, %w)\n    accum(%h0.grad, @w1.grad)\n"), "accum is not allowed here"),
        (("    save %h1.grad\n", "    save %h1.grad, %w\n"), "@s1.B: saves %w, which no weight gradient graph takes"),
    ],
)  # fmt: skip
def test_a_split_that_does_not_hold_together_is_refused(toy, change: tuple[str, str], message: str) -> None:
    text = print_module(split_backward(toy(3)))
    assert text.count(change[0]) == 1, text
    with pytest.raises(VerifyError, match=message):
        check(parse_module(text.replace(*change), "changed.ir"), ("differentiated", "staged"))


def test_memory_counts_what_w_takes_until_w(plans: dict[str, ps.Plan]) -> None:
    """By hand: on the last stage two microbatches wait for their W after the backward of a third."""
    module = plans["zb-1f1b"].module
    memory = measure_memory(module)[2]
    forward, backward, weights = (module.stage_graph(2, kind) for kind in "FBW")
    assert forward is not None
    assert backward is not None
    assert weights is not None
    taken = {v.name: v.type.nbytes for v in weights.ins}
    saved = {v.name: v.type.nbytes for v in (*forward.saved, *backward.saved)}
    waiting = sum(size for name, size in taken.items() if name in saved)
    assert (memory.activations, memory.in_flight) == (3 * waiting, 3)
    # At the third backward: it holds all it takes, keeps and sends, while two wait. Blocks of other sizes may be held beside that.
    sent = sum(v.type.nbytes for v in backward.outs)
    least = memory.fixed + 2 * waiting + sum(saved.values()) + sent + sum(planned_blocks(backward))
    assert least <= memory.peak < 1.3 * least
    assert memory.activations > measure_memory(plans["1f1b"].module)[2].activations


@pytest.fixture(scope="module")
def backward_of_gpt(plans: dict[str, ps.Plan]) -> tuple[Graph, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The backward graph of the whole model, what it takes, and all variables."""
    plan = plans["1f1b"]
    weights = plan.model.imported.weights
    variables = {
        n: weights[n] if v.init == "file" else np.zeros(v.type.dims, np.float32) for n, v in plan.reference.vars.items()
    }
    forward, backward = plan.reference.graphs["F"], plan.reference.graphs["B"]
    fed = {name: array[:2] for name, array in batches(1)[0].items()}
    results = run_graph(forward, fed, DictStore(variables))
    return backward, fed | {v.name: x for v, x in zip(forward.results, results, strict=True)}, variables


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_backward_graph_is_the_same_in_two_parts(backward_of_gpt, data: st.DataObject) -> None:
    """Whatever is sent, and whatever came from other stages: results and gradients are those of the whole, bit for bit."""
    backward, values, variables = backward_of_gpt
    made = sorted((v for op in backward.ops for v in op.outs), key=lambda v: v.name)
    outs = tuple(data.draw(st.lists(st.sampled_from(made), min_size=1, max_size=3, unique=True)))
    received = set(data.draw(st.lists(st.sampled_from(backward.ins), max_size=3, unique=True)))
    whole = Graph("s0.B", backward.ins, outs, backward.ops)
    forward = Graph("s0.F", (), (), (), tuple(v for v in backward.ins if v not in received))
    module = Module("m", stages=(Stage(0, "cpu:0"),), graphs={"s0.F": forward, "s0.B": whole})
    parts = split_backward(module).graphs
    b, w = parts["s0.B"], parts["s0.W"]
    assert received <= set(b.ins)
    assert set(w.ins) <= {*b.saved, *forward.saved}
    stores = DictStore(variables), DictStore(variables)
    expected = run_graph(whole, {v.name: values[v.name] for v in whole.ins}, stores[0])
    found = run_graph(b, {v.name: values[v.name] for v in b.ins}, stores[1])
    kept = values | {v.name: x for v, x in zip(b.results, found, strict=True)}
    run_graph(w, {v.name: kept[v.name] for v in w.ins}, stores[1])
    for x, y in zip(expected, found, strict=False):
        assert np.array_equal(x, y)
    for name, array in stores[0].arrays.items():
        assert np.array_equal(array, stores[1].arrays[name]), name
        # A control that gradients were summed at all.
        assert not name.endswith(".grad") or array.any()
