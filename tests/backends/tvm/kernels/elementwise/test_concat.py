"""Concatenations against the interpreter: along every axis, of parts with one element and none, short rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from ...cases import OpCase, build, compare, make_args

CASES = [
    OpCase("concat", ("f32[2,3,7,7]", "f32[2,5,7,7]", "f32[2,1,7,7]"), {"axis": 1}),
    OpCase("concat", ("f32[4,5]", "f32[3,5]"), {"axis": 0}),
    OpCase("concat", ("f32[4,5]", "f32[4,3]"), {"axis": -1}),
    OpCase("concat", ("f32[2,3,5,3]", "f32[2,3,2,3]"), {"axis": 2}),
    OpCase("concat", ("f32[2,1,1]", "f32[2,4,1]"), {"axis": 1}),
    OpCase("concat", ("f32[2,3,0]", "f32[2,4,0]"), {"axis": 1}),
    OpCase("concat", ("f32[40,50]", "f32[40,70]"), {"axis": 1}),
]


def test_concatenations_are_the_interpreters(tmp_path: Path) -> None:
    graphs = [case.graph(f"s0.c{i}") for i, case in enumerate(CASES)]
    program, rng = build(graphs, tmp_path), np.random.default_rng(1)
    for case, graph in zip(CASES, graphs, strict=True):
        assert not compare(program, graph, make_args(graph, rng)), case


def test_control_parts_in_another_order_are_noticed(tmp_path: Path) -> None:
    graph = CASES[0].graph("s0.F")
    a, b, c = make_args(graph, np.random.default_rng(2))
    found = build([graph], tmp_path).call("s0.F", [torch.tensor(x) for x in (a, b, c)])[0].numpy()
    assert np.array_equal(found, np.concatenate([a, b, c], 1))
    assert not np.array_equal(found, np.concatenate([b, a, c], 1))
