"""Operations along one axis: softmax, norms, running sums, the k largest."""

from __future__ import annotations

from penstock.ir.types import FLOATS, INTS

from .data import HALF, few, huge, nasty, normal, positive, shares, temperatures, ties, wrapping
from .table import refuse, sample

for _kind in ("softmax", "log_softmax"):
    for _pattern, _axis in (
        ("f32[6,37]", -1),
        ("f32[6,600]", -1),
        ("f32[3,20,5]", 1),
        ("f32[2,3,20]", 0),
        ("f32[4,1]", 1),
        ("f32[0,5]", 1),
        ("f32[5,0]", 1),
        ("f32[5,0]", 0),
    ):
        sample(_kind, _pattern, axis=_axis)
        sample(f"{_kind}_grad", _pattern, _pattern, axis=_axis)
    sample(_kind, "T[3,9]", dtypes=("f64", *HALF), axis=1)
    sample(f"{_kind}_grad", "T[3,9]", "T[3,9]", dtypes=("f64", *HALF), axis=1)
    sample(_kind, "f32[4,37]", draws=huge)
    sample(_kind, "f32[5,40]", draws=nasty)
    refuse(_kind, "i64[3,4]", because="needs floating-point operands")
    refuse(_kind, "f32[]", because="axis -1 is outside")
    refuse(f"{_kind}_grad", "f32[3,4]", "f32[3,5]", because="of one type")
for _pattern, _attrs in (
    ("f32[3,150]", {"axis": 1}),
    ("f32[3,150]", {"axis": -1, "exclusive": True}),
    ("f32[3,150]", {"axis": 1, "reverse": True}),
    ("f32[2,43]", {"axis": 1, "reverse": True, "exclusive": True}),
    ("f32[20,37]", {"axis": 0}),
    ("f32[2,20,5]", {"axis": 1, "reverse": True, "exclusive": True}),
    ("f32[2,5000]", {"axis": 1}),
    ("f32[4,1]", {"axis": 1}),
    ("f32[4,1]", {"axis": 1, "exclusive": True}),
    ("f32[7]", {"axis": 0}),
    ("f32[0,5]", {"axis": 1}),
    ("f32[5,0]", {"axis": 1, "exclusive": True}),
):
    sample("cumsum", _pattern, **_attrs)
sample("cumsum", "T[3,37]", dtypes=("f64", *HALF, *INTS), axis=1)
sample("cumsum", "T[40]", dtypes=("i32", "i8", "u8"), draws=wrapping, axis=0, reverse=True)
refuse("cumsum", "f32[3]", axis=1, because="axis 1 is outside")
refuse("cumsum", "bool[3]", axis=0, because="not defined for bool")
refuse("cumsum", "f32[3]", because="attribute axis is missing")
for _largest in (True, False):
    for _pattern, _k, _axis in (
        ("f32[5,37]", 4, -1),
        ("f32[2,300]", 7, 1),
        ("f32[3,1000]", 1000, 1),
        ("f32[20,3,5]", 20, 0),
        ("f32[2,40,3]", 3, 1),
        ("f32[6,8]", 2, 1),
        ("f32[4,1]", 1, 1),
        ("f32[33]", 0, 0),
        ("f32[0,5]", 3, 1),
    ):
        sample("topk", _pattern, k=_k, axis=_axis, largest=_largest)
    sample("topk", "T[3,40]", dtypes=("f64", *HALF, *INTS), draws=ties, k=40, largest=_largest)
    sample("topk", "T[4,70]", dtypes=("f32", "f64"), draws=nasty, k=70, largest=_largest)
    # Ranks, a tournament and digits, chosen by how much of how long a row is wanted.
    sample("topk", "T[3,50]", dtypes=("i64", "u8"), draws=wrapping, k=45, largest=_largest)
    for _k in (5, 200):
        sample("topk", "T[2,200]", dtypes=("i64", "i32", "i8"), draws=wrapping, k=_k, largest=_largest)
        sample("topk", "T[2,200]", dtypes=("f32", "f64"), draws=nasty, k=_k, largest=_largest)
sample("topk", "f32[2,3000]", draws=nasty, k=40)
sample("topk", "f32[500,2,3]", k=300, axis=0)
refuse("topk", "f32[3,4]", k=5, because="k must lie in 0..4")
refuse("topk", "f32[3,4]", k=-1, because="k must lie in 0..4")
refuse("topk", "f32[3,4]", k=1, axis=2, because="axis 2 is outside")
refuse("topk", "bool[3]", k=1, because="not defined for bool")
for _x, _w, _s, _axis in (
    ("T[6,48]", "T[48]", "T[6]", -1),
    ("T[2,3,5,7]", "T[5,7]", "T[2,3]", 2),
    ("T[33]", "T[33]", "T[]", 0),
    ("T[3,1]", "T[1]", "T[3]", 1),
    ("T[0,5]", "T[5]", "T[0]", 1),
):
    sample("layer_norm", _x, _w, _w, axis=_axis)
    sample("layer_norm_grad", _x, _x, _w, _s, _s, axis=_axis)
    sample("layer_norm_grad_weight", _x, _x, _s, _s, axis=_axis)
sample("layer_norm", "T[3,10]", "T[10]", "T[10]", dtypes=("f64", *HALF), axis=1, eps=1e-3)
sample("layer_norm_grad", "T[3,10]", "T[3,10]", "T[10]", "T[3]", "T[3]", dtypes=("f64", *HALF), axis=1)
sample("layer_norm_grad_weight", "T[3,10]", "T[3,10]", "T[3]", "T[3]", dtypes=("f64", *HALF), axis=1)
refuse("layer_norm", "f32[3,4]", "f32[3]", "f32[4]", because="scale and bias")
refuse("layer_norm", "i64[3,4]", "i64[4]", "i64[4]", because="floating-point")
refuse("layer_norm", "f32[3,0]", "f32[0]", "f32[0]", because="nothing to normalise")
refuse("layer_norm", "f32[3,4]", "f32[4]", "f32[4]", axis=2, because="axis 2 is outside")
refuse("layer_norm_grad", "f32[3,4]", "f32[3,4]", "f32[4]", "f32[4]", "f32[3]", because="expected gradient")
refuse("layer_norm_grad_weight", "f32[3,4]", "f32[3,4]", "f32[3]", "f32[4]", because="expected gradient")
sample("batch_norm", "T[2,3,5,7]", *["T[3]"] * 4, dtypes=FLOATS, draws=positive)
sample("batch_norm", "f32[4,5]", *["f32[5]"] * 4, draws=positive, eps=0.1)
sample("batch_norm", "f32[0,3,4]", *["f32[3]"] * 4, draws=positive)
refuse("batch_norm", "f32[4]", *["f32[4]"] * 4, because="needs batch and channel")
refuse("batch_norm", "f32[2,3]", "f32[3]", "f32[3]", "f32[3]", "f32[2]", because="scale, bias, mean and variance")
refuse("batch_norm", "i64[2,3]", *["i64[3]"] * 4, because="floating-point")
_PICK = ("u64[{0},2]", "f32[{0}]", "i32[{0}]", "f32[{0}]")


def _picked(logits: str, count: int) -> tuple[str, ...]:
    return (logits, *(part.format(count) for part in _PICK))


_CHOICES = (normal, wrapping, temperatures, few, shares)
for _count, _size in ((5, 40), (9, 16), (4, 3000), (2, 1), (0, 7)):
    sample("pick", *_picked(f"T[{_count},{_size}]", _count), draws=_CHOICES)
sample("pick", *_picked("f32[30,50]", 30), draws=(ties, *_CHOICES[1:]))
sample("pick", *_picked("f32[20,50]", 20), draws=(nasty, *_CHOICES[1:]))
sample("pick", *_picked("f32[20,333]", 20), draws=(huge, *_CHOICES[1:]))
refuse("pick", *_picked("f16[3,4]", 3), because="logits must be f32")
refuse("pick", *_picked("f32[3,0]", 3), because="no word to pick")
refuse("pick", *_picked("f32[3,4]", 4), because="draws must be u64.3,2.")
refuse("pick", "f32[3,4]", "u64[3,2]", "f32[2]", "i32[3]", "f32[3]", because="temperature must be f32.3.")
