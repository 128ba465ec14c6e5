"""ATen operations on the bits of integers, and bits read as another element type of the same width.

On bools the bitwise operations are the logical ones. An integer shifted by a negative number, or by its width or more,
becomes 0, or -1 where its sign moves in.
"""

from __future__ import annotations

from penstock.frontends.formulas.elementwise import inverted
from penstock.frontends.torch.node import Result, Rule, TorchNode
from penstock.ir.types import numpy_dtype


def bitwise(kind: str) -> Rule:
    def rule(n: TorchNode) -> Result:
        dtype = n.dtype
        x, y = n.operand("self", dtype), n.operand("other", dtype)
        if dtype != "bool":
            return n.emit(f"bit_{kind}", x, y)
        return n.emit("not", n.emit("equal", x, y)) if kind == "xor" else n.emit(kind, x, y)

    return rule


def _not(n: TorchNode) -> Result:
    x = n.value()
    return n.emit("not", x) if x.type.dtype == "bool" else inverted(n, x)


def shift(kind: str) -> Rule:
    def rule(n: TorchNode) -> Result:
        dtype = n.dtype
        return n.emit(kind, n.operand("self", dtype), n.operand("other", dtype))

    return rule


def _reinterpreted(n: TorchNode) -> Result:
    n.ignore("dtype")
    x, dtype = n.value(), n.dtype
    n.require(
        _width(x.type.dtype) == _width(dtype),
        f"reads {x.type} as {dtype}: element types of other widths are not supported",
    )
    if x.type.dtype == dtype:
        return x
    if x.type.dtype == "bool":
        x = n.emit("cast", x, dtype="u8")
    if dtype == "bool":
        return n.emit("not", n.emit("equal", n.emit("bitcast", x, dtype="u8") if x.type.dtype != "u8" else x, 0))
    return x if x.type.dtype == dtype else n.emit("bitcast", x, dtype=dtype)


def _width(dtype: str) -> int:
    return numpy_dtype(dtype).itemsize


RULES: dict[str, Rule] = {
    "view.dtype": _reinterpreted,
    "bitwise_not": _not,
    **{
        f"bitwise_{kind}.{form}": bitwise(kind)
        for kind in ("and", "or", "xor")
        for form in ("Tensor", "Scalar", "Scalar_Tensor")
    },
    **{
        f"bitwise_{side}_shift.{form}": shift(f"shift_{side}")
        for side in ("left", "right")
        for form in ("Tensor", "Tensor_Scalar", "Scalar_Tensor")
    },
    **{
        f"__{side[0]}shift__.{form}": shift(f"shift_{side}")
        for side in ("left", "right")
        for form in ("Tensor", "Scalar")
    },
}
