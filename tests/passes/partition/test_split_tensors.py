"""Stages of several devices among which tensors are split: messages go forward in the forward pass, and back after it."""

from __future__ import annotations

import pytest
import torch
from oracles import torch_modules

import penstock as ps
from penstock.passes.partition import chain_costs
from penstock.passes.sharding import resolve
from penstock.support.errors import VerifyError


def stages_of(tp: int) -> int:
    """Return the number of stages of a plan for a decoder whose two heads so many devices cannot share out: attention
    takes other views of its operands than those that lie like the sequence."""
    model = ps.from_torch(torch_modules.GPT(), (torch.zeros(2, 8, dtype=torch.int64),))
    training = ps.Training("cross_entropy", ps.SGD(lr=0.1), microbatches=2)
    plan = ps.plan(model, ps.Cluster.local(2 * tp), training, stages=2, mesh=f"tp={tp}", shard="preset:sequence")
    return len(plan.module.stages)


@pytest.mark.parametrize("tp", [3, 4])
def test_no_stage_waits_for_itself_through_views_that_lie_otherwise(tp: int) -> None:
    assert stages_of(tp) == 2


def test_control_without_edges_between_backward_operations_stages_wait_for_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chain_costs, "backward_edges", lambda backward, index: set())
    with pytest.raises(VerifyError, match="deadlock"):
        stages_of(3)


def test_control_views_that_stay_with_their_makers_make_stages_wait_for_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resolve._GraphResolution, "_later", lambda self, view, reader: view)
    with pytest.raises(VerifyError, match="deadlock"):
        stages_of(3)
