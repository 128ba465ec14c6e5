"""Stages that hand out gradients and norms, with weight gradients apart: every fault in the module of agreed.py is told."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from penstock.ir.graph import Module
from penstock.ir.text import parse_module
from penstock.ir.verify.verifier import verify
from penstock.support.errors import VerifyError

from .agreed import AGREED, ONE, edited


def message(module: Module) -> str:
    with pytest.raises(VerifyError) as caught:
        verify(module)
    return str(caught.value)


def test_the_module_these_tests_edit_is_legal() -> None:
    verify(parse_module(AGREED))


LEGAL = [
    ("s1.U", [("momentum(%t, %scaled, %m, %rate)", "momentum(%t, %scaled, %m, %rate, kernel=k0)")]),
    (
        "",
        [
            ("@t : f32[4] param", "@t : f32[4] param versions 2"),
            ("@t.grad : f32[4] grad", "@t.grad : f32[4] grad versions 2"),
        ],
    ),
    ("", [("output %b", "output %b\n  output %x")]),
]


@pytest.mark.parametrize(("graph", "changes"), LEGAL, ids=["annotations", "versions", "an input handed back"])
def test_what_is_different_and_legal(graph: str, changes: list[tuple[str, str]]) -> None:
    verify(edited(*changes, graph=graph))


# graph ("" for all), old and new text, what must be said
FAULTS = [
    # equal names
    ("s1.U", "%t.sum : f32[4] = add(%t.s0, %t.s1)", "%t.sum : f32[4] = add(%t.s1, %t.s0)",
     "@s1.U op 2 (add): %t.sum is computed otherwise by @s0.U; stages would not agree"),
    ("s1.U", "%m, %rate)", "%m, %rate, beta=0.5)", "@s1.U op 7 (momentum): %m1 is computed otherwise by @s0.U"),
    ("s1.U", "%factor : f32[4] = neg(%norm)", "%factor : f32[4] = relu(%norm)", "@s1.U op 1 (relu): %factor is computed otherwise by @s0.U"),
    ("s1.U", "%norm : f32[4] = add(%n0, %n1)", "%norm : f32[4] = add(%n1, %n0)", "@s1.U op 0 (add): %norm is computed otherwise by @s0.U"),
    # equal writes
    ("s1.U", "    write(%m1, @t.m)\n", "", "@s1.U: does not write @t.m, a copy of what stages [0] write"),
    ("s1.U", "write(%t1, @t)", "write(%m1, @t)", "@t: copies are written with different values: %t1 on stage 0, %m1 on stage 1"),
    *((f"s1.{kind}", "{\n", "{\n    %clock : f32[4] = read(@clock)\n", "@s1.U: does not write @clock, a copy of what stages [0] write")
      for kind in "FBWU"),
    # whole sums
    ("", "add(%t.s0, %t.s1)", "add(%t.s0, %t.s0)",
     "@s1.U: updates @t without the part of its gradient from stage 1; stages [0, 1] update it, and need the same sum"),
    ("", "add(%t.s0, %t.s1)", "add(%t.s1, %t.s1)", "@s0.U: updates @t without the part of its gradient from stage 0"),
    ("", "write(%t1, @t)", "%t2 : f32[4] = mul(%t.s0, %norm)\n    write(%t2, @t)", "@s0.U: updates @t without the part of its gradient from stage 1"),
    ("s0.U", "add(%t.s0, %t.s1)", "add(%u.s0, %t.s1)", "@s0.U: updates @t without the part of its gradient from stage 0"),
    ("s1.P", "return %t.s1", "return", "@s0.U: updates @t without the part of its gradient from stage 1"),
    # one decision
    ("", "mul(%t.sum, %norm)", "neg(%t.sum)", "@s1.U op 8 (write): writes @t without %n0, which stage 0 hands out: stages would not decide alike"),
    ("s0.U", "mul(%u.s0, %factor)", "neg(%u.s0)", "(write): writes @u without %n1, which stage 1 hands out"),
    ("s1.U", "write(%v.step, @v.m)", "write(%own, @v.m)", "(write): writes @v.m without %n0"),
    # own gradients
    ("s0.N", "%n0 :", "%again : f32[4] = read(@t.grad)\n    %n0 :", "@s0.N: uses @t.grad, which @s0.P has taken and handed out"),
    ("s0.U", "%own :", "%again : f32[4] = take(@u.grad)\n    %own :", "@s0.U: uses @u.grad, which @s0.P has taken and handed out"),
    # one copy
    ("", "@t.m : f32[4] state", "@t.m : f32[4] state versions 2", "@t.m: state has 2 versions, but no update changes what forward or backward reads"),
    # what is saved and taken
    ("s1.B", "save %b.grad", "save %b.grad, %a.grad", "@s1.B: saves %a.grad, which no weight gradient graph takes"),
    ("s1.F", "save %a, %g", "save %a, %g, %b", "@s1.F: saves %b, which @s1.B never takes"),
    ("s0.B", "    return", "    save %t.part0\n    return", "@s0.B: saves %t.part0, which no weight gradient graph takes"),
    # effects
    ("s1.B", "    save", "    accum(%a.grad, @v.grad)\n    save", "@s1.B op 2 (accum): accum is not allowed here, only read"),
    ("s0.P", "    return", "    %w : f32[4] = read(@u)\n    return", "@s0.P op 2 (read): read is not allowed here, only take"),
    ("s1.N", "read(@v.grad)", "read(@v)", "@s1.N op 0 (read): @v is a param, expected grad"),
    # updates
    ("s1.W", "    accum(%v.part1, @v.grad)\n", "", "@s1.U: gradient @v.grad is taken here and never accumulated by @s1.W"),
    ("s0.P", "    %u.s0 : f32[4] = take(@u.grad)\n", "    %u.s0 : f32[4] = neg(%t.s0)\n",
     "@s0.B: gradient @u.grad is accumulated here and never taken by @s0.U"),
    ("s1.W", "read(@k)", "read(@v)", "@s1.U: writes @k, which neither forward nor backward of this stage reads"),
    # providers
    ("s1.U", "return", "return %norm", "%norm: is returned by @s0.U and @s1.U, expected one maker"),
    # owners
    ("s1.F", "    save", "    %one : f32[4] = " + ONE + "\n    %h : f32[4] = add(%one, %a)\n    save",
     "@s1.F op 5 (add): %h is computed by @s0.F as well, expected one stage"),
    ("s1.F", "    save", "    %h : f32[4] = neg(%b)\n    save", "@s1.F op 4 (neg): %h is computed by @s0.F as well, expected one stage"),
    ("s1.B", "    save", "    %t.part0 : f32[4] = neg(%a)\n    save", "@s1.B op 2 (neg): %t.part0 is computed by @s0.B as well, expected one stage"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("graph", "old", "new", "said"), FAULTS, ids=[f"{graph} {said[:60]}" for graph, _, _, said in FAULTS]
)
def test_each_fault_is_told(graph: str, old: str, new: str, said: str) -> None:
    assert said in message(edited((old, new), graph=graph))


@pytest.mark.parametrize(
    ("graph", "tried"),
    [
        ("s0.F", ", not returned by @s*.F of another stage"),
        ("s0.B", ", not saved by @s0.F, not returned by @s*.B of another stage"),
        ("s1.W", ", not saved by @s1.F, not saved by @s1.B"),
        ("s1.N", ", not returned by @s*.P of another stage"),
        ("s1.U", ", not returned by @s*.P or @s*.N or @s*.U of another stage"),
    ],
)
def test_an_input_that_nobody_provides_is_told_with_all_who_could(graph: str, tried: str) -> None:
    module = parse_module(AGREED)
    old = module.graphs[graph]
    text = message(module.with_graph(replace(old, ins=(*old.ins, replace(module.inputs[0], name="ghost")))))
    assert f"@{graph}: takes %ghost : f32[4], which nobody provides: not an input of the module{tried}" == re.sub(
        "^@m ", "", text
    )


@pytest.mark.parametrize(("graph", "returned"), [("s1.F", "return %b"), ("s1.B", "return %a.grad")])
def test_no_graph_provides_itself(graph: str, returned: str) -> None:
    around = edited(("(%a : f32[4])", "(%a : f32[4], %q : f32[4])"), (returned, f"{returned}, %q"), graph=graph)
    assert f"@{graph}: takes %q : f32[4], which nobody provides" in message(around)


def test_weight_gradients_of_two_stages_are_two_values() -> None:
    """Stage 0 gets weight gradients of its own, one of which has the name of one of stage 1."""
    backward = "    %t.part0 : f32[4] = mul(%x, %a.grad)\n    %u.part0 : f32[4] = mul(%h, %a.grad)\n"
    sums = "    accum(%t.part0, @t.grad)\n    accum(%u.part0, @u.grad)\n    return\n  }\n"
    taken = "    save %a.grad\n    return\n  }\n  graph @s0.W(%x : f32[4], %a.grad : f32[4], %h : f32[4]) {\n"
    apart = edited((backward + sums, taken + backward + sums))
    verify(apart)
    twice = edited((backward + sums, taken + (backward + sums).replace("u.part0", "v.part1")))
    assert "@s1.W op 2 (mul): %v.part1 is computed by @s0.W as well, expected one stage" in message(twice)
