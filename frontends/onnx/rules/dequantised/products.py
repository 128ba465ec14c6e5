"""Products and sums between DequantizeLinear and QuantizeLinear, in exact sums of bytes.

In: nodes whose operands were dequantised from bytes with known scales and zero points. Out: a product of the bytes, and
its sums times the scales, recorded for a QuantizeLinear behind them (requantise.py). None where the bytes have no such
form: the product stays one of floats.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from penstock.frontends.formulas.layout import reshape, transpose
from penstock.frontends.onnx.node import OnnxNode, Result
from penstock.frontends.onnx.rules.quantised import (
    per_channel,
    product_of_bytes,
    windows_of_bytes,
)
from penstock.frontends.onnx.tensors import Empty, KnownTensor, ScaledSums, ScaledTerms, Tensor, TensorList
from penstock.ir.graph import Value
from penstock.ir.types import numpy_dtype


def _numbers(n: OnnxNode, tensor: Tensor | None, axis: int, along: int, rank: int) -> np.ndarray | None:
    """Return known scales or zero points: one, or, if `axis` is dimension `along` of the tensor, one for each entry."""
    if not isinstance(tensor, KnownTensor):
        return None
    array = tensor.array
    return array.reshape(array.size) if array.size == 1 or (array.ndim == 1 and axis % rank == along) else None


def _bytes_of(n: OnnxNode, i: int, along: int | None) -> tuple[Value, np.ndarray, np.ndarray] | None:
    """Return the bytes behind operand i, their scales and their zero points.

    There is one of each, or one for each entry of dimension `along`. None if it is not made of bytes so.
    """
    source = n.dequantised(i)
    if source is None or isinstance(source.integers, TensorList | Empty) or n.type(i).dtype != "f32":
        return None
    if isinstance(source.integers, KnownTensor) and source.integers.array.dtype not in (np.int8, np.uint8):
        return None
    kind = n.type_of(source.integers)
    dtype = kind.dtype
    if dtype not in ("i8", "u8"):
        return None
    at = -1 if along is None else along % kind.rank
    scale = _numbers(n, source.scale, source.axis, at, kind.rank)
    zero: np.ndarray | None = np.zeros(1, numpy_dtype(dtype))
    if source.zero is not None:
        zero = _numbers(n, source.zero, source.axis, at, kind.rank)
    if scale is None or zero is None or scale.dtype != np.float32 or not bool((scale > 0).all()):
        return None
    return n.value_of(source.integers), scale, zero


def _scaled_matrix(n: OnnxNode, *, turned: bool = False) -> ScaledSums | None:
    x, y = _bytes_of(n, 0, None), _bytes_of(n, 1, 0 if turned else -1)
    if x is None or y is None or y[0].type.rank != 2:
        return None
    right = transpose(n, y[0], (1, 0)) if turned else y[0]
    sums = product_of_bytes(n, x[0], right, *(n.literal(zero, x[0].type.dtype) for zero in (x[2], y[2])))
    return None if sums is None else ScaledSums(sums, _single(x[1] * y[1]))


def _single(array: np.ndarray) -> np.ndarray:
    return array.reshape(()) if array.size == 1 else array


def _biased(n: OnnxNode, scaled: ScaledSums, i: int, shape: Sequence[int]) -> Result:
    """Add operand i to scaled sums: to the sums if it is made of whole numbers of the same scale."""
    bias: Value | None = None
    if n.has(i):
        source = n.dequantised(i)
        scale = source.scale if source is not None else None
        same = (
            source is not None
            and isinstance(source.integers, KnownTensor)
            and source.integers.array.dtype == np.int32
            and isinstance(scale, KnownTensor)
            and scale.array.size in (1, scaled.scale.size)
            and np.allclose(scale.array.reshape(-1), scaled.scale.reshape(-1), rtol=1e-6, atol=0)
            and (source.zero is None or (isinstance(source.zero, KnownTensor) and not source.zero.array.any()))
        )
        if same and source is not None and isinstance(source.integers, KnownTensor):
            whole = n.literal(source.integers.array.reshape(tuple(shape)), "i32")
            scaled = replace(scaled, sums=n.emit("add", scaled.sums, whole))
        else:
            bias = reshape(n, n.value(i), shape)
    result = n.emit("mul", n.cast(scaled.sums, "f32"), n.literal(scaled.scale, "f32"))
    if bias is not None:
        return n.emit("add", result, bias)
    n.remember(scaled)
    return result


def _matmul_on_integers(n: OnnxNode) -> Result | None:
    scaled = _scaled_matrix(n)
    return None if scaled is None else _biased(n, scaled, 2, ())


def _gemm_on_integers(n: OnnxNode) -> Result | None:
    turned, plain = bool(n.int_attr("transB")), n.float_attr("alpha", 1.0) == n.float_attr("beta", 1.0) == 1.0
    columns = n.type(1).dims[0 if turned else 1]
    if n.int_attr("transA") or not plain or (n.has(2) and n.type(2).size != columns):
        return None
    scaled = _scaled_matrix(n, turned=turned)
    return None if scaled is None else _biased(n, scaled, 2, (columns,))


def _conv_on_integers(n: OnnxNode) -> Result | None:
    x, w = _bytes_of(n, 0, None), _bytes_of(n, 1, 0)
    if x is None or w is None or n.int_attr("group", 1) < 1:
        return None
    sums = windows_of_bytes(n, x[0], w[0], *(n.literal(zero, x[0].type.dtype) for zero in (x[2], w[2])))
    if sums is None:
        return None
    rank = w[0].type.rank
    scaled = ScaledSums(sums, per_channel(x[1] * w[1], rank))
    return _biased(n, scaled, 2, (1, w[0].type.dims[0], *(1,) * (rank - 2)))


def _add_on_integers(n: OnnxNode) -> Result | None:
    """Add two tensors made of bytes in floats; for a QuantizeLinear behind the sum, record the bytes."""
    x, y = _bytes_of(n, 0, None), _bytes_of(n, 1, None)
    if x is None or y is None:
        return None
    n.remember(ScaledTerms(tuple((term[0], float(term[2][0]), float(term[1][0])) for term in (x, y))))
    return n.emit("add", n.value(0), n.value(1))


PRODUCTS: dict[str, Callable[[OnnxNode], Result | None]] = {
    "MatMul": _matmul_on_integers,
    "Gemm": _gemm_on_integers,
    "Conv": _conv_on_integers,
    "Add": _add_on_integers,
}
