"""Random numbers of torch: the same distributions, not the same numbers."""

from __future__ import annotations

from collections.abc import Callable

import torch

from penstock.frontends.formulas import draws
from penstock.frontends.torch.node import Result, Rule, TorchNode
from penstock.ir.graph import Value


def _dims(n: TorchNode) -> tuple[int, ...]:
    return n.ints("size") if n.has("size") else n.type().dims


def _plain(draw: Callable[..., Value]) -> Rule:
    def rule(n: TorchNode) -> Result:
        n.ignore("dtype")
        return draw(n, _dims(n), dtype=n.dtype)

    return rule


def _uniform(n: TorchNode) -> Result:
    return draws.uniform(n, n.type().dims, float(n.arg("from", 0.0)), float(n.arg("to", 1.0)), n.dtype)


def _normal(n: TorchNode) -> Result:
    return draws.normal(n, n.type().dims, float(n.arg("mean", 0.0)), float(n.arg("std", 1.0)), n.dtype)


def _exponential(n: TorchNode) -> Result:
    return draws.exponential(n, n.type().dims, float(n.arg("lambd", 1.0)), n.dtype)


def _bernoulli(n: TorchNode) -> Result:
    return n.emit("cast", draws.bernoulli(n, n.type().dims, float(n.arg("p", 0.5))), dtype=n.dtype)


def _dropout(n: TorchNode) -> Result:
    p, training = float(n.arg("p")), n.arg("train", True)
    if not training or p == 0.0:
        return n.arg("input"), torch.ones(n.type("input").dims, dtype=torch.bool)
    return draws.dropout(n, n.value("input"), p)


RULES: dict[str, Rule] = {
    "native_dropout": _dropout,
    "rand": _plain(draws.uniform),
    "rand_like": _plain(draws.uniform),
    "randn": _plain(draws.normal),
    "randn_like": _plain(draws.normal),
    "uniform": _uniform,
    "normal_functional": _normal,
    "exponential": _exponential,
    "bernoulli.p": _bernoulli,
}
