"""Tensor types: an element type, a shape, and how the shape is laid over mesh axes.

Text form: `f32[64,512]`, symbolic dimensions `f32[B,512]`, a dimension split over mesh axes `f32[64/dp,512]`, a sum
that is still partial over an axis `f32[64,512]+tp`. In `f32[64,3*768/tp]` a dimension has three blocks, each of which
is split. In `f32[64,-2*384/tp]` every second block is dealt out from the last device to the first: the dimension lies
in *folded* order, and each device has an early and a late part. `str(t)` and `parse_type` are exact inverses.

Sizes are those of the whole tensor. A dimension of n elements that is split k ways lies in contiguous parts of
ceil(n/k); of several axes the first is major. `local` is the part of one device. Its last parts may reach beyond the
tensor: they are padding there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np

Dim = int | str

# Our element types, and what NumPy, torch and TVM call them.
LONG_NAMES = {
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
    "f64": "float64",
    "i64": "int64",
    "i32": "int32",
    "i16": "int16",
    "i8": "int8",
    "u64": "uint64",
    "u32": "uint32",
    "u16": "uint16",
    "u8": "uint8",
    "bool": "bool",
}
_SHORT_NAMES = {long: short for short, long in LONG_NAMES.items()}
DTYPES = tuple(LONG_NAMES)
FLOATS = ("f32", "f16", "bf16", "f64")
UNSIGNED = ("u64", "u32", "u16", "u8")
INTS = ("i64", "i32", "i16", "i8", *UNSIGNED)
# The largest relative error of rounding to the nearest number: 2^-p with p bits of significand, the hidden one counted.
UNIT_ROUNDOFF = {"f64": 2.0**-53, "f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8}
ITEM_BYTES = {d: 1 if d == "bool" else int(d.lstrip("bfiu")) // 8 for d in DTYPES}


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """Return the NumPy dtype that stores `dtype`; bf16 comes from ml_dtypes."""
    if dtype == "bf16":
        import ml_dtypes

        bf16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return bf16
    return np.dtype(LONG_NAMES[dtype])


def dtype_of(array_dtype: object) -> str:
    """Return the IR's name for a NumPy dtype. Raise ValueError when there is none."""
    name = np.dtype(array_dtype).name  # type: ignore[call-overload]
    if name not in _SHORT_NAMES:
        raise ValueError(f"element type {name} has no counterpart here, expected one of {', '.join(DTYPES)}")
    return _SHORT_NAMES[name]


class TensorType(NamedTuple):
    """The type of a tensor: element type, shape, and how it lies on a mesh. `axes[i]` are the mesh axes that split
    dimension i (empty: replicated); `partial` are axes with an unreduced sum; `blocks[i]` counts the blocks of
    dimension i, each of which is split (empty: one block each). Folded dimensions have a negative number of blocks.
    `laid` makes types in this form."""

    dtype: str
    shape: tuple[Dim, ...]
    axes: tuple[tuple[str, ...], ...] = ()
    partial: tuple[str, ...] = ()
    blocks: tuple[int, ...] = ()

    def __str__(self) -> str:
        return _type_str(self)

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def is_static(self) -> bool:
        return all(isinstance(n, int) for n in self.shape)

    @property
    def dims(self) -> tuple[int, ...]:
        """The shape when every dimension is a number; AssertionError otherwise (symbols are bound before passes
        run)."""
        assert self.is_static, f"{self} has a symbolic dimension"
        return self.shape  # type: ignore[return-value]

    @property
    def size(self) -> int:
        return prod(self.dims)

    @property
    def nbytes(self) -> int:
        return _nbytes(self)

    @property
    def is_plain(self) -> bool:
        """Return whether no axis splits the tensor, nor leaves a sum of it to be added up."""
        return not self.axes and not self.partial

    @property
    def plain(self) -> TensorType:
        """The type of the whole tensor on one device."""
        return self if self.is_plain else TensorType(self.dtype, self.shape)

    @property
    def every_axis(self) -> tuple[str, ...]:
        """The axes that split a dimension, and those over which sums are to be added up."""
        return (*(axis for axes in self.axes for axis in axes), *self.partial)

    def axes_of(self, dim: int) -> tuple[str, ...]:
        """Return the axes that split a dimension."""
        return self.axes[dim] if self.axes else ()

    def blocks_of(self, dim: int) -> int:
        """Return the number of blocks of a dimension, negative where it lies in folded order."""
        return self.blocks[dim] if self.blocks else 1

    def laid(
        self, axes: Sequence[tuple[str, ...]] = (), partial: Iterable[str] = (), blocks: Sequence[int] = ()
    ) -> TensorType:
        """Return the type with another layout. Blocks of dimensions that are not split are forgotten."""
        kept = tuple(b if i < len(axes) and axes[i] else 1 for i, b in enumerate(blocks))
        return TensorType(
            self.dtype,
            self.shape,
            tuple(map(tuple, axes)) if any(axes) else (),
            tuple(sorted(partial)),
            kept if any(b != 1 for b in kept) else (),
        )

    def local(self, sizes: Mapping[str, int]) -> TensorType:
        """Return the type of what one device has of the tensor, on a mesh with axes of these sizes. An axis that the
        mesh does not have has size 1."""
        return self if self.is_plain else _local(self, tuple(sorted(sizes.items())))

    def with_shape(self, shape: tuple[Dim, ...]) -> TensorType:
        return TensorType(self.dtype, tuple(shape))

    def with_dtype(self, dtype: str) -> TensorType:
        return TensorType(dtype, self.shape)


@lru_cache(maxsize=65536)
def _nbytes(t: TensorType) -> int:
    return t.size * ITEM_BYTES[t.dtype]


def part_size(n: int, parts: int, blocks: int = 1) -> int:
    """Return the elements of one part of a dimension of n elements, each block of which is split so many ways."""
    return abs(blocks) * -(-(n // abs(blocks)) // parts)


def place_in_block(block: int, index: int, parts: int, blocks: int) -> int:
    """Return which part of a block the device with a number among so many has."""
    return parts - 1 - index if blocks < 0 and block % 2 else index


@lru_cache(maxsize=65536)
def _local(t: TensorType, sizes: tuple[tuple[str, int], ...]) -> TensorType:
    size = dict(sizes)
    parts = [prod(size.get(axis, 1) for axis in t.axes_of(i)) for i in range(t.rank)]
    return t.with_shape(
        tuple(part_size(n, k, t.blocks_of(i)) for i, (n, k) in enumerate(zip(t.dims, parts, strict=True)))
    )


@lru_cache(maxsize=65536)
def _type_str(t: TensorType) -> str:
    if t.is_plain:
        return f"{t.dtype}[{','.join(map(str, t.shape))}]"
    dims = [
        (f"{b}*{n // abs(b)}" if (b := t.blocks_of(i)) != 1 and isinstance(n, int) else str(n))
        + "".join("/" + axis for axis in t.axes_of(i))
        for i, n in enumerate(t.shape)
    ]
    return f"{t.dtype}[{','.join(dims)}]" + "".join("+" + axis for axis in t.partial)


TYPE_PATTERN = r"\w+\[[\w,/*-]*\](?:\+\w+)*"
_TYPE = re.compile(r"(\w+)\[([\w,/*-]*)\]((?:\+\w+)*)")
_DIM = re.compile(r"(?:(-?[1-9]\d*)\*)?(\d+|[A-Za-z_]\w*)((?:/[A-Za-z_]\w*)*)")


@lru_cache(maxsize=65536)
def parse_type(text: str) -> TensorType:
    """Return the type that prints as `text`. A ValueError says what was expected."""
    match = _TYPE.fullmatch(text)
    if match is None or match[1] not in DTYPES:
        raise ValueError(
            f"bad tensor type {text!r}, expected one of {'/'.join(DTYPES)} and a shape, e.g. f32[32,64/dp]"
        )
    shape: list[Dim] = []
    axes: list[tuple[str, ...]] = []
    blocks: list[int] = []
    for part in match[2].split(",") if match[2] else ():
        dim = _DIM.fullmatch(part)
        if dim is None or (dim[1] and not (dim[2].isdigit() and dim[3] and are_blocks(int(dim[1])))):
            raise ValueError(
                f"bad dimension {part!r} in {text!r}, expected a number or a name, then /axis for each mesh axis; "
                "a number of blocks, such as 3*256/tp, or -2*256/tp in folded order, stands before sizes that are split"
            )
        blocks.append(int(dim[1] or 1))
        shape.append(int(dim[2]) * abs(blocks[-1]) if dim[2].isdigit() else dim[2])
        axes.append(tuple(dim[3].split("/")[1:]))
    partial = tuple(match[3].split("+")[1:])
    if partial != tuple(sorted(partial)):
        raise ValueError(f"bad tensor type {text!r}, expected the axes of partial sums in alphabetical order")
    return TensorType(match[1], tuple(shape)).laid(axes, partial, blocks)


def are_blocks(blocks: int) -> bool:
    """Return whether a number says how many blocks of a dimension are split: several, and pairs in folded order."""
    return blocks > 1 or (blocks < 0 and blocks % 2 == 0)


def broadcast_shapes(*shapes: tuple[Dim, ...]) -> tuple[Dim, ...]:
    """Broadcast shapes by NumPy's rule, where a symbol fits only itself or 1. A TypeError names the dimension that
    clashes."""
    rank = max(map(len, shapes), default=0)
    out: list[Dim] = []
    for i in range(rank):
        sizes = {s[i - rank + len(s)] for s in shapes if i - rank + len(s) >= 0} - {1}
        if len(sizes) > 1:
            listed = " and ".join("[" + ",".join(map(str, s)) + "]" for s in shapes)
            raise TypeError(
                f"shapes {listed} do not broadcast: dimension {i - rank} is {' and '.join(sorted(map(str, sizes)))}"
            )
        out.append(sizes.pop() if sizes else 1)
    return tuple(out)
