"""Find composite operations that an exporter took apart, a dictionary like that of passes/rewrite/identities.py:
`PATTERNS[kind]` are rules tried on the last operation of a pattern.

    gelu         0.5 x (1 + erf(x / sqrt 2)), and 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), factors in any order
    layer_norm   (x - mean) / sqrt(mean((x - mean)^2) + eps) * scale + bias over the last dimensions
    softmax      e^(x - max) or e^x over its sum along one axis;  log_softmax: logarithm of that
    attention    softmax(scale * q k^T, masked) v: recognize_attention.py

Composites have kernels and gradients of their own, and need less memory between forward and backward. The mathematics
is the same; constants may be rounded to float32 (1e-6 relative), and e^x does not overflow. A pattern that differs in
anything else is left alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from penstock.ir.graph import Op, Value
from penstock.ir.ops import complete_attrs, reduced_axes
from penstock.ir.types import FLOATS

from .identities import Found, Rule, Scene, becomes, uniform
from .recognize_attention import attention


def _made_by(scene: Scene, value: Value, *kinds: str) -> Op | None:
    op = scene.maker(value)
    return op if op is not None and op.kind in kinds else None


def _near(number: float | None, expected: float) -> bool:
    return number is not None and math.isclose(number, expected, rel_tol=1e-6)


def _factors(scene: Scene, value: Value) -> tuple[float, list[Value]]:
    """Return a product as its constant and its other factors, through mul, neg and division by constants."""
    number = uniform(scene, value)
    if number is not None:
        return float(number), []
    op = _made_by(scene, value, "mul", "div", "neg")
    return (1.0, [value]) if op is None else _product(scene, op)


def _product(scene: Scene, op: Op) -> tuple[float, list[Value]]:
    constant, factors = _factors(scene, op.ins[0])
    if op.kind == "neg":
        return -constant, factors
    if op.kind == "div":
        divisor = uniform(scene, op.ins[1])
        return (constant / divisor, factors) if divisor else (1.0, [op.outs[0]])
    other, other_factors = _factors(scene, op.ins[1])
    return constant * other, factors + other_factors


def _plus(scene: Scene, value: Value, number: float) -> Value | None:
    """Return x where the value is x + number."""
    op = _made_by(scene, value, "add")
    if op is None:
        return None
    for i in (0, 1):
        if _near(uniform(scene, op.ins[i]), number):
            return op.ins[1 - i]
    return None


# ---------------------------------------------------------------------------------------- gelu


def _gelu(scene: Scene, op: Op) -> Found:
    constant, factors = _product(scene, op)
    if not _near(constant, 0.5) or len(factors) != 2:
        return None
    for x, gate in (factors, factors[::-1]):
        inner = _plus(scene, gate, 1.0)
        if inner is None or x.type != op.outs[0].type:
            continue
        if (curve := _made_by(scene, inner, "erf")) is not None:
            scale, arguments = _factors(scene, curve.ins[0])
            if _near(scale, math.sqrt(0.5)) and arguments == [x]:
                return [becomes(op, "gelu", x)]
        elif (curve := _made_by(scene, inner, "tanh")) is not None and _is_tanh_argument(scene, curve.ins[0], x):
            return [becomes(op, "gelu", x, approximate="tanh")]
    return None


def _is_tanh_argument(scene: Scene, value: Value, x: Value) -> bool:
    """Return whether the value is sqrt(2/pi) (x + 0.044715 x^3), also with x factored out."""
    scale, factors = _factors(scene, value)
    if not _near(scale, math.sqrt(2 / math.pi)):
        return False
    if len(factors) == 2 and x in factors:
        square = _plus(scene, factors[1 - factors.index(x)], 1.0)
        return square is not None and _is_power(scene, square, x, 2)
    total = _made_by(scene, factors[0], "add") if len(factors) == 1 else None
    if total is None or x not in total.ins:
        return False
    return _is_power(scene, total.ins[1 - total.ins.index(x)], x, 3)


def _is_power(scene: Scene, value: Value, x: Value, power: int) -> bool:
    scale, factors = _factors(scene, value)
    return _near(scale, 0.044715) and factors == [x] * power


# ---------------------------------------------------------------------------------------- layer_norm


def _layer_norm(scene: Scene, op: Op) -> Found:
    for product, bias in (op.ins, op.ins[::-1]):
        scaled = _made_by(scene, product, "mul")
        for normal, scale in (scaled.ins, scaled.ins[::-1]) if scaled is not None else ():
            normalized = _normalized(scene, normal)
            if normalized is None:
                continue
            x, axis, eps = normalized
            weight = x.type.with_shape(x.type.shape[axis:])
            if x.type == op.outs[0].type and scale.type == weight == bias.type:
                statistic = x.type.with_shape(x.type.shape[:axis])
                new = becomes(op, "layer_norm", x, scale, bias, axis=axis - x.type.rank, eps=eps)
                base = op.outs[0].name
                others = tuple(Value(scene.fresh(f"{base}.{name}"), statistic) for name in ("mean", "rstd"))
                return [Op(new.kind, new.ins, (*op.outs, *others), new.attrs, new.loc)]
    return None


def _normalized(scene: Scene, value: Value) -> tuple[Value, int, float] | None:
    """Return (x, first normalised dimension, eps) where the value is (x - mean) / sqrt(variance + eps)."""
    op = _made_by(scene, value, "div", "mul")
    if op is None:
        return None
    for centred, factor in (op.ins, op.ins[::-1]) if op.kind == "mul" else (op.ins,):
        root = _made_by(scene, factor, "sqrt" if op.kind == "div" else "rsqrt")
        difference = _made_by(scene, centred, "sub")
        shifted = _made_by(scene, root.ins[0], "add") if root is not None else None
        if difference is None or shifted is None:
            continue
        x, axes = difference.ins[0], _mean_axes(scene, difference.ins[1], difference.ins[0])
        for variance, shift in (shifted.ins, shifted.ins[::-1]):
            eps, mean = uniform(scene, shift), _made_by(scene, variance, "mean")
            square = _made_by(scene, mean.ins[0], "mul") if mean is not None else None
            if eps is None or axes is None or square is None or square.ins != (centred, centred):
                continue
            if _mean_axes(scene, variance, square.outs[0]) == axes and axes == tuple(range(axes[0], x.type.rank)):
                return x, axes[0], float(eps)
    return None


def _mean_axes(scene: Scene, value: Value, of: Value) -> tuple[int, ...] | None:
    """Return the axes of a mean over `of` that keeps its dimensions."""
    op = _made_by(scene, value, "mean")
    if op is None or op.ins[0] != of or not complete_attrs(op)["keep"]:
        return None
    return reduced_axes(of.type, op.attrs["axes"]) or None


# ---------------------------------------------------------------------------------------- softmax


def _softmax(scene: Scene, op: Op) -> Found:
    grown, total = _made_by(scene, op.ins[0], "exp"), _made_by(scene, op.ins[1], "sum")
    if grown is None or total is None or total.ins[0] != op.ins[0] or op.ins[0].type != op.outs[0].type:
        return None
    axes = _one_kept_axis(total)
    if axes is None:
        return None
    x = grown.ins[0]
    difference = _made_by(scene, x, "sub")
    top = _made_by(scene, difference.ins[1], "max") if difference is not None else None
    if difference is not None and top is not None and top.ins[0] == difference.ins[0] and _one_kept_axis(top) == axes:
        x = difference.ins[0]
    return [becomes(op, "softmax", x, axis=axes[0])] if x.type == op.outs[0].type else None


def _one_kept_axis(op: Op) -> Sequence[int] | None:
    axes = reduced_axes(op.ins[0].type, op.attrs["axes"])
    return axes if len(axes) == 1 and complete_attrs(op)["keep"] else None


def _log_softmax(scene: Scene, op: Op) -> Found:
    inner = _made_by(scene, op.ins[0], "softmax")
    return None if inner is None else [becomes(op, "log_softmax", inner.ins[0], axis=complete_attrs(inner)["axis"])]


def _for_floats(rule: Rule) -> Rule:
    return lambda scene, op: rule(scene, op) if op.outs[0].type.dtype in FLOATS else None


PATTERNS: dict[str, tuple[Rule, ...]] = {
    "mul": (_for_floats(_gelu),),
    "div": (_for_floats(_softmax), _for_floats(_gelu)),
    "add": (_for_floats(_layer_norm),),
    "log": (_log_softmax,),
    "matmul": (_for_floats(attention),),
}
