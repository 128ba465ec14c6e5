"""Encoders of domain ai.onnx.ml between numbers: each is compared with all keys. Those of strings are refused."""

from __future__ import annotations

import numpy as np

from penstock.frontends.formulas.layout import reshape
from penstock.frontends.onnx.node import OnnxNode, Result, Rule
from penstock.ir.graph import Value
from penstock.ir.types import dtype_of, numpy_dtype

_NO_STRINGS = "strings are not supported: encode them before the model"


def _matches(n: OnnxNode, x: Value, keys: np.ndarray) -> Value:
    """Compare every entry with every key, along a new last dimension. From version 4 on, a nan is like a nan."""
    wide = reshape(n, x, (*x.type.dims, 1))
    alike = n.emit("equal", wide, keys)
    odd = np.isnan(keys)
    if not odd.any() or n.scope.opsets["ai.onnx.ml"] < 4:
        return alike
    return n.emit("or", alike, n.emit("and", n.emit("not", n.emit("equal", wide, wide)), odd))


def _listed(n: OnnxNode, what: str) -> np.ndarray:
    """Read keys or values, which are one of several attributes."""
    n.require(not n.texts_attr(f"{what}_strings"), _NO_STRINGS)
    if n.given(f"{what}_tensor"):
        array = n.array_attr(f"{what}_tensor").reshape(-1)
        n.require(array.dtype.kind in "iuf", _NO_STRINGS)
        return array
    if n.given(f"{what}_int64s"):
        return np.array(n.ints_attr(f"{what}_int64s"), np.int64)
    n.require(n.given(f"{what}_floats"), f"the {what} are missing")
    return n.float_array(f"{what}_floats")


def _label_encoder(n: OnnxNode) -> Result:
    """Write LabelEncoder: the value of the first key that is like x, or the default."""
    n.require(n.scope.opsets["ai.onnx.ml"] > 1, "the LabelEncoder of version 1 is for strings, which are not supported")
    n.ignore("default_string")
    keys, values = _listed(n, "keys"), _listed(n, "values")
    n.require(len(keys) == len(values) > 0, f"{len(keys)} keys do not fit {len(values)} values")
    x = n.value()
    n.room(x.type.size * len(keys))
    alike = _matches(n, x, keys.astype(numpy_dtype(x.type.dtype)))
    last = x.type.rank
    number = n.cast(alike, "i32")
    value = n.emit("gather", values, n.emit("argmax", number, axis=last), axis=0)
    some = n.emit("less", 0, n.emit("max", number, axes=(last,), keep=False))
    return n.emit("where", some, value, n.literal(_default(n, values.dtype), dtype_of(values.dtype)))


def _default(n: OnnxNode, dtype: np.dtype) -> float | int:
    integer, floating = n.int_attr("default_int64", -1), float(n.float_attr("default_float", -0.0))
    if n.given("default_tensor"):
        return n.array_attr("default_tensor").reshape(-1)[0].item()  # type: ignore[no-any-return]
    return floating if dtype.kind == "f" else integer


def _one_hot(n: OnnxNode) -> Result:
    """Write OneHotEncoder of integers: 1 where x is like a category. Other numbers give zeros alone."""
    n.require(not n.texts_attr("cats_strings"), _NO_STRINGS)
    categories, x = np.array(n.ints_attr("cats_int64s"), np.int64), n.value()
    n.require(len(categories) > 0, "the categories are missing")
    n.require(bool(n.int_attr("zeros", 1)), "zeros=0, an error for other numbers, is not supported")
    n.room(x.type.size * len(categories))
    return n.cast(_matches(n, n.cast(x, "i64"), categories), "f32")


RULES: dict[str, Rule] = {"LabelEncoder": _label_encoder, "OneHotEncoder": _one_hot}
