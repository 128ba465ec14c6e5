"""Tensors in a safetensors file: named arrays in, one file and its SHA-256 out, in one pass and without a second copy
in memory.

    8 bytes little-endian: length of the header
    header: JSON, name -> {dtype, shape, data_offsets}, padded with blanks
    data

The data starts at a multiple of 64 bytes. The tensors follow each other in the order of their names, larger items
first, so that the same arrays give the same bytes. The file is flushed to the disk before the hash is returned.

`map_tensors` gives the arrays of a file without reading them. Workers leave reading to the safetensors package.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from penstock.ir.types import DTYPES, ITEM_BYTES, dtype_of, numpy_dtype
from penstock.support.errors import VerifyError

_NAMES = {dtype: dtype.upper() for dtype in DTYPES}
_ALIGNMENT = 64
_CHUNK = 1 << 24


def write_tensors(
    path: Path,
    tensors: Mapping[str, np.ndarray],
    metadata: Mapping[str, str] | None = None,
    progress: Callable[[int], None] | None = None,
) -> tuple[str, int]:
    """Write the file, and return its SHA-256 and size. Arrays that are not contiguous are copied one at a time.
    `progress` is called with the bytes of tensors that were written."""
    dtypes = {name: dtype_of(array.dtype) for name, array in tensors.items()}
    order = sorted(tensors, key=lambda name: (-ITEM_BYTES[dtypes[name]], name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name in order:
        array = tensors[name]
        header[name] = {
            "dtype": _NAMES[dtypes[name]],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    digest, size = hashlib.sha256(), 0
    with path.open("wb") as file:

        def put(data: bytes | memoryview) -> None:
            nonlocal size
            file.write(data)
            digest.update(data)
            size += len(data)

        put(len(text).to_bytes(8, "little") + text)
        for name in order:
            data = np.ascontiguousarray(tensors[name]).reshape(-1).view(np.uint8).data
            for start in range(0, len(data), _CHUNK):
                put(data[start : start + _CHUNK])
                if progress is not None:
                    progress(len(data[start : start + _CHUNK]))
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest(), size


def map_tensors(path: Path) -> dict[str, np.ndarray]:
    """Map the arrays of a file into memory, read-only, by name."""
    dtypes = {stored: numpy_dtype(dtype_name) for dtype_name, stored in _NAMES.items()}
    tensors: dict[str, np.ndarray] = {}
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            size = path.stat().st_size
            header: dict[str, Any] = json.loads(file.read(length if length <= size else 0))
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            dtype, shape, (start, end) = dtypes[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
            if any(type(n) is not int or n < 0 for n in (*shape, start, end)) or 8 + length + end > size:
                raise ValueError(f"{name} has the shape {list(shape)} and lies at {start} to {end}")
            if prod(shape) * dtype.itemsize != end - start:
                raise ValueError(f"{name} has {end - start} bytes")
            tensors[name] = (
                np.memmap(path, dtype, "r", 8 + length + start, shape) if end > start else np.zeros(shape, dtype)
            )
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise VerifyError(f"not a readable safetensors file: {error}", where=str(path)) from error
    return tensors
