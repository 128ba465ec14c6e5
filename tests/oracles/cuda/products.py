"""Products that GPUs compute on tensor cores. They are no part of `SAMPLES`: loops in place of threads cannot run their intrinsics."""

from __future__ import annotations

from samples import Sample

# Ragged and whole sizes, turned operands, a batch, one weight for all of a batch; lines that are multiples of 16 bytes, and others.
_CASES = (
    ("[70,37]", "[37,67]", False, False),
    ("[128,64]", "[64,64]", False, False),
    ("[48,130]", "[48,100]", True, False),
    ("[40,136]", "[40,72]", True, False),
    ("[65,40]", "[90,40]", False, True),
    ("[33,66]", "[64,33]", True, True),
    ("[2,64,16]", "[2,16,70]", False, False),
    ("[2,40,32]", "[32,64]", False, False),
)


def matmul(dtype: str, x: str, y: str, **attrs: bool) -> Sample:
    types = (dtype + x, dtype + y)
    return Sample("matmul", types, attrs, (), (types, attrs), dtype)


def products(*dtypes: str) -> list[Sample]:
    return [matmul(t, x, y, ta=ta, tb=tb) for t in dtypes for x, y, ta, tb in _CASES]
