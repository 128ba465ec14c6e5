"""Products, convolutions and attention by the vendor's libraries, through torch.

In: a group of one operation with the annotation `library=torch`. Out: a LibraryCall: the name of a function that the loader registers, and the
operation with the layout changes in front of its operands as text; the operands are the values before these changes, which torch makes views
of. At run time the function gets the tensors without copies, on the stream that kernels run on, and fills the results.

Accuracy is that of torch: float32 in float32 (no TF32 unless torch is told so), 16-bit floats with float32 accumulators.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from penstock.ir.graph import Value
from penstock.ir.ops import complete_attrs, window_of
from penstock.ir.types import FLOATS

from ..group import Group, Kernel, NotOneKernel
from ..lower import LibraryCall

if TYPE_CHECKING:
    import torch

NAME = "penstock.torch"
_VIEWS = ("reshape", "transpose", "broadcast", "slice")

# A layout change: its kind and its attributes as JSON has them.
View = tuple[str, Mapping[str, Any]]


def library_call(group: Group) -> Kernel:
    """The call that computes a group; NotOneKernel when it is not of that kind."""
    if len(group.ops) != 1 or group.ops[0].kind not in CALLS or group.ops[0].outs[0].type.dtype not in FLOATS:
        raise NotOneKernel("no library call")
    op = group.ops[0]
    if not all(v.type.size for v in (*op.ins, *op.outs)):
        raise NotOneKernel("libraries differ in what comes out of nothing")
    bases: list[Value] = []
    chains: list[list[View]] = []
    for value in op.ins:
        base, chain = _base_of(group, value)
        bases.append(base)
        chains.append(chain)
    spec = {"kind": op.kind, "attrs": complete_attrs(op), "views": chains}
    return Kernel(LibraryCall(NAME, json.dumps(spec, sort_keys=True)), tuple(bases), (), op.outs)


def _base_of(group: Group, value: Value) -> tuple[Value, list[View]]:
    """The value in memory that an operand is a view of, and how."""
    chain: list[View] = []
    while value in group.inline:
        op = group.inline[value]
        if op.kind not in _VIEWS:
            raise NotOneKernel(f"{op.kind} is not a view of something in memory")
        chain.append((op.kind, complete_attrs(op)))
        value = op.ins[0]
    return value, chain[::-1]


# ---------------------------------------------------------------------------------------- at run time


def register() -> None:
    """Give TVM the function that library calls name. What it can do is the table below; the text only chooses."""
    import tvm_ffi

    tvm_ffi.register_global_func(NAME, _serve, override=True)


def _serve(*arguments: Any) -> None:
    """Operands, the text, results."""
    from torch.utils.dlpack import from_dlpack

    (at,) = (i for i, argument in enumerate(arguments) if isinstance(argument, str))
    spec = _parse(str(arguments[at]))
    ins = [_viewed(from_dlpack(x), chain) for x, chain in zip(arguments[:at], spec["views"], strict=True)]
    CALLS[spec["kind"]](spec["attrs"], [from_dlpack(x) for x in arguments[at + 1 :]], *ins)


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
    import torch

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
        import torch

        return torch.nn.functional.pad(x, self.border) if self.border else x

    def inner(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """What lies inside of the border."""
        if not self.border:
            return x
        for axis, (low, n) in enumerate(zip(self.low, sizes, strict=True), 2):
            x = x.narrow(axis, low, n)
        return x

    def gradients(self, dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, wanted: list[bool]) -> Any:
        import torch

        zeros = [0] * len(self.strides)
        return torch.ops.aten.convolution_backward(
            dy, x, w, None, self.strides, self.padding, self.dilations, False, zeros, self.groups, wanted
        )


def _conv(a: Mapping[str, Any], outs: Sequence[torch.Tensor], x: torch.Tensor, w: torch.Tensor) -> None:
    import torch

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


# What torch is asked to do: attributes, results, operands.
CALLS: dict[str, Callable[..., None]] = {
    "matmul": _matmul,
    "conv": _conv,
    "conv_grad_input": _conv_grad_input,
    "conv_grad_weight": _conv_grad_weight,
}

__all__ = ["CALLS", "NAME", "library_call", "register"]
