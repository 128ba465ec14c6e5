"""Reductions over axes."""

from __future__ import annotations

from penstock.ir.types import INTS

from .data import HALF, nasty, ties, wrapping
from .table import refuse, sample

for _kind in ("sum", "mean", "max"):
    for _pattern, _axes in (
        ("f32[4,37]", (1,)),
        ("f32[4,37]", (0,)),
        ("f32[300,200]", (0,)),
        ("f32[2,3,40]", (0, 2)),
        ("f32[2,3,40]", (-2,)),
        ("f32[2,3,4,5]", (0, 2)),
        ("f32[5,1]", (0,)),
        ("f32[64]", (0,)),
        ("f32[3,5]", ()),
        ("f32[]", ()),
        ("f32[0,5]", (1,)),
    ):
        sample(_kind, _pattern, axes=_axes)
    sample(_kind, "T[3,20]", dtypes=(*HALF, *INTS, "f64"), axes=(1,))
    sample(_kind, "f32[4,37]", axes=(-1,), keep=True)
    sample(_kind, "f32[4,3,7]", axes=(0, 1), keep=True)
    sample(_kind, "f32[4,50]", axes=(1,), draws=nasty)
    refuse(_kind, "bool[3]", axes=(0,), because="not defined for bool")
    refuse(_kind, "f32[3]", axes=(1,), because="axis 1 is outside")
    refuse(_kind, "f32[3,4]", axes=(1, -1), because="name a dimension twice")
    refuse(_kind, "f32[3,4]", axes=1, because="attribute axes must be tuple")
for _kind in ("sum", "mean"):
    sample(_kind, "f32[0,5]", axes=(0,))
    sample(_kind, "f32[3,0]", axes=(1,), keep=True)
sample("sum", "T[2,30]", dtypes=INTS, axes=(1,), draws=wrapping)
refuse("max", "f32[0,5]", axes=(0,), because="no largest")
refuse("mean", "i64[0,5]", axes=(0,), because="no mean")
for _pattern, _axis in (
    ("f32[4,37]", 1),
    ("f32[4,37]", 0),
    ("f32[2,40,3]", -2),
    ("f32[5,1]", 1),
    ("f32[0,5]", 1),
    ("f32[5]", 0),
):
    sample("argmax", _pattern, axis=_axis)
sample("argmax", "T[3,20]", dtypes=(*HALF, *INTS, "f64"), axis=-1, draws=ties)
sample("argmax", "f32[6,40]", axis=-1, draws=nasty)
refuse("argmax", "f32[3]", axis=1, because="axis 1 is outside")
refuse("argmax", "bool[3]", axis=0, because="not defined for bool")
refuse("argmax", "f32[0]", axis=0, because="no largest")
