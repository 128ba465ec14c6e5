"""Cuts where messages travel during computations: against brute force by formula, and against all cuts by simulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.drawn_chains import differentiate, models

import penstock as ps
from penstock.frontends.training import Training
from penstock.ir.cluster.cluster import Cluster, Device, Link
from penstock.ir.graph import Module
from penstock.models import write_bert, write_cnn, write_gpt, write_mlp
from penstock.passes.partition import partition as partition_pass
from penstock.passes.partition.chain import chain_of, names_to_split_at
from penstock.passes.partition.chain_costs import ChainCosts
from penstock.passes.partition.cuts import CutSearch, by_operation
from penstock.planning.predict import predict


def cluster_of(rates: Sequence[float], bandwidth: float, latency: float) -> Cluster:
    devices = tuple(Device(f"cpu:{i}", host=f"h{i}", flops=rate, bandwidth=1e9) for i, rate in enumerate(rates))
    links = tuple(Link(a.name, b.name, bandwidth=bandwidth, latency=latency) for a, b in pairwise(devices))
    return Cluster(devices, links)


def formula(costs: ChainCosts, cuts: Sequence[int], eagerness: int) -> float:
    """The time of a microbatch as docs/planner.md has it, from the tables of costs alone."""
    ends = [*cuts, len(costs.chain)]
    x = [costs.steady[s][b] - costs.steady[s][a] for s, (a, b) in enumerate(pairwise(ends))]
    c = [costs.transfer[s][cut] if s else 0.0 for s, cut in enumerate(cuts)]
    trips = [
        (sum(x[p : q + 1]) + sum(c[p + 1 : q + 1])) / (1 + eagerness * (q - p))
        for p, q in combinations(range(len(cuts)), 2)
    ]
    return max(*x, *(costs.loads[s][cut] for s, cut in enumerate(cuts) if s), *trips)


@given(
    models,
    st.lists(st.sampled_from([1e7, 3e7, 1e9]), min_size=2, max_size=4),
    st.sampled_from([1e5, 1e7, 1e9]),
    st.sampled_from([0.0, 1e-5, 1e-3]),
    st.sampled_from([1, 2]),
)
@settings(max_examples=30, deadline=None)
def test_round_trips_are_least(
    model: Module, rates: list[float], bandwidth: float, latency: float, eagerness: int
) -> None:
    cluster = cluster_of(rates, bandwidth, latency)
    module = differentiate(model).but(cluster=cluster)
    chain, count = chain_of(module), len(rates)
    costs = ChainCosts([module] * count, [[device] for device in cluster.devices], [[4]] * count, cluster, "f32")
    search = CutSearch(costs, count, eagerness=eagerness)
    cuts = search.best()
    best = min(formula(costs, (0, *rest), eagerness) for rest in combinations(range(1, len(chain)), count - 1))
    assert formula(costs, cuts, eagerness) == pytest.approx(search.step(by_operation(cuts, len(chain))))
    assert formula(costs, cuts, eagerness) <= best * 1.0011


MODELS = {
    "mlp": lambda path: write_mlp(path, [512, 1024, 256, 1024, 512, 64], 8),
    "wide": lambda path: write_mlp(path, [64, 2048, 64, 2048, 64, 2048, 64], 32),
    "cnn": lambda path: write_cnn(path, 2, size=24),
    "bert": lambda path: write_bert(path, layers=2, width=64, heads=4, vocab=400, positions=32, batch=2),
    "gpt": lambda path: write_gpt(path, layers=6, width=256, heads=4, vocab=256, positions=64, batch=2),
}
LINKS = [*product((0.0, 1e-3, 2e-2, 5e-2), (1.25e6, 1.25e7, 1.25e8, 1.25e9))]


def near_the_best(name: str, schedule: str, links: Sequence[tuple[float, float]], every: int, folder) -> list[float]:
    """The predicted time of the chosen cut, as a part of that of the best of all cuts, for each link."""
    MODELS[name](folder / "model.onnx")
    model, training = ps.from_onnx(folder / "model.onnx"), Training(loss="cross_entropy", microbatches=4)
    standard = [Device(f"cpu:{i}").flops for i in range(2)]
    first = cluster_of(standard, *links[0][::-1])
    plan = ps.plan(model, first, training, schedule=schedule)
    names = names_to_split_at(chain_of(plan.reference))
    cut = [ps.plan(model, first, training, schedule=schedule, split_at=[at]).module for at in names[1::every]]
    parts = []
    for latency, bandwidth in links:
        cluster = cluster_of(standard, bandwidth, latency)
        chosen = predict(ps.plan(model, cluster, training, schedule=schedule).module).step
        parts.append(chosen / min(predict(module.but(cluster=cluster)).step for module in cut))
    return parts


@pytest.mark.parametrize("schedule", ["1f1b", "2bw", "eager-2bw"])
def test_the_chosen_cut_is_near_the_best_of_all(schedule: str, tmp_path) -> None:
    parts = near_the_best("mlp", schedule, LINKS[::2], 1, tmp_path)
    assert max(parts) <= 1.03


def without_trips(monkeypatch) -> None:
    """Cut as for a pipeline that drains, without simulations: latency counts as load."""
    monkeypatch.setattr(partition_pass, "CutSearch", lambda *options: replace(CutSearch(*options), eagerness=0))
    monkeypatch.setattr(partition_pass, "refined", lambda search, stages, *rest: stages)


def test_the_demo_waits_for_no_slow_link(monkeypatch, tmp_path) -> None:
    """The demo's GPT on two hosts, 1 Gbit/s and 20 ms apart: 206 ms a batch at most, and 1.2 times that by the control."""
    model = ps.from_onnx(MODELS["gpt"](tmp_path / "model.onnx"))
    devices = (Device("cpu:0", host="h0"), Device("cpu:1", host="h1"))
    cluster = Cluster(devices, (Link("cpu:0", "cpu:1", bandwidth=1.25e8, latency=2e-2),))
    training = Training(loss="cross_entropy", optimizer=ps.AdamW(lr=1e-3), microbatches=4)

    def step() -> float:
        return predict(ps.plan(model, cluster, training, schedule="eager-2bw").module).step

    assert step() <= 0.206
    without_trips(monkeypatch)
    assert step() > 1.2 * 0.206


def test_counting_latency_as_load_is_not(monkeypatch, tmp_path) -> None:
    """The control: the sums of a pipeline that drains, without simulations."""
    without_trips(monkeypatch)
    assert max(near_the_best("gpt", "eager-2bw", [(2e-2, 1.25e8)], 8, tmp_path)) > 1.2


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "2bw", "eager-2bw"])
@pytest.mark.parametrize("name", MODELS)
def test_all_links(name: str, schedule: str, tmp_path) -> None:
    parts = near_the_best(name, schedule, LINKS, 1 if name != "gpt" else 4, tmp_path)
    assert max(parts) <= 1.055
    assert sum(part > 1.03 for part in parts) <= 2
