"""Random models at random sizes: chains of operations, filled up with nan behind the request, give what the interpreter
makes of them at the request's own size."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from .test_bound import _bounded, _live_part, _module, _request, _run

# Each step makes %B of %A, both [2,n,6]; N is the size, I the number of the step.
STEPS = {
    "product": "%wI : f32[6,6] = read(@w)\n%pI : f32[2,N,6] = matmul(%A, %wI)\n%B : f32[2,N,6] = tanh(%pI)",
    "mean": "%mI : f32[2,1,6] = mean(%A, axes=[1], keep=true)\n%B : f32[2,N,6] = sub(%A, %mI)",
    "largest": "%mI : f32[2,1,6] = max(%A, axes=[1], keep=true)\n%B : f32[2,N,6] = sub(%A, %mI)",
    "softmax": "%B : f32[2,N,6] = softmax(%A, axis=1)",
    "running sum": "%B : f32[2,N,6] = cumsum(%A, axis=1, reverse=true)",
    "logarithm": "%aI : f32[2,N,6] = abs(%A)\n%B : f32[2,N,6] = log(%aI)",
    "scores": "%sI : f32[2,N,N] = matmul(%A, %A, tb=true)\n%tI : f32[2,N,N] = softmax(%sI, axis=-1)\n"
    "%B : f32[2,N,6] = matmul(%tI, %A)",
    "flat": "%fI : f32[M,6] = reshape(%A, shape=[M,6])\n%gI : f32[6,6] = matmul(%fI, %fI, ta=true)\n"
    "%hI : f32[M,6] = matmul(%fI, %gI)\n%kI : f32[M,6] = tanh(%hI)\n%B : f32[2,N,6] = reshape(%kI, shape=[2,N,6])",
    "attention": "%rI : f32[2,N,2,3] = reshape(%A, shape=[2,N,2,3])\n"
    "%qI : f32[2,2,N,3] = transpose(%rI, perm=[0,2,1,3])\n"
    "%cI : f32[2,2,N,3], %uI : f32[2,2,N], %vI : f32[2,2,N] = attention(%qI, %qI, %qI, causal=false, scale=0.5)\n"
    "%dI : f32[2,N,2,3] = transpose(%cI, perm=[0,2,1,3])\n%B : f32[2,N,6] = reshape(%dI, shape=[2,N,6])",
}


def _body(steps: list[str], n: int) -> str:
    lines, before = [], "%x"
    for number, step in enumerate(steps):
        after = "%y" if number == len(steps) - 1 else f"%step{number}"
        text = STEPS[step].replace("%A", before).replace("%B", after)
        for mark, value in (("I", str(number)), ("N", str(n)), ("M", str(2 * n))):
            text = text.replace(mark, value)
        lines.append(text)
        before = after
    return "\n".join(lines)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=4), st.integers(1, 9), st.sampled_from([9, 10]))
def test_drawn(steps: list[str], live: int, size: int) -> None:
    module = _bounded(lambda n: _body(steps, n), size)
    x, whole = _request(live, size, float("nan"))
    with np.errstate(all="ignore"):
        expected = _run(_module(lambda n: _body(steps, n), live), x)
        got = _live_part(module, _run(module, whole, live), live, size)
    np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-4)
