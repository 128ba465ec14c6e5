"""The inputs of a comparison: synthetic ones, samples of files as `penstock run --data` reads them, or a reproducer's.

In: a module, how many batches of how many microbatches, and the text of `--data`. Out: a dictionary of arrays per
batch, by input. Files that have fewer samples begin again.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from penstock.backends.bundle.tensor_file import map_tensors
from penstock.ir.graph import Module
from penstock.runtime.data.batches import NONE
from penstock.runtime.data.samples import FileSamples, Samples, SyntheticSamples, data_spec
from penstock.runtime.messages.defaults import SYNTHETIC
from penstock.support.errors import UsageError
from penstock.verification.bisect.data import read_data

Batch = dict[str, np.ndarray]


def synthetic_batch(module: Module, microbatches: int, seed: int, batch: int = 0) -> Batch:
    """Return one global batch of seeded noise, as `penstock run --data synthetic` feeds it."""
    return _batch(module, SyntheticSamples(module, seed), microbatches, batch)


def batches_of(
    module: Module,
    count: int,
    microbatches: int,
    seed: int,
    data: str | None,
    renamed: Mapping[str, str] = NONE,
) -> list[Batch]:
    """Return so many global batches, drawn or read."""
    if data is None or data == SYNTHETIC:
        return [synthetic_batch(module, microbatches, seed, t) for t in range(count)]
    if _is_reproducer(data):
        batches = read_data(data)[1]
        if len(batches) < count:
            raise UsageError(f"has {len(batches)} batches, {count} are asked for", where=data)
        return batches[:count]
    names = [value.name for value in module.data_inputs]
    samples = FileSamples(module, data_spec(data, False, seed), names, renamed)
    return [_batch(module, samples, microbatches, t) for t in range(count)]


def _batch(module: Module, samples: Samples, microbatches: int, batch: int) -> Batch:
    parts = range(batch * microbatches, (batch + 1) * microbatches)
    pieces = {v.name: [np.asarray(samples.microbatch(mb, v.name)) for mb in parts] for v in module.data_inputs}
    # Every microbatch gets the whole scalar input.
    return {
        name: np.concatenate(arrays, module.batch.get(name) or 0) if arrays[0].ndim else arrays[0]
        for name, arrays in pieces.items()
    }


def _is_reproducer(data: str) -> bool:
    """Return whether a file has names as a reproducer has them, `@variable` and `%input`."""
    path = Path(data)
    if path.suffix != ".safetensors" or not path.is_file():
        return False
    names = list(map_tensors(path))
    return bool(names) and all(name[:1] in ("@", "%") for name in names)
