"""Operators that onnxruntime lacks or has in part only, against onnx.reference: the same rows as in test_rules.py."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from penstock.frontends.onnx import import_onnx
from penstock.frontends.onnx.table import RULES
from penstock.ir.verify.verifier import check

from ..cases import draw, run

# opset | inputs => outputs | nodes. Inputs named w... are initializers, inputs named p... are positive.
CASES = """
24 | float[2,3,4,8] x, float[2,3,6,8] k, float[2,3,6,8] v, float[2,3,5,8] a, float[2,3,5,8] b => float[] y, float[] c, float[] d | y, c, d = Attention(x, k, v, , a, b)
24 | float[2,3,4,8] x, float[2,3,6,8] k, float[2,3,6,8] v, float[2,3,5,8] a, float[2,3,5,8] b => float[] y, float[] c, float[] d | y, c, d = Attention<is_causal = 1>(x, k, v, , a, b)
24 | float[2,4,4,8] x, float[2,2,6,8] k, float[2,2,6,8] v, bool[4,6] m => float[] y, float[] q | y, , , q = Attention<qk_matmul_output_mode = 3>(x, k, v, m)
24 | float[2,4,4,8] x, float[2,2,6,8] k, float[2,2,6,8] v, float[4,6] m => float[] y, float[] q | y, , , q = Attention<qk_matmul_output_mode = 2, softcap = 1.5>(x, k, v, m)
24 | float[2,4,4,8] x, float[2,2,6,8] k, float[2,2,6,8] v, float[4,6] m => float[] y, float[] q | y, , , q = Attention<qk_matmul_output_mode = 1, softcap = 1.5, is_causal = 1>(x, k, v, m)
24 | float[2,4,24] x, float[2,6,12] k, float[2,6,12] v => float[] y, float[] q | y, , , q = Attention<q_num_heads = 4, kv_num_heads = 2>(x, k, v)
24 | float[2,3,4,8] x, float[2,3,6,8] k, float[2,3,6,8] v, float[4,6] m => float[] y | i = Log(m) r = Constant<value = float[4,1] {0, -inf, 0, 0}>() z = Add(m, r) y = Attention(x, k, v, z)
24 | float[2,3,4,8] x, float[2,3,6,8] k, float[2,3,6,8] v => float[] y | n = Constant<value = int64[2] {5, 2}>() y = Attention<is_causal = 1>(x, k, v, , , , n)
25 | float[2,3,6,8] x, float[2,3,6,8] k, float[2,3,6,8] v => float[] y | y = Attention<left_window_size = 2, right_window_size = 1>(x, k, v)
23 | float[2,3,4,8] x, float[2,4,4] c, float[2,4,4] s => float[] y | y = RotaryEmbedding(x, c, s)
23 | float[2,3,4,8] x, float[9,3] c, float[9,3] s => float[] y | i = Constant<value = int64[2,4] {0,3,2,8,1,1,5,4}>() y = RotaryEmbedding<rotary_embedding_dim = 6, interleaved = 1>(x, c, s, i)
23 | float[2,4,24] x, float[2,4,4] c, float[2,4,4] s => float[] y | y = RotaryEmbedding<num_heads = 3>(x, c, s)
27 | float[2,5,8] x, float[2,5,4] k, float[2,5,6] v, float[2,2,2,3] t, float[2,5,2] d, float[2,5,2] p => float[] y, float[] s | y, s = LinearAttention<q_num_heads = 4, kv_num_heads = 2>(x, k, v, t, d, p)
27 | float[2,5,4] x, float[2,5,4] k, float[2,5,6] v => float[] y, float[] s | y, s = LinearAttention<q_num_heads = 2, kv_num_heads = 2, update_rule = "linear", scale = 0.5>(x, k, v)
27 | float[2,3,7] x, float[3,1,4] w, float[3] z, float[2,3,3] t => float[] y, float[] s | y, s = CausalConvWithState<activation = "silu">(x, w, z, t)
27 | float[2,3,7] x, float[3,1,4] w => float[] y, float[] s | y, s = CausalConvWithState(x, w)
28 | float[2,7] x, float[2,7] z => float[] y | y = SwiGLU<alpha = 1.5>(x, z)
19 | float[1,4,6,5] x, float[6,2,3,2] w, float[1,24,4,2] z, float[6] b, float[1,12,4,2] p => float[] y | y = DeformConv<group = 2, offset_group = 2, strides = [1,2], pads = [0,0,0,0]>(x, w, z, b, p)
16 | float[1,2,6,5] x => float[] y | r = Constant<value = float[1,4] {0, 1, 5, 6}>() i = Constant<value = int64[1] {0}>() y = RoiAlign<mode = "max", output_height = 2, output_width = 3, sampling_ratio = 2>(x, r, i)
9 | float[1,2,3,4] x => float[] y | s = Constant<value = float[4] {1.0, 1.0, 2.0, 3.0}>() y = Upsample<mode = "nearest">(x, s)
24 | float[2,3,5,4] x, float[2,3,2,4] z => float[] y | i = Constant<value_ints = [4, 1]>() y = TensorScatter<mode = "circular">(x, z, i)
26 | float[2,5] x => int32[] y | y = BitCast<to = 6>(x)
26 | float[2,5] x => float[] y | a = Constant<value_int = 1>() y = CumProd(x, a)
26 | float[2,5] x => float[] y | a = Constant<value_int = 0>() y = CumProd<exclusive = 1, reverse = 1>(x, a)
20 | float[2,0,3] x => float[] y | a = Constant<value_ints = [1]>() y = ReduceMax(x, a)
20 | bool[2,3] x => bool[] y | a = Constant<value_ints = [1]>() y = ReduceMin<keepdims = 0>(x, a)
20 | float[2,6,2] x => float[] y | a = Constant<value_int = 1>() y = DFT<inverse = 1, onesided = 1>(x, , a)
28 | float[1,2,4,6] x => float[] y | y = SpaceToDepth<blocksize = 2, mode = "CRD">(x)
14 | float[3,2,2] x, float[1,3,2] w, float[1,3,3] z => float[] y, float[] h | y, h = RNN<hidden_size = 3, layout = 1>(x, w, z)
13 | float[3,5,4] x, float[5] p => float[] y | t = Constant<value = int64[3,4] {0,1,2,3,4,0,1,2,3,4,0,1}>() y = NegativeLogLikelihoodLoss<ignore_index = 3>(x, t, p)
13 | float[3,5] x => float[] y | t = Constant<value = int64[3] {0,-1,4}>() y = NegativeLogLikelihoodLoss<reduction = "none", ignore_index = -1>(x, t)
13 | float[3,5] x, float[5] p => float[] y, float[] l | t = Constant<value = int64[3] {0,2,4}>() y, l = SoftmaxCrossEntropyLoss<reduction = "sum">(x, t, p)
13 | float[3,5,2,2] x => float[] y | t = Constant<value = int32[3,2,2] {0,2,4,1,1,1,0,2,3,4,4,0}>() y = SoftmaxCrossEntropyLoss(x, t)
"""
ROWS = [tuple(part.strip() for part in line.split("|")) for line in CASES.strip().splitlines()]
OPERATORS = set(re.findall(r"= (\w+)\s*[<(]", CASES))


def compare(path: Path, signature: str, body: str, opset: int) -> None:
    """Import and interpret, against onnx.reference on the same file."""
    ins, outs = signature.split("=>")
    header = f'<ir_version: {10 if opset < 25 else 13}, opset_import: ["" : {opset}]>'
    model = onnx.parser.parse_model(f"{header} mini ({ins}) => ({outs}) {{ {body} }}")
    feeds = {}
    for value in list(model.graph.input):
        kind = value.type.tensor_type
        shape = tuple(d.dim_value for d in kind.shape.dim)
        array = draw(value.name, np.dtype(onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)), shape)
        if value.name[0] == "w":
            model.graph.initializer.append(onnx.numpy_helper.from_array(array, value.name))
            model.graph.input.remove(value)
        else:
            feeds[value.name] = array
    with np.errstate(all="ignore"):
        expected = ReferenceEvaluator(model).run(None, feeds)
    for value, array in zip(model.graph.output, expected, strict=True):  # the format wants shapes on outputs
        value.CopyFrom(
            onnx.helper.make_tensor_value_info(value.name, value.type.tensor_type.elem_type, np.shape(array))
        )
    onnx.save(model, path)
    imported = import_onnx(path)
    check(imported.module, ("typed",))
    for want, got in zip(expected, run(imported, feeds), strict=True):
        assert got.dtype == np.asarray(want).dtype
        assert got.shape == np.shape(want)
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("opset", "signature", "body"), ROWS, ids=[f"{opset}-{body[-60:]}" for opset, _, body in ROWS])
def test_op_agrees_with_the_reference(tmp_path: Path, opset: str, signature: str, body: str) -> None:
    compare(tmp_path / "mini.onnx", signature, body, int(opset))


def test_the_comparison_catches_a_wrong_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, "NegativeLogLikelihoodLoss", lambda n: n.emit("mean", n.value(0), axes=(0, 1)))
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        compare(
            tmp_path / "mini.onnx",
            "float[3,5] x => float[] y",
            "t = Constant<value = int64[3] {0,1,4}>() y = NegativeLogLikelihoodLoss(x, t)",
            13,
        )
