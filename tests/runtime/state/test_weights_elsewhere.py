"""Weights and gradients that are elsewhere while a rank computes other stages, in real worker processes: the same
numbers, the memory block by block, the bytes that move, checkpoints both ways, and evaluation."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from tests.runtime.job.test_offload import checkpoints, traced
from tests.runtime.job.test_packs import M, same, trained

import penstock as ps
from penstock.backends.bundle.format import open_bundle
from penstock.inspection.memory.curves import memory_curves
from penstock.ir.cluster.cluster import Cluster
from penstock.ir.memory.account import first_difference
from penstock.models import write_mlp
from penstock.runtime.telemetry.memory_trace import measured_account, planned_beside, read_trace

KINDS = ("none", "all")


# Schedules of one and of two versions of the weights, and other settings.
SCHEDULES = {"interleaved": {"clip": 0.5}, "interleaved-2bw": {}, "wrap": {}}


@pytest.fixture(scope="module", params=SCHEDULES)
def bundles(request, tmp_path_factory):
    """A bundle of four stages on one device as it is, and one with all of them elsewhere."""
    place = tmp_path_factory.mktemp("weights")
    path = write_mlp(place / "deep.onnx", [8] * 9, batch=4)
    training = ps.Training(loss="mse", optimizer=ps.AdamW(lr=0.01), microbatches=M, **SCHEDULES[request.param])
    packs = {"schedule": request.param, "packs": 4, "split_at": ["fc3.product", "fc5.product", "fc7.product"]}
    plans = {kind: ps.plan(ps.from_onnx(path), Cluster.local(1), training, offload=kind, **packs) for kind in KINDS}
    return [ps.compile(plan, place / kind) for kind, plan in plans.items()]


def test_training_is_bit_for_bit_the_same(bundles):
    whole, away = bundles
    items = {action.item for action in open_bundle(away).module.schedule.actions()}
    assert items >= {"o", "w", "g"}
    same(trained(away), trained(whole))
    curve = memory_curves(open_bundle(away).module)[0]
    (home,) = curve.homes
    assert home.on_device < home.bytes


def moved(module, rank, batches):
    """The bytes that a rank moves in a run: nothing for gradients, for what is there, and for what is not made yet."""
    claims, made, total = Counter(), dict.fromkeys(range(len(module.stages)), 0), 0
    for a in module.schedule.expand(rank, batches):
        if a.kind == "U" and not a.item:
            made[a.stage] = a.mb + 1
        if a.item not in ("o", "w"):
            continue
        key, role = (a.stage, a.item, a.version), {"o": "state", "w": "param"}[a.item]
        sizes = [v.type.nbytes for v in module.vars.values() if (v.stage, v.role) == (a.stage, role) and v.home]
        comes = a.kind == "CI" and not claims[key] and (a.version is None or a.version <= made[a.stage])
        claims[key] += {"CI": 1, "CO": 0, "L": -1}[a.kind]
        total += sum(-(-n // 64) * 64 for n in sizes) if comes or a.kind == "CO" else 0
    return total


def test_memory_is_held_as_planned_and_bytes_move_as_planned(bundles, tmp_path):
    module, copies = traced(bundles[1], tmp_path / "trace.json")
    (trace,) = read_trace(tmp_path / "trace.json")
    planned, measured = planned_beside(module, 0, trace), measured_account(module, 0, trace)
    assert str(first_difference(planned, measured)) == "None"
    assert sum(c.nbytes for c in copies[0] if not c.text.endswith(":a0")) == moved(module, 0, 3)
    # The control: a plan in which the first weights stay for good.
    first = next(i for i, life in enumerate(planned.lives) if life.purpose == "weights" and life.given_at is not None)
    lives = (*planned.lives[:first], planned.lives[first]._replace(given_at=None), *planned.lives[first + 1 :])
    assert first_difference(replace(planned, lives=lives), measured) is not None


def test_checkpoints_are_those_of_training_without(bundles, tmp_path):
    whole, away = bundles
    checkpoints(bundles, tmp_path / "places")
    with ps.open(whole, timeout=60) as one, ps.open(away, timeout=60) as other:
        parameters = one.parameters()
        assert all(np.array_equal(parameters[name], array) for name, array in other.parameters().items())


def test_evaluation_between_steps_brings_the_weights_that_it_reads(bundles, tmp_path):
    """Of partial microbatches, too. The control: weights of another step give another loss."""
    rng, held, results = np.random.default_rng(3), tmp_path / "held.npz", []
    np.savez(held, **{name: rng.standard_normal((11, 8), np.float32) for name in ("x", "labels")})
    for bundle in bundles:
        with ps.open(bundle, timeout=60, data="synthetic", eval_data=held) as job:
            results.append([(list(job.steps_from_data(count))[-1].losses, job.evaluate()) for count in (1, 2)])
    assert results[0] == results[1]
    assert results[0][0][1].loss != results[0][1][1].loss
