"""The training of a plan beside that of one device, in the interpreter."""

from __future__ import annotations

import numpy as np

import penstock as ps
from penstock.ir.cluster.cluster import Cluster
from penstock.ir.interpreter.schedules import run_schedule


def assert_trains_as_one_device(plan: ps.Plan, model: ps.Model, training: ps.Training) -> None:
    """Compare all weights after two updates on random batches."""
    alone = ps.plan(model, Cluster.local(1), training)
    draw = np.random.default_rng(0)

    def fed(value: object) -> np.ndarray:
        shape = (training.microbatches * value.type.dims[0], *value.type.dims[1:])
        return draw.integers(0, 10, shape) if value.type.dtype == "i64" else draw.standard_normal(shape)

    batches = [{v.name: fed(v) for v in alone.reference.data_inputs} for _ in range(2)]
    weights = model.imported.weights
    split, whole = (run_schedule(each.module, weights, batches).variables for each in (plan, alone))
    for each in weights.keys() & whole.keys():
        np.testing.assert_allclose(split[each], whole[each], rtol=1e-9, atol=1e-11, err_msg=each)
    # Control: two updates change what is compared.
    assert max(np.abs(whole[each] - weights[each]).max() for each in weights.keys() & whole.keys()) > 1e-3
