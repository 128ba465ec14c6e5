"""The contents of padding in local tensors: zeros, finite numbers, or anything.

A dimension whose size does not divide is padded on the last ranks. Padding of variables and of what is fed is zero, and
stays zero through operations that make zero of zero. A sum over a split dimension must not see padding that is
anything else: `localize` masks it there. The state of a value counts for all of its uneven dimensions together.

Zeros are taken for zero also where they meet an infinity of the model's own numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

from penstock.ir.attrs import Attr
from penstock.ir.graph import Op
from penstock.ir.ops import OPS
from penstock.ir.types import TensorType

ZERO, FINITE, ANYTHING = 0, 1, 2

_KEEP = {
    "neg", "abs", "sign", "floor", "round", "sin", "atan", "tanh", "erf", "relu", "detach", "gelu", "cast",
    "reshape", "transpose", "slice", "concat", "sum", "mean",
}  # fmt: skip
_FINITE = {"not", "equal", "less", "less_equal", "and", "or", "iota", "random"}
# A finite number makes a finite number, an infinity or a nan may stay one.
_BOUNDED = {"cos", "sigmoid"}
# All operands zero make zero.
_JOINT = {"add", "sub", "minimum", "maximum"}
# Zero operands beside finite ones make zero; so does one that is padded wherever the result is.
_FACTORS = {
    "mul", "matmul", "conv", "conv_grad_input", "conv_grad_weight", "relu_grad", "gelu_grad",
    "layer_norm_grad_weight", "gather_grad",
}  # fmt: skip
# The operands of which one is enough: a gelu has a slope at zero.
_ELEMENTWISE = {"mul": (0, 1), "relu_grad": (0, 1), "gelu_grad": (1,)}

# What a choice may take of an operand without padding: an infinity that the model's own elements do not choose.
_CHOSEN = ANYTHING


def padding_of(op: Op, ins: Sequence[int | None]) -> tuple[int, ...]:
    """Return the states of an operation's results, from those of its operands; None is an operand without padding,
    which may hold any number there."""
    count, padded = len(op.outs), [state for state in ins if state is not None]
    every = [FINITE if state is None else state for state in ins]
    largest = max(padded, default=FINITE)
    zero = False
    if op.kind in _KEEP:
        return (largest,) * count
    if op.kind == "pad":
        return (max(largest, _state_of(op.attrs.get("value", 0.0))),) * count
    if op.kind == "broadcast":
        # Where padding comes with the new dimensions, the operand's own numbers are repeated there.
        return (max(largest, ZERO if _covers(op.ins[0].type, op.outs[0].type) else FINITE),) * count
    if op.kind == "const":
        return (max(FINITE, _state_of(op.attrs["value"])),) * count
    if op.kind in _FINITE:
        return (FINITE,) * count
    if op.kind in _BOUNDED:
        return (max(FINITE, largest),) * count
    if op.kind in ("exp", "sqrt"):
        # Of zero they are finite; another finite number may be too large for the one, or negative.
        zero_too = ZERO if op.kind == "sqrt" else FINITE
        return (zero_too if largest == ZERO else ANYTHING,) * count
    if op.kind in _JOINT:
        zero = max(every) == ZERO and all(_covers(x.type, op.outs[0].type) for x in op.ins)
    elif op.kind in _FACTORS:
        zeros = [i for i in _ELEMENTWISE.get(op.kind, ()) if ins[i] == ZERO]
        alone = any(_covers(op.ins[i].type, op.outs[0].type) for i in zeros)
        zero = max(every) <= FINITE and (largest == ZERO or alone)
    elif op.kind == "where":
        whole = all(_covers(x.type, op.outs[0].type) for x in op.ins[1:])
        chosen = [_CHOSEN if state is None else state for state in ins[1:]]
        return (max(*chosen, ZERO if whole else FINITE),) * count
    elif op.kind == "div":
        return (ZERO if every[0] == ZERO and ins[1] is None else ANYTHING,) * count
    elif op.kind == "attention":
        return (every[2], FINITE, FINITE) if largest <= FINITE else (ANYTHING,) * count
    elif op.kind == "attention_grad":
        return (ZERO if max(every[:4]) == ZERO and largest <= FINITE else ANYTHING,) * count
    elif OPS[op.kind].family == "optimizer":
        return (ZERO if largest == ZERO else ANYTHING,) * count
    else:
        return (ANYTHING,) * count
    return (ZERO if zero else max(FINITE, *every),) * count


def _state_of(number: Attr) -> int:
    """Return the state of padding that holds one number."""
    return ANYTHING if isinstance(number, float) and not isfinite(number) else FINITE if number else ZERO


def _covers(operand: TensorType, result: TensorType) -> bool:
    """Return whether an operand is split in every dimension in which a result is, as operands broadcast."""
    behind = result.rank - operand.rank
    return all(
        i >= behind and operand.axes_of(i - behind) == result.axes_of(i)
        for i in range(result.rank)
        if result.axes_of(i)
    )
