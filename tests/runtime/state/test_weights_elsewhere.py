"""Weights and gradients that are elsewhere while a rank computes other stages, in real worker processes: the same
numbers, checkpoints both ways, and evaluation."""

from __future__ import annotations

import numpy as np
import pytest
from tests.runtime.job.test_offload import checkpoints
from tests.runtime.job.test_packs import M, same, trained

import penstock as ps
from penstock.backends.bundle.format import open_bundle
from penstock.inspection.memory import memory_curves
from penstock.ir.cluster.cluster import Cluster
from penstock.models import write_mlp

KINDS = ("none", "all")


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    """A bundle of four stages on one device as it is, and one with all of them elsewhere."""
    place = tmp_path_factory.mktemp("weights")
    path = write_mlp(place / "deep.onnx", [8] * 9, batch=4)
    training = ps.Training(loss="mse", optimizer=ps.AdamW(lr=0.01), microbatches=M, clip=0.5)
    packs = {"schedule": "interleaved", "packs": 4, "split_at": ["fc3.product", "fc5.product", "fc7.product"]}
    plans = {kind: ps.plan(ps.from_onnx(path), Cluster.local(1), training, offload=kind, **packs) for kind in KINDS}
    return [ps.compile(plan, place / kind) for kind, plan in plans.items()]


def test_training_is_bit_for_bit_the_same(bundles):
    whole, away = bundles
    items = {action.item for action in open_bundle(away).module.schedule.actions()}
    assert items >= {"o", "w", "g"}
    same(trained(away), trained(whole))
    curve = memory_curves(open_bundle(away).module)[0]
    assert curve.home is not None
    assert curve.home.on_device < curve.home.bytes


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
