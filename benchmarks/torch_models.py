"""The models of models.py as plain torch modules, in torch's usual style, with the weights of the ONNX files.

In: the ONNX file, and the sizes it was written with. Out: a module. Batch norms always use their stored statistics
(their scales and offsets are trained), attention is scaled_dot_product_attention. `build` turns the ONNX initializers
into a state dict, by name and shape, and refuses any that is left over. `pieces` of a model are modules that compute
its result one after the other, for pipelines to cut between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Piece(nn.Module):
    """A function of its input and of some modules."""

    def __init__(self, run: Callable[..., Tensor], **parts: nn.Module) -> None:
        super().__init__()
        self.run, self.parts = run, nn.ModuleDict(parts)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x, *self.parts.values())


# ------------------------------------------------------------------------------------------------ resnet


class Norm(nn.BatchNorm2d):
    """Batch norm that uses its stored statistics in training, too."""

    def train(self, mode: bool = True) -> Norm:
        super().train(False)
        return self


class Bottleneck(nn.Module):
    def __init__(self, before: int, inner: int, stride: int, shortcut: bool) -> None:
        super().__init__()
        after = 4 * inner
        self.conv1, self.norm1 = nn.Conv2d(before, inner, 1, bias=False), Norm(inner)
        self.conv2, self.norm2 = nn.Conv2d(inner, inner, 3, stride, 1, bias=False), Norm(inner)
        self.conv3, self.norm3 = nn.Conv2d(inner, after, 1, bias=False), Norm(after)
        self.relu = nn.ReLU(inplace=True)
        self.short = (
            nn.ModuleDict({"conv": nn.Conv2d(before, after, 1, stride, bias=False), "norm": Norm(after)})
            if shortcut
            else None
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.relu(self.norm2(self.conv2(y)))
        y = self.norm3(self.conv3(y))
        if self.short is not None:
            x = self.short["norm"](self.short["conv"](x))
        y += x
        return self.relu(y)


class ResNet(nn.Module):
    def __init__(self, blocks: Sequence[int], width: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.ModuleDict({"conv": nn.Conv2d(3, width, 7, 2, 3, bias=False), "norm": Norm(width)})
        self.pool = nn.MaxPool2d(3, 2, 1)
        before = width
        for i, count in enumerate(blocks):
            stage = nn.Sequential()
            for j in range(count):
                stage.append(Bottleneck(before, width * 2**i, 2 if i and not j else 1, j == 0))
                before = 4 * width * 2**i
            self.add_module(f"stage{i + 1}", stage)
        self.stages = [f"stage{i + 1}" for i in range(len(blocks))]
        self.y = nn.Linear(before, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = _stem(x, self.stem["conv"], self.stem["norm"], self.pool)
        for name in self.stages:
            x = getattr(self, name)(x)
        return _classify(x, self.y)

    def pieces(self) -> list[nn.Module]:
        stem = Piece(_stem, conv=self.stem["conv"], norm=self.stem["norm"], pool=self.pool)
        return [stem, *(block for name in self.stages for block in getattr(self, name)), Piece(_classify, y=self.y)]


def _stem(x: Tensor, conv: nn.Module, norm: nn.Module, pool: nn.Module) -> Tensor:
    return pool(F.relu(norm(conv(x)), inplace=True))


def _classify(x: Tensor, linear: nn.Module) -> Tensor:
    return linear(x.mean((2, 3)))


# ------------------------------------------------------------------------------------------------ bert


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.output = (nn.Linear(width, width) for _ in range(4))
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, positions, width = x.shape

        def split(y: Tensor) -> Tensor:
            return y.view(batch, positions, self.heads, width // self.heads).transpose(1, 2)

        mixed = F.scaled_dot_product_attention(split(self.query(x)), split(self.key(x)), split(self.value(x)))
        x = self.norm1(x + self.output(mixed.transpose(1, 2).reshape(batch, positions, width)))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class Bert(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, vocab: int, positions: int, classes: int) -> None:
        super().__init__()
        self.word, self.position, self.segment = (nn.Embedding(size, width) for size in (vocab, positions, 1))
        self.embedding = nn.ModuleDict({"norm": nn.LayerNorm(width)})
        self.layer = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.pooler, self.y = nn.Linear(width, width), nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        x = _embed(tokens, self.word, self.position, self.segment, self.embedding["norm"])
        for layer in self.layer:
            x = layer(x)
        return _pool_first(x, self.pooler, self.y)

    def pieces(self) -> list[nn.Module]:
        front = Piece(_embed, word=self.word, position=self.position, segment=self.segment, norm=self.embedding["norm"])
        return [front, *self.layer, Piece(_pool_first, pooler=self.pooler, y=self.y)]


def _embed(tokens: Tensor, word: nn.Module, position: nn.Embedding, segment: nn.Embedding, norm: nn.Module) -> Tensor:
    return norm(word(tokens) + position.weight[: tokens.shape[1]] + segment.weight)


def _pool_first(x: Tensor, pooler: nn.Module, linear: nn.Module) -> Tensor:
    return linear(torch.tanh(pooler(x[:, 0])))


# ------------------------------------------------------------------------------------------------ gpt


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.ModuleDict({"qkv": nn.Linear(width, 3 * width), "proj": nn.Linear(width, width)})
        self.mlp = nn.ModuleDict({"fc": nn.Linear(width, 4 * width), "proj": nn.Linear(4 * width, width)})

    def forward(self, x: Tensor) -> Tensor:
        batch, positions, width = x.shape
        parts = self.attn["qkv"](self.ln_1(x)).view(batch, positions, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn["proj"](mixed.transpose(1, 2).reshape(batch, positions, width))
        return x + self.mlp["proj"](F.gelu(self.mlp["fc"](self.ln_2(x)), approximate="tanh"))


class Gpt(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, vocab: int, positions: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(positions, width)
        self.h = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = _look_up(tokens, self.wte, self.wpe)
        for block in self.h:
            x = block(x)
        return _unembed(x, self.ln_f, self.lm_head)

    def pieces(self) -> list[nn.Module]:
        return [
            Piece(_look_up, wte=self.wte, wpe=self.wpe),
            *self.h,
            Piece(_unembed, norm=self.ln_f, head=self.lm_head),
        ]


def _look_up(tokens: Tensor, wte: nn.Module, wpe: nn.Embedding) -> Tensor:
    return wte(tokens) + wpe.weight[: tokens.shape[1]]


def _unembed(x: Tensor, norm: nn.Module, head: nn.Module) -> Tensor:
    return head(norm(x))


# ------------------------------------------------------------------------------------------------ cnn and mlp


class Cnn(nn.Module):
    """Blocks of a 3x3 convolution, batch norm, relu and pooling by 2, then a linear layer."""

    def __init__(self, channels: Sequence[int], size: int, classes: int) -> None:
        super().__init__()
        for i, (before, after) in enumerate(pairwise(channels), 1):
            self.add_module(
                f"block{i}", nn.ModuleDict({"conv": nn.Conv2d(before, after, 3, 1, 1), "norm": Norm(after)})
            )
        self.depth, side = len(channels) - 1, size >> (len(channels) - 1)
        self.y = nn.Linear(channels[-1] * side * side, classes)

    def forward(self, x: Tensor) -> Tensor:
        for i in range(self.depth):
            block = getattr(self, f"block{i + 1}")
            x = F.max_pool2d(F.relu(block["norm"](block["conv"](x)), inplace=True), 2)
        return self.y(x.flatten(1))


class Mlp(nn.Module):
    """Linear layers with relu between them."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        self.depth = len(sizes) - 1
        for i, (before, after) in enumerate(pairwise(sizes), 1):
            self.add_module("y" if i == self.depth else f"fc{i}", nn.Linear(before, after))

    def forward(self, x: Tensor) -> Tensor:
        for i in range(1, self.depth):
            x = F.relu(getattr(self, f"fc{i}")(x))
        return self.y(x)


# ------------------------------------------------------------------------------------------------ weights

MODELS: Mapping[str, Callable[..., nn.Module]] = {"resnet": ResNet, "bert": Bert, "gpt": Gpt, "cnn": Cnn, "mlp": Mlp}
_TABLES = ("wte", "wpe", "word", "position", "segment")


def build(kind: str, sizes: Mapping[str, object], file: Path) -> nn.Module:
    """Make the module `kind` with the weights of the file."""
    import onnx
    from onnx import numpy_helper

    graph = onnx.load(str(file), load_external_data=False).graph
    tensors = {t.name: t for t in graph.initializer}
    return filled(
        kind, sizes, {name: numpy_helper.to_array(t, base_dir=str(file.parent)) for name, t in tensors.items()}
    )


def filled(kind: str, sizes: Mapping[str, object], arrays: Mapping[str, np.ndarray]) -> nn.Module:
    """Make the module `kind` with weights that have the names and shapes of ONNX files."""
    with torch.device("meta"):  # no first weights that are overwritten at once
        model = MODELS[kind](**sizes)
    model.load_state_dict(_state_of(model, arrays), assign=True)
    return model.train()  # even fresh batch norms have to be switched


def _state_of(model: nn.Module, arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    """Map ONNX names to torch's, which differ for the statistics of batch norms.

    Matrices of linear layers are [in, out] in the file.
    """
    tensors = dict(arrays)
    ours = {"running_mean": "mean", "running_var": "var"}
    state = {}
    for name, value in model.state_dict().items():
        owner, _, part = name.rpartition(".")
        if part == "num_batches_tracked":
            state[name] = torch.zeros_like(value, device="cpu")
            continue
        array = np.array(tensors.pop(f"{owner}.{ours.get(part, part)}"))
        turned = part == "weight" and array.ndim == 2 and owner not in _TABLES
        state[name] = torch.from_numpy(np.ascontiguousarray(array.T) if turned else array)
    left = [name for name in tensors if name.endswith((".weight", ".bias"))]
    assert not left, f"weights that torch's model does not have: {left}"
    return state
