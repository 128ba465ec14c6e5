"""Whole graphs: what becomes a parameter, what is folded away, what exporters write."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from penstock.frontends.onnx import import_onnx
from penstock.passes.rewrite.simplify import SimplifyOptions, simplify
from penstock.support.errors import UsageError

from .cases import compare, draw, write_model

F32 = np.dtype(np.float32)


def roles(imported) -> dict[str, str]:
    return {var.name: var.role for var in imported.module.vars.values()}


# ---------------------------------------------------------------------------------------- parameters

MIXED = """(float[2,3,4] x) => (float[2,3,4] y)
  <float[3] bn_s = {1, 2, 3}, float[3] bn_b = {0, 1, 0}, float[3] bn_m = {0, 1, 2}, float[3] bn_v = {1, 2, 1},
   float[1] one = {2}, float[1] gain = {3}, float number = {0.5}, float low = {-1}, float[4] never = {1, 2, 3, 4}, int64[2] axes = {0, 1}> {
  a = BatchNormalization(x, bn_s, bn_b, bn_m, bn_v)
  b = Mul(a, gain)
  c = Mul(b, number)
  d = Clip(c, low)
  e = Add(d, one)
  y = Mul(e, gain)
}"""


def test_which_initializers_are_trained(tmp_path: Path) -> None:
    path = write_model(tmp_path / "mixed.onnx", MIXED)
    imported = compare(path, {"x": draw("x", F32, (2, 3, 4))})
    assert roles(imported) == {"bn_s": "param", "bn_b": "param", "gain": "param"}
    report = "\n".join(imported.report)
    assert "not trained by rule number, 2: one, number (" in report
    assert "not trained by rule bound, 1: low (" in report
    assert "not trained by rule statistic, 2: bn_m, bn_v (" in report
    assert "trained though unusual, 1: gain (one element; the name" in report
    assert "left out: never" in report
    assert "used more than once, trained as one variable each: gain" in report


def test_statistics_with_many_entries_are_buffers(tmp_path: Path) -> None:
    text = "(float[2,20,4] x, float[20] s, float[20] b) => (float[2,20,4] y) { y = BatchNormalization(x, s, b, mean, var) }"
    arrays = {name: draw(f"p{name}", F32, (20,)) for name in ("mean", "var")}
    imported = compare(
        write_model(tmp_path / "a.onnx", text, arrays=arrays),
        {n: draw(n, F32, s) for n, s in (("x", (2, 20, 4)), ("s", (20,)), ("b", (20,)))},
    )
    assert roles(imported) == {"mean": "buffer", "var": "buffer"}


def test_frozen_initializers_are_constants_and_folded(tmp_path: Path) -> None:
    text = "(float[2,20] x) => (float[2,20] y) { t = Transpose(body_w) a = MatMul(x, t) b = MatMul(a, head_w) y = Add(b, body_b) }"
    arrays = {"body_w": draw("w", F32, (20, 20)), "head_w": draw("h", F32, (20, 20)), "body_b": draw("b", F32, (20,))}
    path = write_model(tmp_path / "a.onnx", text, arrays=arrays)
    feeds = {"x": draw("x", F32, (2, 20))}
    assert roles(compare(path, feeds, 1e-4)) == {"body_w": "param", "head_w": "param", "body_b": "param"}
    imported = compare(path, feeds, 1e-4, frozen="^body")
    assert roles(imported) == {"t": "buffer", "head_w": "param", "body_b": "buffer"}
    np.testing.assert_array_equal(imported.weights["t"], arrays["body_w"].T)
    with pytest.raises(UsageError, match="matches no floating-point initializer"):
        import_onnx(path, frozen="^tail")
    with pytest.raises(UsageError, match="not a regular expression"):
        import_onnx(path, frozen="(")


def test_single_numbers_are_constants_unless_named(tmp_path: Path) -> None:
    arrays = {"scale": np.array(2.5, F32), "eps": np.array(0.5, F32)}
    path = write_model(
        tmp_path / "a.onnx", "(float[2] x) => (float[2] y) { a = Mul(x, scale) y = Add(a, eps) }", arrays=arrays
    )
    feeds = {"x": draw("x", F32, (2,))}
    assert roles(compare(path, feeds, 1e-6)) == {}
    assert roles(compare(path, feeds, 1e-6, trained="^scale$")) == {"scale": "param"}
    with pytest.raises(UsageError, match="--trained 'weight' matches no floating-point initializer"):
        import_onnx(path, trained="weight")


def test_a_tied_weight_is_one_variable_read_once(tmp_path: Path) -> None:
    text = "(int64[2,3] ids) => (float[2,3,9] y) { e = Gather(emb, ids) alias = Identity(emb) t = Transpose(alias) y = MatMul(e, t) }"
    imported = compare(
        write_model(tmp_path / "a.onnx", text, arrays={"emb": draw("e", F32, (9, 4))}),
        {"ids": np.array([[0, 3, 8], [1, 1, 2]])},
    )
    assert roles(imported) == {"emb": "param"}
    assert [op.kind for op in imported.module.graphs["main"].ops].count("read") == 1


def test_initializers_listed_as_inputs_are_not_fed(tmp_path: Path) -> None:
    path = write_model(
        tmp_path / "a.onnx",
        "(float[2,3] x, float[3] w) => (float[2,3] y) { y = Add(x, w) }",
        arrays={"w": draw("w", F32, (3,))},
    )
    assert [v.name for v in compare(path, {"x": draw("x", F32, (2, 3))}).module.inputs] == ["x"]


# ---------------------------------------------------------------------------------------- folding


def test_a_shape_chain_leaves_nothing_behind(tmp_path: Path) -> None:
    """The chain of exporters: take a size apart, compute with it, put a shape together."""
    text = """(float[B,T,12] x) => (float[B,H,T,K] y) {
      s = Shape(x)
      zero = Constant<value = int64 {0}>() one = Constant<value = int64 {1}>() two = Constant<value = int64 {2}>() three = Constant<value = int64 {3}>()
      b = Gather(s, zero) t = Gather(s, one) w = Gather(s, two)
      k = Div(w, three)
      front = Constant<value = int64[1] {0}>()
      bu = Unsqueeze(b, front) tu = Unsqueeze(t, front) ku = Unsqueeze(k, front) hu = Unsqueeze(three, front)
      shape = Concat<axis = 0>(bu, tu, hu, ku)
      r = Reshape(x, shape)
      h = Transpose<perm = [0,2,1,3]>(r)
      f = Cast<to = 1>(k) root = Sqrt(f)
      y = Div(h, root)
    }"""
    imported = compare(write_model(tmp_path / "a.onnx", text), {"x": draw("x", F32, (2, 5, 12))}, dims={"B": 2, "T": 5})
    assert [op.kind for op in imported.module.graphs["main"].ops] == ["reshape", "transpose", "const", "div"]
    assert imported.module.graphs["main"].ops[2].attrs["value"] == 2.0
    assert any("computed at import" in line for line in imported.report)


def test_a_causal_mask_computed_from_shapes_is_a_comparison(tmp_path: Path) -> None:
    text = """(float[2,T,T] x) => (float[2,T,T] y) {
      s = Shape<start = 1>(x)
      minus = ConstantOfShape<value = float[1] {-1e30}>(s)
      k = Constant<value = int64 {1}>()
      upper = Trilu<upper = 1>(minus, k)
      masked = Add(x, upper)
      y = Softmax(masked)
    }"""
    imported = compare(write_model(tmp_path / "a.onnx", text), {"x": draw("x", F32, (2, 6, 6))}, dims={"T": 6})
    assert roles(imported) == {}  # a comparison of positions takes no memory
    assert {"less_equal", "add", "softmax"} <= {op.kind for op in imported.module.graphs["main"].ops}


def test_constants_are_ops_when_small_or_even_and_buffers_otherwise(tmp_path: Path) -> None:
    text = "(float[4,5] x) => (float[4,5] a, float[4,5] b, float[4,5] c) { a = Where(even, x, x) b = Add(x, few) c = Where(many, x, b) }"
    arrays = {
        "even": np.ones((4, 5), np.bool_),
        "few": np.arange(5, dtype=np.float32),
        "many": draw("m", np.dtype(np.bool_), (4, 5)),
    }
    imported = compare(
        write_model(tmp_path / "a.onnx", text, arrays=arrays), {"x": draw("x", F32, (4, 5))}, frozen="few"
    )
    assert roles(imported) == {"many": "buffer"}
    consts = {op.outs[0].name: op.attrs["value"] for op in imported.module.graphs["main"].ops if op.kind == "const"}
    assert consts == {"even": True, "few": (0.0, 1.0, 2.0, 3.0, 4.0)}


def test_outputs_may_be_inputs_weights_constants_and_each_other(tmp_path: Path) -> None:
    text = """(float[2,3] x, float[3] w) => (float[2,3] p, float[3] q, int64[2] r, float[2,3] s, float[2,3] t, float[2,3] h) {
      p = Identity(x) q = Identity(w) r = Shape(x) h = Relu(x) s = Identity(h) t = Identity(h)
    }"""
    imported = compare(
        write_model(tmp_path / "a.onnx", text, arrays={"w": draw("w", F32, (3,))}), {"x": draw("x", F32, (2, 3))}
    )
    assert imported.module.outputs == ("p", "q", "r", "s", "t", "h")


def test_a_weight_that_nothing_else_uses_may_be_several_outputs(tmp_path: Path) -> None:
    text = """(float[2] x, float[3] w) => (float[2] y, float[3] u, float[3] v, int64[20] a, int64[20] b) {
      y = Relu(x) u = Identity(w) v = Identity(w) a = Identity(many) b = Identity(many)
    }"""
    arrays = {"w": draw("w", F32, (3,)), "many": np.arange(20)}
    imported = compare(write_model(tmp_path / "a.onnx", text, arrays=arrays), {"x": draw("x", F32, (2,))})
    assert imported.module.outputs == ("y", "u", "v", "a", "b")


def test_results_are_checked_against_shape_inference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.frontends.onnx.table import RULES
    from penstock.support.errors import UnsupportedModel

    path = write_model(tmp_path / "a.onnx", "(float[2,3] x) => (float[3,2] y) { y = Transpose(x) }")
    monkeypatch.setitem(RULES, "Transpose", lambda n: n.value())
    with pytest.raises(
        UnsupportedModel, match=r"result y comes out as f32\[2,3\], but shape inference says f32\[3,2\]"
    ):
        import_onnx(path)


def test_pooling_rounded_up_is_right_where_shape_inference_is_not(tmp_path: Path) -> None:
    text = "(float[1,2,7,6] x) => (float[a,b,c,d] y) { y = MaxPool<kernel_shape = [3,2], strides = [2,2], pads = [1,0,1,1], ceil_mode = 1>(x) }"
    compare(write_model(tmp_path / "a.onnx", text, 13), {"x": draw("x", F32, (1, 2, 7, 6))})


def test_local_functions_are_inlined(tmp_path: Path) -> None:
    text = """<ir_version: 10, opset_import: ["" : 20, "mine" : 1]>
    g (float[2,3] x) => (float[2,3] y) { h = mine.twice(x) y = mine.twice(h) }
    <domain: "mine", opset_import: ["" : 20]>
    twice (a) => (b) { b = Add(a, a) }"""
    path = tmp_path / "f.onnx"
    onnx.save(onnx.parser.parse_model(text), path)
    imported = compare(path, {"x": draw("x", F32, (2, 3))})
    assert [op.kind for op in imported.module.graphs["main"].ops] == ["add", "add"]


# ---------------------------------------------------------------------------------------- exporters


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.after, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, mask):
        batch, positions, width = x.shape
        parts = self.qkv(self.before(x)).chunk(3, -1)
        q, k, v = (p.view(batch, positions, self.heads, width // self.heads).transpose(1, 2) for p in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, positions, width))
        return x + self.down(F.gelu(self.up(self.after(x)), approximate="tanh"))


def _language_model():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.places = nn.Embedding(31, 16), nn.Embedding(12, 16)
            self.blocks = nn.ModuleList([Block(16, 2) for _ in range(2)])
            self.head = nn.Linear(16, 31, bias=False)

        def forward(self, ids, attention_mask):
            positions = ids.shape[1]
            causal = torch.ones(positions, positions, dtype=torch.bool).tril()
            mask = causal[None, None] & (attention_mask[:, None, None, :] > 0)
            x = self.words(ids) + self.places(torch.arange(positions))
            for block in self.blocks:
                x = block(x, mask)
            return self.head(x)

    arguments = (torch.randint(0, 31, (2, 8)), torch.tensor([[1] * 8, [1] * 5 + [0] * 3]))
    return Model(), arguments, {"ids": {0: "batch", 1: "positions"}, "attention_mask": {0: "batch", 1: "positions"}}


def _encoder():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(31, 16)
            layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, activation="gelu")
            self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

        def forward(self, ids):
            pooled = self.layers(self.words(ids)).mean(1)
            return pooled / pooled.norm(dim=-1, keepdim=True)

    return Model(), (torch.randint(0, 31, (2, 8)),), {"ids": {0: "batch", 1: "positions"}}


def _images():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 2, 1), nn.Conv2d(8, 8, 3, groups=4, stride=2),
        nn.GroupNorm(2, 8), nn.SiLU(), nn.AvgPool2d(2, ceil_mode=True), nn.Hardswish(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, 5), nn.LogSoftmax(-1),
    )  # fmt: skip
    model[1].running_mean.normal_()
    return model, (torch.randn(2, 3, 17, 17),), {"x": {0: "batch"}}


@pytest.mark.parametrize("opset", [14, 17, 20])
@pytest.mark.parametrize("build", [_language_model, _encoder, _images])
def test_what_torch_exports(tmp_path: Path, build, opset: int) -> None:
    """The exporter that needs no further package; its graphs are full of shape chains."""
    torch.manual_seed(0)
    model, arguments, axes = build()
    path = tmp_path / "model.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model.eval(),
            arguments,
            str(path),
            input_names=list(axes),
            dynamic_axes=axes,
            opset_version=opset,
            dynamo=False,
        )
    sizes = {
        name: a.shape[axis] for a, names in zip(arguments, axes.values(), strict=True) for axis, name in names.items()
    }
    imported = compare(path, {n: a.numpy() for n, a in zip(axes, arguments, strict=True)}, 1e-5, dims=sizes)
    read = {op.var for op in imported.module.graphs["main"].ops if op.kind == "read"}
    assert read == set(imported.module.vars)
    # Shape chains are gone; what is left of positions are causal masks.
    assert all(op.outs[0].type.rank > 1 for op in imported.module.graphs["main"].ops if op.kind == "iota")
    kinds = [op.kind for op in simplify(imported.module, SimplifyOptions()).graphs["main"].ops]
    assert kinds.count("attention") == (0 if build is _images else 2)


def test_what_the_exporter_says_of_weights_counts(tmp_path: Path) -> None:
    text = "(float[2] x) => (float[2] y) { a = Mul(x, scale) b = Add(a, eps) c = Mul(b, table) y = Mul(c, weight) }"
    arrays = {
        "scale": np.array(2.5, F32),
        "eps": np.array(0.5, F32),
        "table": draw("t", F32, (2,)),
        "weight": draw("w", F32, (2,)),
    }
    path = write_model(tmp_path / "a.onnx", text, arrays=arrays)
    feeds = {"x": draw("x", F32, (2,))}
    assert roles(compare(path, feeds, 1e-6)) == {"table": "param", "weight": "param"}
    model = onnx.load(path)
    for name, kind in (("scale", "PARAMETER"), ("table", "BUFFER"), ("weight", "PARAMETER")):
        value = model.graph.value_info.add(name=name)
        value.metadata_props.add(key="pkg.torch.export.graph_signature.InputSpec.kind", value=kind)
    onnx.save(model, path)
    imported = compare(path, feeds, 1e-6)
    assert roles(imported) == {"scale": "param", "weight": "param"}
    assert "buffers of the exported module, not trained: table" in imported.report
    assert roles(compare(path, feeds, 1e-6, frozen="scale", trained="table")) == {"table": "param", "weight": "param"}
