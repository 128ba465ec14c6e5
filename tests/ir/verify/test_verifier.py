"""The checkers of graphs: each fact with faults that must be found, told with graph, operation, finding and expectation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock.ir.cluster.cluster import Cluster, Device
from penstock.ir.graph import Graph, Mesh, Module, Op, Value
from penstock.ir.ops import infer_op
from penstock.ir.text import parse_module, print_module
from penstock.ir.types import parse_type
from penstock.ir.verify.problems import LIMIT
from penstock.ir.verify.verifier import CHECKERS, LEVELS, check, verify
from penstock.support.errors import VerifyError

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


def message(module, *facts):
    with pytest.raises(VerifyError) as caught:
        check(module, facts) if facts else verify(module)
    return str(caught.value)


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


# ------------------------------------------------------------------------------------------------ staged


def test_every_input_has_a_provider(toy):
    module = toy(3)
    for graph, said in (("s1.F", "@s1.F: takes %ghost : f32[4], which nobody provides: not an input of the module, not returned by @s*.F"),
                        ("s1.B", "@s1.B: takes %ghost : f32[4], which nobody provides: not an input of the module, not saved by @s1.F, not returned by @s*.B")):  # fmt: skip
        old = module.graphs[graph]
        assert said in message(module.with_graph(replace(old, ins=(*old.ins, Value("ghost", VECTOR)))))


def test_every_value_has_one_maker_and_one_stage(toy):
    module = toy(3)
    last = module.graphs["s2.F"]
    again = replace(
        last, ops=(*last.ops, Op("neg", (last.ins[0],), (Value("h0", VECTOR),))), outs=(*last.outs, Value("h0", VECTOR))
    )
    text = message(module.with_graph(again))
    assert "%h0: is returned by @s0.F and @s2.F, expected one maker" in text
    assert "@s2.F op 2 (neg): %h0 is computed by @s0.F as well, expected one stage" in text


def test_a_dropped_layer_is_an_error(toy):
    module = toy(2)
    last = module.graphs["s1.F"]
    assert "%h1: is an output of the module, but no stage returns it; was a layer dropped?" in message(
        module.with_graph(replace(last, outs=()))
    )
    verify(module.but(outputs=(*module.outputs, "x")))
    lost = {**module.vars, "w9": replace(module.vars["w0"], name="w9")}
    assert "@w9: param f32[4] is used by no stage; was a layer dropped?" in message(module.but(vars=lost))


def test_variables_live_on_the_stage_that_uses_them(toy):
    module = toy(2)
    moved = {**module.vars, "w0": replace(module.vars["w0"], stage=1)}
    text = message(module.but(vars=moved))
    assert "@w0: is on stage 1, but used by stage 0" in text
    assert "hint: a variable without a stage is replicated" in text
    verify(module.but(vars={**module.vars, "w0": replace(module.vars["w0"], stage=None)}))
    absent = {**module.vars, "w0": replace(module.vars["w0"], stage=7)}
    assert "@w0: is on stage 7, which does not exist; there are [0, 1]" in message(module.but(vars=absent))


def test_stages_and_their_graphs(toy):
    module = toy(2)
    assert "stages: found stages [1], expected 0, 1, 2, ..." in message(module.but(stages=module.stages[1:]))
    assert "@main: is on no stage; expected only s<stage>.F, .B, .W, .P, .N and .U" in message(
        module.with_graph(Graph("main", (), (), ()))
    )
    assert "@m stages: found stages [], expected 0, 1, 2, ..." in message(Module("m", facts=("staged",)))
    assert "@s2.F: there is no stage 2, only 0 .. 1" in message(module.with_graph(Graph("s2.F", (), (), ())))
    graphs = {n: g for n, g in module.graphs.items() if n != "s1.F"}
    assert "stage 1: has no forward graph @s1.F" in message(module.but(graphs=graphs))
    assert "stage 1: is on cpu:1, which is no device or mesh; there are cpu:0" in message(
        module.but(cluster=Cluster.local(1))
    )


def test_a_name_is_one_place(toy):
    """A stage is on a device or on a mesh by its name alone."""
    module = toy(2).but(cluster=Cluster.local(2))
    mesh = Mesh("both", (("dp", 2),), ("cpu:0", "cpu:1"))
    check(module.but(meshes=(mesh,)), ["staged"])
    text = message(module.but(meshes=(replace(mesh, name="cpu:1"),)))
    assert "mesh @cpu:1: has the name of a device, so a stage on cpu:1 could be on either" in text
    text = message(module.but(meshes=(mesh, replace(mesh, devices=("cpu:1", "cpu:0")))))
    assert "mesh @both: has the name of another mesh" in text


def test_a_mesh_is_made_of_devices_that_can_run_the_same_code(toy):
    module = toy(2).but(
        cluster=Cluster(
            (Device("cpu:0"), Device("cpu:1"), Device("gpu:0", kind="cuda"), Device("cpu:2", target="armv8"))
        )
    )

    def said(*devices):
        return message(module.but(meshes=(Mesh("both", (("dp", 2),), devices),)), "staged")

    check(module.but(meshes=(Mesh("both", (("dp", 2),), ("cpu:0", "cpu:1")),)), ["staged"])
    assert "mesh @both: has cpu:7, cpu:8, which is no device; there are cpu:0, cpu:1, gpu:0, cpu:2" in said(
        "cpu:7", "cpu:8"
    )
    assert "mesh @both: has axes of 2 and devices cpu:0, expected as many different ones" in said("cpu:0")
    assert "mesh @both: has axes of 2 and devices cpu:0, cpu:0, expected as many different ones" in said(
        "cpu:0", "cpu:0"
    )
    assert "mesh @both: mixes devices that need different code: cpu native, cuda native" in said("cpu:0", "gpu:0")
    assert "mesh @both: mixes devices that need different code: cpu armv8, cpu native" in said("cpu:0", "cpu:2")


ANNOTATED = """module @m {
  stage 0 on cpu:0
  stage 1 on cpu:1
  input %x : f32[4]
  graph @F(%x : f32[4]) {
    %c : f32[4] = const(value=1.0, shape=[4], dtype=f32)
    %a : f32[4] = add(%x, %c, stage=0)
    %b : f32[4] = neg(%a, stage=1)
    %e : f32[4] = neg(%b, stage=1)
    save %b
    return %b
  }
  graph @B(%b : f32[4]) {
    %p : f32[4] = neg(%b, stage=1)
    %q : f32[4] = neg(%p, stage=0)
    %r : f32[4] = neg(%q, stage=0)
    return
  }
  graph @N() {
    %s : f32[4] = const(value=1.0, shape=[4], dtype=f32, stage=0)
    %n : f32[4] = neg(%s, stage=0)
    return
  }
  graph @U() {
    %s : f32[4] = const(value=1.0, shape=[4], dtype=f32, stage=0)
    %t : f32[4] = neg(%s, stage=0)
    return
  }
}
"""


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("%b : f32[4] = neg(%a, stage=1)", "%b : f32[4] = neg(%a)", "@F op 2 (neg): is on no stage, but takes %a from stage 0"),
        ("%b : f32[4] = neg(%a, stage=1)", "%b : f32[4] = neg(%a, stage=2)", "@F op 2 (neg): is on stage 2, expected 0 .. 1"),
        ("%b : f32[4] = neg(%a, stage=1)", "%b : f32[4] = neg(%a, stage=-1)", "@m @F op 2 (neg): is on stage -1, expected 0 .. 1"),
        ("%b : f32[4] = neg(%a, stage=1)", "%b : f32[4] = neg(%a, stage=one)", "@F op 2 (neg): is on stage one, expected 0 .. 1"),
        ("add(%x, %c, stage=0)", "add(%x, %c, stage=1)", ""),
        ("%b : f32[4] = neg(%a, stage=1)", "%d : f32[4] = neg(%a, stage=1)\n    %b : f32[4] = neg(%d, stage=0)",
         "is on stage 0, but takes %d from stage 1; values move up in a forward graph"),
        ("%p : f32[4] = neg(%b, stage=1)\n    %q : f32[4] = neg(%p, stage=0)", "%p : f32[4] = neg(%b, stage=0)\n    %q : f32[4] = neg(%p, stage=1)",
         "is on stage 1, but takes %p from stage 0; values move down in a backward graph"),
        ("%t : f32[4] = neg(%s, stage=0)", "%t : f32[4] = neg(%s, stage=1)", "@U op 1 (neg): is on stage 1, but takes %s from stage 0; values move nowhere"),
        ("%n : f32[4] = neg(%s, stage=0)", "%n : f32[4] = neg(%s, stage=1)", "@N op 1 (neg): is on stage 1, but takes %s from stage 0; values move nowhere"),
    ],
)  # fmt: skip
def test_annotations_before_the_split(old, new, said):
    check(parse_module(ANNOTATED), ("typed", "staged"))
    assert old in ANNOTATED
    changed = parse_module(ANNOTATED.replace(old, new))
    if said:
        assert said in message(changed, "typed", "staged")
    else:
        check(changed, ("typed", "staged"))


# ------------------------------------------------------------------------------------------------ fused


def test_kernels_must_have_an_order():
    text = """module @m facts(fused) {
  input %x : f32[4]
  graph @main(%x : f32[4]) {
    %a : f32[4] = neg(%x, kernel=k0)
    %b : f32[4] = neg(%a, kernel=k1)
    %c : f32[4] = add(%a, %b, kernel=k0)
    %d : f32[4] = neg(%c)
    %e : f32[4] = neg(%x, kernel=k2)
    return %d
  }
}
"""
    said = message(parse_module(text))
    assert "@main op 0 (neg): kernels k0, k1 need each other's results, so none of them can run as one" in said
    ordered = text.replace("%b : f32[4] = neg(%a, kernel=k1)", "%b : f32[4] = neg(%a, kernel=k0)")
    ordered = ordered.replace("neg(%c)", "neg(%c, kernel=k1)").replace("neg(%x, kernel=k2)", "neg(%d, kernel=k2)")
    verify(parse_module(ordered))
    assert "kernel must be a name, got 3" in message(parse_module(text.replace("%x, kernel=k0", "%x, kernel=3")))


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
