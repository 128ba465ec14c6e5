"""Lookups and their counterparts."""

from __future__ import annotations

from penstock.ir.types import DTYPES

from .data import NUMBERS, index, normal
from .table import refuse, sample

sample("gather", "T[10,33]", "i64[4,5]", dtypes=DTYPES, draws=(normal, index(10)))
sample("gather", "f32[9,4]", "i8[3]", draws=(normal, index(9)))
sample("gather", "f32[9,4]", "u8[3]", draws=(normal, index(9)))
sample("gather", "f32[3,10]", "i32[4]", draws=(normal, index(10)), axis=-1)
sample("gather", "f32[10]", "i64[]", draws=(normal, index(10)))
sample("gather", "f32[10,3]", "i64[0]", draws=(normal, index(10)))
sample("gather", "f32[10,0]", "i64[4]", draws=(normal, index(10)))
refuse("gather", "f32[10]", "f32[3]", because="indices must be integers")
refuse("gather", "f32[10]", "i64[3]", axis=1, because="axis 1 is outside")
refuse("gather", "f32[0,3]", "i64[3]", because="no entries")
sample("gather_grad", "T[4,5,33]", "i64[4,5]", dtypes=NUMBERS, draws=(normal, index(10)), shape=(10, 33))
sample("gather_grad", "f32[3,4]", "i32[4]", draws=(normal, index(10)), shape=(3, 10), axis=-1)
sample("gather_grad", "f32[3,2,2,5]", "i64[2,2]", draws=(normal, index(7)), shape=(3, 7, 5), axis=1)
sample("gather_grad", "f32[0,4]", "i64[0]", shape=(5, 4))
sample("gather_grad", "f32[3,0]", "i64[3]", draws=(normal, index(5)), shape=(5, 0))
refuse("gather_grad", "f32[3,4]", "i64[4]", shape=(10, 4), because="but the gradient is")
refuse("gather_grad", "bool[4]", "i64[4]", shape=(10,), because="not defined for bool")

for _add in (False, True):
    sample("scatter", "T[10,33]", "i64[2,3]", "T[2,3,33]", dtypes=NUMBERS, draws=(normal, index(10)), add=_add)
    sample("scatter", "f32[3,10]", "i32[4]", "f32[3,4]", draws=(normal, index(10)), axis=-1, add=_add)
    sample("scatter", "f32[3,7,5]", "i64[2,2]", "f32[3,2,2,5]", draws=(normal, index(7)), axis=1, add=_add)
    sample("scatter", "f32[500]", "i64[300]", "f32[300]", draws=(normal, index(500)), add=_add)
    sample("scatter", "f32[9,4]", "u8[]", "f32[4]", draws=(normal, index(9)), add=_add)
    sample("scatter", "f32[5,4]", "i64[0]", "f32[0,4]", add=_add)
    sample("scatter", "f32[5,0]", "i64[3]", "f32[3,0]", draws=(normal, index(5)), add=_add)
sample("scatter", "bool[10,3]", "i64[4]", "bool[4,3]", draws=(normal, index(10)))
refuse("scatter", "f32[10,3]", "i64[4]", "f32[4,4]", because="but the updates are")
refuse("scatter", "f32[10,3]", "i64[4]", "f64[4,3]", because="but the updates are")
refuse("scatter", "f32[10]", "f32[4]", "f32[4]", because="indices must be integers")
refuse("scatter", "bool[10]", "i64[4]", "bool[4]", add=True, because="not defined for bool")
