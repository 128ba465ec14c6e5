"""The elements of variables that are computed from those of the model: weights rounded to fewer bits.

A variable that says `from @w as FORM` in the text of a module is a function of the model's `@w`. The forms are

    bf16, f16                       the nearest numbers of 16 bits
    codes8.G, scales8.G             whole numbers of 8 bits, and the scale of each group of G along a row
    codes4.G, scales4.G             the same in 4 bits, two to a byte

and with `.turned` behind them those of the transpose of `@w`. Of 8 bits a scale is the largest absolute value of the
group over 127. Of 4 bits the element of the largest absolute value becomes -8, or a little more than that: of four
scales the one with the least squared error is taken. Scales are f16, and elements are rounded to the scale as it is
stored.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from penstock.ir.graph import Var
from penstock.ir.types import TensorType, numpy_dtype
from penstock.support.errors import VerifyError

Array = np.ndarray[Any, Any]

_NEAREST = ("bf16", "f16")
_FORM = re.compile(r"(codes|scales)([48])\.(\d+)(\.turned)?")
# Scales of 4 bits that are tried, as parts of that by which the largest element is -8.
_TRIED = (1.0, 0.95, 0.9, 0.85)
# Elements that are rounded at once.
_CHUNK = 1 << 20


def is_form(form: str) -> bool:
    """Return whether there is such a form."""
    return form in _NEAREST or _FORM.fullmatch(form) is not None


def derive(var: Var, source: Any) -> Array:
    """Return the elements of a variable, computed from those of the model's variable, some rows after the other."""
    match = _FORM.fullmatch(var.form)
    if match is None and var.form not in _NEAREST:
        raise VerifyError(f"is of an unknown form {var.form!r}", where=f"@{var.name}")
    array = np.asarray(source)
    _check_type(var, match, array.shape)
    if not var.type.size:
        return np.empty(var.type.dims, numpy_dtype(var.type.dtype))
    if array.ndim < 2:
        array = array.reshape(1, -1)
    if match is not None and match[4]:
        array = array.T
    step = max(1, _CHUNK * len(array) // max(array.size, 1))
    result = np.empty(var.type.dims, numpy_dtype(var.type.dtype))
    rows = result.reshape(len(array), -1)
    for start in range(0, len(array), step):
        chunk = np.ascontiguousarray(array[start : start + step], np.float32)
        elements = chunk.astype(result.dtype) if match is None else _of_group(var, match, chunk)
        rows[start : start + step] = elements.reshape(len(chunk), -1)
    return result


def _check_type(var: Var, match: re.Match[str] | None, dims: tuple[int, ...]) -> None:
    """Refuse a variable whose type is not that of its form, of a source of some dimensions."""
    shown, where = f"@{var.source} of dimensions {list(dims)}", f"@{var.name}"
    expected = TensorType(var.form if match is None else "u8", dims)
    if match is not None:
        what, bits, group, turned = match.groups()
        if len(dims) != 2:
            raise VerifyError(f"is {var.form} of {shown}: only matrices are rounded in groups", where=where)
        rows, columns = reversed(dims) if turned else dims
        if not int(group) or columns % int(group) or (bits == "4" and columns % 2):
            raise VerifyError(f"is {var.form} of {shown}: its rows are no whole groups and bytes", where=where)
        width = columns // int(group) if what == "scales" else columns * int(bits) // 8
        expected = TensorType("f16" if what == "scales" else "i8" if bits == "8" else "u8", (rows, width))
    if (var.type.dtype, var.type.dims) != (expected.dtype, expected.dims):
        raise VerifyError(f"is {var.type.plain}, and {var.form} of {shown} is {expected}", where=where)


def _of_group(var: Var, match: re.Match[str], rows: Array) -> Array:
    """Return the whole numbers or the scales of rows."""
    what, bits, group, _ = match.groups()
    if not np.isfinite(rows).all():
        raise VerifyError("has elements that are not finite, and cannot be rounded to few bits", where=f"@{var.source}")
    codes, scales = (_of_8_bits if bits == "8" else _of_4_bits)(rows.reshape(len(rows), -1, int(group)))
    if not np.isfinite(scales).all():
        raise VerifyError("has elements too large for scales of 16 bits", where=f"@{var.source}", hint="keep it in f32")
    if what == "scales":
        return scales
    flat = codes.reshape(rows.shape)
    return flat if bits == "8" else flat[:, ::2] | flat[:, 1::2] << 4


def _over(groups: Array, scales: Array) -> Array:
    """Divide groups by their scales; a group whose scale is 0 is 0."""
    wide = scales.astype(np.float32)[..., None]
    return np.asarray(np.where(np.abs(wide) > 0, groups / np.where(wide == 0, np.float32(1), wide), np.float32(0)))


def _of_8_bits(groups: Array) -> tuple[Array, Array]:
    with np.errstate(over="ignore"):
        scales = (np.max(np.abs(groups), -1, initial=0) / np.float32(127)).astype(np.float16)
    return np.clip(np.rint(_over(groups, scales)), -127, 127).astype(np.int8), scales


def _of_4_bits(groups: Array) -> tuple[Array, Array]:
    place = np.argmax(np.abs(groups), -1)
    extreme = np.take_along_axis(groups, place[..., None], -1)[..., 0]
    best: tuple[Array, Array] | None = None
    least = np.full(extreme.shape, np.inf, np.float32)
    for part in _TRIED:
        with np.errstate(over="ignore"):
            scales = (extreme * np.float32(part / -8)).astype(np.float16)
        codes = np.clip(np.rint(_over(groups, scales)) + 8, 0, 15).astype(np.uint8)
        error = np.sum((((codes.astype(np.float32) - 8) * scales.astype(np.float32)[..., None]) - groups) ** 2, -1)
        if best is None:
            best, least = (codes, scales), error
            continue
        better = error < least
        least = np.where(better, error, least)
        best = np.where(better[..., None], codes, best[0]), np.where(better, scales, best[1])
    assert best is not None
    return best


@dataclass(frozen=True)
class DerivedTensor:
    """A variable that is computed from the model's, for which it stands until its elements are needed."""

    var: Var
    source: Any

    @property
    def dtype(self) -> np.dtype[Any]:
        return numpy_dtype(self.var.type.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.var.type.dims

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """Compute the elements; they are in memory as long as the result is."""
        return derive(self.var, self.source).astype(self.dtype if dtype is None else dtype, copy=False)


class DerivedWeights(Mapping[str, Any]):
    """The weights of a model, and what stands for those that variables of a module are computed from them."""

    def __init__(self, weights: Mapping[str, Any], variables: Mapping[str, Var]) -> None:
        self._weights = weights
        self._derived = {name: var for name, var in variables.items() if var.source and name not in weights}

    def __getitem__(self, name: str) -> Any:
        var = self._derived.get(name)
        if var is None:
            return self._weights[name]
        if var.source not in self._weights:
            raise VerifyError(f"is computed from @{var.source}, which has no elements", where=f"@{name}")
        return DerivedTensor(var, self._weights[var.source])

    def __iter__(self) -> Iterator[str]:
        yield from self._weights
        yield from self._derived

    def __len__(self) -> int:
        return len(self._weights) + len(self._derived)
