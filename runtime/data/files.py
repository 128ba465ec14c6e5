"""Files of samples.

In: the text of `--data`, and the module. Out: a column per input: an object with a shape and an element type of which
rows can be taken.

    FILE.npz  FILE.safetensors      one array per input, under its name
    FILE.npy                        the array of the only input
    FOLDER                          NAME.npy for every input
    FILE.parquet                    one column per input, a row per sample: numbers, or lists of as many numbers as a
                                    sample has (parquet.py)
    FILE:u16  FILE:u32              tokens without a header, little-endian: samples are windows of the input's length,
                                    one after the other
    NAME=FILE.npy  NAME=FILE:u16+1  the array of one input; +1 lets its windows start one token later
    ...,NAME=...                    several of these, the ones with names behind

A file of tokens alone feeds the input that indexes a table, and, shifted by one, the one that names classes. Tokens
become the input's element type, in which they must have a place. Everything is mapped, not read, but compressed members
of a .npz and columns of Parquet. Objects are refused, and so is everything but plain files. Names are the model's or
ours.
"""

from __future__ import annotations

import os
import re
import stat
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Container, Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

import numpy as np

from penstock.backends.bundle.tensor_file import map_tensors
from penstock.ir.batch_shares import per_sample, sample_rows
from penstock.ir.graph import Module, Value
from penstock.ir.names import accepted
from penstock.ir.types import INTS, numpy_dtype
from penstock.runtime.messages.control import Arrays
from penstock.support.errors import PenstockError, UsageError
from penstock.support.words import itemised

from .batches import NONE
from .parquet import open_parquet
from .ranges import CLASSES, INDEX, uses

TOKENS = {"u16": "<u2", "u32": "<u4"}
_SUFFIX = re.compile(r"(?P<path>.+):(?P<width>u16|u32)(?:\+(?P<shift>[01]))?")
_NAMED = re.compile(r",(?=[^,=]+=)")
# The errors that readers of damaged files raise.
_UNREADABLE = (
    OSError, ValueError, zipfile.BadZipFile, zlib.error, KeyError, EOFError, struct.error, NotImplementedError,
    RuntimeError, MemoryError, OverflowError, SyntaxError, TypeError, tokenize.TokenError,
)  # fmt: skip
WRITES = "numpy.savez(FILE, input_name=array, ...) writes such a file"


class Column(Protocol):
    """Rows of one input."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...
    def __getitem__(self, index: Any) -> np.ndarray: ...


Columns = dict[str, Column]


class DataPlace(NamedTuple):
    """One place of `--data`. `width` is that of tokens, `shift` how many tokens later windows start."""

    name: str | None
    path: Path
    width: str | None = None
    shift: int | None = None

    @property
    def text(self) -> str:
        tokens = "" if self.width is None else f":{self.width}" + ("" if self.shift is None else f"+{self.shift}")
        return ("" if self.name is None else f"{self.name}=") + str(self.path) + tokens


def parse_source(text: str) -> list[DataPlace]:
    """Return the places that the words of `--data` name. A whole word that exists as a path is that path."""
    if os.path.lexists(text):
        return [DataPlace(None, Path(text))]
    parts = []
    for word in _NAMED.split(text):
        name, equals, path = word.partition("=")
        parts.append(_part(name, path) if equals and name and not os.path.lexists(word) else _part(None, word))
    return parts


def _part(name: str | None, text: str) -> DataPlace:
    match = None if os.path.lexists(text) else _SUFFIX.fullmatch(text)
    if match is None:
        return DataPlace(name, Path(text))
    return DataPlace(name, Path(match["path"]), match["width"], None if match["shift"] is None else int(match["shift"]))


def absolute_source(text: str) -> str:
    """Return the same text with absolute paths, for processes that may have another folder."""
    return ",".join(part._replace(path=Path(os.path.abspath(part.path))).text for part in parse_source(text))


def open_columns(
    text: str, module: Module, names: Container[str], renamed: Mapping[str, str] = NONE
) -> tuple[Columns, set[str]]:
    """Open the columns of some inputs, and return them with all names that the files have. Files that hold none of
    these inputs are not opened, where their own name says so. All that cannot be read is one error."""
    columns: Columns = {}
    held_names: set[str] = set()
    problems: list[PenstockError] = []
    table = accepted([value.name for value in module.data_inputs], renamed)
    if not text:
        raise UsageError("names no file", where="--data")
    parts = parse_source(text)
    tokens: dict[str, tuple[DataPlace, int]] = {}
    for part in parts:
        try:
            members = _members(part, module, table)
            twice = sorted((members.keys() & held_names) | (members.keys() & tokens.keys()))
            if twice:
                raise UsageError(f"input {', '.join(twice)} is given twice", where=part.text)
        except PenstockError as error:
            problems.append(error)
            continue
        held_names |= members.keys()
        for name, read in members.items():
            if isinstance(read, int):
                tokens[name] = part, read
            elif name in names:
                try:
                    columns[name] = read()
                except PenstockError as error:
                    problems.append(error)
    if tokens:
        try:
            columns |= _token_columns(module, tokens, names)
        except PenstockError as error:
            problems.append(error)
    if len(problems) == 1:
        raise problems[0]
    if problems:
        listed = itemised(f"{p.where}: {p.what}" for p in problems)
        raise UsageError(f"cannot be read:{listed}", where=text, hint=next((p.hint for p in problems if p.hint), ""))
    return columns, held_names


Read = Callable[[], Column]


def _members(part: DataPlace, module: Module, table: Mapping[str, str]) -> Mapping[str, Read | int]:
    """Return the contents of a place by our names: a function that reads each, or of tokens how far they are
    shifted."""
    if part.width is not None:
        _plain(part.path)
        return _token_inputs(part, module, table)
    if part.path.is_dir():
        if part.name is not None:
            raise UsageError("is a folder, an input takes a file", where=part.text)
        files = {
            path.name.removesuffix(".npy"): path for path in sorted(part.path.iterdir()) if path.name.endswith(".npy")
        }
        if not files:
            raise UsageError(
                "has no .npy files", where=str(part.path), hint="a folder of data has NAME.npy for every input"
            )
        return _ours({name: partial(read_npy, path) for name, path in files.items()}, table, part)
    kind = _format(_plain(part.path))
    if kind == "npy":
        inputs = [value.name for value in module.data_inputs]
        if part.name is None and len(inputs) != 1:
            raise UsageError(
                f"has one array, the model has the inputs {', '.join(inputs)}",
                where=str(part.path),
                hint="give INPUT=FILE.npy,INPUT=FILE.npy",
            )
        return _ours({part.name or inputs[0]: partial(read_npy, part.path)}, table, part)
    if part.name is not None:
        raise UsageError(f"an input takes FILE.npy or FILE:u16, not {kind}", where=part.text)
    if kind == "npz":
        names = npz_names(part.path)
        return _ours({name: partial(_npz_member, part.path, name) for name in names}, table, part)
    if kind == "safetensors":
        arrays = map_tensors(part.path)
        return _ours({name: partial(arrays.__getitem__, name) for name in arrays}, table, part)

    # Tables have columns for other purposes, too.
    columns = open_parquet(
        part.path, {value.name: value.type for value in module.data_inputs}, table, sample_rows(module)
    )
    return _ours(columns, table, part)


def _ours(readers: Mapping[str, Read], table: Mapping[str, str], part: DataPlace) -> dict[str, Read]:
    named: dict[str, Read] = {}
    for name, read in readers.items():
        ours = table.get(name, name)
        if ours in named:
            raise UsageError(f"input {ours} is given twice, as {name} and by its other name", where=str(part.path))
        named[ours] = read
    return named


def _plain(path: Path) -> Path:
    """Refuse all but plain files: a pipe would be waited for, a device has no end."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    if not stat.S_ISREG(mode):
        raise UsageError("cannot read the data: is not a plain file", where=str(path), hint=WRITES)
    return path


_BY_SUFFIX = {".npz": "npz", ".npy": "npy", ".safetensors": "safetensors", ".parquet": "parquet", ".pq": "parquet"}
_BY_MAGIC = {b"PK\3\4": "npz", b"\x93NUM": "npy", b"PAR1": "parquet"}


def _format(path: Path) -> str:
    if (kind := _BY_SUFFIX.get(path.suffix.lower())) is not None:
        return kind
    with path.open("rb") as file:
        kind = _BY_MAGIC.get(file.read(4))
    if kind is None:
        raise UsageError(
            "is of no known format, expected .npz, .npy, .safetensors, .parquet or a folder of .npy",
            where=str(path),
            hint=f"a file of tokens says how wide they are: {path}:u16 or {path}:u32",
        )
    return kind


def _unreadable(path: Path, error: BaseException, hint: str = "") -> UsageError:
    text = " ".join(str(error).split()) or type(error).__name__
    return UsageError(f"cannot read the data: {text[:500]}", where=str(path), hint=hint)


# ------------------------------------------------------------------------------------------------ NumPy's files


def write_npz(file: IO[bytes], arrays: Mapping[str, np.ndarray]) -> None:
    """Write the arrays as a .npz file, whatever their names: numpy.savez takes some names for its own arguments."""
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asarray(array), allow_pickle=False)


def npz_names(path: Path) -> list[str]:
    """Return the names of the arrays of a .npz file."""
    try:
        with zipfile.ZipFile(_plain(path)) as archive:
            return [entry.filename.removesuffix(".npy") for entry in archive.infolist()]
    except _UNREADABLE as error:
        raise _unreadable(path, error, WRITES) from error


def read_npz(path: Path, names: Container[str] | None = None) -> Arrays:
    """Read arrays of a .npz file by name, all of them if none are named: mapped where they are stored as they are, read
    otherwise."""
    try:
        with zipfile.ZipFile(_plain(path)) as archive:
            arrays: Arrays = {}
            for entry in archive.infolist():
                name = entry.filename.removesuffix(".npy")
                if names is not None and name not in names:
                    continue
                mapped = _map_member(path, entry) if entry.compress_type == zipfile.ZIP_STORED else None
                arrays[name] = _read_member(archive, entry) if mapped is None else mapped
            return arrays
    except _UNREADABLE as error:
        raise _unreadable(path, error, WRITES) from error


def _npz_member(path: Path, name: str) -> np.ndarray:
    return read_npz(path, {name})[name]


def read_npy(path: Path) -> np.ndarray:
    """Map the array of a .npy file."""
    try:
        with _plain(path).open("rb") as file:
            shape, fortran, dtype = _read_header(file)
            offset, size = file.tell(), path.stat().st_size
        announced = prod(shape) * dtype.itemsize
        if announced > size - offset:
            raise ValueError(f"its header tells of {announced} bytes, there are {size - offset}")
        return _map(path, shape, fortran, dtype, offset)
    except _UNREADABLE as error:
        raise _unreadable(path, error, "numpy.save(FILE, array) writes such a file") from error


def _read_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Read shape, order of columns and element type of an array without objects."""
    version = np.lib.format.read_magic(file)
    reader = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}.get(version)
    if reader is None:
        raise ValueError(f"version {version[0]}.{version[1]} of the format is for arrays with named fields")
    shape, fortran, dtype = reader(file)
    if dtype.hasobject:
        raise ValueError("arrays of Python objects are not read")
    if any(n < 0 for n in shape):
        raise ValueError(f"its header tells of the shape {shape}")
    return shape, fortran, dtype


def _map(path: Path, shape: tuple[int, ...], fortran: bool, dtype: np.dtype[Any], offset: int) -> np.ndarray:
    if 0 in shape or not dtype.itemsize:
        return np.zeros(shape, dtype)
    return np.memmap(path, dtype, "r", offset, shape, "F" if fortran else "C")


def _map_member(path: Path, entry: zipfile.ZipInfo) -> np.ndarray | None:
    """Map a stored member; None when its header is not a plain one. The local header's lengths may differ from the
    directory's."""
    with path.open("rb") as file:
        file.seek(entry.header_offset)
        header = file.read(30)
        if len(header) < 30 or header[:4] != b"PK\3\4" or entry.flag_bits & 1:
            return None
        name_length, extra_length = struct.unpack("<HH", header[26:30])
        start = entry.header_offset + 30 + name_length + extra_length
        file.seek(start)
        shape, fortran, dtype = _read_header(file)
        offset = file.tell()
        _check_size(entry, offset - start, shape, dtype)
        return _map(path, shape, fortran, dtype, offset) if shape and not fortran else None


def _read_member(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> np.ndarray:
    with archive.open(entry) as file:
        start = file.tell()
        shape, _, dtype = _read_header(file)
        # Before any memory is asked for.
        _check_size(entry, file.tell() - start, shape, dtype)
        file.seek(0)
        array: np.ndarray = np.lib.format.read_array(file, allow_pickle=False)
        return array


def _check_size(entry: zipfile.ZipInfo, before: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    present, announced = entry.file_size - before, prod(shape) * dtype.itemsize
    if present != announced:
        raise ValueError(f"{entry.filename}: its header tells of {announced} bytes, there are {present}")


# ------------------------------------------------------------------------------------------------ tokens


class Tokens:
    """Windows of a token file as samples of an input: mapped, and converted as they are taken."""

    def __init__(self, windows: np.ndarray, dtype: np.dtype[Any], where: str) -> None:
        self._windows, self.dtype, self._where = windows, dtype, where

    @property
    def shape(self) -> tuple[int, ...]:
        return self._windows.shape

    def __getitem__(self, index: Any) -> np.ndarray:
        tokens: np.ndarray = self._windows[index]
        largest = int(tokens.max(initial=0))
        if largest > np.iinfo(self.dtype).max:
            raise UsageError(f"the token {largest} has no place in {self.dtype}", where=self._where)
        typed: np.ndarray = tokens.astype(self.dtype)
        return typed


def _token_inputs(part: DataPlace, module: Module, table: Mapping[str, str]) -> dict[str, int]:
    """Return the inputs that a file of tokens feeds, and how far their windows are shifted."""
    if part.name is not None:
        return {table.get(part.name, part.name): part.shift or 0}
    shifts, unknown = {}, []
    for value in module.data_inputs:
        kinds = {use.kind for use in uses(module, value.name, sliced=True)}
        if INDEX in kinds:
            shifts[value.name] = 0
        elif CLASSES in kinds:
            shifts[value.name] = 1
        else:
            unknown.append(value.name)
    hint = (
        "give INPUT=FILE:u16 for what is tokens, INPUT=FILE:u16+1 for what is the token behind, and INPUT=FILE.npy "
        "for the rest"
    )
    if part.shift is not None:
        raise UsageError("+0 and +1 are for single inputs", where=part.text, hint=hint)
    if unknown or 0 not in shifts.values():
        what = (
            f"a file of tokens does not say what {', '.join(unknown)} are"
            if unknown
            else "no input of the model indexes a table"
        )
        raise UsageError(
            f"{what}: the model has the inputs {', '.join(v.name for v in module.data_inputs)}",
            where=part.text,
            hint=hint,
        )
    return shifts


def _token_columns(module: Module, tokens: Mapping[str, tuple[DataPlace, int]], names: Container[str]) -> Columns:
    inputs = {value.name: value for value in module.data_inputs}
    problems = [
        f"{name}: the model has no such input, it has {', '.join(inputs)}" for name in tokens if name not in inputs
    ]
    known: dict[str, Value] = {name: inputs[name] for name in tokens if name in inputs}
    problems += [
        f"{name}: tokens are whole numbers, the input is {v.type}"
        for name, v in known.items()
        if v.type.dtype not in INTS
    ]
    problems += [
        f"{name}: is a single number, tokens come in windows" for name, value in known.items() if not value.type.rank
    ]
    places = sample_rows(module)
    lengths = {name: per_sample(value.type, places.get(name)) for name, value in known.items()}
    counts = []
    for name, (part, shift) in tokens.items():
        width, size = int(TOKENS[part.width or "u16"][-1]), part.path.stat().st_size
        if size % width:
            problems.append(f"{part.path}: {size} bytes are no whole number of tokens of {width}")
        if lengths.get(name):
            counts.append((size // width - shift) // lengths[name])
            if counts[-1] < 1:
                problems.append(
                    f"{name}: {part.path} has {size // width} tokens, a sample takes {lengths[name] + shift}"
                )
    if problems:
        raise UsageError("does not fit the model:" + itemised(dict.fromkeys(problems)), where=_where(tokens))
    # A shifted window may lack its last token: all inputs go as far as the shortest.
    count, columns = min(counts), Columns()
    for name, value in known.items():
        if name in names:
            part, shift = tokens[name]
            flat = np.memmap(part.path, TOKENS[part.width or "u16"], "r")[shift : shift + count * lengths[name]]
            windows = places[name].joined(flat, value.type.dims)
            columns[name] = Tokens(windows, numpy_dtype(value.type.dtype), f"{part.path}: {name}")
    return columns


def _where(tokens: Mapping[str, tuple[DataPlace, int]]) -> str:
    return ", ".join(dict.fromkeys(str(part.path) for part, _ in tokens.values()))
