"""Cuts against brute force; every annotated operation in exactly one stage; tied parameters have copies that stay equal."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.drawn_chains import bottleneck, chain_model, differentiate, models, stages_of

from penstock.ir.cluster.cluster import Cluster, Device, Link
from penstock.ir.graph import Module
from penstock.ir.interpreter.graphs import run_graph
from penstock.ir.interpreter.schedules import _Pipeline
from penstock.ir.interpreter.store import DictStore
from penstock.passes.partition.partition import PartitionOptions, partition
from penstock.passes.partition.split import SplitOptions, split
from penstock.passes.pipelines import PipelineOptions, training_pipeline
from penstock.passes.training.shared_gradients import apart
from penstock.support.errors import UsageError

from .trained_both_ways import train


def cluster_of(rates: list[float], bandwidth: float = 1e8) -> Cluster:
    devices = tuple(Device(f"cpu:{i}", flops=rate, bandwidth=1e9) for i, rate in enumerate(rates))
    links = tuple(Link(a.name, b.name, bandwidth=bandwidth, latency=1e-6) for a, b in pairwise(devices))
    return Cluster(devices, links)


rates = st.lists(st.sampled_from([1e7, 3e7, 1e9]), min_size=1, max_size=4)


@given(models, rates)
@settings(max_examples=20, deadline=None)
def test_cuts_are_optimal(model: Module, speeds: list[float]) -> None:
    module = differentiate(model).but(cluster=cluster_of(speeds))
    chain = [op for op in module.graphs["F"].ops if op.kind != "read"]
    found = stages_of(partition(module, PartitionOptions()), "F")
    order = [found[op.outs[0].name] for op in chain]
    assert order == sorted(order)
    assert set(order) == set(range(len(speeds)))
    cuts = tuple(order.index(s) for s in range(1, len(speeds)))
    best = min(bottleneck(module, c) for c in combinations(range(1, len(chain)), len(speeds) - 1))
    assert bottleneck(module, cuts) == pytest.approx(best, rel=1e-9)


untied = st.builds(
    chain_model,
    st.lists(st.sampled_from([3, 8, 32, 128]), min_size=3, max_size=7),
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 5)), max_size=3),
)


@given(untied, rates, st.sampled_from([1e6, 1e8]))
@settings(max_examples=30, deadline=None)
def test_half_of_the_bytes_are_links_of_twice_the_bandwidth(
    model: Module, speeds: list[float], bandwidth: float
) -> None:
    module = differentiate(model)
    short = partition(module.but(cluster=cluster_of(speeds, bandwidth)), PartitionOptions(wire="bf16"))
    fast = partition(module.but(cluster=cluster_of(speeds, 2 * bandwidth)), PartitionOptions())
    assert stages_of(short, "F") == stages_of(fast, "F")


def test_where_to_cut_depends_on_what_travels() -> None:
    """Control: the cut that shares the work out best is worth its bytes only if they are half as many."""
    module = differentiate(chain_model([32, 16, 16, 16, 16], [])).but(cluster=cluster_of([1e8, 1e8], 1e6))
    found = {wire: stages_of(partition(module, PartitionOptions(wire=wire)), "F") for wire in ("f32", "bf16")}
    assert found["f32"] != found["bf16"]


def test_the_brute_force_would_notice_a_bad_cut() -> None:
    module = differentiate(chain_model([32] * 6, [])).but(cluster=cluster_of([1e7, 1e7]))
    chain = [op for op in module.graphs["F"].ops if op.kind != "read"]
    values = [bottleneck(module, (cut,)) for cut in range(1, len(chain))]
    assert max(values) > 1.5 * min(values)


@given(models, st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_splitting_conserves_operations_and_meaning(model: Module, count: int) -> None:
    whole = partition(differentiate(model), PartitionOptions(stages=count))
    parts = split(whole, SplitOptions())
    # Sums of gradients over stages are taken apart; what is left is summed once per batch.
    whole = whole.with_graph(apart(whole.graphs["B"], [name for name, var in whole.vars.items() if var.stage is None]))
    for kind in "FB":
        expected = sorted(repr(op.outs) + op.kind for op in whole.graphs[kind].ops if "stage" in op.attrs)
        copied = {v for op in whole.graphs[kind].ops if "stage" not in op.attrs for v in op.outs}
        found = [op for s in range(count) for op in parts.graphs[f"s{s}.{kind}"].ops]
        assert sorted(repr(op.outs) + op.kind for op in found if not copied.issuperset(op.outs or ("",))) == expected
    updated = [op.var for s in range(count) for op in parts.graphs[f"s{s}.U"].ops if op.kind == "write"]
    assert {*updated} == {op.var for op in whole.graphs["U"].ops if op.kind == "write"}
    assert all(
        updated.count(name) == 1 for name, var in whole.vars.items() if var.role == "param" and var.stage is not None
    )
    rng = np.random.default_rng(0)
    arrays = {
        n: rng.standard_normal(v.type.shape).astype(np.float32)
        if v.init == "file"
        else np.zeros(v.type.shape, np.float32)
        for n, v in whole.vars.items()
    }
    values = {v.name: rng.standard_normal(v.type.shape).astype(np.float32) for v in whole.inputs}
    one, several = DictStore(arrays), DictStore(arrays)
    expected_values = dict(values)
    for graph in (whole.graphs["F"], whole.graphs["B"]):
        expected_values |= zip((v.name for v in graph.results), run_graph(graph, expected_values, one), strict=True)
    for name in [f"s{s}.F" for s in range(count)] + [f"s{s}.B" for s in reversed(range(count))]:
        graph = parts.graphs[name]
        values |= zip((v.name for v in graph.results), run_graph(graph, values, several), strict=True)
    assert values["loss"] == expected_values["loss"]
    for name, array in one.arrays.items():
        np.testing.assert_allclose(
            several.arrays[name], array, rtol=1e-5 if whole.vars[name].stage is None else 0, atol=1e-6
        )


def test_stages_that_read_one_parameter_have_copies_and_exchange_gradients() -> None:
    module = differentiate(chain_model([8, 16, 16, 16, 16, 8], [], tied=True))
    whole = partition(module, PartitionOptions(split_at=("layer2", "layer4")))
    assert (
        whole.vars["shared16"].stage is whole.vars["shared16.grad"].stage is whole.vars["shared16.adam_m"].stage is None
    )
    told = "@shared16 is read on stages 0, 1: each has a copy of its 1.0 KiB, and they exchange gradients of that size once per batch"
    assert any(told in note.text for note in whole.notes)
    graphs = split(whole, SplitOptions()).graphs
    reads = {name for name, g in graphs.items() if any(op.kind == "read" and op.var == "shared16" for op in g.ops)}
    assert reads == {f"s{s}.{kind}" for s in range(2) for kind in "FBU"}
    # Nothing but activations and their gradients travels with a microbatch.
    assert {v.name for g in graphs.values() for v in g.outs if g.name[-1] in "FB"} == {
        "a1",
        "a3",
        "a1.grad",
        "a3.grad",
        "loss",
    }
    parts = [v.name for s in range(2) for v in graphs[f"s{s}.P"].outs]
    assert parts == ["shared16.grad.s0", "shared16.grad.s1"]
    assert all({v.name for v in graphs[f"s{s}.U"].ins} == set(parts) for s in range(2))
    assert "s2.P" not in graphs
    # Where moving it takes longer than the work that parting it would share out, its operations stay together.
    slow = Cluster((Device("cpu:0"), Device("cpu:1")), (Link("cpu:0", "cpu:1", bandwidth=1e3),))
    found = stages_of(partition(module.but(cluster=slow), PartitionOptions(stages=2)), "F")
    assert len({found[f"h{i}"] for i in (1, 2, 3)}) == 1


@pytest.mark.parametrize(("schedule", "delay"), [("1f1b", 0), ("gpipe", 0), ("2bw", 1)])
def test_tied_parameters_train_as_one(monkeypatch: pytest.MonkeyPatch, schedule: str, delay: int) -> None:
    model = chain_model([8, 16, 16, 16, 16, 8], [(1, 3)], tied=True)
    calls = training_pipeline(
        {"kind": "momentum", "lr": 0.2},
        {"split_at": ("layer2", "layer4")},
        PipelineOptions(schedule=schedule, microbatches=3),
    )
    pipelines: list[_Pipeline] = []
    monkeypatch.setattr(_Pipeline, "run", lambda self, run=_Pipeline.run: (pipelines.append(self), run(self))[1])
    trained = train(model, calls, seed=5, samples=12, batches=4)
    module, found, expected = trained.module, trained.found, trained.expected(delay)
    assert any("@shared16 is read on stages 0, 1" in note.text for note in module.notes)
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-12)
    np.testing.assert_allclose(found.variables["shared16"], expected.variables["shared16"], rtol=1e-12)
    stores = [store for rank in pipelines[0].ranks.values() for store in rank.stores.values()]
    copies = [store.latest("shared16") for store in stores if "shared16" in store.slots]
    assert len(copies) == 2
    np.testing.assert_array_equal(*copies)
    # Parts are handed out at once; what waits for those of the others is summed apart from the next batch.
    assert module.vars["shared16.grad"].versions == 1
    others = {var.versions for var in module.vars.values() if var.role == "grad" and var.name != "shared16.grad"}
    assert others == ({1, 2} if delay else {1})
    control = trained.expected(1 - delay)
    assert not np.allclose(found.losses, control.losses, rtol=1e-6)


def test_state_follows_its_parameter_and_the_step_counter_is_everywhere() -> None:
    whole = partition(differentiate(chain_model([8] * 5, [])), PartitionOptions(split_at=("layer2",)))
    for name, var in whole.vars.items():
        if var.role == "param":
            for state in (f"{name}.grad", f"{name}.adam_m", f"{name}.adam_v"):
                assert whole.vars[state].stage == var.stage
    assert whole.vars["step"].stage is None
    parts = split(whole, SplitOptions())
    for stage in range(2):
        assert any(op.kind == "write" and op.var == "step" for op in parts.graphs[f"s{stage}.U"].ops)


def test_given_split_points_win() -> None:
    module = differentiate(chain_model([8] * 5, []))
    found = stages_of(partition(module, PartitionOptions(split_at=("layer1", "a2"))), "F")
    assert [found[n] for n in ("h0", "a0", "h1", "a1", "h2", "a2", "h3")] == [0, 0, 1, 1, 1, 2, 2]
    with pytest.raises(UsageError, match="no value, node or module named 'nowhere'"):
        partition(module, PartitionOptions(split_at=("nowhere",)))


def test_split_points_that_cannot_be_are_explained() -> None:
    module = differentiate(chain_model([8, 16, 16, 16, 8], [], tied=True))
    with pytest.raises(UsageError) as caught:
        partition(module, PartitionOptions(split_at=("layer0", "a1", "a1", "layer3", "h3")))
    message = str(caught.value)
    assert "'layer0' names the same operation as the first operation of the model" in message
    assert "'h3' names the same operation as 'layer3'" in message
    assert "'a1' is given twice" in message


def test_slow_devices_get_less() -> None:
    module = differentiate(chain_model([32] * 9, [])).but(cluster=cluster_of([1e7, 4e7]))
    found = list(stages_of(partition(module, PartitionOptions()), "F").values())
    assert found.count(1) > 2 * found.count(0)


@pytest.mark.parametrize(("stages", "message"), [(3, "need 3 devices"), (40, "need 40 devices")])
def test_more_stages_than_devices_is_an_error(stages: int, message: str) -> None:
    module = differentiate(chain_model([8] * 5, [])).but(cluster=cluster_of([1e9, 1e9]))
    with pytest.raises(UsageError, match=message):
        partition(module, PartitionOptions(stages=stages))
