"""Operations of ATen that networks are made of, on operands: windows, resizing, norms, products, attention, recurrent layers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .operands import A, Case, distinct, f, i, u


def pooled(r: int, **options: Any) -> Callable[[Tensor], Any]:
    op = getattr(A, f"avg_pool{r}d").default
    return lambda x: op(x, [3] * r, [2] * r, **options)


def resized(op: Any, size: list[int] | None, factors: list[float] | None, *corners: bool) -> Callable[[Tensor], Tensor]:
    return lambda x: op(x, size, *corners, factors)


ONE_TO_THREE = (f(2, 2, 5), f(2, 2, 5, 4), f(1, 2, 3, 4, 5))

NEURAL: list[Case] = [
    ("linear", A.linear.default, (f(2, 5, 3), f(4, 3), f(4))),
    ("linear", A.linear.default, (f(3), f(4, 3))),
    ("matmul", A.matmul.default, (f(2, 1, 3, 4), f(5, 4, 2))),
    ("matmul", A.matmul.default, (f(4), f(5, 4, 2))),
    ("matmul", A.matmul.default, (f(5, 2, 4), f(4))),
    ("mm", A.mm.default, (f(3, 4), f(4, 2))),
    ("bmm", A.bmm.default, (f(2, 3, 4), f(2, 4, 2))),
    ("mv", A.mv.default, (f(3, 4), f(4))),
    ("dot", A.dot.default, (f(4), f(4))),
    ("addmm", lambda c, x, y: A.addmm(c, x, y, beta=0.5, alpha=2), (f(2), f(3, 4), f(4, 2))),
    ("baddbmm", A.baddbmm.default, (f(2, 1, 2), f(2, 3, 4), f(2, 4, 2))),
    ("convolution", lambda x, w, c: torch.conv1d(x, w, c, 2, 1), (f(2, 3, 8), f(4, 3, 3), f(4))),
    ("convolution", lambda x, w: torch.conv2d(x, w, None, (2, 1), (0, 2), (1, 2), 2), (f(2, 4, 8, 7), f(6, 2, 3, 2))),
    ("convolution", lambda x, w: torch.conv2d(x, w, padding="same"), (f(3, 6, 5), f(4, 3, 2, 3))),
    ("convolution", torch.conv3d, (f(1, 2, 4, 4, 4), f(3, 2, 2, 3, 2))),
    ("convolution", lambda x, w, c: torch.conv_transpose2d(x, w, c, (2, 3), (1, 0), (1, 2), 2, (1, 2)), (f(2, 4, 5, 4), f(4, 3, 3, 2), f(6))),
    ("max_pool2d_with_indices", lambda x: torch.max_pool2d(x, 3, 2, 1), (distinct(1, 2, 7, 6),)),
    ("max_pool2d_with_indices", lambda x: torch.max_pool2d(x, (3, 2), (2, 3), (1, 0), 1, True), (distinct(2, 7, 6),)),
    ("max_pool2d_with_indices", lambda x: torch.nn.functional.max_pool2d(x, 3, 2, 1, return_indices=True), (distinct(2, 2, 7, 6),)),
    ("max_pool2d_with_indices", lambda x: torch.nn.functional.max_pool2d(x, (3, 2), (2, 3), (1, 0), (1, 2), True, True), (i(0, 3, 2, 7, 6).float(),)),
    ("max_pool2d_with_indices", lambda x: torch.nn.functional.max_pool1d(x, 3, 2, 1, return_indices=True), (distinct(2, 2, 7),)),
    ("max_pool2d_with_indices", lambda x: torch.nn.functional.max_unpool2d(*torch.nn.functional.max_pool2d(x, 2, return_indices=True), 2), (distinct(1, 2, 4, 6),)),
    ("max_pool3d_with_indices", lambda x: torch.nn.functional.max_pool3d(x, 2, padding=1, return_indices=True), (distinct(1, 2, 4, 4, 4),)),
    ("adaptive_max_pool2d", lambda x: torch.nn.functional.adaptive_max_pool2d(x, (3, 2)), (distinct(1, 2, 6, 4),)),
    ("adaptive_max_pool2d", lambda x: torch.nn.functional.adaptive_max_pool1d(x, 3, return_indices=True), (distinct(2, 6),)),
    ("adaptive_max_pool3d", lambda x: torch.nn.functional.adaptive_max_pool3d(x, 2), (distinct(2, 4, 6, 2),)),
    ("max_pool3d_with_indices", lambda x: torch.max_pool3d(x, 2), (distinct(1, 2, 4, 4, 4),)),
    *((f"avg_pool{max(2, r)}d", pooled(r), (x,)) for r, x in enumerate(ONE_TO_THREE, 1)),
    ("avg_pool2d", pooled(2, padding=[1, 1], ceil_mode=True), (f(1, 2, 6, 7),)),
    ("avg_pool2d", pooled(2, padding=[1, 0], count_include_pad=False), (f(2, 6, 7),)),
    ("avg_pool2d", pooled(2, padding=[1, 1], divisor_override=5), (f(1, 2, 6, 7),)),
    ("mean.dim", lambda x: torch.nn.functional.adaptive_avg_pool2d(x, 1), (f(1, 2, 6, 4),)),
    ("_adaptive_avg_pool2d", lambda x: torch.nn.functional.adaptive_avg_pool1d(x, 3), (f(1, 2, 7),)),
    ("_adaptive_avg_pool2d", lambda x: torch.nn.functional.adaptive_avg_pool2d(x, (3, 2)), (f(1, 2, 6, 4),)),
    ("_adaptive_avg_pool2d", lambda x: torch.nn.functional.adaptive_avg_pool2d(x, (4, 3)), (f(2, 6, 5),)),
    ("_adaptive_avg_pool3d", lambda x: torch.nn.functional.adaptive_avg_pool3d(x, 2), (f(1, 2, 3, 4, 5),)),
    ("pixel_shuffle", lambda x: A.pixel_shuffle(x, 2), (f(2, 8, 3, 2),)),
    *(
        case
        for r, x in enumerate(ONE_TO_THREE, 1)
        for case in (
            (f"upsample_nearest{r}d.vec", resized(getattr(A, f"upsample_nearest{r}d").vec, None, [2.0] * r), (x,)),
            (f"upsample_nearest{r}d.vec", resized(getattr(A, f"upsample_nearest{r}d").vec, [7, 3, 4][:r], None), (x,)),
        )
    ),
    *(
        (f"{name}.vec", resized(getattr(A, name).vec, size, factors, corners), (x,))
        for name, x in zip(("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d"), (*ONE_TO_THREE, f(1, 2, 5, 4)), strict=True)
        for size, factors, corners in (([7, 3, 6][: x.ndim - 2], None, False), ([7, 3, 6][: x.ndim - 2], None, True), (None, [1.6] * (x.ndim - 2), False))
    ),
    *(
        (f"_upsample_{mode}2d_aa", lambda x, m=mode, s=size, k=factor, c=corners: torch.nn.functional.interpolate(x, s, k, m, c, antialias=True), (f(1, 2, 9, 7),))
        for mode in ("bilinear", "bicubic")
        for size, factor, corners in (((4, 3), None, False), ((4, 9), None, True), (None, (0.45, 0.7), False))
    ),
    *(
        ("grid_sampler_2d", lambda x, g, m=mode, q=pad, c=corners: A.grid_sampler_2d(x, g, m, q, c), (f(2, 2, 4, 5), 1.2 * u(2, 3, 2, 2)))
        for mode, pad, corners in ((0, 0, False), (0, 1, True), (1, 0, True), (2, 2, False))
    ),
    ("softmax.int", lambda x: torch.softmax(x, 1), (f(2, 3, 4),)),
    ("_softmax", lambda x: A._softmax(x, 0, False), (f(2, 3),)),
    ("log_softmax.int", lambda x: torch.log_softmax(x, -1, dtype=torch.float64), (f(2, 3),)),
    ("_log_softmax", lambda x: A._log_softmax(x, 0, False), (f(2, 3),)),
    ("layer_norm", lambda x, w, c: A.layer_norm(x, [3, 4], w, c, 1e-3), (f(2, 3, 4), f(3, 4), f(3, 4))),
    ("layer_norm", lambda x: A.layer_norm(x, [4]), (f(2, 3, 4),)),
    ("native_layer_norm", lambda x, w: A.native_layer_norm(x, [4], w, None, 1e-5), (f(2, 3, 4), f(4))),
    ("rms_norm", lambda x, w: A.rms_norm(x, [4], w), (f(2, 3, 4), f(4))),
    ("rms_norm", lambda x: A.rms_norm(x, [3, 4], None, 1e-2), (f(2, 3, 4),)),
    ("group_norm", lambda x, w, c: A.group_norm(x, 2, w, c, 1e-3), (f(2, 4, 3), f(4), f(4))),
    ("native_group_norm", lambda x: A.native_group_norm(x, None, None, 2, 4, 3, 2, 1e-5)[0], (f(2, 4, 3),)),
    ("_native_batch_norm_legit_no_training", lambda x, w, c: torch.batch_norm(x, w, c, torch.ones(3), torch.full((3,), 2.0), False, 0.1, 1e-3, False), (f(2, 3, 4), f(3), f(3))),
    ("_native_batch_norm_legit.no_stats", lambda x, w, c: A._native_batch_norm_legit.no_stats(x, w, c, True, 0.1, 1e-3)[0], (f(2, 3, 4), f(3), f(3))),
    ("_native_batch_norm_legit_functional", lambda x, w, c: A._native_batch_norm_legit_functional(x, w, c, torch.ones(3), torch.ones(3), True, 0.1, 1e-3), (f(2, 3, 4), f(3), f(3))),
    ("_native_batch_norm_legit_functional", lambda x, w: A._native_batch_norm_legit(x, w, None, torch.zeros(3), torch.ones(3), True, 0.1, 1e-3)[0], (f(2, 3, 4), f(3))),
    ("_native_batch_norm_legit_functional", lambda x, w: A._native_batch_norm_legit(x, w, None, torch.ones(3), torch.full((3,), 2.0), False, 0.1, 1e-3)[0], (f(2, 3, 4), f(3))),
    ("_native_batch_norm_legit_functional", lambda x: A._native_batch_norm_legit_functional(x, None, None, torch.ones(3), torch.full((3,), 2.0), False, 0.1, 1e-3)[::3], (f(2, 3, 4),)),
    ("native_dropout", lambda x: A.native_dropout(x, 0.5, False)[0] * 2, (f(2, 3),)),
    *(
        ("embedding_bag.padding_idx", lambda w, k, o, m=mode, c=last: A.embedding_bag.padding_idx(w, k, o, False, m, False, None, c, None)[0], (f(7, 3), i(0, 7, 9), offsets))
        for mode, last, offsets in ((0, False, torch.tensor([0, 4, 4])), (1, False, torch.tensor([0, 4, 7])), (1, True, torch.tensor([0, 0, 5, 9])))
    ),
    ("embedding_bag.padding_idx", lambda w, k, s: A.embedding_bag.padding_idx(w, k, torch.tensor([0, 3, 6]), False, 0, False, s, False, None)[0], (f(7, 3), i(0, 7, 9), f(9))),
    ("embedding_bag.padding_idx", lambda w, k: A.embedding_bag.padding_idx(w, k, torch.tensor([0, 2]), False, 1, False, None, False, 1)[0], (f(4, 3), torch.tensor([1, 2, 1, 0, 3]))),
    ("_embedding_bag", lambda w, k: A._embedding_bag(w, k, torch.tensor([0, 2]), False, 1, False, None, False, 3)[0], (f(4, 3), i(0, 4, 5))),
    ("embedding_bag", lambda w, k: A.embedding_bag.default(w, k, torch.tensor([0, 2]), False, 0)[0], (f(4, 3), i(0, 4, 5))),
]  # fmt: skip


def attended(**options: Any) -> Callable[..., Tensor]:
    return lambda q, k, v, *mask: torch.nn.functional.scaled_dot_product_attention(q, k, v, *mask, **options)


QKV = (f(2, 2, 4, 3), f(2, 2, 5, 3), f(2, 2, 5, 6))
BLIND = torch.tensor([[True, False, True, True, False], [False] * 5, [True] * 5, [False, True, False, False, False]])
ADDED = torch.where(BLIND, f(4, 5), torch.tensor(-math.inf))

ATTENTION: list[Case] = [
    ("scaled_dot_product_attention", attended(), QKV),
    ("scaled_dot_product_attention", attended(scale=0.3), tuple(x[0] for x in QKV)),
    ("scaled_dot_product_attention", attended(), tuple(x[0, 0] for x in QKV)),
    ("scaled_dot_product_attention", attended(), tuple(x[None] for x in QKV)),
    ("scaled_dot_product_attention", attended(is_causal=True), (f(2, 2, 4, 3), f(2, 2, 4, 3), f(2, 2, 4, 3))),
    ("scaled_dot_product_attention", attended(is_causal=True), QKV),
    ("scaled_dot_product_attention", attended(enable_gqa=True), (f(2, 4, 4, 3), f(2, 2, 5, 3), f(2, 2, 5, 3))),
    ("scaled_dot_product_attention", attended(), (*QKV, BLIND)),
    ("scaled_dot_product_attention", attended(), (*QKV, BLIND[None, None].repeat(2, 1, 1, 1))),
    ("scaled_dot_product_attention", attended(attn_mask=BLIND), QKV),
    ("scaled_dot_product_attention", attended(attn_mask=ADDED), QKV),
    ("scaled_dot_product_attention", attended(), (*QKV, ADDED)),
    ("scaled_dot_product_attention", attended(), (*QKV, torch.where(torch.eye(4, 5) > 0, math.nan, ADDED))),
    ("scaled_dot_product_attention", attended(), (*QKV, f(2, 1, 4, 5))),
    ("scaled_dot_product_attention", attended(), (*(x[None].repeat(2, 1, 1, 1, 1) for x in QKV), f(2, 1, 1, 4, 5))),
]  # fmt: skip


def stepped(op: Any, states: int, **options: Any) -> Callable[..., Any]:
    given = {
        "has_biases": True,
        "num_layers": 1,
        "dropout": 0.0,
        "train": False,
        "bidirectional": False,
        "batch_first": False,
    } | options

    def call(x: Tensor, *rest: Tensor) -> Any:
        hidden: Any = list(rest[:2]) if states == 2 else rest[0]
        return op(x, hidden, list(rest[states:]), *given.values())

    return call


RECURRENT: list[Case] = [
    ("lstm.input", stepped(A.lstm.input, 2), (f(3, 2, 4), f(1, 2, 3), f(1, 2, 3), f(12, 4), f(12, 3), f(12), f(12))),
    ("lstm.input", stepped(A.lstm.input, 2, batch_first=True, has_biases=False), (f(2, 3, 4), f(1, 2, 3), f(1, 2, 3), f(12, 4), f(12, 3))),
    ("gru.input", stepped(A.gru.input, 1, bidirectional=True), (f(3, 2, 4), f(2, 2, 3), *(x for _ in "lr" for x in (f(9, 4), f(9, 3), f(9), f(9))))),
    ("rnn_tanh.input", stepped(A.rnn_tanh.input, 1), (f(3, 2, 4), f(1, 2, 3), f(3, 4), f(3, 3), f(3), f(3))),
    ("rnn_relu.input", stepped(A.rnn_relu.input, 1, num_layers=2), (f(3, 2, 4), f(2, 2, 3), f(3, 4), f(3, 3), f(3), f(3), f(3, 3), f(3, 3), f(3), f(3))),
]  # fmt: skip

# Of these no gradient is compared: it is zero, and autodiff refuses to train through what is flat, or torch has none.
