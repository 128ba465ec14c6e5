"""Laws of the shrinker, on random models: what it gives still fails, is no larger, is legal, and no single edit makes it smaller."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.ir.graph import PARAM, Graph, Module, Op, Value, Var
from penstock.ir.interpreter.graphs import run_graph
from penstock.ir.ops import make
from penstock.ir.text import parse_module, print_module
from penstock.ir.types import TensorType
from penstock.ir.verify.verifier import verify
from penstock.passes.manager import parse_pipeline, run_passes
from penstock.passes.pipelines import PASSES
from penstock.support.errors import PenstockError
from penstock.verification.bisect.case import Case
from penstock.verification.bisect.edits import FAMILIES, Family, tidied
from penstock.verification.bisect.shrinking import Budget, shrink

ONE, TWO = ("neg", "tanh", "sigmoid", "exp"), ("add", "mul", "maximum")
UNLIMITED = partial(Budget, seconds=1e9, tries=10**9)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A line of operations on matrices of one size, products with parameters among them."""
    rows, width = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    source = np.random.default_rng(draw(st.integers(0, 99)))
    x = Value("x", TensorType("f32", (rows, width)))
    known, ops, held, weights = [x], [], {}, {}
    for i in range(draw(st.integers(1, 12))):
        kind = draw(st.sampled_from((*ONE, *TWO, "matmul")))
        ins = [draw(st.sampled_from(known)) for _ in range(2 if kind in TWO else 1)]
        if kind == "matmul":
            name = f"w{i}"
            held[name] = Var(name, TensorType("f32", (width, width)), PARAM)
            weights[name] = source.standard_normal((width, width)).astype(np.float32)
            ins.append(Value(f"{name}.read", held[name].type))
            ops.append(Op("read", (), (ins[1],), {"var": name}))
        ops.append(make(kind, ins, [f"v{i}"]))
        known.append(ops[-1].outs[0])
    outs = tuple(dict.fromkeys([known[-1], *draw(st.lists(st.sampled_from(known[1:]), max_size=2))]))
    graph = Graph("main", (x,), outs, tuple(ops))
    module = Module("drawn", (x,), tuple(v.name for v in outs), vars=held, graphs={"main": graph})
    batches = [
        {"x": source.standard_normal((2 * rows, width)).astype(np.float32)} for _ in range(draw(st.integers(1, 3)))
    ]
    verify(module)
    return Case(module, weights, batches)


def kinds(case: Case) -> list[str]:
    return [op.kind for op in case.module.graphs["main"].ops]


def holds(kind: str) -> Callable[[Case], bool]:
    """A fault that is there as long as one operation is."""
    return lambda case: kind in kinds(case)


def differs(kind: str) -> Callable[[Case], bool]:
    """A fault of numbers: results are others where an operation hands its operand on."""

    def fails(case: Case) -> bool:
        graph = case.module.graphs["main"]
        rows = graph.ins[0].type.dims[0]
        changed = replace(
            graph,
            ops=tuple(make("detach", op.ins[:1], [op.outs[0].name]) if op.kind == kind else op for op in graph.ops),
        )
        right, wrong = (_results(replace(case, module=case.module.with_graph(g)), g, rows) for g in (graph, changed))
        return any(
            not np.allclose(a, b, rtol=1e-6, atol=1e-9, equal_nan=True) for a, b in zip(right, wrong, strict=True)
        )

    return fails


def _results(case: Case, graph: Graph, rows: int) -> list[np.ndarray]:
    from penstock.ir.interpreter.store import DictStore, initial_arrays

    store = DictStore(initial_arrays(case.module, case.weights, list(case.module.vars), "f64"))
    return run_graph(graph, {"x": case.batches[0]["x"][:rows]}, store, "f64")


def smaller(case: Case, fails: Callable[[Case], bool]) -> str:
    """An edit that could still be made; the shrinker's own way of choosing is not asked."""
    for family in FAMILIES:
        for atom in family.atoms(case):
            found = family.apply(case, [atom])
            if found is not None and found.size < case.size and legal(found) and fails(found):
                return f"{family.name} {atom}"
    return ""


def legal(case: Case) -> bool:
    try:
        verify(case.module)
    except PenstockError:
        return False
    return True


@settings(max_examples=40, deadline=None)
@given(cases(), st.data())
def test_laws(case: Case, data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(sorted({*kinds(case)} - {"read"})))
    fails = data.draw(st.sampled_from([holds(kind), differs(kind)]))
    if not fails(case):
        return
    found = shrink(case, fails, UNLIMITED())
    assert fails(found)
    assert found.size <= case.size
    verify(found.module)
    text = print_module(found.module)
    assert print_module(parse_module(text)) == text
    assert not smaller(found, fails)
    assert print_module(shrink(case, fails, UNLIMITED()).module) == text


@settings(max_examples=20, deadline=None)
@given(cases(), st.data())
def test_of_one_operation_that_is_all_it_takes_nothing_else_stays(case: Case, data: st.DataObject) -> None:
    """The oracle: what has to stay is known beforehand, if somebody reads it."""
    case = tidied(case)
    kind = data.draw(st.sampled_from(sorted({*kinds(case)} - {"read"})))
    found = shrink(case, holds(kind), UNLIMITED())
    assert [k for k in kinds(found) if k not in ("read", "const")] == [kind]
    assert len(found.batches) == 1
    assert all(n == 1 for op in found.module.graphs["main"].ops for v in op.outs for n in v.type.dims)


def chain() -> Case:
    x = Value("x", TensorType("f32", (2, 4)))
    ops = [make("tanh", [x], ["a"])]
    for i, kind in enumerate(("exp", "neg", "sigmoid", "tanh")):
        ops.append(make(kind, ops[-1].outs, [f"b{i}"]))
    graph = Graph("main", (x,), ops[-1].outs, tuple(ops))
    return Case(
        Module("chain", (x,), (ops[-1].outs[0].name,), graphs={"main": graph}), {}, [{"x": np.ones((2, 4), np.float32)}]
    )


def test_what_is_illegal_is_never_taken() -> None:
    """The control: an edit that forgets who reads an operation would be the smallest of all."""

    def broken(case: Case, chunk: object) -> Case:
        graph = case.module.graphs["main"]
        return replace(case, module=case.module.with_graph(replace(graph, ops=graph.ops[1:])))

    family = Family("broken", lambda case: [0], broken)
    case = chain()
    assert not legal(broken(case, None))
    assert shrink(case, lambda found: True, UNLIMITED(), [family]) is case


def test_a_budget_is_kept() -> None:
    tried = []

    def fails(case: Case) -> bool:
        tried.append(case)
        return len(kinds(case)) > 2

    case = chain()
    found = shrink(case, fails, Budget(seconds=1e9, tries=1))
    assert len(tried) == 1
    assert found.size <= case.size
    assert shrink(case, fails, Budget(seconds=0.0)) is case


LOOKUP = """module @lookup {
  input %tokens : i64[3]
  input %labels : i64[3]
  output %loss
  var @table : f32[6,4] param
  var @inner : f32[4,4] param
  var @head : f32[4,5] param
  graph @main(%tokens : i64[3], %labels : i64[3]) {
    %t : f32[6,4] = read(@table)
    %x : f32[3,4] = gather(%t, %tokens, axis=0)
    %i : f32[4,4] = read(@inner)
    %p : f32[3,4] = matmul(%x, %i)
    %a : f32[3,4] = tanh(%p)
    %h : f32[4,5] = read(@head)
    %logits : f32[3,5] = matmul(%a, %h)
    %loss : f32[], %lse : f32[3] = cross_entropy(%logits, %labels)
    return %loss
  }
}
"""


@pytest.mark.parametrize("kind", ["gather_grad", "tanh", "sgd"])
def test_a_model_that_is_trained_stays_one(kind: str) -> None:
    """Forward, backward and update keep fitting each other, whatever is taken out of one of them."""
    module = parse_module(LOOKUP, "lookup.ir")
    source = np.random.default_rng(0)
    weights = {name: source.standard_normal(var.type.dims).astype(np.float32) for name, var in module.vars.items()}
    batch = {"tokens": source.integers(0, 6, (6,)), "labels": source.integers(0, 5, (6,))}
    calls = parse_pipeline("autodiff{microbatches=2},optimizer,simplify", PASSES)
    whole = run_passes(module, calls, PASSES)

    def fails(case: Case) -> bool:
        return any(op.kind == kind for graph in case.module.graphs.values() for op in graph.ops)

    case = Case(whole, weights, [batch, batch])
    found = shrink(case, fails, UNLIMITED())
    assert fails(found)
    verify(found.module)
    assert {"F", "B", "U"} <= found.module.graphs.keys()
    assert found.size[0] < case.size[0] / 2
