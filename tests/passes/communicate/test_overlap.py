"""Laws of the pass `overlap`: it changes the order of operations alone, no number, and hides collectives.

The oracle of the laws is `faults`, which looks at orders without what the pass knows of them; that of numbers is the
interpreter, which runs the devices in lockstep.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.sharding.drawn_programs import drawn_program
from oracles.sharding.team_runs import run_parts

from penstock.ir.graph import Graph, Module, Op
from penstock.ir.ops import EXCHANGES
from penstock.ir.text import parse_module, print_graph
from penstock.ir.verify.verifier import check
from penstock.passes.communicate import overlap as subject
from penstock.passes.communicate.overlap import OverlapOptions, overlap
from penstock.support.errors import VerifyError

# What the gradient of a layer's input waits for, and the gradients of two layers' weights beside it.
TEXT = """module @m {
  var @w : f32[64,64] param
  var @w.grad : f32[64,64] grad
  var @v.grad : f32[64,64] grad
  graph @s0.B(%x : f32[64,64], %g : f32[64,64]) {
    %w : f32[64,64] = read(@w)
    %v.grad : f32[64,64] = matmul(%x, %g, ta=true)
    accum(%v.grad, @v.grad)
    %part : f32[64,64] = matmul(%g, %w, tb=true)
    %h : f32[64,64] = relu(%g)
    %sum : f32[64,64] = all_reduce(%part, over=tp)
    %out : f32[64,64] = relu(%sum)
    %w.grad : f32[64,64] = matmul(%x, %h, ta=true)
    accum(%w.grad, @w.grad)
    return %out
  }
}
"""


def faults(before: Graph, after: Graph) -> list[str]:
    """Return what an order has that another order of the same operations has not: values that are not there yet,
    variables that are read or changed at another time, collectives in another order."""
    found = []
    if Counter(map(id, before.ops)) != Counter(map(id, after.ops)):
        found.append("other operations")
    known = set(after.ins)
    for op in after.ops:
        found += [f"%{value.name} is not there" for value in op.ins if value not in known]
        known.update(op.outs)
    if accesses(before) != accesses(after):
        found.append("variables are read or changed at another time")
    first, second = ([id(op) for op in graph.ops if op.kind in EXCHANGES] for graph in (before, after))
    if first != second:
        found.append("another order of collectives")
    return found


def accesses(graph: Graph) -> dict[str, list[list[int]]]:
    """Return, for each variable, its changes in order, and for each read how many came before it."""
    seen: dict[str, list[list[int]]] = {}
    for op in graph.ops:
        if "var" not in op.attrs:
            continue
        changes, reads = seen.setdefault(op.var, [[], []])
        if op.kind == "read":
            reads.append((id(op), len(changes)))  # type: ignore[arg-type]
        else:
            changes.append(id(op))
    return {name: [changes, sorted(reads)] for name, (changes, reads) in seen.items()}


def local_module(number: int) -> Module:
    return drawn_program(number).local


@settings(max_examples=40, deadline=None)
@given(number=st.integers(0, 5000), growth=st.sampled_from([0.0, 0.125, 8.0]))
def test_an_order_is_a_permutation_that_keeps_what_depends(number: int, growth: float) -> None:
    module = local_module(number)
    after = overlap(module, OverlapOptions(growth))
    check(after, ("typed", "local"))
    for name, graph in module.graphs.items():
        assert faults(graph, after.graphs[name]) == []
        assert held(after.graphs[name]) <= held(graph) * (1 + growth)


def held(graph: Graph) -> int:
    """Return the most bytes of temporaries alive at once, found by looking at every moment."""
    outside = {*graph.ins, *graph.results, *(v for op in graph.ops if op.kind in ("read", "take") for v in op.outs)}
    end = len(graph.ops) - 1
    reads = {v: [i for i, op in enumerate(graph.ops) if v in op.ins] for op in graph.ops for v in op.outs}
    spans = []
    for i, op in enumerate(graph.ops):
        for value in op.outs:
            sent = [other for other in graph.ops if other.kind in EXCHANGES and value in other.ins]
            waits = [min(reads[other.outs[0]], default=end) for other in sent]
            if value not in outside and (reads[value] or waits):
                spans.append((i, max([*reads[value], *waits]), value.type.nbytes))
    return max((sum(n for a, b, n in spans if a <= now <= b) for now in range(len(graph.ops))), default=0)


@pytest.mark.parametrize("number", range(12))
def test_no_bit_of_any_value_changes(number: int) -> None:
    case = drawn_program(number)
    before = case.local
    after = overlap(before, OverlapOptions(8.0))
    values, stores = run_parts(before, case.weights(), case.batch(), {})
    again, others = run_parts(after, case.weights(), case.batch(), {})
    assert values.keys() == again.keys()
    for name, parts in values.items():
        for x, y in zip(parts, again[name], strict=True):
            assert np.array_equal(x, y, equal_nan=True), name
    for store, other in zip(stores, others, strict=True):
        for name, x in store.arrays.items():
            assert np.array_equal(x, other.arrays[name], equal_nan=True), name


def test_a_collective_begins_behind_its_operand_and_hides_behind_products() -> None:
    module = parse_module(TEXT, "text")
    after = overlap(module, OverlapOptions(8.0))
    kinds = [f"{op.kind} %{op.outs[0].name}" if op.outs else f"{op.kind} @{op.var}" for op in after.graphs["s0.B"].ops]
    assert kinds == [
        "read %w",
        "matmul %part",
        "all_reduce %sum",
        "relu %h",
        "matmul %v.grad",
        "accum @v.grad",
        "matmul %w.grad",
        "accum @w.grad",
        "relu %out",
    ]
    assert str(after.notes[-1]) != ""


def test_memory_is_not_exceeded() -> None:
    """The gradient of the weights is one more temporary while the sum is under way: without room nothing is put off."""
    module = parse_module(TEXT, "text")
    tight, roomy = (held(overlap(module, OverlapOptions(growth)).graphs["s0.B"]) for growth in (0.0, 8.0))
    assert tight <= held(module.graphs["s0.B"]) < roomy


def test_what_has_no_collectives_comes_back_as_it_is() -> None:
    module = parse_module(TEXT.replace("all_reduce(%part, over=tp)", "relu(%part)"), "text")
    assert overlap(module) is module


def mutants(graph: Graph) -> dict[str, Graph]:
    """Return wrong orders of the graph in TEXT."""
    ops = list(graph.ops)

    def moved(source: int, target: int) -> Graph:
        left = [*ops]
        left.insert(target, left.pop(source))
        return replace(graph, ops=tuple(left))

    return {
        "a result that is read before it is there": moved(6, 4),
        "an operand that is made too late": moved(3, 5),
        "an operation that is lost": replace(graph, ops=tuple(ops[:2] + ops[3:])),
        "an operation that is done twice": replace(graph, ops=(*ops, ops[2])),
    }


@pytest.mark.parametrize("name", mutants(parse_module(TEXT, "text").graphs["s0.B"]))
def test_control_wrong_orders_are_found(name: str) -> None:
    graph = parse_module(TEXT, "text").graphs["s0.B"]
    assert faults(graph, graph) == []
    assert faults(graph, mutants(graph)[name]) != [], print_graph(graph)


def test_control_an_order_that_ignores_what_depends_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that are ordered without their dependences fail the law, and the verifier refuses most of them."""

    def loose(ops: list[Op]) -> list[set[int]]:
        return [set() for _ in ops]

    monkeypatch.setattr(subject, "must_follow", loose)
    wrong, refused = 0, 0
    for number in range(12):
        module = local_module(number)
        after = overlap(module, OverlapOptions(8.0))
        wrong += any(faults(graph, after.graphs[name]) for name, graph in module.graphs.items())
        try:
            check(after, ("typed", "local"))
        except VerifyError:
            refused += 1
    assert wrong >= 3
    assert refused >= 3
