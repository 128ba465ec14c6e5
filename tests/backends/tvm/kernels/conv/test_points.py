"""Convolutions of one tap on images that are read where they lie, or packed where that does not suit, against the
interpreter: panels and tiles that are left over, groups, epilogues, gradients for the input."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.backends.numpy_backend import NumpyProgram
from penstock.backends.tvm.kernels.conv import points
from penstock.backends.tvm.lower.lower import plan_kernels
from penstock.backends.tvm.target import machine_of
from penstock.ir.graph import Graph

from ...cases import ON_TARGETS, ConvCase, build, compare, difference, make_args, to_torch
from .test_small_images import bare, by_row, graph_of, long, short, turned

# Whole vectors of 16 lanes, or of 8 where these are doubles. An odd number of them leaves a narrower panel.
NEAR: dict[str, Graph] = {
    "even": graph_of("s0.p0", "f32[1,11,16,22]", 20),
    "odd": graph_of("s0.p1", "f32[2,9,16,17]", 31),
    "one output": graph_of("s0.p2", "f32[1,16,20,20]", 1),
    "one channel": graph_of("s0.p3", "f32[1,1,20,20]", 15),
    "groups": graph_of("s0.p4", "f32[2,12,16,18]", 30, short, 3),
    "double": graph_of("s0.p5", "f64[1,6,16,19]", 9),
    "same sets": graph_of("s0.q1", "f32[1,9,32,32]", 20),
    "one dimension": graph_of("s0.p6", "f32[1,8,304]", 21),
    **{e.__name__: graph_of(f"s0.{e.__name__}", "f32[2,7,16,19]", 19, e) for e in (bare, long, by_row, turned)},
    "gradient": ConvCase((2, 10, 16, 19), (21, 10, 1, 1)).graph("s0.p7", True),
}
# Positions that are no whole vectors, a panel as large as the cache, numbers that are computed in another type, and an
# output that leaves the cache.
PACKED: dict[str, Graph] = {
    "no vectors": graph_of("s0.q0", "f32[1,9,17,19]", 20),
    "many channels": graph_of("s0.q2", "f32[1,300,16,17]", 10),
    "halves": graph_of("s0.q3", "bf16[1,9,16,17]", 10),
    "large output": graph_of("s0.q4", "f32[1,2,256,260]", 16),
}
GRAPHS = {**NEAR, **PACKED}


@pytest.mark.parametrize(("target", "step"), ON_TARGETS)
def test_points_are_the_interpreters(target: str, step: int, tmp_path: Path) -> None:
    chosen = {name: graph for name, graph in list(GRAPHS.items())[::step] if name != "halves"}
    program = build(list(chosen.values()), tmp_path, target)
    for name, graph in chosen.items():
        assert not compare(program, graph, make_args(graph, np.random.default_rng(3))), name


def test_images_are_read_where_they_lie_if_that_suits(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[bool] = []
    part = points._Points._part

    def note(self: points._Points, *given: object) -> None:
        noted.append(self.in_place)
        part(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(points._Points, "_part", note)
    for name, graph in GRAPHS.items():
        noted.clear()
        plan_kernels(graph, machine_of("skylake-avx512"))
        assert set(noted) == {name in NEAR}, name


def test_control_another_channel_is_noticed(tmp_path: Path) -> None:
    graph = NEAR["odd"]
    program = build([graph], tmp_path)
    args = make_args(graph, np.random.default_rng(1))
    others = [np.roll(args[0], 1, axis=1), *args[1:]]
    (ours,) = program.call(graph.name, [to_torch(a) for a in args])
    (wrong,) = NumpyProgram([graph]).call(graph.name, [torch.tensor(a) for a in others])
    assert difference(ours, wrong)
