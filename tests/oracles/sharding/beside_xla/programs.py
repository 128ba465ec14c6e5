"""Eight sharded programs, each written once against a list of operations, with the layouts that are given.

In: an `Operations`, which writes the program in IR (in_ir.py) or computes it with jax (in_jax.py). Out: the loss. Sizes
are those of real layers: programs are laid out and counted, not run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

Value = Any

BATCH, POSITIONS, WIDTH, HEADS, HIDDEN, VOCABULARY = 8, 128, 512, 8, 2048, 8192
EXPERTS, TOKENS, CAPACITY = 8, 256, 64


class Operations(Protocol):
    """What programs are written with. Values that have a given layout are named."""

    def feed(self, name: str, *shape: int, dtype: str = "f32") -> Value: ...

    def parameter(self, name: str, *shape: int) -> Value: ...

    def named(self, name: str, x: Value) -> Value: ...

    def matmul(self, x: Value, w: Value, tb: bool = False) -> Value: ...

    def add(self, x: Value, y: Value) -> Value: ...

    def sub(self, x: Value, y: Value) -> Value: ...

    def mul(self, x: Value, y: Value) -> Value: ...

    def gelu(self, x: Value) -> Value: ...

    def relu(self, x: Value) -> Value: ...

    def rsqrt(self, x: Value) -> Value: ...

    def mean(self, x: Value, axes: tuple[int, ...]) -> Value: ...

    def norm(self, x: Value, scale: Value, shift: Value) -> Value: ...

    def reshape(self, x: Value, *shape: int) -> Value: ...

    def transpose(self, x: Value, *perm: int) -> Value: ...

    def joint(self, x: Value, name: str, width: int) -> tuple[Value, Value, Value]: ...

    def attention(self, q: Value, k: Value, v: Value) -> Value: ...

    def look_up(self, table: Value, ids: Value) -> Value: ...

    def conv(self, x: Value, w: Value, stride: int, pad: int) -> Value: ...

    def mse(self, x: Value, y: Value) -> Value: ...

    def cross_entropy(self, x: Value, labels: Value) -> Value: ...


@dataclass(frozen=True)
class ShardedProgram:
    """A program, the mesh, and the given layouts by name."""

    write: Callable[[Operations], Value]
    mesh: Mapping[str, int]
    given: Mapping[str, str]


def _linear(o: Operations, x: Value, name: str, rows: int, columns: int) -> Value:
    return o.add(o.matmul(x, o.parameter(f"{name}.weight", rows, columns)), o.parameter(f"{name}.bias", columns))


def _norm(o: Operations, x: Value, name: str) -> Value:
    return o.norm(x, o.parameter(f"{name}.weight", WIDTH), o.parameter(f"{name}.bias", WIDTH))


def _perceptron(o: Operations, x: Value) -> Value:
    return _linear(o, o.gelu(_linear(o, x, "fc", WIDTH, HIDDEN)), "proj", HIDDEN, WIDTH)


def _heads(o: Operations, x: Value) -> Value:
    return o.transpose(o.reshape(x, BATCH, POSITIONS, HEADS, WIDTH // HEADS), 0, 2, 1, 3)


def _attention(o: Operations, q: Value, k: Value, v: Value) -> Value:
    mixed = o.attention(_heads(o, q), _heads(o, k), _heads(o, v))
    joined = o.reshape(o.transpose(mixed, 0, 2, 1, 3), BATCH, POSITIONS, WIDTH)
    return _linear(o, joined, "attn.proj", WIDTH, WIDTH)


def _mlp(o: Operations) -> Value:
    y = _perceptron(o, o.feed("x", BATCH, POSITIONS, WIDTH))
    return o.mse(y, o.feed("y", BATCH, POSITIONS, WIDTH))


def _block(o: Operations) -> Value:
    """Write a block of GPT with the products for q, k and v apart."""
    x = o.feed("x", BATCH, POSITIONS, WIDTH)
    n = _norm(o, x, "ln_1")
    q, k, v = (_linear(o, n, f"attn.{name}", WIDTH, WIDTH) for name in "qkv")
    h = o.named("residual", o.add(x, o.named("mixed", _attention(o, q, k, v))))
    y = o.named("result", o.add(h, o.named("computed", _perceptron(o, _norm(o, h, "ln_2")))))
    return o.mse(y, o.feed("y", BATCH, POSITIONS, WIDTH))


def _fused(o: Operations) -> Value:
    """Write attention whose q, k and v are one product."""
    x = o.feed("x", BATCH, POSITIONS, WIDTH)
    y = o.add(x, _attention(o, *o.joint(_norm(o, x, "ln_1"), "attn.qkv", WIDTH)))
    return o.mse(y, o.feed("y", BATCH, POSITIONS, WIDTH))


def _vocabulary(o: Operations) -> Value:
    """Write a look-up, a product, and a loss over classes."""
    table = o.parameter("wte.weight", VOCABULARY, WIDTH)
    e = o.look_up(table, o.feed("tokens", BATCH, POSITIONS, dtype="i64"))
    h = o.gelu(_linear(o, e, "body", WIDTH, WIDTH))
    logits = o.matmul(h, o.parameter("lm_head.weight", WIDTH, VOCABULARY))
    return o.cross_entropy(logits, o.feed("labels", BATCH, POSITIONS, dtype="i64"))


def _experts(o: Operations) -> Value:
    """Write a layer of experts: tokens of each group go to the experts that a mask says, and come back weighted."""
    groups = EXPERTS
    x = o.feed("x", groups, TOKENS, WIDTH)
    chosen = o.feed("chosen", groups, EXPERTS * CAPACITY, TOKENS)
    weighted = o.feed("weighted", groups, TOKENS, EXPERTS * CAPACITY)
    sent = o.reshape(o.matmul(chosen, x), groups, EXPERTS, CAPACITY, WIDTH)
    there = o.named("there", o.transpose(sent, 1, 0, 2, 3))
    rows = o.reshape(there, EXPERTS, groups * CAPACITY, WIDTH)
    hidden = o.gelu(o.matmul(rows, o.parameter("up", EXPERTS, WIDTH, HIDDEN)))
    result = o.matmul(hidden, o.parameter("down", EXPERTS, HIDDEN, WIDTH))
    back = o.named("back", o.transpose(o.reshape(result, EXPERTS, groups, CAPACITY, WIDTH), 1, 0, 2, 3))
    y = o.matmul(weighted, o.reshape(back, groups, EXPERTS * CAPACITY, WIDTH))
    return o.mse(y, o.feed("y", groups, TOKENS, WIDTH))


def _scaled(o: Operations, x: Value, name: str, channels: int) -> Value:
    """Write a batch norm by the statistics of the batch."""
    below = o.sub(x, o.mean(x, (0, 2, 3)))
    unit = o.mul(below, o.rsqrt(o.mean(o.mul(below, below), (0, 2, 3))))
    scale = o.reshape(o.parameter(f"{name}.weight", channels), 1, channels, 1, 1)
    return o.add(o.mul(unit, scale), o.reshape(o.parameter(f"{name}.bias", channels), 1, channels, 1, 1))


def _resnet(o: Operations) -> Value:
    """Write a stem, a block with a shortcut, one that halves the picture, and a classifier."""
    x = o.feed("x", 16, 3, 32, 32)
    h = o.relu(_scaled(o, o.conv(x, o.parameter("stem", 64, 3, 3, 3), 1, 1), "stem.bn", 64))
    for name, channels, before, stride in (("1", 64, 64, 1), ("2", 128, 64, 2)):
        a = o.relu(
            _scaled(o, o.conv(h, o.parameter(f"{name}.a", channels, before, 3, 3), stride, 1), f"{name}.bn_a", channels)
        )
        b = _scaled(o, o.conv(a, o.parameter(f"{name}.b", channels, channels, 3, 3), 1, 1), f"{name}.bn_b", channels)
        if stride > 1:
            h = o.conv(h, o.parameter(f"{name}.short", channels, before, 1, 1), stride, 0)
        h = o.relu(o.add(b, h))
    pooled = o.reshape(o.mean(h, (2, 3)), 16, 128)
    return o.cross_entropy(_linear(o, pooled, "fc", 128, 16), o.feed("labels", 16, dtype="i64"))


def _pictures(o: Operations) -> Value:
    """Write a network of convolutions whose pictures are split along their height."""
    h = o.feed("x", 4, 3, 256, 256)
    for i, (channels, before, stride) in enumerate(((32, 3, 1), (64, 32, 2), (64, 64, 1))):
        h = o.relu(o.conv(h, o.parameter(f"conv{i}", channels, before, 3, 3), stride, 1))
    return o.cross_entropy(
        _linear(o, o.reshape(o.mean(h, (2, 3)), 4, 64), "fc", 64, 16), o.feed("labels", 4, dtype="i64")
    )


_ROWS = {f"attn.{name}.weight": "[_,/tp]" for name in "qkv"}
_PAIR = {"attn.proj.weight": "[/tp,_]", "fc.weight": "[_,/tp]", "proj.weight": "[/tp,_]"}
_ALONG = dict.fromkeys(("mixed", "residual", "computed", "result"), "[_,/tp,_]")

PROGRAMS: dict[str, ShardedProgram] = {
    "two-layer MLP": ShardedProgram(_mlp, {"tp": 4}, {"fc.weight": "[_,/tp]", "proj.weight": "[/tp,_]"}),
    "block of GPT": ShardedProgram(_block, {"bp": 2, "tp": 2}, {"x": "[/bp,_,_]", **_ROWS, **_PAIR}),
    "fused q, k, v": ShardedProgram(_fused, {"tp": 4}, {"attn.qkv.weight": "[_,3*/tp]", "attn.proj.weight": "[/tp,_]"}),
    "vocabulary": ShardedProgram(_vocabulary, {"tp": 4}, {"wte.weight": "[/tp,_]", "lm_head.weight": "[_,/tp]"}),
    "sequence": ShardedProgram(_block, {"tp": 4}, {"x": "[_,/tp,_]", "y": "[_,/tp,_]", **_ROWS, **_PAIR, **_ALONG}),
    "experts": ShardedProgram(
        _experts,
        {"ep": 4},
        {
            "x": "[/ep,_,_]",
            "chosen": "[/ep,_,_]",
            "weighted": "[/ep,_,_]",
            "up": "[/ep,_,_]",
            "down": "[/ep,_,_]",
            "there": "[/ep,_,_,_]",
            "back": "[/ep,_,_,_]",
        },
    ),
    "pictures": ShardedProgram(_pictures, {"sp": 4}, {"x": "[_,_,/sp,_]"}),
    "ResNet": ShardedProgram(_resnet, {"bp": 4}, {"x": "[/bp,_,_,_]", "labels": "[/bp]"}),
}
