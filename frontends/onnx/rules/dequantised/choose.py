"""The choice for each node: whether it is written on the integers behind its operands, and what is recorded of them."""

from __future__ import annotations

from dataclasses import replace

from penstock.frontends.onnx.node import OnnxNode, Result, Rule
from penstock.frontends.onnx.tensors import Dequantised
from penstock.frontends.onnx.versions import DOMAINS

from .moves import floats_again, integers_again, move_integers
from .products import PRODUCTS
from .requantise import requantize


def follow_integers(n: OnnxNode) -> None:
    """Record what the result of a node is in integers, for the nodes that read it."""
    if n.kind == "DequantizeLinear" and not n.int_attr("block_size"):
        zero = n.operands[2] if n.has(2) else None
        n.remember(Dequantised(n.operand(0), n.operand(1), zero, n.int_attr("axis", 1)))
    elif n.kind == "Relu" and (scaled := n.scaled(0)) is not None:
        n.remember(replace(scaled, relu=True))


def on_integers(n: OnnxNode, rule: Rule) -> Result | None:
    """Write a node on the integers behind its operands; None if it has no such form, and `rule` is to write it."""
    if n.proto.domain not in DOMAINS:
        return None
    if n.kind == "QuantizeLinear":
        again = integers_again(n)
        return again if again is not None else requantize(n)
    if n.kind == "DequantizeLinear":
        return floats_again(n)
    if (product := PRODUCTS.get(n.kind)) is not None:
        return product(n)
    return move_integers(n, rule)
