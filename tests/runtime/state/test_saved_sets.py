"""What forwards saved, elsewhere until the backward, in real worker processes: the same numbers, and what is held."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.passes.memory.test_offload import let_sets_go
from tests.runtime.job.test_offload import traced
from tests.runtime.job.test_packs import M, same, trained

import penstock as ps
from penstock.backends.bundle.format import open_bundle
from penstock.inspection.memory.curves import memory_curves
from penstock.ir.cluster.cluster import Cluster
from penstock.ir.memory.account import first_difference
from penstock.ir.memory.saved_sets import saved_set
from penstock.models import write_mlp
from penstock.runtime.telemetry.memory_trace import measured_account, planned_beside, read_trace
from penstock.support.errors import DoesNotFit, PenstockError


@pytest.fixture(autouse=True)
def also_for_nothing(monkeypatch):
    let_sets_go(monkeypatch)


def plan(place, offload, schedule="gpipe", memory=0, **options):
    path = write_mlp(place / "deep.onnx", [8] * 9, batch=4)
    training = ps.Training(loss="mse", optimizer=ps.AdamW(lr=0.01), microbatches=M, clip=0.5)
    cluster = Cluster.local(2)
    if memory:
        cluster = replace(cluster, devices=tuple(replace(d, spaces=(("ram", memory),)) for d in cluster.devices))
    chosen = {"schedule": schedule, "split_at": ["fc5.product"], "offload": offload, **options}
    return ps.plan(ps.from_onnx(path), cluster, training, **chosen)


def bundle(place, offload, schedule="gpipe", backend="tvm", **options):
    return ps.compile(plan(place, offload, schedule, **options), place / offload, backend=backend)


@pytest.mark.parametrize(("schedule", "backend"), [("gpipe", "tvm"), ("2bw", "numpy")])
def test_training_is_bit_for_bit_the_same_and_holds_what_was_planned(tmp_path, schedule, backend):
    """Block by block after every action, by compiled code that is called with memory of another place each time."""
    whole, away = (bundle(tmp_path, kind, schedule, backend) for kind in ("none", "activations"))
    same(trained(away), trained(whole))
    module, copies = traced(away, tmp_path / "trace.json")
    assert {stage.home for stage in module.stages} == {"disk"} or schedule == "2bw"
    for rank, trace in enumerate(read_trace(tmp_path / "trace.json")):
        planned, measured = planned_beside(module, rank, trace), measured_account(module, rank, trace)
        assert first_difference(planned, measured) is None
        curve, saved = memory_curves(module)[rank], saved_set(module, rank)
        assert bool(curve.homes) == (saved is not None)
        if saved is None:
            continue
        (home,) = curve.homes
        assert sum(copy.nbytes for copy in copies[rank]) == 3 * home.moved_per_batch
        assert {copy.nbytes for copy in copies[rank]} == {saved.nbytes}
        # The control: an account that does not know that a set was let go of.
        away_lives = [life for life in planned.lives if set(life.names) & set(saved.values)]
        longer = [life._replace(given_at=None) if life is away_lives[0] else life for life in planned.lives]
        assert first_difference(replace(planned, lives=tuple(longer)), measured) is not None


def most(error):
    return max(error.value.needs.values())


@pytest.mark.parametrize(("schedule", "by_r"), [("gpipe", True), ("gpipe", False)])
def test_what_is_made_again_from_what_was_elsewhere_is_the_same(tmp_path, monkeypatch, schedule, by_r):
    """In a memory that moves alone do not fit into: the numbers, and each block after every action."""
    monkeypatch.setattr("penstock.passes.memory.recompute._played", lambda module: 0.0 if by_r else len(of_r(module)))
    with pytest.raises(DoesNotFit) as alone:
        bundle(tmp_path, "activations", schedule, memory=1, recompute="none")
    with pytest.raises(DoesNotFit) as least:
        bundle(tmp_path, "activations", schedule, memory=1)
    memory = next(
        memory
        for memory in range(most(alone) - 1, most(least), -128)
        if mixed(plan(tmp_path, "activations", schedule, memory=memory).module, by_r)
    )
    whole, both = (
        bundle(tmp_path, kind, schedule, memory=bytes) for kind, bytes in (("none", 0), ("activations", memory))
    )
    same(trained(both), trained(whole))
    module, _ = traced(both, tmp_path / "trace.json")
    for rank, trace in enumerate(read_trace(tmp_path / "trace.json")):
        planned, measured = planned_beside(module, rank, trace), measured_account(module, rank, trace)
        assert first_difference(planned, measured) is None
    # The control: an account in which nothing is made again.
    (step, action) = next(row for row in enumerate(planned.actions) if row[1].kind == ("R" if by_r else "CI"))
    short = [life for life in planned.lives if life.taken_at != step]
    assert len(short) < len(planned.lives), action
    assert first_difference(replace(planned, lives=tuple(short)), measured) is not None


def of_r(module):
    return [action for action in module.schedule.actions() if action.kind == "R"]


def mixed(module, by_r):
    """Whether a stage whose saved values are elsewhere makes some again."""
    again = {graph.name for graph in module.graphs.values() if any("recompute" in op.attrs for op in graph.ops)}
    return any(stage.home and f"s{stage.index}.{'R' if by_r else 'B'}" in again for stage in module.stages)


def test_packs_with_state_and_saved_sets_elsewhere_train_the_same(tmp_path):
    packs = {"schedule": "interleaved", "packs": 2, "split_at": ["fc3.product", "fc5.product", "fc7.product"]}
    whole, away = (bundle(tmp_path, kind, **packs) for kind in ("none", "both"))
    items = {action.item for action in open_bundle(away).module.schedule.actions()}
    assert items >= {"o", "a0"}
    same(trained(away), trained(whole))


def test_a_disk_that_fails_ends_the_run_with_its_error(tmp_path):
    gone = bundle(tmp_path, "activations", spill=str(tmp_path / "gone"))
    with pytest.raises(PenstockError, match="cannot make room in memory space"):
        trained(gone)
