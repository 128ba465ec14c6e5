"""Library calls, in the process that runs a stage: torch works on views of the tensors it is given.

In: operands and results of a call from TVM, and the text that kernels/library.py wrote. The text has the operation, its
attributes, layout changes in front of operands, the results to compute. Out: filled results, or a variable that a
product was added to. The text only chooses from `CALLS` and `ADDED`; nothing in it is executed.

Everything runs on torch's current stream, which is the one that kernels run on. Tensors pass without copies.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from penstock.ir.ops import window_of

from .torch_attention import attention, attention_grad

if TYPE_CHECKING:
    import torch

NAME = "penstock.torch"
# Sizes that tensor cores like, and the smallest size of a product for which zeros are added.
_BOUNDARY, _PADDED_FROM = 8, 64

# A layout change: its kind and its attributes as JSON has them.
View = tuple[str, Mapping[str, Any]]


def register() -> None:
    """Register the function that library calls name with TVM. It can do what `CALLS` has; the text only chooses."""
    import tvm_ffi  # lazy: heavy

    tvm_ffi.register_global_func(NAME, _serve, override=True)
    keep_float32()


def keep_float32() -> None:
    """Let this process's calls in float32 round as float32 does. By itself, torch lets cuDNN round the operands of
    convolutions to tf32, which has 10 bits of a fraction. Torch has old and new names for that. A process that reads an
    old one gets an error where they disagree, so both are set, and those of recurrent layers with them."""
    import torch  # lazy: heavy

    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.conv.fp32_precision = "ieee"  # type: ignore[attr-defined]
    torch.backends.cudnn.rnn.fp32_precision = "ieee"  # type: ignore[attr-defined]
    torch.set_float32_matmul_precision("highest")


def _serve(*arguments: Any) -> None:
    """Execute a call; its arguments are operands, the text, results."""
    from torch.utils.dlpack import from_dlpack  # lazy: heavy

    (at,) = (i for i, argument in enumerate(arguments) if isinstance(argument, str))
    spec = _parse(str(arguments[at]))
    tensors = list(map(from_dlpack, arguments[:at]))
    total = tensors.pop() if spec.get("added") else None
    ins = [_viewed(x, chain) for x, chain in zip(tensors, spec["views"], strict=True)]
    if total is not None:
        ADDED[spec["kind"]](spec["attrs"], total, *ins)
        return
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

    x, y, out = (x.mT if a["ta"] else x), (y.mT if a["tb"] else y), outs[0]
    if not pads(x, y):
        torch.matmul(x, y, out=out)
        return
    out.copy_(_within(torch.matmul(*_padded(x, y)), out))


def _add_matmul(a: Mapping[str, Any], total: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> None:
    """Add a product to what is there. Its sums are never rounded to 16 bits."""
    import torch  # lazy: heavy

    x, y, wide = (x.mT if a["ta"] else x), (y.mT if a["tb"] else y), total.dtype
    if pads(x, y):
        total.add_(_within(torch.mm(*_padded(x, y), out_dtype=wide), total))
    elif x.dtype == wide:
        torch.addmm(total, x, y, out=total)
    elif x.is_cuda:
        torch.addmm(total, x, y, out_dtype=wide, out=total)
    else:  # torch has no such product on a processor
        torch.addmm(total, x.to(wide), y.to(wide), out=total)


def _padded(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return operands with zeros. Those along the sum add nothing, and what others give is left out of the result."""
    import torch  # lazy: heavy

    rows, depth, columns = (-n % _BOUNDARY for n in (x.shape[-2], x.shape[-1], y.shape[-1]))
    return torch.nn.functional.pad(x, (0, depth, 0, rows)), torch.nn.functional.pad(y, (0, columns, 0, depth))


def _within(product: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return product.narrow(-2, 0, out.shape[-2]).narrow(-1, 0, out.shape[-1])


def pads(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Return whether a product is made with sizes that are multiples of 8. Tensor cores get 16 bits from 16-byte
    boundaries; without those a product takes several times as long. Copies with zeros pay from a size on."""
    rows, depth, columns = x.shape[-2], x.shape[-1], y.shape[-1]
    ragged = any(n % _BOUNDARY for n in (rows, depth, columns))
    large = min(rows, depth, columns) >= _PADDED_FROM
    return x.is_cuda and x.element_size() == 2 and ragged and large


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


# The functions of calls that add to a variable: they take attributes, the variable, operands.
ADDED: dict[str, Callable[..., None]] = {"matmul": _add_matmul}
# The functions of library calls: they take attributes, results, operands.
CALLS: dict[str, Callable[..., None]] = {
    "attention": attention,
    "attention_grad": attention_grad,
    "matmul": _matmul,
    "conv": _conv,
    "conv_grad_input": _conv_grad_input,
    "conv_grad_weight": _conv_grad_weight,
}
