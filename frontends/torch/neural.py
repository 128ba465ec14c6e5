"""ATen operations of neural networks: products, convolutions, pooling, resizing, rows and normalisation.

Batch norm in training takes the statistics of the batch. The running ones, which only inference reads, are not kept up to date: see importer.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod

import torch

from penstock.ir.graph import Value
from penstock.ir.types import FLOATS

from ..formulas.draws import dropout
from ..formulas.layout import axis_of, reshape
from ..formulas.norms import batch_statistics, grouped_norm, per_channel, rms_norm, scaled
from ..formulas.products import product, scaled_sum
from ..formulas.resizing import pick, resample, taps_of
from ..formulas.sampling import grid_sample
from .node import Absent, Known, Node, Result, Rule

# ---------------------------------------------------------------------------------------- products


def _linear(n: Node) -> Result:
    x, weight = n.value("input"), n.value("weight")
    if weight.type.rank == 1:
        y = product(n, x, weight)
    elif x.type.rank == 1:
        y = reshape(n, n.emit("matmul", reshape(n, x, (1, *x.type.dims)), weight, tb=True), weight.type.dims[:1])
    else:
        y = n.emit("matmul", x, weight, tb=True)
    return n.emit("add", y, n.value("bias")) if n.has("bias") else y


def products(left: str, right: str) -> Rule:
    return lambda n: product(n, n.value(left), n.value(right))


def _sum_with(left: str, right: str) -> Rule:
    """beta * self + alpha * product."""
    return lambda n: scaled_sum(n, product(n, n.value(left), n.value(right)), n.value(), n.arg("alpha", 1), n.arg("beta", 1))


# ---------------------------------------------------------------------------------------- sliding windows


def _spread(given: Sequence[int], r: int, default: int = 1) -> tuple[int, ...]:
    """One number for all spatial dimensions, or one for each."""
    given = tuple(given) or (default,)
    return tuple(given) * r if len(given) == 1 else tuple(given)


def _conv(n: Node) -> Result:
    x, w = n.value("input"), n.value("weight")
    r = w.type.rank - 2
    batched = x.type.rank == r + 2
    x = x if batched else reshape(n, x, (1, *x.type.dims))
    strides, dilations = _spread(n.ints("stride"), r), _spread(n.ints("dilation"), r)
    pads, groups = _spread(n.ints("padding"), r, 0), int(n.arg("groups"))
    extra = _spread(n.ints("output_padding"), r, 0)
    if n.arg("transposed"):
        reach = [d * (k - 1) + 1 for k, d in zip(w.type.dims[2:], dilations, strict=True)]
        geometry = zip(x.type.dims[2:], strides, reach, pads, extra, strict=True)
        sizes = tuple((m - 1) * s + k - 2 * p + e for m, s, k, p, e in geometry)
        shape = (x.type.dims[0], w.type.dims[1] * groups, *sizes)
        y = n.emit("conv_grad_input", x, w, shape=shape, strides=strides, pads=pads + pads, dilations=dilations, groups=groups)
    else:
        y = n.emit("conv", x, w, strides=strides, pads=pads + pads, dilations=dilations, groups=groups)
    if n.has("bias"):
        y = n.emit("add", y, per_channel(n, y, n.value("bias")))
    return y if batched else reshape(n, y, y.type.dims[1:])


def _window(n: Node, x: Value, r: int) -> tuple[dict[str, tuple[int, ...]], tuple[int, ...]]:
    """Window, strides and pads of a pooling, rounding up resolved; and the pads that were asked for."""
    kernel = _spread(n.ints("kernel_size"), r)
    strides = _spread(n.ints("stride") or kernel, r)
    dilations = _spread(n.ints("dilation"), r)
    pads = _spread(n.ints("padding"), r, 0)
    high = list(pads)
    if n.arg("ceil_mode"):
        for i, (size, k, s, d, p) in enumerate(zip(x.type.dims[2:], kernel, strides, dilations, pads, strict=True)):
            room = size + 2 * p - d * (k - 1) - 1
            count = -(-room // s) + 1
            if (count - 1) * s >= size + p:  # a window must start before the padding at the end
                count -= 1
            high[i] += max(0, (count - 1) * s - room)
    return {"window": kernel, "strides": strides, "pads": (*pads, *high), "dilations": dilations}, pads


def _batched(n: Node, r: int) -> tuple[Value, bool]:
    x = n.value()
    return (x, True) if x.type.rank == r + 2 else (reshape(n, x, (1, *x.type.dims)), False)


def max_pool(r: int) -> Rule:
    def rule(n: Node) -> Result:
        x, batched = _batched(n, r)
        window, _ = _window(n, x, r)
        y = n.emit("max_pool", x, **window)
        return (y if batched else reshape(n, y, y.type.dims[1:])), Absent("the places of what pooling found are not supported")

    return rule


def avg_pool(r: int) -> Rule:
    def rule(n: Node) -> Result:
        x, batched = _batched(n, r)
        window, pads = _window(n, x, r)
        counted, fixed = bool(n.arg("count_include_pad")), n.arg("divisor_override")
        if counted and any(window["pads"][r + i] != pads[i] for i in range(r)):
            # Rounding up adds room that no mean counts; the padding that is counted becomes zeros of the tensor.
            x = n.emit("pad", x, low=(0, 0, *pads), high=(0, 0, *pads))
            window["pads"] = tuple(p - q for p, q in zip(window["pads"], (*pads, *pads), strict=True))
            counted = False
        if fixed:  # zeros all around, so that every mean is over whole windows
            x = n.emit("pad", x, low=(0, 0, *window["pads"][:r]), high=(0, 0, *window["pads"][r:]))
            window["pads"] = (0,) * 2 * r
        y = n.emit("avg_pool", x, include_pad=counted, **window)
        y = n.emit("mul", y, prod(window["window"]) / fixed) if fixed else y
        return y if batched else reshape(n, y, y.type.dims[1:])

    return rule


def adaptive_pool(r: int) -> Rule:
    """Means of equal windows where sizes divide, products with matrices of shares where they do not."""

    def rule(n: Node) -> Result:
        x, batched = _batched(n, r)
        sizes, wanted = x.type.dims[2:], n.ints("output_size")
        if all(size % out == 0 for size, out in zip(sizes, wanted, strict=True)):
            kernel = tuple(size // out for size, out in zip(sizes, wanted, strict=True))
            whole = wanted == (1,) * r
            y = (
                n.emit("mean", x, axes=tuple(range(2, r + 2)), keep=True)
                if whole
                else n.emit("avg_pool", x, window=kernel, strides=kernel, include_pad=False)
            )
        else:
            y = x
            for i, (size, out) in enumerate(zip(sizes, wanted, strict=True)):
                shares = torch.nn.functional.adaptive_avg_pool1d(torch.eye(size, dtype=torch.float64)[None], out)[0].T
                y = resample(n, y, 2 + i, taps_of(shares.numpy()))
        return y if batched else reshape(n, y, y.type.dims[1:])

    return rule


# ---------------------------------------------------------------------------------------- resizing


def nearest(r: int) -> Rule:
    """Places along each axis, as torch finds them for 0, 1, 2, ..."""

    def rule(n: Node) -> Result:
        x = n.value("input" if "input" in n.names else "self")
        for i, out in enumerate(_wanted(n)):
            line = torch.arange(x.type.dims[2 + i], dtype=torch.float64)[:, None]
            x = pick(n, x, 2 + i, _along_one(n, line, i, r, out)[:, 0].long().numpy())
        return x

    return rule


def _wanted(n: Node) -> tuple[int, ...]:
    """The sizes after resizing."""
    if n.has("output_size"):
        return n.ints("output_size")
    x = n.type("input" if "input" in n.names else "self")
    return tuple(int(size * factor) for size, factor in zip(x.dims[2:], n.arg("scale_factors"), strict=True))


def _along_one(n: Node, columns: torch.Tensor, i: int, r: int, out: int) -> torch.Tensor:
    """The call on each column [size] laid along spatial dimension i, with the other sizes 1, as torch itself computes it: [out, columns]."""
    size, count = columns.shape
    shape, wanted = [1] * r, [1] * r
    result: torch.Tensor
    shape[i], wanted[i] = size, out
    arguments: list[object] = []
    for name in list(n.names)[1:]:
        match name:
            case "output_size":
                arguments.append(wanted if not n.has("scale_factors") else None)
            case "scale_factors":
                arguments.append([n.arg(name)[j] if j == i else 1.0 for j in range(r)] if n.has(name) else None)
            case _:
                arguments.append(n.arg(name))
    result = n.target(columns.T.reshape(1, count, *shape), *arguments)  # type: ignore[operator]
    return result.reshape(count, out).T.contiguous()


def _grid_sample(n: Node) -> Result:
    mode, padding = int(n.arg("interpolation_mode")), int(n.arg("padding_mode"))
    modes, paddings = ("linear", "nearest", "cubic"), ("zeros", "border", "reflection")
    return grid_sample(n, n.value("input"), n.value("grid"), modes[mode], paddings[padding], bool(n.arg("align_corners")))


def linear(r: int) -> Rule:
    """Separable interpolation: a product with a matrix of weights along each axis, which torch makes out of the unit vectors."""

    def rule(n: Node) -> Result:
        x = n.value("input" if "input" in n.names else "self")
        for i, (size, out) in enumerate(zip(x.type.dims[2:], _wanted(n), strict=True)):
            weights = _along_one(n, torch.eye(size, dtype=torch.float64), i, r, out)
            if not torch.equal(weights, torch.eye(size, dtype=torch.float64)):
                x = resample(n, x, 2 + i, taps_of(weights.numpy()))
        return x

    return rule


# ---------------------------------------------------------------------------------------- rows and normalisation


def row(kind: str) -> Rule:
    def rule(n: Node) -> Result:
        n.ignore("dtype", "half_to_float")
        x = n.value("self", n.dtype)
        if x.type.rank == 0:
            return n.emit("const", value=1.0 if kind == "softmax" else 0.0, dtype=x.type.dtype)
        return n.emit(kind, x, axis=axis_of(n, n.arg("dim"), x.type.rank))

    return rule


def _layer_norm(n: Node) -> Result:
    n.ignore("cudnn_enable")
    x, dims = n.value("input"), n.ints("normalized_shape")
    dtype = x.type.dtype
    scale = n.value("weight", dtype) if n.has("weight") else n.emit("const", value=1.0, dtype=dtype, shape=dims)
    bias = n.value("bias", dtype) if n.has("bias") else n.emit("const", value=0.0, dtype=dtype, shape=dims)
    found = n.emit_all("layer_norm", 3, x, scale, bias, axis=-len(dims), eps=float(n.arg("eps")))
    if "native" not in str(n.target):
        return found[0]
    shape = (*x.type.dims[: x.type.rank - len(dims)], *(1,) * len(dims))
    return found[0], *(reshape(n, v, shape) for v in found[1:])


def _rms_norm(n: Node) -> Result:
    x, dims = n.value("input"), n.ints("normalized_shape")
    eps = n.arg("eps", torch.finfo(n.call.meta["val"].dtype).eps)
    y = rms_norm(n, x, x.type.rank - len(dims), float(eps))
    return n.emit("mul", y, n.value("weight")) if n.has("weight") else y


def _group_norm(n: Node) -> Result:
    n.ignore("cudnn_enabled", "N", "C", "HxW")
    x = n.value("input")
    groups = int(n.arg("num_groups" if "num_groups" in n.names else "group"))
    y = _weighted(n, grouped_norm(n, x, groups, float(n.arg("eps"))))
    return y if "native" not in str(n.target) else (y, *(Absent("statistics of a group norm are not supported"),) * 2)


def _weighted(n: Node, y: Value) -> Value:
    """Times the weight and plus the bias of each channel, where there are any."""
    weight, bias = (n.value(name, y.type.dtype) if n.has(name) else None for name in ("weight", "bias"))
    return scaled(n, y, weight, bias)


def _channels(n: Node, x: Value, name: str, value: float) -> Value:
    channels = (x.type.dims[1],)
    return n.value(name, x.type.dtype) if n.has(name) else n.emit("const", value=value, dtype=x.type.dtype, shape=channels)


def _batch_norm_inference(n: Node) -> Result:
    n.ignore("momentum")  # of the running statistics, which do not run here
    x = n.value("input")
    statistics = (n.value(name, x.type.dtype) for name in ("running_mean", "running_var"))
    y = n.emit("batch_norm", x, _channels(n, x, "weight", 1.0), _channels(n, x, "bias", 0.0), *statistics, eps=float(n.arg("eps")))
    return y, *(Absent("inference saves no statistics"),) * 2


def _batch_norm(n: Node) -> Result:
    """In training, with the statistics of the batch; what the running statistics become comes last."""
    if not n.arg("training"):
        return _batch_norm_inference(n)
    x, eps, momentum = n.value("input"), float(n.arg("eps")), float(n.arg("momentum"))
    n.require(x.type.dtype in FLOATS, f"needs a floating-point operand, got {x.type}")
    mean, variance, centred = batch_statistics(n, x)
    rstd = n.emit("rsqrt", n.emit("add", variance, eps))
    y = _weighted(n, n.emit("mul", centred, per_channel(n, x, rstd)))
    if "running_mean" not in n.names:  # there are none
        return y, mean, rstd
    count = x.type.size // x.type.dims[1]
    unbiased = n.emit("mul", variance, count / max(1, count - 1))
    moved = [
        n.emit("add", n.emit("mul", n.value(name, x.type.dtype), 1.0 - momentum), n.emit("mul", new, momentum))
        for name, new in (("running_mean", mean), ("running_var", unbiased))
    ]
    return y, mean, rstd, *moved


def _dropout(n: Node) -> Result:
    p, training = float(n.arg("p")), n.arg("train", True)
    if not training or p == 0.0:
        return n.arg("input"), torch.ones(n.type("input").dims, dtype=torch.bool)
    return dropout(n, n.value("input"), p)


# ---------------------------------------------------------------------------------------- bags


def _embedding_bag(n: Node) -> Result:
    """Rows summed per bag: sums over a dimension where bags are known to be of one size, additions to the bag of each row otherwise."""
    n.require(not n.arg("scale_grad_by_freq"), "scale_grad_by_freq is not supported")
    mode, pad = int(n.arg("mode")), n.arg("padding_idx", -1)
    n.require(mode in (0, 1), "mode max is not supported")
    weight, indices, offsets = n.value("weight"), n.value("indices"), n.known("offsets")
    dtype = weight.type.dtype
    total, bags = indices.type.size, n.type("offsets").dims[0] - bool(n.arg("include_last_offset"))
    rows = n.emit("gather", weight, reshape(n, indices, (total,)), axis=0)
    if n.has("per_sample_weights"):
        rows = n.emit("mul", rows, reshape(n, n.value("per_sample_weights"), (total, 1)))
    share = None
    if pad >= 0:
        real = reshape(n, n.emit("not", n.emit("equal", reshape(n, indices, (total,)), int(pad))), (total, 1))
        rows, share = n.emit("where", real, rows, 0.0), n.emit("cast", real, dtype=dtype)
    width = weight.type.dims[1]
    bounds = None if offsets is None else [*offsets.tolist()[:bags], total]
    even = bounds is not None and bags > 0 and bounds == list(range(0, total + 1, max(1, total // bags)))

    def summed(x: Value, columns: int) -> Value:
        if even:
            return n.emit("sum", reshape(n, x, (bags, total // bags, columns)), axes=(1,))
        zeros = n.emit("const", value=0.0, dtype=dtype, shape=(bags, columns))
        return n.emit("scatter", zeros, place, x, axis=0, add=True)

    if not even:
        place = _bags(n, bounds, bags, total)
    y = summed(rows, width)
    if mode == 1:
        ones = share if share is not None else n.emit("const", value=1.0, dtype=dtype, shape=(total, 1))
        y = n.emit("div", y, n.emit("maximum", summed(ones, 1), 1.0))
    return y, *(Absent("only the first result of embedding_bag is supported"),) * 3


def _bags(n: Node, bounds: list[int] | None, bags: int, total: int) -> Value:
    """The bag of each row: how many bags begin at or before it, less one."""
    if bounds is not None:
        sizes = torch.tensor([b - a for a, b in pairwise(bounds)])
        return n.tensor_value(Known(n.fresh("bags"), torch.repeat_interleave(torch.arange(bags), sizes)))
    begins = reshape(n, n.value("offsets", "i64"), (1, n.type("offsets").dims[0]))
    line = n.emit("iota", dtype="i64", shape=(total, 1), axis=0)
    begun = n.emit("sum", n.emit("cast", n.emit("less_equal", begins, line), dtype="i64"), axes=(1,))
    return n.emit("minimum", n.emit("sub", begun, 1), bags - 1)


def _pixel_shuffle(n: Node) -> Result:
    from ..formulas.layout import transpose

    x, f = n.value(), int(n.arg("upscale_factor"))
    *lead, c, h, w = x.type.dims
    r = len(lead)
    split = reshape(n, x, (*lead, c // (f * f), f, f, h, w))
    return reshape(n, transpose(n, split, [*range(r), r, r + 3, r + 1, r + 4, r + 2]), (*lead, c // (f * f), h * f, w * f))


RULES: dict[str, Rule] = {
    # products
    "linear": _linear,
    "matmul": products("self", "other"),
    "mm": products("self", "mat2"),
    "bmm": products("self", "mat2"),
    "mv": products("self", "vec"),
    "dot": products("self", "tensor"),
    "addmm": _sum_with("mat1", "mat2"),
    "baddbmm": _sum_with("batch1", "batch2"),
    # sliding windows
    "convolution": _conv,
    "max_pool2d_with_indices": max_pool(2),
    "max_pool3d_with_indices": max_pool(3),
    "avg_pool2d": avg_pool(2),
    "avg_pool3d": avg_pool(3),
    "_adaptive_avg_pool2d": adaptive_pool(2),
    "_adaptive_avg_pool3d": adaptive_pool(3),
    "pixel_shuffle": _pixel_shuffle,
    # resizing
    "grid_sampler_2d": _grid_sample,
    "upsample_nearest1d.vec": nearest(1),
    "upsample_nearest2d.vec": nearest(2),
    "upsample_nearest3d.vec": nearest(3),
    "upsample_linear1d.vec": linear(1),
    "upsample_bilinear2d.vec": linear(2),
    "upsample_trilinear3d.vec": linear(3),
    "upsample_bicubic2d.vec": linear(2),
    # rows and normalisation
    "softmax.int": row("softmax"),
    "_softmax": row("softmax"),
    "log_softmax.int": row("log_softmax"),
    "_log_softmax": row("log_softmax"),
    "layer_norm": _layer_norm,
    "native_layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "group_norm": _group_norm,
    "native_group_norm": _group_norm,
    "_native_batch_norm_legit_no_training": _batch_norm_inference,
    "_native_batch_norm_legit.no_stats": _batch_norm,
    "_native_batch_norm_legit_functional": _batch_norm,
    "native_dropout": _dropout,
    # bags
    "embedding_bag": _embedding_bag,
    "_embedding_bag": _embedding_bag,
    "embedding_bag.padding_idx": _embedding_bag,
}
