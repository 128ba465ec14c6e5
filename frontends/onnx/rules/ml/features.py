"""Operators of domain ai.onnx.ml that prepare features: scaled, normalised, joined, picked, compared, filled in.

Results are f32 but where ONNX says that they have the type of the operand. Integers are computed in f32, f64 in f64.
"""

from __future__ import annotations

from math import isnan

import numpy as np

from penstock.frontends.formulas.layout import concat, cut, reshape
from penstock.frontends.onnx.node import OnnxNode, Result, Rule
from penstock.ir.graph import Value
from penstock.ir.types import FLOATS, numpy_dtype

from .scores import rows_of


def _wide(n: OnnxNode) -> Value:
    x = n.value()
    return n.cast(x, "f64" if x.type.dtype == "f64" else "f32")


def _scaler(n: OnnxNode) -> Result:
    """Write Scaler: (x - offset) * scale, by one number or by one per feature."""
    x = _wide(n)
    offset, scale = (n.float_array(name).astype(numpy_dtype(x.type.dtype)) for name in ("offset", "scale"))
    features = x.type.dims[-1] if x.type.rank else 0
    n.require(1 <= x.type.rank <= 2, f"needs one or two dimensions, got {x.type}")
    n.require(
        len(offset) == len(scale) and len(offset) in (1, features),
        f"{len(offset)} offsets and {len(scale)} scales do not fit {features} features",
    )
    return n.cast(n.emit("mul", n.emit("sub", x, offset), scale), "f32")


def _normalizer(n: OnnxNode) -> Result:
    """Write Normalizer: x by the largest entry, the sum of sizes or the length of its row. Rows of 0 stay."""
    x, norm = _wide(n), n.text_attr("norm", "MAX")
    n.require(1 <= x.type.rank <= 2, f"needs one or two dimensions, got {x.type}")
    n.require(norm in ("MAX", "L1", "L2"), f"norm={norm} is not known, only MAX, L1 and L2")
    axes = (x.type.rank - 1,)
    if norm == "MAX":
        size = n.emit("max", x, axes=axes, keep=True)
    else:
        size = n.emit("sum", n.emit("abs", x) if norm == "L1" else n.emit("mul", x, x), axes=axes, keep=True)
    nothing = n.emit("equal", size, 0.0)
    size = n.emit("where", nothing, 1.0, size)
    return n.cast(n.emit("div", x, n.emit("sqrt", size) if norm == "L2" else size), "f32")


def _extractor(n: OnnxNode) -> Result:
    """Write ArrayFeatureExtractor: entries along the last dimension."""
    x, indices = n.value(0), n.value(1)
    n.require(x.type.rank > 0, "needs at least one dimension")
    x = reshape(n, x, (1, x.type.size)) if x.type.rank == 1 else x
    at = reshape(n, n.cast(indices, "i64"), (indices.type.size,))
    return n.emit("gather", x, at, axis=x.type.rank - 1)


def _vectorizer(n: OnnxNode) -> Result:
    """Write FeatureVectorizer: features side by side, each operand cut or filled up with zeros to its size."""
    parts, sizes = [rows_of(n, i) for i in range(n.count)], n.ints_attr("inputdimensions")
    n.require(len(sizes) == len(parts), f"inputdimensions has {len(sizes)} entries for {len(parts)} operands")
    fitted = []
    for part, size in zip(parts, sizes, strict=True):
        rows, features = part.type.dims
        n.room(size)
        if features > size:
            part = cut(n, part, 1, 0, size)
        elif features < size:
            part = n.emit(
                "concat", part, n.emit("const", value=0.0, dtype="f32", shape=(rows, size - features)), axis=1
            )
        fitted.append(part)
    return concat(n, fitted, 1)


def _binarizer(n: OnnxNode) -> Result:
    x = n.value()
    threshold = n.float_array("threshold")[:1] if n.given("threshold") else np.zeros(1, np.float32)
    above = n.emit("less", n.literal(threshold.item(), "f64" if x.type.dtype == "f64" else "f32"), _wide(n))
    return n.cast(above, x.type.dtype)


def _imputer(n: OnnxNode) -> Result:
    """Write Imputer: another value, or one per feature, where x is the value to be replaced, which may be no number."""
    x = n.value()
    floating = x.type.dtype in FLOATS
    if floating:
        n.ignore("imputed_value_int64s", "replaced_value_int64")
        values, replaced = n.float_array("imputed_value_floats"), n.float_attr("replaced_value_float")
    else:
        n.ignore("imputed_value_floats", "replaced_value_float")
        values = np.array(n.ints_attr("imputed_value_int64s"), np.int64)
        replaced = n.int_attr("replaced_value_int64")
    n.require(
        x.type.rank > 0 and len(values) in (1, x.type.dims[-1]) and x.type.rank <= 2,
        f"{len(values)} values do not fit {x.type}",
    )
    odd = n.emit("not", n.emit("equal", x, x)) if isnan(replaced) else n.emit("equal", x, replaced)
    return n.emit("where", odd, values.astype(numpy_dtype(x.type.dtype)), x)


RULES: dict[str, Rule] = {
    "Scaler": _scaler,
    "Normalizer": _normalizer,
    "ArrayFeatureExtractor": _extractor,
    "FeatureVectorizer": _vectorizer,
    "Binarizer": _binarizer,
    "Imputer": _imputer,
}
