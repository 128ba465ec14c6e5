"""Matrix products of ATen."""

from __future__ import annotations

from penstock.frontends.formulas.layout import reshape
from penstock.frontends.formulas.products import product, scaled_sum
from penstock.frontends.torch.node import Result, Rule, TorchNode


def _linear(n: TorchNode) -> Result:
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
    """Make the rule of beta * self + alpha * product."""
    return lambda n: scaled_sum(
        n, product(n, n.value(left), n.value(right)), n.value(), n.arg("alpha", 1), n.arg("beta", 1)
    )


RULES: dict[str, Rule] = {
    "linear": _linear,
    "matmul": products("self", "other"),
    "mm": products("self", "mat2"),
    "bmm": products("self", "mat2"),
    "mv": products("self", "vec"),
    "dot": products("self", "tensor"),
    "addmm": _sum_with("mat1", "mat2"),
    "baddbmm": _sum_with("batch1", "batch2"),
}
