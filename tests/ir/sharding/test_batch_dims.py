"""Tests of the dimension of samples: samples in another order give results in that order, by the interpreter, and along
any other dimension they do not."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from penstock.ir.batch_shares import microbatch_size, sample_rows
from penstock.ir.graph import Module
from penstock.ir.interpreter.graphs import run_graph
from penstock.ir.interpreter.ops import F64
from penstock.ir.interpreter.store import DictStore
from penstock.ir.sharding.batch_dims import Symbols, with_batch_dims
from penstock.ir.text import parse_module, print_module
from penstock.ir.verify.verifier import verify
from penstock.support.errors import ParseError, VerifyError

# Two steps of a recurrence, whose state is that of two layers.
RECURRENCE = """module @states {
  input %x : f32[4,2,3]
  input %state : f32[2,4,5]
  output %y
  output %last
  var @w : f32[3,5] param
  var @r : f32[5,5] param
  graph @main(%x : f32[4,2,3], %state : f32[2,4,5]) {
    %w : f32[3,5] = read(@w)
    %r : f32[5,5] = read(@r)
    %first : f32[1,4,5] = slice(%state, start=[0,0,0], stop=[1,4,5], step=[1,1,1])
    %second : f32[1,4,5] = slice(%state, start=[1,0,0], stop=[2,4,5], step=[1,1,1])
    %h : f32[4,5] = reshape(%first, shape=[4,5])
    %g : f32[4,5] = reshape(%second, shape=[4,5])
    %x0 : f32[4,1,3] = slice(%x, start=[0,0,0], stop=[4,1,3], step=[1,1,1])
    %x1 : f32[4,3] = reshape(%x0, shape=[4,3])
    %in : f32[4,5] = matmul(%x1, %w)
    %rec : f32[4,5] = matmul(%h, %r)
    %h1 : f32[4,5] = add(%in, %rec)
    %below : f32[4,5] = matmul(%h1, %r)
    %y : f32[4,5] = add(%below, %g)
    %a : f32[1,4,5] = reshape(%h1, shape=[1,4,5])
    %b : f32[1,4,5] = reshape(%y, shape=[1,4,5])
    %last : f32[2,4,5] = concat(%a, %b, axis=0)
    return %y, %last
  }
}
"""
# Images without samples: rows of channels belong to weights.
IMAGE = """module @image {
  input %x : f32[3,8]
  output %y
  var @w : f32[5,3] param
  graph @main(%x : f32[3,8]) {
    %w : f32[5,3] = read(@w)
    %wx : f32[5,8] = matmul(%w, %x)
    %y : f32[5] = sum(%wx, axes=[1])
    return %y
  }
}
"""
# Nodes and the ends of their edges.
EDGES = """module @edges {
  input %x : f32[6,3]
  input %edges : i64[2,8]
  output %y
  graph @main(%x : f32[6,3], %edges : i64[2,8]) {
    %row : i64[1,8] = slice(%edges, start=[0,0], stop=[1,8], step=[1,1])
    %from : i64[8] = reshape(%row, shape=[8])
    %y : f32[8,3] = gather(%x, %from, axis=0)
    return %y
  }
}
"""
# A mean over samples beside the rows of each.
MEAN = """module @mean {
  input %x : f32[4,8]
  output %y
  output %m
  graph @main(%x : f32[4,8]) {
    %y : f32[8,4] = transpose(%x, perm=[1,0])
    %m : f32[8] = mean(%x, axes=[0])
    return %y, %m
  }
}
"""
# Words of a text lie along the first dimension.
BAG = """module @bag {
  input %x : f32[4,8]
  output %m
  graph @main(%x : f32[4,8]) {
    %m : f32[8] = mean(%x, axes=[0])
    return %m
  }
}
"""
PAIRS = """module @pairs {
  input %x : f32[2,3]
  input %ids : i64[4]
  output %y
  graph @main(%x : f32[2,3], %ids : i64[4]) {
    %pairs : i64[2,2] = reshape(%ids, shape=[2,2])
    %first : i64[2,1] = slice(%pairs, start=[0,0], stop=[2,1], step=[1,1])
    %number : f32[2,1] = cast(%first, dtype=f32)
    %y : f32[2,3] = mul(%x, %number)
    return %y
  }
}
"""


def permuted(array: np.ndarray, axis: int, count: int, order: np.ndarray) -> np.ndarray:
    """Return an array with its samples, blocks of rows along an axis, in another order."""
    rows = array.shape[axis] // count
    at = (order[:, None] * rows + np.arange(rows)).reshape(-1)
    return np.take(array, at, axis)


def follows(module: Module, batch: Mapping[str, int | None]) -> bool:
    """Return whether outputs follow the order of samples along these dimensions, the first where none is named."""
    random = np.random.default_rng(0)
    graph, count = module.graphs["main"], microbatch_size(module.but(batch=batch))
    inputs = [
        random.integers(0, 6, v.type.dims) if v.type.dtype == "i64" else random.normal(size=v.type.dims)
        for v in graph.ins
    ]
    store = DictStore({name: random.normal(size=var.type.dims) for name, var in module.vars.items()})
    order = np.roll(np.arange(count), 1)

    def run(arrays: list[np.ndarray]) -> list[np.ndarray]:
        return [
            np.asarray(y)
            for y in run_graph(graph, dict(zip([v.name for v in graph.ins], arrays, strict=True)), store, F64)
        ]

    moved = run([permuted(x, batch.get(v.name) or 0, count, order) for v, x in zip(graph.ins, inputs, strict=True)])
    for value, whole, other in zip(graph.outs, run(inputs), moved, strict=True):
        axis = batch.get(value.name, 0 if value.type.dims[0] % count == 0 else None)
        expected = whole if axis is None else permuted(whole, axis, count, order)
        if not np.allclose(other, expected):
            return False
    return True


@pytest.mark.parametrize(
    ("text", "symbols", "batch", "samples"),
    [
        (RECURRENCE, {}, {"state": 1, "last": 1}, 4),
        (IMAGE, {}, {"x": 1}, 8),
        (BAG, {}, {"x": 1}, 8),
        (EDGES, {}, {"edges": None}, 1),
        (MEAN, {}, {"y": 1, "m": None}, 4),
        (PAIRS, {}, {}, 2),
    ],
)
def test_results_follow_the_order_of_samples(
    text: str, symbols: Symbols, batch: dict[str, int | None], samples: int
) -> None:
    module = with_batch_dims(parse_module(text), symbols)
    assert module.batch == batch
    assert microbatch_size(module) == samples
    assert follows(module, module.batch)
    verify(module)
    assert parse_module(print_module(module)) == module


@pytest.mark.parametrize("text", [RECURRENCE, IMAGE, BAG, MEAN])
def test_control_first_dimensions_do_not_follow(text: str) -> None:
    assert not follows(parse_module(text), {})


def test_a_model_without_samples_is_whole() -> None:
    """No dimension of the image is one of samples: the first is that of weights, the second that of a softmax."""
    text = IMAGE.replace("%y : f32[5] = sum(%wx, axes=[1])", "%y : f32[5,8] = softmax(%wx, axis=1)")
    module = with_batch_dims(parse_module(text))
    assert module.batch == {"x": None}
    assert microbatch_size(module) == 1
    place = sample_rows(module)["x"]
    assert (place.axis, place.rows) == (0, 3)


ONE = RECURRENCE
for _old, _new in [("[4,", "[1,"), ("stop=[4", "stop=[1"), ("[1,4,5]", "[1,1,5]"), ("[2,4,5]", "[2,1,5]")]:
    ONE = ONE.replace(_old, _new)


def test_symbols_say_where_a_single_sample_lies() -> None:
    symbols = {"x": ("batch", "", ""), "state": ("", "batch", ""), "y": ("batch", ""), "last": ("", "batch", "")}
    assert with_batch_dims(parse_module(ONE), symbols).batch == {"state": 1, "last": 1}
    assert with_batch_dims(parse_module(ONE)).batch == {}  # control: sizes of one say nothing


def test_symbols_of_other_sizes_say_nothing() -> None:
    """The declared shape of an output may be wrong."""
    symbols = {"x": ("batch", "", ""), "y": ("", "batch")}
    assert with_batch_dims(parse_module(RECURRENCE), symbols).batch == {"state": 1, "last": 1}


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("batch %nothing 0", "%nothing: is said to have samples, and is no input and no output"),
        ("batch %state 3", "has no dimension 3 for samples to lie along"),
    ],
)
def test_places_that_are_not_there_are_refused(line: str, problem: str) -> None:
    text = RECURRENCE.replace("  output %last\n", f"  output %last\n  {line}\n")
    with pytest.raises(VerifyError, match=problem):
        verify(parse_module(text))


def test_a_line_that_is_none_is_refused() -> None:
    with pytest.raises(ParseError, match=r"batch %name DIMENSION\|whole"):
        parse_module(RECURRENCE.replace("  output %last\n", "  output %last\n  batch %state -1\n"))
