"""ONNX operators that are losses over classes."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.frontends.formulas.losses import negative_log_likelihood
from penstock.ir.graph import Value

from .node import OnnxNode, Result, Rule


def _loss(n: OnnxNode, logs: Value) -> Value:
    ignored = n.int_attr("ignore_index") if n.given("ignore_index") else None
    weight = n.value(2) if n.has(2) else None
    return negative_log_likelihood(n, logs, n.value(1), weight, n.text_attr("reduction", "mean"), ignored)


def _cross_entropy(n: OnnxNode) -> Result | Sequence[Result]:
    logs = n.emit("log_softmax", n.value(0), axis=1)
    loss = _loss(n, logs)
    return (loss, logs) if n.wanted > 1 else loss


RULES: dict[str, Rule] = {
    "NegativeLogLikelihoodLoss": lambda n: _loss(n, n.value(0)),
    "SoftmaxCrossEntropyLoss": _cross_entropy,
}
