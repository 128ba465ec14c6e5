"""Exports of timm, torchvision and transformers as ONNX, with random weights, for beside_onnxruntime.py.

    PYTHON benchmarks/export_models.py FOLDER                       every model of exports.toml
    PYTHON benchmarks/export_models.py FOLDER --only lcnet-050

It runs in any Python that has torch, timm, torchvision, transformers and onnxscript, and imports nothing of this
project: torchvision wants another torch than Penstock. Weights are seeded by the name of the model. Statistics of batch
norms are drawn, too, as those of a new model are 0 and 1. A file that exists is kept.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tomllib
import zlib
from pathlib import Path
from typing import Any

import torch

LIST = Path(__file__).with_name("exports.toml")
Row = dict[str, Any]


class KeywordGru(torch.nn.Module):
    """A detector of words in a second of sound: two convolutions, a GRU of two layers, a layer of classes."""

    def __init__(self, bands: int = 40, width: int = 64, classes: int = 12) -> None:
        super().__init__()
        self.first = torch.nn.Conv2d(1, 16, (5, 5), stride=(2, 2), padding=2)
        self.second = torch.nn.Conv2d(16, 16, 3, padding=1)
        self.recurrent = torch.nn.GRU(16 * (bands // 2), width, num_layers=2, batch_first=True)
        self.last = torch.nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.second(torch.relu(self.first(x))))
        states, _ = self.recurrent(x.permute(0, 2, 1, 3).flatten(2))
        return self.last(states[:, -1])


class First(torch.nn.Module):
    """A model whose only output is the first tensor that another one gives."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        result = self.inner(*tensors)
        while not isinstance(result, torch.Tensor):
            result = next(iter(result.values())) if hasattr(result, "values") else result[0]
        return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the files go: NAME.onnx")
    parser.add_argument("--only", nargs="*", metavar="NAME", help="models")
    parser.add_argument("--list", type=Path, default=LIST, metavar="FILE", help="the list (default: exports.toml)")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    rows = tomllib.loads(arguments.list.read_text(encoding="utf-8"))["model"]
    for row in rows:
        path = arguments.folder / f"{row['name']}.onnx"
        if (arguments.only is None or row["name"] in arguments.only) and not path.exists():
            export(row, path)
            print(f"{path}: {path.stat().st_size / 1e6:.1f} MB", file=sys.stderr)
    return 0


def export(row: Row, path: Path) -> None:
    """Write the model of a row as one file."""
    torch.manual_seed(zlib.crc32(row["name"].encode()))
    model = _settle(First(_make(row)))
    examples = tuple(_example(shape, row.get("below", 0)) for shape in row["inputs"].values())
    part = path.with_suffix(".part")
    torch.onnx.export(
        model,
        examples,
        str(part),
        input_names=list(row["inputs"]),
        external_data=False,
        verbose=False,
        dynamo=not row.get("traced", False),
    )
    part.rename(path)


def _make(row: Row) -> torch.nn.Module:
    library, name, given = row["library"], row["make"], dict(row.get("arguments", {}))
    if library == "torch":
        return {"keyword_gru": KeywordGru}[name](**given)
    module = importlib.import_module(library)
    if library == "timm":
        return module.create_model(name, pretrained=False, **given)
    if library == "torchvision":
        found: Any = module.models
        for part in name.split("."):
            found = getattr(found, part)
        return found(**{key: None if value == "none" else value for key, value in given.items()})
    name, _, part = name.partition(".")
    kind = getattr(module, name)
    model = kind(kind.config_class(**given, return_dict=True))
    return getattr(model, part) if part else model


def _settle(model: torch.nn.Module) -> torch.nn.Module:
    """Put a model into inference, with drawn statistics."""
    for each in model.modules():
        if isinstance(each, torch.nn.modules.batchnorm._BatchNorm) and each.running_mean is not None:
            torch.nn.init.normal_(each.running_mean, 0.0, 0.1)
            torch.nn.init.uniform_(each.running_var, 0.5, 1.5)
    return model.eval()


def _example(shape: list[int], below: int) -> torch.Tensor:
    return torch.randint(0, below, shape) if below else torch.randn(shape)


if __name__ == "__main__":
    sys.exit(main())
