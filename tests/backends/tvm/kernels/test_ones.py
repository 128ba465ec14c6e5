"""Dimensions of size 1, wherever they stand: kernels skip their coordinates, so a position must never be put there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from penstock.ir.graph import Graph, Op, Value
from penstock.ir.ops import make

from ..cases import build, compare, make_args, value

# Every second one, from the first as from the second, has ones at all places.
SHAPES = (
    (8, 1),
    (33, 1),
    (1, 3, 1),
    (1, 8),
    (5, 1, 20),
    (3, 1, 5),
    (2, 3, 1, 1),
    (8, 1, 1),
    (40, 1, 1),
    (3, 5, 1),
    (1, 1),
)


class Writer:
    """A graph under construction: operations one after the other, every result handed back."""

    def __init__(self, *ins: Value) -> None:
        self.ins, self.ops = ins, list[Op]()

    def add(self, kind: str, *ins: Value, **attrs: object) -> Value:
        op = make(kind, ins, [f"v{len(self.ops)}.{i}" for i in range(3 if kind == "layer_norm" else 1)], "", **attrs)  # type: ignore[arg-type]
        self.ops.append(op)
        return op.outs[0]

    def state(self, kind: str, var: str, *ins: Value) -> Value:
        outs = (Value(f"{var}.{kind}{len(self.ops)}", self.ins[0].type),) if kind in ("read", "take") else ()
        self.ops.append(Op(kind, ins, outs, {"var": var}))
        return outs[0] if outs else ins[0]

    def graph(self, name: str, *outs: Value) -> Graph:
        return Graph(name, self.ins, outs or tuple(v for op in self.ops for v in op.outs), tuple(self.ops))


def shaped(name: str, shape: tuple[int, ...]) -> Value:
    return value(name, f"f32[{','.join(map(str, shape))}]")


def elementwise(shape: tuple[int, ...]) -> Graph:
    x, row, column = shaped("x", shape), shaped("row", shape[-1:]), shaped("column", (*shape[:-1], 1))
    w = Writer(x, row, column)
    w.add("exp", w.add("neg", w.add("relu", x)))
    w.add(
        "where", w.add("less", x, row), w.add("mul", x, column), w.add("add", x, w.add("const", value=2.0, dtype="f32"))
    )
    return w.graph("s0.F")


def layout(shape: tuple[int, ...]) -> Graph:
    x = shaped("x", shape)
    w = Writer(x)
    turned = w.add("transpose", x, perm=tuple(reversed(range(len(shape)))))
    w.add("tanh", turned)
    w.add("concat", x, x, axis=-1)
    w.add("concat", x, w.add("relu", x), axis=0)
    w.add("relu", w.add("reshape", x, shape=(x.type.size, 1)))
    w.add("pad", x, low=(1,) * len(shape), high=(0,) * len(shape), value=0.5)
    w.add("broadcast", x, shape=(2, *shape))
    w.add("slice", x, start=(0,) * len(shape), stop=(1,) * len(shape), step=(1,) * len(shape))
    return w.graph("s0.F")


def rows(shape: tuple[int, ...]) -> Graph:
    x, scale, bias = shaped("x", shape), shaped("scale", shape[-1:]), shaped("bias", shape[-1:])
    w = Writer(x, scale, bias)
    for axis in (0, -1):
        y = w.add("softmax", x, axis=axis)
        w.add("softmax_grad", y, x, axis=axis)
        w.add("log_softmax", x, axis=axis)
    w.add("layer_norm", x, scale, bias)
    return w.graph("s0.F")


def reductions(shape: tuple[int, ...]) -> Graph:
    x = shaped("x", shape)
    w = Writer(x)
    for kind in ("sum", "mean", "max"):
        for axes in ((0,), (len(shape) - 1,), tuple(range(len(shape)))):
            w.add(kind, x, axes=axes, keep=kind == "mean")
    w.add("argmax", x, axis=-1)
    w.add("argmax", x, axis=0)
    w.add("mse", x, w.add("relu", x))
    return w.graph("s0.F")


def products(shape: tuple[int, ...]) -> Graph:
    x, y = shaped("x", shape), shaped("y", (*shape[:-2], shape[-2], 1))
    w = Writer(x, y)
    w.add("matmul", x, y, ta=True)
    w.add("relu", w.add("matmul", y, x, ta=True))
    w.add("add", w.add("matmul", x, x, tb=True), y)
    w.add("matmul", x, w.add("transpose", x, perm=(*range(len(shape) - 2), len(shape) - 1, len(shape) - 2)))
    return w.graph("s0.F")


def lookups(shape: tuple[int, ...]) -> Graph:
    x, at = shaped("x", shape), value("at", "i64[7]")
    w = Writer(x, at)
    zero = w.add("mul", at, w.add("const", value=0, dtype="i64"))
    found = w.add("gather", x, zero, axis=0)
    w.add("gather_grad", found, zero, shape=shape, axis=0)
    w.add("gather", x, zero, axis=-1)
    return w.graph("s0.F")


def effects(shape: tuple[int, ...]) -> Graph:
    x = shaped("x", shape)
    w = Writer(x)
    w.state("accum", "sums", x)
    w.state("accum", "others", w.add("exp", w.add("neg", x)))
    w.state("write", "kept", w.state("take", "taken"))
    return w.graph("s0.B", x)


def updates(shape: tuple[int, ...]) -> Graph:
    x, rate = shaped("x", shape), value("rate", "f32[]")
    w = Writer(x, rate)
    w.state("write", "a", w.add("sgd", w.state("read", "a"), w.state("take", "ga"), rate))
    ins = [w.state("read", "b"), w.state("take", "gb"), w.state("read", "b.m"), rate]
    step = make("momentum", ins, ["b1", "bm1"])
    w.ops.append(step)
    for var, out in zip(("b", "b.m"), step.outs, strict=True):
        w.state("write", var, out)
    ins = [
        w.state("read", "c"),
        w.state("take", "gc"),
        w.state("read", "c.adam_m"),
        w.state("read", "c.adam_v"),
        rate,
        rate,
        rate,
    ]
    step = make("adamw", ins, ["c1", "cm1", "cv1"])
    w.ops.append(step)
    for var, out in zip(("c", "c.adam_m", "c.adam_v"), step.outs, strict=True):
        w.state("write", var, out)
    return w.graph("s0.U", x)


FAMILIES: list[Callable[[tuple[int, ...]], Graph]] = [
    elementwise,
    layout,
    rows,
    reductions,
    products,
    lookups,
    effects,
    updates,
]


@pytest.mark.parametrize(
    ("family", "shapes"),
    [
        *(pytest.param(family, SHAPES[i % 2 :: 2], id=family.__name__) for i, family in enumerate(FAMILIES)),
        *(
            pytest.param(f, SHAPES[1 - i % 2 :: 2], id=f"{f.__name__}-rest", marks=pytest.mark.slow)
            for i, f in enumerate(FAMILIES)
        ),
    ],
)
def test_sizes_of_one(
    family: Callable[[tuple[int, ...]], Graph], shapes: Sequence[tuple[int, ...]], tmp_path: Path
) -> None:
    graphs = []
    for i, shape in enumerate(shapes):
        graph = family(shape)
        graphs.append(Graph(f"s{i}.{graph.name[-1]}", graph.ins, graph.outs, graph.ops))
    program = build(graphs, tmp_path)
    rng = np.random.default_rng(0)
    wrong = [text for graph in graphs for text in compare(program, graph, make_args(graph, rng, positive=True))]
    assert not wrong, wrong
