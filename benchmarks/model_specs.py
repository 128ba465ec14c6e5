"""The rows of models.py: models, their sizes, and what they are fed.

In: the name of a row. Out: its `Spec`, the ONNX file of its model, and one batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import penstock as ps
from penstock import models as files

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Spec:
    """A row: a model, its sizes, and its use. `unit` is what is counted, `units` the number of them in a sample."""

    kind: str
    sizes: Mapping[str, Any]
    batch: int
    unit: str
    units: int
    optimizer: ps.AdamW | ps.Momentum | None = None
    size: int = 0
    precision: str = "f32"

    @property
    def is_low(self) -> bool:
        return self.precision != "f32"


SGD = ps.Momentum(lr=1e-3, beta=0.9, weight_decay=1e-4)
ADAMW = ps.AdamW(lr=1e-5, weight_decay=0.01)
_RESNET = {"blocks": (3, 4, 6, 3), "width": 64, "classes": 1000}
_BERT = {"layers": 12, "width": 768, "heads": 12, "vocab": 30522, "positions": 128, "classes": 2}
_GPT = {"layers": 12, "width": 768, "heads": 12, "vocab": 50257, "positions": 128}
SPECS = {
    "resnet50-train": Spec("resnet", _RESNET, 8, "images", 1, SGD, 224),
    "bert-base-train": Spec("bert", _BERT, 8, "tokens", 128, ADAMW),
    "gpt2-small-infer": Spec("gpt", _GPT, 1, "tokens", 128),
    "bert-base-infer": Spec("bert", _BERT, 1, "tokens", 128),
    "resnet50-infer": Spec("resnet", _RESNET, 1, "images", 1, None, 224),
    "cnn-infer": Spec("cnn", {"channels": (3, 64, 128, 256, 512, 512), "size": 224, "classes": 1000}, 1, "images", 1),
    "mlp-infer": Spec("mlp", {"sizes": (1024, 4096, 4096, 4096, 1000)}, 32, "samples", 1),
}
_SMALL = {
    "resnet": {"blocks": (1, 1), "width": 8, "classes": 10},
    "bert": {"layers": 2, "width": 32, "heads": 2, "vocab": 50, "positions": 16, "classes": 2},
    "gpt": {"layers": 2, "width": 32, "heads": 2, "vocab": 50, "positions": 16},
    "cnn": {"channels": (3, 8, 16), "size": 16, "classes": 10},
    "mlp": {"sizes": (16, 32, 32, 10)},
}


def small(spec: Spec) -> Spec:
    """Shrink a row to a size that takes seconds. Few parameters need larger steps before their losses fall."""
    faster = {ps.Momentum: ps.Momentum(lr=1e-2), ps.AdamW: ps.AdamW(lr=1e-3)}
    units = 16 if spec.unit == "tokens" else 1
    optimizer = faster[type(spec.optimizer)] if spec.optimizer else None
    return Spec(spec.kind, _SMALL[spec.kind], min(spec.batch, 2), spec.unit, units, optimizer, 32 if spec.size else 0)


def write_model(spec: Spec, path: Path, seed: int = 0) -> Path:
    sizes: dict[str, Any] = dict(spec.sizes) | ({"size": spec.size} if spec.size else {})
    writer: Callable[..., Path] = getattr(files, f"write_{spec.kind}")
    return writer(path, batch=spec.batch, seed=seed, **sizes)


def feeds_of(spec: Spec) -> Arrays:
    """Make one batch: the model's input, and labels for training."""
    random = np.random.default_rng(1)
    if spec.kind == "resnet":
        feeds = {"x": random.standard_normal((spec.batch, 3, spec.size, spec.size), np.float32)}
    elif spec.kind == "cnn":
        feeds = {
            "x": random.standard_normal((spec.batch, spec.sizes["channels"][0], *[spec.sizes["size"]] * 2), np.float32)
        }
    elif spec.kind == "mlp":
        feeds = {"x": random.standard_normal((spec.batch, spec.sizes["sizes"][0]), np.float32)}
    else:
        feeds = {"tokens": random.integers(0, spec.sizes["vocab"], (spec.batch, spec.sizes["positions"]))}
    if spec.optimizer is not None:
        feeds["labels"] = random.integers(0, spec.sizes["classes"], spec.batch)
    return feeds
