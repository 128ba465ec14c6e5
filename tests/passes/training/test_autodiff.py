"""Gradients of whole models against torch and finite differences; structure of what comes out, and what is refused."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.ir.graph import Graph, Module, Op, Value, Var
from penstock.ir.ops import make
from penstock.ir.text import parse_module, print_module
from penstock.ir.types import TensorType
from penstock.ir.verify.verifier import check
from penstock.passes.training.autodiff import AutodiffOptions, autodiff
from penstock.support.errors import UnsupportedModel, UsageError

from .autodiff_cases import gradients, normal

# ---------------------------------------------------------------------------------------- whole models

MODEL = """module @m {
  input %x : f64[4,6]
  input %labels : i64[4]
  output %loss
  output %y
  var @w1 : f64[6,9] param
  var @b1 : f64[9] param
  var @g : f64[3] param
  var @w2 : f64[3,6] param
  var @table : f64[5,6] param
  var @unused : f64[2] param
  var @mean : f64[6] buffer
  graph @main(%x : f64[4,6], %labels : i64[4]) {
    %mean : f64[6] = read(@mean)
    %xc : f64[4,6] = sub(%x, %mean)
    %table : f64[5,6] = read(@table)
    %e : f64[4,6] = gather(%table, %labels) ; /embed
    %h0 : f64[4,6] = add(%xc, %e) ; /embed/add
    %w1 : f64[6,9] = read(@w1)
    %b1 : f64[9] = read(@b1)
    %qkv0 : f64[4,9] = matmul(%h0, %w1) ; /qkv
    %qkv : f64[4,9] = add(%qkv0, %b1) ; /qkv
    %q : f64[4,3] = slice(%qkv, start=[0,0], stop=[4,3], step=[1,1]) ; /split
    %k : f64[4,3] = slice(%qkv, start=[0,3], stop=[4,6], step=[1,1]) ; /split
    %v : f64[4,3] = slice(%qkv, start=[0,6], stop=[4,9], step=[1,1]) ; /split
    %s : f64[4,4] = matmul(%q, %k, tb=true) ; /scores
    %p : f64[4,4] = softmax(%s) ; /softmax
    %o : f64[4,3] = matmul(%p, %v) ; /mix
    %g : f64[3] = read(@g)
    %g2 : f64[3] = mul(%g, %g) ; /gate
    %og : f64[4,3] = mul(%o, %g2) ; /gate
    %w2 : f64[3,6] = read(@w2)
    %wt : f64[6,3] = transpose(%w2, perm=[1,0]) ; /tied
    %z : f64[4,6] = matmul(%og, %wt, tb=true) ; /out
    %r : f64[4,6] = add(%z, %h0) ; /residual
    %again : f64[3,6] = read(@w2)
    %y : f64[4,3] = matmul(%r, %again, tb=true) ; /head
    %loss : f64[], %lse : f64[4] = cross_entropy(%y, %labels) ; loss
    return %loss, %y
  }
}
"""


def model_arrays():
    module = parse_module(MODEL)
    arrays = {name: normal(*var.type.shape) for name, var in module.vars.items()}
    return module, arrays | {"x": normal(4, 6), "labels": np.array([0, 2, 1, 2])}


def torch_loss(a):
    h0 = a["x"] - a["mean"] + a["table"][a["labels"]]
    q, k, v = (h0 @ a["w1"] + a["b1"]).split(3, 1)
    o = torch.softmax(q @ k.T, -1) @ v * (a["g"] * a["g"])
    return F.cross_entropy((o @ a["w2"] + h0) @ a["w2"].T, a["labels"])


def test_model_equals_torch_with_tied_weights_and_fan_in():
    module, arrays = model_arrays()
    found, loss = gradients(module, arrays, microbatches=4)
    tensors = {
        name: torch.tensor(x, requires_grad=name in ("w1", "b1", "g", "w2", "table")) for name, x in arrays.items()
    }
    expected = torch_loss(tensors)
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-12)
    assert set(found) == {"w1", "b1", "g", "w2", "table"}
    for name, grad in found.items():
        np.testing.assert_allclose(grad, tensors[name].grad.numpy() / 4, rtol=1e-9, atol=1e-14)


def test_model_equals_finite_differences():
    module, arrays = model_arrays()
    found, _ = gradients(module, arrays)
    for name, grad in found.items():
        direction = normal(*grad.shape)
        losses = [gradients(module, {**arrays, name: arrays[name] + h * direction})[1] for h in (1e-6, -1e-6)]
        assert (losses[0] - losses[1]) / 2e-6 == pytest.approx(float((grad * direction).sum()), rel=1e-6)


def test_what_backward_looks_like():
    module, _ = model_arrays()
    found = autodiff(module, AutodiffOptions(2))
    forward, backward = found.graphs["F"], found.graphs["B"]
    assert list(found.graphs) == ["F", "B"]
    assert forward.ops == module.graphs["main"].ops
    assert backward.ins == forward.saved
    assert backward.outs == ()
    accumulated = [op.var for op in backward.ops if op.kind == "accum"]
    assert sorted(accumulated) == [
        "b1.grad",
        "g.grad",
        "table.grad",
        "w1.grad",
        "w2.grad",
    ]  # once each, the tied one as well
    assert all(found.vars[name].role == "grad" and found.vars[name].init == "zeros" for name in accumulated)
    saved = {v.name for v in forward.saved}
    assert not saved & {
        "w1",
        "b1",
        "g",
        "g2",
        "w2",
        "wt",
        "again",
        "table",
        "mean",
    }  # depends on variables only: computed again
    assert any("@unused" in note.text for note in found.notes)
    made = {v.name for op in backward.ops for v in op.outs}
    assert {"loss.grad", "y.grad", "r.grad", "qkv.grad", "w1.grad"} <= made
    assert not made & {"x.grad", "xc.grad", "mean.grad", "labels.grad"}  # nothing for what is no parameter
    check(found, ("typed", "differentiated"))
    assert print_module(parse_module(print_module(found))) == print_module(found)


def test_every_backward_operation_says_where_it_belongs():
    """By `of`, with its loc; or it is a constant, a forward value computed again, a sum of gradients of one value, or an accumulation."""
    module, _ = model_arrays()
    found = autodiff(module, AutodiffOptions())
    forward = {v.name: op for op in found.graphs["F"].ops for v in op.outs}
    free = {"g2", "wt"}
    for op in found.graphs["B"].ops:
        if "of" in op.attrs:
            assert op.loc == forward[op.attrs["of"]].loc
            assert op.attrs["of"] == forward[op.attrs["of"]].outs[0].name
        else:
            of_free = op.loc in ("/gate", "/tied")
            again = all(v.name in forward for v in op.outs)
            summed = op.kind == "add" and ".grad" in op.outs[0].name
            assert op.kind in ("const", "accum") or again or summed or of_free, op
    assert not any(op.attrs.get("of") in free for op in found.graphs["B"].ops)


def test_reshape_is_repeated_instead_of_saved():
    text = """module @m {
  input %x : f64[2,6]
  output %loss
  var @w : f64[3,1] param
  var @v : f64[2,6] param
  graph @main(%x : f64[2,6]) {
    %v : f64[2,6] = read(@v)
    %h : f64[2,6] = mul(%x, %v)
    %r : f64[4,3] = reshape(%h, shape=[4,3]) ; /r
    %w : f64[3,1] = read(@w)
    %y : f64[4,1] = matmul(%r, %w)
    %loss : f64[] = sum(%y, axes=[0,1])
    return %loss
  }
}
"""
    found = autodiff(parse_module(text), AutodiffOptions())
    assert [v.name for v in found.graphs["F"].saved] == ["x", "h"]
    again = next(op for op in found.graphs["B"].ops if op.outs and op.outs[0].name == "r")
    assert again.attrs["of"] == "r"


def test_attention_saves_neither_scores_nor_copies():
    """The result as it is turned in the end, the statistics, and of three slices the whole."""
    text = """module @m {
  output %loss
  input %y : f32[2,8,12]
  input %u : f32[2,8,36]
  var @w : f32[2,8,36] param
  graph @main(%y : f32[2,8,12], %u : f32[2,8,36]) {
    %w : f32[2,8,36] = read(@w)
    %x : f32[2,8,36] = mul(%w, %u)
    %qs : f32[2,8,12] = slice(%x, start=[0,0,0], stop=[2,8,12], step=[1,1,1])
    %ks : f32[2,8,12] = slice(%x, start=[0,0,12], stop=[2,8,24], step=[1,1,1])
    %vs : f32[2,8,12] = slice(%x, start=[0,0,24], stop=[2,8,36], step=[1,1,1])
    %qr : f32[2,8,3,4] = reshape(%qs, shape=[2,8,3,4])
    %kr : f32[2,8,3,4] = reshape(%ks, shape=[2,8,3,4])
    %vr : f32[2,8,3,4] = reshape(%vs, shape=[2,8,3,4])
    %q : f32[2,3,8,4] = transpose(%qr, perm=[0,2,1,3])
    %k : f32[2,3,8,4] = transpose(%kr, perm=[0,2,1,3])
    %v : f32[2,3,8,4] = transpose(%vr, perm=[0,2,1,3])
    %o : f32[2,3,8,4], %a : f32[2,3,8], %b : f32[2,3,8] = attention(%q, %k, %v, scale=0.5)
    %t : f32[2,8,3,4] = transpose(%o, perm=[0,2,1,3])
    %m : f32[2,8,12] = reshape(%t, shape=[2,8,12])
    %p : f32[2,8,12] = mul(%m, %y)
    %z : f32[2,8,12] = mul(%p, %m)
    %loss : f32[] = sum(%z, axes=[0,1,2])
    return %loss
  }
}
"""
    module = autodiff(parse_module(text), AutodiffOptions())
    check(module, ("typed",))
    assert {v.name for v in module.graphs["F"].saved} == {"y", "u", "x", "a", "b", "m", "p"}
    assert {"o", "t", "q", "k", "v"} <= {v.name for op in module.graphs["B"].ops for v in op.outs}


def test_stage_annotations_are_inherited():
    module, _ = model_arrays()
    main = module.graphs["main"]
    staged = tuple(op.with_attrs(stage=0 if i < 10 else 1) for i, op in enumerate(main.ops))
    found = autodiff(module.with_graph(Graph("main", main.ins, main.outs, staged)), AutodiffOptions())
    stages = {v.name: op.attrs["stage"] for op in staged for v in op.outs}
    for op in found.graphs["B"].ops:
        if "of" in op.attrs:
            assert op.attrs["stage"] == stages[op.attrs["of"]]


# ---------------------------------------------------------------------------------------- errors


def error_model(body):
    return parse_module(
        f"""module @m {{
  input %x : f32[4]
  output %loss
  var @w : f32[4] param
  graph @main(%x : f32[4]) {{
    %w : f32[4] = read(@w)
    {body}
    %loss : f32[] = sum(%z, axes=[0])
    return %loss
  }}
}}
"""
    )


def test_flat_operations_are_all_listed():
    body = """%a : f32[4] = floor(%w) ; /round
    %b : f32[4] = sign(%w)
    %i : i64[] = argmax(%w, axis=0)
    %j : i32[4] = cast(%w, dtype=i32)
    %jf : f32[4] = cast(%j, dtype=f32)
    %c : f32[] = gather(%x, %i)
    %d : f32[4] = add(%a, %b)
    %e : f32[4] = add(%d, %jf)
    %z : f32[4] = mul(%e, %c)"""
    with pytest.raises(UnsupportedModel) as caught:
        autodiff(error_model(body), AutodiffOptions())
    for part in ("floor %a (/round)", "sign %b", "argmax %i", "cast %j"):
        assert part in str(caught.value)


def test_flat_operations_beside_the_path_are_fine():
    """On inputs, and on parameters where the loss does not depend on the result; comparisons choose without a gradient."""
    body = """%a : f32[4] = floor(%x)
    %dead : f32[4] = floor(%w)
    %m : bool[4] = less(%w, %x)
    %s : f32[4] = where(%m, %w, %x)
    %z : f32[4] = mul(%s, %a)"""
    found = autodiff(error_model(body), AutodiffOptions())
    assert "w.grad" in found.vars


def test_refused_modules():
    good = error_model("%z : f32[4] = mul(%x, %w)")
    with pytest.raises(UsageError, match="microbatches"):
        autodiff(good, AutodiffOptions(0))
    with pytest.raises(UsageError, match="loss"):
        autodiff(good.but(outputs=()), AutodiffOptions())
    with pytest.raises(UsageError, match="no parameter"):
        autodiff(error_model("%z : f32[4] = mul(%x, %x)"), AutodiffOptions())
    with pytest.raises(UsageError, match="no graph main"):
        autodiff(autodiff(good, AutodiffOptions()), AutodiffOptions())
    with pytest.raises(UsageError, match=r"names @w\.grad"):
        autodiff(
            good.but(vars={**good.vars, "w.grad": Var("w.grad", good.vars["w"].type, "buffer")}), AutodiffOptions()
        )


# ---------------------------------------------------------------------------------------- random graphs

UNARY = {
    "neg": torch.neg,
    "sin": torch.sin,
    "cos": torch.cos,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
    "gelu": F.gelu,
    "erf": torch.erf,
}
BINARY = {"add": torch.add, "sub": torch.sub, "mul": torch.mul, "maximum": torch.maximum, "minimum": torch.minimum}
SHAPES = [(), (3,), (1,), (2, 3), (2, 1), (4, 2, 3), (4, 1, 1)]


@st.composite
def random_models(draw):
    """Elementwise graphs with broadcasting and values used several times, with their torch meaning."""
    leaves = draw(st.lists(st.sampled_from(SHAPES), min_size=2, max_size=4))
    ops = [
        Op("read", (), (Value(f"p{i}", TensorType("f64", shape)),), {"var": f"p{i}"}) for i, shape in enumerate(leaves)
    ]
    values = [op.outs[0] for op in ops]
    steps = []
    for n in range(draw(st.integers(1, 10))):
        kind = draw(st.sampled_from([*UNARY, *BINARY]))
        picks = [draw(st.integers(0, len(values) - 1)) for _ in range(1 if kind in UNARY else 2)]
        ops.append(make(kind, [values[i] for i in picks], [f"v{n}"]))
        steps.append((kind, picks))
        values.append(ops[-1].outs[0])
    total = None
    for i, value in enumerate(values[len(leaves) :]):
        ops.append(make("sum", [value], [f"s{i}"], axes=tuple(range(value.type.rank))))
        part = ops[-1].outs[0]
        if total is not None:
            ops.append(make("add", [total, part], [f"t{i}"]))
        total = ops[-1].outs[0]
    variables = {f"p{i}": Var(f"p{i}", TensorType("f64", shape), "param") for i, shape in enumerate(leaves)}
    module = Module("m", (), (total.name,), vars=variables, graphs={"main": Graph("main", (), (total,), tuple(ops))})
    return module, steps, draw(st.integers(0, 1000))


@settings(max_examples=60, deadline=None)
@given(random_models())
def test_random_graphs_equal_torch(model):
    module, steps, seed = model
    rng = np.random.default_rng(seed)
    arrays = {name: rng.normal(size=var.type.shape) for name, var in module.vars.items()}
    found, loss = gradients(module, arrays)
    leaves = [torch.tensor(x, requires_grad=True) for x in arrays.values()]
    values = list(leaves)
    for kind, picks in steps:
        values.append({**UNARY, **BINARY}[kind](*(values[i] for i in picks)))
    expected = sum(v.sum() for v in values[len(leaves) :])
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-9, abs=1e-9)
    for name, leaf in zip(arrays, leaves, strict=True):
        assert (name in found) == (leaf.grad is not None)
        if name in found:
            np.testing.assert_allclose(found[name], leaf.grad.numpy(), rtol=1e-7, atol=1e-9)
    backward = autodiff(module, AutodiffOptions()).graphs["B"]
    used = Counter(v for op in backward.ops for v in op.ins)
    assert all(used[v] for op in backward.ops for v in op.outs), "B computes something that nothing uses"
