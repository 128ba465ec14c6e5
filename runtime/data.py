"""Samples for the inputs of a module. In: a .npz file, the word `synthetic`, or batches from a program. Out: one array per microbatch and input.

A file has one array per graph input, under the input's name in the model or here; the first axis counts samples. Batch t of B = b·m samples takes samples
t·B .. t·B+B-1, wrapping round at the end; with `shuffle` the samples of every epoch are permuted by a generator seeded with (seed, epoch).
So what a microbatch sees is a function of its number alone, the same on every rank and after a resume. b is the greatest common divisor of
the inputs' first dimensions; an input with r times as many rows has r rows per sample. A scalar input is given whole to every microbatch.

Integers that the module indexes a table with, or takes for classes, must lie in its range: a batch is checked whole before it is handed over,
a file microbatch by microbatch as it is read, so that no update sees a value out of range. An input that is only used after arithmetic, or
of which a slice is used, is not checked.

Arrays of an uncompressed .npz are mapped, not read. Synthetic data: normal floats; integers below the smallest number of rows or classes that
the module uses them for; both seeded with (seed, input, microbatch).
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Protocol

import numpy as np

from ..ir.errors import UsageError, VerifyError
from ..ir.graph import Graph, Module, Op, Value
from ..ir.ops import complete_attrs, definition
from ..ir.renames import by_our_names, shown
from ..ir.types import FLOATS, TensorType, dtype_of, numpy_dtype
from .control import Arrays, DataSpec
from .program import microbatch_size

# `renamed` gives the model's names of inputs that are spelled otherwise here (ir/renames.py): data may come under either.
NONE: Mapping[str, str] = {}


class Samples(Protocol):
    """Random access to microbatches by number."""

    def microbatch(self, mb: int, name: str) -> np.ndarray: ...


def open_data(module: Module, spec: DataSpec, names: Sequence[str], renamed: Mapping[str, str] = NONE) -> Samples:
    """The samples that a spec describes, for some of the module's inputs. Everything that does not fit is one error."""
    if spec.source == "synthetic":
        return SyntheticSamples(module, spec.seed)
    return FileSamples(module, Path(spec.source), names, shuffle=spec.shuffle, seed=spec.seed, renamed=renamed)


def check_data(module: Module, spec: DataSpec, renamed: Mapping[str, str] = NONE) -> None:
    """Refuse data that does not fit, before any worker is started."""
    if spec.source != "synthetic":
        FileSamples(module, Path(spec.source), [value.name for value in module.data_inputs], renamed=renamed)


# ------------------------------------------------------------------------------------------------ batches from a program


def batch_shape(value: Value, microbatches: int) -> tuple[int, ...]:
    """The shape of one input for a whole batch."""
    dims = value.type.dims
    return (dims[0] * microbatches, *dims[1:]) if dims else dims


def check_batch(module: Module, batch: Mapping[str, np.ndarray], where: str = "batch", renamed: Mapping[str, str] = NONE) -> None:
    """Refuse a batch with wrong names, element types or shapes, naming all of them."""
    assert module.schedule is not None
    problems = _name_problems(module, batch.keys(), renamed)
    for value in module.data_inputs:
        if value.name not in batch:
            continue
        array = np.asarray(batch[value.name])
        wrong = _type_problems(value, array, batch_shape(value, module.schedule.microbatches))
        if not wrong and (found := first_outside(array, integer_range(module, value.name))) is not None:
            row, text = found
            per_sample = value.type.dims[0] // microbatch_size(module) if value.type.rank else 1
            wrong.append(f"{value.name}: sample {row // per_sample} has {text}")
        problems += wrong
    if problems:
        raise UsageError("does not fit the model:" + "".join(f"\n  - {p}" for p in problems), where=where)


def cut_batch(array: np.ndarray, type: TensorType, index: int) -> np.ndarray:
    """The part of a batch's array that belongs to its microbatch `index`."""
    return array[index * type.dims[0] : (index + 1) * type.dims[0]] if type.rank else array


def _name_problems(module: Module, given: Iterable[str], renamed: Mapping[str, str]) -> list[str]:
    names = set(given)
    expected = shown([value.name for value in module.data_inputs], renamed)
    problems = [f"{expected[value.name]}: missing, expected {value.type}" for value in module.data_inputs if value.name not in names]
    there = ", ".join(expected.values())
    return problems + [f"{name}: the model has no such input, it has {there}" for name in sorted(names - expected.keys())]


def _type_problems(value: Value, array: np.ndarray, shape: tuple[int, ...]) -> list[str]:
    try:
        dtype = dtype_of(array.dtype)
    except ValueError as error:
        return [f"{value.name}: {error}"]
    problems = []
    if dtype != value.type.dtype:
        problems.append(
            f"{value.name}: element type is {dtype}, expected {value.type.dtype} (array.astype({numpy_dtype(value.type.dtype).name!r}) converts)"
        )
    if array.shape != shape:
        problems.append(f"{value.name}: shape is {list(array.shape)}, expected {list(shape)}")
    return problems


# ------------------------------------------------------------------------------------------------ files


class FileSamples:
    """Samples of a .npz file, in order or shuffled."""

    def __init__(
        self, module: Module, path: Path, names: Sequence[str], *, shuffle: bool = False, seed: int = 0, renamed: Mapping[str, str] = NONE
    ) -> None:
        self._types = {value.name: value.type for value in module.data_inputs}
        self._rows, self._shuffle, self._seed = microbatch_size(module), shuffle, seed
        self._order: tuple[int, np.ndarray] | None = None
        self._path, self._ranges = path, {name: integer_range(module, name) for name in names}
        arrays: Arrays = by_our_names(read_npz(path), [value.name for value in module.data_inputs], renamed, str(path))
        problems = _name_problems(module, arrays.keys(), renamed)
        counts: dict[str, float] = {}
        for value in module.data_inputs:
            if value.name not in arrays:
                continue
            array, dims = arrays[value.name], value.type.dims
            problems += _type_problems(value, array, (len(array) if array.ndim else 0, *dims[1:]) if dims else dims)
            if dims and array.ndim:
                counts[value.name] = len(array) * self._rows / dims[0]
        if len(set(counts.values())) > 1:
            problems.append("numbers of samples differ: " + ", ".join(f"{name} has {count:g}" for name, count in counts.items()))
        problems += [f"{name}: has no whole number of samples" for name, count in counts.items() if count < 1 or count % 1]
        if problems:
            raise UsageError("does not fit the model:" + "".join(f"\n  - {p}" for p in problems), where=str(path))
        self.count = int(next(iter(counts.values()), 1))
        self._arrays = {name: arrays[name] for name in names}

    def microbatch(self, mb: int, name: str) -> np.ndarray:
        """One microbatch of an input. UsageError for a value out of range."""
        array = self._read(mb, name)
        if (found := first_outside(array, self._ranges[name])) is not None:
            row, text = found
            dims = self._types[name].dims
            place = self._index(mb * self._rows + row // (dims[0] // self._rows)) if dims else 0
            raise UsageError(f"{name}: sample {place} has {text}", where=str(self._path))
        return array

    def _read(self, mb: int, name: str) -> np.ndarray:
        array, dims = self._arrays[name], self._types[name].dims
        if not dims:
            return array
        first, per_sample = mb * self._rows, dims[0] // self._rows
        start = first % self.count
        if not self._shuffle and start + self._rows <= self.count:
            return array[start * per_sample : (start + self._rows) * per_sample]
        places = [self._index(first + i) * per_sample + j for i in range(self._rows) for j in range(per_sample)]
        return array[places]

    def _index(self, position: int) -> int:
        epoch, place = divmod(position, self.count)
        if not self._shuffle:
            return place
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, np.random.default_rng([self._seed, epoch]).permutation(self.count))
        return int(self._order[1][place])


def write_npz(file: IO[bytes], arrays: Mapping[str, np.ndarray]) -> None:
    """The arrays as a .npz file, whatever their names: numpy.savez takes some names for its own arguments."""
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asarray(array), allow_pickle=False)


def read_npz(path: Path) -> Arrays:
    """All arrays of a .npz file by name: mapped where they are stored as they are, read otherwise. Objects are refused."""
    try:
        with zipfile.ZipFile(path) as archive, np.load(path, allow_pickle=False) as loaded:
            arrays = {}
            for entry in archive.infolist():
                name = entry.filename.removesuffix(".npy")
                mapped = _map_member(path, entry) if entry.compress_type == zipfile.ZIP_STORED else None
                arrays[name] = loaded[name] if mapped is None else mapped
            return arrays
    except (OSError, ValueError, zipfile.BadZipFile, KeyError) as error:
        raise UsageError(
            f"cannot read the data: {error}", where=str(path), hint="numpy.savez(FILE, input_name=array, ...) writes such a file"
        ) from error


def _map_member(path: Path, entry: zipfile.ZipInfo) -> np.ndarray | None:
    """Map a stored member; None when its header is not a plain one. The local header's lengths may differ from the directory's."""
    with path.open("rb") as file:
        file.seek(entry.header_offset)
        header = file.read(30)
        if header[:4] != b"PK\3\4":
            return None
        name_length, extra_length = struct.unpack("<HH", header[26:30])
        file.seek(entry.header_offset + 30 + name_length + extra_length)
        version = np.lib.format.read_magic(file)
        read_header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}.get(version)
        if read_header is None:
            return None
        shape, fortran, dtype = read_header(file)
        if fortran or dtype.hasobject or 0 in shape or not shape:
            return None
        return np.memmap(path, dtype, "r", file.tell(), shape)


# ------------------------------------------------------------------------------------------------ synthetic samples


class SyntheticSamples:
    """Seeded noise of the right types."""

    def __init__(self, module: Module, seed: int) -> None:
        self._types = {value.name: value.type for value in module.data_inputs}
        self._limits = {name: integer_limit(module, name) for name in self._types}
        self._seed = seed

    def microbatch(self, mb: int, name: str) -> np.ndarray:
        type = self._types[name]
        generator = np.random.default_rng([self._seed, zlib.crc32(name.encode()), mb])
        if type.dtype in FLOATS:
            return generator.standard_normal(type.dims, np.float32).astype(numpy_dtype(type.dtype))
        limit = 2 if type.dtype == "bool" else self._limits[name]
        return generator.integers(0, limit, type.dims).astype(numpy_dtype(type.dtype))


Range = tuple[int, int]


def integer_limit(module: Module, name: str) -> int:
    """What an integer input must stay below: the rows of what it indexes, the classes it labels; 2 when the module says nothing."""
    return min((high for _, high in _uses(module, name, sliced=True)), default=2)


def integer_range(module: Module, name: str) -> Range | None:
    """The range [low, high) that every value of an integer input must lie in; None when the module says nothing."""
    ranges = _uses(module, name, sliced=False)
    return (max(low for low, _ in ranges), min(high for _, high in ranges)) if ranges else None


def first_outside(array: np.ndarray, bounds: Range | None) -> tuple[int, str] | None:
    """The row and a description of the first value out of range."""
    if bounds is None or not array.size or not np.issubdtype(array.dtype, np.integer):
        return None
    low, high = bounds
    if low <= int(array.min()) and int(array.max()) < high:
        return None
    # Compared as Python integers would be: -1 has no place in an unsigned type.
    limits = np.iinfo(array.dtype)
    bad = (array < max(low, limits.min)) | (array > min(high - 1, limits.max))
    place = np.unravel_index(int(bad.argmax()), array.shape)
    return int(place[0]) if place else 0, f"the value {int(array[place])}, the model takes {low} to {high - 1}"


def _uses(module: Module, name: str, *, sliced: bool) -> set[Range]:
    """The ranges of everything that an input indexes or labels. `sliced` follows slices too, of which only some values are used."""
    ranges: set[Range] = set()
    # Values that go from one graph to another keep their names; other names may mean something else in each graph.
    shared, known = {name}, 0
    while len(shared) > known:
        known = len(shared)
        for graph in module.graphs.values():
            carriers = shared & {value.name for value in graph.ins}
            _follow(graph, carriers, ranges, sliced)
            shared |= carriers & {value.name for value in graph.outs}
    return ranges


def _follow(graph: Graph, carriers: set[str], ranges: set[Range], sliced: bool) -> None:
    # Layout changes and casts hand the numbers on.
    for op in graph.ops:
        if not any(value.name in carriers for value in op.ins):
            continue
        if op.kind == "cast" or (definition(op.kind).family == "layout" and (sliced or op.kind != "slice")):
            carriers |= {value.name for value in op.outs}
        else:
            ranges |= _range_of(op, carriers)


def _range_of(op: Op, carriers: set[str]) -> set[Range]:
    if op.kind == "gather" and op.ins[1].name in carriers:
        rows = op.ins[0].type.dims[int(complete_attrs(op)["axis"])]  # type: ignore[arg-type]
        return {(-rows, rows)}
    if op.kind in ("cross_entropy", "cross_entropy_grad") and op.ins[1].name in carriers:
        return {(0, op.ins[0].type.dims[-1])}
    return set()


# ------------------------------------------------------------------------------------------------ feeds


class DataFeed:
    """A known number of batches from samples."""

    def __init__(self, samples: Samples, first: int, batches: int) -> None:
        self._samples, self._end = samples, first + batches

    def exists(self, batch: int) -> bool:
        return batch < self._end

    def wait(self, batch: int) -> None:
        raise AssertionError("all batches are known")

    def microbatch(self, mb: int, name: str) -> np.ndarray:
        return self._samples.microbatch(mb, name)

    def finish(self, batch: int) -> None:
        pass


class NoSamples:
    """For a rank that feeds nothing."""

    def microbatch(self, mb: int, name: str) -> np.ndarray:
        raise VerifyError(f"input {name} of microbatch {mb} was asked for, but no data was given")
