"""Random operators of ONNX. They ignore the attribute `seed`: the seed of the training counts."""

from __future__ import annotations

from penstock.frontends.formulas.draws import dropout, normal, uniform
from penstock.frontends.onnx.node import OnnxNode, Result, Rule
from penstock.frontends.onnx.source import our_dtype


def _target(n: OnnxNode) -> tuple[tuple[int, ...], str]:
    """Return sizes and element type: those of the operand, or of the attributes."""
    n.ignore("seed")
    like = n.type() if n.operands else None
    dims = like.dims if like is not None else tuple(n.ints_attr("shape") or ())
    dtype = our_dtype(n.int_attr("dtype")) if n.given("dtype") else like.dtype if like is not None else "f32"
    return dims, dtype


def _uniform(n: OnnxNode) -> Result:
    dims, dtype = _target(n)
    return uniform(n, dims, n.float_attr("low", 0.0), n.float_attr("high", 1.0), dtype)


def _normal(n: OnnxNode) -> Result:
    dims, dtype = _target(n)
    return normal(n, dims, n.float_attr("mean", 0.0), n.float_attr("scale", 1.0), dtype)


def _dropout(n: OnnxNode) -> Result | tuple[Result, ...]:
    n.ignore("seed")
    if n.has(2) and n.constant(2, "training_mode").any():
        p = float(n.constant(1, "ratio").reshape(())) if n.has(1) else 0.5
        if p > 0:
            return dropout(n, n.value(0), p)
    if n.wanted < 2:
        return n.tensor(0)
    kind = n.type()
    mask = (
        n.emit("const", value=True, dtype="bool", shape=kind.dims)
        if n.opset >= 10
        else n.emit("const", value=1, dtype=kind.dtype, shape=kind.dims)
    )
    return n.tensor(0), mask


RULES: dict[str, Rule] = {
    "Dropout": _dropout,
    "RandomNormal": _normal,
    "RandomNormalLike": _normal,
    "RandomUniform": _uniform,
    "RandomUniformLike": _uniform,
}
