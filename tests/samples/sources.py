"""Constants and counters."""

from __future__ import annotations

from penstock.ir.types import DTYPES

from .data import NUMBERS
from .table import refuse, sample

sample("const", dtypes=DTYPES, value=1, dtype="T", shape=(3, 5))
sample("const", dtypes=("f32", "i64"), value=(1, 2, 3, 4, 5, 6), dtype="T", shape=(2, 3))
sample("const", value=2.5, dtype="f32")
sample("const", value=True, dtype="bool")
sample("const", value=float("inf"), dtype="f32", shape=(4,))
sample("const", value=0, dtype="i64", shape=(3, 0))
sample("iota", dtypes=NUMBERS, dtype="T", shape=(3, 20), axis=1)
sample("iota", dtype="i64", shape=(3, 20))
sample("iota", dtype="f32", shape=(2, 3, 4), axis=-2)
sample("iota", dtype="i32", shape=(0, 4))
refuse("const", value=1, dtype="f8", because="unknown element type 'f8'")
refuse("const", value=(1, 2, 3), dtype="f32", shape=(2, 2), because="3 values do not fill")
refuse("const", dtype="f32", because="attribute value is missing")
refuse("iota", dtype="i64", shape=(3,), axis=1, because="axis 1 is outside a tensor of rank 1")
refuse("iota", dtype="i64", shape=3, because="attribute shape must be tuple")
refuse("iota", dtype="bool", shape=(3,), because="not defined for bool")
