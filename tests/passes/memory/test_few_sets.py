"""Saved sets that are elsewhere are as few as memory asks for: against all programs with one set fewer elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
from tests.oracles.drawn_chains import chain_model
from tests.passes.memory.test_offload import edited, same, trained

from penstock.ir.cluster.cluster import Cluster
from penstock.ir.cluster.spaces import Space
from penstock.ir.graph import Module
from penstock.ir.memory.items import home_bytes
from penstock.ir.memory.predict import measure_memory
from penstock.ir.memory.saved_sets import moves_saved
from penstock.ir.verify.verifier import verify
from penstock.passes.manager import run_passes
from penstock.passes.pipelines import PASSES, PipelineOptions, training_pipeline
from penstock.planning.predict import predict
from penstock.support.errors import DoesNotFit

M, LAYERS = 8, 16
CASES = {"eager-2bw": (4, 1), "gpipe": (2, 1), "wrap": (2, 2)}


@cache
def planned(case: str, offload: str, memory: int = 0) -> Module:
    devices, packs = CASES[case]
    cluster = replace(Cluster.local(devices), spaces=(Space("disk", bandwidth=1e8),))
    if memory:
        cluster = replace(cluster, devices=tuple(replace(d, spaces=(("ram", memory),)) for d in cluster.devices))
    every = LAYERS // (devices * packs)
    cuts = tuple(f"layer{i}" for i in range(every, LAYERS, every))
    options = PipelineOptions(schedule=case, microbatches=M, packs=packs, offload=offload, recompute="none")
    calls = training_pipeline({"kind": "adamw", "lr": 0.001}, {"split_at": cuts}, options)
    return run_passes(chain_model([48] * (LAYERS + 1), [], rows=64).but(cluster=cluster), calls, PASSES)


def peaks(module: Module) -> list[int]:
    return [row.peak for row in measure_memory(module).values()]


def sets_of(module: Module) -> set[tuple[int, int]]:
    """The stages and numbers of the sets that move."""
    return {(a.stage, a.mb % M) for a in module.schedule.actions() if moves_saved(a)}


def by_wait(module: Module, rank: int) -> list[tuple[int, int]]:
    """The stages and numbers of a rank's sets by the computations between F and B, most first."""
    computed = [a for a in module.schedule.expand(rank, 4) if a.kind in "FBRWPNU"]
    at = {(a.kind, a.stage, a.mb): i for i, a in enumerate(computed)}
    waits: dict[tuple[int, int], int] = {}
    for (kind, stage, mb), place in at.items():
        if kind == "F" and ("B", stage, mb) in at:
            key = stage, mb % M
            waits[key] = max(waits.get(key, 0), at["B", stage, mb] - place)
    return sorted(waits, key=lambda key: (-waits[key], key))


def without(module: Module, left_out: tuple[int, int]) -> Module:
    """The program without the moves of one set, which stays on the device."""
    return edited(module, lambda _, a: () if moves_saved(a) and (a.stage, a.mb % M) == left_out else (a,))


@pytest.mark.parametrize("case", CASES)
def test_no_more_sets_go_than_memory_asks_for(case: str) -> None:
    """Between the peak with all sets elsewhere and that with all on the device. Those go that wait for most computations;
    with one fewer elsewhere, that which waits for fewest, the device has too little memory. The control: where all fit on the device, and are elsewhere as asked, it has enough."""
    all_away, kept = planned(case, "activations"), planned(case, "none")
    least, most = max(peaks(all_away)), max(peaks(kept))
    assert least < 0.9 * most
    counts = []
    for memory in (least, *range(least + (most - least) // 4, most, (most - least) // 4)):
        module = planned(case, "activations", memory)
        verify(module)
        assert max(peaks(module)) <= memory
        sets = sets_of(module)
        assert sets <= sets_of(all_away)
        counts.append(len(sets))
        for rank, pack in enumerate(module.rank_packs()):
            order = [key for key in by_wait(kept, rank) if key in sets_of(all_away)]
            mine = [key for key in order if key in sets]
            assert mine == order[: len(mine)]
            if mine:
                assert mine[-1][0] in pack
                assert peaks(without(module, mine[-1]))[rank] > memory
    assert all(more >= fewer for more, fewer in pairwise(counts))
    assert counts[-1] < counts[0] <= len(sets_of(all_away))
    roomy = planned(case, "activations", most)
    assert sets_of(roomy) == sets_of(all_away)
    assert max(peaks(without(roomy, min(sets_of(roomy))))) <= most
    with pytest.raises(DoesNotFit):
        planned(case, "activations", least - 1)


@pytest.mark.parametrize("case", CASES)
def test_fewer_sets_need_less_room_and_time(case: str) -> None:
    all_away, kept = planned(case, "activations"), planned(case, "none")
    few = planned(case, "activations", (max(peaks(all_away)) + max(peaks(kept))) // 2)
    assert at_home(few) < at_home(all_away)
    steps = [predict(module).step for module in (kept, few, all_away)]
    assert all(shorter <= longer or shorter == pytest.approx(longer) for shorter, longer in pairwise(steps))
    # The oracle draws two rows for each microbatch that it is told of.
    assert same(trained(few, 32 * M), trained(kept, 32 * M))


def at_home(module: Module) -> int:
    of_spaces: Mapping[tuple[str, str], dict[int, int]] = home_bytes(module)
    return sum(sum(held.values()) for held in of_spaces.values())


def of_replicas(offload: str, memory: tuple[int, int] = (0, 0)) -> Module:
    """One stage on two devices, each of which runs half of the microbatches."""
    local = Cluster.local(2)
    devices = [
        replace(d, spaces=(("ram", nbytes),) if nbytes else ()) for d, nbytes in zip(local.devices, memory, strict=True)
    ]
    cluster = replace(local, devices=tuple(devices), spaces=(Space("disk"),))
    options = PipelineOptions(schedule="gpipe", microbatches=2 * M, offload=offload, recompute="none", shares=(M, M))
    calls = training_pipeline({"kind": "adamw", "lr": 0.001}, {"devices": ("cpu:0 cpu:1",)}, options)
    return run_passes(chain_model([48] * (LAYERS + 1), [], rows=64).but(cluster=cluster), calls, PASSES)


def test_a_replica_with_room_keeps_its_sets() -> None:
    """The control: with memory that is not stated all of them go, as asked."""
    all_away, kept = of_replicas("activations"), of_replicas("none")
    least, most = peaks(all_away)[0], peaks(kept)[0]
    module = of_replicas("activations", ((least + most) // 2, 2 * most))
    verify(module)
    ranks = module.schedule.ranks
    moving = [{a.mb for a in ranks[rank].batch if moves_saved(a)} for rank in ranks]
    assert moving[0]
    assert not moving[1]
    assert peaks(module)[0] <= (least + most) // 2
    unknown = of_replicas("activations", ((least + most) // 2, 0))
    assert any(moves_saved(a) for a in unknown.schedule.ranks[1].batch)
