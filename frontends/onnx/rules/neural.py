"""ONNX operators of neural networks: products, convolutions, softmax, normalisation and losses over classes."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, floor, prod

from penstock.frontends.formulas.elementwise import power, root
from penstock.frontends.formulas.layout import axis_of, expand, reshape
from penstock.frontends.formulas.losses import negative_log_likelihood
from penstock.frontends.formulas.norms import batch_norm, grouped_norm, moved, rms_norm, scaled
from penstock.frontends.formulas.products import product, scaled_sum
from penstock.frontends.formulas.windows import PaddedWindow, reach, transposed_sizes, window
from penstock.frontends.onnx.node import OnnxNode, Result, Rule
from penstock.ir.graph import Value

# ---------------------------------------------------------------------------------------- products


def gemm(n: OnnxNode) -> Value:
    y = n.emit("matmul", n.value(0), n.value(1), ta=bool(n.int_attr("transA")), tb=bool(n.int_attr("transB")))
    alpha, beta = n.float_attr("alpha", 1.0), n.float_attr("beta", 1.0)
    return scaled_sum(n, y, n.value(2) if n.has(2) and beta != 0.0 else None, alpha, beta)


# ---------------------------------------------------------------------------------------- convolutions


def window_of(n: OnnxNode, kernel: Sequence[int]) -> PaddedWindow:
    """Return the windows of a convolution or pooling, with automatic padding resolved."""
    r = len(kernel)
    sizes = n.type().dims[2:]
    strides = n.ints_attr("strides") or (1,) * r
    dilations = n.ints_attr("dilations") or (1,) * r
    pads = list(n.ints_attr("pads") or (0,) * 2 * r)
    n.require(
        len(sizes) == len(strides) == len(dilations) == r and len(pads) == 2 * r,
        f"attributes do not fit {r} spatial dimensions",
    )
    n.require(min((*kernel, *strides, *dilations), default=0) > 0, "kernel, strides and dilations must be 1 or more")
    match mode := n.text_attr("auto_pad", "NOTSET"):
        case "NOTSET":
            pass
        case "VALID":
            pads = [0] * 2 * r
        case "SAME_UPPER" | "SAME_LOWER":
            for i, (size, stride) in enumerate(zip(sizes, strides, strict=True)):
                total = max(0, (-(-size // stride) - 1) * stride + reach(kernel[i], dilations[i]) - size)
                small, large = total // 2, total - total // 2
                pads[i], pads[i + r] = (small, large) if mode == "SAME_UPPER" else (large, small)
        case _:
            n.require(False, f"auto_pad={mode} is not known")
    return window(sizes, kernel, strides, dilations, pads, bool(n.int_attr("ceil_mode")))


def kernel_of(n: OnnxNode, w: Value) -> tuple[int, ...]:
    """Return the sizes of a convolution's kernel, given by the weight and perhaps by an attribute."""
    kernel = w.type.dims[2:]
    n.require((n.ints_attr("kernel_shape") or kernel) == kernel, f"kernel_shape differs from the weight {w.type}")
    return kernel


def conv(n: OnnxNode) -> Value:
    x, w = n.value(0), n.value(1)
    kernel = kernel_of(n, w)
    groups = n.int_attr("group", 1)
    n.require(groups > 0, f"{groups} groups")
    y = n.emit("conv", x, w, groups=groups, **window_of(n, kernel).attrs)
    return scaled(n, y, None, n.value(2) if n.has(2) else None)


def _conv_transpose(n: OnnxNode) -> Result:
    """Write the gradient of a convolution for its operand. x takes the place of the convolution's result."""
    x, w = n.value(0), n.value(1)
    kernel, sizes = kernel_of(n, w), x.type.dims[2:]
    r = len(kernel)
    groups, strides = n.int_attr("group", 1), n.ints_attr("strides") or (1,) * r
    dilations, extra = n.ints_attr("dilations") or (1,) * r, n.ints_attr("output_padding") or (0,) * r
    n.require(
        len(sizes) == len(strides) == len(dilations) == len(extra) == r, f"attributes do not fit {r} spatial dimensions"
    )
    n.require(groups > 0 and min((*strides, *dilations)) > 0, "groups, strides and dilations must be 1 or more")
    n.require(
        all(0 <= e < s for e, s in zip(extra, strides, strict=True)),
        f"output_padding {list(extra)} is not below the strides",
    )
    full = transposed_sizes(sizes, kernel, strides, dilations, extra)
    pads, mode, wanted = (
        n.ints_attr("pads") or (0,) * 2 * r,
        n.text_attr("auto_pad", "NOTSET"),
        n.ints_attr("output_shape"),
    )
    n.require(mode in ("NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"), f"auto_pad={mode} is not known")
    if not wanted and mode.startswith("SAME"):
        wanted = tuple(m * s for m, s in zip(sizes, strides, strict=True))
    if wanted:
        n.require(len(wanted) == r, f"output_shape {list(wanted)} does not fit {r} spatial dimensions")
        surplus = [f - size for f, size in zip(full, wanted, strict=True)]
        small, large = tuple(t // 2 for t in surplus), tuple(t - t // 2 for t in surplus)
        pads = small + large if mode == "SAME_UPPER" else large + small
    # A wanted size may leave room at the end, as output_padding does: less than a stride.
    fits = (
        len(pads) == 2 * r
        and min(pads[:r]) >= 0
        and all(q >= 0 or (wanted and -q < s) for q, s in zip(pads[r:], strides, strict=True))
    )
    n.require(fits, f"padding {list(pads)} must be {2 * r} numbers, not negative")
    spatial = tuple(f - p - q for f, p, q in zip(full, pads[:r], pads[r:], strict=True))
    shape = (x.type.dims[0], w.type.dims[1] * groups, *spatial)
    pads = tuple(max(p, 0) for p in pads)
    y = n.emit("conv_grad_input", x, w, shape=shape, strides=strides, pads=pads, dilations=dilations, groups=groups)
    return scaled(n, y, None, n.value(2) if n.has(2) else None)


# ---------------------------------------------------------------------------------------- rows


def _row(kind: str) -> Rule:
    def rule(n: OnnxNode) -> Result:
        x = n.value()
        if n.opset >= 13:
            return n.emit(kind, x, axis=axis_of(n, n.int_attr("axis", -1), x.type.rank))
        axis = axis_of(n, n.int_attr("axis", 1), x.type.rank)  # over all dimensions from there on
        flat = reshape(n, x, (*x.type.dims[:axis], prod(x.type.dims[axis:])))
        return reshape(n, n.emit(kind, flat, axis=axis), x.type.dims)

    return rule


def _require_statistics_in_f32(n: OnnxNode) -> None:
    n.require(n.int_attr("stash_type", 1) == 1, "stash_type other than 1 (statistics in f32) is not supported")


def _layer_norm(n: OnnxNode) -> Result | Sequence[Result]:
    x = n.value()
    _require_statistics_in_f32(n)
    axis = axis_of(n, n.int_attr("axis", -1), x.type.rank)
    weight = x.type.dims[axis:]
    scale = expand(n, n.value(1), weight)
    bias = expand(n, n.value(2), weight) if n.has(2) else n.emit("const", value=0.0, dtype=x.type.dtype, shape=weight)
    y, mean, rstd = n.emit_all(
        "layer_norm", 3, x, scale, bias, axis=axis - x.type.rank, eps=n.float_attr("epsilon", 1e-5)
    )
    if n.wanted == 1:
        return y
    shape = (*x.type.dims[:axis], *(1,) * len(weight))
    return y, reshape(n, mean, shape), reshape(n, rstd, shape)


def _rms_norm(n: OnnxNode) -> Result:
    x = n.value()
    _require_statistics_in_f32(n)
    axis = axis_of(n, n.int_attr("axis", -1), x.type.rank)
    y = rms_norm(n, x, axis, n.float_attr("epsilon", 1e-5))
    return n.emit("mul", y, n.value(1))


def _batch_norm(n: OnnxNode) -> Result | list[Result]:
    if n.int_attr("training_mode"):
        return _batch_norm_training(n)
    n.ignore("momentum")  # for the running statistics, which do not change here
    n.only_first_output()
    statistics = n.statistic(3), n.statistic(4)
    return n.emit("batch_norm", n.value(0), n.value(1), n.value(2), *statistics, eps=n.float_attr("epsilon", 1e-5))


def _batch_norm_training(n: OnnxNode) -> list[Result]:
    """Normalise with the statistics of the batch. In training, the running ones become results 1 and 2.

    ONNX's variance is the biased one.
    """
    x, scale, bias = n.value(0), n.value(1), n.value(2)
    y, mean, variance, _ = batch_norm(n, x, n.float_attr("epsilon", 1e-5))
    y = scaled(n, y, scale, bias)
    # ONNX gives the share of the old statistic, `moved` takes that of the new one
    momentum = 1.0 - n.float_attr("momentum", 0.9)
    results: list[Result] = [y]
    for i, new in ((3, mean), (4, variance)):
        running, variable = n.moving_statistic(i)
        updated = moved(n, running, new, momentum)
        if variable is not None:
            n.move(variable, updated)
        results.append(updated)
    return results


def _instance_norm(n: OnnxNode) -> Result:
    x = n.value()
    y = grouped_norm(n, x, x.type.dims[1], n.float_attr("epsilon", 1e-5))
    return scaled(n, y, n.value(1), n.value(2))


def _group_norm(n: OnnxNode) -> Result:
    x, groups = n.value(), n.int_attr("num_groups")
    n.require(groups > 0 and x.type.dims[1] % groups == 0, f"{x.type} does not divide into {groups} groups")
    _require_statistics_in_f32(n)
    scale, bias = n.value(1), n.value(2)
    if n.opset < 21:  # one entry per group
        n.require(
            scale.type.dims == bias.type.dims == (groups,),
            f"scale and bias must have one entry per group, got {scale.type}",
        )
        wide = (groups, x.type.dims[1] // groups)
        scale, bias = (
            reshape(n, expand(n, reshape(n, v, (groups, 1)), wide), (x.type.dims[1],)) for v in (scale, bias)
        )
    n.require(
        scale.type.dims == bias.type.dims == (x.type.dims[1],),
        f"scale and bias must have one entry per channel, got {scale.type}",
    )
    y = grouped_norm(n, x, groups, n.float_attr("epsilon", 1e-5))
    return scaled(n, y, scale, bias)


def _local_response(n: OnnxNode) -> Result:
    x, size = n.value(), n.int_attr("size")
    n.require(size > 0 and x.type.rank >= 3, f"size={size} channels of {x.type}")
    batch, channels = x.type.dims[:2]
    lines = reshape(n, n.emit("mul", x, x), (batch, 1, channels, prod(x.type.dims[2:])))
    low, high = floor((size - 1) / 2), ceil((size - 1) / 2)
    mean = n.emit("avg_pool", lines, window=(size, 1), strides=(1, 1), pads=(low, 0, high, 0), include_pad=True)
    total = n.emit(
        "add", n.emit("mul", reshape(n, mean, x.type.dims), n.float_attr("alpha", 1e-4)), n.float_attr("bias", 1.0)
    )
    return n.emit("mul", x, power(n, total, -n.float_attr("beta", 0.75)))


def _lp_normalization(n: OnnxNode) -> Result:
    x, p = n.value(), n.int_attr("p", 2)
    n.require(p in (1, 2), f"p={p} is not known, only 1 and 2")
    axis = axis_of(n, n.int_attr("axis", -1), x.type.rank)
    total = n.emit("sum", n.emit("abs", x) if p == 1 else n.emit("mul", x, x), axes=(axis,), keep=True)
    nothing = n.emit("equal", total, 0.0)
    safe = n.emit("where", nothing, n.literal(1.0, x.type.dtype), total)
    # A row of length 0 stays 0: x is 0 there.
    return n.emit("div", x, n.emit("sqrt", safe) if p == 2 else safe)


def _mean_variance(n: OnnxNode) -> Result:
    x = n.value()
    axes = tuple(sorted(axis_of(n, a, x.type.rank) for a in n.ints_attr("axes") or (0, 2, 3)))
    centred = n.emit("sub", x, n.emit("mean", x, axes=axes, keep=True))
    variance = n.emit("mean", n.emit("mul", centred, centred), axes=axes, keep=True)
    return n.emit("div", centred, n.emit("add", root(n, variance), 1e-9))


def _hardmax(n: OnnxNode) -> Result:
    x = n.value()
    dims, axis = x.type.dims, n.int_attr("axis", -1 if n.opset >= 13 else 1)
    axis = axis_of(n, axis, x.type.rank)
    if n.opset < 13:  # all dimensions from the axis on are one row
        x, axis = reshape(n, x, (prod(dims[:axis]), prod(dims[axis:]))), 1
    top = n.emit("argmax", x, axis=axis)
    top = reshape(n, top, (*x.type.dims[:axis], 1, *x.type.dims[axis + 1 :]))
    line = n.emit("iota", dtype="i64", shape=(x.type.dims[axis], *(1,) * (x.type.rank - 1 - axis)), axis=0)
    return reshape(n, n.emit("cast", n.emit("equal", top, line), dtype=x.type.dtype), dims)


def _loss(n: OnnxNode, logs: Value) -> Value:
    ignored = n.int_attr("ignore_index") if n.given("ignore_index") else None
    weight = n.value(2) if n.has(2) else None
    return negative_log_likelihood(n, logs, n.value(1), weight, n.text_attr("reduction", "mean"), ignored)


def _cross_entropy(n: OnnxNode) -> Result | Sequence[Result]:
    logs = n.emit("log_softmax", n.value(0), axis=1)
    loss = _loss(n, logs)
    return (loss, logs) if n.wanted > 1 else loss


RULES: dict[str, Rule] = {
    # products
    "MatMul": lambda n: product(n, n.value(0), n.value(1)),
    "Gemm": gemm,
    # convolutions
    "Conv": conv,
    "ConvTranspose": _conv_transpose,
    # rows and normalisation
    "Softmax": _row("softmax"),
    "LogSoftmax": _row("log_softmax"),
    "Hardmax": _hardmax,
    "LayerNormalization": _layer_norm,
    "RMSNormalization": _rms_norm,
    "SimplifiedLayerNormalization": _rms_norm,  # onnxruntime's name for it before it was standardised
    "BatchNormalization": _batch_norm,
    "InstanceNormalization": _instance_norm,
    "GroupNormalization": _group_norm,
    "LRN": _local_response,
    "LpNormalization": _lp_normalization,
    "MeanVarianceNormalization": _mean_variance,
    "NegativeLogLikelihoodLoss": lambda n: _loss(n, n.value(0)),
    "SoftmaxCrossEntropyLoss": _cross_entropy,
}
