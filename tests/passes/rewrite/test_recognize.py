"""Composites that were taken apart are found again, mean the same, and near misses are left alone."""

from __future__ import annotations

import math

import numpy as np
import pytest

from .main_graph import main_of, simplified_alike


def consts(**numbers):
    return [f"%{name} : f32[] = const(value={value!r}, dtype=f32)" for name, value in numbers.items()]


HALF, ROOT = {"half": 0.5, "one": 1.0}, float(np.float32(math.sqrt(2)))
OUTER, CUBE = float(np.float32(math.sqrt(2 / math.pi))), 0.044715

ERF_DIV = [*consts(**HALF, root=ROOT), "%s : T = div(%x, %root)", "%e : T = erf(%s)", "%g : T = add(%e, %one)"]
ERF_MUL = [*consts(**HALF, root=1 / ROOT), "%s : T = mul(%root, %x)", "%e : T = erf(%s)", "%g : T = add(%one, %e)"]
TANH = [
    *consts(**HALF, outer=OUTER, cube=CUBE, three=3.0),
    "%x3 : T = pow(%x, %three)",
    "%t : T = mul(%x3, %cube)",
    "%i : T = add(%x, %t)",
    "%s : T = mul(%i, %outer)",
    "%e : T = tanh(%s)",
    "%g : T = add(%e, %one)",
]
TANH_FACTORED = [
    *consts(**HALF, outer=OUTER, cube=CUBE),
    "%x2 : T = mul(%x, %x)",
    "%t : T = mul(%cube, %x2)",
    "%i : T = add(%one, %t)",
    "%xo : T = mul(%x, %outer)",
    "%s : T = mul(%xo, %i)",
    "%e : T = tanh(%s)",
    "%g : T = add(%e, %one)",
]
NORM = [
    *consts(eps=1e-5, two=2.0),
    "%m : R = mean(%x, axes=[-1], keep=true)",
    "%d : T = sub(%x, %m)",
    "%p : T = pow(%d, %two)",
    "%v : R = mean(%p, axes=[2], keep=true)",
    "%ve : R = add(%v, %eps)",
    "%r : R = sqrt(%ve)",
    "%n : T = div(%d, %r)",
    "%ns : T = mul(%n, %scale)",
    "%out : T = add(%ns, %bias)",
]
NORM_BY_PRODUCT = [
    *NORM[:7],
    "%q : R = sqrt(%ve)",
    "%r : R = div(%unit, %q)",
    "%n : T = mul(%r, %d)",
    "%ns : T = mul(%scale, %n)",
    "%out : T = add(%bias, %ns)",
]
SOFTMAX = [
    "%m : R = max(%x, axes=[2], keep=true)",
    "%d : T = sub(%x, %m)",
    "%e : T = exp(%d)",
    "%s : R = sum(%e, axes=[2], keep=true)",
    "%out : T = div(%e, %s)",
]
PLAIN_SOFTMAX = ["%e : T = exp(%x)", "%s : R = sum(%e, axes=[-1], keep=true)", "%out : T = div(%e, %s)"]

FOUND = {
    "erf, half last": ([*ERF_DIV, "%p : T = mul(%x, %g)", "%out : T = mul(%p, %half)"], "gelu"),
    "erf, half first": ([*ERF_MUL, "%p : T = mul(%half, %x)", "%out : T = mul(%p, %g)"], "gelu"),
    "erf, half with the gate": ([*ERF_MUL, "%p : T = mul(%half, %g)", "%out : T = mul(%p, %x)"], "gelu"),
    "erf, halved by division": (
        [*ERF_MUL, *consts(two=2.0), "%p : T = mul(%x, %g)", "%out : T = div(%p, %two)"],
        "gelu",
    ),
    "tanh": ([*TANH, "%p : T = mul(%half, %x)", "%out : T = mul(%p, %g)"], "gelu"),
    "tanh, factored": ([*TANH_FACTORED, "%p : T = mul(%half, %x)", "%out : T = mul(%p, %g)"], "gelu"),
    "layer_norm": (NORM, "layer_norm"),
    "layer_norm by a product": ([*consts(unit=1.0), *NORM_BY_PRODUCT], "layer_norm"),
    "softmax": (SOFTMAX, "softmax"),
    "softmax without the maximum": (PLAIN_SOFTMAX, "softmax"),
    "log_softmax": ([*SOFTMAX[:-1], "%y : T = div(%e, %s)", "%out : T = log(%y)"], "log_softmax"),
}


def replaced(lines, old, new):
    assert any(old in line for line in lines), old
    return [line.replace(old, new) for line in lines]


GELU, TANHED = FOUND["erf, half last"][0], FOUND["tanh"][0]
MISSES = {
    "another slope": replaced(GELU, "div(%x, %root)", "div(%x, %half)"),
    "another argument": replaced(GELU, "div(%x, %root)", "div(%z, %root)"),
    "another half": replaced(GELU, "mul(%p, %half)", "mul(%p, %one)"),
    "minus": replaced(GELU, "add(%e, %one)", "sub(%e, %one)"),
    "another cube": replaced(TANHED, "value=0.044715", "value=0.0447"),
    "another power": replaced(TANHED, "value=3.0", "value=2.0"),
    "mean over another axis": replaced(NORM, "mean(%p, axes=[2], keep=true)", "mean(%p, axes=[1], keep=true)"),
    "variance of another tensor": replaced(NORM, "pow(%d, %two)", "pow(%x, %two)"),
    "mean of another tensor": replaced(NORM, "mean(%x, axes=[-1], keep=true)", "mean(%z, axes=[-1], keep=true)"),
    "sum of another tensor": replaced(PLAIN_SOFTMAX, "sum(%e", "sum(%x"),
}


def module_of(lines):
    body = "\n".join(lines).replace(" T ", " f32[2,4,4] ").replace(" R ", " f32[2,4,1] ")
    if "axes=[1]" in body:
        body = "\n".join(
            line.replace("f32[2,4,1]", "f32[2,1,4]") if "axes=[1]" in line else line for line in body.split("\n")
        )
        body = body.replace("%ve : f32[2,4,1]", "%ve : f32[2,1,4]").replace("%r : f32[2,4,1]", "%r : f32[2,1,4]")
    return main_of("%x : f32[2,4,4], %z : f32[2,4,4], %scale : f32[4], %bias : f32[4]", body)


def kinds_found(lines):
    """Of the operations that are left, which mean the same."""
    return [op.kind for op in simplified_alike(module_of(lines)).ops]


@pytest.mark.parametrize("name", FOUND)
def test_found(name):
    lines, kind = FOUND[name]
    assert kinds_found(lines) == [kind]


@pytest.mark.parametrize("name", MISSES)
def test_near_misses_are_left_alone(name):
    assert not set(kinds_found(MISSES[name])) & {"gelu", "layer_norm", "softmax"}


def test_parts_that_others_use_stay():
    lines = [*NORM[:-1], "%y : T = add(%ns, %bias)", "%out : T = mul(%y, %n)"]
    kinds = kinds_found(lines)
    assert "layer_norm" in kinds
    assert "div" in kinds
