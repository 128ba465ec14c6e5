"""Products, convolutions, attention, and their gradients."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.ir.graph import Op, Value
from penstock.ir.ops import infer_op
from penstock.ir.types import FLOATS, INTS, parse_type

from .data import HALF, SINGLE
from .table import refuse, sample

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
    x: tuple[int, ...],
    filters: int,
    kernel: tuple[int, ...],
    groups: int = 1,
    dtypes: Sequence[str] = SINGLE,
    **window: tuple[int, ...],
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
refuse(
    "attention",
    "f32[2,3,4]",
    "f32[2,3,4]",
    "f32[2,3,4]",
    scale=1.0,
    because="needs \\[batch, heads, positions, size\\]",
)
refuse("attention", "f32[2,3,4,5]", "f32[2,3,4,6]", "f32[2,3,4,5]", scale=1.0, because="do not fit")
refuse("attention", "f32[2,3,4,5]", "f32[2,3,4,5]", "f32[2,3,4,5]", because="attribute scale is missing")
refuse("attention", "f32[2,3,4,5]", "f32[2,3,0,5]", "f32[2,3,0,5]", scale=1.0, because="must not be empty")
refuse("attention", *("f32[2,3,4,5]",) * 3, "i64[4,4]", scale=1.0, because="the mask must be bool or f32")
refuse("attention", *("f32[2,3,4,5]",) * 3, "bool[3,4]", scale=1.0, because="broadcast")

# Queries, cache twice, starts, lengths, table: sequences are made up by `related.py`.
for _pattern in (
    ("f32[9,4,8]", "T[7,16,2,8]", "T[7,16,2,8]", "i32[4]", "i32[3]", "i32[3,4]"),
    ("f32[5,3,20]", "T[9,16,1,20]", "T[9,16,1,20]", "i32[6]", "i32[5]", "i32[5,3]"),
):
    sample("attend", *_pattern, dtypes=("f32", "bf16"), scale=0.3)
_TURN = ("i32[3]", "i32[2]", "i32[2,20]")
sample("attend", "f32[3,16,64]", "f32[44,16,4,64]", "f32[44,16,4,64]", *_TURN, scale=0.125)
sample("attend", "f32[37,4,16]", "f32[20,16,2,16]", "f32[20,16,2,16]", *_TURN, scale=0.25, window=19)
sample("attend", "f32[37,4,16]", "f32[20,16,2,16]", "f32[20,16,2,16]", *_TURN, scale=0.25, cap=2.0)
sample("attend", "f32[37,4,16]", "f32[20,16,2,16]", "f32[20,16,2,16]", *_TURN, scale=0.25, window=4, cap=1.5)
sample("attend", "f32[0,4,16]", "f32[5,16,2,16]", "f32[5,16,2,16]", "i32[1]", "i32[0]", "i32[0,4]", scale=1.0)
_CACHE = ("f32[7,16,2,8]",) * 2
_SEQUENCES = ("i32[4]", "i32[3]", "i32[3,4]")
refuse("attend", "f32[9,4,8]", "f32[7,8,2,8]", "f32[7,8,2,8]", *_SEQUENCES, scale=1.0, because="f32 or bf16")
refuse("attend", "f32[9,4,6]", *_CACHE, *_SEQUENCES, scale=1.0, because="queries must be f32")
refuse("attend", "f32[9,3,8]", *_CACHE, *_SEQUENCES, scale=1.0, because="must be a multiple of the 2")
refuse("attend", "f32[9,4,8]", *_CACHE, "i32[3]", *_SEQUENCES[1:], scale=1.0, because="must be i32.4.")
refuse("attend", "f32[9,4,8]", *_CACHE, "i32[4]", "i64[3]", "i32[3,4]", scale=1.0, because="lengths must be i32")
refuse("attend", "f32[9,4,8]", *_CACHE, "i32[4]", "i32[3]", "i32[2,4]", scale=1.0, because="table must be i32.3")
refuse("attend", "f32[9,4,8]", *_CACHE, *_SEQUENCES, scale=1.0, window=-1, because="window must be 0 or more")
refuse("attend", "f32[9,4,8]", *_CACHE, *_SEQUENCES, scale=1.0, cap=-1.0, because="cap must be 0 or more")
refuse("attend", "f32[9,4,8]", *_CACHE, *_SEQUENCES, because="attribute scale is missing")

_GRAD, _ROWS = ("T[2,3,9,5]", *_HEADS, "T[2,3,9,5]"), ("[2,3,9]",) * 2
sample("attention_grad", *_GRAD, *("T" + r for r in _ROWS), dtypes=("f32", "f64"), scale=0.4)
sample("attention_grad", *_GRAD, *("f32" + r for r in _ROWS), dtypes=("f32", *HALF), scale=0.4, causal=True)
sample("attention_grad", *(_LONG[:1] * 5), *("f32[1,2,37]",) * 2, "f32[37,37]", scale=0.25, causal=True)
sample("attention_grad", *(_LONG[:1] * 5), *("f32[1,2,37]",) * 2, "bool[1,1,37]", scale=0.25)
sample("attention_grad", *("f32[0,2,4,8]",) * 5, *("f32[0,2,4]",) * 2, scale=1.0)
refuse("attention_grad", *("f32[2,3,4,5]",) * 5, *("f32[2,3,5]",) * 2, scale=1.0, because="expected row statistics")
refuse(
    "attention_grad",
    "f32[2,3,4,6]",
    *("f32[2,3,4,5]",) * 4,
    *("f32[2,3,4]",) * 2,
    scale=1.0,
    because="result and gradient are",
)
