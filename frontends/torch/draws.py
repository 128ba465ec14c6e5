"""Random numbers of torch: the same distributions, not the same numbers. Dropout stands in neural.py."""

from __future__ import annotations

from collections.abc import Callable

from penstock.ir.graph import Value

from ..formulas import draws
from .node import Node, Result, Rule


def _dims(n: Node) -> tuple[int, ...]:
    return n.ints("size") if n.has("size") else n.type().dims


def _plain(draw: Callable[..., Value]) -> Rule:
    def rule(n: Node) -> Result:
        n.ignore("dtype")
        return draw(n, _dims(n), dtype=n.dtype)

    return rule


def _uniform(n: Node) -> Result:
    return draws.uniform(n, n.type().dims, float(n.arg("from", 0.0)), float(n.arg("to", 1.0)), n.dtype)


def _normal(n: Node) -> Result:
    return draws.normal(n, n.type().dims, float(n.arg("mean", 0.0)), float(n.arg("std", 1.0)), n.dtype)


def _exponential(n: Node) -> Result:
    return draws.exponential(n, n.type().dims, float(n.arg("lambd", 1.0)), n.dtype)


def _bernoulli(n: Node) -> Result:
    return n.emit("cast", draws.bernoulli(n, n.type().dims, float(n.arg("p", 0.5))), dtype=n.dtype)


RULES: dict[str, Rule] = {
    "rand": _plain(draws.uniform),
    "rand_like": _plain(draws.uniform),
    "randn": _plain(draws.normal),
    "randn_like": _plain(draws.normal),
    "uniform": _uniform,
    "normal_functional": _normal,
    "exponential": _exponential,
    "bernoulli.p": _bernoulli,
}
