"""Packs of stages on several devices: replicas of each other, teams over which tensors are split, or both.

Ranks are processes with the NumPy back end. The oracle is a training of the same microbatches on one device; the matrix
beside has `interleaved` with every level of zero. What the checker refuses are the same plans with one thing changed.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from acceptance.sharding import matrix as m
from acceptance.sharding.test_unlike_meshes import _tied
from tests.runtime.job.test_replicas import batches_of

import penstock as ps
from penstock.backends.bundle.format import open_bundle
from penstock.commands.parser import main
from penstock.ir.graph import Module
from penstock.ir.schedule import Action, Program, Schedule
from penstock.ir.text import parse_module, print_module
from penstock.ir.verify.verifier import verify
from penstock.planning.replan import replan
from penstock.support.errors import ParseError

MEGATRON = ("preset:megatron",)


def _plan(schedule: str, mesh: str, devices: int, model: ps.Model | None = None, **settings: object) -> ps.Plan:
    given = {"shard": MEGATRON if "tp" in mesh else (), "training": m.TRAINING, "stages": 2, "packs": 2, **settings}
    training = given.pop("training")
    return ps.plan(model or m.model(), ps.Cluster.local(devices), training, schedule=schedule, mesh=mesh, **given)


@pytest.mark.parametrize(
    ("schedule", "mesh", "devices", "what"),
    [
        ("zb-v", "dp=2", 4, "clip"),
        ("zb-v", "tp=2", 4, "tied"),
        ("interleaved", "dp=2", 4, "tied"),
        pytest.param("zb-v", "dp=2,tp=2", 8, "tied", marks=pytest.mark.slow),
        pytest.param("interleaved", "dp=2,tp=2", 8, "clip", marks=pytest.mark.slow),
    ],
)
def test_training_is_that_of_one_device(schedule: str, mesh: str, devices: int, what: str, tmp_path: Path) -> None:
    """With the norm of the gradient, and with a parameter that stages of both devices read."""
    model = m.model() if what == "clip" else _tied(tmp_path)
    training = replace(m.TRAINING, clip=0.05) if what == "clip" else m.TRAINING
    alone = ps.plan(model, ps.Cluster.local(1), training, schedule="1f1b", stages=1)
    assert m.trained(_plan(schedule, mesh, devices, model, training=training), m.FEW) == pytest.approx(
        m.trained(alone, m.FEW), rel=1e-6
    )


def test_replicas_with_unequal_shares_train_as_one_device(tmp_path: Path) -> None:
    """Of three microbatches one pipeline runs two, the other one."""
    training = replace(m.TRAINING, microbatches=3)
    plan = _plan("interleaved", "dp=2", 4, training=training)
    schedule = plan.module.schedule
    assert schedule is not None
    assert [schedule.shares(stage) for stage in range(4)] == [[2, 1]] * 4
    alone = ps.plan(m.model(), ps.Cluster.local(1), training, schedule="1f1b", stages=1)
    one, two = (ps.compile(p, tmp_path / n, backend="numpy") for p, n in ((alone, "alone"), (plan, "packed")))
    # Batches of four microbatches, of which three are taken.
    batches = [{name: x[: 3 * m.BATCH] for name, x in batch.items()} for batch in batches_of(open_bundle(one), 4)]
    losses = []
    for bundle in (one, two):
        with ps.open(bundle, timeout=60) as job:
            losses.append([step.loss for step in job.steps(batches)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_commands_know_packs_of_teams(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every rank is verified against the whole program, views name all devices, and a simulation comes to an end."""
    bundle = ps.compile(_plan("interleaved", "dp=2,tp=2", 8, zero=1), tmp_path / "b", backend="numpy")
    module = open_bundle(bundle).module
    assert [module.ranks_of(stage) for stage in range(4)] == [[0, 1, 2, 3], [4, 5, 6, 7]] * 2
    assert module.rank_devices() == [f"cpu:{rank}" for rank in range(8)]
    assert print_module(parse_module(print_module(module))) == print_module(module)
    with pytest.raises(ParseError, match="stages whose next device is cpu:1"):
        parse_module(print_module(module).replace("rank 0 on cpu:0 runs", "rank 0 on cpu:1 runs"))
    for view in ("--sharding", "--links", "--memory", "--schedule"):
        assert main(["inspect", str(bundle), view]) == 0
    assert main(["verify", str(bundle), "--steps", "2"]) == 0
    assert main(["simulate", str(bundle)]) == 0
    assert "stage 2 (dp=2, tp=2): cpu:0 cpu:1 cpu:2 cpu:3" in capsys.readouterr().out


def test_checkpoints_and_evaluation_are_those_of_one_device(tmp_path: Path) -> None:
    rng, held = np.random.default_rng(3), tmp_path / "held.npz"
    tokens = rng.integers(0, m.VOCABULARY, (11, m.POSITIONS + 1))
    names = [value.name for value in m.model().module.inputs]
    np.savez(held, **{names[0]: tokens[:, :-1], "labels": tokens[:, 1:]})
    packed = ps.compile(_plan("interleaved", "dp=2,tp=2", 8, zero=3), tmp_path / "packed", backend="numpy")
    one = ps.plan(m.model(), ps.Cluster.local(1), m.TRAINING, schedule="1f1b", stages=1)
    alone = ps.compile(one, tmp_path / "alone", backend="numpy")
    batches = batches_of(open_bundle(alone), 4)
    with ps.open(packed, timeout=60, eval_data=held) as job:
        first = [step.loss for step in job.steps(batches[:2])]
        job.save(tmp_path / "saved")
        evaluated = job.evaluate()
    with ps.open(alone, timeout=60, resume=tmp_path / "saved", eval_data=held) as job:
        assert job.evaluate().loss == pytest.approx(evaluated.loss, rel=1e-6)
        then = [step.loss for step in job.steps(batches[2:])]
    with ps.open(alone, timeout=60, eval_data=held) as job:
        assert job.evaluate().loss != pytest.approx(evaluated.loss, rel=1e-4)  # the control: weights of the beginning
        assert first + then == pytest.approx([step.loss for step in job.steps(batches)], rel=1e-6)


def test_a_run_goes_on_with_one_replica_less(tmp_path: Path) -> None:
    path = ps.compile(_plan("interleaved", "dp=2", 4), tmp_path / "four", backend="numpy")
    said = replan(open_bundle(path), ["cpu:0", "cpu:2"], tmp_path / "two")
    assert said == "2 stages on each of cpu:0 cpu:2, schedule interleaved with 4 microbatches"
    said = replan(open_bundle(path), ["cpu:0", "cpu:2", "cpu:3"], tmp_path / "three")
    assert said.startswith("2 stages on cpu:0 cpu:2+cpu:3, schedule 1f1b with 4 microbatches")
    batches = batches_of(open_bundle(path), 2)
    losses = []
    for bundle in (path, tmp_path / "two", tmp_path / "three"):
        with ps.open(bundle, timeout=60) as job:
            losses.append([step.loss for step in job.steps(batches)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert losses[2] == pytest.approx(losses[0], rel=1e-6)


def _problems(module: Module) -> str:
    with pytest.raises(ps.PenstockError) as caught:
        verify(module)
    return str(caught.value)


def test_checker_refuses_ranks_that_part() -> None:
    module = _plan("interleaved", "dp=2", 4).module
    schedule = module.schedule
    assert schedule is not None
    verify(module)

    def with_batch(rank: int, batch: list[Action]) -> Module:
        ranks = {**schedule.ranks, rank: Program(schedule.ranks[rank].start, tuple(batch))}
        return module.but(schedule=Schedule(schedule.name, schedule.microbatches, ranks))

    batch = list(schedule.ranks[1].batch)
    sums = [i for i, action in enumerate(batch) if action.kind == "AR"]
    late = [action for i, action in enumerate(batch) if i != sums[0]]
    late.insert(sums[1], batch[sums[0]])
    assert "sum in different orders: rank 0 [2AR0, 0AR0]" in _problems(with_batch(1, late))
    assert "comes before 0AR0" in _problems(with_batch(1, [a for a in batch if a.kind != "AR" or a.stage]))
    other = [a._replace(mb=a.mb - 1) if a.stage == 2 and a.kind in "FBDR" else a for a in batch]
    assert "runs other microbatches than on stage 0 of its pack" in _problems(with_batch(1, other))
    turned = tuple(replace(mesh, devices=mesh.devices[::-1]) if mesh.name == "s2" else mesh for mesh in module.meshes)
    assert "runs stages that lie on unlike devices" in _problems(module.but(meshes=turned))
    ranks = {0: schedule.ranks[0], 1: schedule.ranks[2]}
    fewer = module.but(
        packs=(module.packs[0], module.packs[2]), schedule=Schedule(schedule.name, schedule.microbatches, ranks)
    )
    assert "stages 0, 2 lie on 1 rank, expected 2, one for each of the devices cpu:0, cpu:1" in _problems(fewer)


@pytest.mark.parametrize(
    ("mesh", "zero", "offload"),
    [("dp=2", 0, "all"), ("tp=2", 0, "weights"), pytest.param("dp=2", 1, "both", marks=pytest.mark.slow)],
)
def test_what_is_elsewhere_changes_no_loss(mesh: str, zero: int, offload: str) -> None:
    """Three stages on each device, whose weights come for their turn. Gradients that replicas sum up stay."""
    plan = _plan("interleaved", mesh, 4, packs=3, offload=offload, zero=zero)
    assert any(var.home for var in plan.module.vars.values())
    assert m.trained(plan, m.FEW) == pytest.approx(m.on_one_device("interleaved")[: m.FEW], rel=1e-6)


def test_checker_refuses_gradients_elsewhere_that_replicas_sum_up() -> None:
    module = _plan("interleaved", "dp=2", 4, packs=3, offload="weights").module
    home = next(var.home for var in module.vars.values() if var.home)
    grads = {name: replace(var, home=home) for name, var in module.vars.items() if var.role == "grad"}
    assert "and replicas of stage 0 sum it up" in _problems(module.but(vars={**module.vars, **grads}))
