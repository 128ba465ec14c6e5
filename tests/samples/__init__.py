"""Sample operands for every row of the op table: one table for every judge of the rows.

`SAMPLES` are operations that must work: the interpreter is compared with torch on them, compiled kernels with the interpreter, on every
device. `REFUSED` are operations that must be refused when their types are inferred, with a message that says why.

A row is sampled with ragged sizes (no multiple of a vector), broadcasting, dimensions of size 1 and 0, a scalar where it takes one, every
element type it claims (`T` in a type stands for it), and the attributes that change its meaning. Half-precision samples are small: they are
about the element type, the others about loops.

One file per family, as in ir/ops; each adds to the tables when it is imported. Data are drawn from a seed that belongs to the sample, so every
judge sees the same numbers.
"""

from __future__ import annotations

from . import (
    contractions,
    draws,
    elementwise,
    indexing,
    layout,
    quantised,
    reductions,
    rows,
    sources,
    training,
    windows,
)
from .data import HALF, nasty
from .related import RELATED
from .table import REFUSED, SAMPLES, Refused, Sample, fill, is_open, refuse, samples_of, touched, unsampled

FAMILIES = (sources, elementwise, draws, layout, reductions, contractions, quantised, windows, rows, indexing, training)

__all__ = [
    "FAMILIES",
    "HALF",
    "REFUSED",
    "RELATED",
    "SAMPLES",
    "Refused",
    "Sample",
    "fill",
    "is_open",
    "nasty",
    "refuse",
    "samples_of",
    "touched",
    "unsampled",
]
