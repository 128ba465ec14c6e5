"""ONNX operators of signal processing, equations of products and determinants."""

from __future__ import annotations

import numpy as np

from penstock.frontends.formulas.contractions import determinant, einsum
from penstock.frontends.formulas.layout import axis_of, reshape
from penstock.frontends.formulas.signals import fourier
from penstock.frontends.onnx.node import OnnxNode, Result, Rule


def _dft(n: OnnxNode) -> Result:
    x, inverse, onesided = n.value(), bool(n.int_attr("inverse")), bool(n.int_attr("onesided"))
    operands = n.constants({1: "the length", 2: "the axis"})
    axis = axis_of(n, int(operands.get(2, -2)), x.type.rank)
    size = x.type.dims[axis]
    length = int(operands[1]) if 1 in operands else 2 * (size - 1) if inverse and onesided else size
    return fourier(n, x, axis, length, inverse=inverse, onesided=onesided)


def _stft(n: OnnxNode) -> Result:
    x = n.value()
    n.require(x.type.rank == 3, f"needs three dimensions, got {x.type}")
    batch, samples, parts = x.type.dims
    operands = n.constants({1: "the step", 3: "the length"})
    step = int(operands[1])
    length = int(operands[3]) if 3 in operands else n.type(2).dims[0] if n.has(2) else samples
    n.require(step > 0 and 0 < length <= samples, f"frames of {length} in steps of {step} do not fit {x.type}")
    places = step * np.arange(1 + (samples - length) // step)[:, None] + np.arange(length)
    frames = reshape(n, n.emit("gather", x, places.reshape(-1), axis=1), (batch, *places.shape, parts))
    if n.has(2):
        n.require(n.type(2).dims == (length,), f"the window {n.type(2)} does not fit frames of {length}")
        frames = n.emit("mul", frames, reshape(n, n.value(2), (length, 1)))
    return fourier(n, frames, 2, length, inverse=False, onesided=bool(n.int_attr("onesided", 1)))


RULES: dict[str, Rule] = {
    "DFT": _dft,
    "STFT": _stft,
    "Einsum": lambda n: einsum(n, n.text_attr("equation"), n.values()),
    "Det": lambda n: determinant(n, n.value()),
}
