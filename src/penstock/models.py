"""Small model files of known shape, written straight as ONNX: for the demo, the tests and the benchmarks.

In: sizes and a seed. Out: a valid ONNX file at `path` (opset 20) whose weights depend on the seed alone. `batch=None`
leaves the batch size open as the symbolic dimension `batch`. Weights beyond 256 MB go to a file beside the model, which
importers map instead of copying.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import onnx

OPSET = 20
_EXTERNAL_FROM = 256_000_000
_DTYPES = {"f32": np.float32, "f64": np.float64, "f16": np.float16}

Batch = int | str


class _Sheet:
    """The nodes and initializers of a graph while it is built."""

    def __init__(self, dtype: str, seed: int) -> None:
        if dtype not in _DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(_DTYPES)}, got {dtype!r}")
        self.dtype = np.dtype(_DTYPES[dtype])
        self._random = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.tensors: dict[str, np.ndarray] = {}

    def node(self, kind: str, ins: Sequence[str], name: str, outs: Sequence[str] = (), **attrs: Any) -> str:
        """Add one node named `name`; its result has the same name unless `outs` is set."""
        from onnx import helper

        self.nodes.append(helper.make_node(kind, list(ins), list(outs) or [name], name=name, **attrs))
        return name

    def normal(self, name: str, shape: Sequence[int], scale: float) -> str:
        """Add a tensor of normal random numbers."""
        drawn = self._random.standard_normal(tuple(shape), dtype=np.float32)
        self.tensors[name] = (drawn * np.float32(scale)).astype(self.dtype, copy=False)
        return name

    def full(self, name: str, shape: Sequence[int], value: float) -> str:
        """Add a tensor of one value."""
        self.tensors[name] = np.full(tuple(shape), value, self.dtype)
        return name

    def scalar(self, name: str, value: float) -> str:
        return self.full(name, (), value)

    def integers(self, name: str, values: Sequence[int]) -> str:
        self.tensors[name] = np.array(values, np.int64)
        return name

    def linear(self, x: str, name: str, rows: int, columns: int, scale: float) -> str:
        """Add the nodes of x @ weight + bias."""
        product = self.node("MatMul", (x, self.normal(f"{name}.weight", (rows, columns), scale)), f"{name}.product")
        return self.node("Add", (product, self.full(f"{name}.bias", (columns,), 0.0)), name)

    def norm(self, x: str, name: str, width: int) -> str:
        """Add a layer norm."""
        parts = (x, self.full(f"{name}.weight", (width,), 1.0), self.full(f"{name}.bias", (width,), 0.0))
        return self.node("LayerNormalization", parts, name, axis=-1, epsilon=1e-5)

    def scaled(self, name: str, x: str, weight: float, spread: float = 0.1) -> str:
        """Add a batch norm with stored statistics.

        Parameters and statistics vary by `spread` from channel to channel, scales about `weight`.
        """
        channels = self.tensors[f"{x}.weight"].shape[0]
        parts = [self.normal(f"{name}.{part}", (channels,), spread) for part in _NORM]
        for part, middle in zip(parts, (weight, 0.0, 0.0, 1.0), strict=True):
            self.tensors[part] = (self.tensors[part] * (weight if part == parts[0] else 1.0) + middle).astype(
                self.dtype
            )
        # A drawn variance has to stay above zero.
        self.tensors[parts[3]] = np.abs(self.tensors[parts[3]]) + self.dtype.type(spread)
        return self.node("BatchNormalization", (x, *parts), name, epsilon=1e-5)

    def write(
        self, path: str | Path, name: str, x: tuple[str, np.dtype, Sequence[Batch]], y: tuple[str, Sequence[Batch]]
    ) -> Path:
        """Write the model to a file, with inputs `x` and outputs `y`."""
        import onnx
        from onnx import helper, numpy_helper

        def element(dtype: np.dtype) -> int:
            return helper.np_dtype_to_tensor_dtype(np.dtype(dtype))

        graph = helper.make_graph(
            self.nodes,
            name,
            [helper.make_tensor_value_info(x[0], element(x[1]), list(x[2]))],
            [helper.make_tensor_value_info(y[0], element(self.dtype), list(y[1]))],
            [numpy_helper.from_array(array, key) for key, array in self.tensors.items()],
        )
        model = helper.make_model(
            graph, producer_name="penstock", opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10
        )
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        if sum(array.nbytes for array in self.tensors.values()) > _EXTERNAL_FROM:
            data = target.with_name(target.name + ".data")
            data.unlink(missing_ok=True)  # onnx appends to a file that is there
            onnx.save_model(model, str(target), save_as_external_data=True, location=data.name, size_threshold=1024)
        else:
            onnx.save_model(model, str(target))
        return target


def write_mlp(
    path: str | Path, sizes: Sequence[int], batch: int | None = None, *, seed: int = 0, dtype: str = "f32"
) -> Path:
    """Write linear layers of the given sizes with relu between them.

    Input `x` [batch, sizes[0]], output `y` [batch, sizes[-1]].
    """
    if len(sizes) < 2:
        raise ValueError(f"an MLP needs at least two sizes, got {list(sizes)}")
    sheet = _Sheet(dtype, seed)
    x = "x"
    for i, (rows, columns) in enumerate(pairwise(sizes)):
        last = i == len(sizes) - 2
        x = sheet.linear(x, "y" if last else f"fc{i + 1}", rows, columns, sqrt(2.0 / rows))
        x = x if last else sheet.node("Relu", (x,), f"relu{i + 1}")
    open_batch: Batch = "batch" if batch is None else batch
    return sheet.write(path, "mlp", ("x", sheet.dtype, (open_batch, sizes[0])), ("y", (open_batch, sizes[-1])))


def write_gpt(
    path: str | Path,
    *,
    layers: int,
    width: int,
    heads: int,
    vocab: int,
    positions: int,
    batch: int | None = None,
    seed: int = 0,
    dtype: str = "f32",
) -> Path:
    """Write a GPT-2-shaped decoder: learned positions, blocks with the norm in front, tanh gelu, an untied head.

    Input `tokens` i64 [batch, positions], output `logits` [batch, positions, vocab]. Weights are normal with deviation
    0.02, those of the two projections into the residual stream divided by sqrt(2 * layers), as in GPT-2; biases are
    zero.
    """
    if width % heads:
        raise ValueError(f"width {width} does not divide into {heads} heads")
    sheet = _Sheet(dtype, seed)
    size, residual = width // heads, 0.02 / sqrt(2 * layers)
    sheet.integers("heads.shape", (0, positions, heads, size))
    sheet.integers("merged.shape", (0, positions, width))
    sheet.scalar("scale", 1.0 / sqrt(size))
    sheet.scalar("hidden", float("-inf"))
    sheet.tensors["causal"] = np.tril(np.ones((1, 1, positions, positions), np.bool_))

    sheet.node("Gather", (sheet.normal("wte.weight", (vocab, width), 0.02), "tokens"), "wte", axis=0)
    x = sheet.node("Add", ("wte", sheet.normal("wpe.weight", (positions, width), 0.02)), "embedding")
    for i in range(layers):
        x = _gpt_block(sheet, x, f"h.{i}", width, residual)
    x = sheet.norm(x, "ln_f", width)
    sheet.node("MatMul", (x, sheet.normal("lm_head.weight", (width, vocab), 0.02)), "logits")
    open_batch: Batch = "batch" if batch is None else batch
    tokens = ("tokens", np.dtype(np.int64), (open_batch, positions))
    return sheet.write(path, "gpt", tokens, ("logits", (open_batch, positions, vocab)))


def _gpt_block(sheet: _Sheet, x: str, at: str, width: int, residual: float) -> str:
    """Add one block of the decoder, named `at`; the shapes of its heads are in the sheet."""
    normed = sheet.norm(x, f"{at}.ln_1", width)
    joined = sheet.linear(normed, f"{at}.attn.qkv", width, 3 * width, 0.02)
    parts = [f"{at}.attn.{part}" for part in "qkv"]
    sheet.node("Split", (joined,), f"{at}.attn.split", parts, axis=-1, num_outputs=3)
    split = [sheet.node("Reshape", (part, "heads.shape"), f"{part}.split") for part in parts]
    # Keys are turned for the product in the same step that brings the heads forward.
    q, k, v = (
        sheet.node("Transpose", (part,), f"{part[:-6]}.heads", perm=perm)
        for part, perm in zip(split, ((0, 2, 1, 3), (0, 2, 3, 1), (0, 2, 1, 3)), strict=True)
    )
    scores = sheet.node("Mul", (sheet.node("MatMul", (q, k), f"{at}.attn.product"), "scale"), f"{at}.attn.scaled")
    masked = sheet.node("Where", ("causal", scores, "hidden"), f"{at}.attn.masked")
    weights = sheet.node("Softmax", (masked,), f"{at}.attn.softmax", axis=-1)
    mixed = sheet.node(
        "Transpose", (sheet.node("MatMul", (weights, v), f"{at}.attn.mix"),), f"{at}.attn.turned", perm=(0, 2, 1, 3)
    )
    merged = sheet.node("Reshape", (mixed, "merged.shape"), f"{at}.attn.merged")
    x = sheet.node("Add", (x, sheet.linear(merged, f"{at}.attn.proj", width, width, residual)), f"{at}.attn.residual")
    normed = sheet.norm(x, f"{at}.ln_2", width)
    wide = sheet.node(
        "Gelu",
        (sheet.linear(normed, f"{at}.mlp.fc", width, 4 * width, 0.02),),
        f"{at}.mlp.gelu",
        approximate="tanh",
    )
    return sheet.node(
        "Add", (x, sheet.linear(wide, f"{at}.mlp.proj", 4 * width, width, residual)), f"{at}.mlp.residual"
    )


def write_cnn(
    path: str | Path,
    batch: int | None = None,
    *,
    channels: Sequence[int] = (1, 8, 16),
    size: int = 28,
    classes: int = 10,
    seed: int = 0,
    dtype: str = "f32",
) -> Path:
    """Write convolutions of 3x3 with batch norm, relu and pooling by 2, then a linear layer.

    Input `x` [batch, channels[0], size, size], output `y` [batch, classes].
    """
    sheet = _Sheet(dtype, seed)
    x, side = "x", size
    for i, (before, after) in enumerate(pairwise(channels)):
        at = f"block{i + 1}"
        weight = sheet.normal(f"{at}.conv.weight", (after, before, 3, 3), sqrt(2.0 / (9 * before)))
        x = sheet.node(
            "Conv", (x, weight, sheet.full(f"{at}.conv.bias", (after,), 0.0)), f"{at}.conv", pads=[1, 1, 1, 1]
        )
        parts = [sheet.full(f"{at}.norm.{part}", (after,), value) for part, value in _NORM.items()]
        x = sheet.node("BatchNormalization", (x, *parts), f"{at}.norm", epsilon=1e-5)
        x = sheet.node("Relu", (x,), f"{at}.relu")
        x = sheet.node("MaxPool", (x,), f"{at}.pool", kernel_shape=[2, 2], strides=[2, 2])
        side //= 2
    if side < 1:
        raise ValueError(f"size {size} is too small for {len(channels) - 1} poolings by 2")
    x = sheet.node("Flatten", (x,), "flat", axis=1)
    rows = channels[-1] * side * side
    sheet.linear(x, "y", rows, classes, sqrt(1.0 / rows))
    open_batch: Batch = "batch" if batch is None else batch
    return sheet.write(
        path, "cnn", ("x", sheet.dtype, (open_batch, channels[0], size, size)), ("y", (open_batch, classes))
    )


def write_resnet(
    path: str | Path,
    batch: int | None = None,
    *,
    blocks: Sequence[int] = (3, 4, 6, 3),
    width: int = 64,
    size: int = 224,
    classes: int = 1000,
    seed: int = 0,
    dtype: str = "f32",
) -> Path:
    """Write a residual network of bottleneck blocks, by default ResNet-50.

    It has a 7x7 convolution with stride 2 and 3x3 max pooling, stages of `blocks` blocks, the mean over space, and a
    linear layer. The stride of a stage is in the 3x3 convolution of its first block.

    Input `x` [batch, 3, size, size], output `y` [batch, classes]. Convolutions have He weights and no bias. Batch norms
    have stored statistics that vary over channels. Those in front of a sum have scales about 0.3, so that sums of many
    blocks stay small.
    """
    sheet = _Sheet(dtype, seed)

    def conv(x: str, name: str, before: int, after: int, kernel: int, stride: int = 1) -> str:
        weight = sheet.normal(f"{name}.weight", (after, before, kernel, kernel), sqrt(2.0 / (kernel * kernel * before)))
        pads, shape = [kernel // 2] * 4, [kernel, kernel]
        return sheet.node("Conv", (x, weight), name, kernel_shape=shape, pads=pads, strides=[stride, stride])

    x = sheet.scaled("stem.norm", conv("x", "stem.conv", 3, width, 7, 2), 1.0)
    x = sheet.node(
        "MaxPool",
        (sheet.node("Relu", (x,), "stem.relu"),),
        "stem.pool",
        kernel_shape=[3, 3],
        strides=[2, 2],
        pads=[1] * 4,
    )
    before = width
    for i, count in enumerate(blocks):
        inner = width * 2**i
        for j in range(count):
            at, stride = f"stage{i + 1}.{j}", 2 if i and not j else 1
            y = x
            sizes = ((before, inner, 1, 1), (inner, inner, 3, stride), (inner, 4 * inner, 1, 1))
            for k, part in enumerate(sizes):
                y = sheet.scaled(f"{at}.norm{k + 1}", conv(y, f"{at}.conv{k + 1}", *part), 1.0 if k < 2 else 0.3)
                y = sheet.node("Relu", (y,), f"{at}.relu{k + 1}") if k < 2 else y
            if j == 0:
                x = sheet.scaled(f"{at}.short.norm", conv(x, f"{at}.short.conv", before, 4 * inner, 1, stride), 1.0)
            x = sheet.node("Relu", (sheet.node("Add", (y, x), f"{at}.sum"),), f"{at}.out")
            before = 4 * inner
    x = sheet.node("Flatten", (sheet.node("GlobalAveragePool", (x,), "pool"),), "flat", axis=1)
    sheet.linear(x, "y", before, classes, sqrt(1.0 / before))
    open_batch: Batch = "batch" if batch is None else batch
    return sheet.write(path, "resnet", ("x", sheet.dtype, (open_batch, 3, size, size)), ("y", (open_batch, classes)))


def write_bert(
    path: str | Path,
    batch: int | None = None,
    *,
    layers: int = 12,
    width: int = 768,
    heads: int = 12,
    vocab: int = 30522,
    positions: int = 128,
    classes: int = 2,
    seed: int = 0,
    dtype: str = "f32",
) -> Path:
    """Write a BERT-shaped encoder, by default BERT-base.

    It has learned positions, blocks with the norm behind, erf gelu, attention in both directions, and a classification
    head: tanh of a linear layer on the first position, then a linear layer. Sequences are full, there is no mask.

    Input `tokens` i64 [batch, positions], output `y` [batch, classes]. Weights are normal with deviation 0.02, biases
    zero.
    """
    if width % heads:
        raise ValueError(f"width {width} does not divide into {heads} heads")
    sheet = _Sheet(dtype, seed)
    size = width // heads
    sheet.integers("heads.shape", (0, positions, heads, size))
    sheet.integers("merged.shape", (0, positions, width))
    sheet.tensors["first"] = np.zeros((), np.int64)
    sheet.scalar("scale", 1.0 / sqrt(size))
    sheet.node("Gather", (sheet.normal("word.weight", (vocab, width), 0.02), "tokens"), "word", axis=0)
    x = sheet.node("Add", ("word", sheet.normal("position.weight", (positions, width), 0.02)), "placed")
    x = sheet.norm(
        sheet.node("Add", (x, sheet.normal("segment.weight", (1, width), 0.02)), "embedding"), "embedding.norm", width
    )
    for i in range(layers):
        x = _bert_block(sheet, x, f"layer.{i}", width)
    first = sheet.node("Gather", (x, "first"), "first.position", axis=1)
    pooled = sheet.node("Tanh", (sheet.linear(first, "pooler", width, width, 0.02),), "pooler.tanh")
    sheet.linear(pooled, "y", width, classes, 0.02)
    open_batch: Batch = "batch" if batch is None else batch
    tokens = ("tokens", np.dtype(np.int64), (open_batch, positions))
    return sheet.write(path, "bert", tokens, ("y", (open_batch, classes)))


def _bert_block(sheet: _Sheet, x: str, at: str, width: int) -> str:
    """Add one block of the encoder, named `at`; the shapes of its heads are in the sheet."""
    turned = []
    # Keys are turned for the product in the same step that brings the heads forward.
    for part, perm in (("query", (0, 2, 1, 3)), ("key", (0, 2, 3, 1)), ("value", (0, 2, 1, 3))):
        y = sheet.linear(x, f"{at}.{part}", width, width, 0.02)
        y = sheet.node("Reshape", (y, "heads.shape"), f"{at}.{part}.split")
        turned.append(sheet.node("Transpose", (y,), f"{at}.{part}.heads", perm=perm))
    q, k, v = turned
    scores = sheet.node("Mul", (sheet.node("MatMul", (q, k), f"{at}.product"), "scale"), f"{at}.scores")
    weights = sheet.node("Softmax", (scores,), f"{at}.softmax", axis=-1)
    mixed = sheet.node(
        "Transpose", (sheet.node("MatMul", (weights, v), f"{at}.mix"),), f"{at}.turned", perm=(0, 2, 1, 3)
    )
    merged = sheet.node("Reshape", (mixed, "merged.shape"), f"{at}.merged")
    y = sheet.linear(merged, f"{at}.output", width, width, 0.02)
    x = sheet.norm(sheet.node("Add", (x, y), f"{at}.sum1"), f"{at}.norm1", width)
    wide = sheet.node("Gelu", (sheet.linear(x, f"{at}.up", width, 4 * width, 0.02),), f"{at}.gelu")
    y = sheet.linear(wide, f"{at}.down", 4 * width, width, 0.02)
    return sheet.norm(sheet.node("Add", (x, y), f"{at}.sum2"), f"{at}.norm2", width)


_NORM = {"weight": 1.0, "bias": 0.0, "mean": 0.0, "var": 1.0}
