"""For every gradient rule: random operands, shapes and attributes at which the operation is smooth, with its meaning in torch.

`DRAWN[kind]` is a hypothesis strategy of `Drawn`. Shapes broadcast wherever the row lets them. Values keep away from kinks (0 of abs, ties of a
maximum) by much more than finite differences step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from oracles.torch_meaning import MEANING

Array = np.ndarray
Draw = st.DrawFn


@dataclass(frozen=True)
class Drawn:
    """`function` takes the arrays as tensors and gives all results of which a loss can be made, the first `read` of `outs`."""

    arrays: tuple[Array, ...]
    function: Callable[..., Any]
    attrs: dict[str, Any] = field(default_factory=dict)
    outs: int = 1
    read: int | None = None

    def __repr__(self) -> str:
        return f"{[list(x.shape) for x in self.arrays]} {self.attrs}"


SIZES = st.integers(1, 4)
SHAPES = st.lists(SIZES, max_size=3).map(tuple)


def rng(draw: Draw) -> np.random.Generator:
    return np.random.default_rng(draw(st.integers(0, 2**32 - 1)))


def normal(r: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return r.normal(size=shape)


def positive(r: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return r.uniform(0.4, 2.0, size=shape)


def away(r: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Far from 0, with both signs."""
    return np.asarray(np.where(r.random(shape) < 0.5, -1.0, 1.0) * positive(r, shape))


def spread(r: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """All elements different, by 1/7 or more."""
    size = math.prod(shape)
    return (r.permutation(size).reshape(shape) - size / 2) / 7.0


def narrowed(draw: Draw, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape that broadcasts to this one: without leading dimensions, and 1 in some places."""
    kept = shape[draw(st.integers(0, len(shape))) :]
    return tuple(1 if draw(st.booleans()) and draw(st.booleans()) else n for n in kept)


def broadcasting(draw: Draw, count: int) -> list[tuple[int, ...]]:
    """Shapes that broadcast to one, which is not always that of any of them."""
    shape = draw(SHAPES)
    return [narrowed(draw, shape) for _ in range(count)]


# ---------------------------------------------------------------------------------------- elementwise


def unary(function: Callable[..., Any], make: Callable[..., Array] = normal, **attrs: Any) -> st.SearchStrategy[Drawn]:
    return st.composite(lambda draw: Drawn((make(rng(draw), draw(SHAPES)),), function, attrs))()


def binary(
    function: Callable[..., Any], left: Callable[..., Array] = normal, right: Callable[..., Array] = normal
) -> st.SearchStrategy[Drawn]:
    @st.composite
    def drawn(draw: Draw) -> Drawn:
        a, b = broadcasting(draw, 2)
        r = rng(draw)
        return Drawn((left(r, a), right(r, b)), function)

    return drawn()


@st.composite
def rem(draw: Draw) -> Drawn:
    """Quotients far from whole numbers, where the remainder jumps: one divisor for all of them."""
    shape, r = draw(SHAPES), rng(draw)
    divisor = float(r.uniform(0.5, 2.0)) * draw(st.sampled_from([-1, 1]))
    x = (r.integers(-3, 4, shape) + r.uniform(0.2, 0.8, shape)) * divisor
    return Drawn((x, np.full(narrowed(draw, shape), divisor)), torch.fmod)


@st.composite
def extremum(draw: Draw, function: Callable[..., Any]) -> Drawn:
    """No element of one operand is near any of the other, and within one they need not differ."""
    a, b = broadcasting(draw, 2)
    r = rng(draw)
    both = spread(r, (math.prod(a) + math.prod(b),))
    return Drawn((both[: math.prod(a)].reshape(a), both[math.prod(a) :].reshape(b)), function)


@st.composite
def where(draw: Draw) -> Drawn:
    c, a, b = broadcasting(draw, 3)
    r = rng(draw)
    return Drawn((r.random(c) < 0.5, normal(r, a), normal(r, b)), torch.where)


@st.composite
def gelu(draw: Draw) -> Drawn:
    approximate = draw(st.sampled_from(["none", "tanh"]))
    return Drawn(
        (normal(rng(draw), draw(SHAPES)),), lambda x: F.gelu(x, approximate=approximate), {"approximate": approximate}
    )


@st.composite
def batch_norm(draw: Draw) -> Drawn:
    """Torch's own has no gradient for the statistics: written out."""
    shape = (draw(SIZES), draw(SIZES), *draw(st.lists(SIZES, max_size=3)))
    eps, r = draw(st.sampled_from([1e-5, 1e-3, 0.1])), rng(draw)

    def function(x: Any, *vectors: Any) -> Any:
        scale, bias, mean, variance = (v.reshape(-1, *(1,) * (x.ndim - 2)) for v in vectors)
        return (x - mean) / torch.sqrt(variance + eps) * scale + bias

    channels = shape[1:2]
    arrays = (normal(r, shape), normal(r, channels), normal(r, channels), normal(r, channels), positive(r, channels))
    return Drawn(arrays, function, {"eps": eps})


# ---------------------------------------------------------------------------------------- layout


@st.composite
def reshape(draw: Draw) -> Drawn:
    shape = draw(SHAPES)
    size = math.prod(shape)
    first = draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
    new = draw(
        st.sampled_from([(size,), (first, size // first), (1, first, 1, size // first), *([()] if size == 1 else [])])
    )
    return Drawn((normal(rng(draw), shape),), lambda x: x.reshape(new), {"shape": new})


@st.composite
def transpose(draw: Draw) -> Drawn:
    shape = draw(st.lists(SIZES, max_size=4).map(tuple))
    perm = tuple(draw(st.permutations(range(len(shape)))))
    return Drawn((normal(rng(draw), shape),), lambda x: x.permute(perm), {"perm": perm})


@st.composite
def broadcast(draw: Draw) -> Drawn:
    shape = draw(SHAPES)
    return Drawn((normal(rng(draw), narrowed(draw, shape)),), lambda x: x.expand(shape), {"shape": shape})


@st.composite
def cut(draw: Draw) -> Drawn:
    shape = draw(SHAPES)
    start = [draw(st.integers(0, n - 1)) for n in shape]
    stop = [draw(st.integers(a + 1, n)) for a, n in zip(start, shape, strict=True)]
    step = [draw(st.integers(1, 3)) for _ in shape]
    places = tuple(map(slice, start, stop, step))
    attrs = {"start": tuple(start), "stop": tuple(stop), "step": tuple(step)}
    return Drawn((normal(rng(draw), shape),), lambda x: x[places], attrs)


@st.composite
def pad(draw: Draw) -> Drawn:
    shape = draw(SHAPES)
    low, high, inner = (tuple(draw(st.integers(0, 2)) for _ in shape) for _ in range(3))
    value = draw(st.sampled_from([0.0, -1.5]))
    sizes = tuple(a + b + n + (n - 1) * i for a, b, n, i in zip(low, high, shape, inner, strict=True))
    places = tuple(slice(a, a + (n - 1) * (i + 1) + 1, i + 1) for a, n, i in zip(low, shape, inner, strict=True))

    def function(x: Any) -> Any:
        whole = torch.full(sizes, value, dtype=x.dtype)
        whole[places] = x
        return whole

    return Drawn((normal(rng(draw), shape),), function, {"low": low, "high": high, "inner": inner, "value": value})


@st.composite
def concat(draw: Draw) -> Drawn:
    shape = draw(st.lists(SIZES, min_size=1, max_size=3))
    axis, r = draw(st.integers(-len(shape), len(shape) - 1)), rng(draw)
    arrays = []
    for _ in range(draw(st.integers(1, 3))):
        shape[axis] = draw(SIZES)
        arrays.append(normal(r, tuple(shape)))
    return Drawn(tuple(arrays), lambda *x: torch.cat(x, axis), {"axis": axis})


# ---------------------------------------------------------------------------------------- reductions and rows


@st.composite
def reduction(draw: Draw, function: Callable[..., Any], make: Callable[..., Array] = normal) -> Drawn:
    shape = draw(st.lists(SIZES, min_size=1, max_size=4).map(tuple))
    axes = draw(st.lists(st.integers(0, len(shape) - 1), min_size=1, unique=True))
    axes = [i - len(shape) if draw(st.booleans()) else i for i in axes]
    keep = draw(st.booleans())
    return Drawn(
        (make(rng(draw), shape),), lambda x: function(x, dim=axes, keepdim=keep), {"axes": tuple(axes), "keep": keep}
    )


@st.composite
def row(draw: Draw, function: Callable[..., Any]) -> Drawn:
    shape = draw(st.lists(SIZES, min_size=1, max_size=3).map(tuple))
    axis = draw(st.integers(-len(shape), len(shape) - 1))
    return Drawn((normal(rng(draw), shape),), lambda x: function(x, axis), {"axis": axis})


@st.composite
def cumsum(draw: Draw) -> Drawn:
    shape = draw(st.lists(SIZES, min_size=1, max_size=3).map(tuple))
    axis, exclusive, reverse = draw(st.integers(-len(shape), len(shape) - 1)), draw(st.booleans()), draw(st.booleans())

    def function(x: Any) -> Any:
        turned = x.flip(axis) if reverse else x
        total = turned.cumsum(axis) - (turned if exclusive else 0)
        return total.flip(axis) if reverse else total

    return Drawn((normal(rng(draw), shape),), function, {"axis": axis, "exclusive": exclusive, "reverse": reverse})


@st.composite
def topk(draw: Draw) -> Drawn:
    shape = draw(st.lists(SIZES, min_size=1, max_size=3).map(tuple))
    axis, largest = draw(st.integers(-len(shape), len(shape) - 1)), draw(st.booleans())
    k = draw(st.integers(1, shape[axis]))
    attrs = {"k": k, "axis": axis, "largest": largest}
    return Drawn((spread(rng(draw), shape),), lambda x: torch.topk(x, k, axis, largest).values, attrs, 2, 1)


@st.composite
def layer_norm(draw: Draw) -> Drawn:
    """All three results, of which torch's own gives one."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple))
    first, eps, r = draw(st.integers(0, len(shape) - 1)), draw(st.sampled_from([1e-3, 0.1])), rng(draw)

    def function(x: Any, scale: Any, bias: Any) -> Any:
        dims = tuple(range(first, x.ndim))
        mean, variance = x.mean(dims, keepdim=True), x.var(dims, unbiased=False, keepdim=True)
        rstd = (variance + eps).rsqrt()
        return (x - mean) * rstd * scale + bias, mean.reshape(shape[:first]), rstd.reshape(shape[:first])

    arrays = (normal(r, shape), normal(r, shape[first:]), normal(r, shape[first:]))
    return Drawn(arrays, function, {"axis": draw(st.sampled_from([first, first - len(shape)])), "eps": eps}, 3)


# ---------------------------------------------------------------------------------------- contractions and windows


@st.composite
def matmul(draw: Draw) -> Drawn:
    m, k, n = draw(SIZES), draw(SIZES), draw(SIZES)
    a, b = broadcasting(draw, 2)
    ta, tb, r = draw(st.booleans()), draw(st.booleans()), rng(draw)
    x, w = normal(r, (*a, *((k, m) if ta else (m, k)))), normal(r, (*b, *((n, k) if tb else (k, n))))
    return Drawn((x, w), lambda x, w: torch.matmul(x.mT if ta else x, w.mT if tb else w), {"ta": ta, "tb": tb})


def windows(draw: Draw, spatial: int) -> dict[str, tuple[int, ...]]:
    numbers = {"strides": st.integers(1, 3), "dilations": st.integers(1, 2)}
    found = {name: tuple(draw(each) for _ in range(spatial)) for name, each in numbers.items()}
    return {**found, "pads": tuple(draw(st.integers(0, 2)) for _ in range(2 * spatial))}


def padded(x: Any, pads: tuple[int, ...]) -> Any:
    """Torch pads the last dimension first, and both sides of one beside each other."""
    n = len(pads) // 2
    return F.pad(x, [pads[i + side * n] for i in reversed(range(n)) for side in (0, 1)])


CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def sides(draw: Draw, window: dict[str, Any], kernel: tuple[int, ...]) -> tuple[int, ...]:
    """Sizes of images that the window fits into."""
    n = len(kernel)
    least = [
        (k - 1) * d + 1 - a - b
        for k, d, a, b in zip(kernel, window["dilations"], window["pads"][:n], window["pads"][n:], strict=True)
    ]
    return tuple(max(1, size) + draw(st.integers(0, 2)) for size in least)


@st.composite
def conv(draw: Draw) -> Drawn:
    spatial, groups = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    window, kernel, r = windows(draw, spatial), tuple(draw(st.integers(1, 3)) for _ in range(spatial)), rng(draw)
    size = sides(draw, window, kernel)
    inner, outer = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    x, w = normal(r, (draw(st.integers(1, 2)), groups * inner, *size)), normal(r, (groups * outer, inner, *kernel))

    def function(x: Any, w: Any) -> Any:
        return CONV[spatial](padded(x, window["pads"]), w, None, window["strides"], 0, window["dilations"], groups)

    return Drawn((x, w), function, {**window, "groups": groups})


@st.composite
def conv_grad_input(draw: Draw) -> Drawn:
    """A transposed convolution: the whole of it, then what padding cuts off and strides leave out."""
    like = draw(conv())
    x, w = (torch.tensor(array) for array in like.arrays)
    dy, attrs, shape = like.function(x, w).numpy(), like.attrs, tuple(x.shape)
    n = len(shape) - 2

    def function(g: Any, w: Any) -> Any:
        full = TRANSPOSED[n](g, w, None, attrs["strides"], 0, 0, attrs["groups"], attrs["dilations"])
        pads = attrs["pads"][:n]
        missing = [max(0, a + size - found) for a, size, found in zip(pads, shape[2:], full.shape[2:], strict=True)]
        full = padded(full, (*(0,) * n, *missing))
        return full[(slice(None), slice(None), *(slice(a, a + size) for a, size in zip(pads, shape[2:], strict=True)))]

    return Drawn((dy, w.numpy()), function, {**attrs, "shape": shape})


@st.composite
def pool(draw: Draw, kind: str) -> Drawn:
    spatial, r = draw(st.integers(1, 2)), rng(draw)
    kernel = tuple(draw(st.integers(1, 3)) for _ in range(spatial))
    pads = tuple(draw(st.integers(0, k // 2)) for k in kernel) * 2
    strides = tuple(draw(st.integers(1, 3)) for _ in kernel)
    size = tuple(k + draw(st.integers(0, 3)) for k in kernel)
    shape = (draw(st.integers(1, 2)), draw(st.integers(1, 2)), *size)
    attrs: dict[str, Any] = {"window": kernel, "strides": strides, "pads": pads}
    if kind == "max_pool":
        function: Any = {1: F.max_pool1d, 2: F.max_pool2d}[spatial]
        return Drawn((spread(r, shape),), lambda x: function(x, kernel, strides, pads[:spatial]), attrs)
    include, mean = draw(st.booleans()), {1: F.avg_pool1d, 2: F.avg_pool2d}[spatial]
    arguments = (kernel, strides, pads[:spatial], False, include)
    return Drawn((normal(r, shape),), lambda x: mean(x, *arguments), {**attrs, "include_pad": include})  # type: ignore[operator]


@st.composite
def attention(draw: Draw) -> Drawn:
    batch, heads, queries, keys, size, values = (draw(st.integers(1, 3)) for _ in range(6))
    causal, scale, r = draw(st.booleans()), draw(st.sampled_from([0.4, 1.0])), rng(draw)
    arrays = [normal(r, (batch, heads, n, w)) for n, w in ((queries, size), (keys, size), (keys, values))]
    whole = (batch, heads, queries, keys)
    match draw(st.sampled_from(["none", "bool", "float"])):
        case "bool":  # the first key is seen by all
            arrays.append((r.random(whole) < 0.6) | (np.arange(keys) == 0))
        case "float":
            arrays.append(normal(r, tuple(1 if draw(st.booleans()) else n for n in whole)))

    def function(q: Any, k: Any, v: Any, mask: Any = None) -> Any:
        scores = scale * q @ k.mT
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        if causal:
            scores = scores.masked_fill(torch.ones(queries, keys).triu(1).bool(), -torch.inf)
        return scores.softmax(-1) @ v

    return Drawn(tuple(arrays), function, {"causal": causal, "scale": scale}, 3, 1)


# ---------------------------------------------------------------------------------------- lookups and losses


@st.composite
def gather(draw: Draw) -> Drawn:
    shape = draw(st.lists(SIZES, min_size=1, max_size=3).map(tuple))
    axis, r = draw(st.integers(0, len(shape) - 1)), rng(draw)
    indices = r.integers(-shape[axis], shape[axis], draw(st.lists(SIZES, max_size=2).map(tuple)))
    places = (slice(None),) * axis
    return Drawn((normal(r, shape), np.asarray(indices)), lambda x, i: x[(*places, i)], {"axis": axis})


@st.composite
def scatter(draw: Draw) -> Drawn:
    """Replaced entries are replaced once; added are any."""
    shape = draw(st.lists(SIZES, min_size=1, max_size=3).map(tuple))
    axis, add, r = draw(st.integers(0, len(shape) - 1)), draw(st.booleans()), rng(draw)
    n = shape[axis]
    indices = r.integers(0, n, draw(SIZES)) if add else r.permutation(n)[: draw(st.integers(1, n))]
    indices = np.where(r.random(indices.shape) < 0.5, indices - n, indices)
    updates = normal(r, (*shape[:axis], len(indices), *shape[axis + 1 :]))

    def function(x: Any, i: Any, u: Any) -> Any:
        return x.index_add(axis, i % n, u) if add else x.index_copy(axis, i % n, u)

    return Drawn((normal(r, shape), indices, updates), function, {"axis": axis, "add": add})


@st.composite
def cross_entropy(draw: Draw) -> Drawn:
    shape, classes, r = draw(st.lists(SIZES, min_size=1, max_size=2).map(tuple)), draw(SIZES), rng(draw)

    def function(x: Any, labels: Any) -> Any:
        return F.cross_entropy(x.reshape(-1, classes), labels.reshape(-1)), torch.logsumexp(x, -1)

    return Drawn((normal(r, (*shape, classes)), r.integers(0, classes, shape)), function, {}, 2)


@st.composite
def mse(draw: Draw) -> Drawn:
    shape, r = draw(SHAPES), rng(draw)
    return Drawn((normal(r, shape), normal(r, shape)), F.mse_loss)


DRAWN: dict[str, st.SearchStrategy[Drawn]] = {
    **{kind: unary(MEANING[kind]) for kind in ("neg", "exp", "sin", "cos", "atan", "tanh", "sigmoid", "erf")},
    **{kind: unary(MEANING[kind], positive) for kind in ("log", "sqrt", "rsqrt")},
    **{kind: unary(MEANING[kind], away) for kind in ("abs", "relu")},
    "cast": unary(lambda x: x * 1, dtype="f32"),
    "gelu": gelu(),
    **{kind: binary(MEANING[kind]) for kind in ("add", "sub", "mul")},
    "div": binary(torch.div, normal, away),
    "pow": binary(torch.pow, positive, normal),
    "rem": rem(),
    "minimum": extremum(torch.minimum),
    "maximum": extremum(torch.maximum),
    "where": where(),
    "batch_norm": batch_norm(),
    "reshape": reshape(),
    "transpose": transpose(),
    "broadcast": broadcast(),
    "slice": cut(),
    "pad": pad(),
    "concat": concat(),
    "sum": reduction(torch.sum),
    "mean": reduction(torch.mean),
    "max": reduction(torch.amax, spread),
    "softmax": row(F.softmax),
    "log_softmax": row(F.log_softmax),
    "cumsum": cumsum(),
    "topk": topk(),
    "layer_norm": layer_norm(),
    "matmul": matmul(),
    "conv": conv(),
    "conv_grad_input": conv_grad_input(),
    "attention": attention(),
    "max_pool": pool("max_pool"),
    "avg_pool": pool("avg_pool"),
    "gather": gather(),
    "scatter": scatter(),
    "cross_entropy": cross_entropy(),
    "mse": mse(),
}
