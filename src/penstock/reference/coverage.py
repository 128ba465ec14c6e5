"""Which part of the compiler supports which operation: one row per row of the op table, read from the tables themselves."""

from __future__ import annotations

from penstock.ir.numpy_ops import NUMPY
from penstock.ir.ops import OPS
from penstock.passes.decompose import DECOMPOSE
from penstock.passes.vjp import FLAT, STOPS, VJP

STATE = "state"


def coverage() -> tuple[list[str], list[list[str]]]:
    """Header and rows of the matrix."""
    from penstock.backends.tvm.kernels import MAIN
    from penstock.backends.tvm.kernels.elements import INDEXED, POINTWISE

    kernels = {*MAIN, *INDEXED, *POINTWISE}
    rows = []
    for name, row in OPS.items():
        missing = "decomposed" if name in DECOMPOSE else "-"
        gradient = "yes" if name in VJP else "zero" if name in (*FLAT, *STOPS) else missing
        kernel = "yes" if name in kernels or row.family == STATE else missing
        numpy = "yes" if name in NUMPY or row.family == STATE else "-"
        rows.append([name, row.family, numpy, gradient, kernel, row.doc])
    return ["op", "family", "numpy", "gradient", "tvm cpu", "meaning"], rows
