"""Blocks that ranks keep for collectives, counted by hand. That real ranks keep as many is tested with their pages
(tests/acceptance/sharding/test_memory_of_parts.py); so is what gloo keeps (tests/runtime/transport/test_ring.py)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from oracles.sharding.local_modules import local_mlp

from penstock.ir.cluster.cluster import Cluster, Device
from penstock.ir.graph import Module
from penstock.ir.memory.exchanges import RING, exchange_bytes, ring_bytes
from penstock.ir.memory.predict import measure_memory
from penstock.ir.ops import make

# Each all_reduce of the model has an operand of f32[3,4].
BLOCK = 48


def with_gathers(kinds: str) -> Module:
    """Return a model that gathers its input twice before all else: a beginning is `(`, its reader `)`."""
    module = local_mlp("1f1b", 1, 1, 2).local
    forward, ops = module.graphs["s0.F"], []
    x = next(value for value in forward.ins if value.name == "x")
    begun, count = [], 0
    for kind in kinds:
        if kind == "(":
            ops.append(make("all_gather", [x], [f"g{count}"], axis=0, over="tp", size=6))
            begun.append(ops[-1].outs[0])
            count += 1
        else:
            ops.append(make("neg", [begun.pop(0)], [f"n{len(ops)}"]))
    return module.but(graphs={**module.graphs, "s0.F": replace(forward, ops=(*ops, *forward.ops))})


@pytest.mark.parametrize(("stages", "dp", "tp", "hidden"), [(1, 1, 2, 6), (2, 2, 2, 6), (1, 1, 3, 5)])
def test_a_block_in_use_and_one_to_spare(stages: int, dp: int, tp: int, hidden: int) -> None:
    module = local_mlp("2bw", stages, dp, tp, hidden=hidden).local
    for rank, stage in enumerate(module.rank_stages()):
        assert exchange_bytes(module, rank, [stage]) == 2 * BLOCK


def test_sums_of_gradients_keep_what_they_take_up_to_some_mebibytes() -> None:
    module = local_mlp("2bw", 2, 2, 2).local
    # The five gradients of a layer take 64 bytes each.
    for rank, stage in enumerate(module.rank_stages()):
        assert ring_bytes(module, rank, [stage]) == 320
    large = local_mlp("1f1b", 1, 2, 1, width=512, hidden=2048).local
    assert ring_bytes(large, 0, [0]) == RING


def test_one_replica_and_gpus_have_no_sums_over_gloo() -> None:
    assert ring_bytes(local_mlp("2bw", 2, 1, 2).local, 0, [0]) == 0
    module = local_mlp("2bw", 2, 2, 2).local
    gpus = Cluster(tuple(Device(name, "cuda") for name in module.rank_devices()))
    assert ring_bytes(module.but(cluster=gpus), 0, [0]) == 0


def test_what_is_under_way_at_once_has_a_block_each() -> None:
    assert exchange_bytes(with_gathers("(())"), 0, [0]) == 3 * BLOCK
    assert exchange_bytes(with_gathers("()()"), 0, [0]) == 2 * BLOCK


def test_over_sockets_what_is_received_has_blocks() -> None:
    module = local_mlp("1f1b", 1, 1, 3, hidden=5).local
    names = module.rank_devices()
    apart = Cluster(tuple(Device(name, host=f"h{i}") for i, name in enumerate(names)))
    # One that is sent to both others, one from each of them, and one to spare.
    assert exchange_bytes(module.but(cluster=apart), 0, [0]) == 4 * BLOCK
    gpus = Cluster(tuple(Device(name, "cuda") for name in names))
    assert exchange_bytes(module.but(cluster=gpus), 0, [0]) == 0


def test_the_plan_counts_them_once() -> None:
    apart, together = (measure_memory(with_gathers(kinds))[0] for kinds in ("()()", "(())"))
    assert together.data - apart.data == BLOCK
    assert together.peak - together.data - together.workspace == apart.peak - apart.data - apart.workspace
