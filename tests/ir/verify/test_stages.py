"""The checkers of stages and of kernels: who provides what, and where it lies."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.ir.cluster.cluster import Cluster, Device
from penstock.ir.graph import Graph, Mesh, Module, Op, Value
from penstock.ir.text import parse_module
from penstock.ir.types import parse_type
from penstock.ir.verify.verifier import check, verify

from .edits import message

VECTOR = parse_type("f32[4]")

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
