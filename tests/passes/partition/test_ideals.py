"""Stages that need not follow the order of the graph: against every assignment that depends forward only, never worse than ranges, and with the same meaning."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest

from penstock.ir.cluster.cluster import Cluster, Device, Link
from penstock.ir.graph import Graph, Module, Op, Value, Var
from penstock.ir.ops import make
from penstock.ir.types import TensorType
from penstock.passes.costs.prices import op_seconds
from penstock.passes.partition import ideals as partition_ideals
from penstock.passes.partition import partition as partition_pass
from penstock.passes.partition.chain import chain_of
from penstock.passes.partition.partition import PartitionOptions, partition
from penstock.passes.pipelines import PipelineOptions, training_pipeline
from penstock.passes.training.autodiff import AutodiffOptions, autodiff

from .trained_both_ways import train

WIDTH = 16


def drawn_model(seed: int, count: int = 7) -> Module:
    """Products with weights (some tied), relus and sums over anything made before, in a random order of making; what is left over is summed."""
    rng = random.Random(seed)
    kind = TensorType("f32", (4, WIDTH))
    x, labels = Value("x", kind), Value("labels", kind)
    made, unused = [x], {x}
    ops: list[Op] = []
    vars: dict[str, Var] = {}

    def add(op: Op, *used: Value) -> None:
        ops.append(op)
        made.append(op.outs[0])
        unused.difference_update(used)
        unused.add(op.outs[0])

    for i in range(count):
        source = rng.choice(made[-3:])
        what = rng.choice(("matmul", "matmul", "relu", "add"))
        if what == "matmul":
            name = rng.choice((f"w{i}", "shared"))
            weight = Value(f"w{i}.value", TensorType("f32", (WIDTH, WIDTH)))
            vars[name] = Var(name, weight.type, "param")
            ops.append(Op("read", (), (weight,), {"var": name}))
            add(make("matmul", (source, weight), [f"v{i}"]), source)
        elif what == "add":
            other = rng.choice(made)
            add(make("add", (source, other), [f"v{i}"]), source, other)
        else:
            add(make("relu", (source,), [f"v{i}"]), source)
    while len(unused) > 1:
        a, b = sorted(unused, key=lambda v: v.name)[:2]
        add(make("add", (a, b), [f"v{len(ops)}"]), a, b)
    (last,) = unused
    ops.append(make("mse", (last, labels), ["loss"]))
    return Module(
        "drawn",
        (x, labels),
        ("loss",),
        vars=vars,
        graphs={"main": Graph("main", (x, labels), ops[-1].outs, tuple(ops))},
    )


def branches(length: int = 4) -> Module:
    """Two branches of products whose operations take turns in the order of the graph, summed at the end."""
    kind = TensorType("f32", (4, WIDTH))
    x, labels = Value("x", kind), Value("labels", kind)
    ops: list[Op] = []
    vars: dict[str, Var] = {}
    ends = {"a": x, "b": x}
    for i in range(length):
        for name in ends:
            weight = Value(f"{name}{i}.value", TensorType("f32", (WIDTH, WIDTH)))
            vars[f"{name}{i}.w"] = Var(f"{name}{i}.w", weight.type, "param")
            ops.append(Op("read", (), (weight,), {"var": f"{name}{i}.w"}))
            ops.append(make("matmul", (ends[name], weight), [f"{name}{i}"]))
            ends[name] = ops[-1].outs[0]
    ops.append(make("add", tuple(ends.values()), ["sum"]))
    ops.append(make("mse", (ops[-1].outs[0], labels), ["loss"]))
    return Module(
        "branches",
        (x, labels),
        ("loss",),
        vars=vars,
        graphs={"main": Graph("main", (x, labels), ops[-1].outs, tuple(ops))},
    )


def cluster_of(rates: list[float], bandwidth: float = 1e8) -> Cluster:
    devices = tuple(Device(f"cpu:{i}", flops=rate, bandwidth=1e9) for i, rate in enumerate(rates))
    return Cluster(
        devices, tuple(Link(a.name, b.name, bandwidth=bandwidth, latency=1e-6) for a, b in pairwise(devices))
    )


class Slow:
    """The objective from the annotated graphs, for any assignment: no ideals, no tables."""

    def __init__(self, module: Module) -> None:
        assert module.cluster is not None
        self.module, self.chain = module, chain_of(module)
        names = [op.outs[0].name for op in self.chain]
        self.seconds = []
        for device in module.cluster.devices:
            spent = dict.fromkeys(names, 0.0)
            for graph in ("F", "B"):
                for op, time in zip(module.graphs[graph].ops, op_seconds(module.graphs[graph], device), strict=True):
                    owner = str(op.attrs.get("of")) if graph == "B" else op.outs[0].name if op.outs else ""
                    if owner in spent:
                        spent[owner] += time
            self.seconds.append([spent[name] for name in names])
        self.readers = {op.outs[0]: op.var for op in module.graphs["F"].ops if op.kind == "read"}
        self.edges = [
            (i, j) for i, a in enumerate(self.chain) for j, b in enumerate(self.chain) if set(a.outs) & set(b.ins)
        ]

    def value(self, stages: tuple[int, ...]) -> float:
        cluster = self.module.cluster
        assert cluster is not None
        worst = 0.0
        for s, device in enumerate(cluster.devices):
            load = sum(self.seconds[s][i] for i, stage in enumerate(stages) if stage == s)
            early = [op for op, stage in zip(self.chain, stages, strict=True) if stage < s]
            late = [op for op, stage in zip(self.chain, stages, strict=True) if stage >= s]
            used_early, used_late = ({v for op in ops for v in op.ins} for ops in (early, late))
            moved = sum(v.type.nbytes for v in {v for op in early for v in op.outs} & used_late)
            parted = {self.readers[v] for v in used_early & self.readers.keys()} & {
                self.readers[v] for v in used_late & self.readers.keys()
            }
            moved += sum(self.module.vars[name].type.nbytes for name in parted)
            if s and moved:
                link = cluster.link(cluster.devices[s - 1].name, device.name)
                load += 2 * moved / link.bandwidth + 2 * link.latency
            worst = max(worst, load)
        return worst

    def best(self) -> float:
        count = len(self.module.cluster.devices) if self.module.cluster else 0
        tried = (s for s in product(range(count), repeat=len(self.chain)) if len(set(s)) == count)
        return min(self.value(s) for s in tried if all(s[a] <= s[b] for a, b in self.edges))


def stages_in(module: Module) -> tuple[int, ...]:
    return tuple(int(op.attrs["stage"]) for op in module.graphs["F"].ops if "stage" in op.attrs)  # type: ignore[arg-type]


def prepared(model: Module, cluster: Cluster) -> Module:
    return autodiff(model, AutodiffOptions(2)).but(cluster=cluster)


def test_stages_are_the_best_of_all_that_depend_forward_only(monkeypatch: pytest.MonkeyPatch) -> None:
    better = 0
    for seed in range(24):
        rng = random.Random(seed)
        rates = [rng.choice((1e7, 3e7)) for _ in range(2 if seed % 3 else 3)]
        module = prepared(drawn_model(seed, 6), cluster_of(rates, rng.choice((1e6, 1e7, 1e8))))
        slow, options = Slow(module), PartitionOptions(microbatches=1)
        found = slow.value(stages_in(partition(module, options)))
        assert found == pytest.approx(slow.best(), rel=1e-9)
        with monkeypatch.context() as patch:
            patch.setattr(partition_pass, "better_stages", lambda *_: None)
            ranges = slow.value(stages_in(partition(module, options)))
        assert found <= ranges * (1 + 1e-9)
        better += found < ranges * (1 - 1e-6)
    assert better >= 3, "the control: ranges alone are not as good"


def test_branches_that_take_turns_are_not_cut_across() -> None:
    """A range would send both branches over the link, and so does any set but whole branches."""
    whole = partition(prepared(branches(), cluster_of([1e6, 1e6], 1e6)), PartitionOptions())
    stage_of = {v.name: op.attrs["stage"] for op in whole.graphs["F"].ops if "stage" in op.attrs for v in op.outs}
    assert len({stage_of[f"a{i}"] for i in range(4)}) == len({stage_of[f"b{i}"] for i in range(4)}) == 1
    assert stage_of["a0"] != stage_of["b0"]
    # Every variable is where its branch is, and the notes say what the stages are.
    assert all(whole.vars[f"{branch}{i}.w"].stage == stage_of[f"{branch}0"] for branch in "ab" for i in range(4))
    assert "4 of 10 operations" in whole.notes[-2].text


@pytest.mark.parametrize(("schedule", "delay"), [("1f1b", 0), ("2bw", 1)])
def test_training_means_the_same(schedule: str, delay: int) -> None:
    """The whole pipeline, verified after every pass, on stages that are no ranges."""
    model = branches().but(cluster=cluster_of([1e6, 1e6], 1e6))
    calls = training_pipeline(
        {"kind": "momentum", "lr": 0.1}, {"stages": 2}, PipelineOptions(schedule=schedule, microbatches=2)
    )
    trained = train(model, calls, seed=0, samples=8, batches=3)
    homes = {
        branch: {v.stage for name, v in trained.module.vars.items() if name[0] == branch and v.role == "param"}
        for branch in "ab"
    }
    assert sorted(map(sorted, homes.values())) == [[0], [1]]
    np.testing.assert_allclose(trained.found.losses, trained.expected(delay).losses, rtol=1e-12)


def test_what_touches_a_variable_that_the_graph_changes_stays_together() -> None:
    seconds = [np.ones(6), np.ones(6)]
    edges = [(0, 1), (1, 2), (3, 4), (4, 5)]
    values = [(frozenset(edge), 1.0) for edge in edges]
    work = partition_ideals.OperationWork(seconds, edges, [[0, 5]], values, lambda stage, count: count / 100)
    stages = partition_ideals.better_stages(work, [0, 3], 10.0)
    assert stages is not None
    assert stages[0] == stages[5]
    assert sorted((stages.count(0), stages.count(1))) == [2, 4]
    free = partition_ideals.better_stages(replace(work, together=[]), [0, 3], 10.0)
    assert free is not None
    assert free.count(0) == 3, "the control: without it the halves are equal"


def test_too_many_ideals_are_clustered_and_never_worse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition_ideals, "LIMIT", 8)
    for seed in range(12):
        module = prepared(drawn_model(seed, 9), cluster_of([1e7, 1e7], 1e7))
        slow = Slow(module)
        found = slow.value(stages_in(partition(module, PartitionOptions())))
        with monkeypatch.context() as patch:
            patch.setattr(partition_pass, "better_stages", lambda *_: None)
            assert found <= slow.value(stages_in(partition(module, PartitionOptions()))) * (1 + 1e-9)
