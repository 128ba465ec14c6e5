"""Weights that stay on a device that has room for those of more stages than two: which ones, what that saves, and that
numbers stay the same."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.oracles.drawn_chains import chain_model
from tests.passes.memory.test_offload import same, trained

from penstock.ir.cluster.cluster import Cluster
from penstock.ir.cluster.spaces import Space
from penstock.ir.graph import PARAM, Module
from penstock.ir.memory.items import copied_bytes
from penstock.ir.memory.predict import measure_memory
from penstock.ir.verify.verifier import verify
from penstock.passes.manager import run_passes
from penstock.passes.memory.weights.stays import kept_until_next
from penstock.passes.pipelines import PASSES, PipelineOptions, training_pipeline

# Devices, stages of each, microbatches.
SHAPES = {"interleaved": (1, 6, 2), "wrap": (2, 5, 3)}


@cache
def planned(schedule: str, offload: str = "weights", memory: int = 0) -> Module:
    devices, packs, m = SHAPES[schedule]
    cluster = replace(Cluster.local(devices), spaces=(Space("disk"),))
    if memory:
        cluster = replace(cluster, devices=tuple(replace(d, spaces=(("ram", memory),)) for d in cluster.devices))
    options = PipelineOptions(schedule=schedule, microbatches=m, packs=packs, offload=offload, recompute="none")
    cuts = tuple(f"layer{i}" for i in range(1, devices * packs))
    calls = training_pipeline({"kind": "adamw", "lr": 0.1}, {"split_at": cuts}, options)
    return run_passes(chain_model([24] * (devices * packs + 1), [], rows=2).but(cluster=cluster), calls, PASSES)


def most(module: Module) -> int:
    return max(row.peak for row in measure_memory(module).values())


def copied(module: Module) -> int:
    """The bytes that a batch copies in and out."""
    return sum(sum(copied_bytes(module, rank).values()) for rank in range(len(module.rank_packs())))


def at_home(module: Module) -> set[int]:
    """The stages whose weights have another home."""
    return {var.stage for var in module.vars.values() if var.role == PARAM and var.home}


@pytest.mark.parametrize("schedule", SHAPES)
def test_memory_that_is_there_saves_copies(schedule: str) -> None:
    """The numbers are those of all on the device. The controls: as much as two stages need, where nothing changes, a
    byte less than what stays needs, and as much as all need, where all go, as asked."""
    two = planned(schedule)
    least, all_of_it = most(two), most(planned(schedule, "state"))
    moved = [copied(two)]
    expected = trained(planned(schedule, "none"), SHAPES[schedule][2])
    for part in (0.5, 0.95):
        memory = int(least + part * (all_of_it - least))
        module = planned(schedule, memory=memory)
        verify(module)
        assert most(module) <= memory
        assert same(trained(module, SHAPES[schedule][2]), expected)
        moved.append(copied(module))
    assert moved == sorted(moved, reverse=True)
    assert moved[-1] < 0.8 * moved[0]
    assert planned(schedule, memory=least).schedule == two.schedule
    assert copied(planned(schedule, memory=most(module) - 1)) > moved[-1]
    assert planned(schedule, memory=all_of_it).schedule == two.schedule


def test_weights_that_never_go_have_no_other_home() -> None:
    """They would be copied out after each update for nothing."""
    two = planned("interleaved")
    assert at_home(two) == set(range(6))
    module = planned("interleaved", memory=most(planned("interleaved", "state")) - 1)
    homes = at_home(module)
    assert 0 < len(homes) < 6
    for kind in ("CI", "CO"):
        assert {a.stage for a in module.schedule.ranks[0].batch if (a.kind, a.item) == (kind, "w")} == homes


def notes_of_room(module: Module) -> list[str]:
    return [note.text for note in module.notes if note.origin == "weights"]


def test_a_note_says_where_all_weights_would_fit() -> None:
    """Controls: a byte less, which is too little for the larger device, and what two stages need."""
    needed = most(planned("wrap", "state"))
    (note,) = notes_of_room(planned("wrap", memory=needed))
    assert note == "cpu:0, cpu:1 have memory for all weights: these need not move"
    (note,) = notes_of_room(planned("wrap", memory=needed - 1))
    assert note == "cpu:0 has memory for all weights: these need not move"
    assert not notes_of_room(planned("wrap", memory=most(planned("wrap"))))


def least_that_comes(stages: list[int], sizes: list[int], room: int, *, over_the_end: bool = True) -> int:
    """The least that comes for the visits of a batch, by a look at all choices of those that stay."""
    count, waits = len(stages), dict[int, list[int]]()
    for visit, stage in enumerate(stages):
        following = next(k for k in range(visit + 1, visit + count + 1) if stages[k % count] == stage)
        if over_the_end or following < count:
            # Two visits have theirs in any case: they are there from the visit before to the visit behind.
            waits[visit] = [slot % count for slot in range(visit + 2, following)]
    saved = max(
        sum(sizes[stages[visit]] for visit in chosen)
        for few in range(len(waits) + 1)
        for chosen in combinations(waits, few)
        if all(sum(slot in waits[visit] for visit in chosen) <= room - 2 for slot in range(count))
    )
    return sum(sizes[stage] for stage in stages) - saved


def comes(stages: list[int], sizes: list[int], room: int) -> int:
    kept = kept_until_next(stages, dict(enumerate(sizes)), room)
    return sum(sizes[stage] for visit, stage in enumerate(stages) if visit not in kept)


@st.composite
def orders(draw: st.DrawFn) -> list[int]:
    """Visits of a batch: two behind each other are of unlike stages, the last and the first, too."""
    steps = draw(st.lists(st.integers(1, 3), min_size=1, max_size=8))
    order = [0]
    for step in steps:
        order.append((order[-1] + step) % 4)
    return order if order[-1] != order[0] else [*order, (order[-1] + 1) % 4]


@given(orders(), st.lists(st.integers(1, 10**9), min_size=4, max_size=4), st.integers(2, 4))
def test_as_little_comes_as_with_the_best_of_all_choices(order: list[int], sizes: list[int], room: int) -> None:
    assert comes(order, sizes, room) == least_that_comes(order, sizes, room)


def test_control_of_the_end_of_a_batch() -> None:
    """Four stages of which three have room, first up and then down: more comes where none stays for the next batch."""
    order, sizes = [0, 1, 2, 3, 2, 1], [1] * 4
    assert least_that_comes(order, sizes, 3, over_the_end=False) > least_that_comes(order, sizes, 3)


def test_many_stages_take_no_time() -> None:
    """With room for half of 24 stages, up and down: those that are kept waited for the fewest slots."""
    order = [*range(24), *range(22, 0, -1)]
    kept = kept_until_next(order, dict.fromkeys(range(24), 1000), 12)
    assert len(order) - len(kept) <= 2 * (24 - 12)
