"""Tensors of GGUF files: Q8_0 and Q4_0 as they are, and those of f32, f16 and bf16.

A file has a header, then pairs of a key and a value. For each tensor it has the name, sizes (the fastest first), the
type and the place in the data, which lies behind all of it. Every number is checked against the file before it is used:
sizes and places within the file, names that stand once, places on the file's alignment. Nothing is read beyond what a
tensor needs.

A block of Q8_0 is a scale f16 and 32 numbers i8. One of Q4_0 is a scale f16 and 16 bytes, whose low halves are the
first 16 numbers, and whose high halves are the last; 8 is zero.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from penstock.ir.types import numpy_dtype
from penstock.support.errors import UnsupportedModel, VerifyError

from .weight import Array, QuantisedWeight, refuse_unless

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_BLOCK = 32
# Types of values: the format of struct, by number. 8 is a string, 9 a list.
_NUMBERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _LIST = 8, 9
# Types of tensors: the name, the elements of a block and its bytes.
_TYPES = {0: ("f32", 1, 4), 1: ("f16", 1, 2), 30: ("bf16", 1, 2), 2: ("q4_0", _BLOCK, 18), 8: ("q8_0", _BLOCK, 34)}
_MOST_RANK, _MOST_COUNT, _MOST_TEXT = 4, 1 << 20, 1 << 24


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of a file: its type, its shape with the fastest dimension last, and the bytes where it lies."""

    kind: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


class GgufFile:
    """An open file: `values` by key, and `tensors` by name."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file = self.path.open("rb")
        try:
            size = self.path.stat().st_size
            self._data: Any = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
            reader = _Reader(self._data, str(path))
            self.values, listed = reader.head()
            self.tensors: Mapping[str, GgufTensor] = reader.places(self.values, listed)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def array(self, name: str) -> Array:
        """Return a tensor of floats."""
        tensor = self._of(name)
        refuse_unless(tensor.kind in ("f32", "f16", "bf16"), f"{name} is {tensor.kind}, not floats", str(self.path))
        flat = np.frombuffer(
            self._data, numpy_dtype(tensor.kind), count=int(np.prod(tensor.shape)), offset=tensor.start
        )
        return np.asarray(flat.reshape(tensor.shape))

    def weight(self, name: str) -> QuantisedWeight:
        """Return a matrix of Q8_0 or Q4_0."""
        tensor, where = self._of(name), f"{self.path}: {name}"
        refuse_unless(tensor.kind in ("q8_0", "q4_0"), f"is {tensor.kind}, not q8_0 or q4_0", where)
        refuse_unless(len(tensor.shape) == 2, f"has shape {list(tensor.shape)}, not that of a matrix", where)
        rows, columns = tensor.shape
        blocks = np.frombuffer(self._data, np.uint8, count=tensor.nbytes, offset=tensor.start)
        blocks = blocks.reshape(rows, columns // _BLOCK, -1)
        scales = np.ascontiguousarray(blocks[..., :2]).view("<f2")[..., 0].astype(np.float16)
        body = blocks[..., 2:]
        if tensor.kind == "q8_0":
            return QuantisedWeight(
                np.ascontiguousarray(body).view(np.int8).reshape(rows, columns), scales, None, 8, _BLOCK
            )
        numbers = np.concatenate([body & 15, body >> 4], -1).reshape(rows, columns)
        return QuantisedWeight(numbers[:, ::2] | numbers[:, 1::2] << 4, scales, None, 4, _BLOCK)

    def _of(self, name: str) -> GgufTensor:
        if name not in self.tensors:
            raise VerifyError(f"has no tensor {name!r}", where=str(self.path))
        return self.tensors[name]


class _Reader:
    """A walk over the head of a file."""

    def __init__(self, data: Any, where: str) -> None:
        self.data, self.at, self.where = data, 0, where

    def fail(self, what: str) -> VerifyError:
        return VerifyError(f"is no GGUF file that can be read: {what}", where=self.where)

    def number(self, form: str) -> Any:
        size = struct.calcsize(form)
        if self.at + size > len(self.data):
            raise self.fail(f"it ends at byte {len(self.data)}")
        (value,) = struct.unpack_from(form, self.data, self.at)
        self.at += size
        return value

    def count(self, most: int, what: str) -> int:
        value = int(self.number("<Q"))
        if value > most:
            raise self.fail(f"it says {value} {what}")
        return value

    def text(self) -> str:
        size = self.count(_MOST_TEXT, "bytes of a string")
        if self.at + size > len(self.data):
            raise self.fail(f"it ends at byte {len(self.data)}")
        piece = bytes(self.data[self.at : self.at + size])
        self.at += size
        try:
            return piece.decode()
        except UnicodeDecodeError:
            raise self.fail("a string is not UTF-8") from None

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind == _STRING:
            return self.text()
        if kind != _LIST or depth > 2:
            raise self.fail(f"a value is of type {kind}")
        of = self.number("<I")
        return [self.value(of, depth + 1) for _ in range(self.count(_MOST_COUNT, "values of a list"))]

    def head(self) -> tuple[dict[str, Any], list[tuple[str, tuple[int, ...], int, int]]]:
        """Read everything in front of the data: values, and tensors with shape, type and place."""
        if bytes(self.data[:4]) != _MAGIC:
            raise self.fail("it does not begin with GGUF")
        self.at = 4
        version = self.number("<I")
        if version not in _VERSIONS:
            raise UnsupportedModel(f"is of version {version}; 2 and 3 are read", where=self.where)
        tensors, pairs = self.count(_MOST_COUNT, "tensors"), self.count(_MOST_COUNT, "values")
        values: dict[str, Any] = {}
        for _ in range(pairs):
            key = self.text()
            if key in values:
                raise self.fail(f"it has the key {key!r} twice")
            values[key] = self.value(self.number("<I"))
        listed = []
        for _ in range(tensors):
            name, rank = self.text(), self.number("<I")
            if not 1 <= rank <= _MOST_RANK:
                raise self.fail(f"{name!r} has {rank} dimensions")
            shape = tuple(self.count(1 << 40, "elements") for _ in range(rank))[::-1]
            listed.append((name, shape, self.number("<I"), int(self.number("<Q"))))
        return values, listed

    def places(
        self, values: Mapping[str, Any], listed: list[tuple[str, tuple[int, ...], int, int]]
    ) -> dict[str, GgufTensor]:
        """Return where each tensor lies. Those of types that are not read are left out."""
        alignment = values.get("general.alignment", 32)
        if type(alignment) is not int or not 8 <= alignment <= 1 << 16 or alignment & alignment - 1:
            raise self.fail(f"its alignment is {alignment!r}")
        begin = -(-self.at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        names = set()
        for name, shape, number, offset in listed:
            if name in names:
                raise self.fail(f"it has the tensor {name!r} twice")
            names.add(name)
            if offset % alignment:
                raise self.fail(f"{name!r} lies at {offset}, not on a boundary of {alignment}")
            if number not in _TYPES:
                continue
            kind, block, nbytes = _TYPES[number]
            size = 1
            for n in shape:
                size *= n
            if shape[-1] % block:
                raise self.fail(f"rows of {name!r} have {shape[-1]} elements, no multiple of {block}")
            needed = size // block * nbytes
            if begin + offset + needed > len(self.data):
                raise self.fail(f"{name!r} ends behind the file")
            tensors[name] = GgufTensor(kind, shape, begin + offset, needed)
        return tensors
