"""The chain that the planner makes of a model: nothing is lost in clustering, and plans over layers are as good as plans over operations."""

from __future__ import annotations

from dataclasses import replace

import pytest

import penstock as ps
from penstock.ir.cluster.cluster import Cluster, Device, Link
from penstock.ir.cluster.gpus import usual_settings
from penstock.ir.graph import PARAM
from penstock.models import write_cnn, write_gpt, write_mlp
from penstock.passes.costs.prices import GraphCost, rank_seconds
from penstock.passes.partition.chain import chain_of
from penstock.passes.planner.fleet import fleet_of
from penstock.passes.planner.plan import PlanRequest
from penstock.passes.planner.planner import Planner
from penstock.passes.planner.profile import profile_chain
from penstock.passes.planner.sparing import LITTLE, without_little_help
from penstock.planning.pipeline import before_partition
from penstock.support.errors import UsageError

DEVICE = Device("cpu:0")
TRAINING = ps.Training(loss="cross_entropy", optimizer=ps.AdamW(lr=1e-3))


@pytest.fixture(scope="module")
def gpt(tmp_path_factory):
    """A module for each size of a microbatch."""
    folder = tmp_path_factory.mktemp("profile")

    def at(b):
        path = write_gpt(folder / f"g{b}.onnx", layers=2, width=32, heads=2, vocab=128, positions=16, batch=b)
        return before_partition(ps.from_onnx(path), Cluster((DEVICE,)), TRAINING)

    return {b: at(b) for b in (2, 4)}


def test_layers_hold_all_there_is(gpt):
    module = gpt[4]
    whole = profile_chain({4: module}, DEVICE, most=10**6)
    few = profile_chain({4: module}, DEVICE, most=8)
    assert len(few.starts) <= 8 < len(whole.starts) == whole.operations == len(chain_of(module))
    for profile in (whole, few):
        times = profile.chain.timer(profile.chain, DEVICE, 4)
        assert sum(times.forward) == pytest.approx(sum(GraphCost(module.graphs["F"]).op_seconds(DEVICE)))
        assert sum(times.backward) == pytest.approx(sum(GraphCost(module.graphs["B"]).op_seconds(DEVICE)))
        assert all(w <= b for w, b in zip(times.weight, times.backward, strict=True))
    params = sum(v.type.nbytes for v in module.vars.values() if v.role == PARAM)
    tied = next(v.type.nbytes for v in module.vars.values() if v.role == PARAM and v.type.dims == (128, 32))
    assert (
        params <= sum(x.params for x in few.chain.layers) <= sum(x.params for x in whole.chain.layers) <= params + tied
    )


def test_layers_on_a_gpu_take_what_a_stage_there_takes(tmp_path):
    """Libraries leave what follows a product to other kernels. The oracle: the stage that the passes make. The control: kernels as on a CPU."""
    model = ps.from_onnx(write_mlp(tmp_path / "mlp.onnx", [64, 8192, 64, 8192, 64], batch=2048))
    gpu = Device("cuda:0", "cuda", target="sm_90", **usual_settings("sm_90"))
    module = before_partition(model, Cluster((gpu,)), TRAINING)
    chain = profile_chain({2048: module}, gpu).chain
    times = chain.timer(chain, gpu, 2048)
    stage = rank_seconds(ps.plan(model, Cluster((gpu,)), TRAINING).module)
    assert sum(times.forward) + gpu.call_overhead == pytest.approx(stage[0, "F"], rel=0.01)
    assert sum(times.backward) + gpu.call_overhead == pytest.approx(stage[0, "B"], rel=0.1)
    assert sum(GraphCost(module.graphs["F"]).op_seconds(gpu)) + gpu.call_overhead < 0.9 * stage[0, "F"]


@pytest.mark.parametrize("name", ["gpt", "cnn"])
def test_layers_know_that_what_they_save_is_in_no_cache(name, tmp_path, monkeypatch):
    """The oracle: the forward of the stage that the passes make. Values that are saved in one layout are not saved again
    in another. The control: layers without that."""
    if name == "gpt":
        path = write_gpt(tmp_path / "g.onnx", layers=3, width=64, heads=4, vocab=64, positions=64, batch=4)
    else:
        path = write_cnn(tmp_path / "c.onnx", channels=(3, 16, 16, 32), size=32, batch=8)
    model, cached = ps.from_onnx(path), replace(DEVICE, cache=1 << 20, cache_bandwidth=5e10)
    stage = rank_seconds(ps.plan(model, Cluster((cached,)), TRAINING).module)[0, "F"]

    def forward():
        module = before_partition(model, Cluster((cached,)), TRAINING)
        profile = profile_chain({4: module}, cached)
        return sum(profile.chain.timer(profile.chain, cached, 4).forward) + cached.call_overhead

    assert forward() == pytest.approx(stage, rel=0.02)
    monkeypatch.setattr("penstock.passes.planner.profile.written_seconds", lambda nbytes, device: 0.0)
    assert forward() < 0.95 * stage


def test_bytes_grow_with_the_microbatch(gpt):
    both = profile_chain(gpt, DEVICE, most=8).chain
    for b, module in gpt.items():
        alone = profile_chain({b: module}, DEVICE, most=8).chain
        # The cuts of both are those of the larger size, so only the whole can be compared where they differ.
        assert sum(x.saved.at(b) for x in both.layers) == pytest.approx(
            sum(x.saved.at(b) for x in alone.layers), rel=0.02
        )
    with pytest.raises(UsageError, match="microbatches of 3 samples were not profiled, only 2, 4"):
        both.timer(both, DEVICE, 3)


def test_weight_gradients_are_apart(gpt):
    """Of a model with products only, a good part of the backward makes gradients of weights; none of it where all is frozen but the first layer."""
    times = profile_chain({4: gpt[4]}, DEVICE).chain.timer
    chain = profile_chain({4: gpt[4]}, DEVICE).chain
    found = times(chain, DEVICE, 4)
    assert 0.2 < sum(found.weight) / sum(found.backward) < 0.8


@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_clustering_costs_at_most_a_layer_per_stage(gpt, schedule):
    cluster = Cluster((DEVICE, Device("cpu:1", flops=2e10)), (Link("cpu:0", "cpu:1", 1e10, 1e-6),))
    wanted = PlanRequest(32, (schedule,), sizes=(4,), tolerance=1e-9)
    steps = []
    for most in (10**6, 12):
        profile = profile_chain({4: gpt[4]}, DEVICE, most=most)
        found = Planner(profile.chain, fleet_of(cluster), wanted).best(schedule)
        times = profile.chain.timer(profile.chain, replace(DEVICE, flops=2e10), 4)
        steps.append((found.step, max(f + b for f, b in zip(times.forward, times.backward, strict=True))))
    (fine, _), (coarse, longest) = steps
    assert fine <= coarse * (1 + 1e-9)
    assert coarse <= fine + 2 * 8 * longest


def test_no_cut_where_a_variable_changes(tmp_path):
    """Between the operations that read and write a running statistic no stage may start; elsewhere it may."""
    path = write_cnn(tmp_path / "c.onnx", channels=(3, 8), size=8, classes=4, batch=2)
    module = before_partition(
        ps.from_onnx(path), Cluster((DEVICE,)), ps.Training(loss="cross_entropy", optimizer=ps.SGD(lr=0.1))
    )
    profile = profile_chain({2: module}, DEVICE, most=10**6)
    moving = {op.var for op in chain_of(module) if op.kind == "write"}
    inside = 0
    for name in moving:
        at = [i for i, op in enumerate(chain_of(module)) if "var" in op.attrs and op.var == name]
        inside += max(at) - min(at)
    assert len(profile.starts) >= profile.operations - inside


def three():
    return fleet_of(Cluster((Device("cpu:0"), Device("cpu:1", flops=2.5e10), Device("cpu:2", flops=5e8))))


def test_a_device_that_hardly_helps_is_left_out(gpt):
    profile, wanted = profile_chain({4: gpt[4]}, DEVICE), PlanRequest(32, ("2bw",), sizes=(4,))
    planner = Planner(profile.chain, three(), wanted)
    chosen = planner.best("2bw")
    kept, told = without_little_help(planner, chosen)
    assert kept.step <= chosen.step * (1 + LITTLE)
    assert len(told) <= len(set(chosen.plan.devices) - set(kept.plan.devices))
    for device in kept.plan.devices:
        left = three().only([i for i in range(3) if i in kept.plan.devices and i != device])
        found = Planner(profile.chain, left, wanted).best("2bw")
        assert found is None or found.step > kept.step * (1 + LITTLE / 2)


def test_sizes_that_make_other_models_are_left_out(tmp_path, gpt):
    """Those stay that most sizes make, of as many the larger ones; the rest have no times."""
    other = write_mlp(tmp_path / "m.onnx", [8, 8, 4], batch=8)
    module = before_partition(ps.from_onnx(other), Cluster((DEVICE,)), TRAINING)
    for modules, kept, left in (
        ({4: gpt[4], 8: module}, (8,), (4,)),
        ({**gpt, 8: module}, (2, 4), (8,)),
        (gpt, (2, 4), ()),
    ):
        found = profile_chain(modules, DEVICE)
        assert (found.chain.sizes, found.left_out) == (kept, left)
        alone = profile_chain({b: modules[b] for b in kept}, DEVICE)
        assert found.starts == alone.starts
        assert found.chain.layers == alone.chain.layers
        for b in left:
            with pytest.raises(UsageError, match=f"microbatches of {b} samples were not profiled"):
                found.chain.timer(found.chain, DEVICE, b)
