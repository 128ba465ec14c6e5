"""The meaning of every row of the op table, in torch: `MEANING[kind](*tensors, **attrs)` with complete attributes.

It shares nothing with the NumPy rules: forward rows are torch's own functions where there is one, gradient rows are
torch's autograd of them, everything else is written out. Floats come in as float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .caches.meaning import attend, pick

TORCH_DTYPES = {
    "f32": torch.float32,
    "f64": torch.float64,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "i64": torch.int64,
    "i32": torch.int32,
    "i16": torch.int16,
    "i8": torch.int8,
    "u64": torch.uint64,
    "u32": torch.uint32,
    "u16": torch.uint16,
    "u8": torch.uint8,
    "bool": torch.bool,
}


def grad(function: Callable[..., Tensor], which: int, dy: Tensor, *tensors: Tensor) -> Tensor:
    """Return torch's gradient of sum(function(*tensors) * dy) for one tensor."""
    leaves = [t.clone().requires_grad_(i == which) for i, t in enumerate(tensors)]
    (gradient,) = torch.autograd.grad((function(*leaves) * dy).sum(), leaves[which])
    return gradient


# ---------------------------------------------------------------------------------------- elementwise and layout


def _const(value: Any, dtype: str, shape: tuple[int, ...]) -> Tensor:
    if isinstance(value, tuple):
        return torch.tensor(value, dtype=TORCH_DTYPES[dtype]).reshape(shape)
    return torch.full(shape, value, dtype=TORCH_DTYPES[dtype])


def _iota(dtype: str, shape: tuple[int, ...], axis: int) -> Tensor:
    line = torch.arange(shape[axis], dtype=TORCH_DTYPES[dtype])
    return line.reshape([-1 if i == axis % len(shape) else 1 for i in range(len(shape))]).expand(shape)


def _divide(a: Tensor, b: Tensor) -> Tensor:
    if a.is_floating_point():
        return a / b
    # Division by zero is 0 and the smallest integer by -1 wraps, as the IR says; torch would end the process.
    negated = b == -1 if b.dtype != torch.uint8 else b != b
    whole = torch.div(a, torch.where((b == 0) | negated, 1, b), rounding_mode="trunc")
    return torch.where(b == 0, 0, torch.where(negated, -a, whole))


def _remainder(a: Tensor, b: Tensor) -> Tensor:
    if a.is_floating_point():
        return torch.fmod(a, b)
    whole = b.abs() == 1 if b.dtype != torch.uint8 else b == 1
    remainder = torch.fmod(a, torch.where((b == 0) | whole, 2, b))
    return torch.where(b == 0, a, torch.where(whole, 0, remainder))


def _bitcast(x: Tensor, dtype: str) -> Tensor:
    return x.view(TORCH_DTYPES[dtype])


def _cast(x: Tensor, dtype: str) -> Tensor:
    return x.to(TORCH_DTYPES[dtype])


def _pad(x: Tensor, low: tuple[int, ...], high: tuple[int, ...], inner: tuple[int, ...], value: float) -> Tensor:
    inner = inner or (0,) * x.ndim
    sizes = [p + n + i * max(n - 1, 0) + q for p, n, i, q in zip(low, x.shape, inner, high, strict=True)]
    out = torch.full(sizes, value, dtype=x.dtype)
    places = [p + torch.arange(n) * (i + 1) for p, n, i in zip(low, x.shape, inner, strict=True)]
    if not places:
        return x
    out[torch.meshgrid(*places, indexing="ij")] = x
    return out


def _slice(x: Tensor, start: tuple[int, ...], stop: tuple[int, ...], step: tuple[int, ...]) -> Tensor:
    return x[tuple(slice(b, e, s) for b, e, s in zip(start, stop, step, strict=True))]


# ---------------------------------------------------------------------------------------- reductions


def _over(function: Callable[[Tensor, tuple[int, ...], bool], Tensor]) -> Callable[..., Tensor]:
    """Return a reduction that yields its operand when there is nothing to reduce: torch would reduce everything."""
    return lambda x, axes, keep: function(x, axes, keep) if axes else x


def _sum(x: Tensor, axes: tuple[int, ...], keep: bool) -> Tensor:
    return x.sum(axes, keepdim=keep, dtype=x.dtype)


def _mean(x: Tensor, axes: tuple[int, ...], keep: bool) -> Tensor:
    if x.is_floating_point():
        return x.mean(axes, keepdim=keep)
    count = 1
    for axis in axes:
        count *= x.shape[axis]
    return _divide(_sum(x, axes, keep), torch.tensor(count).to(x.dtype))


def _argmax(x: Tensor, axis: int) -> Tensor:
    """Return the first largest, or the first nan; torch itself may take any of several equal ones."""
    wins = x.isnan() if x.is_floating_point() else torch.zeros_like(x, dtype=torch.bool)
    hit = torch.where(wins.any(axis, keepdim=True), wins, x == x.amax(axis, keepdim=True))
    places = torch.arange(x.shape[axis]).reshape([-1 if i == axis % x.ndim else 1 for i in range(x.ndim)])
    return torch.where(hit, places, x.shape[axis]).amin(axis)


# ---------------------------------------------------------------------------------------- contractions and windows


def _matmul(a: Tensor, b: Tensor, ta: bool, tb: bool) -> Tensor:
    return (a.mT if ta else a) @ (b.mT if tb else b)


def _border(x: Tensor, pads: tuple[int, ...], value: float = 0.0) -> Tensor:
    """Pad before and after by `pads` of the IR: all lows, then all highs."""
    rank = len(pads) // 2
    return F.pad(x, [p for i in reversed(range(rank)) for p in (pads[i], pads[rank + i])], value=value)


def conv(
    x: Tensor, w: Tensor, strides: tuple[int, ...], pads: tuple[int, ...], dilations: tuple[int, ...], groups: int
) -> Tensor:
    rank = x.ndim - 2
    outs = [
        (n + p + q - d * (k - 1) - 1) // s + 1
        for n, k, s, d, p, q in zip(
            x.shape[2:],
            w.shape[2:],
            strides or (1,) * rank,
            dilations or (1,) * rank,
            (pads or (0,) * 2 * rank)[:rank],
            (pads or (0,) * 2 * rank)[rank:],
            strict=True,
        )
    ]
    if 0 in (*x.shape, *w.shape):  # torch refuses these; nothing is added up
        return x.sum() * 0 + w.sum() * 0 + torch.zeros(x.shape[0], w.shape[0], *outs, dtype=x.dtype)
    return getattr(F, f"conv{rank}d")(_border(x, pads), w, None, strides or 1, 0, dilations or 1, groups)


def _conv_bytes(x: Tensor, weight: Tensor, zero: Tensor, zeros: Tensor, **a: Any) -> Tensor:
    less = weight.double() - zeros.double().reshape(-1, *(1,) * (weight.dim() - 1))
    return conv(x.double() - zero.double(), less, **a).int()


def _conv_grad_input(dy: Tensor, w: Tensor, shape: tuple[int, ...], **a: Any) -> Tensor:
    return grad(lambda x, v: conv(x, v, **a), 0, dy, torch.zeros(shape, dtype=dy.dtype), w)


def _conv_grad_weight(x: Tensor, dy: Tensor, shape: tuple[int, ...], **a: Any) -> Tensor:
    return grad(lambda v, w: conv(v, w, **a), 1, dy, x, torch.zeros(shape, dtype=dy.dtype))


def _attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result of torch's own attention, and the statistics written out.

    A score that a bool mask hides is the lowest of the element type.
    """
    added = torch.zeros(q.shape[2], k.shape[2], dtype=q.dtype)
    if mask is not None:
        added = added + (
            torch.where(mask, 0.0, torch.finfo(torch.float32).min).to(q.dtype) if mask.dtype == torch.bool else mask
        )
    if causal:
        added = added.masked_fill(torch.ones_like(added[..., :, :]).triu(1).bool(), -torch.inf)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=added, scale=scale)
    scores = q @ k.mT * scale + added
    top = scores.amax(-1)
    return y, top, torch.exp(scores - top[..., None]).sum(-1)


def _attention_grad(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    top: Tensor,
    total: Tensor,
    *mask: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, ...]:
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    return torch.autograd.grad(_attention(*leaves, *mask, causal=causal, scale=scale)[0], leaves, dy)


def _windows(x: Tensor, a: dict[str, Any], value: float) -> Tensor:
    """Return [..., positions of a window] for every window, gathered position by position."""
    kernel, rank = a["window"], len(a["window"])
    strides, dilations = a["strides"] or (1,) * rank, a["dilations"] or (1,) * rank
    x = _border(x, a["pads"], value) if a["pads"] else x
    for i, (k, s, d) in enumerate(zip(kernel, strides, dilations, strict=True), 2):
        count = (x.shape[i] - d * (k - 1) - 1) // s + 1
        places = (torch.arange(count) * s)[:, None] + torch.arange(k) * d
        x = x.index_select(i, places.flatten()).unflatten(i, (count, k)).movedim(i + 1, -1)
    return x.flatten(2 + rank)


def _max_pool(x: Tensor, **a: Any) -> Tensor:
    lowest = -torch.inf if x.is_floating_point() else torch.iinfo(x.dtype).min
    windows = _windows(x, a, lowest)
    return windows.amax(-1)


def _max_pool_grad(x: Tensor, y: Tensor, dy: Tensor, **a: Any) -> Tensor:
    """Return the gradient of the first largest of each window, by its position."""

    def first(v: Tensor) -> Tensor:
        windows = _windows(v, a, -torch.inf)
        return windows.gather(-1, _argmax(windows, -1)[..., None])[..., 0]

    return grad(first, 0, dy, x)


def _dequantised(q: Tensor, scales: Tensor, zeros: Tensor | None = None, *, bits: int, group: int) -> Tensor:
    """A weight of 8 or 4 bits: of a byte the low four bits come first."""
    numbers = q.double()
    if bits == 4:
        high = (numbers / 16).floor()
        numbers = torch.stack([numbers - 16 * high, high], -1).flatten(1)
    zero = (8.0 if bits == 4 else 0.0) if zeros is None else zeros.double().repeat_interleave(group, 1)
    return (numbers - zero) * scales.repeat_interleave(group, 1)


def _matmul_q(x: Tensor, *weight: Tensor, bits: int, group: int, act: str) -> Tensor:
    if act == "i8" and x.numel():
        groups = x.unflatten(-1, (-1, group))
        step = groups.abs().amax(-1, keepdim=True) / 127
        x = ((groups / step).round() * step).flatten(-2)
    return x @ _dequantised(*weight, bits=bits, group=group).T


def _matmul_bytes(x: Tensor, weight: Tensor, zero: Tensor, zeros: Tensor) -> Tensor:
    return ((x.double() - zero.double()) @ (weight.double() - zeros.double())).int()


def _avg_pool(x: Tensor, include_pad: bool, **a: Any) -> Tensor:
    counts = _windows(torch.ones_like(x), a, 1.0 if include_pad else 0.0).sum(-1)
    return _windows(x, a, 0.0).sum(-1) / counts


def _avg_pool_grad(dy: Tensor, shape: tuple[int, ...], **a: Any) -> Tensor:
    return grad(lambda x: _avg_pool(x, **a), 0, dy, torch.zeros(shape, dtype=dy.dtype))


# ---------------------------------------------------------------------------------------- rows and indexing


def _statistics(x: Tensor, axis: int, eps: float) -> tuple[Tensor, Tensor]:
    dims = tuple(range(axis % x.ndim, x.ndim))
    return x.mean(dims), (x.var(dims, unbiased=False) + eps).rsqrt()


def _layer_norm(x: Tensor, scale: Tensor, bias: Tensor, axis: int, eps: float) -> tuple[Tensor, ...]:
    return F.layer_norm(x, x.shape[axis % x.ndim :], scale, bias, eps), *_statistics(x, axis, eps)


def _layer_norm_grad(dy: Tensor, x: Tensor, scale: Tensor, mean: Tensor, rstd: Tensor, axis: int) -> Tensor:
    return grad(lambda v: F.layer_norm(v, v.shape[axis % v.ndim :], scale), 0, dy, x)


def _layer_norm_grad_weight(dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, axis: int) -> tuple[Tensor, ...]:
    shape = x.shape[axis % x.ndim :]
    scale, bias = torch.ones(shape, dtype=x.dtype), torch.zeros(shape, dtype=x.dtype)
    return tuple(grad(lambda v, s, b: F.layer_norm(v, shape, s, b), i, dy, x, scale, bias) for i in (1, 2))


def _batch_norm(x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, variance: Tensor, eps: float) -> Tensor:
    return F.batch_norm(x, mean, variance, scale, bias, eps=eps)


def _gather(x: Tensor, indices: Tensor, axis: int) -> Tensor:
    picked = x.index_select(axis, torch.remainder(indices.long(), max(x.shape[axis], 1)).flatten())
    return picked.unflatten(axis, indices.shape) if indices.ndim else picked.squeeze(axis)


def _gather_grad(dy: Tensor, indices: Tensor, axis: int, shape: tuple[int, ...]) -> Tensor:
    axis %= len(shape)
    places = torch.remainder(indices.long(), shape[axis]).flatten()
    return torch.zeros(shape, dtype=dy.dtype).index_add(axis, places, dy.flatten(axis, axis + indices.ndim - 1))


def _cross_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    classes = logits.shape[-1]
    return F.cross_entropy(logits.reshape(-1, classes), labels.reshape(-1).long()), torch.logsumexp(logits, -1)


def _cross_entropy_grad(logits: Tensor, labels: Tensor, lse: Tensor, dloss: Tensor) -> Tensor:
    return grad(lambda x: _cross_entropy(x, labels)[0], 0, dloss, logits)


def _scatter(x: Tensor, indices: Tensor, updates: Tensor, axis: int, add: bool) -> Tensor:
    axis %= x.ndim
    places = torch.remainder(indices.long(), max(x.shape[axis], 1)).flatten()
    entries = updates.flatten(axis, axis + indices.ndim - 1) if indices.ndim else updates.unsqueeze(axis)
    if add:
        return x.index_add(axis, places, entries)
    for i, place in enumerate(places.tolist()):  # one by one: torch does not say which of several stays
        x = x.index_copy(axis, torch.tensor([place]), entries.narrow(axis, i, 1))
    return x


def _cumsum(x: Tensor, axis: int, exclusive: bool, reverse: bool) -> Tensor:
    x = x.flip(axis) if reverse else x
    total = x.cumsum(axis, dtype=x.dtype) - (x if exclusive else torch.zeros_like(x))
    return total.flip(axis) if reverse else total


def _topk(x: Tensor, k: int, axis: int, largest: bool) -> tuple[Tensor, ...]:
    values, indices = torch.sort(x, dim=axis, descending=largest, stable=True)
    return values.narrow(axis, 0, k), indices.narrow(axis, 0, k)


# ---------------------------------------------------------------------------------------- optimisers


def _sgd(w: Tensor, g: Tensor, lr: Tensor, weight_decay: float) -> Tensor:
    w.grad = g
    torch.optim.SGD([w], lr=float(lr), weight_decay=weight_decay).step()
    return w


def _momentum(
    w: Tensor, g: Tensor, m: Tensor, lr: Tensor, beta: float, weight_decay: float, nesterov: bool
) -> tuple[Tensor, ...]:
    w.grad = g
    optimizer = torch.optim.SGD([w], lr=float(lr), momentum=beta, weight_decay=weight_decay, nesterov=nesterov)
    optimizer.state[w]["momentum_buffer"] = m.clone()
    optimizer.step()
    return w, optimizer.state[w]["momentum_buffer"]


def _adamw(
    w: Tensor, g: Tensor, m: Tensor, v: Tensor, c1: Tensor, c2: Tensor, lr: Tensor, **a: float
) -> tuple[Tensor, ...]:
    m, v = m.lerp(g, 1 - a["beta1"]), v.lerp(g * g, 1 - a["beta2"])
    return w * (1 - lr * a["weight_decay"]) - lr * (m / c1) / ((v / c2).sqrt() + a["eps"]), m, v


def _ramp(table: Tensor, step: Tensor) -> Tensor:
    """Compute all rows at once, then select the one in force."""
    start, length, first, last, shape = table.unbind(1)
    done = (step - start) / length
    part = done.clamp(0, 1)
    line, wave = first.lerp(last, part), last + (first - last) * torch.cos(torch.pi * part / 2) ** 2
    values = torch.where(shape == 2, first * last ** done.floor(), torch.where(shape == 1, wave, line))
    return values[(torch.searchsorted(start, step, right=True) - 1).clamp(min=0)]


_WORD = (1 << 32) - 1


def _philox(first: Tensor, second: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Compute ten rounds of Philox in i64, whose products keep their lower 64 bits."""
    for turn in range(10):
        product = first * 0xD256D193
        first, second = ((product >> 32) & _WORD) ^ ((key + turn * 0x9E3779B9) & _WORD) ^ second, product & _WORD
    return first, second


def _random_key(x: Tensor, number: int, seed: int) -> Tensor:
    first, second = _philox(x & _WORD, ((x >> 32) & _WORD) ^ seed, torch.full_like(x, number))
    return (second << 32) | first


def _random(place: Tensor, key: Tensor) -> Tensor:
    first, _ = _philox(*torch.broadcast_tensors(place.long(), (key >> 32) & _WORD, key & _WORD))
    return (first >> 8) / 2.0**24


MEANING: dict[str, Callable[..., Tensor | tuple[Tensor, ...]]] = {
    "const": _const,
    "iota": _iota,
    "neg": torch.neg,
    "abs": torch.abs,
    "sign": lambda x: torch.where(x.isnan(), x, torch.sign(x)) if x.is_floating_point() else torch.sign(x),
    "floor": torch.floor,
    "round": torch.round,
    "exp": torch.exp,
    "log": torch.log,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "sin": torch.sin,
    "cos": torch.cos,
    "atan": torch.atan,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "erf": torch.erf,
    "relu": torch.relu,
    "detach": torch.Tensor.clone,
    "gelu": F.gelu,
    "not": torch.logical_not,
    "cast": _cast,
    "bitcast": _bitcast,
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": _divide,
    "rem": _remainder,
    "pow": torch.pow,
    "minimum": torch.minimum,
    "maximum": torch.maximum,
    "equal": torch.eq,
    "less": torch.lt,
    "less_equal": torch.le,
    "and": torch.logical_and,
    "or": torch.logical_or,
    "bit_and": torch.bitwise_and,
    "bit_or": torch.bitwise_or,
    "bit_xor": torch.bitwise_xor,
    "shift_left": torch.bitwise_left_shift,
    "shift_right": torch.bitwise_right_shift,
    "random_key": _random_key,
    "random": _random,
    "where": torch.where,
    "relu_grad": lambda x, dy: grad(torch.relu, 0, dy, x),
    "gelu_grad": lambda x, dy, approximate: grad(lambda v: F.gelu(v, approximate=approximate), 0, dy, x),
    "reshape": torch.reshape,
    "transpose": lambda x, perm: x.permute(perm),
    "broadcast": lambda x, shape: x.expand(shape),
    "slice": _slice,
    "pad": _pad,
    "concat": lambda *x, axis: torch.cat(x, axis),
    "sum": _over(_sum),
    "mean": _over(_mean),
    "max": _over(lambda x, axes, keep: x.amax(axes, keepdim=keep)),
    "argmax": _argmax,
    "matmul": _matmul,
    "conv": conv,
    "conv_grad_input": _conv_grad_input,
    "conv_grad_weight": _conv_grad_weight,
    "attention": _attention,
    "attention_grad": _attention_grad,
    "attend": attend,
    "pick": pick,
    "max_pool": _max_pool,
    "max_pool_grad": _max_pool_grad,
    "avg_pool": _avg_pool,
    "avg_pool_grad": _avg_pool_grad,
    "softmax": lambda x, axis: torch.softmax(x, axis),
    "softmax_grad": lambda y, dy, axis: grad(lambda v: torch.softmax(v, axis), 0, dy, y.log()),
    "log_softmax": lambda x, axis: torch.log_softmax(x, axis),
    "log_softmax_grad": lambda y, dy, axis: grad(lambda v: torch.log_softmax(v, axis), 0, dy, y),
    "cumsum": _cumsum,
    "topk": _topk,
    "layer_norm": _layer_norm,
    "layer_norm_grad": _layer_norm_grad,
    "layer_norm_grad_weight": _layer_norm_grad_weight,
    "batch_norm": _batch_norm,
    "gather": _gather,
    "matmul_q": _matmul_q,
    "matmul_bytes": _matmul_bytes,
    "conv_bytes": _conv_bytes,
    "gather_q": lambda indices, *weight, **a: _dequantised(*weight, **a)[indices.long() % weight[0].shape[0]],
    "gather_grad": _gather_grad,
    "scatter": _scatter,
    "cross_entropy": _cross_entropy,
    "cross_entropy_grad": _cross_entropy_grad,
    "mse": F.mse_loss,
    "sgd": _sgd,
    "momentum": _momentum,
    "adamw": _adamw,
    "ramp": _ramp,
}
