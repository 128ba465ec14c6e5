"""Pooling and its gradients."""

from __future__ import annotations

from penstock.ir.types import FLOATS, INTS

from .data import HALF, nasty, ties
from .table import refuse, sample

_WINDOW = {"window": (3, 3), "strides": (2, 2), "pads": (1, 1, 1, 1)}
for _kind in ("max_pool", "avg_pool"):
    sample(_kind, "T[2,3,9,11]", dtypes=FLOATS, **_WINDOW)
    sample(_kind, "f32[2,3,8,20]", window=(2, 2), strides=(2, 2))
    sample(_kind, "f32[2,3,8]", window=(3,), dilations=(2,))
    sample(_kind, "f32[1,2,5,6,7]", window=(2, 2, 2), pads=(0, 1, 0, 1, 0, 1), strides=(1, 2, 1))
    sample(_kind, "f32[1,2,9,12]", window=(3, 2), strides=(2, 1), pads=(0, 1, 2, 0), dilations=(1, 2))
    sample(_kind, "f32[0,2,5,5]", window=(2, 2))
    refuse(_kind, "f32[2,3,8]", window=(3, 3), because="does not fit the spatial dimensions")
    refuse(_kind, "f32[2,3,2]", window=(3,), because="does not fit into 2")
    refuse(_kind, "bool[2,3,8]", window=(3,), because="bool|floating-point")
    refuse(_kind, "f32[2,3,8]", window=(0,), because="window")
sample("max_pool", "T[2,3,8]", dtypes=INTS, window=(3,), pads=(1, 1))
sample("max_pool", "f32[2,3,6,9]", draws=nasty, **_WINDOW)
sample("avg_pool", "f32[2,3,9,40]", include_pad=True, **_WINDOW)
refuse("avg_pool", "i64[2,3,8]", window=(3,), because="floating-point")
for _counted in (False, True):
    sample("avg_pool_grad", "f32[2,3,5,20]", include_pad=_counted, shape=(2, 3, 9, 40), **_WINDOW)
sample("avg_pool_grad", "T[2,3,5,6]", dtypes=("f64", *HALF), shape=(2, 3, 9, 11), **_WINDOW)
sample("avg_pool_grad", "f32[2,3,4]", shape=(2, 3, 8), window=(3,), dilations=(2,))
sample("avg_pool_grad", "f32[0,3,4]", shape=(0, 3, 8), window=(3,), dilations=(2,))
refuse("avg_pool_grad", "f32[2,3,4]", shape=(2, 3, 9), window=(3,), dilations=(2,), because="but the gradient is")
sample("max_pool_grad", "T[2,3,9,11]", "T[2,3,5,6]", "T[2,3,5,6]", dtypes=FLOATS, draws=(ties,), **_WINDOW)
sample("max_pool_grad", "f32[2,3,8,20]", "f32[2,3,4,10]", "f32[2,3,4,10]", window=(2, 2), strides=(2, 2))
sample("max_pool_grad", "f32[2,3,8]", "f32[2,3,4]", "f32[2,3,4]", window=(3,), dilations=(2,))
sample("max_pool_grad", "f32[0,3,8]", "f32[0,3,4]", "f32[0,3,4]", window=(3,), dilations=(2,))
refuse(
    "max_pool_grad",
    "f32[2,3,8]",
    "f32[2,3,4]",
    "f32[2,3,5]",
    window=(3,),
    dilations=(2,),
    because="result and gradient are",
)
