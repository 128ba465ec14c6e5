"""Fourier transforms, as products with matrices of cosines and sines."""

from __future__ import annotations

from math import pi, prod

import numpy as np

from penstock.frontends.writer import Writer
from penstock.ir.graph import Value

from .layout import concat, cut, reshape


def along(w: Writer, x: Value, axis: int, matrix: np.ndarray) -> Value:
    """Multiply a matrix with the entries along one dimension."""
    dims = x.type.dims
    rows = reshape(w, x, (prod(dims[:axis]), dims[axis], prod(dims[axis + 1 :])))
    return reshape(w, w.emit("matmul", matrix, rows), (*dims[:axis], len(matrix), *dims[axis + 1 :]))


def fourier(w: Writer, x: Value, axis: int, length: int, *, inverse: bool, onesided: bool) -> Value:
    """Compute the discrete Fourier transform along `axis`.

    The last dimension of x holds the real part, or the real and the imaginary one. Forward, `onesided` keeps the first
    half of the result. With `inverse`, x is that half and the result is real.
    """
    dims, last = x.type.dims, x.type.rank - 1
    w.require(
        dims[-1] in (1, 2) and axis != last and length > 0,
        f"the last dimension of {x.type} must be the real and imaginary part",
    )
    # In f64, because sums are long and terms that cancel are to give 0. A fast transform rounds less often.
    wide = w.cast(x, "f64")
    count = length // 2 + 1 if onesided and not inverse else length
    have = min(dims[axis], length // 2 + 1 if onesided and inverse else length)
    angles = 2 * pi / length * np.outer(np.arange(count), np.arange(have)) * (1 if inverse else -1)
    scale = np.full(have, 1 / length if inverse else 1.0)
    if onesided and inverse:  # the other half is the mirror image
        scale[1 : (length + 1) // 2] *= 2
    cosines, sines = np.cos(angles) * scale, np.sin(angles) * scale
    wide = cut(w, wide, axis, 0, have)
    real = cut(w, wide, last, 0, 1)
    if dims[-1] == 1:
        parts = [along(w, real, axis, m) for m in ([cosines] if onesided and inverse else [cosines, sines])]
    else:
        imaginary = cut(w, wide, last, 1, 2)
        parts = [w.emit("sub", along(w, real, axis, cosines), along(w, imaginary, axis, sines))]
        if not (onesided and inverse):
            parts.append(w.emit("add", along(w, real, axis, sines), along(w, imaginary, axis, cosines)))
    y = concat(w, parts, last)
    return w.cast(y, x.type.dtype)
