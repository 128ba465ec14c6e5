"""Operations that torch has for GPUs alone, on the processor: attention by plain products with all scores in memory, and products of 16 bits with float32
results. All is computed in float32.

In: the operands of an operation of torch as `perform` queues it. Out: its first results; those that nothing here reads are left out. `KERNELS` has a
function for each operation, `IN_PLACE` one for each that fills a tensor it is given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def _scores(q: torch.Tensor, k: torch.Tensor, bias: torch.Tensor | None, causal: bool, scale: float) -> torch.Tensor:
    scores = q.float() @ k.float().mT * scale
    if bias is not None:
        scores = scores + bias
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    return scores


def _forward(q: Any, k: Any, v: Any, bias: Any, causal: bool, scale: float) -> list[torch.Tensor]:
    scores = _scores(q, k, bias, causal, scale)
    return [(scores.softmax(-1) @ v.float()).to(q.dtype), scores.logsumexp(-1)]


def _backward(
    operands: tuple[Any, ...], bias: Any, y: Any, logarithm: Any, causal: bool, scale: float
) -> list[torch.Tensor]:
    dy, q, k, v = (x.float() for x in operands)
    p = (_scores(q, k, bias, causal, scale) - logarithm[..., : q.shape[2], None]).exp()
    dp = dy @ v.mT - (dy * y.float()).sum(-1, keepdim=True)
    ds = p * dp * scale
    return [g.to(operands[1].dtype) for g in (ds @ k, ds.mT @ q, p.mT @ dy)]


def _flash(
    q: Any, k: Any, v: Any, _: float = 0, causal: bool = False, __: bool = False, *, scale: float
) -> list[torch.Tensor]:
    return _forward(q, k, v, None, causal, scale)


def _flash_backward(dy: Any, q: Any, k: Any, v: Any, y: Any, logarithm: Any, *others: Any, scale: float) -> list[Any]:
    return _backward((dy, q, k, v), None, y, logarithm, others[5], scale)


def _efficient(
    q: Any, k: Any, v: Any, bias: Any, wanted: bool, _: float = 0, causal: bool = False, *, scale: float
) -> list[Any]:
    y, logarithm = _forward(q, k, v, bias, causal, scale)
    return [
        y,
        torch.nn.functional.pad(logarithm, (0, -q.shape[2] % 32), value=torch.inf) if wanted else logarithm[..., :0],
    ]


def _efficient_backward(
    dy: Any, q: Any, k: Any, v: Any, bias: Any, y: Any, logarithm: Any, *others: Any, scale: float
) -> list[Any]:
    causal = others[4] if len(others) > 4 else False
    return _backward((dy, q, k, v), bias, y, logarithm, causal, scale)


def _product(x: Any, y: Any, dtype: torch.dtype) -> list[torch.Tensor]:
    return [(x.float() @ y.float()).to(dtype)]


def _add_product(total: Any, x: Any, y: Any, _: torch.dtype, *, out: Any) -> None:
    out.copy_(total + x.float() @ y.float())


_ATEN = torch.ops.aten
KERNELS: dict[Any, Callable[..., list[torch.Tensor]]] = {
    _ATEN.mm.dtype: _product,
    _ATEN._scaled_dot_product_flash_attention.default: _flash,
    _ATEN._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    _ATEN._scaled_dot_product_efficient_attention.default: _efficient,
    _ATEN._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
}
IN_PLACE: dict[Any, Callable[..., None]] = {_ATEN.addmm.dtype_out: _add_product}
