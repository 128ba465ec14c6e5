"""The elements of variables that are computed from those of the model: weights rounded to fewer bits.

A variable that says `from @w as FORM` in the text of a module is a function of the model's `@w`. The forms are

    bf16                            the nearest numbers of 16 bits
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
from typing import Any

import numpy as np

from penstock.ir.graph import Var
from penstock.ir.types import numpy_dtype
from penstock.support.errors import VerifyError

Array = np.ndarray[Any, Any]

_FORM = re.compile(r"(codes|scales)([48])\.(\d+)(\.turned)?")
# Scales of 4 bits that are tried, as parts of that by which the largest element is -8.
_TRIED = (1.0, 0.95, 0.9, 0.85)
_TINY = np.finfo(np.float32).tiny


def is_form(form: str) -> bool:
    """Return whether there is such a form."""
    return form == "bf16" or _FORM.fullmatch(form) is not None


def derive(var: Var, source: Array) -> Array:
    """Return the elements of a variable, computed from those of the model's variable."""
    if var.form == "bf16":
        return source.astype(np.float32).astype(numpy_dtype("bf16"))
    match = _FORM.fullmatch(var.form)
    if match is None:
        raise VerifyError(f"is of an unknown form {var.form!r}", where=f"@{var.name}")
    what, bits, group, turned = match.groups()
    rows = np.ascontiguousarray((source.T if turned else source).astype(np.float32))
    if not np.isfinite(rows).all():
        raise VerifyError("has elements that are not finite, and cannot be rounded to few bits", where=f"@{var.source}")
    codes, scales = (_of_8_bits if bits == "8" else _of_4_bits)(rows.reshape(len(rows), -1, int(group)))
    if not np.isfinite(scales).all():
        raise VerifyError("has elements too large for scales of 16 bits", where=f"@{var.source}", hint="keep it in f32")
    if what == "scales":
        return scales
    flat = codes.reshape(rows.shape)
    return flat.astype(np.int8) if bits == "8" else (flat[:, ::2] | flat[:, 1::2] << 4).astype(np.uint8)


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


class DerivedWeights(Mapping[str, Array]):
    """The weights of a model, and those that variables of a module are computed from them, when they are asked for."""

    def __init__(self, weights: Mapping[str, Array], variables: Mapping[str, Var]) -> None:
        self._weights = weights
        self._derived = {name: var for name, var in variables.items() if var.source and name not in weights}

    def __getitem__(self, name: str) -> Array:
        var = self._derived.get(name)
        if var is None:
            return self._weights[name]
        if var.source not in self._weights:
            raise VerifyError(f"is computed from @{var.source}, which has no elements", where=f"@{name}")
        return derive(var, np.asarray(self._weights[var.source]))

    def __iter__(self) -> Iterator[str]:
        yield from self._weights
        yield from self._derived

    def __len__(self) -> int:
        return len(self._weights) + len(self._derived)
