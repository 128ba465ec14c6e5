"""The pass `overlap` where replicas share all variables out: most of the time of collectives is hidden, without another
number, and with the memory of one more weight and one more gradient.

The oracle of time is the simulator's account of a graph, which prices kernels and links by itself.
"""

from __future__ import annotations

import numpy as np
import pytest
from oracles.sharding.team_runs import run_parts

import penstock as ps
from penstock.ir.cluster.cluster import Cluster, Device, LinkClass
from penstock.ir.graph import Module
from penstock.ir.memory.predict import measure_memory
from penstock.ir.ops import EXCHANGES
from penstock.ir.verify.verifier import check
from penstock.models import write_mlp
from penstock.passes import pipelines
from penstock.passes.communicate.overlap import live_peak
from penstock.passes.pipelines import PipelineEntry
from penstock.passes.simulator.exchanges import collective_times
from penstock.passes.simulator.machine import Route
from penstock.support.errors import DoesNotFit

LAYERS, WIDTH, ROWS, FLOPS = 8, 64, 2048, 1e9
# A product takes longer than half of a weight on the link, by this.
SLOWER = 1.5
RATE = (WIDTH * WIDTH * 4 / 2) / (2 * ROWS * WIDTH * WIDTH / FLOPS / SLOWER)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ps.Model:
    folder = tmp_path_factory.mktemp("model")
    return ps.from_onnx(write_mlp(folder / "mlp.onnx", (WIDTH,) * (LAYERS + 1), batch=ROWS, seed=1))


def planned(model: ps.Model, memory: int = 0) -> Module:
    rates = {"flops": FLOPS, "bandwidth": 1e12, "overhead": 0.0, "efficiency": ()}
    spaces = (("ram", memory),) if memory else ()
    devices = tuple(Device(f"cpu:{i}", host=f"n{i}", threads=1, spaces=spaces, **rates) for i in range(2))
    cluster = Cluster(devices, classes=(LinkClass("other-host", RATE, 0.0),))
    training = ps.Training(loss="cross_entropy", optimizer=ps.SGD(lr=1e-3), microbatches=2)
    return ps.plan(model, cluster, training, replicas=2, zero=3, recompute="none").module


def exposed(module: Module) -> float:
    """Return the share of the collectives' time that kernels of forward and backward leave."""

    def route(source: int, target: int) -> Route:
        return Route(((f"{source}>{target}", RATE),), 0.0)

    times = [time for kind in "FB" for time in collective_times(module, route, 0, kind).values()]
    return sum(time.exposed for time in times) / sum(time.whole for time in times)


def without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipelines, "_overlap", lambda options: PipelineEntry("overlap", {}, "", wanted=False))


def test_at_most_a_quarter_of_the_time_is_waited_for(model: ps.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    module = planned(model)
    check(module, ("typed", "local"))
    assert exposed(module) <= 0.25
    # The control: as the passes before leave it.
    without(monkeypatch)
    assert exposed(planned(model)) >= 0.65


def products_until_read(module: Module, kind: str) -> list[int]:
    """Return for each collective of that kind in the backward how many products stand between it and its first reader,
    those of the last two products left out: behind these nothing can be computed."""
    ops = module.graphs["s0.B"].ops
    products = [i for i, op in enumerate(ops) if op.kind == "matmul"]
    counts = []
    for i, op in enumerate(ops[: products[-2]]):
        if op.kind == kind:
            read = next((k for k, reader in enumerate(ops) if op.outs[0] in reader.ins), len(ops))
            counts.append(sum(i < at < read for at in products))
    return counts


def test_a_rank_that_is_a_product_behind_keeps_none_waiting(model: ps.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """One product hides what is in front of a sum on the link, and one is left. The first sum has nothing in front."""
    first, *others = products_until_read(planned(model), "reduce_scatter")
    assert first >= 1
    assert min(others) >= 2
    # The control: as the passes before leave it.
    without(monkeypatch)
    assert max(products_until_read(planned(model), "reduce_scatter")) < 1


def test_memory_grows_by_a_weight_and_a_gradient_at_most(model: ps.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    after = planned(model)
    without(monkeypatch)
    before = planned(model)
    weight = WIDTH * WIDTH * 4
    for name in ("s0.F", "s0.B"):
        peaks = [live_peak(m.graphs[name].ops, (*m.graphs[name].ins, *m.graphs[name].results)) for m in (before, after)]
        assert peaks[1] <= peaks[0] * 1.125 + 2 * weight, name
        kinds = [[op.kind for op in m.graphs[name].ops if op.kind in EXCHANGES] for m in (before, after)]
        assert sorted(kinds[0]) == sorted(kinds[1])


def test_a_plan_that_fits_is_not_refused_for_it(model: ps.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices with room for the order before, and a byte more than none for the weight and gradient besides."""
    roomy = measure_memory(planned(model))[0].peak
    with monkeypatch.context() as patch:
        without(patch)
        least = measure_memory(planned(model))[0].peak
    assert least < roomy
    for memory in (least, (least + roomy) // 2, roomy):
        module = planned(model, memory=memory)
        assert measure_memory(module)[0].peak <= memory
    assert exposed(planned(model, memory=roomy)) <= 0.25
    with pytest.raises(DoesNotFit):
        planned(model, memory=least - 1)


def test_no_bit_changes(model: ps.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    after = planned(model)
    without(monkeypatch)
    before = planned(model)
    rng = np.random.default_rng(0)
    weights = {name: np.asarray(x) for name, x in model.imported.weights.items()}
    batch = {
        v.name: rng.integers(0, WIDTH, v.type.dims) if v.type.dtype == "i64" else rng.standard_normal(v.type.dims)
        for v in before.inputs
    }
    values, stores = run_parts(before, weights, batch, {})
    again, others = run_parts(after, weights, batch, {})
    assert values.keys() == again.keys()
    assert all(np.array_equal(x, y) for key in values for x, y in zip(values[key], again[key], strict=True))
    for store, other in zip(stores, others, strict=True):
        assert all(np.array_equal(x, other.arrays[name]) for name, x in store.arrays.items())
