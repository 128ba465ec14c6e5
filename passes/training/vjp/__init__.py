"""Gradient rules, a dictionary over the op table: `VJP[kind](b, op, *grads)`, one file per family as in ir/ops.

`grads` are the gradients of the results (None where nothing depends on one; an op with one result always gets it). A
rule returns one entry per operand: None for no gradient, else a function that emits the operations and returns the
gradient. Only wanted entries are called, so nothing dead is emitted. A gradient may have the shape of the broadcast
result: the caller sums it to the shape of the operand.

Rules refer to forward values freely: the emitter decides what is saved and what is computed again. Where a rule has the
choice it uses the value that other operations need as well (relu, exp, softmax use their result, not their operand).

Ties: `max`, `minimum` and `maximum` share the gradient evenly among equal elements; relu has gradient 0 at 0; max_pool
gives it to the first.
"""

from __future__ import annotations

from . import contractions, elementwise, indexing, layout, reductions, rows, training, windows
from .emitter import Rule, sum_to

VJP: dict[str, Rule] = {
    **elementwise.RULES,
    **layout.RULES,
    **reductions.RULES,
    **contractions.RULES,
    **windows.RULES,
    **rows.RULES,
    **indexing.RULES,
    **training.RULES,
}

# Float operations, or choices by float values, whose gradient is zero wherever it exists. Training through them has no
# effect.
FLAT = ("floor", "round", "sign", "argmax")
# Results, by number, through which no gradient passes although the operation has a rule.
STATISTICS: dict[str, tuple[int, ...]] = {"attention": (1, 2)}
# Gradients end here because the model says so.
STOPS = ("detach",)

__all__ = ["FLAT", "STATISTICS", "STOPS", "VJP", "sum_to"]
