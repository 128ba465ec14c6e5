"""Random numbers: keys of microbatches, numbers of places."""

from __future__ import annotations

from .data import wrapping
from .table import refuse, sample

sample("random_key", "T[]", dtypes=("i64",), number=0, draws=wrapping)
sample("random_key", "T[50]", dtypes=("i64",), number=3, draws=wrapping)
sample("random_key", "T[50]", dtypes=("i64",), number=2**32 - 1, seed=2**32 - 1, draws=wrapping)
sample("random_key", "T[0]", dtypes=("i64",), number=1)
refuse("random_key", "i32[]", number=1, because="needs the number of a microbatch in i64")
refuse("random_key", "i64[]", number=2**32, because="attribute number must have 32 bits")
refuse("random_key", "i64[]", number=1, seed=-1, because="attribute seed must have 32 bits")
sample("random", "u32[3,37]", "T[]", dtypes=("i64",), draws=wrapping)
sample("random", "u32[3,37]", "T[3,1]", dtypes=("i64",), draws=wrapping)
sample("random", "u32[]", "T[]", dtypes=("i64",), draws=wrapping)
sample("random", "u32[5,0]", "T[]", dtypes=("i64",), draws=wrapping)
refuse("random", "i64[3]", "i64[]", because="needs places in u32 and a key in i64")
refuse("random", "u32[3]", "u32[]", because="needs places in u32 and a key in i64")
refuse("random", "u32[3]", "i64[4]", because="do not broadcast")
