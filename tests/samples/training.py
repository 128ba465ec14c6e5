"""Losses and optimisers."""

from __future__ import annotations

from .data import HALF, at_step, fraction, huge, label, normal, pieces, positive
from .table import refuse, sample

for _pattern, _labels, _lse, _classes in (
    ("f32[6,50]", "i64[6]", "f32[6]", 50),
    ("f32[2,3,700]", "i32[2,3]", "f32[2,3]", 700),
    ("f32[5,1]", "i64[5]", "f32[5]", 1),
    ("f32[7]", "i64[]", "f32[]", 7),
    ("f32[0,7]", "i64[0]", "f32[0]", 7),
):
    sample("cross_entropy", _pattern, _labels, draws=(normal, label(_classes)))
    sample("cross_entropy_grad", _pattern, _labels, _lse, "f32[]", draws=(normal, label(_classes)))
sample("cross_entropy", "T[3,9]", "i64[3]", dtypes=("f64", *HALF), draws=(normal, label(9)))
sample("cross_entropy", "f32[3,9]", "u8[3]", draws=(huge, label(9)))
sample("cross_entropy_grad", "T[3,9]", "i64[3]", "T[3]", "T[]", dtypes=("f64", *HALF), draws=(normal, label(9)))
refuse("cross_entropy", "f32[6,50]", "i64[5]", because="labels of")
refuse("cross_entropy", "f32[6,50]", "f32[6]", because="integer labels")
refuse("cross_entropy", "f32[6,0]", "i64[6]", because="no classes")
refuse("cross_entropy_grad", "f32[6,50]", "i64[6]", "f32[5]", "f32[]", because="expected lse")
sample("mse", "T[6,50]", "T[6,50]", dtypes=("f32", "f64"))
sample("mse", "T[7]", "T[7]", dtypes=HALF)
sample("mse", "f32[]", "f32[]")
sample("mse", "f32[0,4]", "f32[0,4]")
refuse("mse", "f32[6]", "f32[5]", because="must have the same")
refuse("mse", "i64[6]", "i64[6]", because="floating-point")
for _rows in (1, 4, 7):
    for _step in (at_step(0), at_step(9), at_step(10), at_step(17), at_step(1000)):
        sample("ramp", f"T[{_rows},5]", "T[]", dtypes=("f64",), draws=(pieces, _step))
refuse("ramp", "f64[4,4]", "f64[]", because="5 columns")
refuse("ramp", "f64[0,5]", "f64[]", because="5 columns")
refuse("ramp", "f32[4,5]", "f32[]", because="in f64")
refuse("ramp", "f64[4,5]", "f64[1]", because="must be a scalar")
_W = "T[5,33]"
for _kind, _states, _scalars, _variants in (
    ("sgd", 0, 1, ({}, {"weight_decay": 0.1})),
    ("momentum", 1, 1, ({}, {"nesterov": True, "weight_decay": 0.1}, {"beta": 0.5})),
    ("adamw", 2, 3, ({}, {"weight_decay": 0.1, "beta1": 0.8, "beta2": 0.9, "eps": 1e-4})),
):
    # The learning rate is positive; so are second moments and 1 - beta^t.
    _draws = (
        (normal, normal, normal, positive, fraction, fraction, positive)
        if _kind == "adamw"
        else (*(normal,) * (2 + _states), positive)
    )
    for _variant in _variants:
        sample(_kind, *[_W] * (2 + _states), *["T[]"] * _scalars, draws=_draws, **_variant)
    sample(_kind, *["T[9]"] * (2 + _states), *["T[]"] * _scalars, dtypes=("f64", *HALF), draws=_draws)
    sample(_kind, *["f32[]"] * (2 + _states + _scalars), draws=_draws)
    sample(_kind, *["f32[0,4]"] * (2 + _states), *["f32[]"] * _scalars, draws=_draws)
    refuse(
        _kind, "f32[4]", *["f32[5]"] * (1 + _states), *["f32[]"] * _scalars, because="weight, gradient and state differ"
    )
    refuse(_kind, *["f32[4]"] * (2 + _states), *["f32[1]"] * _scalars, because=f"expected {_scalars} scalars")
    refuse(_kind, *["i64[4]"] * (2 + _states), *["i64[]"] * _scalars, because="floating-point")
