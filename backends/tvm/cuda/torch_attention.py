"""Attention and its gradients by torch's own kernels, the gradients from what the forward pass left.

In: the attributes of an operation, results to fill, operands on one device. Out: filled results. The kernel follows
from the operands (`kernel_for`), so forward and backward pass choose the same:

    flash       16-bit floats on a GPU, no mask, heads of up to 256
    efficient   16-bit floats and float32 on a GPU, with or without a mask
    cpu         all floats on a CPU
    plain       what is left: scores of a whole head in memory

Statistics: readers use only p = e^(score - largest) / sum. Here `largest` is the logarithm of the sum of all e^score,
and `sum` is 1. The gradient reads log(sum) + largest, so no kernel but `plain` runs the forward pass again.

Masks: a hidden score is the lowest number of its type, which vanishes beside any visible one. It becomes -inf here. In
a row that sees nothing all scores are equal: its query becomes zero and the mask lets everything pass, so that the type
of the scores does not matter. Its statistics are those of the lowest number.

Sizes: heads are padded to multiples of 8 with zeros, which add nothing to a score, and rows of a mask lie on 16-byte
boundaries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# What torch's kernels ask of sizes, and of the lines of statistics.
_HEAD, _LARGEST_HEAD, _MASK_ROW, _STATISTICS = 8, 256, 16, 32
# The first compute capability that has flash attention.
_FLASH_FROM = (8, 0)


@dataclass(frozen=True)
class Scores:
    """The scores of attention: what is added to them, and the border of causal attention where nothing is added.
    `blind` are the rows of queries that see nothing, `equal` the number of equal scores in such a row."""

    scale: float
    causal: bool
    bias: torch.Tensor | None = None
    blind: torch.Tensor | None = None
    equal: torch.Tensor | None = None


def scores_of(a: Mapping[str, Any], q: torch.Tensor, k: torch.Tensor, mask: Sequence[torch.Tensor]) -> Scores:
    """Return how scores are made, from the attributes of an operation and its mask."""
    import torch  # lazy: heavy

    if not mask:
        return Scores(a["scale"], bool(a["causal"]))
    (m,) = mask
    hidden = m.logical_not() if m.dtype == torch.bool else m <= torch.finfo(q.dtype).min
    hidden = hidden.expand(*hidden.shape[:-1], k.shape[2])
    later = torch.zeros((), dtype=torch.bool, device=q.device)
    if a["causal"]:
        later = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
    blind = (hidden | later).all(-1, keepdim=True)
    unseen = later | (hidden & blind.logical_not())
    zero = torch.zeros((), dtype=q.dtype, device=q.device)
    added = zero if m.dtype == torch.bool else torch.where(blind, zero, m)
    bias = torch.where(unseen, -torch.inf, added)
    return Scores(a["scale"], False, bias, blind, unseen.logical_not().sum(-1))


def kernel_for(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores) -> str:
    """Return which of torch's kernels computes attention."""
    import torch  # lazy: heavy

    if not q.is_cuda:
        return "cpu" if q.shape[3] == v.shape[3] else "plain"
    if q.dtype == torch.float64:
        return "plain"
    half = q.dtype in (torch.float16, torch.bfloat16)
    square = q.shape[2] == k.shape[2] or not scores.causal
    small = q.shape[3] == v.shape[3] <= _LARGEST_HEAD
    if half and square and small and scores.bias is None and _capability(q.device) >= _FLASH_FROM:
        return "flash"
    return "efficient"


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    import torch  # lazy: heavy

    return torch.cuda.get_device_capability(device)


def attention(
    a: Mapping[str, Any], outs: Sequence[Any], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *mask: torch.Tensor
) -> None:
    """Compute attention, and the statistics of its rows where they are wanted."""
    import torch  # lazy: heavy

    y, largest, total = outs
    scores = scores_of(a, q, k, mask)
    result, logarithm = forward(kernel_for(q, k, v, scores), _seeing(q, scores), k, v, scores, largest is not None)
    if y is not None:
        y.copy_(result)
    if largest is not None:
        largest.copy_(_where_blind(scores, torch.finfo(q.dtype).min, logarithm))
    if total is not None:
        total.copy_(_where_blind(scores, scores.equal, torch.ones_like(total)))


def attention_grad(
    a: Mapping[str, Any], outs: Sequence[Any], dy: torch.Tensor, q: torch.Tensor, k: torch.Tensor, *others: torch.Tensor
) -> None:
    """Compute the gradients of attention from its result and statistics."""
    v, y, largest, total, *mask = others
    scores = scores_of(a, q, k, mask)
    kernel = kernel_for(q, k, v, scores)
    logarithm = largest + total.log()
    if scores.equal is not None:
        logarithm = _where_blind(scores, scores.equal.to(largest.dtype).log(), logarithm)
    dq, dk, dv = backward(kernel, dy, (_seeing(q, scores), k, v), y, logarithm, scores)
    if scores.blind is not None:
        dq = dq.masked_fill(scores.blind, 0)
    for out, gradient in zip(outs, (dq, dk, dv), strict=True):
        if out is not None:
            out.copy_(gradient)


def _where_blind(scores: Scores, value: Any, other: torch.Tensor) -> torch.Tensor:
    """Return one number per row: `value` where a row sees nothing."""
    import torch  # lazy: heavy

    if scores.blind is None:
        return other
    if not isinstance(value, torch.Tensor):
        # A number that is copied from the host would be waited for.
        value = torch.full((), value, dtype=other.dtype, device=other.device)
    return torch.where(scores.blind.squeeze(-1), value.to(other.dtype), other)


def _seeing(q: torch.Tensor, scores: Scores) -> torch.Tensor:
    """Return the queries, zero where a row sees nothing."""
    return q if scores.blind is None else q.masked_fill(scores.blind, 0)


def forward(
    kernel: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores, statistics: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result of attention and the logarithms of the sums of its rows."""
    import torch  # lazy: heavy

    aten, size = torch.ops.aten, v.shape[3]
    scale, causal = scores.scale, scores.causal
    if kernel == "flash":
        y, logarithm, *_ = aten._scaled_dot_product_flash_attention(
            *map(_padded, (q, k, v)), 0.0, causal, False, scale=scale
        )
    elif kernel == "efficient":
        bias = _bias_rows(scores.bias, q, k)
        y, logarithm, *_ = aten._scaled_dot_product_efficient_attention(
            *map(_padded, (q, k, v)), bias, statistics, 0.0, causal, scale=scale
        )
        logarithm = logarithm.narrow(2, 0, q.shape[2]) if statistics else logarithm
    elif kernel == "cpu":
        y, logarithm = aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=_expanded(scores.bias, q, k), scale=scale
        )
    else:
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, scores.bias, is_causal=causal, scale=scale)
        logarithm = _logarithm(q, k, scores) if statistics else y
    return y.narrow(-1, 0, size), logarithm


def backward(
    kernel: str,
    dy: torch.Tensor,
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    y: torch.Tensor,
    logarithm: torch.Tensor,
    scores: Scores,
) -> list[torch.Tensor]:
    """Return the gradients of queries, keys and values."""
    import torch  # lazy: heavy

    aten, (q, k, v) = torch.ops.aten, operands
    scale, causal = scores.scale, scores.causal
    if kernel == "cpu":
        bias = _expanded(scores.bias, q, k)
        return list(
            aten._scaled_dot_product_flash_attention_for_cpu_backward(
                dy, q, k, v, y, logarithm, 0.0, causal, attn_mask=bias, scale=scale
            )
        )
    if kernel == "plain":
        leaves = [x.detach().requires_grad_() for x in operands]
        with torch.enable_grad():
            again = torch.nn.functional.scaled_dot_product_attention(
                leaves[0], leaves[1], leaves[2], scores.bias, is_causal=causal, scale=scale
            )
        return list(torch.autograd.grad(again, leaves, dy))
    padded = [_padded(x) for x in (dy, q, k, v, y)]
    if kernel == "flash":
        # Without dropout nothing reads the state of random numbers.
        seed = torch.empty(2, dtype=torch.uint64, device=q.device)
        gradients = aten._scaled_dot_product_flash_attention_backward(
            *padded, logarithm, None, None, q.shape[2], k.shape[2], 0.0, causal, seed, seed, scale=scale
        )
    else:
        seed = torch.empty((), dtype=torch.int64, device=q.device)
        lines = torch.nn.functional.pad(logarithm, (0, -logarithm.shape[2] % _STATISTICS), value=torch.inf)
        gradients = aten._scaled_dot_product_efficient_attention_backward(
            *padded[:4],
            _bias_rows(scores.bias, q, k),
            padded[4],
            lines,
            seed,
            seed,
            0.0,
            [True, True, True, False],
            causal,
            scale=scale,
        )
    return [g.narrow(-1, 0, x.shape[3]) for g, x in zip(gradients[:3], operands, strict=True)]


def _padded(x: torch.Tensor) -> torch.Tensor:
    """Return an operand with heads of a size that kernels take."""
    import torch  # lazy: heavy

    missing = -x.shape[-1] % _HEAD
    return torch.nn.functional.pad(x, (0, missing)) if missing else x


def _expanded(bias: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor | None:
    return None if bias is None else bias.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])


def _bias_rows(bias: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor | None:
    """Return the addend with a row for every query, each on a boundary that the kernel asks for."""
    import torch  # lazy: heavy

    if bias is None:
        return None
    columns = k.shape[2]
    bias = bias.expand(*bias.shape[:-1], columns)
    rows = torch.nn.functional.pad(bias, (0, -columns % _MASK_ROW)).contiguous().narrow(-1, 0, columns)
    return _expanded(rows, q, k)


def _logarithm(q: torch.Tensor, k: torch.Tensor, scores: Scores) -> torch.Tensor:
    """Compute log sum e^score, with all scores in memory for a moment: only where torch's kernel does not give it."""
    import torch  # lazy: heavy

    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    products = torch.matmul(q, k.mT).to(wide).mul_(scores.scale)
    if scores.bias is not None:
        products.add_(scores.bias)
    if scores.causal:
        later = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu_(1)
        products.masked_fill_(later, -torch.inf)
    return products.logsumexp(-1)
