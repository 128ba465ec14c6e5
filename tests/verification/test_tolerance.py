"""Tests of tolerances: another program's result of the same formula is within them, a slightly wrong result is not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import pytest
import torch

from penstock.backends.interface import StageProgram
from penstock.ir.graph import Graph
from penstock.ir.interpreter.graphs import run_graph
from penstock.ir.text import parse_module
from penstock.verification.bisect.kernels import GraphCall, compare
from penstock.verification.bisect.values import Errors, Spot
from penstock.verification.checks import relative_error
from penstock.verification.tolerance import as_typed, in_float64, terms_of

TORCH = {"f32": torch.float32, "bf16": torch.bfloat16}


def chain(dtype: str, width: int, depth: int) -> Graph:
    """tanh of products, one after the other."""
    x = f"{dtype}[8,{width}]"
    lines = [
        f"    %p{i} : {x} = matmul(%{f't{i - 1}' if i else 'x'}, %w)\n    %t{i} : {x} = tanh(%p{i})"
        for i in range(depth)
    ]
    head = f"  graph @main(%x : {x}, %w : {dtype}[{width},{width}]) {{"
    text = [
        "module @chain {",
        f"  input %x : {x}",
        f"  input %w : {dtype}[{width},{width}]",
        f"  output %t{depth - 1}",
        head,
    ]
    return parse_module("\n".join([*text, *lines, f"    return %t{depth - 1}", "  }", "}"])).graphs["main"]


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize(("width", "depth"), [(4, 1), (64, 2), (512, 8)])
def test_torch_is_within_and_a_wrong_factor_is_not(dtype: str, width: int, depth: int) -> None:
    graph, source = chain(dtype, width, depth), np.random.default_rng(width)
    kind = torch.float32 if dtype == "f32" else torch.bfloat16
    given = [torch.tensor(source.standard_normal(shape)).to(kind) for shape in ((8, width), (width, width))]
    given[1] = given[1] / width**0.5
    exact = run_graph(graph, [x.double().numpy() for x in given], precision="f64")[0]
    own = relative_error(run_graph(graph, [x.float().numpy() for x in given], precision="typed")[0], exact)
    allowed = as_typed(graph, graph.ops[-1], own).error
    x, w = given
    wrong = x
    for _ in range(depth):
        x = torch.tanh(x @ w)
        wrong = torch.tanh((wrong @ w) * (1.02 if dtype == "f32" else 1.5))
    assert relative_error(x.double().numpy(), exact) <= allowed
    assert relative_error(wrong.double().numpy(), exact) > allowed


def test_another_order_of_sums_in_float64() -> None:
    graph, source = chain("f32", 512, 8), np.random.default_rng(0)
    x, w = source.standard_normal((8, 512)), source.standard_normal((512, 512)) / 512**0.5
    exact = run_graph(graph, [x, w], precision="f64")[0]
    other, wrong = x, x
    for _ in range(8):
        other = np.tanh(other[:, ::-1] @ w[::-1])
        wrong = np.tanh((wrong @ w) * (1 + 1e-8))
    allowed = in_float64([graph]).error
    assert relative_error(other, exact) <= allowed < 1e-9
    assert relative_error(wrong, exact) > allowed


def test_terms_are_those_of_the_longest_sum() -> None:
    module = parse_module(
        """module @m {
  input %x : f32[3,5]
  output %s
  graph @main(%x : f32[3,5], %w : f32[5,7]) {
    %p : f32[3,7] = matmul(%x, %w)
    %a : f32[3,7] = tanh(%p)
    %r : f32[3,7] = softmax(%a)
    %s : f32[] = sum(%r, axes=[0,1])
    return %s
  }
}
"""
    )
    assert [terms_of(op) for op in module.graphs["main"].ops] == [5, 1, 7, 21]


class Logarithm:
    """A compiled graph: torch's, of another base where it is to be wrong."""

    device = torch.device("cpu")

    def __init__(self, log: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._log = log

    def call(self, graph: str, args: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [self._log(args[0])]


def test_values_that_the_interpreter_has_not_finite_are_not_judged() -> None:
    lines = ["module @m {", "  graph @main(%x : f32[2]) {", "    %y : f32[2] = log(%x)", "    return %y", "  }", "}"]
    graph = parse_module("\n".join(lines)).graphs["main"]

    def judged(program: Logarithm, *elements: float) -> tuple[Errors, Spot | None]:
        return compare(cast(StageProgram, program), GraphCall(graph, {"x": np.array(elements, np.float32)}, {}), None)

    errors, first = judged(Logarithm(torch.log), 0.0, 0.0)
    assert (errors, first) == (Errors(0.0, 1), None)
    assert errors.verdict == "ok; 1 value not judged: not finite in the interpreter"
    # The controls: one that is finite is judged.
    errors, first = judged(Logarithm(torch.log), 0.0, 2.0)
    assert (errors.verdict, errors.unjudged, first) == ("ok", 0, None)
    assert 0 < errors.largest < 1e-6
    assert judged(Logarithm(torch.log2), 0.0, 2.0)[1] is not None
