"""What each row of the op table means, in NumPy: `NUMPY[kind](inputs, attrs) -> results`, for every row but the state operations.

`attrs` are complete (see `complete_attrs`). Each function is the definition that kernels are tested against, so it is written to be
obviously right, not to be fast. Arithmetic is done in the element type of the operands, long sums in float64; a result may be wider than
its declared type, and `apply_op` rounds it. Half-precision operands are widened to float32 first, as real kernels do.

Known limits: `div` of the smallest integer by -1 wraps, and integer division by zero gives 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..graph import Attr, Op
from ..ops import complete_attrs
from ..types import FLOATS, numpy_dtype
from . import contractions, draws, elementwise, indexing, layout, reductions, rows, training, windows
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
    **windows.RULES,
    **rows.RULES,
    **indexing.RULES,
    **training.RULES,
}


def array_dtype(dtype: str, precision: str) -> np.dtype[Any]:
    """The element type that holds `dtype`: under precision f64 every float is float64."""
    return np.dtype(np.float64) if precision == F64 and dtype in FLOATS else numpy_dtype(dtype)


def apply_op(op: Op, inputs: Sequence[Array], precision: str = TYPED) -> tuple[Array, ...]:
    """The results of one pure op, in their declared element types (or float64)."""
    attrs: dict[str, Attr] = complete_attrs(op)
    if op.kind == "bitcast":  # is about the bits of the types as declared
        (bits,) = NUMPY[op.kind]([inputs[0].astype(numpy_dtype(op.ins[0].type.dtype), copy=False)], attrs)
        return (bits.astype(array_dtype(op.outs[0].type.dtype, precision), copy=False),)
    if precision == F64 and attrs.get("dtype") in FLOATS:
        attrs["dtype"] = "f64"
    halves = [v.type.dtype in ("f16", "bf16") and precision == TYPED for v in op.ins]
    wide = [x.astype(np.float32) if half else x for x, half in zip(inputs, halves, strict=True)]
    with np.errstate(all="ignore"):  # inf and nan are results like any other
        found = NUMPY[op.kind](wide, attrs)
    return tuple(np.asarray(x).astype(array_dtype(v.type.dtype, precision), copy=False) for x, v in zip(found, op.outs, strict=True))


__all__ = ["F64", "NUMPY", "PRECISIONS", "TYPED", "Array", "apply_op", "array_dtype", "erf"]
