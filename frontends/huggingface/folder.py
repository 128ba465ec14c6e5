"""A Hugging Face folder: its settings, and the table of its tensors.

    config.json                     the architecture
    generation_config.json          ends of a text, and how tokens are drawn, where the model says so
    model.safetensors               the weights, or
    model.safetensors.index.json    the files that hold them
    tokenizer.json, ...             what travels with the bundle (frontends/side_files.py)

Weights in pickle files are not read. Nothing of the folder is run: code that it brings (`auto_map`) is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.frontends.side_files import CONFIG, GENERATION, plain_file, read_settings, texts_beside
from penstock.support.errors import UnsupportedModel, UsageError
from penstock.support.words import itemised

from .families import check_family
from .safetensors_file import StoredTensor, read_table

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.00.pth")


@dataclass(frozen=True)
class ModelFolder:
    """A folder as read. `tensors` are by their names in the files, `texts` the files that travel with the bundle."""

    path: Path
    config: Mapping[str, Any]
    generation: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    texts: Mapping[str, bytes]

    @property
    def family(self) -> str:
        return family_of(self.config)

    def digest(self) -> str:
        """Hash the settings, and the files with weights."""
        total = hashlib.sha256(json.dumps([self.config, self.generation], sort_keys=True).encode())
        for path in sorted({tensor.path for tensor in self.tensors.values()}):
            with path.open("rb") as file:
                total.update(hashlib.file_digest(file, "sha256").digest())
        return total.hexdigest()


def family_of(config: Mapping[str, Any]) -> str:
    """Return the family that a config.json names, "" where it names none."""
    return str(config.get("model_type", ""))


def open_folder(path: str | Path) -> ModelFolder:
    """Read the settings and tables of a folder. Raise UsageError where it is none, or where a file is damaged. A family
    that cannot be imported is refused first, whether or not its weights are there."""
    root = Path(path)
    if not str(path):
        raise UsageError("names no folder", where="hf:", hint="hf:FOLDER is a folder with a config.json")
    if not root.is_dir():
        raise UsageError("is no folder", where=str(path), hint="hf:FOLDER is a folder with a config.json")
    config = read_settings(root, CONFIG)
    if config is None:
        raise UsageError(f"has no {CONFIG}", where=str(path), hint="is it the folder of a model of Hugging Face?")
    if "auto_map" in config:
        raise UnsupportedModel(
            "the model brings code of its own (auto_map), which is not run",
            where=str(path),
            hint="an architecture that transformers itself has is needed",
        )
    check_family(family_of(config), str(path))
    return ModelFolder(root, config, read_settings(root, GENERATION) or {}, _tensors(root), texts_beside(root))


def _tensors(root: Path) -> dict[str, StoredTensor]:
    index = read_settings(root, INDEX)
    if index is None:
        path = plain_file(root, WEIGHTS)
        if path is None:
            raise _without_weights(root)
        return read_table(path)
    placed = index.get("weight_map")
    if not isinstance(placed, dict) or not all(isinstance(name, str) for name in placed.values()):
        raise UsageError("expected `weight_map` with a file for each tensor", where=str(root / INDEX))
    tables: dict[str, dict[str, StoredTensor]] = {}
    problems = []
    for name in dict.fromkeys(placed.values()):
        path = plain_file(root, name)
        if path is None:
            problems.append(f"{name}: missing")
            continue
        tables[name] = read_table(path)
    problems += [
        f"{tensor}: not in {name}" for tensor, name in placed.items() if name in tables and tensor not in tables[name]
    ]
    if problems:
        raise UsageError(f"does not hold what {INDEX} lists:" + itemised(problems), where=str(root))
    return {tensor: tables[name][tensor] for tensor, name in placed.items()}


def _without_weights(root: Path) -> UsageError:
    pickles = [name for name in _PICKLES if (root / name).exists()]
    if pickles:
        return UsageError(
            f"has its weights in {pickles[0]}, a pickle file, which is not read",
            where=str(root),
            hint="load it with transformers once, and save it with save_pretrained",
        )
    return UsageError(f"has neither {WEIGHTS} nor {INDEX}", where=str(root), hint="the weights are missing")
