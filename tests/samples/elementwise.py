"""Elementwise operations and casts."""

from __future__ import annotations

from penstock.ir.types import DTYPES, FLOATS, INTS, ITEM_BYTES, UNSIGNED

from .data import HALF, NUMBERS, halves, nasty, normal, patterns, positive, shift, shift_either_way, ties, wrapping
from .table import refuse, sample

_UNARY_FLOAT = ("floor", "round", "exp", "sin", "cos", "atan", "tanh", "sigmoid", "erf", "gelu", "detach")
_UNARY_NUMBER = ("neg", "abs", "sign", "relu")
for _kind in _UNARY_FLOAT + _UNARY_NUMBER:
    sample(_kind, "T[3,37]", dtypes=("f32", "f64"))
    sample(_kind, "f32[]")
    sample(_kind, "f32[5,0]")
    sample(_kind, "T[21]", dtypes=HALF)
for _kind in _UNARY_NUMBER:
    sample(_kind, "T[33]", dtypes=INTS)
    refuse(_kind, "bool[3]", because="not defined for bool")
for _kind in _UNARY_FLOAT:
    refuse(_kind, "i64[3]", because="needs a floating-point operand")
for _kind in ("log", "sqrt", "rsqrt"):
    sample(_kind, "T[3,37]", dtypes=("f32", "f64"), draws=positive)
    sample(_kind, "f32[0]")
    sample(_kind, "T[21]", dtypes=HALF, draws=positive)
    sample(_kind, "T[40]", dtypes=("f32", "f64"), draws=nasty)
    refuse(_kind, "i32[3]", because="needs a floating-point operand")
for _kind in ("neg", "abs", "sign", "exp", "tanh", "sigmoid", "relu", "erf", "floor", "round", "atan"):
    sample(_kind, "f32[40]", draws=nasty)
sample("round", "T[64]", dtypes=FLOATS, draws=halves)
sample("gelu", "f32[64]", approximate="tanh")
sample("gelu", "f64[9]", approximate="tanh")
refuse("gelu", "f32[3]", approximate="exact", because="approximate")
refuse("gelu", "f32[3]", approximate=1, because="attribute approximate must be str")
refuse("exp", "f32[3]", "f32[3]", because="takes 1 operands, got 2")
refuse("exp", "f32[3]", axis=0, because="has no attribute 'axis'")
sample("not", "T[35]", dtypes=("bool",))
sample("not", "bool[0,3]")
refuse("not", "i64[3]", because="needs bool operands")
for _from in DTYPES:
    for _to in DTYPES:
        # Floats to unsigned: negative ones have no meaning.
        sample("cast", f"{_from}[2,21]", draws=positive if _to in UNSIGNED and _from != "bool" else normal, dtype=_to)
sample("cast", "f32[0,3]", dtype="i64")
sample("cast", "f32[]", dtype="bool")
refuse("cast", "f32[3]", dtype="float", because="unknown element type 'float'")

_BROADCASTS = (("T[4,1]", "T[37]"), ("T[2,3,16]", "T[3,1]"), ("T[]", "T[5]"), ("T[1,1]", "T[5]"), ("T[0,3]", "T[3]"))
_COMPARE = ("equal", "less", "less_equal")
for _kind in ("add", "sub", "mul", "div", "rem", "pow", "minimum", "maximum", *_COMPARE):
    _draw = positive if _kind in ("pow", "div", "rem") else ties if _kind in _COMPARE else normal
    sample(_kind, "T[3,37]", "T[3,37]", dtypes=("f32", "f64"), draws=_draw)
    sample(_kind, "T[21]", "T[21]", dtypes=HALF, draws=_draw)
    for _a, _b in _BROADCASTS:
        sample(_kind, _a, _b, draws=_draw)
    if _kind != "pow":
        sample(_kind, "T[3,11]", "T[11]", dtypes=INTS, draws=_draw)
    refuse(_kind, "f32[3]", "f32[4]", because="do not broadcast")
    refuse(_kind, "f32[3]", "f64[3]", because="element types differ")
    if _kind not in _COMPARE:
        refuse(
            _kind,
            "bool[3]",
            "bool[3]",
            because="not defined for bool" if _kind != "pow" else "needs a floating-point operand",
        )
sample("div", "T[50]", "T[50]", dtypes=("i64", "i32", "i16", "i8"), draws=wrapping)
sample("div", "T[50]", "T[50]", dtypes=("u32", "u16", "u8"), draws=wrapping)
sample("div", "f32[50]", "f32[50]", draws=nasty)
for _kind in ("add", "sub", "mul"):
    sample(_kind, "T[50]", "T[50]", dtypes=INTS, draws=wrapping)
for _kind in ("minimum", "maximum", *_COMPARE):
    sample(_kind, "T[50]", "T[50]", dtypes=("f32", "f64"), draws=nasty)
for _kind in _COMPARE:
    sample(_kind, "T[35]", "T[35]", dtypes=("bool",))
_JUDGED = tuple(t for t in INTS if t != "u64")  # of which torch has the order
sample("rem", "T[50]", "T[50]", dtypes=_JUDGED, draws=wrapping)
sample("rem", "T[50]", "T[50]", dtypes=("f32", "f64"), draws=nasty)
for _kind in ("bit_and", "bit_or", "bit_xor", "shift_left", "shift_right"):
    _draw = normal if "bit" in _kind else positive
    sample(_kind, "T[3,11]", "T[11]", dtypes=INTS, draws=_draw)
    sample(_kind, "T[0,3]", "T[3]", dtypes=("i64",), draws=_draw)
    refuse(_kind, "f32[3]", "f32[3]", because="needs integer operands")
    refuse(_kind, "i64[3]", "i32[3]", because="element types differ")
for _kind in ("shift_left", "shift_right"):
    sample(_kind, "T[50]", "T[50]", dtypes=_JUDGED, draws=(wrapping, shift))
    sample(_kind, "T[50]", "T[50]", dtypes=("i64", "i8"), draws=(wrapping, shift_either_way))
for _kind in ("bit_and", "bit_or", "bit_xor"):
    sample(_kind, "T[50]", "T[50]", dtypes=INTS, draws=wrapping)
for _from in NUMBERS:
    for _to in NUMBERS:
        if ITEM_BYTES[_from] == ITEM_BYTES[_to] and (_from not in HALF or _to not in HALF or _from == _to):
            sample("bitcast", f"{_from}[2,21]", dtype=_to, draws=normal if _from in FLOATS or _to in INTS else patterns)
sample("bitcast", "T[5]", dtypes=NUMBERS, dtype="T")
sample("bitcast", "f32[0,3]", dtype="i32")
refuse("bitcast", "f32[3]", dtype="i64", because="differ in width")
refuse("bitcast", "bool[3]", dtype="u8", because="not defined for bool")
for _kind in ("and", "or"):
    sample(_kind, "T[3,20]", "T[20]", dtypes=("bool",))
    sample(_kind, "bool[0]", "bool[1]")
    refuse(_kind, "f32[3]", "bool[3]", because="needs bool operands")
sample("where", "bool[3,1]", "T[3,20]", "T[]", dtypes=DTYPES)
sample("where", "bool[17]", "f32[17]", "f32[17]")
sample("where", "bool[2,0]", "f32[]", "f32[2,1]")
sample("where", "bool[]", "i64[5]", "i64[5]")
refuse("where", "i64[3]", "f32[3]", "f32[3]", because="the condition must be bool")
refuse("where", "bool[3]", "f32[3]", "i64[3]", because="element types differ")
for _kind in ("relu_grad", "gelu_grad"):
    sample(_kind, "T[5,21]", "T[5,21]", dtypes=FLOATS)
    sample(_kind, "f32[0]", "f32[0]")
    refuse(_kind, "i64[3]", "i64[3]", because="needs a floating-point operand")
sample("gelu_grad", "f32[50]", "f32[50]", approximate="tanh")
