"""The effect of rounding on the results of a program for the very inputs that it got.

The interpreter runs in float64, and moves numbers where a program in the declared types would round them: results that
have no place in their type, and operands of everything that adds up, whose partial sums are rounded, too. Numbers that
are exact in their type stay, so that a program that rounds nowhere is moved nowhere. Each move is a random share of
SIZE roundings. Of a sum of n terms it is sqrt(n) / LANES times as much, as partial sums of so many lanes err. Means of
rows are made in more lanes.

In: a function that runs the program with such noise, and its results in float64 without. Out: for each result how far
the noise moved it, at most and on the average (root of the mean square). The results of a right program are not much
further off: `allowed_by` says how far. Sums that cancel, divisions by almost nothing and numbers that are rounded to
steps of quantisation all show in that.

Limits: another formula of the same value may cancel where this one does not (a variance as the mean of squares less the
square of the mean). Overflow is not modelled.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Generic, TypeVar

import numpy as np

from penstock.ir.graph import Op
from penstock.ir.interpreter.ops import Array
from penstock.ir.ops import definition
from penstock.ir.types import FLOATS, UNIT_ROUNDOFF, numpy_dtype

from .tolerance import terms_of

K = TypeVar("K", bound=Hashable)
# A right program may be SLACK times as far off as noise of SIZE roundings moves its results in so many runs.
SIZE, SLACK = 2.0, 2.0
RUNS, MORE_RUNS = 8, 24
LANES = 4.0
# Binary digits that a constant has by nature, like 0.75; with more it was rounded.
_DIGITS = 8
# Sums of 16-bit numbers are made in float32.
_SUM = UNIT_ROUNDOFF["f32"]
# Operations that only choose among their operands, or flip a sign.
_CHOOSE = frozenset(
    [
        "neg",
        "abs",
        "sign",
        "floor",
        "round",
        "relu",
        "relu_grad",
        "detach",
        "minimum",
        "maximum",
        "where",
        "max",
        "max_pool",
        "max_pool_grad",
        "topk",
        "gather",
        "random",
    ]
)
_ADD_UP = ("contract", "reduce", "window", "row", "optimizer")
# Rows whose sums have positive terms alone: nothing cancels in them.
_POSITIVE = ("softmax", "log_softmax", "cross_entropy")
# Rows from which their mean is taken: of those that hardly vary, sums have terms of one sign, in full vectors.
_CENTRED, _VECTOR = ("layer_norm",), 16.0
_OF_FIRST = ("matmul", "conv", "conv_grad_input", "conv_grad_weight")


@dataclass(frozen=True)
class Distance:
    """The distance of two arrays over the largest magnitude of the expected one: at most, and root mean square."""

    worst: float = 0.0
    mean: float = 0.0

    def __or__(self, other: Distance) -> Distance:
        return Distance(max(self.worst, other.worst), max(self.mean, other.mean))

    def within(self, limit: Distance) -> bool:
        """Return whether both are at most those of a limit; nan is not."""
        return self.worst <= limit.worst and self.mean <= limit.mean

    def times(self, factor: float) -> Distance:
        """Return a multiple."""
        return Distance(factor * self.worst, factor * self.mean)


NOWHERE = Distance(float("inf"), float("inf"))


def same_gaps(computed: Array, expected: Array) -> bool:
    """Return whether nothing is finite in either array, of which there is something."""
    a, b = (np.asarray(x, dtype=np.float64) for x in (computed, expected))
    return a.shape == b.shape and bool(b.size) and not np.isfinite(a).any() and not np.isfinite(b).any()


def distance(computed: Array, expected: Array) -> Distance:
    """Return how far an array is from another.

    It is infinite where shapes or non-finite elements differ; and zero where nothing is finite in both.
    """
    a, b = np.asarray(computed, dtype=np.float64), np.asarray(expected, dtype=np.float64)
    if a.shape != b.shape:
        return NOWHERE
    finite = np.isfinite(b)
    if not np.array_equal(np.isfinite(a), finite):
        return NOWHERE
    if not finite.any():
        return Distance()
    apart = np.abs(a[finite] - b[finite]) / (float(np.abs(b[finite]).max()) or 1.0)
    return Distance(float(apart.max()), float(np.sqrt(np.mean(np.square(apart)))))


def relative_error(computed: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest difference over the largest magnitude.

    It is infinite when shapes or non-finite elements differ, or when nothing is finite.
    """
    a, b = np.asarray(computed, dtype=np.float64), np.asarray(expected, dtype=np.float64)
    if a.shape != b.shape or not np.array_equal(np.isfinite(a), np.isfinite(b)):
        return float("inf")
    finite = np.isfinite(b)
    if not finite.any():
        return 0.0 if not finite.size else float("inf")
    scale = float(np.abs(b[finite]).max())
    return float(np.abs(a[finite] - b[finite]).max()) / (scale or 1.0)


class RoundingNoise:
    """Moves of numbers as roundings of their types make them, drawn from a seed."""

    def __init__(self, *seed: int) -> None:
        self._source = np.random.default_rng(seed)

    def _moved(self, array: Array, roundoff: float) -> Array:
        share = self._source.random(array.shape, np.float32) * 2 - 1
        moved: Array = array * (1.0 + SIZE * roundoff * share)
        return moved

    def operands(self, op: Op, ins: list[Array]) -> list[Array]:
        """Move the operands of sums, unless all of them are whole numbers, whose sums are exact."""
        if op.kind in _CHOOSE or (definition(op.kind).family not in _ADD_UP and op.kind not in ("batch_norm", "pow")):
            return ins
        floats = [i for i, v in enumerate(op.ins) if v.type.dtype in FLOATS]
        if not floats or all(np.array_equal(ins[i], np.rint(ins[i])) for i in floats):
            return ins
        lanes = _VECTOR if op.kind in _CENTRED else LANES
        roundoff = _SUM * (1.0 if op.kind in _POSITIVE else max(1.0, sqrt(terms_of(op)) / lanes))
        moving = floats[:1] if op.kind in _OF_FIRST else floats
        return [self._moved(x, roundoff) if i in moving else x for i, x in enumerate(ins)]

    def results(self, op: Op, results: tuple[Array, ...]) -> tuple[Array, ...]:
        """Move results that are not exact in their type."""
        if op.kind in _CHOOSE or definition(op.kind).family in ("layout", "source"):
            return results
        return tuple(self._rounded(x, v.type.dtype) for x, v in zip(results, op.outs, strict=True))

    def _rounded(self, array: Array, dtype: str) -> Array:
        if dtype not in FLOATS or dtype == "f64":
            return array
        with np.errstate(all="ignore"):
            exact = array.astype(numpy_dtype(dtype)).astype(np.float64) == array
            return np.where(exact, array, self._moved(array, UNIT_ROUNDOFF[dtype]))


class ConstantNoise:
    """Constants as the numbers that they may have been rounded from: the square root of 2 is in no file.

    Those with few digits are what they are.
    """

    def __init__(self, *seed: int) -> None:
        self._source = np.random.default_rng(seed)

    def operands(self, op: Op, ins: list[Array]) -> list[Array]:
        """Leave operands as they are."""
        return ins

    def results(self, op: Op, results: tuple[Array, ...]) -> tuple[Array, ...]:
        """Move constants by up to a rounding of their type."""
        dtype = op.outs[0].type.dtype if op.outs else ""
        if op.kind != "const" or dtype not in FLOATS or dtype == "f64":
            return results
        array = results[0]
        mantissa = np.frexp(array)[0] * 2**_DIGITS
        share = self._source.choice([-1.0, 1.0], array.shape) * UNIT_ROUNDOFF[dtype]
        return (np.where(mantissa == np.rint(mantissa), array, array * (1 + share)),)


class RoundingEffect(Generic[K]):
    """The largest moves of the results of a program by noise, in a number of runs. None is made before it is asked for.

    `run` runs the program with noise, and `exact` are its results in float64.
    """

    def __init__(
        self, run: Callable[[RoundingNoise], Mapping[K, Array]], exact: Mapping[K, Array], seed: int = 0
    ) -> None:
        self._run, self.exact, self._seed = run, exact, seed
        self._spread = dict.fromkeys(exact, Distance())
        self.runs = 0

    def moved(self, runs: int) -> Mapping[K, Distance]:
        """Return how far results are moved in at least so many runs."""
        while self.runs < runs:
            noisy = self._run(RoundingNoise(self._seed, self.runs))
            self._spread = {key: self._spread[key] | distance(noisy[key], array) for key, array in self.exact.items()}
            self.runs += 1
        return self._spread


def allowed_by(spread: Distance) -> Distance:
    """Return how far a right result may be off, where noise moves it by so much."""
    return spread.times(SLACK)


def changed_by(roundoff: float, array: np.ndarray, source: np.random.Generator) -> np.ndarray:
    """Return each number a little more or less, in float64; arrays without floats stay."""
    if array.dtype.kind != "f" and array.dtype.name != "bfloat16":
        return array
    moved: np.ndarray = array.astype(np.float64) * (1 + roundoff * source.choice([-1.0, 1.0], array.shape))
    return moved
