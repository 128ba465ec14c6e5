"""The table of a safetensors file: where each tensor lies, checked before any of them is used.

    8 bytes little-endian: length of the header
    header: JSON, name -> {dtype, shape, data_offsets}
    data

Elements are mapped when they are asked for, one tensor at a time, so that a model larger than memory can be read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from penstock.ir.types import DTYPES, ITEM_BYTES, numpy_dtype
from penstock.support.errors import UsageError

_DTYPES = {dtype.upper(): dtype for dtype in DTYPES}
# The format's own limit.
_LARGEST_HEADER = 100_000_000
# Elements that are converted at once.
_CHUNK = 1 << 22


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, for which it stands until its elements are needed.

    `as_dtype` is the element type that NumPy gets: elements of another one are converted then.
    """

    path: Path
    name: str
    stored: str
    shape: tuple[int, ...]
    offset: int
    as_dtype: str

    @property
    def dtype(self) -> np.dtype[Any]:
        return numpy_dtype(self.as_dtype)

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def mapped(self) -> np.ndarray:
        """Map the elements as they are stored, read-only."""
        dtype = numpy_dtype(self.stored)
        if not self.size:
            return np.zeros(self.shape, dtype)
        return np.memmap(self.path, dtype, "r", self.offset, self.shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Return the elements, in chunks where they are converted, so that memory holds the result alone."""
        wanted = self.dtype if dtype is None else np.dtype(dtype)
        source = self.mapped()
        if wanted == source.dtype and not copy:
            return source
        result = np.empty(self.shape, wanted)
        flat, there = result.reshape(-1), source.reshape(-1)
        for start in range(0, len(flat), _CHUNK):
            flat[start : start + _CHUNK] = there[start : start + _CHUNK]
        return result


def read_table(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a file by name. Raise UsageError where its header is not what the format says."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(_LARGEST_HEADER, size - 8):
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            header = json.loads(file.read(length))
        if not isinstance(header, Mapping):
            raise ValueError("the header is no object")
        begin = 8 + length
        entries = ((name, entry) for name, entry in header.items() if name != "__metadata__")
        tensors = {name: _entry(path, name, entry, begin, size) for name, entry in entries}
        _check_apart(tensors)
    except (ValueError, TypeError, KeyError, RecursionError, UnicodeDecodeError) as error:
        raise UsageError(
            f"not a readable safetensors file: {error}", where=str(path), hint="download or save it again"
        ) from error
    return tensors


def _entry(path: Path, name: str, entry: Any, begin: int, size: int) -> StoredTensor:
    stored = _DTYPES.get(entry["dtype"])
    if stored is None:
        raise ValueError(f"{name} has elements of type {entry['dtype']}, which are not supported")
    shape, (start, end) = tuple(entry["shape"]), entry["data_offsets"]
    if any(type(n) is not int or n < 0 for n in (*shape, start, end)) or begin + end > size:
        raise ValueError(f"{name} has the shape {list(shape)} and lies at {start} to {end} of {size - begin} bytes")
    if prod(shape) * ITEM_BYTES[stored] != end - start:
        raise ValueError(f"{name} has {end - start} bytes, expected {prod(shape) * ITEM_BYTES[stored]}")
    return StoredTensor(path, name, stored, shape, begin + start, stored)


def _check_apart(tensors: Mapping[str, StoredTensor]) -> None:
    """Raise ValueError where two tensors have bytes in common."""
    end, last = 0, ""
    for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
        if tensor.offset < end and tensor.size:
            raise ValueError(f"{tensor.name} and {last} lie in the same bytes")
        end, last = max(end, tensor.offset + tensor.size * ITEM_BYTES[tensor.stored]), tensor.name
