"""The checkers of graphs: each fact with faults that must be found, told with graph, operation, finding and expectation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock.ir.graph import Graph, Module, Op, Value
from penstock.ir.ops import infer_op
from penstock.ir.text import parse_module, print_module
from penstock.ir.types import parse_type
from penstock.ir.verify.problems import LIMIT
from penstock.ir.verify.verifier import CHECKERS, LEVELS, verify

from .edits import message

WHOLE = """module @m facts(differentiated) {
  input %x : f32[2,3]
  output %y
  var @w : f32[3,4] param
  var @w.grad : f32[3,4] grad init zeros
  var @w.m : f32[3,4] state init zeros
  graph @F(%x : f32[2,3]) {
    %w : f32[3,4] = read(@w)
    %h : f32[2,4] = matmul(%x, %w) ; layer0
    %y : f32[2,4] = relu(%h)
    save %x, %h
    return %y
  }
  graph @B(%x : f32[2,3], %h : f32[2,4]) {
    %y.grad : f32[2,4] = const(value=1.0, shape=[2,4], dtype=f32)
    %h.grad : f32[2,4] = mul(%h, %y.grad)
    %w.grad : f32[3,4] = matmul(%x, %h.grad, ta=true)
    accum(%w.grad, @w.grad)
    return
  }
  graph @U() {
    %w : f32[3,4] = read(@w)
    %g : f32[3,4] = take(@w.grad)
    %m : f32[3,4] = read(@w.m)
    %lr : f32[] = const(value=0.1, shape=[], dtype=f32)
    %w1 : f32[3,4], %m1 : f32[3,4] = momentum(%w, %g, %m, %lr)
    write(%w1, @w)
    write(%m1, @w.m)
    return
  }
}
"""
VECTOR = parse_type("f32[4]")


@pytest.fixture
def whole():
    return parse_module(WHOLE)


def with_op(module, graph, at, op):
    """The module with operation `at` of a graph replaced, or removed when `op` is None."""
    old = module.graphs[graph]
    return module.with_graph(replace(old, ops=old.ops[:at] + ((op,) if op else ()) + old.ops[at + 1 :]))


def test_legal_modules_pass(whole, toy):
    verify(whole)
    for stages in (1, 2, 4):
        verify(toy(stages, skip=True))
        verify(toy(stages, trains=False))


def test_every_fact_has_a_checker_and_a_level():
    assert sorted(CHECKERS) == sorted(fact for level in LEVELS for fact in level)


# ------------------------------------------------------------------------------------------------ typed

TYPED = [
    (
        "F",
        1,
        lambda op: replace(op, ins=op.ins[::-1]),
        ["@F op 1 (matmul from layer0): inner sizes differ: 4 of f32[3,4] and 2 of f32[2,3]"],
    ),
    (
        "F",
        2,
        lambda op: replace(op, ins=(Value("z", op.ins[0].type),)),
        ["@F op 2 (relu): operand %z is not defined above"],
    ),
    ("F", 2, lambda op: replace(op, ins=(Value("h", VECTOR),)), ["operand %h is used as f32[4], defined as f32[2,4]"]),
    ("F", 2, lambda op: replace(op, outs=(Value("y", VECTOR),)), ["result %y is declared f32[4], expected f32[2,4]"]),
    ("F", 2, lambda op: replace(op, outs=(Value("h", op.outs[0].type),)), ["%h is defined twice"]),
    (
        "F",
        2,
        lambda op: replace(op, outs=op.outs * 2),
        ["declares 2 results, the op table says 1", "%y is defined twice"],
    ),
    ("F", 2, lambda op: replace(op, kind="rleu"), ["unknown operation 'rleu'"]),
    ("F", 2, lambda op: replace(op, attrs={"slope": 1.0}), ["relu has no attribute 'slope'"]),
    ("F", 2, lambda op: replace(op, ins=op.ins * 2), ["takes 1 operands, got 2"]),
    ("F", 0, lambda op: op.with_attrs(var="v"), ["no variable @v in the module"]),
    ("F", 0, lambda op: op.with_attrs(version="newest"), ["reads version newest, expected mb or latest"]),
    (
        "B",
        3,
        lambda op: replace(op, ins=(Value("h", parse_type("f32[2,4]")),)),
        ["@w.grad is f32[3,4], the operand is f32[2,4]"],
    ),
]


@pytest.mark.parametrize(("graph", "at", "change", "said"), TYPED, ids=[said[0][-40:] for *_, said in TYPED])
def test_types_and_names(whole, graph, at, change, said):
    text = message(with_op(whole, graph, at, change(whole.graphs[graph].ops[at])))
    for part in said:
        assert part in text


def test_the_operations_around_are_shown(whole):
    text = message(with_op(whole, "U", 3, None))
    assert text.splitlines() == [
        "@m @U op 3 (momentum): operand %lr is not defined above",
        "        0 | %w : f32[3,4] = read(@w)",
        "        1 | %g : f32[3,4] = take(@w.grad)",
        "        2 | %m : f32[3,4] = read(@w.m)",
        "  >     3 | %w1 : f32[3,4], %m1 : f32[3,4] = momentum(%w, %g, %m, %lr)",
        "        4 | write(%w1, @w)",
        "        5 | write(%m1, @w.m)",
    ]


def test_results_inputs_and_saved_values(whole):
    forward = whole.graphs["F"]
    ghost = Value("ghost", VECTOR)
    assert "@F: returns %ghost, which is not defined in it" in message(
        whole.with_graph(replace(forward, outs=(ghost,)))
    )
    assert "@F: saves %ghost, which is not defined in it" in message(whole.with_graph(replace(forward, saved=(ghost,))))
    assert "@F: returns %y as f32[4], defined as f32[2,4]" in message(
        whole.with_graph(replace(forward, outs=(Value("y", VECTOR),)))
    )
    assert "@F: saves a value twice: %h, %h" in message(whole.with_graph(replace(forward, saved=forward.saved[1:] * 2)))
    assert "@F: input %x is listed twice" in message(whole.with_graph(replace(forward, ins=forward.ins * 2)))


def test_equal_names_in_different_graphs_are_equal_tensors(whole):
    backward = whole.graphs["B"]
    other = replace(backward, ins=(backward.ins[0], Value("h", VECTOR)), ops=())
    assert "@B: %h is f32[4] here and f32[2,4] in @F; equal names mean equal tensors" in message(
        whole.with_graph(other)
    )


def test_variables_and_graphs_lie_under_their_names(whole):
    assert "the variable stored under this name is called @w" in message(
        whole.but(vars={**whole.vars, "v": whole.vars["w"]})
    )
    assert "the graph stored under this name is called @F" in message(
        whole.but(graphs={**whole.graphs, "G": whole.graphs["F"]})
    )
    strange = {**whole.vars, "w": replace(whole.vars["w"], versions=0)}
    assert "@w: role param, 0 versions; expected one of param" in message(whole.but(vars=strange))
    strange = {**whole.vars, "w": replace(whole.vars["w"], role="weight")}
    assert "@w: role weight, 1 versions; expected one of param" in message(whole.but(vars=strange))


def test_a_variable_begins_with_as_many_elements_as_it_has(whole):
    def beginning_with(elements):
        return whole.but(vars={**whole.vars, "w.m": replace(whole.vars["w.m"], init=(0.5,) * elements)})

    verify(beginning_with(12))
    assert "@w.m: is f32[3,4] and begins with 11 elements" in message(beginning_with(11))


def test_one_error_lists_all_problems_up_to_a_bound(whole):
    bad = with_op(with_op(whole, "F", 2, Op("rleu", (), ())), "U", 3, None)
    text = message(bad)
    assert "@m: " in text
    assert "unknown operation 'rleu'" in text
    assert "operand %lr is not defined above" in text
    x = Value("x", VECTOR)
    many = Module("many", (x,), graphs={"main": Graph("main", (x,), (), (Op("rleu", (x,), ()),) * 50)})
    text = message(many)
    assert text.startswith(f"@many: {LIMIT} problems (the first ones)\n1. @main op 0 (rleu): unknown operation")
    assert f"\n{LIMIT}. " in text
    assert f"\n{LIMIT + 1}. " not in text


def test_consequences_of_a_type_error_are_not_listed(whole):
    text = message(with_op(whole.but(facts=("differentiated", "staged", "scheduled")), "U", 3, None))
    assert "problems" not in text


# ------------------------------------------------------------------------------------------------ differentiated


def test_backward_takes_exactly_what_forward_saves(whole):
    forward = whole.graphs["F"]
    text = message(whole.with_graph(replace(forward, saved=forward.saved[::-1])))
    assert "@B: takes %x, %h, expected what @F saves, in order: %h, %x" in text
    assert "@m graphs: no backward graph, expected B or s0.B, ...; there is @F" in message(
        whole.but(graphs={"F": forward})
    )
    nothing = replace(whole.graphs["B"], ins=(), ops=())
    assert message(whole.with_graph(nothing), "differentiated").splitlines()[1:] == [
        "1. @B: takes nothing, expected what @F saves, in order: %x, %h",
        "2. @U: gradient @w.grad is taken here and never accumulated by @B",
    ]


def test_a_stage_saves_nothing_in_vain(toy):
    module = toy(2)
    forward = module.graphs["s1.F"]
    assert "@s1.F: saves %h1, which @s1.B never takes" in message(
        module.with_graph(replace(forward, saved=(*forward.saved, *forward.outs)))
    )


def test_a_stage_may_have_nothing_to_train(toy):
    """But one that adds to gradients has an update."""
    module = toy(2)
    first, last = (replace(module.graphs[name], saved=saved, outs=outs) for name, saved, outs in (
        ("s0.F", (), module.graphs["s0.F"].outs), ("s1.B", (), ())))  # fmt: skip
    kept = {name: graph for name, graph in module.graphs.items() if name not in ("s0.B", "s0.U")}
    frozen = module.but(
        graphs={**kept, "s0.F": first, "s1.B": last}, vars={n: v for n, v in module.vars.items() if n != "w0.grad"}
    )
    verify(frozen)
    useless = {name: graph for name, graph in module.graphs.items() if name != "s1.U"}
    said = "@s1.B: gradient @w1.grad is accumulated here and never taken by the update graph, which is missing,"
    assert said in message(module.but(graphs=useless))


NORM = """  var @squares : f32[3,4] grad init zeros
  var @scale : f32[3,4] buffer
  var @scale.grad : f32[3,4] grad init zeros
"""


def test_the_norm_reads_gradients_and_adds_to_a_sum_that_the_update_takes():
    """And no gradient but that of a parameter has to lead to a new value."""
    text = WHOLE.replace("  graph @F", NORM + "  graph @F").replace(
        "    save", "    %s : f32[3,4] = read(@scale)\n    save"
    )
    text = text.replace("    accum", "    accum(%w.grad, @scale.grad)\n    accum")
    text = text.replace("    %lr", "    %q : f32[3,4] = take(@squares)\n    %r : f32[3,4] = take(@scale.grad)\n    %lr")
    norm = "  graph @N() {\n    %sum : f32[3,4] = read(@w.grad)\n    accum(%sum, @squares)\n    return\n  }\n"
    whole = text.replace("  graph @U", norm + "  graph @U")
    verify(parse_module(whole))
    assert "@U: gradient @squares is taken here and never accumulated by @B" in message(parse_module(text))
    taken = whole.replace("%sum : f32[3,4] = read(@w.grad)", "%sum : f32[3,4] = take(@w.grad)")
    assert "@N op 0 (take): take is not allowed here, only read, accum" in message(parse_module(taken))


EFFECTS = [
    (
        "F",
        0,
        Op("take", (), (Value("w", parse_type("f32[3,4]")),), {"var": "w.grad"}),
        "@F op 0 (take): take is not allowed here, only read",
    ),
    (
        "F",
        0,
        Op("read", (), (Value("w", parse_type("f32[3,4]")),), {"var": "w.grad"}),
        "@w.grad is a grad, expected param or state or buffer or setting",
    ),
    (
        "B",
        3,
        Op("write", (Value("w.grad", parse_type("f32[3,4]")),), (), {"var": "w"}),
        "write is not allowed here, only read, accum",
    ),
    ("B", 3, Op("accum", (Value("w.grad", parse_type("f32[3,4]")),), (), {"var": "w"}), "@w is a param, expected grad"),
    ("U", 1, Op("take", (), (Value("g", parse_type("f32[3,4]")),), {"var": "w.m"}), "@w.m is a state, expected grad"),
    (
        "U",
        6,
        Op("write", (Value("m1", parse_type("f32[3,4]")),), (), {"var": "w"}),
        "@w was already changed by write above",
    ),
    (
        "U",
        6,
        Op("accum", (Value("m1", parse_type("f32[3,4]")),), (), {"var": "w.grad"}),
        "accum is not allowed here, only read, take, write",
    ),
    (
        "U",
        6,
        Op("take", (), (Value("g2", parse_type("f32[3,4]")),), {"var": "w.grad"}),
        "@w.grad was already changed by take above",
    ),
    (
        "U",
        6,
        Op("read", (), (Value("w2", parse_type("f32[3,4]")),), {"var": "w"}),
        "@w was already changed by write above",
    ),
]


@pytest.mark.parametrize(("graph", "at", "op", "said"), EFFECTS, ids=[said[-40:] for *_, said in EFFECTS])
def test_effects_stand_where_they_may(whole, graph, at, op, said):
    assert said in message(with_op(whole, graph, at, op))


def test_gradients_are_taken_and_parameters_written_exactly_once(whole):
    assert "@B: gradient @w.grad is accumulated here and never taken by @U" in message(
        with_op(
            whole,
            "U",
            1,
            Op("const", (), (Value("g", parse_type("f32[3,4]")),), {"value": 0.0, "shape": (3, 4), "dtype": "f32"}),
        )
    )
    assert "@U: gradient @w.grad is taken here and never accumulated by @B" in message(with_op(whole, "B", 3, None))
    assert "@U: does not write @w, though its gradient is accumulated" in message(with_op(whole, "U", 5, None))
    unread = with_op(
        whole,
        "F",
        0,
        Op("const", (), (Value("w", parse_type("f32[3,4]")),), {"value": 0.0, "shape": (3, 4), "dtype": "f32"}),
    )
    assert "@U: writes @w, which neither forward nor backward of this stage reads" in message(unread)


# ------------------------------------------------------------------------------------------------ as a whole


def test_verification_reads_and_never_writes(toy):
    module = toy(3, skip=True)
    before = print_module(module)
    verify(module)
    assert print_module(module) == before


def test_a_graph_that_was_found_right_is_judged_again_by_other_variables(whole):
    verify(whole)
    wider = {**whole.vars, "w": replace(whole.vars["w"], type=parse_type("f32[3,5]"))}
    assert "expected f32[3,5]" in message(whole.but(vars=wider))
    assert "no variable @w.m in the module" in message(
        whole.but(vars={n: v for n, v in whole.vars.items() if n != "w.m"}), "typed"
    )
    every = {n: replace(v, type=parse_type("f32[7]"), init="zeros") for n, v in whole.vars.items()}
    assert "expected f32[7]" in message(whole.but(vars=every), "typed")
    # What is wrong is told each time, and the graphs are right where they were.
    assert message(whole.but(vars=wider)) == message(whole.but(vars=wider))
    verify(whole)


def test_fifty_thousand_operations_are_checked_without_recursion_or_quadratic_work():
    """No clock here: quadratic work in 50 000 operations would not end within the time limit of any test run."""
    x = Value("x", VECTOR)
    values = [x]
    ops = []
    for i in range(50_000):
        values.append(Value(f"v{i}", VECTOR))
        ops.append(Op("add", (values[-2], values[max(0, i - 1)]), (values[-1],), {"kernel": f"k{i // 3}"}))
    module = Module(
        "big",
        (x,),
        (values[-1].name,),
        graphs={"main": Graph("main", (x,), (values[-1],), tuple(ops))},
        facts=("fused",),
    )
    verify(module)
    broken = with_op(module, "main", 40_000, replace(ops[40_000], kind="mystery"))
    assert "@main op 40000 (mystery): unknown operation" in message(broken)


@pytest.mark.parametrize(
    ("kind", "right", "wrong"),
    [
        ("softmax", {"axis": 1}, [{"axis": True}, {"axis": 1.0}]),
        ("transpose", {"perm": (1, 0)}, [{"perm": (True, False)}, {"perm": (1.0, 0.0)}, {"perm": [1, 0]}]),
    ],
)
def test_types_that_were_found_are_not_those_of_what_python_takes_for_equal(
    kind: str, right: dict[str, Any], wrong: list[dict[str, Any]]
) -> None:
    x = Value("x", parse_type("f32[2,3]"))
    found = infer_op(Op(kind, (x,), (), right), {})
    for attrs in wrong:
        with pytest.raises(TypeError):
            infer_op(Op(kind, (x,), (), attrs), {})
    assert infer_op(Op(kind, (x,), (), right | {"kernel": "k1"}), {}) == found
