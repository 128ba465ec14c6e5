"""A call or more for every row of the ATen tables: the row, the call, and its operands. Floating-point operands become parameters."""

from __future__ import annotations

import math

import torch

from .network_rows import ATTENTION, NEURAL, RECURRENT
from .operands import A, Case, b, distinct, f, i, p, u

UNARY = {
    "neg": f, "abs": f, "sign": f, "exp": f, "log": p, "sqrt": p, "rsqrt": p, "sin": f, "cos": f, "tanh": f, "sigmoid": f, "erf": f, "relu": f,
    "floor": f, "ceil": f, "trunc": f, "round": f, "exp2": f, "expm1": f, "log1p": p, "log2": p, "log10": p, "tan": u, "sinh": f, "cosh": f, "asin": u, "acos": u, "atan": f,
    "asinh": f, "atanh": u, "erfc": f, "reciprocal": p, "gelu": f, "silu": f, "mish": f, "selu": f, "elu": f, "leaky_relu": f, "hardtanh": f,
    "relu6": f, "hardsigmoid": f, "hardswish": f, "softplus": f,
}  # fmt: skip

# Exactly where they could lose precision or overflow.
EDGES = torch.tensor([-80.0, -20.0, -1.5, -1e-3, -1e-6, -0.0, 0.0, 1e-7, 1e-4, 0.3, 0.99, 1.0, 1.5, 20.0, 80.0])

SHIFTS = torch.tensor([0, 1, 5, 64, -1])


def unary_cases() -> list[Case]:
    cases: list[Case] = []
    for row, draw in UNARY.items():
        op = getattr(A, row).default
        cases.append((row, op, (draw(3, 4),)))
        if row in ("expm1", "sinh", "cosh", "asinh", "atan"):
            cases.append((row, op, (EDGES.clamp(-20, 20),)))
        if row in (
            "softplus",
            "mish",
            "gelu",
            "elu",
            "selu",
            "leaky_relu",
            "hardtanh",
            "relu6",
            "erf",
            "tanh",
            "sigmoid",
            "trunc",
            "round",
        ):
            cases.append((row, op, (EDGES.clone(),)))
        if row in ("exp", "sqrt", "tanh", "sigmoid"):  # of integers: floats
            cases.append((row, op, (i(1, 5, 3),)))
        if row in ("floor", "ceil", "trunc", "abs", "neg", "relu", "sign"):
            cases.append((row, op, (i(-3, 4, 5),)))
    return cases


def compared(name: str) -> list[Case]:
    op, scalar = getattr(A, name).Tensor, getattr(A, name).Scalar
    return [
        (f"{name}.Tensor", op, (f(3, 4), f(4))),
        (f"{name}.Tensor", op, (i(0, 3, 5), i(0, 3, 5))),
        (f"{name}.Tensor", op, (i(0, 3, 5), f(5))),
        (f"{name}.Tensor", op, (b(6), b(6))),
        (f"{name}.Scalar", lambda x: scalar(x, 1), (i(0, 3, 5),)),
        (f"{name}.Scalar", lambda x: scalar(x, 0.5), (i(0, 3, 5),)),
    ]


ELEMENTWISE: list[Case] = [
    *unary_cases(),
    ("log1p", A.log1p.default, (torch.tensor([-0.999, -0.6, -0.5, -1e-7, 0.0, 1e-7, 1e-3, 1.0, 5.0, 1e30]),)),
    ("acosh", A.acosh.default, (torch.tensor([1.001, 1.5, 3.0, 1e4]),)),
    ("gelu", lambda x: A.gelu(x, approximate="tanh"), (f(3, 4),)),
    ("elu", lambda x: A.elu(x, 0.7, 1.3, 0.5), (f(3, 4),)),
    ("softplus", lambda x: A.softplus(x, 2.0, 1.0), (f(3, 4),)),
    ("leaky_relu", lambda x: A.leaky_relu(x, 0.3), (f(3, 4),)),
    ("isnan", A.isnan.default, (torch.tensor([1.0, math.nan, math.inf]),)),
    ("round.decimals", lambda x: torch.round(x, decimals=2), (f(9),)),
    ("isnan", A.isnan.default, (i(0, 3, 3),)),
    ("isinf", A.isinf.default, (torch.tensor([1.0, math.nan, math.inf, -math.inf]),)),
    ("logical_not", A.logical_not.default, (i(0, 2, 4),)),
    ("view.dtype", lambda x: x.view(torch.int32), (f(2, 5),)),
    ("view.dtype", lambda x: x.view(torch.float32) * 2, (f(2, 5).view(torch.int32),)),
    ("view.dtype", lambda x: x.view(torch.uint8), (b(4),)),
    ("view.dtype", lambda x: x.view(torch.bool), (i(0, 2, 4).to(torch.int8),)),
    ("bitwise_not", A.bitwise_not.default, (b(4),)),
    ("bitwise_not", A.bitwise_not.default, (i(-3, 3, 4),)),
    ("bitwise_not", A.bitwise_not.default, (i(0, 256, 4).to(torch.uint8),)),
    ("asin", A.asin.default, (i(-1, 2, 5),)),
    ("asin", A.asin.default, (torch.tensor([-1.0, -1e-6, 0.0, 1e-3, 1.0, 1.5]),)),
    ("acos", A.acos.default, (torch.tensor([-1.0, -1e-6, 0.0, 0.999, 1.0, 1.5]),)),
    ("add.Tensor", lambda x, y: A.add.Tensor(x, y, alpha=2), (f(3, 4), f(3, 1))),
    ("add.Tensor", A.add.Tensor, (i(0, 3, 4), f(2, 4))),
    ("add.Tensor", lambda x: x + 3, (i(0, 3, 4),)),
    ("add.Tensor", lambda x: x + 1.5, (i(0, 3, 4),)),
    ("add.Tensor", A.add.Tensor, (i(0, 9, 4).to(torch.int16), i(0, 9, 4).to(torch.uint8))),
    ("add.Tensor", A.add.Tensor, (b(4), b(4))),
    ("add.Scalar", lambda x: A.add.Scalar(x, 2, 3), (f(3),)),
    ("sub.Tensor", A.sub.Tensor, (f(3, 4), f(4))),
    ("sub.Scalar", lambda x: A.sub.Scalar(x, 2), (f(3),)),
    ("mul.Tensor", A.mul.Tensor, (f(3, 4), f(3, 1))),
    ("mul.Tensor", A.mul.Tensor, (b(4), b(4))),
    ("mul.Tensor", A.mul.Tensor, (b(4), f(4))),
    ("mul.Scalar", lambda x: A.mul.Scalar(x, 2), (f(3),)),
    ("div.Tensor", A.div.Tensor, (f(3, 4), p(4))),
    ("div.Tensor", A.div.Tensor, (i(-5, 5, 4), i(1, 5, 4))),
    ("div.Tensor", lambda x: x / 3, (i(-5, 5, 4),)),
    ("div.Scalar", lambda x: A.div.Scalar(x, 3), (f(4),)),
    *(
        case
        for mode in ("floor", "trunc")
        for case in (
            ("div.Tensor_mode", lambda x, y, m=mode: A.div.Tensor_mode(x, y, rounding_mode=m), (i(-9, 9, 20), torch.tensor([3, -3, 2, -4] * 5))),
            ("div.Tensor_mode", lambda x, y, m=mode: A.div.Tensor_mode(x, y, rounding_mode=m), (3 * f(8), p(8))),
            ("div.Scalar_mode", lambda x, m=mode: A.div.Scalar_mode(x, -4, rounding_mode=m), (i(-9, 9, 20),)),
        )
    ),
    ("remainder.Tensor", A.remainder.Tensor, (i(-9, 9, 20), torch.tensor([3, -3, 2, -4] * 5))),
    ("remainder.Tensor", A.remainder.Tensor, (3 * f(20), torch.tensor([0.7, -0.3, 1.1, -1.6] * 5))),
    ("remainder.Scalar", lambda x: A.remainder.Scalar(x, 3), (i(-9, 9, 20),)),
    ("remainder.Scalar_Tensor", lambda x: A.remainder.Scalar_Tensor(7, x), (i(1, 9, 20),)),
    ("fmod.Tensor", A.fmod.Tensor, (i(-9, 9, 20), torch.tensor([3, -3, 2, -4] * 5))),
    ("fmod.Scalar", lambda x: A.fmod.Scalar(x, 0.7), (3 * f(20),)),
    *(("pow.Tensor_Scalar", lambda x, e=e: A.pow.Tensor_Scalar(x, e), (p(3, 4),)) for e in (1, 2, 3, 0.5, -0.5, -1, 2.5, 4)),
    ("pow.Tensor_Scalar", lambda x: A.pow.Tensor_Scalar(x, 2), (i(-3, 3, 4),)),
    *(("pow.Tensor_Scalar", lambda x, e=e: A.pow.Tensor_Scalar(x, e), (i(-3, 4, 9),)) for e in (0, 1, 3, 4, 39)),
    ("pow.Tensor_Scalar", lambda x: A.pow.Tensor_Scalar(x, 5), (i(0, 256, 9).to(torch.uint8),)),
    ("pow.Tensor_Tensor", A.pow.Tensor_Tensor, (i(-3, 4, 9), i(0, 30, 2, 9))),
    ("pow.Tensor_Tensor", A.pow.Tensor_Tensor, (torch.tensor([[0], [1], [-1], [2], [-7]]).int(), torch.tensor([-3, -2, -1, 0, 1]).int())),
    ("pow.Tensor_Tensor", lambda x: A.pow.Tensor_Tensor(x, torch.tensor(-3)), (i(-3, 4, 9),)),
    ("pow.Tensor_Tensor", lambda x: A.pow.Tensor_Tensor(x, torch.tensor(-2)), (i(-3, 4, 9),)),
    ("pow.Scalar", lambda x: A.pow.Scalar(3, x), (i(0, 20, 9),)),
    ("pow.Tensor_Tensor", A.pow.Tensor_Tensor, (p(3, 4), f(4))),
    ("pow.Scalar", lambda x: A.pow.Scalar(2, x), (f(3, 4),)),
    ("maximum", A.maximum.default, (f(3, 4), f(4))),
    ("maximum", A.maximum.default, (b(4), b(4))),
    ("minimum", A.minimum.default, (f(3, 4), f(4))),
    ("minimum", A.minimum.default, (b(4), b(4))),
    *(case for name in ("eq", "ne", "lt", "le", "gt", "ge") for case in compared(name)),
    ("logical_and", A.logical_and.default, (i(0, 2, 6), b(6))),
    ("logical_or", A.logical_or.default, (b(6), b(6))),
    ("logical_xor", A.logical_xor.default, (i(0, 2, 6), b(6))),
    *(
        case
        for name in ("and", "or", "xor")
        for case in (
            (f"bitwise_{name}.Tensor", getattr(A, f"bitwise_{name}").Tensor, (b(6), b(2, 6))),
            (f"bitwise_{name}.Scalar", lambda x, n=name: getattr(A, f"bitwise_{n}").Scalar(x, True), (b(6),)),
            (f"bitwise_{name}.Tensor", getattr(A, f"bitwise_{name}").Tensor, (i(-99, 99, 6), i(-99, 99, 2, 6).to(torch.int8))),
            (f"bitwise_{name}.Tensor", getattr(A, f"bitwise_{name}").Tensor, (b(6), i(0, 99, 6).to(torch.uint8))),
            (f"bitwise_{name}.Scalar", lambda x, n=name: getattr(A, f"bitwise_{n}").Scalar(x, -3), (i(-99, 99, 6).int(),)),
            (f"bitwise_{name}.Scalar_Tensor", lambda x, n=name: getattr(A, f"bitwise_{n}").Scalar_Tensor(5, x), (i(-99, 99, 6),)),
        )
    ),
    *(
        case
        for side in ("left", "right")
        for case in (
            (f"bitwise_{side}_shift.Tensor", getattr(A, f"bitwise_{side}_shift").Tensor, (i(-99, 99, 5), SHIFTS)),
            (f"bitwise_{side}_shift.Tensor", getattr(A, f"bitwise_{side}_shift").Tensor, (i(0, 256, 4).to(torch.uint8), i(0, 8, 3, 1).to(torch.uint8))),
            (f"bitwise_{side}_shift.Tensor_Scalar", lambda x, s=side: getattr(A, f"bitwise_{s}_shift").Tensor_Scalar(x, 3), (i(-99, 99, 5).to(torch.int8),)),
            (f"bitwise_{side}_shift.Scalar_Tensor", lambda x, s=side: getattr(A, f"bitwise_{s}_shift").Scalar_Tensor(-77, x), (SHIFTS,)),
            (f"__{side[0]}shift__.Tensor", lambda x, y, s=side: x << y if s == "left" else x >> y, (i(-99, 99, 5), SHIFTS)),
            (f"__{side[0]}shift__.Scalar", lambda x, s=side: x << 2 if s == "left" else x >> 2, (i(-99, 99, 5).int(),)),
        )
    ),
    ("atan2", A.atan2.default, (f(3, 4), f(4))),
    ("atan2", A.atan2.default, (i(-3, 3, 5), i(-3, 3, 5))),
    ("atan2", A.atan2.default, (torch.tensor([0.0, 1.0, 0.0, -0.0, -2.0, 1e15, 1e-9, 0.0, -0.0]), torch.tensor([0.0, 0.0, -1.0, -1.0, 0.0, -1e15, 1e-9, -0.0, -0.0]))),
    ("atan2", A.atan2.default, (torch.tensor([math.inf, -math.inf, math.inf, 2.0, -2.0, math.nan]), torch.tensor([math.inf, math.inf, -math.inf, -math.inf, math.inf, 1.0]))),
    ("copysign.Tensor", A.copysign.Tensor, (torch.tensor([0.0, -0.0, 1.0, -2.0, math.inf]), torch.tensor([1.0, -1.0, -0.0, math.inf, -math.inf]))),
    ("copysign.Tensor", A.copysign.Tensor, (i(-3, 4, 5), i(-3, 4, 5))),
    ("copysign.Scalar", lambda x: A.copysign.Scalar(x, -0.0), (f(5),)),
    ("copysign.Scalar", lambda x: A.copysign.Scalar(x, 2), (i(-3, 4, 5),)),
    ("clamp", lambda x: A.clamp(x, -0.5, 0.5), (f(3, 4),)),
    ("clamp", lambda x: A.clamp(x, 0.0, 1.0), (EDGES.clone(),)),
    ("clamp", lambda x: A.clamp(x, 0.5, -0.5), (f(3, 4),)),
    ("clamp", lambda x: A.clamp(x, max=0.5), (f(3, 4),)),
    ("clamp", lambda x: A.clamp(x, 0, 2), (i(-3, 4, 5),)),
    ("clamp.Tensor", lambda x, low: A.clamp.Tensor(x, low, None), (f(3, 4), f(4))),
    ("where.self", A.where.self, (b(3, 1), f(3, 4), f(4))),
    ("where.self", lambda c, x: torch.where(c, x, 2), (b(3, 1), f(3, 4))),
    ("addcmul", lambda x, y, z: A.addcmul(x, y, z, value=0.5), (f(3, 4), f(4), f(3, 1))),
    ("addcdiv", lambda x, y, z: A.addcdiv(x, y, z), (f(3, 4), f(4), p(3, 1))),
]  # fmt: skip

LAYOUT: list[Case] = [
    ("view", lambda x: A.view(x, [3, -1]), (f(2, 3, 4),)),
    ("view", lambda x: x.reshape(()), (f(1),)),
    ("view", lambda x: x.transpose(0, 1).reshape(-1), (f(3, 4),)),
    ("unsqueeze", lambda x: A.unsqueeze(x, -1), (f(2, 3),)),
    ("squeeze.dims", lambda x: A.squeeze.dims(x, [0, 1, 2]), (f(1, 2, 1),)),
    ("permute", lambda x: A.permute(x, [2, 0, -2]), (f(2, 3, 4),)),
    ("alias", A.alias.default, (f(3),)),
    ("clone", lambda x: x.clone() * 2, (f(3),)),
    ("detach", lambda x: x.detach(), (i(0, 5, 3),)),
    ("detach", lambda x, y: x.detach() * y + x, (f(3), f(3))),
    ("_to_copy", lambda x: x.to(torch.float64), (f(3),)),
    ("_to_copy", lambda x: (x * 3).to(torch.int64), (f(6),)),
    ("_to_copy", lambda x: x.to(torch.bool), (i(0, 2, 4),)),
    ("_to_copy", lambda x: x.to(torch.bfloat16).to(torch.float16).to(torch.float32).to(torch.float64), (f(6),)),
    ("copy", lambda x, y: A.copy(x, y), (i(0, 4, 3, 4), f(4))),
    ("full", lambda x: x + A.full([2, 3], 1.5), (f(3),)),
    ("full_like", lambda x: A.full_like(x, 2) + x, (f(2, 3),)),
    ("empty.memory_format", lambda x: x + A.empty.memory_format([3], dtype=torch.float32).zero_(), (f(3),)),
    ("empty_permuted", lambda x: x + torch.empty_like(x).fill_(1.0), (f(3),)),
    ("empty_strided", lambda x: x + torch.empty_strided((3,), (2,)).zero_(), (f(3),)),
    ("arange.start_step", lambda x: x + torch.arange(1, 10, 3), (f(3),)),
    ("expand", lambda x: A.expand(x, [2, -1, 4]), (f(3, 1),)),
    ("repeat", lambda x: A.repeat(x, [2, 1, 3]), (f(2, 3),)),
    ("cat", lambda x, y: A.cat([x, y, x], -1), (f(2, 3), f(2, 1))),
    ("cat", lambda x, y: torch.cat([x, y]), (i(0, 4, 3), f(2))),
    ("cat", lambda x, y: torch.cat([x, y, torch.zeros(0)], 1), (f(2, 3), f(2, 2))),
    ("split_with_sizes", lambda x: A.split_with_sizes(x, [1, 2, 3], 1), (f(2, 6),)),
    ("split_with_sizes", lambda x: x.chunk(3, -1), (f(2, 7),)),
    ("slice.Tensor", lambda x: x[1:, ::2], (f(4, 5),)),
    ("slice.Tensor", lambda x: x[-3:-1], (f(4, 5),)),
    ("slice.Tensor", lambda x: x[3:1], (f(4, 5),)),
    ("select.int", lambda x: A.select.int(x, 1, -2), (f(2, 3, 4),)),
    ("slice_scatter", lambda x, y: A.slice_scatter(x, y, 1, 1, 3), (f(2, 4), f(2, 2))),
    ("slice_scatter", lambda x, y: A.slice_scatter(x, y, 1, 0, 4, 2), (f(2, 4), f(2, 2))),
    ("constant_pad_nd", lambda x: A.constant_pad_nd(x, [1, 2, 0, 1], 0.5), (f(2, 3),)),
    ("constant_pad_nd", lambda x: A.constant_pad_nd(x, [-1, 2], 0.0), (f(2, 3),)),
    ("flip", lambda x: A.flip(x, [0, -1]), (f(2, 3),)),
    ("roll", lambda x: A.roll(x, [1, -2], [0, 1]), (f(3, 4),)),
    ("roll", lambda x: A.roll(x, [5]), (f(3, 4),)),
    ("diagonal", lambda x: A.diagonal(x, 1), (f(4, 5),)),
    ("diagonal", lambda x: A.diagonal(x, 0, 0, 2), (f(2, 3, 4),)),
    ("as_strided", lambda x: A.as_strided(x.T, [3, 2], [1, 4], 1), (f(2, 4),)),
    ("as_strided", lambda x: A.as_strided(x * 2, [2, 3], [1, 1]), (f(2, 4),)),
    ("as_strided", lambda x: A.as_strided(x * 2, [8, 1], [1, 1]), (f(2, 4),)),
    ("unfold", lambda x: A.unfold(x, 1, 3, 2), (f(2, 7),)),
]

INDEXING: list[Case] = [
    ("embedding", A.embedding.default, (f(7, 3), i(0, 7, 2, 4))),
    ("embedding", lambda w, k: A.embedding(w, k, 2), (f(5, 3), torch.tensor([0, 2, 2, 4]))),
    ("embedding", lambda w, k: A.embedding(w * 2, k, 2), (f(5, 3), torch.tensor([0, 2, 2, 4]))),
    ("embedding", lambda w, k: A.embedding(w, k, 0), (torch.cat([torch.zeros(1, 3), f(4, 3)]), torch.tensor([0, 2, 0, 4]))),
    ("index_select", lambda x, k: A.index_select(x, 1, k), (f(3, 5), i(0, 5, 4))),
    ("index.Tensor", lambda x, k: x[k], (f(5, 3), i(-5, 5, 2, 4))),
    ("index.Tensor", lambda x, k: x[:, k], (f(2, 5, 3), i(-5, 5, 2, 4))),
    ("index.Tensor", lambda x, k, m: x[:, k, m], (f(2, 5, 3), i(-5, 5, 2, 1), i(-3, 3, 4))),
    ("index.Tensor", lambda x, k, m: x[k, :, m], (f(2, 5, 3), i(-2, 2, 2, 1), i(-3, 3, 4))),
    ("index.Tensor", lambda x, k, m: x[:, k, :, m], (f(2, 3, 2, 4), i(-3, 3, 3), i(-4, 4, 3))),
    ("index.Tensor", lambda x: x[[0, 2], [1, -1]], (f(3, 4),)),
    ("index.Tensor", lambda x: x[torch.tensor([True, False, True])], (f(3, 4),)),
    ("index_put", lambda x, k, y: A.index_put(x, [k], y, True), (f(5, 3), i(0, 5, 7), f(7, 3))),
    ("index_put", lambda x, y: A.index_put(x, [torch.tensor([4, 0])], y), (f(5, 3), f(3))),
    ("index_put", lambda x, k, m, y: A.index_put(x, [None, k, m], y, True), (f(2, 5, 3), i(0, 5, 4), i(0, 3, 4), f(2, 4))),
    ("index_put", lambda x, k, m, y: A.index_put(x, [k, None, m], y, True), (f(2, 5, 3), i(0, 2, 4), i(0, 3, 4), f(4, 5))),
    ("index_put", lambda x, m: A.index_put(x, [m], torch.tensor(2.0)), (f(3, 4), b(3, 4))),
    ("index_put", lambda x, m, y: A.index_put(x, [m], y), (f(3, 4), b(3), f())),
    ("gather", lambda x, k: A.gather(x, 1, k), (f(3, 5), i(0, 5, 2, 4))),
    ("gather", lambda x, k: A.gather(x, 0, k), (f(), i(0, 1))),
    ("scatter.src", lambda x, k, y: A.scatter.src(x, 1, k, y), (f(3, 5), torch.tensor([[0, 4, 2], [3, 1, 0]]), f(2, 3))),
    ("scatter.src", lambda x, k, y: A.scatter.src(x, 1, k, y), (i(0, 9, 3, 5), torch.tensor([[0, 4, 2], [3, 1, 0]]), i(0, 9, 3, 4))),
    ("scatter.value", lambda x, k: A.scatter.value(x, 0, k, 2.5), (f(3, 5), i(0, 3, 2, 4))),
    ("scatter_add", lambda x, k, y: A.scatter_add(x, 1, k, y), (f(3, 5), i(0, 5, 2, 8), f(2, 8))),
    *(
        ("scatter_reduce.two", lambda x, k, y, h=how: A.scatter_reduce.two(x, 0, k, y, h), (torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0, 0, 1, 2, 2]), torch.tensor(src)))
        for how, src in (("amax", [1.0, 1.0, 2.0, 5.0, 5.0]), ("amin", [1.0, 1.0, 2.0, -5.0, -5.0]))
    ),  # equal ones have equal shares of the gradient
    ("scatter_reduce.two", lambda x, k, y: A.scatter_reduce.two(x, 0, k, y, "amax"), (torch.tensor([-9, -8, -7], dtype=torch.int16), torch.tensor([0, 0, 1]), torch.tensor([-5, -6, -3], dtype=torch.int16))),
    ("scatter.reduce", lambda x, k, y: A.scatter.reduce(x, 1, k, y, reduce="add"), (f(3, 5), i(0, 5, 2, 8), f(3, 9))),
    *(
        ("scatter_reduce.two", lambda x, k, y, h=how, s=own: A.scatter_reduce.two(x, 1, k, y, h, include_self=s), (f(3, 5), i(0, 5, 3, 8), f(3, 8)))
        for how in ("sum", "mean", "amax", "amin")
        for own in (True, False)
    ),
    ("topk", lambda x: A.topk(x, 3, 0), (distinct(5, 4),)),
    ("topk", lambda x: A.topk(x, 2, -1, False), (distinct(5, 4),)),
    ("sort", lambda x: A.sort.default(x, 0, True), (distinct(5, 4),)),
    *(
        case
        for right in (False, True)
        for case in (
            ("bucketize.Tensor", lambda x, r=right: torch.bucketize(x, torch.tensor([-1.0, 0.0, 0.0, 1.0]), right=r), (torch.tensor([-2.0, -1.0, 0.0, 0.5, 1.0, math.inf, math.nan, -math.inf]),)),
            ("bucketize.Tensor", lambda x, y, r=right: torch.bucketize(x, y, right=r, out_int32=True), (i(-3, 9, 2, 5), torch.tensor([-2, 0, 0, 5]))),
            ("searchsorted.Tensor", lambda y, x, r=right: torch.searchsorted(y, x, right=r), (f(2, 3, 6).sort()[0], f(2, 3, 4))),
            ("searchsorted.Tensor", lambda y, x, s=("left", "right")[right]: torch.searchsorted(y, x, side=s), (torch.tensor([0, 1, 1, 3]), i(-1, 5, 2, 3))),
        )
    ),
    ("bucketize.Tensor", lambda x: torch.bucketize(x, torch.tensor([])), (f(3),)),
    ("sort.stable", lambda x: A.sort.stable(x, stable=True, dim=1), (i(0, 3, 2, 9),)),
]  # fmt: skip

# Some of these are the same, and some differ by as much in one dimension as in the other.
CORNERS = torch.tensor([[0.0, 0.0], [1.0, 1.0], [0.0, 0.0], [3.0, -1.0]])

REDUCTIONS: list[Case] = [
    ("sum.dim_IntList", lambda x: A.sum.dim_IntList(x, [0, -1], True), (f(2, 3, 4),)),
    ("sum.dim_IntList", lambda x: A.sum.dim_IntList(x, [1], dtype=torch.float64), (f(2, 3),)),
    ("mean", A.mean.default, (f(3, 4),)),
    ("mean.dim", lambda x: A.mean.dim(x, [-2]), (f(2, 3, 4),)),
    ("amax", lambda x: A.amax(x, [1]), (distinct(3, 4),)),
    ("amin", lambda x: A.amin(x, [0], True), (distinct(3, 4),)),
    ("max", A.max.default, (distinct(3, 4),)),
    ("min", A.min.default, (distinct(3, 4),)),
    ("max.dim", lambda x: A.max.dim(x, 1), (distinct(3, 4),)),
    (
        "max.dim",
        lambda x: A.max.dim(x, 0),
        (torch.tensor([[1.0, 2.0], [1.0, 2.0], [0.0, 0.0]]),),
    ),  # of equal ones the first has the gradient
    ("min.dim", lambda x: A.min.dim(x, 0, True), (distinct(3, 4),)),
    ("argmax", lambda x: A.argmax(x, 1), (distinct(3, 4),)),
    ("argmax", lambda x: A.argmax(x, None, True), (distinct(3, 4),)),
    ("argmin", lambda x: A.argmin(x, 0, True), (distinct(3, 4),)),
    ("any", A.any.default, (b(3, 4),)),
    ("any.dim", lambda x: A.any.dim(x, 1), (i(0, 2, 3, 2),)),
    ("any.dims", lambda x: A.any.dims(x, [0, 1], True), (b(3, 4, 2),)),
    ("all", A.all.default, (b(3, 4),)),
    ("all.dim", lambda x: A.all.dim(x, 0), (i(0, 2, 2, 9),)),
    ("var.correction", lambda x: torch.var(x, 1), (f(3, 4),)),
    ("var.correction", lambda x: torch.var(x, (0, 1), correction=0, keepdim=True), (f(3, 4),)),
    ("std.correction", lambda x: torch.std(x, (0, 1), correction=0, keepdim=True), (f(3, 4),)),
    ("var_mean.correction", lambda x: torch.var_mean(x, 1), (f(3, 4),)),
    ("std_mean.correction", lambda x: torch.std_mean(x, 1, keepdim=True), (f(3, 4),)),
    ("std.correction", lambda x: torch.std(x, 1), (torch.tensor([[2.0, 2.0, 2.0], [1.0, 2.0, 4.0]]),)),
    *(
        ("linalg_vector_norm", lambda x, o=order: torch.linalg.vector_norm(x, o, (1,), True), (distinct(3, 4),))
        for order in (2, 1, 3, math.inf, -math.inf)
    ),
    *(
        (
            "linalg_vector_norm",
            lambda x, o=order: torch.linalg.vector_norm(x, o, (1,)),
            (torch.tensor([[0.0, 0.0, 0.0], [0.5, 0.0, -2.0]]),),
        )
        for order in (2, 1, 0.5, 1.5, 3, 4, math.inf)
    ),
    *(
        ("_cdist_forward", lambda x, y, o=order: torch.cdist(x, y, o), (f(2, 1, 3, 4), f(5, 6, 4)))
        for order in (2, 1, 0.5, 1.5, 3, math.inf)
    ),
    *(
        ("_cdist_forward", lambda x, y, o=order: torch.cdist(x, y, o), (CORNERS, CORNERS.flip(0)))
        for order in (2, 1, 0.5, 1.5, 3, math.inf)
    ),
    ("_cdist_forward", lambda x, y: torch.cdist(x, y, math.inf), (torch.tensor([[1.0, math.inf]]), f(3, 2))),
    ("_cdist_forward", lambda x: torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist"), (f(30, 4),)),
    *(("_pdist_forward", lambda x, o=order: torch.pdist(x, o), (CORNERS,)) for order in (2, 1, 0.5, 1.5, 3, math.inf)),
    # Numbers of elements that differ; a sum beside them has a gradient.
    ("_cdist_forward", lambda x, y: torch.cdist(x, y, 0.0) + x.sum(), (CORNERS, CORNERS.flip(0))),
    ("_pdist_forward", lambda x: torch.pdist(x, 0.0) + x.sum(), (CORNERS,)),
    ("linalg_vector_norm", lambda x: torch.linalg.vector_norm(x, 0.0, 1) + x.sum(), (CORNERS,)),
    ("_euclidean_dist", torch.cdist, (f(2, 30, 4), f(2, 5, 4))),
    ("_euclidean_dist", torch.cdist, (CORNERS.repeat(9, 1), CORNERS)),
    ("cumsum", lambda x: A.cumsum(x, -1), (f(2, 5),)),
    ("cumsum", lambda x: A.cumsum(x, 0), (b(4, 2),)),
    ("cumprod", lambda x: A.cumprod(x, 0), (f(5, 2),)),
    ("prod", A.prod.default, (f(3, 2),)),
    ("prod", A.prod.default, (i(1, 4, 5),)),
    ("prod.dim_int", lambda x: A.prod.dim_int(x, 1, True), (f(3, 5),)),
    ("prod.dim_int", lambda x: A.prod.dim_int(x, 0), (b(3, 5),)),
    ("amin", lambda x: A.amin(x, [0]), (torch.tensor([3, 200, 7], dtype=torch.uint8),)),
    ("argmin", lambda x: A.argmin(x, 0), (torch.tensor([3, 0, 7], dtype=torch.uint8),)),
    ("min", A.min.default, (torch.tensor([3, -(2**63), 7]),)),
    ("logsumexp", lambda x: A.logsumexp(x, [1]), (f(3, 4),)),
    ("logsumexp", lambda x: A.logsumexp(x, [0], True), (torch.tensor([[-math.inf, 80.0], [-math.inf, 90.0]]),)),
]


FLAT = (
    "sign", "floor", "ceil", "trunc", "round", "round.decimals", "div.Tensor_mode", "remainder.Tensor", "remainder.Scalar", "fmod.Tensor", "fmod.Scalar",
    "scatter.reduce", "grid_sampler_2d",
)  # fmt: skip
# What these give does not depend on their operands; at a small size that is computed at import.
MADE = (
    "full", "full_like", "empty.memory_format", "empty_permuted", "empty_strided", "arange.start_step",
)  # fmt: skip

CASES: list[Case] = [*ELEMENTWISE, *LAYOUT, *INDEXING, *REDUCTIONS, *NEURAL, *ATTENTION, *RECURRENT]
