"""Export families of export_list.py to ONNX, with random weights and inputs of their own kind.

    python write_exports.py FOLDER SEED [FAMILY ...]

In: torch, onnxscript, timm, torchvision and transformers; no Penstock. Out: FOLDER/FAMILY-SEED.onnx and .npz. It prints
a line of JSON per family: its name, and why it could not be exported, if so.

Every fourth family is exported through torch.export, the others by the tracing exporter; either where the other does not
take the model. Weights are what the library draws, but running statistics, which are drawn, too. At every second pair of seeds
weights are drawn as wide as their inputs ask for, so that each layer's result is of order one.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import warnings
from collections.abc import Callable
from functools import reduce
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from export_list import EXPORTS, VOCABULARY, Export
from torch import Tensor, nn


def _image(shape: tuple[int, ...]) -> Tensor:
    """Return smooth patches of colour, normalised as images are."""
    coarse = torch.rand(*shape[:2], *(max(1, n // 8) for n in shape[2:]))
    for axis in range(2, len(shape)):
        coarse = coarse.repeat_interleave(shape[axis] // coarse.shape[axis], axis)
    return (coarse + 0.05 * torch.rand(shape) - 0.45) / 0.23


def _tokens(shape: tuple[int, ...]) -> Tensor:
    """Return numbers of words, of which few are frequent."""
    return (2 + (VOCABULARY - 2) * torch.rand(shape) ** 3).long().clamp(max=VOCABULARY - 1)


def _mask(shape: tuple[int, ...]) -> Tensor:
    """Return ones as far as each sample reaches."""
    return (torch.arange(shape[1]) < torch.randint(shape[1] // 2, shape[1] + 1, (shape[0], 1))).long()


def _boxes(shape: tuple[int, ...]) -> Tensor:
    """Return left, top, right and lower edges."""
    corner = torch.randint(0, 60, (*shape[:-1], 2))
    return torch.cat([corner, corner + torch.randint(1, 60, corner.shape)], -1)


def _wave(shape: tuple[int, ...]) -> Tensor:
    """Return sines with some noise, along axis 1."""
    t = torch.arange(shape[1]).view(1, -1, *(1 for _ in shape[2:]))
    phase = torch.rand(shape[0], 1, *shape[2:])
    return torch.sin(t * (0.05 + 0.2 * phase) + math.tau * phase) + 0.05 * torch.randn(shape)


KINDS: dict[str, Callable[[tuple[int, ...]], Tensor]] = {
    "image": _image,
    "tokens": _tokens,
    "mask": _mask,
    "boxes": _boxes,
    "wave": _wave,
}


class Named(nn.Module):
    """A model whose inputs are given by name, and one of whose results is taken."""

    def __init__(self, model: nn.Module, export: Export) -> None:
        super().__init__()
        self.model, self._export = model, export

    def forward(self, *tensors: Tensor) -> Tensor:
        export = self._export
        if export.library == "transformers":
            result = self.model(**dict(zip(export.inputs, tensors, strict=True)), **export.fixed)
            return getattr(result, export.output)
        result = self.model(*tensors)
        return result[export.output] if export.output else result


def _resolved(library: Any, value: Any) -> Any:
    """Return what a path in a library names, or each path of a list; other values as they are."""
    if isinstance(value, list):
        return [_resolved(library, part) for part in value]
    if isinstance(value, str) and value.startswith("models."):
        return reduce(getattr, value.split("."), library)
    return value


def build(export: Export) -> nn.Module:
    """Return the model with random weights, at rest."""
    if export.library != "transformers":
        library = import_module(export.library)
        settings = {key: _resolved(library, value) for key, value in export.settings.items()}
        made = _resolved(library, export.model)
        # What is no path is a name in the registry of timm.
        model = library.create_model(made, pretrained=False, **settings) if made == export.model else made(**settings)
    else:
        import transformers

        config = getattr(transformers, export.config)(**export.settings)
        model = getattr(transformers, export.model)._from_config(config, attn_implementation="eager")
    return Named(model, export).eval()


def draw_statistics(model: nn.Module) -> None:
    """Draw running statistics, which would be 0 and 1."""
    for module in model.modules():
        if isinstance(getattr(module, "running_var", None), Tensor):
            nn.init.uniform_(module.running_var, 0.5, 1.5)
            nn.init.normal_(module.running_mean, std=0.2)


def widen(model: nn.Module) -> None:
    """Draw weights as wide as their inputs ask for, and scales that are not almost nothing."""
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and "embed" not in name:
            nn.init.normal_(parameter, std=max(1, parameter[0].numel()) ** -0.5)
        elif parameter.ndim == 1 and name.endswith("weight"):
            nn.init.uniform_(parameter, 0.8, 1.2)
        elif parameter.ndim == 1 and name.endswith("bias"):
            nn.init.normal_(parameter, std=0.1)


def write(family: str, seed: int, folder: Path) -> str:
    """Write one export; return why there is none, or nothing."""
    export = EXPORTS[family]
    torch.manual_seed(seed)
    model = build(export)
    draw_statistics(model)
    if seed // 2 % 2:
        widen(model)
    inputs = {name: KINDS[kind](shape) for name, (kind, shape) in export.inputs.items()}
    path = folder / f"{family}-{seed}.onnx"
    np.savez(path.with_suffix(".npz"), **{name: x.numpy() for name, x in inputs.items()})
    reasons = []
    through = list(EXPORTS).index(family) % 4 == 3
    for dynamo in (through, not through):
        more: dict[str, Any] = {"optimize": True, "verbose": False} if dynamo else {"opset_version": 17}
        try:
            torch.onnx.export(
                model, tuple(inputs.values()), str(path), input_names=list(inputs), dynamo=dynamo, external_data=False,
                **more,
            )  # fmt: skip
            return ""
        except Exception as error:  # told by the caller
            reasons.append(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}")
    return "; ".join(reasons)


def main() -> None:
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    folder, seed = Path(sys.argv[1]), int(sys.argv[2])
    with torch.no_grad():
        for family in sys.argv[3:] or EXPORTS:
            try:
                problem = write(family, seed, folder)
            except Exception as error:  # a setting that this version of the library does not take
                problem = f"{type(error).__name__}: {error}"
            print(json.dumps({"family": family, "problem": problem}), flush=True)


if __name__ == "__main__":
    main()
