"""The data of a reproducer: one safetensors file of weights, `@variable`, and of inputs, `%input`.

Inputs have an axis of batches in front.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from penstock.backends.bundle.tensor_file import map_tensors, write_tensors
from penstock.ir.interpreter.ops import Array
from penstock.support.errors import UsageError


def write_data(path: Path, weights: Mapping[str, Array], batches: Sequence[Mapping[str, Array]]) -> None:
    """Write weights, and the inputs of all batches one after the other."""
    arrays = {f"@{name}": np.asarray(array) for name, array in weights.items()}
    for name in batches[0]:
        arrays[f"%{name}"] = np.stack([np.asarray(batch[name]) for batch in batches])
    write_tensors(path, arrays)


def read_data(path: str) -> tuple[dict[str, Array], list[dict[str, Array]]]:
    """Read weights, and batches."""
    if not Path(path).is_file():
        raise UsageError(f"cannot read {path}", hint="expected a safetensors file as a reproducer has it")
    arrays = map_tensors(Path(path))
    strange = [name for name in arrays if name[:1] not in ("@", "%")]
    if strange:
        raise UsageError(
            f"{strange[0]!r} is neither @variable nor %input", where=path, hint="expected a file as a reproducer has it"
        )
    inputs = {name[1:]: array for name, array in arrays.items() if name[0] == "%"}
    if single := [name for name, array in inputs.items() if not array.ndim]:
        raise UsageError(
            f"%{', %'.join(single)} without an axis of batches", where=path, hint="expected one batch after the other"
        )
    counts = {len(array) for array in inputs.values()}
    if len(counts) > 1:
        raise UsageError("inputs have different numbers of batches", where=path)
    if counts == {0}:
        raise UsageError("inputs have no batch", where=path)
    count = counts.pop() if counts else 0
    batches = [{name: array[t] for name, array in inputs.items()} for t in range(count)]
    return {name[1:]: array for name, array in arrays.items() if name[0] == "@"}, batches
