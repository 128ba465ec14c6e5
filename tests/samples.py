"""Sample operands for every row of the op table: one table for every judge of the rows.

`SAMPLES` are operations that must work: the interpreter is compared with torch on them, compiled kernels with the interpreter, on every
device. `REFUSED` are operations that must be refused when their types are inferred, with a message that says why.

A row is sampled with ragged sizes (no multiple of a vector), broadcasting, dimensions of size 1 and 0, a scalar where it takes one, every
element type it claims (`T` in a type stands for it), and the attributes that change its meaning. Half-precision samples are small: they are
about the element type, the others about loops.

Data are drawn from a seed that belongs to the sample, so every judge sees the same numbers.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from penstock.ir.graph import Attr, Graph, Op, Value
from penstock.ir.numpy_ops import Rule
from penstock.ir.ops import complete_attrs, infer_op, make
from penstock.ir.types import DTYPES, FLOATS, INTS, TensorType, numpy_dtype, parse_type

HALF = ("f16", "bf16")
SINGLE = ("f32",)
NUMBERS = (*FLOATS, *INTS)

Array = np.ndarray
Draw = Callable[[np.random.Generator, TensorType], Array]


# ---------------------------------------------------------------------------------------- data


def normal(rng: np.random.Generator, t: TensorType) -> Array:
    """What most operations take: normal floats, small integers with repetitions, bools."""
    if t.dtype == "bool":
        drawn = rng.random(t.dims) > 0.5
    elif t.dtype in FLOATS:
        drawn = rng.standard_normal(t.dims)
    else:
        drawn = rng.integers(0 if t.dtype == "u8" else -4, 5, t.dims)
    return np.asarray(drawn).astype(numpy_dtype(t.dtype))


def positive(rng: np.random.Generator, t: TensorType) -> Array:
    """At least 0.1, or 1 for integers."""
    if t.dtype in FLOATS:
        return np.asarray(np.abs(rng.standard_normal(t.dims)) + 0.1).astype(numpy_dtype(t.dtype))
    return np.asarray(rng.integers(1, 6, t.dims)).astype(numpy_dtype(t.dtype))


def fraction(rng: np.random.Generator, t: TensorType) -> Array:
    """Between 0.1 and 0.9: what 1 - beta^t may be."""
    return np.asarray(rng.uniform(0.1, 0.9, t.dims)).astype(numpy_dtype(t.dtype))


def ties(rng: np.random.Generator, t: TensorType) -> Array:
    """Few different values."""
    return np.asarray(rng.integers(0, 3, t.dims)).astype(numpy_dtype(t.dtype))


def nasty(rng: np.random.Generator, t: TensorType) -> Array:
    """Ties, infinities, both zeros and some nan."""
    values = np.array([0.0, -0.0, 1.0, -2.5, 1.0, np.inf, -np.inf, 3.0, -1e-3, np.nan])
    return rng.choice(values, t.dims).astype(numpy_dtype(t.dtype))


def huge(rng: np.random.Generator, t: TensorType) -> Array:
    """Where exponentials overflow unless the largest is taken off first."""
    return np.asarray(rng.standard_normal(t.dims) * 300).astype(numpy_dtype(t.dtype))


def wrapping(rng: np.random.Generator, t: TensorType) -> Array:
    """The ends of an integer type, and what divides them badly."""
    limits = np.iinfo(numpy_dtype(t.dtype))
    return rng.choice(np.array([limits.min, limits.max, 0, 1, 7] + ([-1, -7] if limits.min else [3])), t.dims).astype(numpy_dtype(t.dtype))


def index(size: int) -> Draw:
    """Positions in a dimension, also counted from the end."""

    def draw(rng: np.random.Generator, t: TensorType) -> Array:
        low = 0 if t.dtype == "u8" else -size
        return np.asarray(rng.integers(low, size, t.dims)).astype(numpy_dtype(t.dtype))

    return draw


def label(size: int) -> Draw:
    return lambda rng, t: np.asarray(rng.integers(0, size, t.dims)).astype(numpy_dtype(t.dtype))


# ---------------------------------------------------------------------------------------- the tables


@dataclass(frozen=True)
class Sample:
    """One operation on operands of given types. `pattern` are types and attributes before an element type was put in for `T`, if it was."""

    kind: str
    types: tuple[str, ...]
    attrs: Mapping[str, Attr]
    draws: tuple[Draw, ...]
    pattern: tuple[tuple[str, ...], Mapping[str, Attr]]
    dtype: str

    @property
    def op(self) -> Op:
        ins = tuple(Value(f"x{i}", parse_type(t)) for i, t in enumerate(self.types))
        count = len(infer_op(Op(self.kind, ins, (), self.attrs), {}))
        return make(self.kind, ins, [f"y{i}" for i in range(count)], "", **self.attrs)

    def graph(self, name: str) -> Graph:
        """A graph of this operation alone."""
        op = self.op
        return Graph(name, op.ins, op.outs, (op,))

    def arrays(self) -> list[Array]:
        rng = np.random.default_rng(zlib.crc32(str(self).encode()))
        draws = (*self.draws, *(normal,) * len(self.types))
        arrays = [draw(rng, parse_type(t)) for t, draw in zip(self.types, draws, strict=False)]
        return RELATED[self.kind](arrays, complete_attrs(self.op)) if self.kind in RELATED else arrays

    def __str__(self) -> str:
        return f"{self.kind}({', '.join(self.types)}{''.join(f', {k}={v}' for k, v in self.attrs.items())})"


@dataclass(frozen=True)
class Refused:
    """An operation that must not get past type inference; `message` is a regular expression."""

    kind: str
    types: tuple[str, ...]
    attrs: Mapping[str, Attr]
    message: str

    def __str__(self) -> str:
        return f"{self.kind}({', '.join(self.types)}{''.join(f', {k}={v}' for k, v in self.attrs.items())})"


SAMPLES: list[Sample] = []
REFUSED: list[Refused] = []


def sample(kind: str, *pattern: str, dtypes: Sequence[str] = SINGLE, draws: Sequence[Draw] | Draw = (), **attrs: object) -> None:
    """Add an operation for each element type; one draw stands for all operands."""
    chosen = tuple(draws) if isinstance(draws, Sequence) else (draws,) * len(pattern)
    for dtype in dtypes:
        types, filled = fill((pattern, attrs), dtype)
        named = types[0].partition("[")[0] if types and not any("T" in p for p in pattern) else dtype
        SAMPLES.append(Sample(kind, types, filled, chosen, (pattern, attrs), named))  # type: ignore[arg-type]


def fill(pattern: tuple[tuple[str, ...], Mapping[str, object]], dtype: str) -> tuple[tuple[str, ...], dict[str, object]]:
    """Types and attributes with an element type in the place of `T`."""
    types, attrs = pattern
    return tuple(t.replace("T", dtype) for t in types), {k: dtype if v == "T" else v for k, v in attrs.items()}


def is_open(s: Sample) -> bool:
    """Whether a sample stands for several element types."""
    types, attrs = s.pattern
    return any("T" in t for t in types) or "T" in attrs.values()


def refuse(kind: str, *types: str, because: str, **attrs: object) -> None:
    REFUSED.append(Refused(kind, types, attrs, because))  # type: ignore[arg-type]


def samples_of(kind: str) -> list[Sample]:
    return [s for s in SAMPLES if s.kind == kind]


def unsampled(kinds: Iterator[str] | Sequence[str]) -> set[str]:
    """Rows that nobody looks at."""
    return set(kinds) - {s.kind for s in SAMPLES}


def touched(rule: Rule) -> Rule:
    """A rule with the last element of its first result changed: what any comparison must at least see."""

    def wrong(x: Sequence[Array], a: Mapping[str, Any]) -> tuple[Array, ...]:
        first, *rest = (np.array(y) for y in rule(x, a))
        if first.size:
            at = tuple(n - 1 for n in first.shape)
            first[at] = ~first[at] if first.dtype == bool else 1 if not np.isfinite(first[at]) else first[at] + first.dtype.type(1)
        return (first, *rest)

    return wrong


# ---------------------------------------------------------------------------------------- operands that belong together


def _to_torch(array: Array) -> torch.Tensor:
    return torch.tensor(array.astype(np.float64))


def _replaced(arrays: list[Array], **changed: torch.Tensor) -> list[Array]:
    """Operands by position (`x1`), rounded to the element type they had."""
    found = list(arrays)
    for name, value in changed.items():
        i = int(name[1:])
        found[i] = np.asarray(value.numpy()).astype(arrays[i].dtype).reshape(arrays[i].shape)
    return found


def _max_pool_grad(arrays: list[Array], a: Mapping[str, Attr]) -> list[Array]:
    from penstock.ir.numpy_ops import NUMPY

    (largest,) = NUMPY["max_pool"]([arrays[0].astype(np.float64)], a)
    return [arrays[0], largest.astype(arrays[1].dtype), arrays[2]]


def _softmax_grad(arrays: list[Array], a: Mapping[str, Attr]) -> list[Array]:
    return _replaced(arrays, x0=torch.softmax(_to_torch(arrays[0]), a["axis"]))


def _log_softmax_grad(arrays: list[Array], a: Mapping[str, Attr]) -> list[Array]:
    return _replaced(arrays, x0=torch.log_softmax(_to_torch(arrays[0]), a["axis"]))


def _statistics(x: Array, axis: int) -> tuple[torch.Tensor, torch.Tensor]:
    dims = tuple(range(axis % x.ndim, x.ndim))
    data = _to_torch(x)
    mean = data.mean(dims)
    return mean, (((data - mean.reshape(*mean.shape, *(1,) * len(dims))) ** 2).mean(dims) + 1e-5).rsqrt()


def _layer_norm_grad(arrays: list[Array], a: Mapping[str, Attr]) -> list[Array]:
    mean, rstd = _statistics(arrays[1], a["axis"])
    return _replaced(arrays, x3=mean, x4=rstd)


def _layer_norm_grad_weight(arrays: list[Array], a: Mapping[str, Attr]) -> list[Array]:
    mean, rstd = _statistics(arrays[1], a["axis"])
    return _replaced(arrays, x2=mean, x3=rstd)


def _cross_entropy_grad(arrays: list[Array], a: Mapping[str, Attr]) -> list[Array]:
    return _replaced(arrays, x2=torch.logsumexp(_to_torch(arrays[0]), -1))


def _attention_grad(x: list[Array], a: Mapping[str, Attr]) -> list[Array]:
    """Result and statistics that belong to the operands;"""
    from torch_meaning import MEANING

    operands = [torch.tensor(t if t.dtype == bool else t.astype(np.float64)) for t in (*x[1:4], *x[7:])]
    results = MEANING["attention"](*operands, **a)
    return [*x[:4], *(np.asarray(r.numpy()).astype(old.dtype) for r, old in zip(results, x[4:7], strict=True)), *x[7:]]


# kind -> operands and complete attributes -> operands as a gradient gets them
RELATED: dict[str, Callable[[list[Array], Mapping[str, Attr]], list[Array]]] = {
    "attention_grad": _attention_grad,
    "max_pool_grad": _max_pool_grad,
    "softmax_grad": _softmax_grad,
    "log_softmax_grad": _log_softmax_grad,
    "layer_norm_grad": _layer_norm_grad,
    "layer_norm_grad_weight": _layer_norm_grad_weight,
    "cross_entropy_grad": _cross_entropy_grad,
}


# ---------------------------------------------------------------------------------------- sources

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

# ---------------------------------------------------------------------------------------- elementwise

_UNARY_FLOAT = ("floor", "exp", "sin", "cos", "tanh", "sigmoid", "erf", "gelu")
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
for _kind in ("neg", "abs", "sign", "exp", "tanh", "sigmoid", "relu", "erf"):
    sample(_kind, "f32[40]", draws=nasty)
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
        sample("cast", f"{_from}[2,21]", draws=positive if _to == "u8" and _from != "bool" else normal, dtype=_to)
sample("cast", "f32[0,3]", dtype="i64")
sample("cast", "f32[]", dtype="bool")
refuse("cast", "f32[3]", dtype="float", because="unknown element type 'float'")

_BROADCASTS = (("T[4,1]", "T[37]"), ("T[2,3,16]", "T[3,1]"), ("T[]", "T[5]"), ("T[1,1]", "T[5]"), ("T[0,3]", "T[3]"))
_COMPARE = ("equal", "less", "less_equal")
for _kind in ("add", "sub", "mul", "div", "pow", "minimum", "maximum", *_COMPARE):
    _draw = positive if _kind in ("pow", "div") else ties if _kind in _COMPARE else normal
    sample(_kind, "T[3,37]", "T[3,37]", dtypes=("f32", "f64"), draws=_draw)
    sample(_kind, "T[21]", "T[21]", dtypes=HALF, draws=_draw)
    for _a, _b in _BROADCASTS:
        sample(_kind, _a, _b, draws=_draw)
    if _kind != "pow":
        sample(_kind, "T[3,11]", "T[11]", dtypes=INTS, draws=_draw)
    refuse(_kind, "f32[3]", "f32[4]", because="do not broadcast")
    refuse(_kind, "f32[3]", "f64[3]", because="element types differ")
    if _kind not in _COMPARE:
        refuse(_kind, "bool[3]", "bool[3]", because="not defined for bool" if _kind != "pow" else "needs a floating-point operand")
sample("div", "T[50]", "T[50]", dtypes=("i64", "i32", "i8"), draws=wrapping)
sample("div", "T[50]", "T[50]", dtypes=("u8",), draws=wrapping)
sample("div", "f32[50]", "f32[50]", draws=nasty)
for _kind in ("add", "sub", "mul"):
    sample(_kind, "T[50]", "T[50]", dtypes=INTS, draws=wrapping)
for _kind in ("minimum", "maximum", *_COMPARE):
    sample(_kind, "T[50]", "T[50]", dtypes=("f32", "f64"), draws=nasty)
for _kind in _COMPARE:
    sample(_kind, "T[35]", "T[35]", dtypes=("bool",))
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

# ---------------------------------------------------------------------------------------- layout

sample("reshape", "T[4,6,10]", dtypes=DTYPES, shape=(8, 30))
sample("reshape", "f32[1,1]", shape=())
sample("reshape", "f32[]", shape=(1, 1))
sample("reshape", "f32[0,3]", shape=(7, 0))
refuse("reshape", "f32[4,6]", shape=(5, 5), because="has 24 elements")
sample("transpose", "T[4,6,10]", dtypes=DTYPES, perm=(2, 0, 1))
sample("transpose", "f32[4,6,32]", perm=(1, 0, 2))
sample("transpose", "f32[33,45]", perm=(1, 0))
sample("transpose", "f32[2,17,3,19]", perm=(0, 3, 2, 1))
sample("transpose", "f32[]", perm=())
sample("transpose", "f32[0,3]", perm=(1, 0))
refuse("transpose", "f32[3,4]", perm=(0, 0), because="not a permutation")
refuse("transpose", "f32[3,4]", perm=(0,), because="not a permutation")
sample("broadcast", "T[3,1]", dtypes=DTYPES, shape=(2, 3, 20))
sample("broadcast", "f32[]", shape=(4, 5))
sample("broadcast", "f32[1]", shape=(0,))
refuse("broadcast", "f32[3]", shape=(4,), because="do not broadcast")
refuse("broadcast", "f32[3,4]", shape=(4,), because="does not broadcast")
sample("slice", "T[8,20]", dtypes=DTYPES, start=(1, 2), stop=(7, 19), step=(2, 3))
sample("slice", "f32[5,40]", start=(0, 3), stop=(5, 40), step=(1, 1))
sample("slice", "f32[5,4]", start=(2, 0), stop=(2, 4), step=(1, 1))
sample("slice", "f32[]", start=(), stop=(), step=())
refuse("slice", "f32[5]", start=(0,), stop=(6,), step=(1,), because="does not lie in dimension 0")
refuse("slice", "f32[5]", start=(0,), stop=(5,), step=(0,), because="step >= 1")
refuse("slice", "f32[5,5]", start=(0,), stop=(5,), step=(1,), because="need 2 entries")
sample("pad", "T[3,5]", dtypes=DTYPES, low=(1, 2), high=(0, 3), value=1.0)
sample("pad", "f32[3,5]", low=(1, 2), high=(0, 3), inner=(1, 2), value=-0.5)
sample("pad", "f32[0,5]", low=(1, 2), high=(0, 3))
sample("pad", "f32[2,0]", low=(0, 0), high=(1, 0))
sample("pad", "f32[]", low=(), high=())
refuse("pad", "f32[3]", low=(-1,), high=(0,), because="must not be negative")
refuse("pad", "f32[3,3]", low=(1,), high=(0,), because="need 2 entries")
sample("concat", "T[2,3]", "T[4,3]", dtypes=DTYPES, axis=0)
sample("concat", "f32[2,3]", "f32[2,17]", "f32[2,1]", axis=-1)
sample("concat", "f32[2,3]", "f32[2,0]", "f32[2,4]", axis=1)
sample("concat", "f32[2,0]", "f32[2,0]", axis=1)
sample("concat", "f32[5]", axis=0)
refuse("concat", "f32[2,3]", "f32[2,4]", axis=0, because="differ outside axis 0")
refuse("concat", "f32[2]", "f64[2]", axis=0, because="differ outside axis 0")
refuse("concat", "f32[]", "f32[]", axis=0, because="axis 0 is outside")
refuse("concat", axis=0, because="takes 1 or more operands, got 0")

# ---------------------------------------------------------------------------------------- reductions

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
for _pattern, _axis in (("f32[4,37]", 1), ("f32[4,37]", 0), ("f32[2,40,3]", -2), ("f32[5,1]", 1), ("f32[0,5]", 1), ("f32[5]", 0)):
    sample("argmax", _pattern, axis=_axis)
sample("argmax", "T[3,20]", dtypes=(*HALF, *INTS, "f64"), axis=-1, draws=ties)
sample("argmax", "f32[6,40]", axis=-1, draws=nasty)
refuse("argmax", "f32[3]", axis=1, because="axis 1 is outside")
refuse("argmax", "bool[3]", axis=0, because="not defined for bool")
refuse("argmax", "f32[0]", axis=0, because="no largest")

# ---------------------------------------------------------------------------------------- contractions

for _a, _b, _turned in (
    ("f32[33,48]", "f32[48,50]", ""),
    ("f32[33,48]", "f32[50,48]", "b"),
    ("f32[48,33]", "f32[48,50]", "a"),
    ("f32[48,33]", "f32[50,48]", "ab"),
    ("f32[2,3,17,8]", "f32[2,3,8,9]", ""),
    ("f32[2,3,17,8]", "f32[8,9]", ""),
    ("f32[17,8]", "f32[2,1,8,9]", ""),
    ("f32[2,1,3,4]", "f32[5,4,6]", ""),
    ("f32[1,100]", "f32[100,70]", ""),
    ("f32[1,100]", "f32[70,100]", "b"),
    ("f32[4,100]", "f32[70,100]", "b"),
    ("f32[20,5000]", "f32[5000,33]", ""),
    ("f32[9000,20]", "f32[9000,33]", "a"),
    ("f32[1100,20]", "f32[20,64]", ""),
    ("f32[20,1100]", "f32[20,64]", "a"),
    ("f32[1,1]", "f32[1,1]", ""),
    ("f32[3,1]", "f32[1,4]", ""),
    # Strips of panels and a shorter last one, tiles of few rows, squares transposed in registers with rows and columns left over.
    ("f32[31,20]", "f32[20,333]", ""),
    ("f32[31,35]", "f32[167,35]", "b"),
    ("f32[19,68]", "f32[19,205]", "a"),
    ("f32[2,19,62]", "f32[2,19,67]", "a"),
    ("f32[41,77]", "f32[150,41]", "ab"),
    ("f64[21,37]", "f64[90,21]", "ab"),
    ("f64[29,21]", "f64[90,21]", "b"),
    # Nothing to add up, no rows, no columns, no matrices.
    ("f32[3,0]", "f32[0,5]", ""),
    ("f32[0,4]", "f32[4,5]", ""),
    ("f32[3,4]", "f32[4,0]", ""),
    ("f32[0,3,4]", "f32[4,5]", ""),
):
    sample("matmul", _a, _b, ta="a" in _turned, tb="b" in _turned)
sample("matmul", "T[5,7]", "T[7,20]", dtypes=(*HALF, *INTS, "f64"))
sample("matmul", "T[7,5]", "T[20,7]", dtypes=(*HALF, "i32"), ta=True, tb=True)
refuse("matmul", "f32[3,4]", "f32[5,6]", because="inner sizes differ")
refuse("matmul", "f32[4]", "f32[4,5]", because="at least two dimensions")
refuse("matmul", "f32[3,4]", "f64[4,5]", because="element types differ")
refuse("matmul", "f32[2,3,4]", "f32[3,4,5]", because="do not broadcast")
refuse("matmul", "bool[3,4]", "bool[4,5]", because="not defined for bool")


def _dims(shape: tuple[int, ...], dtype: str = "T") -> str:
    return f"{dtype}[{','.join(map(str, shape))}]"


def convolution(
    x: tuple[int, ...], filters: int, kernel: tuple[int, ...], groups: int = 1, dtypes: Sequence[str] = SINGLE, **window: tuple[int, ...]
) -> None:
    """A convolution and both its gradients."""
    w = (filters, x[1] // groups, *kernel)
    attrs = {**window, "groups": groups}
    ins = tuple(Value(n, parse_type(_dims(shape, "f32"))) for n, shape in (("x", x), ("w", w)))
    out = infer_op(Op("conv", ins, (), attrs), {})[0].dims
    sample("conv", _dims(x), _dims(w), dtypes=dtypes, **attrs)
    sample("conv_grad_input", _dims(out), _dims(w), dtypes=dtypes, shape=x, **attrs)
    sample("conv_grad_weight", _dims(x), _dims(out), dtypes=dtypes, shape=w, **attrs)


# Channels fill lanes, one panel and several, the last one partly; odd sizes; tiles of one row and of several.
convolution((2, 4, 9, 11), 6, (3, 3), pads=(1, 1, 1, 1))
convolution((2, 5, 13, 17), 40, (3, 3), pads=(1, 1, 1, 1))
convolution((2, 16, 7, 7), 64, (3, 3), pads=(1, 1, 1, 1))
convolution((1, 3, 33, 31), 32, (7, 7), strides=(2, 2), pads=(3, 3, 3, 3))
convolution((2, 6, 14, 15), 24, (2, 3), strides=(3, 3), pads=(2, 0, 1, 1))
convolution((2, 18, 12, 19), 33, (3, 5), strides=(2, 1), pads=(0, 4, 2, 0), dilations=(1, 2))
convolution((2, 9, 16, 16), 17, (3, 3), strides=(2, 2), pads=(2, 2, 2, 2), dilations=(2, 2))
convolution((2, 12, 14, 14), 36, (3, 3), strides=(3, 2), pads=(1, 1, 1, 1), dilations=(2, 3))
# Windows that leave rows and columns unread, and border that no window reads.
convolution((2, 16, 10, 11), 32, (1, 1), strides=(3, 3))
convolution((2, 16, 10, 11), 32, (2, 2), strides=(4, 5), pads=(3, 3, 3, 3))
# Groups, depthwise, and few output channels.
convolution((2, 4, 9, 11), 6, (3, 3), groups=2, strides=(2, 2), dilations=(2, 1), pads=(0, 1, 0, 1))
convolution((2, 64, 9, 10), 48, (3, 3), groups=2, pads=(1, 1, 1, 1))
convolution((2, 20, 9, 40), 20, (3, 3), groups=20, pads=(1, 1, 1, 1))
convolution((2, 20, 11, 37), 40, (5, 5), groups=20, strides=(2, 2), pads=(2, 2, 2, 2))
convolution((2, 8, 11, 11), 8, (3, 3), groups=8, strides=(3, 3), dilations=(2, 2), pads=(0, 1, 2, 3))
convolution((2, 16, 20, 50), 3, (3, 3), pads=(1, 1, 1, 1))
# No border to copy, no taps but one, one and three spatial dimensions.
convolution((2, 48, 8, 9), 64, (1, 1))
convolution((2, 24, 17, 19), 30, (1, 1))
convolution((1, 1100, 16, 17), 20, (1, 1), groups=2)
convolution((3, 32, 17), 32, (4,), strides=(2,), pads=(1, 2))
convolution((2, 4, 5, 6, 7), 6, (3, 2, 3), strides=(1, 2, 1), pads=(1, 0, 1, 1, 1, 1))
# Other element types; no images, no channels, no output channels.
convolution((1, 8, 9, 9), 24, (3, 3), dtypes=("f64", *HALF), pads=(1, 1, 1, 1))
convolution((0, 4, 9, 9), 6, (3, 3))
convolution((2, 0, 5, 5), 6, (3, 3))
convolution((2, 4, 5, 5), 0, (3, 3))
refuse("conv", "f32[2,4,9,9]", "f32[6,3,3,3]", because="takes 3")
refuse("conv", "f32[2,4,9,9]", "f32[6,4,3]", because="spatial dimension")
refuse("conv", "f32[2,4,2,2]", "f32[6,4,3,3]", because="does not fit into 2")
refuse("conv", "f32[2,4,9,9]", "f32[5,2,3,3]", groups=2, because="do not divide into 2 groups")
refuse("conv", "f32[2,4,9,9]", "f32[6,4,3,3]", strides=(1,), because="do not fit 2 spatial dimensions")
refuse("conv", "f32[2,4,9,9]", "f64[6,4,3,3]", because="element types differ")
refuse("conv", "i64[2,4,9,9]", "i64[6,4,3,3]", because="floating-point")
refuse("conv", "f32[2,4,9,9]", "f32[6,4,3,3]", groups=0, because="groups")
refuse("conv", "f32[2,4,9,9]", "f32[6,4,3,3]", strides=(0, 1), because="strides")
refuse("conv", "f32[2,4,9,9]", "f32[6,4,3,3]", dilations=(1, 0), because="dilations")
refuse("conv_grad_input", "f32[2,6,7,7]", "f32[6,4,3,3]", shape=(2, 4, 8, 9), because="but the gradient is")
refuse("conv_grad_input", "f32[2,6,7,7]", "f64[6,4,3,3]", shape=(2, 4, 9, 9), because="element types differ")
refuse("conv_grad_weight", "f32[2,4,9,9]", "f32[2,6,7,7]", shape=(6, 4, 3, 2), because="but the gradient is")
refuse("conv_grad_weight", "f32[2,4,9,9]", "f64[2,6,7,7]", shape=(6, 4, 3, 3), because="element types differ")

_HEADS = ("T[2,3,9,8]", "T[2,3,9,8]", "T[2,3,9,5]")
_LONG = ("f32[1,2,37,16]",) * 3
sample("attention", *_HEADS, dtypes=FLOATS, scale=0.4)
sample("attention", *_LONG, scale=0.25, causal=True)
sample("attention", "f32[2,1,4,8]", "f32[2,1,11,8]", "f32[2,1,11,3]", scale=1.0)
sample("attention", *_HEADS, "bool[2,1,1,9]", dtypes=("f32", "f16"), scale=0.4)
sample("attention", *_LONG, "f32[37,37]", scale=0.25, causal=True)
sample("attention", "f32[0,2,4,8]", "f32[0,2,4,8]", "f32[0,2,4,8]", scale=1.0)
refuse("attention", "f32[2,3,4]", "f32[2,3,4]", "f32[2,3,4]", scale=1.0, because="needs \\[batch, heads, positions, size\\]")
refuse("attention", "f32[2,3,4,5]", "f32[2,3,4,6]", "f32[2,3,4,5]", scale=1.0, because="do not fit")
refuse("attention", "f32[2,3,4,5]", "f32[2,3,4,5]", "f32[2,3,4,5]", because="attribute scale is missing")
refuse("attention", "f32[2,3,4,5]", "f32[2,3,0,5]", "f32[2,3,0,5]", scale=1.0, because="must not be empty")
refuse("attention", *("f32[2,3,4,5]",) * 3, "i64[4,4]", scale=1.0, because="the mask must be bool or f32")
refuse("attention", *("f32[2,3,4,5]",) * 3, "bool[3,4]", scale=1.0, because="broadcast")

_GRAD, _ROWS = ("T[2,3,9,5]", *_HEADS, "T[2,3,9,5]"), ("[2,3,9]",) * 2
sample("attention_grad", *_GRAD, *("T" + r for r in _ROWS), dtypes=("f32", "f64"), scale=0.4)
sample("attention_grad", *_GRAD, *("f32" + r for r in _ROWS), dtypes=("f32", *HALF), scale=0.4, causal=True)
sample("attention_grad", *(_LONG[:1] * 5), *("f32[1,2,37]",) * 2, "f32[37,37]", scale=0.25, causal=True)
sample("attention_grad", *(_LONG[:1] * 5), *("f32[1,2,37]",) * 2, "bool[1,1,37]", scale=0.25)
sample("attention_grad", *("f32[0,2,4,8]",) * 5, *("f32[0,2,4]",) * 2, scale=1.0)
refuse("attention_grad", *("f32[2,3,4,5]",) * 5, *("f32[2,3,5]",) * 2, scale=1.0, because="expected row statistics")
refuse("attention_grad", "f32[2,3,4,6]", *("f32[2,3,4,5]",) * 4, *("f32[2,3,4]",) * 2, scale=1.0, because="result and gradient are")

# ---------------------------------------------------------------------------------------- windows

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
refuse("max_pool_grad", "f32[2,3,8]", "f32[2,3,4]", "f32[2,3,5]", window=(3,), dilations=(2,), because="result and gradient are")

# ---------------------------------------------------------------------------------------- rows

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

# ---------------------------------------------------------------------------------------- indexing

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

# ---------------------------------------------------------------------------------------- losses and optimisers

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
_W = "T[5,33]"
for _kind, _states, _scalars, _variants in (
    ("sgd", 0, 1, ({}, {"weight_decay": 0.1})),
    ("momentum", 1, 1, ({}, {"nesterov": True, "weight_decay": 0.1}, {"beta": 0.5})),
    ("adamw", 2, 3, ({}, {"weight_decay": 0.1, "beta1": 0.8, "beta2": 0.9, "eps": 1e-4})),
):
    # The learning rate is positive; so are second moments and 1 - beta^t.
    _draws = (
        (normal, normal, normal, positive, fraction, fraction, positive) if _kind == "adamw" else (*(normal,) * (2 + _states), positive)
    )
    for _variant in _variants:
        sample(_kind, *[_W] * (2 + _states), *["T[]"] * _scalars, draws=_draws, **_variant)
    sample(_kind, *["T[9]"] * (2 + _states), *["T[]"] * _scalars, dtypes=("f64", *HALF), draws=_draws)
    sample(_kind, *["f32[]"] * (2 + _states + _scalars), draws=_draws)
    sample(_kind, *["f32[0,4]"] * (2 + _states), *["f32[]"] * _scalars, draws=_draws)
    refuse(_kind, "f32[4]", *["f32[5]"] * (1 + _states), *["f32[]"] * _scalars, because="weight, gradient and state differ")
    refuse(_kind, *["f32[4]"] * (2 + _states), *["f32[1]"] * _scalars, because=f"expected {_scalars} scalars")
    refuse(_kind, *["i64[4]"] * (2 + _states), *["i64[]"] * _scalars, because="floating-point")
