"""Batches that a program hands over.

In: a dict of arrays by input name, or arrays in the order of the model's inputs; NumPy's, torch's, or anything that
NumPy can read. Out: arrays by our names, checked against the model: all problems are one error.

A batch is a whole global batch, its microbatches one after the other. torch's DataLoader gives such batches with
`batch_size` samples per batch and `drop_last=True`. A tensor on a GPU is copied to the host. One that requires a
gradient is taken without it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from penstock.ir.batch_shares import SampleRows, microbatch_size, sample_rows
from penstock.ir.graph import Module, Value
from penstock.ir.names import by_our_names, shown
from penstock.ir.types import dtype_of, numpy_dtype
from penstock.runtime.messages.control import Arrays
from penstock.support.errors import UsageError
from penstock.support.words import itemised

from .ranges import Range, first_outside, integer_range

# `renamed` gives the model's names of inputs that are spelled otherwise here (ir/names.py): data may come under
# either.
NONE: Mapping[str, str] = {}


def take_batch(module: Module, batch: Any, where: str, renamed: Mapping[str, str] = NONE) -> Arrays:
    """Return a caller's batch as arrays by our names."""
    names = [value.name for value in module.data_inputs]
    if not isinstance(batch, Mapping):
        batch = _in_order(batch, names, where, renamed)
    arrays: Arrays = {}
    for name, given_value in by_our_names(batch, names, renamed, where).items():
        try:
            arrays[name] = _as_array(given_value)
        # NumPy's errors for ragged lists, and torch's for its tensors.
        except (TypeError, ValueError, RuntimeError) as error:
            raise UsageError(f"{name}: is no array: {error}", where=where) from error
    return arrays


def _in_order(batch: Any, names: Sequence[str], where: str, renamed: Mapping[str, str]) -> dict[str, Any]:
    parts = [batch] if _is_tensor(batch) and len(names) == 1 else batch
    if not isinstance(parts, list | tuple) or any(isinstance(part, Mapping) for part in parts):
        given_type = f"{type(batch).__name__} of dicts" if isinstance(parts, list | tuple) else type(batch).__name__
        raise UsageError(
            f"expected a dict of arrays by the names of inputs, or a tuple of arrays, got {given_type}", where=where
        )
    if len(parts) != len(names):
        listed = ", ".join(shown(names, renamed).values())
        raise UsageError(f"has {len(parts)} arrays, expected {len(names)}, in the order {listed}", where=where)
    return dict(zip(names, parts, strict=True))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, np.ndarray) or _is_torch(value)


def _is_torch(value: Any) -> bool:
    # A program that has a tensor of torch has imported torch.
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _as_array(value: Any) -> np.ndarray:
    if _is_torch(value):
        from penstock.runtime.state.tensors import as_array  # lazy: heavy

        return as_array(value)
    return np.asarray(value)


def check_batch(
    module: Module,
    batch: Mapping[str, np.ndarray],
    where: str = "batch",
    renamed: Mapping[str, str] = NONE,
    *,
    samples: int | None = None,
    ranges: Mapping[str, Range | None] | None = None,
) -> None:
    """Refuse a batch with wrong names, element types, shapes or values, naming all of them. It has `samples` samples,
    by default those of a whole batch. `ranges` are those of integer_range, for callers that ask often."""
    assert module.schedule is not None
    rows = microbatch_size(module)
    places = sample_rows(module)
    problems, short = name_problems(module, batch.keys(), renamed), False
    for value in module.data_inputs:
        if value.name not in batch:
            continue
        array, place = np.asarray(batch[value.name]), places.get(value.name)
        shape = value.type.dims
        if place is not None:
            shape = place.shape(shape, rows * module.schedule.microbatches if samples is None else samples)
        wrong = type_problems(value, array, shape)
        short = short or (place is not None and _is_shorter(array, shape, place.axis))
        bounds = integer_range(module, value.name) if ranges is None else ranges[value.name]
        if not wrong and (outside := first_outside(array, bounds, 0 if place is None else place.axis)) is not None:
            row, text = outside
            wrong.append(f"{value.name}: sample {row // (1 if place is None else place.rows)} has {text}")
        problems += wrong
    if problems:
        batch_rows = rows * module.schedule.microbatches
        hint = (
            f"a batch has {batch_rows} samples; a DataLoader gives no others with drop_last=True"
            if short and samples is None
            else ""
        )
        raise UsageError("does not fit the model:" + itemised(problems), where=where, hint=hint)


def _is_shorter(array: np.ndarray, shape: tuple[int, ...], axis: int) -> bool:
    """Return whether an array has the shape, but for fewer rows along the axis."""
    return (
        array.ndim == len(shape)
        and array.shape == (*shape[:axis], array.shape[axis], *shape[axis + 1 :])
        and (array.shape[axis] < shape[axis])
    )


class BatchCuts:
    """The parts of a batch's arrays that belong to its microbatches."""

    def __init__(self, module: Module) -> None:
        self._places, self._samples = sample_rows(module), microbatch_size(module)

    def part(self, name: str, array: np.ndarray, index: int) -> np.ndarray:
        """Return what belongs to microbatch `index` of an input."""
        place = self._places.get(name)
        return array if place is None else place.part(array, index * self._samples, (index + 1) * self._samples)

    def share(self, name: str, array: np.ndarray, share: Sequence[int], microbatches: int) -> np.ndarray:
        """Return what belongs to some of the microbatches, one after the other."""
        place = self._places.get(name)
        if place is None or len(share) == microbatches:
            return array
        return np.concatenate([self.part(name, array, index) for index in share], place.axis)


def name_problems(module: Module, present: Iterable[str], renamed: Mapping[str, str]) -> list[str]:
    names = set(present)
    expected = shown([value.name for value in module.data_inputs], renamed)
    problems = [
        f"{expected[value.name]}: missing, expected {value.type}"
        for value in module.data_inputs
        if value.name not in names
    ]
    listed = ", ".join(expected.values())
    return problems + [
        f"{name}: the model has no such input, it has {listed}" for name in sorted(names - expected.keys())
    ]


def type_problems(value: Value, array: Any, shape: tuple[int, ...]) -> list[str]:
    """List the problems of an array, or a column of a file, for an input."""
    try:
        dtype = dtype_of(array.dtype)
    except ValueError as error:
        return [f"{value.name}: {error}"]
    problems = []
    if dtype != value.type.dtype:
        problems.append(
            f"{value.name}: element type is {dtype}, expected {value.type.dtype} "
            f"(array.astype({numpy_dtype(value.type.dtype).name!r}) converts)"
        )
    if tuple(array.shape) != shape:
        problems.append(f"{value.name}: shape is {list(array.shape)}, expected {list(shape)}")
    return problems


def counts_differ(counts: Mapping[str, float], places: Mapping[str, SampleRows]) -> str:
    """Return the problem of inputs with different numbers of samples, which lie at these places."""
    problem = "numbers of samples differ: " + ", ".join(f"{name} has {count:g}" for name, count in counts.items())
    if all(places[name] == SampleRows(0, 1) for name in counts):
        return problem
    if any(places[name].axis for name in counts):
        listed = ", ".join(f"{name} {places[name].rows} along dimension {places[name].axis}" for name in counts)
        return f"{problem} (one sample has: {listed})"
    return f"{problem} (first dimension of one sample: {', '.join(f'{name} {places[name].rows}' for name in counts)})"
