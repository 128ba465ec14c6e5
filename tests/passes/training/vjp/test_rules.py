"""Gradients, rule by rule, against torch's autograd: a case of our own for each, every sample, and a wrong rule noticed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from oracles.torch_meaning import MEANING
from samples import nasty, samples_of

from penstock.ir.graph import Op
from penstock.ir.ops import OPS, complete_attrs
from penstock.passes.training.vjp import FLAT, STOPS, VJP
from penstock.passes.training.vjp.emitter import scaled
from penstock.support.errors import UnsupportedModel

from ..autodiff_cases import CASES, LABELS, compare, gradients, image, normal, of_one_op


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
        if (
            floats
            and s.dtype == "f32"
            and nasty not in s.draws
            and max(v.type.size for v in (*s.op.ins, *s.op.outs)) <= 6000
        ):
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
            np.testing.assert_allclose(
                found.get(name, 0 * expected), expected, rtol=1e-8, atol=1e-10, err_msg=f"{s} {name}"
            )


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
@pytest.mark.parametrize(
    ("mask", "causal"), [(m, c) for m in MASKS for c in (True, False) if not (c and m == "bool, per row")]
)
def test_attention(mask, causal):
    """Against torch's attention; a mask of floats is a parameter too, and its gradient is summed to its shape."""

    def function(q, k, v, mask=None):
        if causal:
            hidden = torch.full((6, 6), -torch.inf, dtype=torch.float64).triu(1)
            added = torch.where(mask, 0.0, -torch.inf) if mask is not None and mask.dtype == torch.bool else mask
            mask = hidden if mask is None else added + hidden
        elif mask is not None:
            mask = (
                mask & torch.ones(6, 6).bool()
                if mask.dtype == torch.bool
                else mask + torch.zeros(6, 6, dtype=torch.float64)
            )
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.4)

    given = MASKS[mask]
    arrays = (
        normal(2, 3, 6, 5),
        normal(2, 3, 6, 5),
        normal(2, 3, 6, 4),
        *(() if given is None else (np.ascontiguousarray(given),)),
    )
    compare("attention", arrays, {"causal": causal, "scale": 0.4}, function, outs=3, read=1)


def test_statistics_of_attention_have_no_gradient():
    with pytest.raises(UnsupportedModel, match="a statistic of its rows"):
        compare("attention", tuple(normal(1, 1, 3, 2) for _ in range(3)), {"scale": 1.0}, None, outs=3)


def test_every_differentiable_row_has_a_rule_and_a_case():
    without = {
        "const",
        "iota",
        "sign",
        "floor",
        "round",
        "detach",
        "argmax",
        "not",
        "equal",
        "less",
        "less_equal",
        "and",
        "or",
        "bitcast",
        "random_key",
        "random",
        "attend",
        "pick",
        "matmul_q",
        "matmul_bytes",
        "conv_bytes",
        "gather_q",
    } | {name for name in OPS if name.startswith(("bit_", "shift_"))}
    grads = {name for name in OPS if "_grad" in name} - {"conv_grad_input"}
    others = {name for name, row in OPS.items() if row.family in ("state", "optimizer", "collective")}
    assert set(VJP) == set(OPS) - without - grads - others
    assert {case[0] for case in CASES} | {"layer_norm", "cross_entropy", "topk", "attention"} == set(VJP)
    assert {*FLAT, *STOPS} <= without


@pytest.mark.parametrize("kind", sorted(VJP))
def test_control_a_wrong_rule_is_noticed(kind, monkeypatch):
    """Twice the gradient, for every rule: the comparison with torch must fail."""
    right = VJP[kind]

    def wrong(b, op, *grads):
        def doubled(rule):
            return None if rule is None else lambda: scaled(b, 2.0, rule())

        return [doubled(rule) for rule in right(b, op, *grads)]

    monkeypatch.setitem(VJP, kind, wrong)
    tests = [
        lambda c=c: compare(*c)
        for c in CASES
        if c[0] == kind and all(x.size > 0 for x in c[1]) and c[2].get("stop", (2,))[0] != 1
    ]
    tests += [lambda: test_layer_norm_with_all_results_used(1)] if kind == "layer_norm" else []
    tests += [lambda: test_gradient_of_the_largest_values(0, False)] if kind == "topk" else []
    tests += [test_cross_entropy_with_both_results_used] if kind == "cross_entropy" else []
    tests += [lambda: test_attention("float", True)] if kind == "attention" else []
    assert tests
    for run in tests:
        with pytest.raises(AssertionError):
            run()
