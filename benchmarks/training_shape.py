"""The model, the data and the optimiser that the contenders of training.py train, the same for all of them.

In: sizes, from the command line. Out: the ONNX file, batches without end, and the operations of a step. The default
`gpt` is GPT-2 small, `bert` BERT-base with a classification head, `resnet` ResNet-50, whose batch norms use their
stored statistics.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

_TEXT = ("layers", "width", "heads", "vocab", "positions")
# The sizes of each model, and its differences from the defaults below.
MODELS: Mapping[str, tuple[str, ...]] = {
    "gpt": _TEXT,
    "bert": (*_TEXT, "classes"),
    "resnet": ("blocks", "width", "classes"),
}
USUAL: Mapping[str, Mapping[str, Any]] = {
    "gpt": {},
    "bert": {"vocab": 30522, "classes": 2, "lr": 1e-5},
    "resnet": {"width": 64, "lr": 1e-3, "weight_decay": 1e-4},
}
MOMENTUM = 0.9


@dataclass(frozen=True)
class Shape:
    model: str = "gpt"
    layers: int = 12
    width: int = 768
    heads: int = 12
    vocab: int = 50257
    positions: int = 128
    # Of a ResNet: bottlenecks of each stage, and rows and columns of an image.
    blocks: tuple[int, ...] = (3, 4, 6, 3)
    size: int = 224
    classes: int = 1000
    microbatches: int = 4
    microbatch_samples: int = 2
    lr: float = 3e-4
    weight_decay: float = 0.01
    seed: int = 0
    # bf16: Penstock with --precision bf16, torch with autocast.
    precision: str = "f32"

    @property
    def sizes(self) -> dict[str, Any]:
        """The arguments of the torch module."""
        return {name: getattr(self, name) for name in MODELS[self.model]}

    @property
    def has_images(self) -> bool:
        return self.model == "resnet"

    @property
    def optimizer(self) -> str:
        return "SGD with momentum" if self.has_images else "AdamW"

    @property
    def samples(self) -> int:
        return self.microbatches * self.microbatch_samples

    @property
    def unit(self) -> str:
        return "images" if self.has_images else "tokens"

    @property
    def units_per_step(self) -> int:
        return self.samples * (1 if self.has_images else self.positions)

    @property
    def products_per_step(self) -> float:
        """Floating-point operations of a GPT's matrix products with weights in a step.

        A multiplication and an addition are two. Forwards these are the four products of a block (3, 1, 4 and 4 times
        width x width) and the head; backwards twice as many, for operands and for weights.
        """
        multiply_adds = self.layers * 12 * self.width**2 + self.vocab * self.width
        return 3 * 2.0 * self.units_per_step * multiply_adds

    @property
    def attention_per_step(self) -> float:
        """Floating-point operations of a GPT's attention in a step.

        These are scores and weighted sums forwards, and twice as many backwards, of (positions + 1) / 2 positions that
        one sees on average. Scores that a contender recomputes backwards, or computes and hides, do not count.
        """
        return 3 * 2.0 * self.units_per_step * self.layers * (self.positions + 1) * self.width

    @property
    def flops_per_step(self) -> float:
        """The counted operations of a step: products, convolutions, attention.

        Norms, softmax, gelu, the loss, embeddings and the optimiser are left out: memory bounds them. For models other
        than a GPT torch counts, without computing anything.
        """
        return self.products_per_step + self.attention_per_step if self.model == "gpt" else _counted(self)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Shape:
        fields = json.loads(text)
        return Shape(**fields | {"blocks": tuple(fields["blocks"])})

    def told(self) -> str:
        """Write the sizes for people."""
        sizes = self.sizes | ({"size": self.size} if self.has_images else {})
        return ", ".join(
            f"{name} {'-'.join(map(str, value)) if isinstance(value, tuple) else value}"
            for name, value in sizes.items()
        )


def add_shape_arguments(parser: argparse.ArgumentParser) -> None:
    for name, spec in Shape.__dataclass_fields__.items():
        flag, usual = "--" + name.replace("_", "-"), spec.default
        if name == "blocks":
            parser.add_argument(
                flag, type=int, nargs="+", help="bottlenecks of each stage of a ResNet (default: 3 4 6 3)"
            )
            continue
        choices = {"model": tuple(MODELS), "precision": ("f32", "bf16")}.get(name)
        others = "".join(f", {model} {values[name]}" for model, values in USUAL.items() if name in values)
        parser.add_argument(flag, type=type(usual), choices=choices, help=f"default: {usual}{others}")


def shape_of(arguments: argparse.Namespace) -> Shape:
    """Return the model's usual sizes, except for those on the command line."""
    chosen = {name: value for name in Shape.__dataclass_fields__ if (value := getattr(arguments, name)) is not None}
    if "blocks" in chosen:
        chosen["blocks"] = tuple(chosen["blocks"])
    return Shape(**{**USUAL[chosen.get("model", "gpt")], **chosen})


def write_model(shape: Shape, path: Path) -> Path:
    """Write the ONNX file for a microbatch, unless it exists."""
    from penstock import models

    if not path.exists():
        sizes = shape.sizes | ({"size": shape.size} if shape.has_images else {})
        getattr(models, f"write_{shape.model}")(path, batch=shape.microbatch_samples, seed=shape.seed, **sizes)
    return path


def batches(shape: Shape) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield random inputs and labels without end. The label of a GPT's position is the token after it."""
    random = np.random.default_rng(shape.seed)
    while True:
        if shape.has_images:
            images = random.random((shape.samples, 3, shape.size, shape.size), np.float32) - np.float32(0.5)
            yield images, random.integers(0, shape.classes, shape.samples)
            continue
        tokens = random.integers(0, shape.vocab, (shape.samples, shape.positions + 1))
        labels = tokens[:, 1:] if shape.model == "gpt" else tokens[:, -1] % shape.classes
        yield np.ascontiguousarray(tokens[:, :-1]), np.ascontiguousarray(labels)


def _counted(shape: Shape) -> float:
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from torch_models import MODELS as MODULES

    with torch.device("meta"):
        model = MODULES[shape.model](**shape.sizes).train()
        if shape.has_images:
            x = torch.empty(shape.samples, 3, shape.size, shape.size)
        else:
            x = torch.empty(shape.samples, shape.positions, dtype=torch.int64)
        with FlopCounterMode(display=False) as counter:
            model(x).sum().backward()
    return float(counter.get_total_flops())
