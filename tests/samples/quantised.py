"""Weights of 8 and 4 bits by groups."""

from __future__ import annotations

from penstock.ir.types import INTS

from .data import HALF, any_number, index, normal, positive
from .table import refuse, sample

_OF_8, _OF_4 = (normal, any_number, positive, any_number), (normal, any_number, positive, any_number)
for act in ("f32", "i8"):
    sample(
        "matmul_q", "T[3,64]", "i8[21,64]", "f32[21,2]", dtypes=("f32", *HALF), draws=_OF_8, bits=8, group=32, act=act
    )
    sample("matmul_q", "f32[2,7,128]", "u8[33,64]", "f16[33,1]", draws=_OF_4, bits=4, group=128, act=act)
    sample("matmul_q", "f32[64]", "u8[16,32]", "f32[16,2]", "u8[16,2]", draws=_OF_4, bits=4, group=32, act=act)
    sample("matmul_q", "f32[1,128]", "i8[40,128]", "f16[40,2]", "u8[40,2]", draws=_OF_8, bits=8, group=64, act=act)
    sample("matmul_q", "f32[0,32]", "i8[3,32]", "f32[3,1]", draws=_OF_8, bits=8, group=32, act=act)
    sample("matmul_q", "f32[2,0]", "i8[3,0]", "f32[3,0]", draws=_OF_8, bits=8, group=32, act=act)
refuse("matmul_q", "f32[2,64]", "i8[3,64]", "f32[3,2]", bits=5, group=32, because="bits must be 4 or 8")
refuse("matmul_q", "f32[2,64]", "i8[3,64]", "f32[3,4]", bits=8, group=16, because="group must be one of 32, 64, 128")
refuse("matmul_q", "f32[2,64]", "u8[3,64]", "f32[3,2]", bits=8, group=32, because="must be i8 with two dimensions")
refuse("matmul_q", "f32[2,64]", "u8[3,24]", "f32[3,2]", bits=4, group=32, because="48 elements of a row do not divide")
refuse("matmul_q", "f32[2,64]", "i8[3,64]", "f64[3,2]", bits=8, group=32, because="scales must be f16 or f32")
refuse("matmul_q", "f32[2,64]", "i8[3,64]", "f32[3,1]", bits=8, group=32, because="scales must be f16 or f32")
refuse("matmul_q", "f32[2,64]", "i8[3,64]", "f32[3,2]", "i8[3,2]", bits=8, group=32, because="zeros must be u8")
refuse(
    "matmul_q", "f32[2,32]", "i8[3,64]", "f32[3,2]", bits=8, group=32, because="does not fit a weight with rows of 64"
)
refuse(
    "matmul_q", "f64[2,64]", "i8[3,64]", "f32[3,2]", bits=8, group=32, because="needs an operand of f32, f16 or bf16"
)
refuse("matmul_q", "f32[2,64]", "i8[3,64]", "f32[3,2]", bits=8, group=32, act="i4", because="act must be one of")

_BYTES = (any_number,) * 4
sample("matmul_bytes", "T[3,7]", "i8[7,21]", "T[]", "i8[21]", dtypes=("i8", "u8"), draws=_BYTES)
sample("matmul_bytes", "i8[2,3,64]", "u8[64,5]", "i8[]", "u8[5]", draws=_BYTES)
sample("matmul_bytes", "u8[33]", "u8[33,40]", "u8[]", "u8[40]", draws=_BYTES)
sample("matmul_bytes", "i8[13,100]", "i8[100,50]", "i8[]", "i8[50]", draws=_BYTES)
sample("matmul_bytes", "u8[0,4]", "i8[4,3]", "u8[]", "i8[3]", draws=_BYTES)
sample("matmul_bytes", "u8[2,0]", "i8[0,3]", "u8[]", "i8[3]", draws=_BYTES)
refuse("matmul_bytes", "f32[2,4]", "i8[4,3]", "f32[]", "i8[3]", because="needs whole numbers of 8 bits")
refuse("matmul_bytes", "u8[2,4]", "i8[5,3]", "u8[]", "i8[3]", because="does not fit")
refuse("matmul_bytes", "u8[2,4]", "i8[1,4,3]", "u8[]", "i8[3]", because="must have two dimensions")
refuse("matmul_bytes", "u8[2,4]", "i8[4,3]", "i8[]", "i8[3]", because="the zero point of")
refuse("matmul_bytes", "u8[2,4]", "i8[4,3]", "u8[]", "i8[]", because="the zero points of")
refuse("matmul_bytes", "u8[2,40000]", "i8[40000,3]", "u8[]", "i8[3]", because="may exceed 32 bits")

sample("conv_bytes", "T[2,7,5,6]", "i8[9,7,3,3]", "T[]", "i8[9]", dtypes=("i8", "u8"), draws=_BYTES, pads=(1, 0, 1, 2))
sample("conv_bytes", "u8[1,4,9]", "u8[6,2,3]", "u8[]", "u8[6]", draws=_BYTES, groups=2, strides=(2,))
sample("conv_bytes", "i8[1,5,4,4]", "i8[3,5,1,1]", "i8[]", "i8[3]", draws=_BYTES)
sample("conv_bytes", "u8[1,3,4,5,6]", "i8[2,3,2,1,3]", "u8[]", "i8[2]", draws=_BYTES, dilations=(2, 1, 1))
sample("conv_bytes", "u8[0,3,4]", "i8[2,3,2]", "u8[]", "i8[2]", draws=_BYTES)
refuse("conv_bytes", "f32[1,2,4]", "i8[3,2,3]", "f32[]", "i8[3]", because="needs whole numbers of 8 bits")
refuse("conv_bytes", "u8[1,2,4]", "i8[3,5,3]", "u8[]", "i8[3]", because="takes 5")
refuse("conv_bytes", "u8[1,2,4]", "i8[3,2,3]", "i8[]", "i8[3]", because="the zero point of")
refuse("conv_bytes", "u8[1,2,4]", "i8[3,2,3]", "u8[]", "i8[]", because="the zero points of")
refuse("conv_bytes", "u8[1,40000,4]", "i8[3,40000,3]", "u8[]", "i8[3]", because="may exceed 32 bits")

sample(
    "gather_q", "T[4]", "i8[9,64]", "f16[9,2]", dtypes=INTS, draws=(index(9), any_number, positive), bits=8, group=32
)
sample("gather_q", "i64[2,3]", "u8[9,64]", "f32[9,1]", draws=(index(9), any_number, positive), bits=4, group=128)
sample(
    "gather_q",
    "i32[5]",
    "u8[9,32]",
    "f32[9,2]",
    "u8[9,2]",
    draws=(index(9), any_number, positive, any_number),
    bits=4,
    group=32,
)
sample(
    "gather_q",
    "i32[5]",
    "i8[9,32]",
    "f32[9,1]",
    "u8[9,1]",
    draws=(index(9), any_number, positive, any_number),
    bits=8,
    group=32,
)
sample("gather_q", "i64[0]", "i8[9,32]", "f32[9,1]", draws=(index(9), any_number, positive), bits=8, group=32)
refuse("gather_q", "f32[4]", "i8[9,64]", "f16[9,2]", bits=8, group=32, because="indices must be integers")
refuse("gather_q", "i64[4]", "i8[0,64]", "f16[0,2]", bits=8, group=32, because="no entries")
refuse("gather_q", "i64[4]", "i8[9,64]", "f16[9,3]", bits=8, group=32, because="scales must be")
