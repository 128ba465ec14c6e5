"""The table of operations and the parts of the compiler that have a rule for them.

It is read from the op table and the tables of rules.

A rule in the table does not show that it works: nothing is tried for this matrix.
"""

from __future__ import annotations

from penstock.ir.interpreter.ops import NUMPY
from penstock.ir.ops import OPS
from penstock.passes.rewrite.decompose import DECOMPOSE
from penstock.passes.training.vjp import FLAT, STOPS, VJP

STATE = "state"
# The meanings of the words in the columns.
MEANINGS = {
    "rule": "there is one, and it was not tried for this table; the tests try those that come with Penstock",
    "built in": "nothing to be tried: the interpreter and kernels take variables as they are",
    "decomposed": "primitives take its place before gradients and kernels are looked up",
    "zero": "no gradient passes",
    "-": "none; of gradients, none is ever asked for (booleans, constants, gradients, updates)",
}


def coverage() -> tuple[list[str], list[list[str]]]:
    """Return header and rows of the matrix."""
    from penstock.backends.tvm.kernels import MAIN  # lazy: heavy
    from penstock.backends.tvm.kernels.tools.elements import INDEXED, POINTWISE  # lazy: heavy

    kernels = {*MAIN, *INDEXED, *POINTWISE}
    rows = []
    for name, row in OPS.items():
        missing = "decomposed" if name in DECOMPOSE else "-"
        gradient = "rule" if name in VJP else "zero" if name in (*FLAT, *STOPS) else missing
        kernel = "rule" if name in kernels else "built in" if row.family == STATE else missing
        numpy = "rule" if name in NUMPY else "built in" if row.family == STATE else "-"
        rows.append([name, row.family, numpy, gradient, kernel, row.doc])
    return ["op", "family", "numpy", "gradient", "tvm cpu", "meaning"], rows
