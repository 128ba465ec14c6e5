"""Small, randomly initialised models of many families, as their users build them: from a configuration, with no download.

Each entry makes a module whose forward takes tensors and returns one tensor, and one microbatch of inputs by name. Weights are what the
library's own initialisation gives under a fixed seed, except where that leaves an output of almost nothing (`enliven`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

BATCH = 2
LENGTH = 12
VOCAB = 96

Inputs = Mapping[str, Tensor]


@dataclass(frozen=True)
class Family:
    """`microbatches`: 1 where the first axis of an input does not count samples."""

    name: str
    make: Callable[[], tuple[nn.Module, dict[str, Tensor]]]
    microbatches: int = 2


class Outputs(nn.Module):
    """A model of a library, reduced to one of its outputs."""

    def __init__(self, model: nn.Module, names: tuple[str, ...], output: str, **fixed: Any) -> None:
        super().__init__()
        self.m, self.names, self.output, self.fixed = model, names, output, fixed

    def forward(self, *tensors: Tensor) -> Tensor:
        result: Tensor = getattr(self.m(**dict(zip(self.names, tensors, strict=True)), **self.fixed), self.output)
        return result


def enliven(model: nn.Module) -> nn.Module:
    """Weights as wide as their inputs ask for, and statistics that are not all the same: every layer's result is of order one. Statistics of actual
    images would not do: behind many random layers all images look alike, and dividing by their small differences would blow up roundings."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.normal_(module.weight, std=module.weight[0].numel() ** -0.5)
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.8, 1.2)
            nn.init.normal_(module.bias, std=0.2)
            nn.init.normal_(module.running_mean, std=0.1)  # type: ignore[arg-type]
            nn.init.uniform_(module.running_var, 0.8, 1.2)  # type: ignore[arg-type]
    return model


def tokens(length: int = LENGTH, vocab: int = VOCAB) -> Tensor:
    return torch.randint(2, vocab, (BATCH, length))


def image(size: int = 32) -> Tensor:
    return torch.randn(BATCH, 3, size, size)


FAMILIES: dict[str, Family] = {}


def family(name: str, microbatches: int = 2) -> Callable[[Callable[[], tuple[nn.Module, dict[str, Tensor]]]], None]:
    def keep(make: Callable[[], tuple[nn.Module, dict[str, Tensor]]]) -> None:
        FAMILIES[name] = Family(name, make, microbatches)

    return keep


def build(name: str, seed: int = 0) -> tuple[nn.Module, dict[str, Tensor]]:
    """The module of a family in evaluation mode, and one microbatch."""
    torch.manual_seed(seed)
    model, inputs = FAMILIES[name].make()
    return model.eval(), inputs


def text_model(
    model_class: str, config_class: str, output: str = "logits", fixed: Mapping[str, Any] | None = None, **config: Any
) -> Any:
    """A text model of transformers."""
    import transformers

    made = getattr(transformers, config_class)(vocab_size=VOCAB, **config)
    model = getattr(transformers, model_class)(made)
    return Outputs(model, ("input_ids",), output, **({"use_cache": False} if fixed is None else fixed)), {
        "input_ids": tokens()
    }


def vision_model(model_class: str, config_class: str, size: int = 32, output: str = "logits", **config: Any) -> Any:
    """An image model of transformers."""
    import transformers

    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**config))
    return Outputs(enliven(model), ("pixel_values",), output), {"pixel_values": image(size)}


SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}


def sizes() -> dict[str, Any]:
    return {
        name: SMALL[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    }
