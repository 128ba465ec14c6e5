"""The rules that tell parameters from constants, as one table.

    RULES      rows of name, verdict, reason and condition, in the order in which they are asked
    decide     a stored tensor -> the row that decides on it, or None: it is trained as a weight
    looks_set  a stored tensor -> the row by which its elements are those of a constant, whatever its use

A row is asked for each reader of a tensor (uses.py), and the first that fits decides for that reader. The tensor is
trained if any reader needs it to be, and constant if rows say so for every reader. A tensor that no row fits is
trained.

Known limit: a random matrix that the module holds as a buffer is like a weight in all that a file says, and is trained.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from . import elements
from .names import is_path, made_by_exporter, says_buffer, says_parameter
from .uses import RESULT, Reader

# Operators without a gradient, and the operands that others take as settings. They never train what they read.
_NO_GRADIENT = frozenset(
    {"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "IsInf", "IsNaN", "Range", "Shape", "Size", "Mod",
     "Sign", "Floor", "Ceil", "Round", "ArgMax", "ArgMin", "NonMaxSuppression", "TopK"}
)  # fmt: skip
_SETTINGS = {
    "Dropout": (1,), "OneHot": (2,), "Pad": (2,), "Resize": (1, 2), "Upsample": (1,),
    "QuantizeLinear": (1,), "DequantizeLinear": (1,), "QLinearConv": (1, 4, 6), "QLinearMatMul": (1, 4, 6),
    "com.microsoft.QuantizeLinear": (1,), "com.microsoft.DequantizeLinear": (1,),
}  # fmt: skip
_ARITHMETIC = frozenset({"Add", "Sub", "Mul", "Div", "Pow", "Neg", "Sqrt", "Reciprocal", "Sum", "Mean", "Exp", "Log"})
_LAYOUT = frozenset({"Concat", "Tile", "Slice", "Split", "ScatterND", "ScatterElements", "Gather", "GatherND", "Pad"})
# Where states begin: operands of loops, and the first states of recurrent layers.
_BEGINNINGS = {"Loop": range(2, 99), "Scan": range(99), "LSTM": (5, 6), "GRU": (5,), "RNN": (5,)}
_DIVIDED = frozenset({"Sqrt 0", "Reciprocal 0", "Div 1", "Log 0", "Pow 0"})
# The largest number that is added only to keep a root, a logarithm or a quotient finite.
_TINY = 1e-2


@dataclass(frozen=True)
class Stored:
    """A stored floating-point tensor. `read` gives its elements, `from_torch` says that torch's exporter named it."""

    name: str
    shape: tuple[int, ...]
    readers: Sequence[Reader]
    read: Callable[[], np.ndarray]
    from_torch: bool = False

    @cached_property
    def array(self) -> np.ndarray:
        return self.read()

    @property
    def single(self) -> bool:
        return all(size == 1 for size in self.shape)

    @cached_property
    def filled(self) -> bool:
        """The fact that all elements are equal."""
        return elements.is_one_number(self.array)

    @cached_property
    def named(self) -> bool:
        """The fact that the name is that of a parameter. Only torch's exporter does not call numbers of rank 0 so."""
        return (bool(self.shape) or self.in_state_dict) and says_parameter(self.name)

    @cached_property
    def in_state_dict(self) -> bool:
        """The fact that the name is one of torch's state dict: its exporter makes up all others."""
        return self.from_torch and is_path(self.name)

    @cached_property
    def is_sinusoids(self) -> bool:
        return not self.single and elements.is_sinusoids(self.array)

    @cached_property
    def is_window(self) -> bool:
        return not self.single and elements.is_window(self.array)

    @cached_property
    def is_bands(self) -> bool:
        return not self.single and elements.is_bands(self.array)

    @cached_property
    def is_steps(self) -> bool:
        return not self.single and elements.is_steps(self.array)


@dataclass(frozen=True)
class Rule:
    """One row. `trained` is what follows where the condition holds of a tensor and one of its readers."""

    name: str
    trained: bool
    reason: str
    fits: Callable[[Stored, Reader], bool]


# ---------------------------------------------------------------------------------------- conditions


def _is_setting(_: Stored, reader: Reader) -> bool:
    return reader.kind in _NO_GRADIENT or reader.position in _SETTINGS.get(reader.kind, ())


def _is_norm(_: Stored, reader: Reader) -> bool:
    return reader.kind.endswith("Normalization") and reader.position in (1, 2)


def _is_statistic(_: Stored, reader: Reader) -> bool:
    return reader.kind == "BatchNormalization" and reader.position in (3, 4)


def _is_mask(t: Stored, reader: Reader) -> bool:
    if t.single:
        return False
    return (reader.kind in ("Add", "Where") and elements.is_mask(t.array)) or (
        reader.kind in ("Mul", "Sub", "Where") and not t.named and elements.is_choice(t.array)
    )


def _is_expectation(t: Stored, reader: Reader) -> bool:
    """Return whether a convolution with 0, 1, 2, ... takes the mean of a distribution over bins."""
    return (
        (reader.kind, reader.position) == ("Conv", 1)
        and len(t.shape) > 2
        and t.shape[1] == math.prod(t.shape) >= elements.FEWEST
        and np.array_equal(t.array.reshape(-1), np.arange(t.shape[1]))
    )


def _is_bound(_: Stored, reader: Reader) -> bool:
    return reader.kind in ("Max", "Min") or (reader.kind == "Clip" and reader.position in (1, 2))


def _is_exponent(t: Stored, reader: Reader) -> bool:
    return (reader.kind, reader.position) == ("Pow", 1) and t.filled


def _is_choice(t: Stored, reader: Reader) -> bool:
    return reader.kind == "Where" and t.filled


def _is_eps(t: Stored, reader: Reader) -> bool:
    return (
        t.single
        and reader.kind == "Add"
        and bool(reader.then)
        and reader.then <= _DIVIDED
        and 0 < float(t.array.reshape(-1)[0]) <= _TINY
    )


def _is_number(t: Stored, reader: Reader) -> bool:
    return t.single and reader.kind in _ARITHMETIC


def _is_filling(t: Stored, reader: Reader) -> bool:
    placed = reader.kind in _LAYOUT or reader.position in _BEGINNINGS.get(reader.kind, ())
    return placed and (t.single or made_by_exporter(t.name)) and t.filled


# ---------------------------------------------------------------------------------------- the table

# fmt: off
RULES: tuple[Rule, ...] = (
    # Uses that say it all, whatever the name.
    # Exporters that write equal tensors once may call a new scale as they call the running variance.
    Rule("norm", True, "the scale or offset of a normalisation, whatever else reads it",
         _is_norm),
    Rule("setting", False, "compared with, or taken as a setting: no gradient comes back",
         _is_setting),
    Rule("statistic", False, "the running mean or variance of a batch norm",
         _is_statistic),
    # What a name or all elements say of a tensor, whatever its use.
    Rule("buffer-name", False, "the name is one of buffers: running_mean, inv_freq, window, mask, eps and the like",
         lambda t, _: says_buffer(t.name)),
    Rule("mask", False, "0 and a large negative number added to scores, or 0 and 1 as factors",
         _is_mask),
    Rule("sinusoids", False, "rows or columns are sinusoids: a Fourier basis, a table of positions or rotations",
         lambda t, _: t.is_sinusoids),
    Rule("window", False, "a Hann, Hamming, Blackman, Bartlett or sine window",
         lambda t, _: t.is_window),
    Rule("filter-bank", False, "rows are one hill each, in order, and zero elsewhere: a bank of mel filters",
         lambda t, _: t.is_bands),
    Rule("expectation", False, "a convolution with 0, 1, 2, ... takes the mean of a distribution",
         _is_expectation),
    # Parameters whose use alone would not tell.
    Rule("parameter-name", True, "the name is one of parameters: weight, bias, scale, gamma, alpha and the like",
         lambda t, _: t.named),
    # Before the next row: an eps may be added to a product with one channel, too.
    Rule("eps", False, "a small number added before a root, a logarithm or a division",
         _is_eps),
    Rule("bias-of-one", True, "added to the result of a product or convolution with one channel",
         lambda t, reader: t.single and bool(t.shape) and reader.channels == 1),
    # Constants by their use.
    Rule("steps", False, "equal steps or ratios: positions, coordinates of a grid, frequencies",
         lambda t, _: t.is_steps),
    Rule("bound", False, "a bound: an operand of Max, Min or Clip",
         _is_bound),
    # One number of a state dict, as the exponent of a pooling, is a parameter more often than a buffer.
    Rule("state-dict", True, "the name is one of torch's state dict",
         lambda t, _: t.in_state_dict),
    Rule("exponent", False, "one number as the exponent of Pow",
         _is_exponent),
    Rule("choice", False, "one number that Where chooses",
         _is_choice),
    Rule("number", False, "a single number of the formulas: the 1, the 0.5 and the root of 2 of a GELU",
         _is_number),
    Rule("filling", False, "one number, joined, cut or a first state; if of many elements, with a made-up name",
         _is_filling),
    Rule("rank-0", False, "of rank 0, as exporters write the numbers of the source text",
         lambda t, _: not t.shape),
)
# fmt: on

# Rows by which elements alone show a constant.
_BY_ELEMENTS = ("sinusoids", "window", "filter-bank", "expectation", "steps")


def decide(tensor: Stored) -> Rule | None:
    """Return the row that decides on a tensor, or None if it is a weight like any other."""
    constant: Rule | None = None
    with np.errstate(all="ignore"):  # elements of any file, nan and infinity among them
        for reader in tensor.readers or (Reader(RESULT, 0),):
            rule = next((rule for rule in RULES if rule.fits(tensor, reader)), None)
            if rule is None or rule.trained:
                return rule
            constant = constant or rule
    return constant


def looks_set(tensor: Stored) -> Rule | None:
    """Return the row by which the elements of a tensor are those of a constant, if there is one."""
    rows = [rule for rule in RULES if rule.name in _BY_ELEMENTS]
    with np.errstate(all="ignore"):
        return next((rule for rule in rows for reader in tensor.readers if rule.fits(tensor, reader)), None)
