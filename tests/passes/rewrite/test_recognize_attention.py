"""Attention that an exporter wrote out is found again and means the same; near misses are left alone."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.passes.rewrite.simplify import SimplifyOptions, simplify

from .main_graph import main_of, operands, results, simplified_alike

Q, S, Y = "f32[2,3,6,4]", "f32[2,3,6,8]", "f32[2,3,6,5]"
INS = f"%q : {Q}, %k : f32[2,3,8,4], %v : f32[2,3,8,5], %kt : f32[2,3,4,8], %seen : bool[2,1,1,8], %bias : f32[3,6,8], %tail : {S}"
SCALE = ["%scale : f32[] = const(value=0.3, dtype=f32)"]
SCORES = [*SCALE, f"%p : {S} = matmul(%q, %k, tb=true)", f"%s : {S} = mul(%p, %scale)"]
TRIANGLE = [
    "%row : i32[6,1] = iota(dtype=i32, shape=[6,1], axis=0)",
    "%column : i32[1,8] = iota(dtype=i32, shape=[1,8], axis=1)",
    "%earlier : bool[6,8] = less_equal(%column, %row)",
]
END = [f"%w : {S} = softmax(%m, axis=-1)", f"%out : {Y} = matmul(%w, %v)"]


def fill(value: float) -> str:
    return f"%fill : f32[] = const(value={value!r}, dtype=f32)"


def where(condition: str, value: float) -> list[str]:
    return [fill(value), f"%m : {S} = where({condition}, %s, %fill)"]


def plain(lines: list[str]) -> list[str]:
    return [line.replace("%s :", "%m :") for line in lines]


GUARDED = [
    END[0],
    "%none : f32[] = const(value=0.0, dtype=f32)",
    "%same : bool[2,3,6,8] = equal(%w, %w)",
    "%nan : bool[2,3,6,8] = not(%same)",
    f"%u : {S} = where(%nan, %none, %w)",
    f"%out : {Y} = matmul(%u, %v)",
]
LISTED = ",".join("0.0" if j <= i else "-10000.0" for i in range(6) for j in range(8))
BOTH = [*SCORES, *TRIANGLE, fill(-1e9), f"%h : {S} = where(%earlier, %s, %fill)"]
# Lines, whether it is causal, the type of the mask that is left.
FOUND = {
    "plain": ([*plain(SCORES), *END], False, ""),
    "no scale": ([f"%m : {S} = matmul(%q, %k, tb=true)", *END], False, ""),
    "keys lie turned": ([*SCALE, f"%p : {S} = matmul(%q, %kt)", f"%m : {S} = mul(%p, %scale)", *END], False, ""),
    "divided": (
        [
            "%root : f32[] = const(value=2.5, dtype=f32)",
            f"%p : {S} = matmul(%q, %k, tb=true)",
            f"%m : {S} = div(%p, %root)",
            *END,
        ],
        False,
        "",
    ),
    "both operands scaled": (
        [
            "%half : f32[] = const(value=0.7, dtype=f32)",
            f"%qs : {Q} = mul(%q, %half)",
            "%ks : f32[2,3,4,8] = mul(%kt, %half)",
            f"%m : {S} = matmul(%qs, %ks)",
            *END,
        ],
        False,
        "",
    ),
    "causal, -inf": ([*SCORES, *TRIANGLE, *where("%earlier", -np.inf), *END], True, ""),
    "causal, lowest": ([*SCORES, *TRIANGLE, *where("%earlier", float(np.finfo(np.float32).min)), *END], True, ""),
    "causal, later hidden": (
        [
            *SCORES,
            *TRIANGLE[:2],
            "%later : bool[6,8] = less(%row, %column)",
            fill(-1e4),
            f"%m : {S} = where(%later, %fill, %s)",
            *END,
        ],
        True,
        "",
    ),
    "causal, a listed constant added": (
        [
            *SCORES,
            f"%tri : f32[6,8] = const(value=[{LISTED}], dtype=f32, shape=[6,8])",
            f"%m : {S} = add(%tri, %s)",
            *END,
        ],
        True,
        "",
    ),
    "everything seen": (
        [
            *SCORES,
            *TRIANGLE[:2],
            "%b : i32[] = const(value=9, dtype=i32)",
            "%c : bool[1,8] = less(%column, %b)",
            *where("%c", -1e9),
            *END,
        ],
        False,
        "",
    ),
    "mask of keys": ([*SCORES, *where("%seen", -1e9), *END], False, "bool[2,1,1,8]"),
    "hidden keys": ([*SCORES, fill(-1e9), f"%m : {S} = where(%seen, %fill, %s)", *END], False, "bool[2,1,1,8]"),
    "numbers added": ([*SCORES, f"%m : {S} = add(%s, %bias)", *END], False, "f32[3,6,8]"),
    "another diagonal is a mask": (
        [*SCORES, *TRIANGLE[:2], "%earlier : bool[6,8] = less(%column, %row)", *where("%earlier", -1e9), *END],
        False,
        "bool[6,8]",
    ),
    "an absorbing mask added": (
        [
            *SCORES,
            fill(-np.inf),
            "%zero : f32[] = const(value=0.0, dtype=f32)",
            "%added : f32[2,1,1,8] = where(%seen, %zero, %fill)",
            f"%m : {S} = add(%s, %added)",
            *END,
        ],
        False,
        "bool[2,1,1,8]",
    ),
    "guarded against nan": ([*SCORES, *where("%seen", -np.inf), *GUARDED], False, "bool[2,1,1,8]"),
    "guarded where nothing is hidden": ([*SCORES, *TRIANGLE, *where("%earlier", -np.inf), *GUARDED], True, ""),
    "a mask and causal by -inf": (
        [*BOTH[:-2], fill(-np.inf), BOTH[-1], f"%m : {S} = add(%h, %bias)", *END],
        True,
        "f32[3,6,8]",
    ),
    "a mask and causal by -1e9": ([*BOTH, f"%m : {S} = where(%seen, %h, %fill)", *END], False, "bool[2,1,6,8]"),
    "numbers and causal by -1e9": ([*BOTH, f"%m : {S} = add(%h, %bias)", *END], False, "f32[3,6,8]"),
}
MISSES = {
    "another axis": [*plain(SCORES), END[0].replace("-1", "2"), END[1]],
    "shallow fill": [*SCORES, *TRIANGLE, *where("%earlier", -5.0), *END],
    "fill is not hidden": [*SCORES, *TRIANGLE, *where("%earlier", 1e9), *END],
    "shares are turned": [
        "%m : f32[2,3,8,6] = matmul(%k, %q, tb=true)",
        "%w : f32[2,3,8,6] = softmax(%m)",
        f"%out : {Y} = matmul(%w, %v, ta=true)",
    ],
    "a curve over the scores": [*SCORES, f"%m : {S} = tanh(%s)", *END],
    "shares that others read": [
        *plain(SCORES),
        END[0],
        f"%x : {Y} = matmul(%w, %v)",
        f"%y : {Y} = matmul(%w, %v)",
        f"%z : {S} = add(%w, %w)",
        "...",
    ],
    "two masks": [*SCORES, f"%h : {S} = add(%s, %bias)", f"%m : {S} = add(%h, %tail)", *END],
    "a mask under a scale": [
        *SCALE,
        f"%p : {S} = matmul(%q, %k, tb=true)",
        f"%h : {S} = add(%p, %bias)",
        f"%m : {S} = mul(%h, %scale)",
        *END,
    ],
    "shares are masked, too": [
        *plain(SCORES),
        END[0],
        fill(0.0),
        f"%u : {S} = where(%seen, %w, %fill)",
        f"%out : {Y} = matmul(%u, %v)",
    ],
    "guarded, but hidden by a number": [*SCORES, *where("%seen", -1e9), *GUARDED],
    "guarded otherwise": [
        *SCORES,
        *where("%seen", -np.inf),
        *(line.replace("where(%nan, %none, %w)", "where(%same, %none, %w)") for line in GUARDED),
    ],
    "one head of keys": [
        "%one : f32[1,1,8,4] = slice(%k, start=[0,0,0,0], stop=[1,1,8,4], step=[1,1,1,1])",
        f"%m : {S} = matmul(%q, %one, tb=true)",
        *END,
    ],
}


def module_of(lines):
    *body, last = lines
    return main_of(INS, body, "%x, %y, %z") if last == "..." else main_of(INS, lines)


@pytest.mark.parametrize("name", FOUND)
def test_found(name):
    lines, causal, mask = FOUND[name]
    graph = simplified_alike(module_of(lines))
    (op,) = [op for op in graph.ops if op.kind == "attention"]
    assert not {"softmax", "matmul"} & {o.kind for o in graph.ops}
    assert bool(op.attrs["causal"]) == causal
    assert [str(v.type) for v in op.ins[3:]] == ([mask] if mask else [])


@pytest.mark.parametrize("name", MISSES)
def test_near_misses_are_left_alone(name):
    kinds = [op.kind for op in simplified_alike(module_of(MISSES[name])).ops]
    assert "attention" not in kinds
    assert "softmax" in kinds


@pytest.mark.parametrize("fill_value", [-1e9, -np.inf])
def test_rows_that_see_nothing(fill_value):
    """By a finite number they see everything evenly, as before; where there was nan, too."""
    lines = [*SCORES, *where("%seen", fill_value), *END]
    module = module_of(lines)
    found = simplify(module, SimplifyOptions())
    assert "attention" in [op.kind for op in found.graphs["main"].ops]
    ins = [np.zeros_like(x) if x.dtype == bool else x for x in operands(module)]
    (before,), (after,) = results(module, ins), results(found, ins)
    np.testing.assert_allclose(after, np.broadcast_to(ins[2].mean(2, keepdims=True), after.shape), rtol=1e-9)
    assert np.isnan(before).all() if np.isinf(fill_value) else np.allclose(before, after)


def test_guarded_rows_that_see_nothing_are_0():
    module = module_of([*SCORES, *where("%seen", -np.inf), *GUARDED])
    found = simplify(module, SimplifyOptions())
    ins = operands(module)
    ins[4][0] = False
    (before,), (after,) = results(module, ins), results(found, ins)
    assert not before[0].any()
    np.testing.assert_allclose(after, before, rtol=1e-9)


def test_heads_without_a_dimension_of_their_own():
    lines = [*plain(SCORES), *END]
    text = [line.replace("[2,3,6,", "[6,6,") for line in lines]
    graph = simplified_alike(main_of("%q : f32[6,6,4], %k : f32[6,8,4], %v : f32[6,8,5]", text), rtol=1e-9, atol=0)
    assert "attention" in {op.kind for op in graph.ops}
