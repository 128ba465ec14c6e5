"""Operators that move elements or choose among them, and quantising again, on the bytes behind dequantised tensors.

In: nodes whose first operand was dequantised with one known scale. Dequantising is done element by element, and keeps
order, so bytes can be moved in its place, with the same results bit by bit. Out: of lookups and maxima the bytes,
dequantised behind them: they are fewer, and a table of weights stays one of bytes. Of layouts both the floats and the
bytes, of which those that nothing reads are dropped.

QuantizeLinear with the scale and zero point of the dequantising gives the bytes back: (q * s) / s in float32 is less
than 2**-7 away from the whole number q of 16 bits or fewer, if q * s is a normal number. DequantizeLinear of bytes
that are known as floats already gives these.
"""

from __future__ import annotations

import numpy as np

from penstock.frontends.formulas.layout import reshape
from penstock.frontends.onnx.node import OnnxNode, Result, Rule
from penstock.frontends.onnx.rules.quantised import less_zero, type_attr
from penstock.frontends.onnx.tensors import Dequantised, Empty, KnownTensor, Tensor, TensorList
from penstock.ir.graph import Value

# Lookups and maxima: bytes are chosen, then dequantised.
_CHOOSING = ("Gather", "MaxPool")
# Layouts: readers of floats read floats, readers of bytes read bytes.
_LAYOUTS = ("Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Identity")
_WHOLE = ("i8", "u8", "i16", "u16")


def move_integers(n: OnnxNode, rule: Rule) -> Result | None:
    """Write an operator that moves elements on the integers behind its operand; None if it moves none."""
    if n.kind not in (*_CHOOSING, *_LAYOUTS) or n.wanted != 1:
        return None
    source = n.dequantised(0)
    if source is None or not _is_plain(n, source) or n.type().dtype != "f32":
        return None
    with n.reading(0, source.integers):
        moved = rule(n)
    if not isinstance(moved, Value):
        return None
    floats = rule(n) if n.kind in _LAYOUTS else _floats_of(n, moved, source)
    n.remember(Dequantised(moved, source.scale, source.zero, source.axis))
    return floats if isinstance(floats, Value) else None


def integers_again(n: OnnxNode) -> Result | None:
    """Return the integers that a QuantizeLinear gives back, because its operand was dequantised from them alike."""
    source = n.dequantised(0)
    if source is None or not _is_plain(n, source) or not isinstance(source.integers, Value) or n.type().dtype != "f32":
        return None
    wanted = type_attr(n, "output_dtype")
    dtype = n.type(2).dtype if n.has(2) else wanted or "u8"
    zero = n.operand(2) if n.has(2) else None
    alike = _is_same(source.scale, n.operand(1)) and _is_same(source.zero, zero)
    if not alike or dtype != source.integers.type.dtype or n.int_attr("block_size") or wanted not in (None, dtype):
        return None
    n.ignore("saturate", "axis", "precision")
    return source.integers


def floats_again(n: OnnxNode) -> Result | None:
    """Return the floats that a DequantizeLinear gives, if its operand is known as those already."""
    known = n.floats_of(0)
    wanted = type_attr(n, "output_dtype") or "f32"
    if known is None or n.int_attr("block_size") or known[0].type.dtype != wanted:
        return None
    floats, source = known
    zero = n.operand(2) if n.has(2) else None
    if not _is_plain(n, source) or not _is_same(source.scale, n.operand(1)) or not _is_same(source.zero, zero):
        return None
    n.ignore("axis")
    return floats


def _is_plain(n: OnnxNode, source: Dequantised) -> bool:
    """Return whether integers of few bits have one scale, of floats that neither vanish nor overflow."""
    scale, zero = source.scale, source.zero
    if isinstance(source.integers, TensorList | Empty) or not isinstance(scale, KnownTensor):
        return False
    if scale.array.size != 1 or scale.array.dtype != np.float32 or n.type_of(source.integers).dtype not in _WHOLE:
        return False
    if zero is not None and not (isinstance(zero, KnownTensor) and zero.array.size == 1):
        return False
    limits = np.finfo(np.float32)
    return bool(limits.tiny <= scale.array.reshape(()) <= limits.max / (1 << 17))


def _is_same(one: Tensor | None, other: Tensor | None) -> bool:
    """Return whether two scales or zero points are one number."""
    return _number(one) == _number(other)


def _number(tensor: Tensor | None) -> float:
    """Return a scale or zero point that is one known number, else nan. A zero point that is left out is 0."""
    if tensor is None:
        return 0.0
    return float(tensor.array.reshape(())) if isinstance(tensor, KnownTensor) and tensor.array.size == 1 else np.nan


def _floats_of(n: OnnxNode, moved: Value, source: Dequantised) -> Value:
    """Dequantise moved integers."""
    assert isinstance(source.scale, KnownTensor)
    zero = reshape(n, n.value_of(source.zero), ()) if isinstance(source.zero, KnownTensor) else None
    wide = n.cast(less_zero(n, moved, zero, "i32"), "f32")
    return n.emit("mul", wide, reshape(n, n.value_of(source.scale), ()))
