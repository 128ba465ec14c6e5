"""The effect of rounding: torch in float32 is within what noise predicts, and no program that rounds nowhere is moved."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from penstock.ir.graph import Graph
from penstock.ir.interpreter.graphs import run_graph
from penstock.ir.interpreter.ops import F64, Array
from penstock.ir.text import parse_module
from penstock.verification.roundings import RUNS, Distance, RoundingEffect, RoundingNoise, allowed_by, distance

Run = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def graph(body: str, result: str, rows: int = 8, width: int = 64) -> Graph:
    text = f"""module @m {{
  input %x : f32[{rows},{width}]
  input %w : f32[{width},{width}]
  output %y
  graph @main(%x : f32[{rows},{width}], %w : f32[{width},{width}]) {{
{body}
    return %y
  }}
}}
"""
    return parse_module(text).graphs["main"]


MATMUL = "    %a : f32[8,64] = matmul(%x, %w)\n"
# What cancels, and what does not.
PROGRAMS: dict[str, tuple[str, Run]] = {
    "product": ("    %y : f32[8,64] = matmul(%x, %w)", lambda x, w: x @ w),
    "difference of products": (
        MATMUL
        + """    %c : f32[8,64] = const(value=1000.0, dtype=f32, shape=[8,64])
    %b : f32[8,64] = add(%a, %c)
    %d : f32[8,64] = sub(%b, %c)
    %y : f32[8,64] = tanh(%d)""",
        lambda x, w: torch.tanh((x @ w + 1000) - 1000),
    ),
    "logarithm of almost nothing": (
        MATMUL
        + """    %p : f32[8,64] = mul(%a, %a)
    %y : f32[8,64] = log(%p)""",
        lambda x, w: torch.log((x @ w) ** 2),
    ),
    "variance of what hardly varies": (
        MATMUL
        + """    %c : f32[8,64] = const(value=100.0, dtype=f32, shape=[8,64])
    %b : f32[8,64] = add(%a, %c)
    %m : f32[8,1] = mean(%b, axes=[1], keep=true)
    %n : f32[8,64] = broadcast(%m, shape=[8,64])
    %y : f32[8,64] = sub(%b, %n)""",
        lambda x, w: (x @ w + 100) - (x @ w + 100).mean(1, keepdim=True),
    ),
    "one map over and over": (
        MATMUL
        + """    %s0 : f32[8,64] = sin(%a)
    %a1 : f32[8,64] = matmul(%s0, %w)
    %s1 : f32[8,64] = sin(%a1)
    %a2 : f32[8,64] = matmul(%s1, %w)
    %s2 : f32[8,64] = sin(%a2)
    %y : f32[8,64] = matmul(%s2, %w)""",
        lambda x, w: torch.sin(torch.sin(torch.sin(x @ w) @ w) @ w) @ w,
    ),
}


def effect(program: Graph, ins: list[Array]) -> tuple[Array, Distance]:
    exact = run_graph(program, ins, precision=F64)[0]
    noisy = RoundingEffect(lambda noise: {"y": run_graph(program, ins, precision=F64, noise=noise)[0]}, {"y": exact})
    return exact, noisy.moved(RUNS)["y"]


@pytest.mark.parametrize("name", list(PROGRAMS))
def test_torch_is_within_and_a_wrong_weight_is_not(name: str) -> None:
    """Over 20 seeds. The controls: noise explains no more than a few hundred times what torch is off by, and not that
    one number of the weights is another."""
    body, run = PROGRAMS[name]
    program = graph(body, "y")
    for seed in range(20):
        source = np.random.default_rng(seed)
        x, w = source.standard_normal((8, 64)).astype(np.float32), source.standard_normal((64, 64)).astype(np.float32)
        exact, moved = effect(program, [x, w])
        of_torch = distance(run(torch.from_numpy(x), torch.from_numpy(w)).numpy(), exact)
        limit = allowed_by(moved)
        assert of_torch.within(limit)
        assert limit.mean <= 300 * of_torch.mean
        other = w.astype(np.float64)
        other[3, 5] += 1
        wrong = run_graph(program, [x, other], precision=F64)[0]
        assert not distance(wrong, exact).within(limit)


def test_what_rounds_nowhere_is_not_moved() -> None:
    """Whole numbers, halves and choices among them are exact in float32. Control: thirds are not."""
    body = """    %a : f32[8,64] = matmul(%x, %w)
    %h : f32[] = const(value=0.5, dtype=f32)
    %b : f32[8,64] = mul(%a, %h)
    %y : f32[8,64] = maximum(%b, %x)"""
    source = np.random.default_rng(0)
    ins = [source.integers(-9, 9, shape).astype(np.float32) for shape in ((8, 64), (64, 64))]
    assert effect(graph(body, "y"), ins)[1] == Distance()
    assert effect(graph(body, "y"), [ins[0] / 3, ins[1]])[1].worst > 1e-8


def test_a_distance_sees_one_element_and_all_of_them() -> None:
    expected = np.arange(1.0, 101)
    one, every = expected.copy(), expected + 1
    one[7] += 1
    assert distance(one, expected) == Distance(0.01, 0.001)
    assert distance(every, expected) == Distance(0.01, 0.01)
    assert not distance(every, expected).within(distance(one, expected))
    assert distance(expected[:5], expected).worst == float("inf")
    assert distance(np.array([1.0, np.nan]), np.array([1.0, 2.0])).mean == float("inf")


def test_noise_is_seeded() -> None:
    body, ins = "    %y : f32[8,64] = matmul(%x, %w)", [np.full((8, 64), 0.1), np.full((64, 64), 0.3)]
    results = [
        run_graph(graph(body, "y"), ins, precision=F64, noise=RoundingNoise(*seed))[0]
        for seed in ((0, 1), (0, 1), (0, 2))
    ]
    assert np.array_equal(results[0], results[1])
    assert not np.array_equal(results[0], results[2])


def normalisation(width: int, eps: float) -> Graph:
    text = f"""module @m {{
  input %x : f32[16,{width}]
  output %y
  graph @main(%x : f32[16,{width}]) {{
    %s : f32[{width}] = const(value=1.0, shape=[{width}], dtype=f32)
    %b : f32[{width}] = const(value=0.0, shape=[{width}], dtype=f32)
    %y : f32[16,{width}], %m : f32[16], %r : f32[16] = layer_norm(%x, %s, %b, axis=1, eps={eps!r})
    return %y
  }}
}}
"""
    return parse_module(text).graphs["main"]


@pytest.mark.parametrize("width", [64, 768, 4096])
@pytest.mark.parametrize(("mean", "spread"), [(0.0, 1.0), (1.0, 1e-3), (30.0, 1e-3), (100.0, 3e-3)])
def test_rows_that_hardly_vary_are_normalised_within_their_rounding(mean: float, spread: float, width: int) -> None:
    """The variance is about eps or less, and the rounding of the mean decides. Torch and two passes of NumPy in float32
    are within; the control is another eps, a twentieth more, which rounding does not explain."""
    program, other = normalisation(width, 1e-5), normalisation(width, 1.05e-5)
    for seed in range(2):
        x = (mean + spread * np.random.default_rng(seed).standard_normal((16, width))).astype(np.float32)
        exact, moved = effect(program, [x])
        limit = allowed_by(moved)
        assert distance(torch.nn.functional.layer_norm(torch.from_numpy(x), (width,)).numpy(), exact).within(limit)
        centred = x - x.mean(1, keepdims=True, dtype=np.float32)
        variance = (centred * centred).mean(1, keepdims=True, dtype=np.float32)
        assert distance(centred / np.sqrt(variance + np.float32(1e-5)), exact).within(limit)
        if mean:
            wrong = run_graph(other, [x], precision=F64)[0]
            assert not distance(wrong, exact).within(limit)
