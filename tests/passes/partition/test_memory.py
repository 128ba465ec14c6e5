"""Cuts that fit: against brute force over all cuts with memory counted by other code; and plans that fit only because the cuts know of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.drawn_chains import bottleneck, chain_model, differentiate, models, stages_of

from penstock.ir.cluster.cluster import Cluster, Device, Link
from penstock.ir.graph import Module, Op
from penstock.ir.memory.predict import measure_memory
from penstock.passes.costs.prices import op_seconds
from penstock.passes.manager import Call, run_passes
from penstock.passes.partition.partition import PartitionOptions, partition
from penstock.passes.pipelines import PASSES, PipelineOptions, training_pipeline
from penstock.support.errors import DoesNotFit

MICROBATCHES = 2


def cluster_of(memory: list[int | None], rates: list[float]) -> Cluster:
    devices = tuple(
        Device(f"cpu:{i}", flops=rate, bandwidth=1e9, spaces=() if m is None else (("ram", m),))
        for i, (m, rate) in enumerate(zip(memory, rates, strict=True))
    )
    return Cluster(devices, tuple(Link(a.name, b.name, bandwidth=1e8, latency=1e-6) for a, b in pairwise(devices)))


def chain_in(module: Module) -> list[Op]:
    return [op for op in module.graphs["F"].ops if op.kind != "read"]


def in_flight(schedule: str, stage: int, stages: int) -> int:
    """By the table in docs/schedules.md."""
    return {"1f1b": min(stages - stage, MICROBATCHES), "gpipe": MICROBATCHES, "2bw": stages - stage}[schedule]


def needed(module: Module, mine: list[Op], schedule: str, flight: int) -> tuple[float, float]:
    """Bytes of a stage as it is, and if it computes its forward again: sums over what the docstring of partition_memory.py names."""
    forward, names = module.graphs["F"], {v.name for op in mine for v in op.outs}
    reads = {op.outs[0]: op.var for op in forward.ops if op.kind == "read"}
    versions = 2 if schedule == "2bw" else 1
    fixed = 0
    for name in {reads[v] for op in mine for v in op.ins if v in reads}:
        own = [var for var in module.vars.values() if var.name == name or var.name.startswith(f"{name}.")]
        fixed += sum(var.type.nbytes * (versions if var.role == "param" else 1) for var in own)
    chained = {v for op in chain_in(module) for v in op.outs}
    inputs = set(module.data_inputs)
    backward = [op for op in module.graphs["B"].ops if str(op.attrs.get("of")) in names]
    saved = sum(v.type.nbytes for v in {v for op in backward for v in op.ins if v in chained | inputs})
    fed = sum(v.type.nbytes for v in {v for op in mine for v in op.ins if v in inputs})
    own_values = {v for op in mine for v in op.outs}
    comes = sum(v.type.nbytes for v in {v for op in mine for v in op.ins if v in chained} - own_values)
    others = {v for op in chain_in(module) if op not in mine for v in op.ins}
    leaves = sum(v.type.nbytes for v in own_values & others)
    largest = max(sum(v.type.nbytes for v in op.outs) for op in mine)
    rest = fixed + fed * 5 * MICROBATCHES + 3 * (comes + leaves) + 2 * largest
    return rest + saved * flight, rest + saved + (comes + fed) * flight


def values(module: Module, stages: int, schedule: str, recompute: str) -> Iterator[tuple[float, tuple[int, ...]]]:
    """The slowest stage of every choice of cuts, with what memory costs it."""
    assert module.cluster is not None
    chain = chain_in(module)
    spent = [op_seconds(module.graphs["F"], device) for device in module.cluster.devices]
    at = {op.outs[0].name: i for i, op in enumerate(module.graphs["F"].ops)}
    for cuts in combinations(range(1, len(chain)), stages - 1):
        extra = []
        for s, (a, b) in enumerate(pairwise([0, *cuts, len(chain)])):
            limit = module.cluster.devices[s].memory
            plain, again = needed(module, chain[a:b], schedule, in_flight(schedule, s, stages))
            forward = sum(spent[s][at[op.outs[0].name]] for op in chain[a:b])
            fits = limit is None or (plain <= limit and recompute != "all")
            extra.append(
                0.0
                if fits
                else forward
                if recompute != "none" and limit is not None and again <= limit
                else float("inf")
            )
        yield bottleneck(module, cuts, extra, MICROBATCHES), cuts


@given(
    models,
    st.lists(
        st.tuples(st.sampled_from([None, 4_000, 12_000, 40_000]), st.sampled_from([1e7, 3e7])), min_size=2, max_size=3
    ),
    st.sampled_from(["1f1b", "gpipe", "2bw"]),
    st.sampled_from(["auto", "none", "all"]),
)
@settings(max_examples=30, deadline=None)
def test_cuts_are_the_best_that_fit(
    model: Module, devices: list[tuple[int | None, float]], schedule: str, recompute: str
) -> None:
    module = differentiate(model).but(cluster=cluster_of(*map(list, zip(*devices, strict=True))))  # type: ignore[arg-type]
    options = PartitionOptions(microbatches=MICROBATCHES, schedule=schedule, recompute=recompute)
    found = stages_of(partition(module, options), "F")
    order = [found[op.outs[0].name] for op in chain_in(module)]
    tried = {cuts: value for value, cuts in values(module, len(devices), schedule, recompute)}
    best = min(tried.values())
    cuts = tuple(order.index(s) for s in range(1, len(devices)))
    if best == float("inf"):
        # Nothing fits: the fastest cuts, and the end says what is missing.
        best = min(bottleneck(module, c, (), MICROBATCHES) for c in tried)
        assert bottleneck(module, cuts, (), MICROBATCHES) == pytest.approx(best, rel=1e-9)
    else:
        assert tried[cuts] == pytest.approx(best, rel=1e-9)


def test_a_limit_moves_the_cut_and_nothing_else_does() -> None:
    """Equal devices, of which the first has little memory: it gets less, whatever the schedule. Without a limit, or a schedule, cuts are as before."""
    plain = differentiate(chain_model([32] * 9, [])).but(cluster=cluster_of([None, None], [1e7, 1e7]))
    tight = plain.but(cluster=cluster_of([48_000, None], [1e7, 1e7]))

    def on_first(module: Module, schedule: str) -> int:
        found = stages_of(partition(module, PartitionOptions(microbatches=MICROBATCHES, schedule=schedule)), "F")
        return [found[f"h{i}"] for i in range(8)].count(0)

    free = on_first(plain, "")
    assert on_first(plain, "2bw") == on_first(tight, "") == free
    assert on_first(tight, "1f1b") < free
    assert on_first(tight, "2bw") < on_first(tight, "1f1b"), "two versions of the weights"
    notes = [note.text for note in partition(tight, PartitionOptions(microbatches=MICROBATCHES, schedule="2bw")).notes]
    assert any(text.startswith("cut so that stages fit into memory: the slowest takes ") for text in notes)


def calls(schedule: str, knows: bool) -> list[Call]:
    found = training_pipeline(
        {"kind": "adamw", "lr": 0.1}, {"stages": 2}, PipelineOptions(schedule=schedule, microbatches=MICROBATCHES)
    )
    return [c if knows or c.name != "partition" else replace(c, options=replace(c.options, schedule="")) for c in found]


@pytest.mark.parametrize("schedule", ["1f1b", "2bw", "gpipe"])
def test_plans_fit_because_the_cuts_know(schedule: str) -> None:
    """The control: by the same passes, with a partition that does not look at memory, the plan is refused at the end."""
    model = chain_model([32] * 9, [])
    free = run_passes(model.but(cluster=cluster_of([None, None], [1e7, 1e7])), calls(schedule, True), PASSES)
    peak = measure_memory(free)[0].peak
    tight = model.but(cluster=cluster_of([int(0.75 * peak), None], [1e7, 1e7]))
    with pytest.raises(DoesNotFit):
        run_passes(tight, calls(schedule, False), PASSES)
    found = run_passes(tight, calls(schedule, True), PASSES)
    assert measure_memory(found)[0].peak <= 0.75 * peak
