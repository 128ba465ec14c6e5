"""Depthwise convolutions of small images with channels in lanes, against the interpreter: channels and positions left
over, absent taps, values that are computed before and behind, infinite weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.backends.numpy_backend import NumpyProgram
from penstock.backends.tvm.kernels.conv import channel_lanes, conv
from penstock.backends.tvm.lower.lower import plan_kernels
from penstock.backends.tvm.target import machine_of
from penstock.ir.graph import Graph, Value

from ...cases import build, compare, difference, make_args, to_torch, value
from ...test_packed import Writer

Pair = tuple[int, int]


@dataclass(frozen=True)
class Depthwise:
    """A depthwise convolution, and what is fused with it."""

    x: tuple[int, ...]
    kernel: Pair = (3, 3)
    strides: Pair = (1, 1)
    pads: tuple[int, ...] = (1, 1, 1, 1)
    dilations: Pair = (1, 1)
    kinds: tuple[str, ...] = ("relu",)
    scaled: bool = False
    residual: bool = False
    dtype: str = "f32"

    def graph(self, name: str) -> Graph:
        w, channels = Writer(), self.x[1]
        x = value("x", f"{self.dtype}[{','.join(map(str, self.x))}]")
        source: Value = x
        if self.scaled:
            source = w("mul", x, w.read("scale", f"{self.dtype}[{channels},1,1]"))
        weight = w.read("w", f"{self.dtype}[{channels},1,{self.kernel[0]},{self.kernel[1]}]")
        attrs = {"strides": self.strides, "pads": self.pads, "dilations": self.dilations, "groups": channels}
        y = w("conv", source, weight, **attrs)
        y = w("add", y, w.read("b", f"{self.dtype}[{channels},1,1]"))
        for kind in self.kinds:
            y = w(kind, y)
        if self.residual:
            y = w("add", y, w.read("rest", str(y.type)))
        graph = w.fused((x,), (y,))
        return Graph(name, graph.ins, graph.outs, graph.ops, graph.saved)


CASES = {
    "seven, channels left over": Depthwise((2, 37, 7, 7)),
    "seven, five taps": Depthwise((1, 48, 7, 7), (5, 5), pads=(2, 2, 2, 2)),
    "fourteen, five taps": Depthwise((1, 32, 14, 14), (5, 5), pads=(2, 2, 2, 2), residual=True),
    "half of fourteen": Depthwise((1, 33, 14, 14), strides=(2, 2)),
    "even border": Depthwise((1, 16, 14, 14), strides=(2, 2), pads=(0, 0, 1, 1)),
    "positions left over": Depthwise((1, 24, 5, 5)),
    "not square": Depthwise((1, 16, 4, 9), (3, 5), pads=(1, 2, 1, 2)),
    "dilations": Depthwise((1, 16, 7, 7), dilations=(2, 2), pads=(2, 2, 2, 2)),
    "seven taps": Depthwise((1, 20, 7, 7), (7, 7), pads=(3, 3, 3, 3)),
    "no border": Depthwise((1, 16, 9, 7), pads=(0, 0, 0, 0)),
    "long": Depthwise((1, 19, 7, 7), kinds=("sigmoid", "tanh", "abs", "neg", "sigmoid", "tanh", "gelu"), residual=True),
    "double": Depthwise((1, 19, 7, 7), dtype="f64"),
}
GRAPHS = {name: case.graph(f"s0.g{i}") for i, (name, case) in enumerate(CASES.items())}


def with_channels(graphs: list[Graph], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the graphs that are computed with channels in lanes."""
    taken: list[str] = []
    emit = channel_lanes.emit_channel_lanes
    for graph in graphs:
        monkeypatch.setattr(
            conv.channel_lanes,
            "emit_channel_lanes",
            lambda body, c, name=graph.name: (taken.append(name), emit(body, c)),
        )
        plan_kernels(graph, machine_of("skylake-avx512"))
        monkeypatch.undo()
    return list(dict.fromkeys(taken))


@pytest.mark.parametrize("target", ["host", "x86-64-v3", "x86-64-v2"])
def test_channels_in_lanes_are_the_interpreters(target: str, tmp_path: Path) -> None:
    program = build(list(GRAPHS.values()), tmp_path, target)
    for name, graph in GRAPHS.items():
        assert not compare(program, graph, make_args(graph, np.random.default_rng(3))), name


def test_the_cases_have_channels_in_lanes_and_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert with_channels(list(GRAPHS.values()), monkeypatch) == [graph.name for graph in GRAPHS.values()]
    others = [
        Depthwise((1, 15, 7, 7)),
        Depthwise((1, 32, 3, 3)),
        Depthwise((1, 32, 28, 28)),
        Depthwise((1, 32, 7, 16)),
    ]
    assert with_channels([case.graph("s0.F") for case in others], monkeypatch) == []


def test_a_source_that_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = Depthwise((2, 21, 7, 7), scaled=True).graph("s0.F")
    assert with_channels([graph], monkeypatch) == ["s0.F"]
    program = build([graph], tmp_path)
    assert not compare(program, graph, make_args(graph, np.random.default_rng(3)))


@pytest.mark.parametrize("special", [np.inf, -np.inf, np.nan])
def test_infinite_weights_show_at_the_border(special: float, tmp_path: Path) -> None:
    """Products of a tap outside of the source are products with zero."""
    graph = CASES["seven, five taps"].graph("s0.F")
    args = make_args(graph, np.random.default_rng(1))
    weight = next(a for a in args if a.shape[-2:] == (5, 5))
    weight[3, 0, 0, 1] = weight[20, 0, 2, 2] = weight[40, 0, 4, 3] = special
    (found,) = build([graph], tmp_path).call(graph.name, [to_torch(a) for a in args])
    (expected,) = NumpyProgram([graph]).call(graph.name, [torch.tensor(a) for a in args])
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.isinf(), expected.isinf())
    assert expected.isnan().any()
    assert not expected.isnan().all()


def test_control_channels_in_another_order_are_noticed(tmp_path: Path) -> None:
    graph = GRAPHS["seven, channels left over"]
    program = build([graph], tmp_path)
    args = make_args(graph, np.random.default_rng(1))
    others = [np.roll(a, 1, axis=0) if a.shape[-2:] == (3, 3) else a for a in args]
    (found,) = program.call(graph.name, [to_torch(a) for a in args])
    (wrong,) = NumpyProgram([graph]).call(graph.name, [torch.tensor(a) for a in others])
    assert difference(found, wrong)
