"""Samples for the inputs of a module.

In: files (files.py), or the word `synthetic`. Out: one array per microbatch and input.

The first axis of an array counts samples, or the one that the module names (ir/batch_shares.py). b, the samples of a
microbatch, is the greatest common divisor of the inputs' sizes along it. An input with r times as many rows has r rows
per sample. A scalar input is given whole to every microbatch.

Batch t of B = b·m samples takes positions t·B .. t·B+B-1 of an endless row of epochs (`Order`). So the contents of a
microbatch are a function of its number alone, the same on every rank and after a resume. A run that goes on from a
checkpoint made with other batches has an `offset`: the position that microbatch 0 would begin with.

Integers that the module indexes a table with, or takes for classes, must lie in its range (ranges.py). A file is
checked microbatch by microbatch as it is read, so that no update sees a value out of range.

Synthetic data: numbers that fit what the module does with them (domains.py), seeded with (seed, input, microbatch).
Those of a decoder with caches are turns (turns.py), seeded with (seed, microbatch).
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from penstock.ir.batch_shares import microbatch_size, sample_rows
from penstock.ir.graph import Module
from penstock.runtime.messages.control import DataSpec
from penstock.runtime.messages.defaults import DROP, LAST, PAD, SYNTHETIC, WRAP
from penstock.support.errors import UsageError
from penstock.support.words import itemised

from .batches import NONE, counts_differ, name_problems, type_problems
from .domains import domains_of
from .files import absolute_source, open_columns
from .ranges import first_outside, integer_range
from .turns import SyntheticTurns


def data_spec(data: str | os.PathLike[str], shuffle: bool, seed: int, last: str = WRAP) -> DataSpec:
    """Return the source of samples, by absolute paths."""
    text = os.fspath(data)
    return DataSpec(text if text == SYNTHETIC else absolute_source(text), shuffle, seed, last)


class Samples(Protocol):
    """Random access to microbatches by number."""

    def microbatch(self, mb: int, name: str) -> np.ndarray: ...


def open_data(
    module: Module, spec: DataSpec, names: Sequence[str], renamed: Mapping[str, str] = NONE, offset: int = 0
) -> Samples:
    """Open the samples that a spec describes, for some of the module's inputs. All problems are one error."""
    if spec.source == SYNTHETIC:
        return SyntheticSamples(module, spec.seed, offset)
    return FileSamples(module, spec, names, renamed, offset)


def check_data(
    module: Module, spec: DataSpec, renamed: Mapping[str, str] = NONE, names: Sequence[str] | None = None
) -> int | None:
    """Refuse data that does not fit, before any worker is started. Return the number of samples of files. With `names`,
    only those inputs are checked."""
    if spec.source == SYNTHETIC:
        return None
    return FileSamples(
        module, spec, [value.name for value in module.data_inputs] if names is None else names, renamed
    ).count


# ------------------------------------------------------------------------------------------------ order


class Order:
    """The order of samples in the endless row of epochs.

    An epoch has every sample once, in order, or permuted by a generator seeded with (seed, epoch). Where samples are no
    multiple of a batch, `wrap` lets the batch at the end go on with the next epoch. `drop` leaves out what remains of
    an epoch. `pad` fills the last batch up with samples from the beginning of the same epoch, which then count twice.
    """

    def __init__(self, count: int, batch: int, last: str = WRAP, *, shuffle: bool = False, seed: int = 0) -> None:
        assert last in LAST, last
        self.count, self._shuffle, self._seed = count, shuffle, seed
        # Positions that an epoch takes.
        self.length = {WRAP: count, DROP: count // batch * batch, PAD: -(-count // batch) * batch}[last]
        self._permuted: tuple[int, np.ndarray] | None = None

    def places(self, first: int, number: int) -> np.ndarray:
        """Return the samples at `number` positions from `first` on."""
        parts = []
        while number:
            epoch, place = divmod(first, self.length)
            count = min(number, self.length - place)
            parts.append(self._in_epoch(epoch, np.arange(place, place + count) % self.count))
            first, number = first + count, number - count
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _in_epoch(self, epoch: int, places: np.ndarray) -> np.ndarray:
        if not self._shuffle:
            return places
        permuted = self._permuted
        if permuted is None or permuted[0] != epoch:
            permuted = self._permuted = (epoch, np.random.default_rng([self._seed, epoch]).permutation(self.count))
        samples: np.ndarray = permuted[1][places]
        return samples


# ------------------------------------------------------------------------------------------------ files


class FileSamples:
    """Samples of files, for some of the module's inputs; the files of other inputs are not opened."""

    def __init__(
        self, module: Module, spec: DataSpec, names: Sequence[str], renamed: Mapping[str, str] = NONE, offset: int = 0
    ) -> None:
        self._places = sample_rows(module)
        self._rows, self._where, self._offset = microbatch_size(module), spec.source, offset
        self._ranges = {name: integer_range(module, name) for name in names}
        columns, held_names = open_columns(spec.source, module, names, renamed)
        problems = name_problems(module, held_names, renamed)
        counts: dict[str, float] = {}
        for value in module.data_inputs:
            if value.name not in columns:
                continue
            column, place = columns[value.name], self._places.get(value.name)
            shape = value.type.dims
            if place is not None and len(column.shape) > place.axis:
                counts[value.name] = column.shape[place.axis] / place.rows
                shape = (*shape[: place.axis], column.shape[place.axis], *shape[place.axis + 1 :])
            problems += type_problems(value, column, shape)
        if len(set(counts.values())) > 1:
            problems.append(counts_differ(counts, self._places))
        problems += [
            f"{name}: has no whole number of samples" for name, count in counts.items() if count < 1 or count % 1
        ]
        self.count = int(next(iter(counts.values()), 1))
        batch = self._rows * (1 if module.schedule is None else module.schedule.microbatches)
        if spec.last == DROP and counts and not problems and self.count < batch:
            problems.append(f"{self.count} samples make no batch of {batch}, and what makes none is dropped")
        if problems:
            raise UsageError("does not fit the model:" + itemised(problems), where=spec.source)
        self._order = Order(self.count, batch, spec.last, shuffle=spec.shuffle, seed=spec.seed)
        self._columns = columns

    def microbatch(self, mb: int, name: str) -> np.ndarray:
        """Read one microbatch of an input. UsageError for a value out of range."""
        return self.take(self._order.places(mb * self._rows + self._offset, self._rows), name)

    def take(self, places: np.ndarray, name: str) -> np.ndarray:
        """Read some samples of an input."""
        place, column = self._places.get(name), self._columns[name]
        array = np.asarray(column) if place is None else place.take(column, _rows(places, place.rows))
        if (outside := first_outside(array, self._ranges[name], 0 if place is None else place.axis)) is not None:
            row, text = outside
            sample = 0 if place is None else places[row // place.rows]
            raise UsageError(f"{name}: sample {sample} has {text}", where=self._where)
        return array


def _rows(places: np.ndarray, per_sample: int) -> slice | np.ndarray:
    """Return the rows of samples; those that follow each other as a slice, which takes them as they lie."""
    if (np.diff(places) == 1).all():
        return slice(int(places[0]) * per_sample, (int(places[-1]) + 1) * per_sample)
    return (places[:, None] * per_sample + np.arange(per_sample)).reshape(-1)


# ------------------------------------------------------------------------------------------------ synthetic samples


class SyntheticSamples:
    """Seeded noise of the right types, in the domains of the inputs."""

    def __init__(self, module: Module, seed: int, offset: int = 0) -> None:
        self._ahead = offset // microbatch_size(module)
        self._types = {value.name: value.type for value in module.data_inputs}
        self._domains = domains_of(module, self._types)
        self._turns = SyntheticTurns(module)
        self._seed = seed

    def microbatch(self, mb: int, name: str) -> np.ndarray:
        type = self._types[name]
        if self._turns.exist:
            turn = self._turns.turn(np.random.default_rng([self._seed, mb + self._ahead]))
            if name in turn and turn[name].shape == type.dims:
                return turn[name]
        generator = np.random.default_rng([self._seed, zlib.crc32(name.encode()), mb + self._ahead])
        return self._domains[name].draw(generator, type)
