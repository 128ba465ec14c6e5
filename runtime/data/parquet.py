"""Columns of a Parquet file, with pyarrow (the extra `parquet`).

In: a path, and the types of inputs. Out: for each input in the file, a function that reads its column.

A row is a sample. A column holds numbers, or lists (of lists) of numbers, in all as many as a sample of the input has,
in order. Nothing may be missing. A column is read whole when it is asked for, and no other with it. Its values are the
input's element type then, without conversion.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from penstock.ir.batch_shares import SampleRows, per_sample
from penstock.ir.types import TensorType
from penstock.support.errors import UsageError
from penstock.support.words import itemised


def open_parquet(
    path: Path, types: Mapping[str, TensorType], table: Mapping[str, str], places: Mapping[str, SampleRows]
) -> dict[str, Callable[[], np.ndarray]]:
    """Open a file. `table` gives our names for those that a column may have, `places` says where samples lie."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        hint = "pip install 'penstock[parquet]', or write another format"
        raise UsageError(f"reading Parquet needs pyarrow: {error}", where=str(path), hint=hint) from error
    try:
        file = parquet.ParquetFile(path, memory_map=True)
        names = [name for name in file.schema_arrow.names if name in table]
    except (pyarrow.ArrowException, OSError, ValueError, MemoryError) as error:
        raise _unreadable(path, error) from error

    def read(name: str) -> np.ndarray:
        try:
            return _column(file, path, name, types[table[name]], places.get(table[name]))
        except (pyarrow.ArrowException, OSError, ValueError, MemoryError, TypeError) as error:
            raise _unreadable(path, error) from error

    return {name: partial(read, name) for name in names}


def _column(file: Any, path: Path, name: str, type: TensorType, place: SampleRows | None) -> np.ndarray:
    column = file.read(columns=[name]).column(name)
    rows, expected = len(column), 1 if place is None else per_sample(type, place)
    nulls, lengths = 0, 1
    problems = []
    while _is_list(column.type):
        nulls += column.null_count
        shortest, longest = _lengths(column)
        if shortest != longest:
            problems.append(f"{name}: lists have {shortest} to {longest} elements, expected as many in each")
        lengths, column = lengths * longest, _flat(column)
    nulls += column.null_count
    if nulls:
        problems.append(f"{name}: {nulls} values are missing")
    if not _is_number(column.type):
        problems.append(
            f"{name}: element type {column.type} has no counterpart here, expected numbers or lists of numbers"
        )
    elif lengths != expected and rows:
        problems.append(f"{name}: a row has {lengths} numbers, expected {expected}")
    if problems:
        raise UsageError("does not fit the model:" + itemised(problems), where=str(path))
    flat: np.ndarray = (
        column.combine_chunks().to_numpy(zero_copy_only=False) if rows else np.zeros(0, column.type.to_pandas_dtype())
    )
    return flat[0] if place is None else place.joined(flat, type.dims)


def _flat(column: Any) -> Any:
    import pyarrow

    return pyarrow.chunked_array([chunk.flatten() for chunk in column.chunks], type=column.type.value_type)


def _lengths(column: Any) -> tuple[int, int]:
    """Return the lengths of the shortest and of the longest list."""
    from pyarrow import compute

    extremes = compute.min_max(compute.list_value_length(column)).as_py()
    return extremes["min"] or 0, extremes["max"] or 0


def _is_list(type: Any) -> bool:
    from pyarrow import types

    return bool(types.is_list(type) or types.is_large_list(type) or types.is_fixed_size_list(type))


def _is_number(type: Any) -> bool:
    from pyarrow import types

    return bool(types.is_integer(type) or types.is_floating(type) or types.is_boolean(type))


def _unreadable(path: Path, error: BaseException) -> UsageError:
    return UsageError(f"cannot read the data: {' '.join(str(error).split())[:500]}", where=str(path))
