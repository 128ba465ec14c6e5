"""Programs of smaller sizes beside the model: right ones are right at every size, and one that is broken is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

import penstock as ps
from penstock.ir.graph import Module
from penstock.planning.plan import Plan
from penstock.verification import rungs
from penstock.verification.rungs import drawn_request, first_off

from .bisect.breaking import in_graph, swapped

# The mean and the softmax sum over the length, so that what fills a request up has to be masked.
MODEL = """<ir_version: 8, opset_import: ["" : 17]> g (float[batch,seq,8] x) => (float[batch,seq,8] y, float[batch,8] m)
<float[8,8] w = {WEIGHTS}> {
  q = MatMul(x, w)
  t = Transpose<perm = [0, 2, 1]>(x)
  s = MatMul(q, t)
  p = Softmax<axis = -1>(s)
  h = MatMul(p, x)
  y = Sub(h, x)
  m = ReduceMean<axes = [1], keepdims = 0>(y)
}"""
SIZES = {
    "lengths": {"batch": 2, "seq": "<=12:4,8,12"},
    "rows": {"batch": "<=4", "seq": 3},
    "both": {"batch": "<=4:2,4", "seq": "<=12:8,12"},
}


def planned(folder: Path, dims: dict[str, object], devices: int = 1) -> Plan:
    numbers = ", ".join(f"{x:.6f}" for x in np.random.default_rng(0).normal(size=64))
    path = folder / "model.onnx"
    onnx.save(onnx.parser.parse_model(MODEL.replace("{WEIGHTS}", "{" + numbers + "}")), path)
    return ps.plan(ps.from_onnx(path, dims=dims), ps.Cluster.local(threads=[1] * devices))


def smaller(plan: Plan) -> list[Module]:
    assert plan.ladder is not None
    return [rung.held for rung in plan.ladder if rung is not plan.ladder.largest]


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("kind", list(SIZES))
def test_programs_of_every_size_are_right(kind: str, devices: int, tmp_path: Path) -> None:
    plan = planned(tmp_path, SIZES[kind], devices)
    modules = smaller(plan)
    assert len(modules) >= 2
    assert plan.reference is not None
    weights = plan.model.imported.weights
    for seed in range(3):
        assert [first_off(plan.reference, module, weights, seed) for module in modules] == [None] * len(modules)


@pytest.mark.parametrize("kind", list(SIZES))
def test_a_program_that_is_broken_is_told(kind: str, tmp_path: Path) -> None:
    plan = planned(tmp_path, SIZES[kind])
    module, weights = smaller(plan)[0], plan.model.imported.weights
    assert plan.reference is not None
    spot = first_off(plan.reference, in_graph("s0.F", swapped("y"))(module), weights, 0)
    assert spot is not None
    assert (spot.tensor, spot.graph, spot.op is not None and spot.op.kind) == ("%y", "s0.F", "sub")
    # A tolerance of one's own.
    assert first_off(plan.reference, in_graph("s0.F", swapped("y"))(module), weights, 0, 10.0) is None


def test_the_model_is_told_the_size_of_the_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: told that all twelve rows are the request's, the model has other means."""
    plan = planned(tmp_path, SIZES["lengths"])
    reference, module, weights = plan.reference, smaller(plan)[0], plan.model.imported.weights
    assert reference is not None

    def all_rows(*asked: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        small, large = drawn_request(*asked)
        return small, {**large, "size.seq": np.array(12)}

    monkeypatch.setattr(rungs, "drawn_request", all_rows)
    assert first_off(reference, module, weights, 0) is not None
