"""Rows of the kernel benchmark along an axis or by indices: running sums, sorting, scattering, transposed convolution.

They include the largest elements. Importing this module adds them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from kernel_rows import Results, Work, bytes_of, pure, random, row
from torch import Tensor


def _cumsum(shape: tuple[int, ...], axis: int) -> Work:
    x = random(*shape)

    def theirs(x: Tensor) -> Results:
        return [x.cumsum(axis)]

    return pure(
        {"x": x}, lambda g, v: [g.emit("cumsum", v["x"], axis=axis)], {"cumsum": theirs}, theirs, moved=2 * bytes_of(x)
    )


for shape, axis in (((512, 1024), 1), ((512, 1024), 0)):
    row("order", f"cumsum {'x'.join(map(str, shape))} over {axis}", _cumsum, shape, axis)


def _topk(rows: int, size: int, k: int) -> Work:
    x = random(rows, size)

    def chosen(x: Tensor) -> Results:
        return list(torch.topk(x, k))

    def ordered(x: Tensor) -> Results:
        return [y[:, :k] for y in torch.sort(x, dim=1, descending=True, stable=True)]

    forms = {"topk": chosen, "sort": ordered}
    return pure(
        {"x": x},
        lambda g, v: list(g.emit_all("topk", 2, v["x"], k=k)),
        forms,
        ordered,
        moved=bytes_of(x) + rows * k * 12.0,
    )


for rows, size, k in ((4096, 8, 2), (8, 50257, 50), (64, 1000, 5), (64, 1000, 1000)):
    row("order", f"topk {k} of {rows}x{size}", _topk, rows, size, k)


def _scatter(rows: int, width: int, count: int, add: bool) -> Work:
    x, updates = random(rows, width), random(count, width, seed=1)
    places = torch.randperm(rows, generator=torch.Generator().manual_seed(2))[:count]

    def theirs(x: Tensor, places: Tensor, updates: Tensor) -> Results:
        return [x.index_add(0, places, updates) if add else x.index_copy(0, places, updates)]

    return pure(
        {"x": x, "places": places, "updates": updates},
        lambda g, v: [g.emit("scatter", v["x"], v["places"], v["updates"], add=add)],
        {"index_add" if add else "index_copy": theirs},
        theirs,
        moved=2 * bytes_of(x) + (2 if add else 1) * bytes_of(updates),
    )


for add in (False, True):
    row("order", f"scatter {'add' if add else 'rows'} 1024 of 5000x256", _scatter, 5000, 256, 1024, add)


def _transposed(channels: int, filters: int, size: int) -> Work:
    x, w = random(8, channels, size, size), random(channels, filters, 4, 4, seed=1)
    attrs = {"strides": (2, 2), "pads": (1, 1, 1, 1), "shape": (8, filters, 2 * size, 2 * size)}

    def theirs(x: Tensor, w: Tensor) -> Results:
        return [F.conv_transpose2d(x, w, None, 2, 1)]

    flops = 2.0 * 8 * channels * filters * 16 * size * size
    return pure(
        {"x": x, "w": w},
        lambda g, v: [g.emit("conv_grad_input", v["x"], v["w"], **attrs)],
        {"conv_transpose2d": theirs},
        theirs,
        flops=flops,
    )


row("conv", "transposed 256>128 28^2 4x4 s2", _transposed, 256, 128, 28)
