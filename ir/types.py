"""Tensor types: an element type, a shape, and how the shape is laid over mesh axes.

Text form: `f32[64,512]`, symbolic dimensions `f32[B,512]`, a dimension split over mesh axes `f32[64/dp,512]`, a sum
that is still partial over an axis `f32[64,512]+tp`. `str(t)` and `parse_type` are exact inverses.
"""

from __future__ import annotations

import re
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
    dimension i (empty: replicated); `partial` are axes with an unreduced sum."""

    dtype: str
    shape: tuple[Dim, ...]
    axes: tuple[tuple[str, ...], ...] = ()
    partial: tuple[str, ...] = ()

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

    def with_shape(self, shape: tuple[Dim, ...]) -> TensorType:
        return TensorType(self.dtype, tuple(shape))

    def with_dtype(self, dtype: str) -> TensorType:
        return TensorType(dtype, self.shape)


@lru_cache(maxsize=65536)
def _nbytes(t: TensorType) -> int:
    return t.size * ITEM_BYTES[t.dtype]


@lru_cache(maxsize=65536)
def _type_str(t: TensorType) -> str:
    dims = [str(n) + "".join("/" + a for a in (t.axes[i] if t.axes else ())) for i, n in enumerate(t.shape)]
    return f"{t.dtype}[{','.join(dims)}]" + "".join("+" + a for a in t.partial)


_TYPE = re.compile(r"(\w+)\[([\w,/]*)\]((?:\+\w+)*)")
_DIM = re.compile(r"(\d+|[A-Za-z_]\w*)((?:/[A-Za-z_]\w*)*)")


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
    for part in match[2].split(",") if match[2] else ():
        dim = _DIM.fullmatch(part)
        if dim is None:
            raise ValueError(
                f"bad dimension {part!r} in {text!r}, expected a number or a name, then /axis for each mesh axis"
            )
        shape.append(int(dim[1]) if dim[1].isdigit() else dim[1])
        axes.append(tuple(dim[2].split("/")[1:]))
    return TensorType(match[1], tuple(shape), tuple(axes) if any(axes) else (), tuple(match[3].split("+")[1:]))


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
