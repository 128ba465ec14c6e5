"""Rows of the kernel benchmark that move memory: pooling, reductions, transpositions, functions of elements.

Importing this module adds them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from kernel_rows import Results, Work, aten, bytes_of, pure, random, row
from torch import Tensor

# ------------------------------------------------------------------------------------------------ pooling


def _max_pool(channels: int, size: int, window: int, stride: int, pad: int) -> Work:
    x = random(8, channels, size, size)
    attrs = {"window": (window,) * 2, "strides": (stride,) * 2, "pads": (pad,) * 4}

    def theirs(x: Tensor) -> Results:
        return [F.max_pool2d(x, window, stride, pad)]

    forms = {
        "max_pool2d": theirs,
        "max_pool2d, channels last": lambda x: theirs(x.to(memory_format=torch.channels_last)),
    }
    moved = bytes_of(x) * (1 + 1 / stride**2)
    return pure({"x": x}, lambda g, v: [g.emit("max_pool", v["x"], **attrs)], forms, theirs, moved=moved)


def _max_pool_gradient(channels: int, size: int, window: int, stride: int, pad: int) -> Work:
    x = random(8, channels, size, size)
    attrs = {"window": (window,) * 2, "strides": (stride,) * 2, "pads": (pad,) * 4}
    y, places = F.max_pool2d(x, window, stride, pad, return_indices=True)
    dy = random(*y.shape, seed=1)

    def theirs(x: Tensor, y: Tensor, dy: Tensor) -> Results:
        return [
            aten.max_pool2d_with_indices_backward(dy, x, [window] * 2, [stride] * 2, [pad] * 2, [1, 1], False, places)
        ]

    moved = bytes_of(x) * 2 + 2 * bytes_of(y)
    tensors = {"x": x, "y": y, "dy": dy}
    return pure(
        tensors,
        lambda g, v: [g.emit("max_pool_grad", v["x"], v["y"], v["dy"], **attrs)],
        {"max_pool2d_with_indices_backward": theirs},
        theirs,
        moved=moved,
    )


def _avg_pool(channels: int, size: int, window: int, stride: int) -> Work:
    x = random(8, channels, size, size)
    attrs = {"window": (window,) * 2, "strides": (stride,) * 2}

    def theirs(x: Tensor) -> Results:
        return [F.avg_pool2d(x, window, stride)]

    moved = bytes_of(x) * (1 + 1 / stride**2)
    return pure(
        {"x": x}, lambda g, v: [g.emit("avg_pool", v["x"], **attrs)], {"avg_pool2d": theirs}, theirs, moved=moved
    )


def _avg_pool_gradient(channels: int, size: int, window: int, stride: int) -> Work:
    x = torch.empty(8, channels, size, size)
    dy = random(8, channels, (size - window) // stride + 1, (size - window) // stride + 1)
    attrs = {"window": (window,) * 2, "strides": (stride,) * 2, "shape": tuple(x.shape)}

    def theirs(dy: Tensor) -> Results:
        return [aten.avg_pool2d_backward(dy, x.to(dy.dtype), [window] * 2, [stride] * 2, [0, 0], False, True, None)]

    moved = bytes_of(x, dy)
    return pure(
        {"dy": dy},
        lambda g, v: [g.emit("avg_pool_grad", v["dy"], **attrs)],
        {"avg_pool2d_backward": theirs},
        theirs,
        moved=moved,
    )


for pooled in ((64, 112, 3, 2, 1), (256, 28, 2, 2, 0)):
    text = "{0}x{1}^2 {2}x{2} s{3}".format(*pooled)
    row("pooling", f"max forward {text}", _max_pool, *pooled)
    row("pooling", f"max gradient {text}", _max_pool_gradient, *pooled)
for averaged in ((256, 56, 2, 2), (2048, 7, 7, 1)):
    text = "{0}x{1}^2 {2}x{2} s{3}".format(*averaged)
    row("pooling", f"average forward {text}", _avg_pool, *averaged)
    row("pooling", f"average gradient {text}", _avg_pool_gradient, *averaged)


# ------------------------------------------------------------------------------------------------ reductions


def _reduction(kind: str, shape: tuple[int, ...], axes: tuple[int, ...]) -> Work:
    x = random(*shape)
    theirs: Callable[[Tensor], Results] = {
        "sum": lambda x: [x.sum(axes)],
        "mean": lambda x: [x.mean(axes)],
        "max": lambda x: [x.amax(axes)],
        "argmax": lambda x: [x.argmax(axes[0])],
    }[kind]
    attrs: dict[str, Any] = {"axis": axes[0]} if kind == "argmax" else {"axes": axes}
    return pure({"x": x}, lambda g, v: [g.emit(kind, v["x"], **attrs)], {kind: theirs}, theirs, moved=bytes_of(x))


for kind, shape, axes in (
    ("sum", (64, 197, 768), (0,)), ("sum", (8, 512, 768), (1,)), ("sum", (512, 3072), (1,)),
    ("sum", (8, 256, 56, 56), (0, 2, 3)), ("sum", (1 << 22,), (0,)), ("mean", (8, 2048, 7, 7), (2, 3)),
    ("mean", (512, 12, 64), (1,)), ("max", (512, 3072), (1,)), ("max", (8, 512, 768), (1,)),
    ("max", (8, 256, 56, 56), (2, 3)), ("argmax", (256, 50257), (1,)), ("argmax", (8, 512, 768), (1,)),
):  # fmt: skip
    row(
        "reduction",
        f"{kind} {'x'.join(map(str, shape))} over {','.join(map(str, axes))}",
        _reduction,
        kind,
        shape,
        axes,
    )


# ------------------------------------------------------------------------------------------------ layouts


def _transpose(shape: tuple[int, ...], perm: tuple[int, ...]) -> Work:
    x, out = random(*shape), torch.empty([shape[p] for p in perm])
    forms: dict[str, Callable[..., Results]] = {
        "contiguous": lambda x: [x.permute(perm).contiguous()],
        "copy into a given result": lambda x: [out.copy_(x.permute(perm))],
    }
    return pure(
        {"x": x},
        lambda g, v: [g.emit("transpose", v["x"], perm=perm)],
        forms,
        forms["contiguous"],
        moved=2 * bytes_of(x),
    )


for shape, perm in (
    ((1024, 1024), (1, 0)), ((3072, 768), (1, 0)), ((4, 128, 12, 64), (0, 2, 1, 3)), ((8, 64, 56, 56), (0, 2, 3, 1)),
    ((8, 56, 56, 64), (0, 3, 1, 2)), ((48, 128, 64), (0, 2, 1)), ((33, 65, 129), (2, 1, 0)),
):  # fmt: skip
    row("transpose", f"{'x'.join(map(str, shape))} to {','.join(map(str, perm))}", _transpose, shape, perm)


# ------------------------------------------------------------------------------------------------ functions


def _function(kind: str) -> Work:
    # Fits the second cache, so that the function dominates the time.
    x = random(128, 1024)
    if kind in ("log", "pow", "sqrt", "rsqrt"):
        x = x.abs().add_(0.1)
    out = torch.empty_like(x)
    call = getattr(torch, kind)
    tensors = {"x": x}
    if kind == "pow":
        tensors["y"] = random(128, 1024, seed=1)

    def into(*operands: Tensor) -> Results:
        return [call(*operands, out=out)]

    forms: dict[str, Callable[..., Results]] = {
        kind: lambda *operands: [call(*operands)],
        f"{kind} into a given result": into,
    }
    return pure(
        tensors, lambda g, v: [g.emit(kind, *v.values())], forms, forms[kind], moved=(1 + len(tensors)) * bytes_of(x)
    )


for kind in ("exp", "log", "tanh", "sigmoid", "erf", "sin", "cos", "pow", "sqrt", "rsqrt"):
    row("function", f"{kind} of {128 * 1024}", _function, kind)
