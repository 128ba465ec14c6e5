"""ATen operations that sum over dimensions, or select one element of them."""

from __future__ import annotations

from math import inf, prod

from penstock.frontends.formulas.elementwise import power, root
from penstock.frontends.formulas.layout import axis_of, reshape
from penstock.frontends.formulas.scans import cumulative_product, flipped, product_over
from penstock.frontends.torch.node import Result, Rule, TorchNode
from penstock.ir.graph import Value
from penstock.ir.types import FLOATS

from .elementwise import truth


def axes_of(n: TorchNode) -> tuple[int, ...]:
    """Return the axes to reduce: all if none are named."""
    rank = n.type().rank
    dims = n.ints("dim") if n.has("dim") else ()
    return tuple(sorted({axis_of(n, a, rank) for a in dims})) if dims and rank else tuple(range(rank))


def reduced(n: TorchNode, kind: str, x: Value, axes: tuple[int, ...], keep: bool) -> Value:
    return n.emit(kind, x, axes=axes, keep=keep) if x.type.rank else x


def over(kind: str) -> Rule:
    """Make the rule of a reduction with torch's `dim`, `keepdim` and `dtype`."""

    def rule(n: TorchNode) -> Result:
        n.ignore("dtype")
        axes, x = axes_of(n), n.value("self", n.dtype)
        return reduced(n, kind, x, axes, bool(n.arg("keepdim")))

    return rule


def _outermost(n: TorchNode, x: Value, axes: tuple[int, ...], keep: bool, sign: int) -> Value:
    """Return the largest element, or with a negative sign the smallest."""
    return reduced(n, "max", x, axes, keep) if sign > 0 else flipped(n, reduced(n, "max", flipped(n, x), axes, keep))


def _extreme(sign: int) -> Rule:
    """Make the rule of amax or amin."""

    def rule(n: TorchNode) -> Result:
        axes, x, keep = axes_of(n), n.value(), bool(n.arg("keepdim"))
        return _outermost(n, x, axes, keep, sign)

    return rule


def _with_place(sign: int) -> Rule:
    """Make the rule of max.dim or min.dim: the value and the place of the first extreme, which alone has a gradient."""

    def rule(n: TorchNode) -> Result:
        x, keep = n.value(), bool(n.arg("keepdim"))
        if x.type.rank == 0:
            return x, n.literal(0, "i64")
        axis = axis_of(n, n.arg("dim"), x.type.rank)
        results = n.emit_all("topk", 2, x, k=1, axis=axis, largest=sign > 0)
        return results if keep else tuple(reshape(n, v, v.type.dims[:axis] + v.type.dims[axis + 1 :]) for v in results)

    return rule


def _whole_extreme(sign: int) -> Rule:
    """Make the rule of max or min of all elements."""

    def rule(n: TorchNode) -> Result:
        x = n.value()
        return _outermost(n, x, tuple(range(x.type.rank)), False, sign)

    return rule


def _arg(sign: int) -> Rule:
    def rule(n: TorchNode) -> Result:
        x, keep = n.value(), bool(n.arg("keepdim"))
        x = flipped(n, x) if sign < 0 else x
        rank = x.type.rank
        if not n.has("dim") or rank == 0:
            place = n.emit("argmax", reshape(n, x, (x.type.size,)), axis=0)
            return reshape(n, place, (1,) * rank) if keep else place
        axis = axis_of(n, n.arg("dim"), rank)
        place = n.emit("argmax", x, axis=axis)
        return reshape(n, place, (*x.type.dims[:axis], 1, *x.type.dims[axis + 1 :])) if keep else place

    return rule


def _whether(every: bool) -> Rule:
    """Make the rule of any or all: compare the count of elements that are true, or false, with zero."""

    def rule(n: TorchNode) -> Result:
        axes, keep = axes_of(n), bool(n.arg("keepdim"))
        x = truth(n, "self")
        counted = n.emit("cast", n.emit("not", x) if every else x, dtype="i32")
        none = n.emit("equal", reduced(n, "sum", counted, axes, keep), 0)
        return none if every else n.emit("not", none)

    return rule


def _moments(n: TorchNode) -> tuple[Value, Value]:
    """Compute variance and mean."""
    x, axes = n.value(), axes_of(n)
    count = prod(x.type.dims[a] for a in axes)
    correction = n.arg("correction", 1)
    n.require(count > correction, f"there is no variance of {count} elements with correction {correction}")
    mean, keep = reduced(n, "mean", x, axes, True), bool(n.arg("keepdim"))
    centred = n.emit("sub", x, mean)
    square = n.emit("mul", centred, centred)
    if correction == 0:
        variance = reduced(n, "mean", square, axes, keep)
    else:
        variance = n.emit("div", reduced(n, "sum", square, axes, keep), float(count - correction))
    return variance, mean if keep else reshape(n, mean, variance.type.dims)


def _variance(n: TorchNode) -> Result:
    return _moments(n)[0]


def _deviation(n: TorchNode) -> Result:
    return root(n, _moments(n)[0])


def _deviation_and_mean(n: TorchNode) -> Result:
    variance, mean = _moments(n)
    return root(n, variance), mean


def _norm(n: TorchNode) -> Result:
    n.ignore("dtype")
    x, axes, keep = n.value("self", n.dtype), axes_of(n), bool(n.arg("keepdim"))
    n.require(x.type.dtype in FLOATS, f"needs a floating-point operand, got {x.type}")
    return length(n, x, axes, keep, float(n.arg("ord", 2)))


def length(n: TorchNode, x: Value, axes: tuple[int, ...], keep: bool, order: float) -> Value:
    """Compute the norm of that order. Its gradient is 0 where it is 0."""
    if order == 2.0:
        return root(n, reduced(n, "sum", n.emit("mul", x, x), axes, keep))
    size = n.emit("abs", x)
    if order == inf:
        return reduced(n, "max", size, axes, keep)
    if order == -inf:
        return n.emit("neg", reduced(n, "max", n.emit("neg", size), axes, keep))
    if order == 1.0:
        return reduced(n, "sum", size, axes, keep)
    if order == 0.0:
        return reduced(n, "sum", n.emit("cast", n.emit("not", n.emit("equal", x, 0.0)), dtype=x.type.dtype), axes, keep)
    each = root(n, size, 1.0 / order) if 0.0 < order < 1.0 else power(n, size, order)
    return root(n, reduced(n, "sum", each, axes, keep), order)


def _cumulative(n: TorchNode) -> Result:
    n.ignore("dtype")
    x = n.value("self", n.dtype)
    return n.emit("cumsum", x, axis=axis_of(n, n.arg("dim"), x.type.rank)) if x.type.rank else x


def _log_sum(n: TorchNode) -> Result:
    """Write logsumexp with the largest value subtracted, unless it is infinite, so that nothing overflows."""
    x, axes, keep = n.value("self", n.dtype), axes_of(n), bool(n.arg("keepdim"))
    largest = reduced(n, "max", x, axes, True)
    finite = n.emit("where", n.emit("equal", n.emit("abs", largest), inf), 0.0, largest)
    remainder = n.emit("log", reduced(n, "sum", n.emit("exp", n.emit("sub", x, finite)), axes, keep))
    return n.emit("add", remainder, reshape(n, finite, remainder.type.dims))


def _product(n: TorchNode) -> Result:
    n.ignore("dtype")
    x = n.value("self", n.dtype)
    if "dim" not in n.names:
        return reshape(n, product_over(n, reshape(n, x, (x.type.size,)), 0), ())
    if x.type.rank == 0:
        return x
    axis = axis_of(n, n.arg("dim"), x.type.rank)
    n.require(x.type.dims[axis] > 0, f"there is nothing to multiply along axis {axis} of {x.type}")
    total = product_over(n, x, axis)
    return total if n.arg("keepdim") else reshape(n, total, x.type.dims[:axis] + x.type.dims[axis + 1 :])


def _cumulative_product(n: TorchNode) -> Result:
    n.ignore("dtype")
    x = n.value("self", n.dtype)
    return (
        cumulative_product(n, x, axis_of(n, n.arg("dim"), x.type.rank), exclusive=False, reverse=False)
        if x.type.rank
        else x
    )


RULES: dict[str, Rule] = {
    "sum.dim_IntList": over("sum"),
    "mean": over("mean"),
    "mean.dim": over("mean"),
    "amax": _extreme(1),
    "amin": _extreme(-1),
    "max": _whole_extreme(1),
    "min": _whole_extreme(-1),
    "max.dim": _with_place(1),
    "min.dim": _with_place(-1),
    "argmax": _arg(1),
    "argmin": _arg(-1),
    "any": _whether(False),
    "any.dim": _whether(False),
    "any.dims": _whether(False),
    "all": _whether(True),
    "all.dim": _whether(True),
    "var.correction": _variance,
    "var_mean.correction": _moments,
    "std.correction": _deviation,
    "std_mean.correction": _deviation_and_mean,
    "linalg_vector_norm": _norm,
    "cumsum": _cumulative,
    "cumprod": _cumulative_product,
    "prod": _product,
    "prod.dim_int": _product,
    "logsumexp": _log_sum,
}
