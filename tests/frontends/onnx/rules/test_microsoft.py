"""Operators of domain com.microsoft against onnxruntime, which has them on CPUs; what is refused; and that the comparison can fail."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import pytest

from penstock.frontends.onnx import import_onnx, table
from penstock.support.errors import UnsupportedModel

from ..cases import compare, draw, judge, run

# inputs => outputs | node of com.microsoft. Inputs named l... say lengths or positions and m... masks: see _feed.
CASES = """
float[2,3] x => float[2,3] y | y = Gelu(x)
float[2,3] x, float[3] b => float[2,3] y | y = BiasGelu(x, b)
float[2,3] x => float[2,3] y | y = FastGelu(x)
float[2,3] x, float[3] b => float[2,3] y | y = FastGelu(x, b)
float[2,3] x => float[2,3] y | y = QuickGelu(x)
float[2,3] x => float[2,3] y | y = QuickGelu<alpha = 1.2>(x)
float[2,4,8] x, float[2,4,8] z, float[8] g, float[8] b => float[2,4,8] y | y = SkipLayerNormalization<epsilon = 0.01>(x, z, g, b)
float[2,4,8] x, float[2,4,8] z, float[8] g => float[2,4,8] y | y = SkipLayerNormalization(x, z, g)
float[2,4,8] x, float[2,4,8] z, float[8] g, float[8] b, float[8] c => float[2,4,8] y, float[2,4,8] s | y, , , s = SkipLayerNormalization(x, z, g, b, c)
float[2,4,8] x, float[2,4,8] z, float[8] g => float[2,4,8] y | y = SkipSimplifiedLayerNormalization<epsilon = 0.01>(x, z, g)
float[2,4,8] x, float[2,4,8] z, float[8] g, float[8] c => float[2,4,8] y, float[2,4,8] s | y, , , s = SkipSimplifiedLayerNormalization(x, z, g, c)
int32[2,4] p, float[9,8] w, float[5,8] v, float[8] g, float[8] b => float[2,4,8] y, int32[2] i | y, i = EmbedLayerNormalization(p, , w, v, , g, b)
int32[2,4] p, int32[2,4] pt, float[9,8] w, float[5,8] v, float[4,8] u, float[8] g, float[8] b, int32[2,4] m => float[2,4,8] y, int32[2] i | y, i = EmbedLayerNormalization<mask_index_type = 1, epsilon = 0.01>(p, pt, w, v, u, g, b, m)
int32[2,4] p, float[9,8] w, float[5,8] v, float[8] g, float[8] b, int32[2,4] pp => float[2,4,8] y, int32[2] i | y, i = EmbedLayerNormalization(p, , w, v, , g, b, , pp)
float[2,5,8] x, float[8,24] w, float[24] b => float[2,5,8] y | y = Attention<num_heads = 2>(x, w, b)
float[2,5,8] x, float[8,24] w, float[24] b => float[2,5,8] y | y = Attention<num_heads = 2, unidirectional = 1, scale = 0.3>(x, w, b)
float[2,5,8] x, float[8,24] w, float[24] b, int32[2,5] m => float[2,5,8] y | y = Attention<num_heads = 2>(x, w, b, m)
float[2,5,8] x, float[8,24] w, float[24] b, int32[2,5] m => float[2,5,8] y | y = Attention<num_heads = 2, unidirectional = 1>(x, w, b, m)
float[2,5,8] x, float[8,24] w, float[24] b, int32[2] l => float[2,5,8] y | y = Attention<num_heads = 2>(x, w, b, l)
float[2,5,8] x, float[8,24] w, float[24] b, int32[2,5,5] m => float[2,5,8] y | y = Attention<num_heads = 2, mask_filter_value = -3.0>(x, w, b, m)
float[2,5,8] x, float[8,24] w, float[24] b, float[1,2,5,5] z => float[2,5,8] y | y = Attention<num_heads = 2>(x, w, b, , , z)
float[2,5,8] x, float[8,20] w, float[20] b => float[2,5,4] y | y = Attention<num_heads = 2, qkv_hidden_sizes = [8,8,4]>(x, w, b)
float[2,5,8] x, float[2,7,8] k, float[2,7,12] v => float[2,5,12] y | y = MultiHeadAttention<num_heads = 2>(x, k, v)
float[2,5,8] x, float[2,7,8] k, float[2,7,8] v, float[24] b => float[2,5,8] y | y = MultiHeadAttention<num_heads = 2, scale = 0.3>(x, k, v, b)
float[2,5,8] x, float[2,7,8] k, float[2,7,8] v, int32[2,7] m => float[2,5,8] y | y = MultiHeadAttention<num_heads = 2>(x, k, v, , m)
float[2,5,8] x, float[2,7,8] k, float[2,7,8] v, int32[2] l => float[2,5,8] y | y = MultiHeadAttention<num_heads = 2>(x, k, v, , l)
float[2,5,8] x, float[2,7,8] k, float[2,7,8] v, float[2,2,5,7] z => float[2,5,8] y | y = MultiHeadAttention<num_heads = 2>(x, k, v, , , z)
float[2,5,8] x, float[2,5,8] k, float[2,5,8] v => float[2,5,8] y, float[2,2,5,4] r, float[2,2,5,4] s | y, r, s = MultiHeadAttention<num_heads = 2, unidirectional = 1>(x, k, v)
float[2,5,8] x, float[2,2,7,4] k, float[2,2,7,4] v => float[2,5,8] y | y = MultiHeadAttention<num_heads = 2>(x, k, v)
float[2,5,32] x, float[2,5,16] k, float[2,5,16] v, int32[2] full, int32 total => float[2,5,32] y, float[2,2,5,8] r, float[2,2,5,8] s | y, r, s = GroupQueryAttention<num_heads = 4, kv_num_heads = 2>(x, k, v, , , full, total)
float[2,5,64] x, int32[2] full, int32 total => float[2,5,32] y, float[2,2,5,8] r, float[2,2,5,8] s | y, r, s = GroupQueryAttention<num_heads = 4, kv_num_heads = 2, scale = 0.3>(x, , , , , full, total)
float[2,5,64] x, float[2,5,32] k, float[2,5,32] v, int32[2] full, int32 total, float[9,8] c, float[9,8] d => float[2,5,64] y, float[2,2,5,16] r, float[2,2,5,16] s | y, r, s = GroupQueryAttention<num_heads = 4, kv_num_heads = 2, do_rotary = 1>(x, k, v, , , full, total, c, d)
float[2,5,64] x, float[2,5,32] k, float[2,5,32] v, int32[2] full, int32 total, float[9,8] c, float[9,8] d => float[2,5,64] y, float[2,2,5,16] r, float[2,2,5,16] s | y, r, s = GroupQueryAttention<num_heads = 4, kv_num_heads = 2, do_rotary = 1, rotary_interleaved = 1>(x, k, v, , , full, total, c, d)
float[2,5,32] x, float[2,5,16] k, float[2,5,16] v, int32[2] full, int32 total => float[2,5,32] y, float[2,2,5,8] r, float[2,2,5,8] s | y, r, s = GroupQueryAttention<num_heads = 4, kv_num_heads = 2, local_window_size = 2>(x, k, v, , , full, total)
float[2,5,32] x, float[2,5,16] k, float[2,5,16] v, int32[2] full, int32 total => float[2,5,32] y, float[2,2,5,8] r, float[2,2,5,8] s | y, r, s = GroupQueryAttention<num_heads = 4, kv_num_heads = 2, softcap = 1.5>(x, k, v, , , full, total)
float[2,5,16] x, int64[2,5] pp, float[9,4] c, float[9,4] d => float[2,5,16] y | y = RotaryEmbedding(x, pp, c, d)
float[2,5,16] x, int64[1] pp, float[9,4] c, float[9,4] d => float[2,5,16] y | y = RotaryEmbedding<interleaved = 1>(x, pp, c, d)
float[2,3,5,8] x, int64[1] pp, float[9,4] c, float[9,4] d => float[2,3,5,8] y | y = RotaryEmbedding(x, pp, c, d)
float[2,3,5,8] x, int64[2,5] pp, float[9,2] c, float[9,2] d => float[2,3,5,8] y | y = RotaryEmbedding<rotary_embedding_dim = 4, num_heads = 3>(x, pp, c, d)
float[2,3,4] x, float[2,5,4] z => float[2,3,5] y | y = FusedMatMul<transB = 1, alpha = 0.5>(x, z)
float[4,3] x, float[4,5] z => float[3,5] y | y = FusedMatMul<transA = 1>(x, z)
float[2,3] x, float[3,4] w, float[4] b => float[2,4] y | y = FusedGemm<activation = "Relu">(x, w, b)
float[2,3] x, float[3,4] w, float[4] b => float[2,4] y | y = FusedGemm<activation = "LeakyRelu", activation_alpha = 0.3, alpha = 0.5>(x, w, b)
float[2,3,6,6] x, float[4,3,3,3] w, float[4] b => float[2,4,4,4] y | y = FusedConv<activation = "Relu">(x, w, b)
float[2,3,6,6] x, float[4,3,3,3] w, float[4] b => float[2,4,4,4] y | y = FusedConv<activation = "Clip", activation_params = [-0.5, 0.75]>(x, w, b)
float[2,3,6,6] x, float[4,3,3,3] w, float[4] b, float[2,4,4,4] z => float[2,4,4,4] y | y = FusedConv<activation = "HardSigmoid", activation_params = [0.3, 0.4]>(x, w, b, z)
float[2,4,5] x, int64 p => float[2,4,5] y | y = Trilu(x)
uint8[2,3] x, float p, uint8 z => float[2,3] y | y = DequantizeLinear(x, p, z)
float[2,3] x, float p, int8 z => int8[2,3] y | y = QuantizeLinear(x, p, z)
uint8[2,3] x, float ps, uint8 xz, uint8[2,3] v, float pt, uint8 vz, float pu, uint8 uz => uint8[2,3] y | y = QLinearAdd(x, ps, xz, v, pt, vz, pu, uz)
int8[2,3] x, float ps, int8 xz, int8[2,3] v, float pt, int8 vz, float pu, int8 uz => int8[2,3] y | y = QLinearMul(x, ps, xz, v, pt, vz, pu, uz)
uint8[2,3] x, float ps, uint8 xz, float pu, uint8 uz => uint8[2,3] y | y = QLinearSigmoid(x, ps, xz, pu, uz)
int8[2,3] x, float ps, int8 xz, float pu, int8 uz => int8[2,3] y | y = QLinearLeakyRelu<alpha = 0.3>(x, ps, xz, pu, uz)
uint8[2,3,4,4] x, float ps, uint8 xz, float pu, uint8 uz => uint8[2,3,1,1] y | y = QLinearGlobalAveragePool(x, ps, xz, pu, uz)
uint8[3,4] x, uint8[4,5] v, float ps, float[5] pt, uint8 xz, uint8[5] vz, float[5] b => float[3,5] y | y = MatMulIntegerToFloat(x, v, ps, pt, xz, vz, b)
uint8[3,4] x, float pa, uint8 xz, int8[4,5] v, float[5] pb, int8[5] vz, int32[5] c => float[3,5] y | y = QGemm<alpha = 0.5>(x, pa, xz, v, pb, vz, c)
uint8[3,4] x, float pa, uint8 xz, int8[4,5] v, float pb, int8 vz => float[3,5] y | y = QGemm(x, pa, xz, v, pb, vz)
uint8[4,3] x, float pa, uint8 xz, int8[5,4] v, float[5] pb, int8[5] vz, int32[3,1] c => float[3,5] y | y = QGemm<transA = 1, transB = 1>(x, pa, xz, v, pb, vz, c)
int8[3,4] x, float pa, int8 xz, int8[5,4] v, float[5] pb, int8[5] vz, int32[5] c, float pu, int8 uz => int8[3,5] y | y = QGemm<transB = 1, alpha = 0.7>(x, pa, xz, v, pb, vz, c, pu, uz)
uint8[4,3] x, float pa, uint8 xz, uint8[4,5] v, float pb, uint8 vz, float pu, uint8 uz => uint8[3,5] y | y = QGemm<transA = 1>(x, pa, xz, v, pb, vz, , pu, uz)
uint8[3,4] x, float pa, uint8 xz, int8[4,5] v, float[5] pb, int8[5] vz, int32[1] c, float pu => float[3,5] y | y = QGemm(x, pa, xz, v, pb, vz, c, pu)
uint8[3,4] x, float pa, uint8 xz, int8[4,5] v, float[5] pb, int8[5] vz, int32 c, uint8 uz => uint8[3,5] y | y = QGemm<alpha = 0.1>(x, pa, xz, v, pb, vz, c, , uz)
float[2,3,64] x, uint8[5,2,16] wq, float[10] ws => float[2,3,5] y | y = MatMulNBits<K = 64, N = 5, bits = 4, block_size = 32>(x, wq, ws)
float[3,128] x, uint8[5,2,32] wq, float[10] ws, uint8[5] wz => float[3,5] y | y = MatMulNBits<K = 128, N = 5, bits = 4, block_size = 64>(x, wq, ws, wz)
float[3,64] x, uint8[5,1,32] wq, float[5] ws, float[5] b => float[3,5] y | y = MatMulNBits<K = 64, N = 5, bits = 4, block_size = 64>(x, wq, ws, , , b)
float[3,64] x, uint8[5,2,32] wq, float[10] ws => float[3,5] y | y = MatMulNBits<K = 64, N = 5, bits = 8, block_size = 32>(x, wq, ws)
"""
ROWS = [tuple(part.strip() for part in line.split("|")) for line in CASES.strip().splitlines()]


def _model(path: Path, signature: str, body: str) -> tuple[Path, dict[str, np.ndarray]]:
    """The model and its feeds; the masks, lengths and quantisation parameters among the inputs are initializers."""
    ins, outs = signature.split("=>")
    body = re.sub(r"= (\w+)", r"= com.microsoft.\1", body, count=1)
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 17, "com.microsoft" : 1]> mini ({ins}) => ({outs}) {{ {body} }}'
    )
    feeds = {}
    for value in list(model.graph.input):
        kind = value.type.tensor_type
        dims = tuple(d.dim_value for d in kind.shape.dim)
        feeds[value.name] = _feed(value.name, np.dtype(onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)), dims)
    for name in set(feeds) & {"full", "total", "wq", "ws", "wz"}:
        model.graph.initializer.append(onnx.numpy_helper.from_array(feeds.pop(name), name))
        model.graph.input.remove(next(v for v in model.graph.input if v.name == name))
    onnx.save(model, path)
    return path, feeds


def _feed(name: str, dtype: np.dtype, dims: tuple[int, ...]) -> np.ndarray:
    random = np.random.default_rng([*name.encode()])
    if name == "l":
        return np.array([3, 5], dtype)
    if name == "full":
        return np.array([4, 4], dtype)
    if name == "total":
        return np.array(5, dtype)
    if name == "m":
        mask = random.integers(0, 2, dims).astype(dtype)
        mask[..., 0] = 1
        return mask
    if dtype in (np.uint8, np.int8):
        limits = np.iinfo(dtype)
        middle = (limits.min + limits.max + 1) // 2
        return np.asarray(random.integers(middle - 60, middle + 60, dims)).astype(dtype)
    drawn = np.asarray(draw(name, dtype, dims))
    return np.asarray(drawn * dtype.type(0.05)) if name in ("p", "ps", "pt", "pu") and dtype == np.float32 else drawn


@pytest.mark.parametrize(
    ("signature", "body"), ROWS, ids=[f"{i}-{re.split(' = |<|[(]', body)[1]}" for i, (_, body) in enumerate(ROWS)]
)
def test_it_agrees_with_onnxruntime(tmp_path: Path, signature: str, body: str) -> None:
    path, feeds = _model(tmp_path / "mini.onnx", signature, body)
    compare(path, feeds, 3e-5)


def test_every_rule_has_a_case() -> None:
    assert set(table.OTHERS["com.microsoft"]) == {re.split(r" = |<|\(", body)[1] for _, body in ROWS}


@pytest.mark.parametrize("opset", [12, 17])
@pytest.mark.parametrize(
    "node",
    [
        "SimplifiedLayerNormalization<axis = -1, epsilon = 0.01>(x, w)",
        "LayerNormalization<axis = -1, epsilon = 0.01>(x, w, b)",
    ],
)
def test_normalisations_that_onnxruntime_puts_into_the_default_domain(tmp_path: Path, node: str, opset: int) -> None:
    path = tmp_path / "mini.onnx"
    text = f'<ir_version: 8, opset_import: ["" : {opset}]> mini (float[2,4,8] x, float[8] w, float[8] b) => (float[2,4,8] y) {{ y = {node} }}'
    onnx.save(onnx.parser.parse_model(text), path)
    compare(path, {name: draw(name, np.dtype(np.float32), (2, 4, 8) if name == "x" else (8,)) for name in "xwb"})


def test_a_wrong_mask_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.frontends.onnx.rules import microsoft

    signature, body = next(row for row in ROWS if "Attention<num_heads = 2>(x, w, b, m)" in row[1])
    path, feeds = _model(tmp_path / "mini.onnx", signature, body)
    compare(path, feeds)
    monkeypatch.setattr(microsoft, "_hidden", lambda n, *rest: n.ignore("mask_filter_value") or [])
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        compare(path, feeds)


@pytest.mark.parametrize(
    ("signature", "body", "said"),
    [
        (
            "float[2,5,8] x, float[8,24] w, float[24] b, float[2,2,2,3,4] q => float[2,5,8] y",
            "y = Attention<num_heads = 2>(x, w, b, , q)",
            "past",
        ),
        ("float[2,5,2,3,4] x => float[2,5,8] y", "y = MultiHeadAttention<num_heads = 2>(x)", "packed"),
        ("float[2,3] x => float[2,3] y", "y = Inverse(x)", r"com\.microsoft Inverse\): no rule"),
        (
            "float[2,3] x, float[3,4] w, float[4] b => float[2,4] y",
            'y = FusedGemm<activation = "Swirl">(x, w, b)',
            "activation=Swirl",
        ),
        (
            "float[3,64] x, uint8[5,4,8] wq, float[20] ws => float[3,5] y",
            "y = MatMulNBits<K = 64, N = 5, bits = 4, block_size = 16>(x, wq, ws)",
            r"MatMulNBits\): groups of 16 are not read",
        ),
        (
            "float[3,64] x, uint8[5,2,16] wq, float[10] ws, int32[64] i => float[3,5] y",
            "y = MatMulNBits<K = 64, N = 5, bits = 4, block_size = 32>(x, wq, ws, , i)",
            r"g_idx",
        ),
        (
            "float[3,64] x, uint8[4,2,16] wq, float[10] ws => float[3,5] y",
            "y = MatMulNBits<K = 64, N = 5, bits = 4, block_size = 32>(x, wq, ws)",
            r"does not fit N=5",
        ),
    ],
)
def test_what_is_not_supported_says_why(tmp_path: Path, signature: str, body: str, said: str) -> None:
    path, _ = _model(tmp_path / "mini.onnx", signature, body)
    with pytest.raises(UnsupportedModel, match=said):
        import_onnx(path)


def test_a_product_with_the_scale_of_another_column_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.frontends.onnx.rules import quantised

    signature, body = next(row for row in ROWS if "QGemm<transA = 1, transB = 1>" in row[1])
    path, feeds = _model(tmp_path / "mini.onnx", signature, body)
    compare(path, feeds)
    column = quantised._column
    monkeypatch.setattr(
        quantised, "_column", lambda n, i, count: n.emit("gather", column(n, i, count), np.arange(count)[::-1], axis=0)
    )
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        compare(path, feeds)


def test_a_weight_with_its_halves_turned_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.frontends.onnx.rules import microsoft

    signature, body = next(row for row in ROWS if "MatMulNBits" in row[1])
    path, feeds = _model(tmp_path / "mini.onnx", signature, body)
    compare(path, feeds)
    read = microsoft.read_nbits
    monkeypatch.setattr(microsoft, "read_nbits", lambda b, *rest, **sizes: read(b >> 4 | b << 4, *rest, **sizes))
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        compare(path, feeds)


def test_models_that_onnxruntime_optimised(tmp_path: Path) -> None:
    """What its optimiser fuses is read again, and computes the same."""
    import onnxruntime

    from penstock.models import write_gpt

    path = write_gpt(tmp_path / "gpt.onnx", layers=2, width=16, heads=2, vocab=29, positions=8, batch=3)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    fused = {
        node.op_type for node in onnx.load(tmp_path / "optimised.onnx").graph.node if node.domain == "com.microsoft"
    }
    assert fused
    tokens = {"tokens": np.random.default_rng(0).integers(0, 29, (3, 8))}
    found = run(import_onnx(tmp_path / "optimised.onnx"), tokens)
    np.testing.assert_allclose(found[0], judge(path, tokens)[0], rtol=1e-4, atol=1e-4)
