"""The meaning of each row of the op table in NumPy: `NUMPY[kind](inputs, attrs) -> results`, for every row but the
state operations and what the ranks of a group do together (ir/interpreter/collectives.py).

`attrs` are complete (see `complete_attrs`). Each function is the definition that kernels are tested against, so it is
written to be obviously right, not to be fast. Arithmetic is done in the element type of the operands, long sums in
float64; a result may be wider than its declared type, and `apply_op` rounds it. Half-precision operands are widened to
float32 first, as real kernels do.

Known limits: `div` of the smallest integer by -1 wraps, and integer division by zero gives 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.ir.attrs import Attr
from penstock.ir.graph import Op
from penstock.ir.ops import complete_attrs
from penstock.ir.types import FLOATS, numpy_dtype

from . import caches, contractions, draws, elementwise, indexing, layout, quantised, reductions, rows, training, windows
from .arrays import Array, Rule
from .error_function import erf

TYPED, F64 = "typed", "f64"
PRECISIONS = (TYPED, F64)

NUMPY: dict[str, Rule] = {
    **elementwise.RULES,
    **draws.RULES,
    **layout.RULES,
    **reductions.RULES,
    **contractions.RULES,
    **quantised.RULES,
    **windows.RULES,
    **rows.RULES,
    **indexing.RULES,
    **caches.RULES,
    **training.RULES,
}


def array_dtype(dtype: str, precision: str) -> np.dtype[Any]:
    """Return the element type that holds `dtype`: under precision f64 every float is float64."""
    return np.dtype(np.float64) if precision == F64 and dtype in FLOATS else numpy_dtype(dtype)


@dataclass(frozen=True, slots=True)
class Prepared:
    """The facts of an op that do not depend on its operands: complete attributes, which operands are widened, and
    the element types that hold its results."""

    attrs: dict[str, Attr]
    widened: tuple[bool, ...]
    dtypes: tuple[np.dtype[Any], ...]


def prepare_op(op: Op, precision: str = TYPED) -> Prepared:
    """Prepare an op that is applied many times. Raise TypeError for attributes that do not fit."""
    attrs: dict[str, Attr] = complete_attrs(op)
    if precision == F64 and attrs.get("dtype") in FLOATS and op.kind != "bitcast":
        attrs["dtype"] = "f64"
    widened = tuple([v.type.dtype in ("f16", "bf16") and precision == TYPED for v in op.ins])
    return Prepared(attrs, widened, tuple([array_dtype(v.type.dtype, precision) for v in op.outs]))


def apply_op(
    op: Op, inputs: Sequence[Array], precision: str = TYPED, prepared: Prepared | None = None
) -> tuple[Array, ...]:
    """Return the results of one pure op, in their declared element types (or float64)."""
    ready = prepare_op(op, precision) if prepared is None else prepared
    if op.kind == "bitcast":  # is about the bits of the types as declared
        (bits,) = NUMPY[op.kind]([inputs[0].astype(numpy_dtype(op.ins[0].type.dtype), copy=False)], ready.attrs)
        return (bits.astype(ready.dtypes[0], copy=False),)
    wide = [x.astype(np.float32) if half else x for x, half in zip(inputs, ready.widened, strict=True)]
    with np.errstate(all="ignore"):  # inf and nan are results like any other
        results = NUMPY[op.kind](wide, ready.attrs)
    return tuple([np.asarray(x).astype(dtype, copy=False) for x, dtype in zip(results, ready.dtypes, strict=True)])


__all__ = ["F64", "NUMPY", "PRECISIONS", "TYPED", "Array", "Prepared", "apply_op", "array_dtype", "erf", "prepare_op"]
