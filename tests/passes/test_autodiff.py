"""Gradients: F then B in float64 against torch's autograd, every rule; against finite differences; structure of what comes out."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import nasty, samples_of
from torch_meaning import MEANING

from penstock.ir.errors import UnsupportedModel, UsageError
from penstock.ir.graph import Graph, Module, Op, Value, Var
from penstock.ir.interp import DictStore, run_graph
from penstock.ir.ops import OPS, complete_attrs, make
from penstock.ir.text import parse_module, print_module
from penstock.ir.types import TensorType, dtype_of
from penstock.ir.verify import check
from penstock.passes import vjp
from penstock.passes.autodiff import AutodiffOptions, autodiff
from penstock.passes.vjp import FLAT, VJP

RNG = np.random.default_rng(11)


def normal(*shape):
    return RNG.normal(size=shape)


def positive(*shape):
    return RNG.uniform(0.3, 2.0, size=shape)


# ---------------------------------------------------------------------------------------- building and running


def of_one_op(kind, arrays, attrs, outs=1, frozen=(), read=None):
    """main: loss = sum over (the first `read`) results of sum(result * weight), where float operands are parameters and the rest are inputs."""
    values = [Value(f"x{i}", TensorType(dtype_of(x.dtype), x.shape)) for i, x in enumerate(arrays)]
    is_param = [x.dtype == np.float64 and i not in frozen for i, x in enumerate(arrays)]
    ops = [Op("read", (), (v,), {"var": v.name}) for v, p in zip(values, is_param, strict=True) if p]
    ops.append(make(kind, values, [f"y{i}" for i in range(outs)], "/the/op", **attrs))
    ins = [v for v, p in zip(values, is_param, strict=True) if not p]
    total = None
    for y in [v for v in ops[-1].outs[:read] if v.type.dtype != "i64"]:
        weight = Value(f"{y.name}.weight", y.type)
        ins.append(weight)
        ops.append(make("mul", [y, weight], [f"{y.name}.weighted"]))
        ops.append(make("sum", [ops[-1].outs[0]], [f"{y.name}.sum"], axes=tuple(range(y.type.rank))))
        if total is not None:
            ops.append(make("add", [total, ops[-1].outs[0]], [f"{y.name}.total"]))
        total = ops[-1].outs[0]
    variables = {v.name: Var(v.name, v.type, "param") for v, p in zip(values, is_param, strict=True) if p}
    main = Graph("main", tuple(ins), (total,), tuple(ops))
    return Module("m", tuple(ins), (total.name,), vars=variables, graphs={"main": main})


def gradients(module, arrays, microbatches=1):
    """Gradients of the variables by F and B; `arrays` hold variables and inputs."""
    found = autodiff(module, AutodiffOptions(microbatches))
    check(found, ("typed", "differentiated"))
    store = DictStore({name: arrays[name] for name in module.vars})
    forward, backward = found.graphs["F"], found.graphs["B"]
    results = run_graph(forward, {v.name: arrays[v.name] for v in forward.ins}, store, "f64")
    values = {**arrays, **{v.name: x for v, x in zip(forward.results, results, strict=True)}}
    run_graph(backward, [values[v.name] for v in backward.ins], store, "f64")
    return {name: store.arrays[f"{name}.grad"] for name in module.vars if f"{name}.grad" in store.arrays}, float(results[0])


def image(*shape):
    """All elements different, so that a maximum has no ties."""
    return RNG.permutation(int(np.prod(shape))).reshape(shape) / 7.0


CONV = {"strides": (2, 1), "pads": (1, 2, 1, 2), "dilations": (2, 1), "groups": 2}
POOL = {"window": (3, 2), "strides": (2, 1), "pads": (1, 1, 1, 1)}
MASK = normal(3, 4) > 0
INDEX = np.array([[0, -1, 2], [2, 2, 0]])
LABELS = RNG.integers(0, 5, size=(2, 3))
AWAY = np.sign(normal(3, 4)) * positive(3, 4)


def batch_norm(x, scale, bias, mean, variance):
    """Written out: torch's own has no gradient for the statistics."""
    scale, bias, mean, variance = (v[:, None, None] for v in (scale, bias, mean, variance))
    return (x - mean) / torch.sqrt(variance + 1e-3) * scale + bias


def scatter_add(x, indices, updates):
    return x.index_add(1, indices.flatten() % x.shape[1], updates.flatten(1))


def transposed(x, w):
    """Uneven padding: the symmetric result with more cut off in front."""
    full = F.conv_transpose2d(x, w, None, (2, 1), 0, (1, 0), 2, (1, 3))
    return full[:, :, 1:7, 2:8]


# kind, arrays, attrs, torch function
CASES = [
    ("neg", (normal(3, 4),), {}, torch.neg),
    ("abs", (AWAY,), {}, torch.abs),
    ("exp", (normal(3, 4),), {}, torch.exp),
    ("log", (positive(3, 4),), {}, torch.log),
    ("sqrt", (positive(3, 4),), {}, torch.sqrt),
    ("rsqrt", (positive(3, 4),), {}, torch.rsqrt),
    ("sin", (normal(3, 4),), {}, torch.sin),
    ("cos", (normal(3, 4),), {}, torch.cos),
    ("tanh", (normal(3, 4),), {}, torch.tanh),
    ("sigmoid", (normal(3, 4),), {}, torch.sigmoid),
    ("erf", (normal(3, 4),), {}, torch.erf),
    ("relu", (np.append(AWAY, 0.0),), {}, torch.relu),
    ("gelu", (normal(3, 4),), {}, F.gelu),
    ("gelu", (normal(3, 4),), {"approximate": "tanh"}, lambda x: F.gelu(x, approximate="tanh")),
    ("cast", (normal(3, 4).astype(np.float64),), {"dtype": "f32"}, lambda x: x * 1),
    ("add", (normal(2, 3, 4), normal(4)), {}, torch.add),
    ("add", (normal(3, 1), normal(2, 1, 4)), {}, torch.add),
    ("sub", (normal(4), normal(2, 3, 1)), {}, torch.sub),
    ("mul", (normal(2, 3, 4), normal(3, 1)), {}, torch.mul),
    ("mul", (np.array(0.7), normal(2, 3)), {}, torch.mul),
    ("div", (normal(3, 4), positive(2, 1, 4)), {}, torch.div),
    ("pow", (positive(3, 4), normal(4)), {}, torch.pow),
    ("pow", (np.array([0.0, 2.0, 0.0]), np.array([0.0, 0.0, 2.0])), {}, torch.pow),
    ("minimum", (normal(3, 4), normal(4)), {}, torch.minimum),
    ("maximum", (np.array([1.0, 2.0, 3.0]), np.array([3.0, 2.0, 1.0])), {}, torch.maximum),
    ("where", (MASK, normal(3, 4), normal(4)), {}, torch.where),
    ("where", (MASK, np.array(2.0), normal(3, 1)), {}, torch.where),
    ("reshape", (normal(2, 6),), {"shape": (3, 4)}, lambda x: x.reshape(3, 4)),
    ("transpose", (normal(2, 3, 4),), {"perm": (2, 0, 1)}, lambda x: x.permute(2, 0, 1)),
    ("broadcast", (normal(3, 1),), {"shape": (2, 3, 4)}, lambda x: x.expand(2, 3, 4)),
    ("slice", (normal(7, 5),), {"start": (1, 0), "stop": (6, 5), "step": (3, 2)}, lambda x: x[1:6:3, ::2]),
    ("slice", (normal(3, 5),), {"start": (1, 0), "stop": (1, 5), "step": (1, 1)}, lambda x: x[1:1]),
    ("pad", (normal(2, 3),), {"low": (1, 0), "high": (0, 2)}, lambda x: F.pad(x, (0, 2, 1, 0))),
    (
        "pad",
        (normal(2, 3),),
        {"low": (0, 1), "high": (0, 1), "inner": (0, 1)},
        lambda x: F.pad(torch.stack([x, x * 0], -1).reshape(2, 6), (1, 0)),
    ),
    ("concat", (normal(2, 3), normal(2, 1), normal(2, 2)), {"axis": -1}, lambda *x: torch.cat(x, -1)),
    ("sum", (normal(2, 3, 4),), {"axes": (0, -1)}, lambda x: x.sum((0, -1))),
    ("mean", (normal(2, 3, 4),), {"axes": (1,), "keep": True}, lambda x: x.mean(1, keepdim=True)),
    ("mean", (normal(2, 3, 4),), {"axes": (0, 1, 2)}, lambda x: x.mean()),
    ("max", (image(2, 3, 4),), {"axes": (-1, 0)}, lambda x: x.amax((-1, 0))),
    ("max", (np.array([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]]),), {"axes": (1,), "keep": True}, lambda x: x.amax(1, keepdim=True)),
    ("matmul", (normal(3, 4), normal(4, 2)), {}, torch.matmul),
    ("matmul", (normal(4, 3), normal(4, 2)), {"ta": True}, lambda a, b: a.mT @ b),
    ("matmul", (normal(3, 4), normal(2, 4)), {"tb": True}, lambda a, b: a @ b.mT),
    ("matmul", (normal(4, 3), normal(2, 4)), {"ta": True, "tb": True}, lambda a, b: a.mT @ b.mT),
    ("matmul", (normal(5, 2, 3, 4), normal(4, 2)), {}, torch.matmul),
    ("matmul", (normal(5, 3, 4), normal(2, 4)), {"tb": True}, lambda a, b: a @ b.mT),
    ("matmul", (normal(5, 4, 3), normal(2, 4)), {"ta": True, "tb": True}, lambda a, b: a.mT @ b.mT),
    ("matmul", (normal(3, 4), normal(5, 4, 2)), {}, torch.matmul),
    ("matmul", (normal(1, 2, 3, 4), normal(5, 1, 4, 2)), {}, torch.matmul),
    ("conv", (normal(2, 3, 9), normal(5, 3, 4)), {"strides": (3,), "pads": (2, 2)}, lambda x, w: F.conv1d(x, w, None, 3, 2)),
    ("conv", (normal(2, 4, 7, 6), normal(6, 2, 3, 2)), CONV, lambda x, w: F.conv2d(x, w, None, (2, 1), (1, 2), (2, 1), 2)),
    ("max_pool", (image(2, 2, 7, 6),), POOL, lambda x: F.max_pool2d(x, (3, 2), (2, 1), (1, 1))),
    ("avg_pool", (normal(2, 2, 7, 6),), POOL, lambda x: F.avg_pool2d(x, (3, 2), (2, 1), (1, 1), count_include_pad=False)),
    ("avg_pool", (normal(2, 2, 7, 6),), {**POOL, "include_pad": True}, lambda x: F.avg_pool2d(x, (3, 2), (2, 1), (1, 1))),
    ("softmax", (normal(2, 3, 4),), {"axis": 1}, lambda x: F.softmax(x, 1)),
    ("log_softmax", (normal(2, 3, 4),), {"axis": -2}, lambda x: F.log_softmax(x, -2)),
    (
        "batch_norm",
        (normal(2, 3, 4, 5), normal(3), normal(3), normal(3), positive(3)),
        {"eps": 1e-3},
        batch_norm,
    ),
    ("gather", (normal(4, 5), INDEX), {"axis": 1}, lambda x, i: x[:, i]),
    ("gather", (normal(6, 2), INDEX), {}, lambda x, i: x[i]),
    ("mse", (normal(3, 4), normal(3, 4)), {}, F.mse_loss),
    ("cumsum", (normal(3, 4),), {"axis": 1}, lambda x: x.cumsum(1)),
    ("cumsum", (normal(3, 4),), {"axis": 0, "reverse": True, "exclusive": True}, lambda x: x.flip(0).cumsum(0).flip(0) - x),
    ("scatter", (normal(5, 4), np.array([3, 0]), normal(2, 4)), {}, lambda x, i, u: x.index_copy(0, i, u)),
    ("scatter", (normal(3, 5), INDEX, normal(3, 2, 3)), {"axis": 1, "add": True}, scatter_add),
    (
        "conv_grad_input",
        (normal(2, 4, 3, 5), normal(4, 3, 3, 2)),
        {"shape": (2, 6, 6, 6), "strides": (2, 1), "pads": (1, 2, 1, 0), "dilations": (1, 3), "groups": 2},
        transposed,
    ),
]


def reference(function, arrays, weights):
    tensors = [torch.tensor(x, requires_grad=x.dtype == np.float64) for x in arrays]
    results = function(*tensors)
    results = results if isinstance(results, tuple) else (results,)
    sum((y * torch.tensor(w)).sum() for y, w in zip(results, weights, strict=True)).backward()
    return {f"x{i}": t.grad.numpy() for i, t in enumerate(tensors) if t.requires_grad and t.grad is not None}


def compare(kind, arrays, attrs, function, outs=1, frozen=(), rtol=1e-9, read=None):
    module = of_one_op(kind, arrays, attrs, outs, frozen, read)
    weights = {v.name: normal(*v.type.shape) for v in module.inputs if v.name.endswith(".weight")}
    inputs = {f"x{i}": x for i, x in enumerate(arrays)} | weights
    found, _ = gradients(module, inputs)
    expected = reference(function, arrays, list(weights.values()))
    assert set(found) == set(expected) - {f"x{i}" for i in frozen}
    for name, grad in found.items():
        np.testing.assert_allclose(grad, expected[name], rtol=rtol, atol=1e-12, err_msg=name)


def names(case):
    return f"{case[0]}-" + "x".join(str(list(x.shape)).replace(" ", "") for x in case[1])


@pytest.mark.parametrize("case", CASES, ids=names)
def test_gradient_equals_torch(case):
    compare(*case)


@pytest.mark.parametrize("case", [c for c in CASES if sum(x.dtype == np.float64 for x in c[1]) > 1], ids=names)
def test_gradient_of_some_operands_only(case):
    """With one operand frozen nothing is computed for it, and the others are the same."""
    kind, arrays, attrs, function = case
    for i, x in enumerate(arrays):
        if x.dtype == np.float64:
            compare(kind, arrays, attrs, function, frozen=(i,))


@pytest.mark.parametrize(("axis", "largest"), [(-1, True), (0, False), (1, True)])
def test_gradient_of_the_largest_values(axis, largest):
    x = image(4, 3, 5)
    module = of_one_op("topk", (x,), {"k": 2, "axis": axis, "largest": largest}, 2)
    (weight,) = [v for v in module.inputs if v.type.dtype == "f64"]
    found, _ = gradients(module, {"x0": x, weight.name: (w := normal(*weight.type.shape))})
    leaf = torch.tensor(x, requires_grad=True)
    (torch.topk(leaf, 2, axis, largest).values * torch.tensor(w)).sum().backward()
    np.testing.assert_allclose(found["x0"], leaf.grad.numpy(), rtol=1e-12)


# Judged by the cases above: torch has no gradient for statistics and rounds gradients to half precision, and its second derivatives are
# not what a transposed convolution needs; statistics of attention have no gradient.
_OTHERWISE = {"batch_norm", "layer_norm", "cast", "conv_grad_input", "attention"}


def sampled(kind):
    """Samples that have a gradient everywhere, small enough for float64 in NumPy. Where entries are replaced twice our gradient is another."""
    for s in samples_of(kind):
        floats = any(t.startswith("f32") for t in s.types)
        twice = kind == "scatter" and not s.attrs.get("add") and len(np.unique(s.arrays()[1])) < s.arrays()[1].size
        if twice:
            continue
        if floats and s.dtype == "f32" and nasty not in s.draws and max(v.type.size for v in (*s.op.ins, *s.op.outs)) <= 6000:
            yield s


@pytest.mark.parametrize("kind", sorted(set(VJP) - _OTHERWISE))
def test_gradient_of_every_sample_equals_torch(kind):
    """The whole table of samples: ragged and empty tensors, every axis and attribute."""
    chosen = list(sampled(kind))
    assert chosen
    for s in chosen:
        arrays = [x.astype(np.float64) if x.dtype == np.float32 else x for x in s.arrays()]
        attrs = {k: "f64" if v == "f32" else v for k, v in s.attrs.items()}
        outs = s.op.outs
        module = of_one_op(kind, arrays, attrs, len(outs))
        weights = {v.name: normal(*v.type.shape) for v in module.inputs if v.name.endswith(".weight")}
        found, _ = gradients(module, {f"x{i}": x for i, x in enumerate(arrays)} | weights)
        leaves = [torch.tensor(x, requires_grad=x.dtype == np.float64) for x in arrays]
        results = MEANING[kind](*leaves, **complete_attrs(Op(kind, s.op.ins, s.op.outs, attrs)))
        results = results if isinstance(results, tuple) else (results,)
        terms = [
            (y * torch.tensor(weights[f"{v.name}.weight"])).sum()
            for y, v in zip(results, outs, strict=True)
            if f"{v.name}.weight" in weights
        ]
        grads = torch.autograd.grad(sum(terms), [x for x in leaves if x.requires_grad], allow_unused=True)
        for name, wanted in zip([f"x{i}" for i, x in enumerate(leaves) if x.requires_grad], grads, strict=True):
            expected = np.zeros_like(arrays[int(name[1:])]) if wanted is None else wanted.numpy()
            np.testing.assert_allclose(found.get(name, 0 * expected), expected, rtol=1e-8, atol=1e-10, err_msg=f"{s} {name}")


@pytest.mark.parametrize("axis", [-1, 1])
def test_layer_norm_with_all_results_used(axis):
    shape = (3, 4)[axis if axis == 1 else -1 :] if axis == -1 else (3, 4)

    def function(x, scale, bias):
        dims = tuple(range(axis % x.ndim, x.ndim))
        mean, variance = x.mean(dims, keepdim=True), x.var(dims, unbiased=False, keepdim=True)
        rstd = (variance + 1e-5).rsqrt()
        return (x - mean) * rstd * scale + bias, mean.reshape(x.shape[: dims[0]]), rstd.reshape(x.shape[: dims[0]])

    compare("layer_norm", (normal(2, 3, 4), normal(*shape), normal(*shape)), {"axis": axis}, function, outs=3)


def test_cross_entropy_with_both_results_used():
    def function(x, labels):
        return F.cross_entropy(x.reshape(-1, 5), labels.reshape(-1)), torch.logsumexp(x, -1)

    compare("cross_entropy", (normal(2, 3, 5), LABELS), {}, function, outs=2)


VISIBLE = np.array([True, False, True, True, False, True])
MASKS = {
    "none": None,
    "bool": VISIBLE,
    "bool, per row": np.tri(6, dtype=bool)[::-1],
    "float": normal(2, 1, 6, 6),
    "float, shared": normal(6),
}


# Causal and with "bool, per row", some rows see nothing: for these torch gives nan.
@pytest.mark.parametrize(("mask", "causal"), [(m, c) for m in MASKS for c in (True, False) if not (c and m == "bool, per row")])
def test_attention(mask, causal):
    """Against torch's attention; a mask of floats is a parameter too, and its gradient is summed to its shape."""

    def function(q, k, v, mask=None):
        if causal:
            hidden = torch.full((6, 6), -torch.inf, dtype=torch.float64).triu(1)
            added = torch.where(mask, 0.0, -torch.inf) if mask is not None and mask.dtype == torch.bool else mask
            mask = hidden if mask is None else added + hidden
        elif mask is not None:
            mask = mask & torch.ones(6, 6).bool() if mask.dtype == torch.bool else mask + torch.zeros(6, 6, dtype=torch.float64)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.4)

    given = MASKS[mask]
    arrays = (normal(2, 3, 6, 5), normal(2, 3, 6, 5), normal(2, 3, 6, 4), *(() if given is None else (np.ascontiguousarray(given),)))
    compare("attention", arrays, {"causal": causal, "scale": 0.4}, function, outs=3, read=1)


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


def test_statistics_of_attention_have_no_gradient():
    with pytest.raises(UnsupportedModel, match="statistics"):
        compare("attention", tuple(normal(1, 1, 3, 2) for _ in range(3)), {"scale": 1.0}, None, outs=3)


def test_every_differentiable_row_has_a_rule_and_a_case():
    without = {"const", "iota", "sign", "floor", "argmax", "not", "equal", "less", "less_equal", "and", "or"}
    grads = {name for name in OPS if "_grad" in name} - {"conv_grad_input"}
    others = {name for name, row in OPS.items() if row.family in ("state", "optimizer")}
    assert set(VJP) == set(OPS) - without - grads - others
    assert {case[0] for case in CASES} | {"layer_norm", "cross_entropy", "topk", "attention"} == set(VJP)
    assert set(FLAT) <= without


@pytest.mark.parametrize("kind", sorted(VJP))
def test_control_a_wrong_rule_is_noticed(kind, monkeypatch):
    """Twice the gradient, for every rule: the comparison with torch must fail."""
    right = VJP[kind]

    def wrong(b, op, *grads):
        def doubled(rule):
            return None if rule is None else lambda: vjp._scaled(b, 2.0, rule())

        return [doubled(rule) for rule in right(b, op, *grads)]

    monkeypatch.setitem(VJP, kind, wrong)
    tests = [lambda c=c: compare(*c) for c in CASES if c[0] == kind and all(x.size > 0 for x in c[1]) and c[2].get("stop", (2,))[0] != 1]
    tests += [lambda: test_layer_norm_with_all_results_used(1)] if kind == "layer_norm" else []
    tests += [lambda: test_gradient_of_the_largest_values(0, False)] if kind == "topk" else []
    tests += [test_cross_entropy_with_both_results_used] if kind == "cross_entropy" else []
    tests += [lambda: test_attention("float", True)] if kind == "attention" else []
    assert tests
    for run in tests:
        with pytest.raises(AssertionError):
            run()


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
    tensors = {name: torch.tensor(x, requires_grad=name in ("w1", "b1", "g", "w2", "table")) for name, x in arrays.items()}
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
    assert sorted(accumulated) == ["b1.grad", "g.grad", "table.grad", "w1.grad", "w2.grad"]  # once each, the tied one as well
    assert all(found.vars[name].role == "grad" and found.vars[name].init == "zeros" for name in accumulated)
    saved = {v.name for v in forward.saved}
    assert not saved & {"w1", "b1", "g", "g2", "w2", "wt", "again", "table", "mean"}  # depends on variables only: computed again
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


def error_model(body, loss="%loss : f32[] = sum(%z, axes=[0])"):
    return parse_module(
        f"""module @m {{
  input %x : f32[4]
  output %loss
  var @w : f32[4] param
  graph @main(%x : f32[4]) {{
    %w : f32[4] = read(@w)
    {body}
    {loss}
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
        autodiff(good.but(vars={**good.vars, "w.grad": Var("w.grad", good.vars["w"].type, "buffer")}), AutodiffOptions())


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
    ops = [Op("read", (), (Value(f"p{i}", TensorType("f64", shape)),), {"var": f"p{i}"}) for i, shape in enumerate(leaves)]
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
