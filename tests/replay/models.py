"""The models of the corpus: small ones of many kinds, from ONNX and from torch, with no download. Weights are seeded,
though no hash depends on them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import torch
from models import families
from oracles import torch_modules
from oracles.export_cases import write_rich
from torch import Tensor, nn
from torch.nn import functional as F

import penstock as ps
from penstock.models import write_bert, write_cnn, write_gpt, write_mlp, write_resnet

# ---------------------------------------------------------------------------------------- from ONNX


def from_file(write: Callable[[Path], object], **options: object) -> ps.Model:
    """The model that `write` leaves in a file."""
    with tempfile.TemporaryDirectory(prefix="penstock-replay-") as folder:
        path = Path(folder) / "model.onnx"
        write(path)
        return ps.from_onnx(path, **options)  # type: ignore[arg-type]


def from_text(text: str, shapes: Mapping[str, tuple[int, ...]] | None = None) -> ps.Model:
    """A model in ONNX's text form, `(inputs) => (outputs) { nodes }`; `shapes` are those of its weights, which are normal numbers, or small integers
    where the name begins with q."""

    def write(path: Path) -> None:
        model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21, "mine" : 1]> {text}')
        for name, shape in (shapes or {}).items():
            drawn = np.random.default_rng([*name.encode()]).standard_normal(shape)
            array = (drawn * 40).clip(-127, 127).astype(np.int8) if name[0] == "q" else drawn.astype(np.float32)
            model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
        onnx.save(model, path)

    return from_file(write)


@cache
def mlp(*sizes: int, dtype: str = "f32") -> ps.Model:
    return from_file(lambda path: write_mlp(path, sizes, 4, dtype=dtype))


@cache
def cnn() -> ps.Model:
    return from_file(lambda path: write_cnn(path, 2, size=12))


@cache
def resnet() -> ps.Model:
    return from_file(lambda path: write_resnet(path, 2, blocks=(1, 2), width=4, size=32, classes=5))


@cache
def gpt(layers: int = 2) -> ps.Model:
    return from_file(lambda path: write_gpt(path, layers=layers, width=16, heads=2, vocab=29, positions=8, batch=2))


@cache
def bert() -> ps.Model:
    return from_file(lambda path: write_bert(path, 2, layers=2, width=16, heads=2, vocab=29, positions=8, classes=3))


def rich() -> ps.Model:
    """Odd names, 16-bit weights, a tied one, a local function, a frozen one, outputs that no loss sees."""
    return from_file(write_rich, dims={"rows": 4}, frozen="frozen|corner")


def parallel() -> ps.Model:
    """Convolutions of one input and its batch norm, added up."""
    text = """parallel (float[2,8,9,9] x) => (float[2,8,9,9] y) {
        a = Conv<pads = [1, 1, 1, 1]>(x, wa, ba)
        b = Conv(x, wb)
        c = BatchNormalization(x, s, t, m, v)
        d = Add(a, b)
        e = Add(d, c)
        y = Relu(e)
    }"""
    shapes = {"wa": (8, 8, 3, 3), "ba": (8,), "wb": (8, 8, 1, 1), "s": (8,), "t": (8,), "m": (8,), "v": (8,)}
    return from_text(text, shapes)


def quantised() -> ps.Model:
    """A convolution and a product in integers, and quantised weights that are widened."""
    text = """quantised (float[2,3,8,8] x) => (float[2,5] y) <float sx = {0.05}, float sw = {0.02}, float sy = {0.1}, int8 z = {0}> {
        a = QuantizeLinear(x, sx, z)
        b = QLinearConv<pads = [1, 1, 1, 1], strides = [2, 2]>(a, sx, z, q1, sw, z, sy, z)
        c = DequantizeLinear(b, sy, z)
        r = Relu(c)
        f = Flatten(r)
        w = DequantizeLinear(q2, sw, z)
        h = MatMul(f, w)
        y = Add(h, bias)
    }"""
    return from_text(text, {"q1": (4, 3, 3, 3), "q2": (64, 5), "bias": (5,)})


def control() -> ps.Model:
    """A loop, a scan, a branch that is decided at import, and a local function."""
    text = """control (float[4,6] x) => (float[4,3] y) {
        n = Constant<value_int = 3>()
        on = Constant<value = bool {1}>()
        h = Loop(n, on, x)<body = b (int64 i, bool go, float[4,6] s) => (bool still, float[4,6] t) {
            still = Identity(go) p = MatMul(s, w1) t = Tanh(p) }>
        first = Constant<value = float[6] {0., 0., 0., 0., 0., 0.}>()
        last, all = Scan<num_scan_inputs = 1, body = c (float[6] s, float[6] e) => (float[6] k, float[6] o) {
            k = Add(s, e) o = Sigmoid(k) }>(first, h)
        g = If(on)<then_branch = d () => (float[4,6] u) { u = mine.gate(all) }, else_branch = e () => (float[4,6] v) { v = Neg(all) }>
        y = MatMul(g, w2)
    }
    <domain: "mine", opset_import: ["" : 21]> gate (a) => (b) { r = LeakyRelu<alpha = 0.25>(a) b = Mul(r, a) }"""
    return from_text(text, {"w1": (6, 6), "w2": (6, 3)})


def recurrent() -> ps.Model:
    """A GRU over the steps of a sequence."""
    text = """recurrent (float[5,2,4] x) => (float[2,3] y) {
        all, last = GRU<hidden_size = 6, linear_before_reset = 1>(x, w, r, b)
        axis = Constant<value_ints = [0]>()
        h = Squeeze(last, axis)
        y = MatMul(h, head)
    }"""
    return from_text(text, {"w": (1, 18, 4), "r": (1, 18, 6), "b": (1, 36), "head": (6, 3)})


# ---------------------------------------------------------------------------------------- from torch


def from_module(module: nn.Module, *inputs: Tensor) -> ps.Model:
    return ps.from_torch(module, inputs)


def of_family(name: str) -> ps.Model:
    """One of the families that need no library but torch."""
    module, inputs = families.build(name)
    return ps.from_torch(module, tuple(inputs.values()))


@cache
def tied_gpt() -> ps.Model:
    return from_module(torch_modules.GPT(), torch.zeros(2, 8, dtype=torch.int64))


def convolutions(training: bool) -> ps.Model:
    """Batch norms, which keep running statistics in training."""
    return from_module(torch_modules.Conv().train(training), torch.zeros(2, 3, 16, 16))


def encoder() -> ps.Model:
    """With dropout behind attention, activation and both sums."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    return from_module(nn.Sequential(layer, nn.Linear(8, 5)).train(), torch.zeros(2, 5, 8))


class Rotated(nn.Module):
    """A block as llama has them: a norm by the mean square, rotated queries and keys, keys and values for several heads, a gated feed-forward."""

    def __init__(self, width: int = 16, heads: int = 4, shared: int = 2, positions: int = 8) -> None:
        super().__init__()
        self.heads, self.shared = heads, shared
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q = nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, width * shared // heads, bias=False) for _ in range(2))
        self.o = nn.Linear(width, width, bias=False)
        self.gate, self.up, self.down = (
            nn.Linear(width, 24, bias=False),
            nn.Linear(width, 24, bias=False),
            nn.Linear(24, width, bias=False),
        )
        self.register_buffer("angles", torch.zeros(positions, width // heads), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (
            f(h).unflatten(-1, (n, -1)).transpose(1, 2)
            for f, n in ((self.q, self.heads), (self.k, self.shared), (self.v, self.shared))
        )
        q, k = (self._rotated(part) for part in (q, k))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))

    def _rotated(self, x: Tensor) -> Tensor:
        angles = self.angles[: x.shape[-2]]
        left, right = x.chunk(2, -1)
        return x * angles.cos() + torch.cat([-right, left], -1) * angles.sin()


class Llama(nn.Module):
    def __init__(self, width: int = 16, vocab: int = 29, positions: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Rotated(width, positions=positions) for _ in range(2))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def llama() -> ps.Model:
    return from_module(Llama(), torch.zeros(2, 8, dtype=torch.int64))


class Translator(nn.Module):
    """Encoder and decoder as T5 has them: one embedding for both and for the head, a bias by distance that all layers share, and what the encoder
    made goes into every layer of the decoder."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed, self.distance = nn.Embedding(29, width), nn.Embedding(15, 2)
        self.encoder, self.decoder, self.across = (
            nn.ModuleList(self._attention(width) for _ in range(2)) for _ in range(3)
        )
        self.forwards = nn.ModuleList(
            nn.Sequential(nn.RMSNorm(width), nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, width)) for _ in range(4)
        )
        distances = torch.arange(8)[None] - torch.arange(8)[:, None] + 7
        self.register_buffer("distances", distances, persistent=False)

    @staticmethod
    def _attention(width: int) -> nn.ModuleDict:
        parts = {name: nn.Linear(width, width, bias=False) for name in "qkvo"}
        return nn.ModuleDict({"norm": nn.RMSNorm(width), **parts})

    def _attend(self, part: nn.ModuleDict, x: Tensor, source: Tensor | None, bias: Tensor | None) -> Tensor:
        h = part["norm"](x)
        q, k, v = (
            part[n](h if n == "q" or source is None else source).unflatten(-1, (2, -1)).transpose(1, 2) for n in "qkv"
        )
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return x + part["o"](mixed.transpose(1, 2).flatten(2))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        bias = self.distance(self.distances).permute(2, 0, 1)[None]
        x = self.embed(source)
        for part, wide in zip(self.encoder, self.forwards[:2], strict=True):
            x = self._attend(part, x, None, bias)
            x = x + wide(x)
        y = self.embed(target)
        hidden = torch.full((8, 8), float("-inf")).triu(1)
        for part, across, wide in zip(self.decoder, self.across, self.forwards[2:], strict=True):
            y = self._attend(part, y, None, bias + hidden)
            y = self._attend(across, y, x, None)
            y = y + wide(y)
        return y @ self.embed.weight.T


def translator() -> ps.Model:
    ids = torch.zeros(2, 8, dtype=torch.int64)
    return from_module(Translator(), ids, ids)


class Experts(nn.Module):
    """Two of four experts for every position, weighted by a softmax of their scores."""

    def __init__(self, width: int = 8, inner: int = 12, count: int = 4) -> None:
        super().__init__()
        self.count = count
        self.router, self.norm = nn.Linear(width, count, bias=False), nn.LayerNorm(width)
        self.up, self.down = (
            nn.Parameter(torch.zeros(count, width, inner)),
            nn.Parameter(torch.zeros(count, inner, width)),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        best, which = self.router(h).softmax(-1).topk(2, -1)
        weights = (F.one_hot(which, self.count) * (best / best.sum(-1, keepdim=True))[..., None]).sum(-2)
        made = torch.einsum("bted,edf->btef", F.gelu(torch.einsum("btf,efd->bted", h, self.up)), self.down)
        return x + (made * weights[..., None]).sum(-2)


def experts() -> ps.Model:
    return from_module(nn.Sequential(Experts(), Experts(), nn.Linear(8, 5)), torch.zeros(2, 6, 8))


class Patches(nn.Module):
    """A transformer over patches of an image, with a token of its own for the class."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, width, 4, stride=4)
        self.token, self.places = nn.Parameter(torch.zeros(1, 1, width)), nn.Parameter(torch.zeros(1, 17, width))
        self.blocks, self.norm, self.head = (
            nn.ModuleList(torch_modules.Block(width, 2) for _ in range(2)),
            nn.LayerNorm(width),
            nn.Linear(width, 5),
        )

    def forward(self, image: Tensor) -> Tensor:
        x = self.cut(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))


def patches() -> ps.Model:
    return from_module(Patches(), torch.zeros(2, 3, 16, 16))


class Branches(nn.Module):
    """Two towers that take turns in the graph and meet at the end, with a convolution in one dimension, as contrastive models have them."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))
        self.right = nn.ModuleList(nn.Conv1d(3, 3, 3, padding=1) for _ in range(3))
        self.meet = nn.Linear(12, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for left, right in zip(self.left, self.right, strict=True):
            x, y = torch.tanh(left(x)), F.elu(right(y))
        return self.meet(x * y.flatten(1))


def branches() -> ps.Model:
    return from_module(Branches(), torch.zeros(2, 12), torch.zeros(2, 3, 4))
