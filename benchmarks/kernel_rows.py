"""Rows of the kernel benchmark: each one operation or small fused group, with torch's forms of it.

In: nothing. Out: ROWS, each with a function that makes its Work: graphs for our compiler, tensors, a way to call the
compiled program, torch's forms, and the result in float64. Nothing is allocated before that function is called.

Torch may have several forms of one computation (a new result or a passed one, one fused function or several): all are
listed, the fastest counts. Both sides get the same tensors in the same layout. Operations per call are those that the
mathematics needs: half of the scores under a causal mask, and for the gradient of attention four products where the
result takes two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from kernel_graphs import BACKWARD, FORWARD, Body, Builder, forward, forward_and_backward
from torch import Tensor

from penstock.backends.interface import StageProgram
from penstock.ir.graph import Graph

Results = Iterable[Tensor]
Form = Callable[[], Results]
aten = torch.ops.aten


@dataclass
class Work:
    """One row, ready to run.

    `moved` is the least number of bytes read and written. The rate is operations per second where `flops` is not 0.
    `reset` restores the first values of tensors that calls change in place.
    """

    graphs: tuple[Graph, ...]
    call: Callable[[StageProgram], Results]
    forms: dict[str, Form]
    exact: Callable[[], Results]
    flops: float = 0.0
    moved: float = 0.0
    reset: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Row:
    name: str
    family: str
    make: Callable[[], Work]


ROWS: list[Row] = []


def row(family: str, name: str, make: Callable[..., Work], *args: Any) -> None:
    ROWS.append(Row(f"{family} {name}", family, partial(make, *args)))


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(seed + sum(n * 31**i for i, n in enumerate(shape)))
    )


def kind_of(x: Tensor) -> str:
    name = {torch.float32: "f32", torch.int64: "i64"}[x.dtype]
    return f"{name}[{','.join(map(str, x.shape))}]"


def wide(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x


def bytes_of(*tensors: Tensor) -> float:
    return float(sum(x.nbytes for x in tensors))


def pure(
    tensors: dict[str, Tensor],
    body: Body,
    forms: dict[str, Callable[..., Results]],
    exact: Callable[..., Results],
    **cost: float,
) -> Work:
    """Make a row whose forward graph takes `tensors`, as do torch's forms and, in float64, `exact`."""
    graph = forward({name: kind_of(x) for name, x in tensors.items()}, body)
    operands = list(tensors.values())
    ours = [tensors[v.name] for v in graph.ins]
    return Work(
        (graph,),
        lambda program: program.call(FORWARD, ours),
        {name: partial(form, *operands) for name, form in forms.items()},
        lambda: exact(*map(wide, operands)),
        **cost,
    )


@dataclass
class Gradient:
    """A row that runs only the backward graph. The forward graph runs once, for the values it saves."""

    graphs: tuple[Graph, Graph]
    tensors: dict[str, Tensor]
    _args: list[Tensor] = field(default_factory=list)

    def call(self, program: StageProgram) -> Results:
        if not self._args:
            self._args = self._saved(program)
        return program.call(BACKWARD, self._args)

    def _saved(self, program: StageProgram) -> list[Tensor]:
        f, b = self.graphs
        results = program.call(FORWARD, [self.tensors[v.name] for v in f.ins])
        known = self.tensors | {v.name: x for v, x in zip(f.results, results, strict=True)}
        return [known[v.name] for v in b.ins]


def gradient(
    wanted: dict[str, Tensor],
    constants: dict[str, Tensor],
    dy: Tensor,
    body: Body,
    forms: dict[str, Form],
    exact: Callable[[], Results],
    **cost: float,
) -> Work:
    kinds = [{name: kind_of(x) for name, x in group.items()} for group in (wanted, constants)]
    work = Gradient(forward_and_backward(*kinds, body), {**wanted, **constants, "dy": dy})
    return Work(work.graphs, work.call, forms, exact, **cost)


# ------------------------------------------------------------------------------------------------ matrix products


def _product(form: str, m: int, n: int, k: int, batch: int = 0) -> Work:
    ta, tb = form[0] == "T", form[1] == "T"
    lead = (batch,) if batch else ()
    a, b = random(*lead, *((k, m) if ta else (m, k))), random(*lead, *((n, k) if tb else (k, n)))
    out = torch.empty(*lead, m, n)

    def views(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x.mT if ta else x, y.mT if tb else y

    forms = {
        "matmul": lambda x, y: [torch.matmul(*views(x, y))],
        "matmul into a given result": lambda x, y: [torch.matmul(*views(x, y), out=out)],
    }
    if form == "NT" and not batch:
        forms["linear"] = lambda x, y: [F.linear(x, y)]
    cost = {"flops": 2.0 * m * n * k * max(batch, 1), "moved": bytes_of(a, b, out)}
    return pure(
        {"a": a, "b": b},
        lambda g, v: [g.emit("matmul", v["a"], v["b"], ta=ta, tb=tb)],
        forms,
        lambda x, y: [torch.matmul(*views(x, y))],
        **cost,
    )


for form, m, n, k, batch in (
    ("NN", 512, 3072, 768, 0), ("NN", 512, 768, 3072, 0), ("NT", 512, 3072, 768, 0), ("TN", 768, 3072, 512, 0),
    ("NT", 2048, 768, 768, 0), ("NT", 128, 128, 64, 48), ("NN", 128, 64, 128, 48), ("TN", 128, 64, 128, 48),
    ("NT", 512, 512, 64, 12), ("NN", 512, 64, 512, 12), ("NN", 100, 1000, 768, 0), ("NT", 512, 1000, 512, 0),
    ("NT", 128, 50257, 768, 0), ("NN", 128, 768, 50257, 0), ("TN", 50257, 768, 128, 0), ("NN", 1024, 64, 3, 0),
    ("NN", 97, 131, 53, 0), ("NN", 1, 3072, 768, 0), ("NT", 1, 3072, 768, 0), ("NN", 4, 3072, 768, 0),
    ("NT", 4, 3072, 768, 0), ("NN", 16, 3072, 768, 0), ("NT", 16, 3072, 768, 0),
):  # fmt: skip
    row("gemm", f"{form} {f'{batch}x ' if batch else ''}{m}x{n}x{k}", _product, form, m, n, k, batch)


# -------------------------------------------------------------------------------------- products with what follows them

TOKENS, WIDTH, INNER = 512, 768, 3072


def _up_projection() -> Work:
    x, w, b = random(TOKENS, WIDTH), random(INNER, WIDTH) / WIDTH**0.5, random(INNER)

    def body(g: Builder, v: Any) -> list[Any]:
        u = g.emit("add", g.emit("matmul", v["x"], v["w"], tb=True), v["b"])
        return [u, g.emit("gelu", u, approximate="tanh")]

    def theirs(x: Tensor, w: Tensor, b: Tensor) -> Results:
        u = F.linear(x, w, b)
        return u, F.gelu(u, approximate="tanh")

    return pure({"x": x, "w": w, "b": b}, body, {"linear, gelu": theirs}, theirs, flops=2.0 * TOKENS * WIDTH * INNER)


def _down_projection() -> Work:
    x, w, b, r = random(TOKENS, INNER), random(WIDTH, INNER) / INNER**0.5, random(WIDTH), random(TOKENS, WIDTH)

    def body(g: Builder, v: Any) -> list[Any]:
        return [g.emit("add", v["r"], g.emit("add", g.emit("matmul", v["x"], v["w"], tb=True), v["b"]))]

    forms = {
        "linear, add": lambda x, w, b, r: [F.linear(x, w, b) + r],
        "linear, add in place": lambda x, w, b, r: [F.linear(x, w, b).add_(r)],
        "addmm of the residual, add in place": lambda x, w, b, r: [torch.addmm(r, x, w.t()).add_(b)],
    }
    return pure({"x": x, "w": w, "b": b, "r": r}, body, forms, forms["linear, add"], flops=2.0 * TOKENS * WIDTH * INNER)


def _up_projection_gradient() -> Work:
    dy, w, u = random(TOKENS, WIDTH), random(WIDTH, INNER) / WIDTH**0.5, random(TOKENS, INNER)

    def body(g: Builder, v: Any) -> list[Any]:
        return [g.emit("gelu_grad", v["u"], g.emit("matmul", v["dy"], v["w"]), approximate="tanh")]

    def theirs(dy: Tensor, w: Tensor, u: Tensor) -> Results:
        return [aten.gelu_backward(dy @ w, u, approximate="tanh")]

    return pure(
        {"dy": dy, "w": w, "u": u}, body, {"mm, gelu_backward": theirs}, theirs, flops=2.0 * TOKENS * WIDTH * INNER
    )


row("fused", f"{TOKENS}x{INNER}x{WIDTH} +bias, gelu, both kept", _up_projection)
row("fused", f"{TOKENS}x{WIDTH}x{INNER} +bias +residual", _down_projection)
row("fused", f"{TOKENS}x{INNER}x{WIDTH} times gelu'", _up_projection_gradient)


# ------------------------------------------------------------------------------------------------ attention

HEADS, SIZE = 12, 64


def _attention_inputs(positions: int) -> dict[str, Tensor]:
    return {name: random(1, HEADS, positions, SIZE, seed=i) for i, name in enumerate("qkv")}


def _attend(g: Builder, v: Any) -> list[Any]:
    return [g.emit_all("attention", 3, v["q"], v["k"], v["v"], causal=True, scale=SIZE**-0.5)[0]]


def _attended(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    return [F.scaled_dot_product_attention(q, k, v, is_causal=True)]


def _attention(positions: int) -> Work:
    inputs = _attention_inputs(positions)
    return pure(
        inputs, _attend, {"scaled_dot_product_attention": _attended}, _attended, flops=2.0 * HEADS * positions**2 * SIZE
    )


def _attention_gradient(positions: int) -> Work:
    inputs, dy = _attention_inputs(positions), random(1, HEADS, positions, SIZE, seed=9)
    leaves = [x.clone().requires_grad_() for x in inputs.values()]
    (out,) = _attended(*leaves)

    def exact() -> Results:
        wide_leaves = [wide(x).requires_grad_() for x in inputs.values()]
        return torch.autograd.grad(_attended(*wide_leaves), wide_leaves, wide(dy))

    forms: dict[str, Form] = {
        "autograd of scaled_dot_product_attention": lambda: torch.autograd.grad(out, leaves, dy, retain_graph=True)
    }
    return gradient(inputs, {}, dy, _attend, forms, exact, flops=4.0 * HEADS * positions**2 * SIZE)


for positions in (128, 512, 2048):
    row("attention", f"forward {positions}", _attention, positions)
    row("attention", f"backward {positions}", _attention_gradient, positions)


# ------------------------------------------------------------------------------------------------ convolutions

IMAGES = 8


def _conv(which: str, channels: int, filters: int, size: int, kernel: int, stride: int) -> Work:
    pad = kernel // 2
    out = (size + 2 * pad - kernel) // stride + 1
    x, w, dy = (
        random(IMAGES, channels, size, size),
        random(filters, channels, kernel, kernel) / kernel,
        random(IMAGES, filters, out, out),
    )
    window = {"strides": (stride, stride), "pads": (pad,) * 4}
    flops = 2.0 * dy.numel() * channels * kernel**2
    if which == "forward":
        run = partial(F.conv2d, stride=stride, padding=pad)
        return pure(
            {"x": x, "w": w},
            lambda g, v: [g.emit("conv", v["x"], v["w"], **window)],
            {"conv2d": lambda a, b: [run(a, b)]},
            lambda a, b: [run(a, b)],
            flops=flops,
        )
    mask = [which == "dgrad", which == "wgrad", False]

    def theirs(dy: Tensor, x: Tensor, w: Tensor) -> Results:
        gradients = aten.convolution_backward(dy, x, w, None, [stride] * 2, [pad] * 2, [1, 1], False, [0, 0], 1, mask)
        return [g for g in gradients if g is not None]

    if which == "dgrad":
        return pure(
            {"dy": dy, "w": w},
            lambda g, v: [g.emit("conv_grad_input", v["dy"], v["w"], shape=tuple(x.shape), **window)],
            {"convolution_backward": lambda a, b: theirs(a, x, b)},
            lambda a, b: theirs(a, wide(x), b),
            flops=flops,
        )
    return pure(
        {"x": x, "dy": dy},
        lambda g, v: [g.emit("conv_grad_weight", v["x"], v["dy"], shape=tuple(w.shape), **window)],
        {"convolution_backward": lambda a, b: theirs(b, a, w)},
        lambda a, b: theirs(b, a, wide(w)),
        flops=flops,
    )


for channels, filters, size, kernel, stride in (
    (64, 64, 56, 3, 1), (256, 64, 56, 1, 1), (64, 256, 56, 1, 1), (512, 128, 28, 1, 1), (3, 64, 224, 7, 2),
    (128, 128, 56, 3, 2), (256, 512, 56, 1, 2), (256, 256, 28, 3, 2), (256, 256, 14, 3, 1), (512, 512, 7, 3, 1),
    (1024, 256, 14, 1, 1), (256, 1024, 14, 1, 1), (1024, 2048, 14, 1, 2), (2048, 512, 7, 1, 1),
):  # fmt: skip
    for which in ("forward", "dgrad", "wgrad"):
        text = f"{which} {channels}->{filters} {size}^2 {kernel}x{kernel} s{stride}"
        row("conv", text, _conv, which, channels, filters, size, kernel, stride)


# ---------------------------------------------------------------------------------------------- rows, columns, elements


def _layer_norm() -> Work:
    x, scale, bias = random(TOKENS, WIDTH), random(WIDTH), random(WIDTH)

    def theirs(x: Tensor, scale: Tensor, bias: Tensor) -> Results:
        y, mean, rstd = torch.native_layer_norm(x, (WIDTH,), scale, bias, 1e-5)
        return y, mean.flatten(), rstd.flatten()

    tensors = {"x": x, "scale": scale, "bias": bias}
    return pure(
        tensors,
        lambda g, v: list(g.emit_all("layer_norm", 3, *v.values())),
        {"native_layer_norm": theirs},
        theirs,
        moved=2 * bytes_of(x),
    )


def _layer_norm_gradient() -> Work:
    x, scale, bias, dy = random(TOKENS, WIDTH), random(WIDTH), random(WIDTH), random(TOKENS, WIDTH, seed=1)

    def theirs(x: Tensor, scale: Tensor, bias: Tensor, dy: Tensor) -> Callable[[], Results]:
        _, mean, rstd = torch.native_layer_norm(x, (WIDTH,), scale, bias, 1e-5)
        return lambda: aten.native_layer_norm_backward(dy, x, (WIDTH,), mean, rstd, scale, bias, [True] * 3)

    def body(g: Builder, v: Any) -> list[Any]:
        return [g.emit_all("layer_norm", 3, v["x"], v["scale"], v["bias"])[0]]

    forms = {"native_layer_norm_backward": theirs(x, scale, bias, dy)}
    exact = theirs(wide(x), wide(scale), wide(bias), wide(dy))
    return gradient({"x": x, "scale": scale, "bias": bias}, {}, dy, body, forms, exact, moved=3 * bytes_of(x))


def _softmax(*shape: int) -> Work:
    x, out = random(*shape), torch.empty(shape)
    forms: dict[str, Callable[..., Results]] = {
        "softmax": lambda x: [torch.softmax(x, -1)],
        "softmax into a given result": lambda x: [torch.softmax(x, -1, out=out)],
    }
    return pure({"x": x}, lambda g, v: [g.emit("softmax", v["x"])], forms, forms["softmax"], moved=2 * bytes_of(x))


def _softmax_gradient(*shape: int) -> Work:
    y, dy = torch.softmax(random(*shape), -1), random(*shape, seed=1)

    def theirs(y: Tensor, dy: Tensor) -> Results:
        return [aten._softmax_backward_data(dy, y, -1, y.dtype)]

    body: Body = lambda g, v: [g.emit("softmax_grad", v["y"], v["dy"])]  # noqa: E731
    return pure({"y": y, "dy": dy}, body, {"_softmax_backward_data": theirs}, theirs, moved=3 * bytes_of(y))


def _gelu(approximate: str) -> Work:
    x, out = random(TOKENS, INNER), torch.empty(TOKENS, INNER)
    forms: dict[str, Callable[..., Results]] = {
        "gelu": lambda x: [F.gelu(x, approximate=approximate)],
        "gelu into a given result": lambda x: [aten.gelu.out(x, approximate=approximate, out=out)],
    }
    return pure(
        {"x": x},
        lambda g, v: [g.emit("gelu", v["x"], approximate=approximate)],
        forms,
        forms["gelu"],
        moved=2 * bytes_of(x),
    )


def _gelu_gradient(approximate: str) -> Work:
    x, dy = random(TOKENS, INNER), random(TOKENS, INNER, seed=1)

    def theirs(x: Tensor, dy: Tensor) -> Results:
        return [aten.gelu_backward(dy, x, approximate=approximate)]

    body: Body = lambda g, v: [g.emit("gelu_grad", v["x"], v["dy"], approximate=approximate)]  # noqa: E731
    return pure({"x": x, "dy": dy}, body, {"gelu_backward": theirs}, theirs, moved=3 * bytes_of(x))


def _column_sum(rows: int, columns: int) -> Work:
    x, ones = random(rows, columns), torch.ones(rows)
    forms: dict[str, Callable[..., Results]] = {
        "sum": lambda x: [x.sum(0)],
        "product with ones": lambda x: [torch.mv(x.t(), ones)],
    }
    return pure({"x": x}, lambda g, v: [g.emit("sum", v["x"], axes=(0,))], forms, forms["sum"], moved=bytes_of(x))


row("layer_norm", f"forward {TOKENS}x{WIDTH}", _layer_norm)
row("layer_norm", f"gradients {TOKENS}x{WIDTH}", _layer_norm_gradient)
for shape in ((48, 128, 128), (12, 512, 512)):
    text = "x".join(map(str, shape))
    row("softmax", f"forward {text}", _softmax, *shape)
    row("softmax", f"gradient {text}", _softmax_gradient, *shape)
for approximate in ("none", "tanh"):
    row("gelu", f"forward {approximate} {TOKENS}x{INNER}", _gelu, approximate)
    row("gelu", f"gradient {approximate} {TOKENS}x{INNER}", _gelu_gradient, approximate)
for columns in (WIDTH, INNER):
    row("bias", f"column sums {TOKENS}x{columns}", _column_sum, TOKENS, columns)


# ------------------------------------------------------------------------------------------------ loss and lookup

CLASSES = 50257


def _labels(count: int, below: int) -> Tensor:
    return torch.randint(below, (count,), generator=torch.Generator().manual_seed(count))


def _cross_entropy(rows: int) -> Work:
    logits, labels = random(rows, CLASSES), _labels(rows, CLASSES)
    graphs = forward_and_backward(
        {"logits": kind_of(logits)},
        {"labels": kind_of(labels)},
        lambda g, v: [g.emit_all("cross_entropy", 2, v["logits"], v["labels"])[0]],
        loss=True,
    )
    f, b = graphs
    tensors = {"logits": logits, "labels": labels}

    def ours(program: StageProgram) -> Results:
        results = program.call(FORWARD, [tensors[v.name] for v in f.ins])
        known = tensors | {v.name: x for v, x in zip(f.results, results, strict=True)}
        return [results[0], *program.call(BACKWARD, [known[v.name] for v in b.ins])]

    def by_autograd(logits: Tensor) -> Results:
        leaf = logits.detach().requires_grad_()
        loss = F.cross_entropy(leaf, labels)
        return [loss.detach(), *torch.autograd.grad(loss, leaf)]

    def by_hand(logits: Tensor) -> Results:
        lse = torch.logsumexp(logits, 1)
        loss = (lse - logits.gather(1, labels[:, None])[:, 0]).mean()
        grad = torch.sub(logits, lse[:, None]).exp_().mul_(1 / rows)
        return [loss, grad.scatter_add_(1, labels[:, None], torch.full((rows, 1), -1 / rows))]

    forms: dict[str, Form] = {
        "autograd of cross_entropy": lambda: by_autograd(logits),
        "by hand": lambda: by_hand(logits),
    }
    return Work(graphs, ours, forms, lambda: by_autograd(wide(logits)), moved=3 * bytes_of(logits))


def _embedding_gradient(rows: int) -> Work:
    dy, indices = random(rows, WIDTH), _labels(rows, CLASSES)

    def into_zeros(dy: Tensor, indices: Tensor) -> Results:
        return [torch.zeros(CLASSES, WIDTH, dtype=dy.dtype).index_add_(0, indices, dy)]

    def theirs(dy: Tensor, indices: Tensor) -> Results:
        return [aten.embedding_dense_backward(dy, indices, CLASSES, -1, False)]

    body: Body = lambda g, v: [g.emit("gather_grad", v["dy"], v["indices"], shape=(CLASSES, WIDTH))]  # noqa: E731
    forms = {"embedding_dense_backward": theirs, "index_add_ into zeros": into_zeros}
    return pure({"dy": dy, "indices": indices}, body, forms, into_zeros, moved=4.0 * CLASSES * WIDTH + 3 * bytes_of(dy))


for rows in (128, 512):
    row("cross_entropy", f"forward and backward {rows}x{CLASSES}", _cross_entropy, rows)
row("embedding", f"gradient {TOKENS} of {CLASSES}x{WIDTH}", _embedding_gradient, TOKENS)


def select(names: Callable[[str], object]) -> Sequence[Row]:
    return [r for r in ROWS if names(r.name)]
