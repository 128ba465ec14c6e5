"""Library calls, in the process that runs a stage: torch works on views of the tensors it is given.

In: operands and results of a call from TVM, and the text that kernels/library.py wrote. The text has the operation, its
attributes, layout changes in front of operands, the results to compute. Out: filled results. The text only chooses from
`CALLS`; nothing in it is executed.

Everything runs on torch's current stream, which is the one that kernels run on. Tensors pass without copies.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from penstock.ir.ops import window_of

if TYPE_CHECKING:
    import torch

NAME = "penstock.torch"

# A layout change: its kind and its attributes as JSON has them.
View = tuple[str, Mapping[str, Any]]


def register() -> None:
    """Register the function that library calls name with TVM. It can do what `CALLS` has; the text only chooses."""
    import tvm_ffi  # lazy: heavy

    tvm_ffi.register_global_func(NAME, _serve, override=True)


def _serve(*arguments: Any) -> None:
    """Execute a call; its arguments are operands, the text, results."""
    from torch.utils.dlpack import from_dlpack  # lazy: heavy

    (at,) = (i for i, argument in enumerate(arguments) if isinstance(argument, str))
    spec = _parse(str(arguments[at]))
    ins = [_viewed(from_dlpack(x), chain) for x, chain in zip(arguments[:at], spec["views"], strict=True)]
    results = iter(arguments[at + 1 :])
    CALLS[spec["kind"]](
        spec["attrs"], [from_dlpack(next(results)) if wanted else None for wanted in spec["wanted"]], *ins
    )


@lru_cache(maxsize=4096)
def _parse(text: str) -> dict[str, Any]:
    spec: dict[str, Any] = json.loads(text)
    return spec


def _viewed(x: torch.Tensor, chain: Sequence[View]) -> torch.Tensor:
    for kind, a in chain:
        if kind == "reshape":
            x = x.reshape(a["shape"])
        elif kind == "transpose":
            x = x.permute(a["perm"])
        elif kind == "broadcast":
            x = x.expand(a["shape"])
        else:
            x = x[tuple(slice(b, e, s) for b, e, s in zip(a["start"], a["stop"], a["step"], strict=True))]
    return x


def _matmul(a: Mapping[str, Any], outs: Sequence[torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> None:
    import torch  # lazy: heavy

    torch.matmul(x.mT if a["ta"] else x, y.mT if a["tb"] else y, out=outs[0])


class _Window:
    """The geometry of a convolution as torch takes it: borders that differ between both ends are added beforehand."""

    def __init__(self, a: Mapping[str, Any], kernel: Sequence[int]) -> None:
        w = window_of({k: tuple(a[k]) for k in ("strides", "dilations", "pads")}, tuple(kernel))
        self.strides, self.dilations, self.groups = list(w.strides), list(w.dilations), int(a["groups"])
        same = w.low == w.high
        self.padding = list(w.low) if same else [0] * len(w.low)
        self.border = [] if same else [n for pair in reversed(list(zip(w.low, w.high, strict=True))) for n in pair]
        self.low = w.low

    def bordered(self, x: torch.Tensor) -> torch.Tensor:
        """Return an operand with its border."""
        import torch  # lazy: heavy

        return torch.nn.functional.pad(x, self.border) if self.border else x

    def inner(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Return the part of a result inside of the border."""
        if not self.border:
            return x
        for axis, (low, n) in enumerate(zip(self.low, sizes, strict=True), 2):
            x = x.narrow(axis, low, n)
        return x

    def gradients(self, dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, wanted: list[bool]) -> Any:
        import torch  # lazy: heavy

        zeros = [0] * len(self.strides)
        return torch.ops.aten.convolution_backward(
            dy, x, w, None, self.strides, self.padding, self.dilations, False, zeros, self.groups, wanted
        )


def _conv(a: Mapping[str, Any], outs: Sequence[torch.Tensor], x: torch.Tensor, w: torch.Tensor) -> None:
    import torch  # lazy: heavy

    g = _Window(a, w.shape[2:])
    zeros = [0] * len(g.strides)
    outs[0].copy_(torch.convolution(g.bordered(x), w, None, g.strides, g.padding, g.dilations, False, zeros, g.groups))


def _conv_grad_input(a: Mapping[str, Any], outs: Sequence[torch.Tensor], dy: torch.Tensor, w: torch.Tensor) -> None:
    g = _Window(a, w.shape[2:])
    # Only the shape of x matters for its gradient.
    x = g.bordered(dy.new_zeros(1).expand(a["shape"]))
    outs[0].copy_(g.inner(g.gradients(dy, x, w, [True, False, False])[0], a["shape"][2:]))


def _conv_grad_weight(a: Mapping[str, Any], outs: Sequence[torch.Tensor], x: torch.Tensor, dy: torch.Tensor) -> None:
    g = _Window(a, a["shape"][2:])
    w = dy.new_zeros(1).expand(a["shape"])
    outs[0].copy_(g.gradients(dy, g.bordered(x), w, [False, True, False])[1])


def _bias(a: Mapping[str, Any], q: torch.Tensor, k: torch.Tensor, mask: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return the addend of scores: for a mask that hides, or adds, and a causal border. None: no addend, or a border
    alone."""
    import torch  # lazy: heavy

    if not mask:
        return None
    (m,) = mask
    lowest = torch.finfo(q.dtype).min
    added = (
        torch.zeros_like(m, dtype=q.dtype).masked_fill_(~m, lowest) if m.dtype == torch.bool else m.clamp(min=lowest)
    )
    if a["causal"]:
        later = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
        added = added.expand(*added.shape[:-2], q.shape[2], k.shape[2]) if added.ndim >= 2 else added
        added = torch.where(later, -torch.inf, added)
    return added


def _attention(
    a: Mapping[str, Any], outs: Sequence[Any], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *mask: torch.Tensor
) -> None:
    """Compute attention. Readers of the row statistics use only p = e^(score - largest) / sum. In this call `largest`
    is the logarithm of the sum of all e^score, and `sum` is 1."""
    import torch  # lazy: heavy

    y, largest, total = outs
    bias, causal = _bias(a, q, k, mask), bool(a["causal"]) and not mask
    statistics = largest is not None or total is not None
    half = q.dtype in (torch.float16, torch.bfloat16)
    if (
        statistics
        and q.is_cuda
        and half
        and bias is None
        and q.shape[3] % 8 == 0
        and q.shape[2:] == k.shape[2:] == v.shape[2:]
        and q.shape[3] <= 256
    ):
        result, logarithm, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, causal, False, scale=a["scale"]
        )
    else:
        result = torch.nn.functional.scaled_dot_product_attention(q, k, v, bias, is_causal=causal, scale=a["scale"])
        logarithm = None
    if y is not None:
        y.copy_(result)
    if largest is not None:
        largest.copy_(_logarithm(a, q, k, bias, causal) if logarithm is None else logarithm)
    if total is not None:
        total.fill_(1)


def _logarithm(
    a: Mapping[str, Any], q: torch.Tensor, k: torch.Tensor, bias: torch.Tensor | None, causal: bool
) -> torch.Tensor:
    """Compute log sum e^score, with all scores in memory for a moment: only where torch's kernel does not give it."""
    import torch  # lazy: heavy

    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    scores = torch.matmul(q, k.mT).to(wide).mul_(a["scale"])
    if bias is not None:
        scores.add_(bias)
    if causal:
        scores.masked_fill_(torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu_(1), -torch.inf)
    return scores.logsumexp(-1)


def _attention_grad(
    a: Mapping[str, Any],
    outs: Sequence[Any],
    dy: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *further: torch.Tensor,
) -> None:
    """Compute the gradients of attention. Torch's kernels need their own record of the forward pass, so that is run
    once more."""
    import torch  # lazy: heavy

    mask = further[3:]
    bias, causal = _bias(a, q, k, mask), bool(a["causal"]) and not mask
    operands = [x.detach().requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        y = torch.nn.functional.scaled_dot_product_attention(
            operands[0], operands[1], operands[2], bias, is_causal=causal, scale=a["scale"]
        )
    gradients = torch.autograd.grad(y, operands, dy)
    for out, gradient in zip(outs, gradients, strict=True):
        if out is not None:
            out.copy_(gradient)


# The functions of library calls: they take attributes, results, operands.
CALLS: dict[str, Callable[..., None]] = {
    "attention": _attention,
    "attention_grad": _attention_grad,
    "matmul": _matmul,
    "conv": _conv,
    "conv_grad_input": _conv_grad_input,
    "conv_grad_weight": _conv_grad_weight,
}
