"""Elements that say what a tensor is: sinusoids, windows, bands, grids, masks.

Each function takes the elements of a floating-point tensor and answers by computing, never by a name. All are false for
tensors as training begins with them: random numbers, one number throughout, the identity.

    is_sinusoids   x[t-1] + x[t+1] = 2 cos(w) x[t] along an axis, with one w per line: Fourier bases, cosine transforms,
                   tables of positions and rotations. The rows of a windowed basis w[n] cos(k n) fulfil it along k.
    is_window      Hann, Hamming, Blackman, Bartlett and sine windows, periodic or symmetric, times any number
    is_bands       rows that are zero but for one hill each, with hills in order: banks of mel filters
    is_steps       equal steps or equal ratios along one axis: positions, coordinates, frequencies
    is_mask        zero where something counts, and a large negative number or minus infinity where it does not

A tensor that plainly is none of these is recognised by a few of its lines, without a pass over all elements.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

# Below so many elements along an axis, small numbers fulfil a law by chance.
FEWEST = 8
# Angles of long tables were rounded to f32 before their sine was taken. Types of 16 bits round the sine, too.
_ROUNDED, _ROUNDED_16 = 2e-3, 4e-2
# Smaller parts of the largest element are rounding.
_NOTHING = 1e-6
# An oscillation of less than this angle per element may be any smooth curve.
_SLOW = 2 * np.cos(0.1)
# The lines that are looked at before all of them are, and how far.
_SAMPLE, _PREFIX = 16, 64
_LARGE = -1e4


def is_one_number(array: np.ndarray) -> bool:
    """Return whether all elements are equal."""
    return bool(array.size) and bool(np.all(array == array.reshape(-1)[0]))


def is_sinusoids(array: np.ndarray) -> bool:
    """Return whether all lines along an axis are sinusoids, an eighth of them of a frequency that is not low.

    Real and imaginary parts may stand in two halves of the lines, or by turns.
    """
    rounded = _ROUNDED if array.dtype.itemsize > 2 else _ROUNDED_16
    for lines in _matrices(array):
        middle = lines.shape[1] // 2
        for parts in ((lines,), (lines[:, :middle], lines[:, middle:]), (lines[:, ::2], lines[:, 1::2])):
            few = parts[0][:: max(1, len(lines) // _SAMPLE), :_PREFIX]
            if _oscillate(few, rounded) and all(_oscillate(part, rounded) for part in parts):
                return True
    return False


def _matrices(array: np.ndarray) -> Iterator[np.ndarray]:
    """Yield a tensor as matrices of lines, along its first and along its last axis of more than one element."""
    shape = [size for size in array.shape if size > 1]
    if len(shape) < 2 or not array.size:
        return
    yield array.reshape(-1, shape[-1])
    yield array.reshape(shape[0], -1).T


def _oscillate(lines: np.ndarray, rounded: float) -> bool:
    """Return whether lines are sinusoids. The first and the last element may have another weight, as in transforms."""
    if lines.shape[1] < FEWEST:
        return False
    x = lines[:, 1:-1].astype(np.float64)
    largest = np.abs(x).max(axis=1)
    if not np.isfinite(largest).all():
        return False
    some = largest > _NOTHING * largest.max()
    x, largest = x[some], largest[some]
    middle, sides = x[:, 1:-1], x[:, :-2] + x[:, 2:]
    squares = (middle * middle).sum(axis=1)
    if not squares.all():
        return False
    c = (middle * sides).sum(axis=1) / squares
    error = np.abs(sides - c[:, None] * middle).max(axis=1, initial=0)
    fits = (error <= rounded * largest) & (np.abs(c) <= 2 + rounded)
    moving = int(np.count_nonzero(np.abs(c) < _SLOW))
    return bool(fits.all()) and moving >= 2 and 8 * moving >= len(lines)


def is_window(array: np.ndarray) -> bool:
    """Return whether a vector is a known window."""
    if array.size < FEWEST or max(array.shape) != array.size:
        return False
    vector = array.reshape(-1).astype(np.float64)
    largest = np.abs(vector).max()
    if not np.isfinite(largest) or largest == 0:
        return False
    return any(np.allclose(vector / largest, window / window.max(), atol=_ROUNDED) for window in _windows(vector.size))


def _windows(size: int) -> Iterator[np.ndarray]:
    for whole in (size, size + 1):  # symmetric, and periodic: the first elements of the next longer one
        hann = np.hanning(whole)
        for window in (hann, np.sqrt(hann), np.hamming(whole), np.blackman(whole), np.bartlett(whole)):
            yield window[:size]
    yield np.hanning(size + 2)[1:-1]
    yield np.sin(np.pi * (np.arange(size) + 0.5) / size)


def is_bands(array: np.ndarray) -> bool:
    """Return whether the rows, or the columns, are hills that move to the right and are zero elsewhere."""
    shape = [size for size in array.shape if size > 1]
    if len(shape) != 2 or not array.size:
        return False
    matrix = array.reshape(shape)
    if matrix[:_SAMPLE].min() < 0 or matrix.min() != 0 or 2 * np.count_nonzero(matrix) > matrix.size:
        return False
    matrix = matrix.astype(np.float64)
    return _hills(matrix) or _hills(matrix.T)


def _hills(rows: np.ndarray) -> bool:
    """Return whether each row rises to one peak and falls, with peaks in order. Some have to be of more than a step."""
    rows = rows[rows.any(axis=1)]
    if len(rows) < 4 or rows.shape[1] < FEWEST:
        return False
    peaks = rows.argmax(axis=1)
    if (np.diff(peaks) < 0).any() or 2 * len(np.unique(peaks)) < len(peaks):
        return False
    steps = np.diff(rows, axis=1)
    places = np.arange(rows.shape[1] - 1)
    rising = (steps >= 0) | (places >= peaks[:, None])
    falling = (steps <= 0) | (places < peaks[:, None])
    wide = int(np.count_nonzero(np.count_nonzero(rows, axis=1) >= 3))
    uneven = any(len(np.unique(row[row > 0])) > 1 for row in rows)
    return bool(rising.all() and falling.all()) and 4 * wide >= len(rows) and uneven


def is_steps(array: np.ndarray) -> bool:
    """Return whether elements go along one axis in equal steps or ratios, or do so in each part of the last axis."""
    if _steps(array):
        return True
    parts = array.shape[-1] if array.ndim > 1 else 0
    return 2 <= parts <= 3 and all(_steps(array[..., i]) for i in range(parts))


def _steps(array: np.ndarray) -> bool:
    axes = [axis for axis, size in enumerate(array.shape) if size > 1]
    moving = [axis for axis in axes if not np.array_equal(array.take([0], axis), array.take([1], axis))]
    if len(moving) != 1 or array.shape[moving[0]] < FEWEST:
        return False
    lines = np.moveaxis(array, moving[0], -1).reshape(-1, array.shape[moving[0]])
    if not (lines == lines[:1]).all():
        return False
    line = lines[0].astype(np.float64)
    if not np.isfinite(line).all():
        return False
    return _equal(np.diff(line), np.abs(line).max()) or (bool((line > 0).all()) and _equal(np.diff(np.log(line)), 1.0))


def _equal(steps: np.ndarray, size: float) -> bool:
    """Return whether steps are equal and not zero, within the rounding of f32 or of a type of 16 bits."""
    return bool(np.abs(steps).min() > 1e-3 * size / len(steps)) and bool(np.ptp(steps) <= 1e-3 * np.abs(steps).max())


def is_mask(array: np.ndarray) -> bool:
    """Return whether elements are zero or one large negative number, and both are there."""
    low = array.min() if array.size else 0
    return bool(low <= _LARGE) and bool(array.max() == 0) and bool(((array == 0) | (array == low)).all())


def is_choice(array: np.ndarray) -> bool:
    """Return whether elements are 0 and 1, and both are there."""
    return bool(array.size) and bool(((array == 0) | (array == 1)).all()) and not is_one_number(array)
