"""Depthwise convolutions, plane by plane, against the interpreter: widths that leave lanes empty, strips, strides, borders, epilogues."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.backends.tvm.lower.lower import plan_kernels
from penstock.backends.tvm.target import machine_of
from penstock.ir.graph import Graph
from penstock.ir.ops import make

from ...cases import ON_TARGETS, ConvCase, build, compare, make_args, value

SAME = (1, 1, 1, 1)
CASES = {
    "whole vectors": ConvCase((1, 5, 9, 32), (5, 1, 3, 3), pads=SAME, groups=5),
    "seven columns": ConvCase((2, 19, 7, 7), (19, 1, 5, 5), pads=(2, 2, 2, 2), groups=19),
    "fourteen columns": ConvCase((1, 3, 14, 14), (3, 1, 3, 3), pads=SAME, groups=3),
    "a vector and some": ConvCase((1, 2, 11, 28), (2, 1, 3, 3), pads=SAME, groups=2),
    "a vector and a half": ConvCase((1, 2, 9, 24), (2, 1, 3, 3), pads=SAME, groups=2),
    "strides, vectors and a half": ConvCase((1, 2, 19, 111), (2, 1, 3, 3), strides=(2, 2), pads=(1, 1, 1, 2), groups=2),
    "strips": ConvCase((1, 2, 130, 112), (2, 1, 3, 3), pads=SAME, groups=2),
    "strips, strides": ConvCase((1, 2, 130, 213), (2, 1, 5, 5), strides=(2, 2), pads=(2, 1, 2, 1), groups=2),
    "strides": ConvCase((2, 3, 28, 28), (3, 1, 3, 3), strides=(2, 2), pads=SAME, groups=3),
    "strides, even border": ConvCase((1, 3, 15, 61), (3, 1, 5, 5), strides=(2, 2), pads=(2, 2, 2, 2), groups=3),
    "three apart": ConvCase((1, 3, 20, 31), (3, 1, 3, 4), strides=(3, 3), pads=(1, 2, 0, 1), groups=3),
    "dilations": ConvCase((1, 3, 20, 20), (3, 1, 3, 3), dilations=(2, 3), pads=(2, 3, 2, 3), groups=3),
    "a row of taps": ConvCase((1, 3, 14, 14), (3, 1, 1, 11), pads=(0, 5, 0, 5), groups=3),
    "a column of taps": ConvCase((1, 3, 14, 14), (3, 1, 11, 1), pads=(5, 0, 5, 0), groups=3),
    "one dimension": ConvCase((2, 4, 75), (4, 1, 9), strides=(1,), pads=(4, 4), dilations=(1,), groups=4),
    "several filters": ConvCase((1, 3, 9, 17), (6, 1, 3, 3), pads=SAME, groups=3),
    "one column": ConvCase((1, 3, 9, 1), (3, 1, 3, 1), pads=(1, 0, 1, 0), groups=3),
    "no border": ConvCase((1, 3, 9, 19), (3, 1, 3, 3), groups=3),
    "double": ConvCase((1, 3, 14, 14), (3, 1, 3, 3), pads=SAME, groups=3, dtype="f64"),
}
# Gradients that have several phases, or sum over several filters.
OTHERS = [name for name, case in CASES.items() if any(s > 1 for s in case.strides) or case.w[0] > case.groups]
# Gradients of most cases are the same kernel with another border: every third of them is compiled.
GRAPHS = {
    (name, gradient): case.graph(f"s0.{'d' if gradient else 'f'}{i}", gradient)
    for i, (name, case) in enumerate(CASES.items())
    for gradient in (False, True)
    if not gradient or name in OTHERS or i % 3 == 0
}


def is_by_planes(graph: Graph, target: str = "host") -> bool:
    """Whether the kernel goes plane by plane. A buffer of its taps is called so."""
    return "taps" in str(plan_kernels(graph, machine_of(target)).steps[0].kernel.function)


@pytest.mark.parametrize(("target", "step"), ON_TARGETS)
def test_planes_are_the_interpreters(target: str, step: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    chosen = dict(list(GRAPHS.items())[::step])
    program = build(list(chosen.values()), tmp_path, target)
    for (name, gradient), graph in chosen.items():
        assert not compare(program, graph, make_args(graph, rng)), f"{name}, gradient: {gradient}"


def test_every_case_is_planes_but_some_gradients() -> None:
    others = [name for (name, gradient), graph in GRAPHS.items() if not is_by_planes(graph) and gradient]
    assert others == OTHERS
    assert all(is_by_planes(graph) for (_, gradient), graph in GRAPHS.items() if not gradient)


def fused(width: int, long: bool) -> Graph:
    """A depthwise convolution with a bias, a residual and hard swish behind it, in one kernel; and a product in front."""
    shape = f"f32[2,3,9,{width}]"
    x, scale, w, bias, rest = (
        value("x", shape),
        value("scale", "f32[2,3,1,1]"),
        value("w", "f32[3,1,3,3]"),
        value("bias", "f32[3,1,1]"),
        value("rest", shape),
    )
    ops = [make("mul", [x, scale], ["in"], kernel="k0")]
    attrs = {"strides": (1, 1), "pads": SAME, "dilations": (1, 1), "groups": 3}
    ops.append(make("conv", [ops[-1].outs[0], w], ["y"], kernel="k0", **attrs))
    ops.append(make("add", [ops[-1].outs[0], bias], ["with_bias"], kernel="k0"))
    ops.append(make("add", [ops[-1].outs[0], rest], ["sum"], kernel="k0"))
    for i, kind in enumerate(["sigmoid", "tanh", "relu", "abs", "neg", "sigmoid"][: 6 if long else 2]):
        ops.append(make(kind, [ops[-1].outs[0]], [f"t{i}"], kernel="k0"))
    return Graph(f"s0.w{width}{'long' if long else ''}", (x, scale, w, bias, rest), ops[-1].outs, tuple(ops))


def test_prologue_and_epilogue_are_fused(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    graphs = [fused(width, long) for width in (7, 14, 32) for long in (False, True)]
    assert all(is_by_planes(graph) for graph in graphs)
    program = build(graphs, tmp_path)
    for graph in graphs:
        assert not compare(program, graph, make_args(graph, rng))


def test_control_a_shifted_border_is_noticed(tmp_path: Path) -> None:
    """The same kernel with its border on the other side gives other numbers."""
    case = ConvCase((1, 3, 14, 14), (3, 1, 3, 3), pads=(0, 0, 2, 2), groups=3)
    graph = CASES["fourteen columns"].graph("s0.F", False)
    program = build([graph], tmp_path)
    x, w = (torch.tensor(array) for array in make_args(graph, np.random.default_rng(1)))
    found = program.call("s0.F", [x, w])[0]
    assert torch.allclose(found, CASES["fourteen columns"].forward(x, w), atol=1e-5)
    assert not torch.allclose(found, case.forward(x, w), atol=1e-5)
