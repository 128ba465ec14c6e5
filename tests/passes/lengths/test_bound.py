"""Tests of the pass `bound`: a module of one size, fed with nan behind a smaller request, gives what the interpreter
makes of the model at the request's own size. The control leaves the masks out."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from penstock.ir.graph import Module
from penstock.ir.interpreter.graphs import run_graph
from penstock.ir.text import parse_module
from penstock.ir.verify.verifier import verify
from penstock.passes.lengths.bound import BoundOptions, bound, print_places
from penstock.passes.lengths.compare import alike, compare
from penstock.support.errors import UnsupportedModel

# A body as a function of the size n: %x is [2,n,6], %y the result.
Body = Callable[[int], str]


def _attention(causal: str, mask: str = "", more: str = "") -> Body:
    return lambda n: (
        f"""
    %a : f32[2,{n},2,3] = reshape(%x, shape=[2,{n},2,3])
    %b : f32[2,2,{n},3] = transpose(%a, perm=[0,2,1,3])
{more.replace("N", str(n))}
    %c : f32[2,2,{n},3], %t : f32[2,2,{n}], %s : f32[2,2,{n}] = attention(%b, %b, %b{mask}, causal={causal}, scale=0.5)
    %d : f32[2,{n},2,3] = transpose(%c, perm=[0,2,1,3])
    %y : f32[2,{n},6] = reshape(%d, shape=[2,{n},6])"""
    )


HIDDEN = """    %sum : f32[2,N] = sum(%x, axes=[2])
    %zero : f32[] = const(value=0.0, dtype=f32)
    %seen : bool[2,N] = less(%sum, %zero)
    %m : bool[2,1,1,N] = reshape(%seen, shape=[2,1,1,N])"""
# The first sample hides all keys, as a row of zeros in an attention mask does.
ADDED = """    %w : f32[] = const(value=-3.4e38, dtype=f32)
    %hide : f32[2,1,1,1] = const(value=[1.0,0.0], dtype=f32, shape=[2,1,1,1])
    %one : f32[2,1,1,1] = mul(%hide, %w)
    %m : f32[2,1,1,N] = broadcast(%one, shape=[2,1,1,N])"""

BODIES: dict[str, Body] = {
    "rows": lambda n: f"%w : f32[6,6] = read(@w)\n%h : f32[2,{n},6] = matmul(%x, %w)\n%y : f32[2,{n},6] = relu(%h)",
    "sum": lambda n: f"%s : f32[2,1,6] = sum(%x, axes=[1], keep=true)\n%y : f32[2,{n},6] = add(%x, %s)",
    "mean": lambda n: "%y : f32[2,6] = mean(%x, axes=[1])",
    "mean of all": lambda n: "%y : f32[2] = mean(%x, axes=[1,2])",
    "max": lambda n: "%y : f32[2,6] = max(%x, axes=[1])",
    "argmax": lambda n: "%y : i64[2,6] = argmax(%x, axis=1)",
    "softmax": lambda n: f"%y : f32[2,{n},6] = softmax(%x, axis=1)",
    "log softmax": lambda n: f"%y : f32[2,{n},6] = log_softmax(%x, axis=1)",
    "product": lambda n: f"%t : f32[2,6,{n}] = transpose(%x, perm=[0,2,1])\n%y : f32[2,6,6] = matmul(%t, %x)",
    "scores": lambda n: (
        f"%s : f32[2,{n},{n}] = matmul(%x, %x, tb=true)\n%p : f32[2,{n},{n}] = softmax(%s, axis=-1)\n"
        f"%y : f32[2,{n},6] = matmul(%p, %x)"
    ),
    "flat": lambda n: (
        f"%f : f32[{2 * n},6] = reshape(%x, shape=[{2 * n},6])\n%w : f32[6,6] = read(@w)\n"
        f"%h : f32[{2 * n},6] = matmul(%f, %w)\n%y : f32[6,6] = matmul(%f, %h, ta=true)"
    ),
    "running sum": lambda n: f"%y : f32[2,{n},6] = cumsum(%x, axis=1)",
    "running sum from the end": lambda n: f"%y : f32[2,{n},6] = cumsum(%x, axis=1, reverse=true)",
    "first row": lambda n: "%y : f32[2,1,6] = slice(%x, start=[0,0,0], stop=[2,1,6], step=[1,1,1])",
    "last row": lambda n: "%i : i64[] = const(value=-1, dtype=i64)\n%y : f32[2,6] = gather(%x, %i, axis=1)",
    "last row as a slice": lambda n: f"%y : f32[2,1,6] = slice(%x, start=[0,{n - 1},0], stop=[2,{n},6], step=[1,1,1])",
    "half of the last row": lambda n: f"%y : f32[2,1,3] = slice(%x, start=[0,{n - 1},0], stop=[2,{n},6], step=[1,1,2])",
    "positions": lambda n: (
        f"%w : f32[16,6] = read(@table)\n"
        f"%p : f32[{n},6] = slice(%w, start=[2,0], stop=[{n + 2},6], step=[1,1])\n%y : f32[2,{n},6] = add(%x, %p)"
    ),
    "numbers": lambda n: (
        f"%i : i64[{n}] = iota(dtype=i64, shape=[{n}])\n%w : f32[16,6] = read(@table)\n"
        f"%p : f32[{n},6] = gather(%w, %i, axis=0)\n%y : f32[2,{n},6] = add(%x, %p)"
    ),
    "ones": lambda n: (
        f"%o : f32[2,{n}] = const(value=1.0, dtype=f32, shape=[2,{n}])\n"
        "%s : f32[2] = sum(%o, axes=[1])\n%z : f32[2] = max(%x, axes=[1,2])\n%y : f32[2] = mul(%s, %z)"
    ),
    "attention": _attention("false"),
    "causal attention": _attention("true"),
    "attention with hidden keys": _attention("false", ", %m", HIDDEN),
    "attention with added numbers": _attention("false", ", %m", ADDED),
    "convolution": lambda n: (
        f"%w : f32[4,6,3] = read(@conv)\n%t : f32[2,6,{n}] = transpose(%x, perm=[0,2,1])\n"
        f"%y : f32[2,4,{n}] = conv(%t, %w, pads=[1,1])"
    ),
    "infinity in padding": lambda n: (
        f"%l : f32[2,{n},6] = log(%x)\n%e : f32[2,{n},6] = exp(%l)\n%y : f32[2,6] = sum(%e, axes=[1])"
    ),
}
# Those in which padding meets nothing else.
FREE = {"rows", "running sum", "first row", "positions", "numbers"}


def _module(body: Body, n: int) -> Module:
    lines = body(n)
    y = next(line for line in lines.split("\n") if line.strip().startswith("%y "))
    assert y
    return parse_module(f"""module @case {{
  input %x : f32[2,{n},6]
  output %y
  var @w : f32[6,6] param
  var @table : f32[16,6] param
  var @conv : f32[4,6,3] param
  graph @main(%x : f32[2,{n},6]) {{
    {lines}
    return %y
  }}
}}
""")


class _Variables:
    def __init__(self) -> None:
        rng = np.random.default_rng(1)
        shapes = {"w": (6, 6), "table": (16, 6), "conv": (4, 6, 3)}
        self.arrays = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}

    def read(self, var: str, slot: str) -> np.ndarray:
        return self.arrays[var]


def _bounded(body: Body, n: int) -> Module:
    module, other = _module(body, n), _module(body, n - 1)
    assert alike(module.graphs["main"], other.graphs["main"])
    found = compare(module.graphs["main"], other.graphs["main"], "seq", (n, n - 1), {"x": (1,)})
    assert not found.problems, found.problems
    outputs = {"y": found.dims["y"]} if "y" in found.dims else {}
    options = BoundOptions(
        "seq", n, ("%x[1]",), print_places(outputs), print_places(found.grown), found.rows, found.ends
    )
    after = bound(module, options)
    verify(after)
    return after


def _run(module: Module, x: np.ndarray, live: int | None = None) -> np.ndarray:
    graph = module.graphs["main"]
    fed: dict[str, object] = {"x": x}
    if any(value.name == "size.seq" for value in graph.ins):
        fed["size.seq"] = np.array(live)
    with np.errstate(all="ignore"):
        (y,) = run_graph(graph, fed, _Variables())
    return np.asarray(y)


def _request(live: int, n: int, padding: float) -> tuple[np.ndarray, np.ndarray]:
    x = np.abs(np.random.default_rng(live).normal(size=(2, live, 6))).astype(np.float32)
    whole = np.full((2, n, 6), padding, np.float32)
    whole[:, :live] = x
    return x, whole


def _live_part(module: Module, y: np.ndarray, live: int, n: int) -> np.ndarray:
    keep = [slice(None)] * y.ndim
    for dim in module.bounds[0].dims_of("y"):
        keep[dim] = slice(0, y.shape[dim] // n * live)
    return y[tuple(keep)]


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("live", [1, 5, 8])
def test_padding_changes_nothing(name: str, live: int) -> None:
    module = _bounded(BODIES[name], 8)
    for padding in (float("nan"), 0.0):
        x, whole = _request(live, 8, padding)
        expected = _run(_module(BODIES[name], live), x)
        got = _live_part(module, _run(module, whole, live), live, 8)
        np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", [name for name in BODIES if name not in FREE])
def test_control_without_masks(name: str) -> None:
    bounded, plain = _bounded(BODIES[name], 8), _module(BODIES[name], 8)
    x, whole = _request(5, 8, float("nan"))
    if name in ("argmax", "ones") or "last row" in name:
        whole[:, 5:] = 9.0
    expected = _run(_module(BODIES[name], 5), x)
    got = _live_part(bounded, _run(plain, whole), 5, 8)
    assert not np.allclose(got, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", ["rows", "first row"])
def test_rows_that_are_free_get_no_mask(name: str) -> None:
    if name == "rows":
        module = _bounded(BODIES[name], 8)
        assert module.bounds[0].rows
        assert module.graphs["main"] == _module(BODIES[name], 8).graphs["main"]


REFUSED: dict[str, tuple[Body, str]] = {
    "number": (
        lambda n: f"%c : f32[] = const(value={1.0 / n}, dtype=f32)\n%y : f32[2,{n},6] = mul(%x, %c)",
        "const %c: uses seq as a number",
    ),
    "mixing": (lambda n: f"%y : f32[6,{2 * n}] = reshape(%x, shape=[6,{2 * n}])", "mixes seq with other dimensions"),
    "norm": (
        lambda n: (
            f"%w : f32[{n},6] = const(value=1.0, dtype=f32, shape=[{n},6])\n"
            f"%y : f32[2,{n},6], %m : f32[2], %r : f32[2] = layer_norm(%x, %w, %w, axis=1)"
        ),
        "layer_norm %y: works along seq",
    ),
    "tail": (
        lambda n: "%y : f32[2,2,6] = slice(%x, start=[0,2,0], stop=[2,4,6], step=[1,1,1])",
        "takes elements 2 to 3, which a request of size 1 does not have",
    ),
    "end": (
        lambda n: f"%y : f32[2,2,6] = slice(%x, start=[0,{n - 2},0], stop=[2,{n},6], step=[1,1,1])",
        "slice %y: takes elements that are counted from the end of seq, and not the last one alone",
    ),
    "row before the last": (
        lambda n: f"%y : f32[2,1,6] = slice(%x, start=[0,{n - 2},0], stop=[2,{n - 1},6], step=[1,1,1])",
        "slice %y: takes elements that are counted from the end of seq",
    ),
    "row that is the last at one size": (
        lambda n: "%y : f32[2,1,6] = slice(%x, start=[0,6,0], stop=[2,7,6], step=[1,1,1])",
        "takes elements 6 to 6, which a request of size 1 does not have",
    ),
    "appended": (
        lambda n: (
            f"%z : f32[2,1,6] = const(value=0.0, dtype=f32, shape=[2,1,6])\n"
            f"%y : f32[2,{n + 1},6] = concat(%z, %x, axis=1)"
        ),
        "which is no multiple of seq",
    ),
    "strides": (
        lambda n: (
            f"%w : f32[4,6,3] = read(@conv)\n%t : f32[2,6,{n}] = transpose(%x, perm=[0,2,1])\n"
            f"%y : f32[2,4,{n // 2}] = conv(%t, %w, pads=[1,0], strides=[2])"
        ),
        "has windows that change the size",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    body, message = REFUSED[name]
    first, second = (8, 4) if name == "strides" else (8, 7)
    module, other = _module(body, first), _module(body, second)
    found = compare(module.graphs["main"], other.graphs["main"], "seq", (first, second), {"x": (1,)})
    assert any(message in problem for problem in found.problems), found.problems


def test_one_error_names_all_operations() -> None:
    text = _module(
        lambda n: (
            f"%a : f32[6,16] = reshape(%x, shape=[6,16])\n%b : f32[2,8,6] = reshape(%a, shape=[2,8,6])\n"
            f"%y : f32[4,{3 * n},2] = reshape(%x, shape=[4,{3 * n},2])"
        ),
        8,
    )
    with pytest.raises(UnsupportedModel, match=r"(?s)cannot be bounded.*%a.*%y") as caught:
        bound(text, BoundOptions("seq", 8, ("%x[1]",), ("%y[1]",)))
    assert caught.value.exit_code == 3
