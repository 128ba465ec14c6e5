"""Composite operations against the interpreter's own meaning of them, and against torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from penstock.ir.cluster.cluster import Cluster
from penstock.ir.interpreter.graphs import run_graph
from penstock.ir.ops import OPS
from penstock.ir.text import parse_module
from penstock.ir.verify.verifier import check
from penstock.passes.pipelines import PipelineOptions, inference_pipeline
from penstock.passes.rewrite.decompose import DECOMPOSE, DecomposeOptions, decompose

ALL = DecomposeOptions(keep=())


def attention(causal, dtype="f64", rows=4, columns=4, mask="", outs="%o"):
    row = f"{dtype}[2,3,{rows}]"
    return parse_module(
        f"""module @m {{
  graph @main(%q : {dtype}[2,3,{rows},5], %k : {dtype}[2,3,{columns},5], %v : {dtype}[2,3,{columns},2]{mask and ", %m : " + mask}) {{
    %o : {dtype}[2,3,{rows},2], %a : {row}, %b : {row} = attention(%q, %k, %v{mask and ", %m"}, causal={causal}, scale=0.4, stage=1) ; /attn
    return {outs}
  }}
}}
"""
    )


@pytest.mark.parametrize("causal", ["true", "false"])
@pytest.mark.parametrize(("rows", "columns"), [(4, 4), (3, 6), (6, 3)])
def test_attention(causal, rows, columns):
    module = attention(causal, rows=rows, columns=columns)
    found = decompose(module, ALL)
    check(found, ("typed",))
    ops = found.graphs["main"].ops
    assert not {op.kind for op in ops} & set(DECOMPOSE)
    assert all(op.loc == "/attn" and op.attrs["stage"] == 1 for op in ops)
    assert found.graphs["main"].outs == module.graphs["main"].outs
    rng = np.random.default_rng(3)
    ins = [rng.normal(size=v.type.shape) * 4 for v in module.graphs["main"].ins]
    (result,) = run_graph(found.graphs["main"], ins)
    np.testing.assert_allclose(result, run_graph(module.graphs["main"], ins)[0], rtol=1e-12, atol=1e-14)
    expected = F.scaled_dot_product_attention(*map(torch.tensor, ins), is_causal=causal == "true", scale=0.4)
    np.testing.assert_allclose(result, expected.numpy(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("shape", [(3, 4), (2, 4, 5), (2, 4, 5, 3)])
def test_batch_norm(shape):
    dims = ",".join(map(str, shape))
    statistics = ", ".join(f"%{name} : f64[4]" for name in ("scale", "bias", "mean", "var"))
    module = parse_module(
        f"""module @m {{
  graph @main(%x : f64[{dims}], {statistics}) {{
    %y : f64[{dims}] = batch_norm(%x, %scale, %bias, %mean, %var, eps=0.1, stage=1) ; /norm
    return %y
  }}
}}
"""
    )
    found = decompose(module, DecomposeOptions())
    check(found, ("typed",))
    ops = found.graphs["main"].ops
    assert "batch_norm" not in {op.kind for op in ops}
    assert all(op.loc == "/norm" and op.attrs["stage"] == 1 for op in ops)
    # Roots and quotients are per channel.
    assert {op.outs[0].type.shape for op in ops if op.kind in ("rsqrt", "div", "sqrt")} == {(4,)}
    rng = np.random.default_rng(3)
    x, scale, bias, mean, var = (rng.normal(size=v.type.shape) for v in module.graphs["main"].ins)
    ins = [x, scale, bias, mean, np.abs(var) + 0.5]
    (result,) = run_graph(found.graphs["main"], ins)
    expected = F.batch_norm(*(torch.tensor(ins[i]) for i in (0, 3, 4, 1, 2)), eps=0.1).numpy()
    np.testing.assert_allclose(result, expected, rtol=1e-12, atol=1e-13)
    (wrong,) = run_graph(found.graphs["main"], [*ins[:3], ins[3] + 0.1, ins[4]])
    assert np.abs(wrong - expected).max() > 1e-2
    assert decompose(module, DecomposeOptions(keep=("batch_norm",))) is module


def test_control_without_the_mask_it_is_another_function():
    rng = np.random.default_rng(3)
    ins = [rng.normal(size=v.type.shape) for v in attention("true").graphs["main"].ins]
    masked, free = (run_graph(decompose(attention(c), ALL).graphs["main"], ins)[0] for c in ("true", "false"))
    assert np.abs(masked - free).max() > 0.1


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32", "f64"])
def test_hidden_positions_have_exactly_no_share(dtype):
    """Also where the visible scores are hugely negative."""
    from penstock.ir.types import numpy_dtype

    found = decompose(attention("true", dtype), ALL)
    kind = numpy_dtype(dtype)
    q, k = np.full((2, 3, 4, 5), -50.0).astype(kind), np.full((2, 3, 4, 5), 50.0).astype(kind)
    v = np.zeros((2, 3, 4, 2), kind)
    v[:, :, 0] = 1
    (result,) = run_graph(found.graphs["main"], [q, k, v])
    np.testing.assert_array_equal(result[:, :, 0].astype(np.float64), 1.0)


@pytest.mark.parametrize("causal", ["true", "false"])
@pytest.mark.parametrize("mask", ["bool[2,1,1,6]", "bool[4,6]", "f64[2,1,1,6]", "f64[3,1,6]"])
def test_attention_with_a_mask(mask, causal):
    module = attention(causal, columns=6, mask=mask)
    found = decompose(module, ALL)
    check(found, ("typed",))
    rng = np.random.default_rng(4)
    ins = [rng.normal(size=v.type.shape) for v in module.graphs["main"].ins]
    if mask.startswith("bool"):
        ins[3] = rng.random(ins[3].shape) > 0.5
        ins[3].reshape(-1, 6)[0] = False  # a row that sees nothing gives the mean of all values that lie before it
    elif mask == "f64[2,1,1,6]":
        ins[3][0, ..., 2:] = -np.inf
    (result,) = run_graph(found.graphs["main"], ins)
    assert np.isfinite(result).all()
    np.testing.assert_allclose(result, run_graph(module.graphs["main"], ins)[0], rtol=1e-12, atol=1e-14)


def test_kept_and_unchanged():
    module = attention("true", rows=5)
    assert decompose(module, DecomposeOptions()) is module
    found = decompose(module, ALL)
    assert decompose(found, ALL) is found
    assert set(DECOMPOSE) <= set(OPS)


def test_attention_that_is_not_worth_a_kernel_is_decomposed_although_kept():
    def is_decomposed(module):
        return "softmax" in {op.kind for op in decompose(module, DecomposeOptions()).graphs["main"].ops}

    assert is_decomposed(attention("false", rows=1))
    module = attention("true", rows=5)
    assert not is_decomposed(module.but(cluster=Cluster.local(2)))
    # Kernels for GPUs have it whole, too; pipelines without libraries keep nothing.
    assert not is_decomposed(module.but(cluster=Cluster.listed("cpu,sm_90")))
    kept = {
        use: call.options.keep
        for use in ("", "torch", "none")
        for call in inference_pipeline({}, PipelineOptions(microbatches=1, library=use))
        if call.name == "decompose"
    }
    assert kept == {"": ("attention",), "torch": ("attention",), "none": ()}


def test_statistics_that_are_used_stay():
    module = attention("true", outs="%o, %a")
    assert decompose(module, ALL) is module
