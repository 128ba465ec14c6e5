"""Tests of the model of a cache, against a list of all accesses, searched by brute force."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.oracles.drawn_chains import chain_model

from penstock.ir.cluster.cluster import Cluster, Device
from penstock.ir.graph import Graph, Module, Value
from penstock.ir.ops import make
from penstock.ir.types import TensorType
from penstock.passes.costs.cache_reach import bytes_near
from penstock.passes.costs.prices import GraphCost, rank_seconds
from penstock.passes.kernels.divide import Kernel, bytes_moved
from penstock.passes.manager import run_passes
from penstock.passes.pipelines import PASSES, PipelineOptions, training_pipeline

SIZE = 256  # bytes of every value


def chain(picks: list[int]) -> Graph:
    """Operations of their own kernels: each adds the last value and an earlier one."""
    kind = TensorType("f32", (SIZE // 4,))
    values = [Value("x", kind)]
    ops = []
    for i, pick in enumerate(picks):
        op = make("add", (values[-1], values[pick % len(values)]), [f"y{i}"], "", kernel=f"k{i}")
        ops.append(op)
        values += op.outs
    return Graph("g", (values[0],), (values[-1],), tuple(ops))


def brute(kernels: list[Kernel], cache: int, between: float) -> list[float]:
    """Four rounds written out; those of the second are counted, by looking back (reads) or ahead (writes) one touch after the other."""
    log: list[tuple[int, int, object, float, bool]] = []
    for turn in range(4):
        log += [(turn, i, t.place, t.bytes, t.written) for i, kernel in enumerate(kernels) for t in kernel.touches]
        log.append((turn, -1, f"others {turn}", between, False))
    near = [0.0] * len(kernels)
    for here, (turn, i, place, count, written) in enumerate(log):
        if turn != 1 or i < 0:
            continue
        around = range(here + 1, len(log)) if written else range(here - 1, -1, -1)
        passed = 0.0
        for there in around:
            if log[there][2] == place:
                near[i] += count if passed <= cache else 0.0
                break
            passed += log[there][3]
    return near


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(0, 12), st.sampled_from([0.0, 300.0, 5000.0]))
@settings(max_examples=100, deadline=None)
def test_what_is_near_is_what_was_touched_not_long_ago(picks: list[int], cached: int, between: float) -> None:
    kernels = GraphCost(chain(picks)).kernels
    assert bytes_near(kernels, cached * SIZE, between) == pytest.approx(
        brute(kernels, cached * SIZE, between) if cached else [0.0] * len(kernels)
    )


def test_nothing_or_everything_is_near() -> None:
    kernels = GraphCost(chain([0, 1, 2, 0])).kernels
    moved = [bytes_moved(k.body, k.ops) for k in kernels]
    assert bytes_near(kernels, 0) == [0.0] * 4
    assert bytes_near(kernels, 1 << 30) == moved
    # What others touch in between drives out what was there from the call before: the input, and the last result.
    assert sum(bytes_near(kernels, 4 * SIZE, 1e9)) < sum(bytes_near(kernels, 1 << 20))


def test_a_cache_makes_a_graph_faster_up_to_its_rate() -> None:
    plain = Device(
        "d", flops=1e15, bandwidth=1e9, overhead=0.0, call_overhead=0.0, efficiency=(("elements.bytes", 1.0),)
    )
    cost = GraphCost(chain([0, 1, 2, 0]))
    slow, fast = cost.seconds(plain), cost.seconds(replace(plain, cache=1 << 30, cache_bandwidth=4e9))
    assert slow == pytest.approx(cost.moved / 1e9, rel=1e-3)
    assert fast == pytest.approx(cost.moved / 4e9, rel=1e-3)
    part = cost.seconds(replace(plain, cache=3 * SIZE, cache_bandwidth=4e9))
    assert fast < part < slow
    # The control: a size without a rate changes nothing.
    assert cost.seconds(replace(plain, cache=1 << 30)) == slow


def plan(recompute: str, cache: int, rate: float = 4e9) -> Module:
    """One device that trains a chain of layers, with a cache of so many bytes."""
    one = Device("cpu:0", flops=1e15, bandwidth=1e9, cache=cache, cache_bandwidth=rate)
    cluster = replace(Cluster.local(1), devices=(one,))
    options = PipelineOptions(schedule="gpipe", microbatches=4, recompute=recompute)
    calls = training_pipeline({"kind": "adamw", "lr": 0.1}, {}, options)
    return run_passes(chain_model([4, *[64] * 6, 4], [], rows=32).but(cluster=cluster), calls, PASSES)


def saved_by(module: Module, kind: str) -> int:
    forward = module.stage_graph(0, kind)
    assert forward is not None
    taken = {value.name for value in forward.ins}
    return sum(value.type.nbytes for value in forward.saved if value.name not in taken)


def test_what_a_forward_saves_is_in_no_cache() -> None:
    """It is read before it is written, and written back: 2 bytes at the rate of memory for each, also where forwards
    are made again. The controls: a cache that holds all of a microbatch, and a device whose cache has no rate."""
    kept, again = plan("none", 1 << 12), plan("all", 1 << 12)
    assert saved_by(kept, "F") > saved_by(again, "F") >= 0
    assert saved_by(again, "R") > 0
    assert warm_and_found(again).keys() == {"F", "R", "B"}
    for module in (kept, again):
        for kind, (warm, seconds) in warm_and_found(module).items():
            extra = 0 if kind == "B" else 2 * saved_by(module, kind) / 1e9
            assert seconds == pytest.approx(warm + extra)
    for same in (plan("all", 1 << 30), plan("all", 1 << 12, 0.0)):
        assert all(seconds == pytest.approx(warm) for warm, seconds in warm_and_found(same).values())


def warm_and_found(module: Module) -> dict[str, tuple[float, float]]:
    """The seconds of each computation of a microbatch by its kernels alone, and those that the module is priced with."""
    costs = {kind: GraphCost.of(graph) for kind in "FRB" if (graph := module.stage_graph(0, kind))}
    moved, rows = sum(cost.moved for cost in costs.values()), rank_seconds(module)
    device = module.cluster.device("cpu:0")
    return {kind: (cost.seconds(device, between=moved - cost.moved), rows[0, kind]) for kind, cost in costs.items()}
