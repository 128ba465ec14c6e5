"""What errors about numbers of microbatches advise is legal: each size that they name is tried."""

from __future__ import annotations

import re

import pytest
from tests.oracles.drawn_chains import chain_model

from penstock.ir.cluster.cluster import Cluster
from penstock.ir.graph import Module
from penstock.ir.schedule import Schedule
from penstock.passes.manager import run_passes
from penstock.passes.pipelines import PASSES, PipelineOptions, training_pipeline
from penstock.passes.schedules.dealing import equal_shares
from penstock.passes.schedules.schedule import PACK_SCHEDULES, build_packs
from penstock.support.errors import UsageError, VerifyError

Shares = tuple[tuple[int, ...], ...]


def planned(kind: str, m: int, shares: Shares) -> Module:
    """Carry out the passes for stages with so many microbatches on each device; VerifyError where they are illegal."""
    names = iter(f"cpu:{i}" for i in range(sum(map(len, shares))))
    devices = tuple(" ".join(next(names) for _ in share) for share in shares)
    module = chain_model([4] * (len(shares) + 1), [], False).but(cluster=Cluster.local(sum(map(len, shares))))
    every = tuple(n for share in shares for n in share)
    options = PipelineOptions(schedule=kind, microbatches=m, recompute="none", shares=every)
    cuts = {"split_at": tuple(f"layer{i}" for i in range(1, len(shares))), "devices": devices}
    return run_passes(module, training_pipeline({"kind": "sgd", "lr": 0.1}, cuts, options), PASSES)


def equal(replicas: tuple[int, ...], m: int) -> Shares:
    return tuple(equal_shares(count, m) for count in replicas)


@pytest.mark.parametrize(
    ("kind", "m", "shares", "advice"),
    [
        ("2bw", 2, equal((1, 1, 1, 1), 2), "microbatches >= 3 or"),
        ("2bw", 2, equal((2, 2, 2), 2), "4 microbatches, as many for each rank of a stage or"),
        ("2bw", 3, equal((1, 2, 2), 3), "8 microbatches, as many for each rank of a stage or"),
        ("2bw", 5, equal((1, 2, 2), 5), "8 microbatches, as many for each rank of a stage or"),
        ("eager-2bw", 4, equal((2, 1, 2), 4), "8 microbatches, as many for each rank of a stage or"),
        ("eager-2bw", 4, ((4,), (3, 1), (4,)), "16 microbatches, 4 times as many for each rank or"),
    ],
)
def test_batches_that_are_advised_are_legal(kind: str, m: int, shares: Shares, advice: str) -> None:
    with pytest.raises(VerifyError) as error:
        planned(kind, m, shares)
    text = str(error.value)
    assert advice in text
    planned(kind, *advised(text, shares))


def advised(text: str, shares: Shares) -> tuple[int, Shares]:
    """Return the microbatches that an error advises, and the shares."""
    # Every problem has the same advice.
    (size,) = set(re.findall(r"(?:microbatches >= |hint: )([0-9]+)", text))
    times = re.search(r"([0-9]+) times as many", text)
    if times is None:
        return int(size), equal(tuple(map(len, shares)), int(size))
    return int(size), tuple(tuple(n * int(times[1]) for n in share) for share in shares)


def test_control_the_largest_share_of_a_rank_is_not_enough() -> None:
    """As many microbatches of a batch as one rank needs are too few for two: they have half of them each."""
    with pytest.raises(VerifyError):
        planned("2bw", 2, equal((2, 2, 2), 2))
    with pytest.raises(VerifyError):
        planned("2bw", 3, equal((1, 2, 2), 3))


PIPELINES = [(d, p, m) for d in range(1, 7) for p in (1, 2, 3) for m in range(p, 30)]


@pytest.mark.parametrize("kind", ["interleaved", "interleaved-2bw", "wrap-2bw"])
def test_batches_of_packs_that_are_advised_are_legal(kind: str) -> None:
    """Of every number of ranks, of pipelines side by side, and of microbatches."""
    packs, tried = PACK_SCHEDULES[kind].packs, 0
    for d, pipelines, m in PIPELINES:
        hint = hint_of(kind, d, equal_shares(pipelines, m))
        if hint is None:
            continue
        sizes = [int(size) for size in re.findall(r"[0-9]+", hint.partition(" microbatches")[0])]
        assert sizes
        for size in sizes:
            assert is_legal(build_packs(kind, packs(d, 2), size, equal_shares(pipelines, size))), (d, pipelines, m)
        other = re.search(r"use schedule (\S+)$", hint)
        assert other is not None
        build_packs(other[1], packs(d, 2), m, equal_shares(pipelines, m))
        tried += 1
    assert tried > 50


def hint_of(kind: str, d: int, share: tuple[int, ...]) -> str | None:
    """Return what an error advises, None where there is none."""
    try:
        build_packs(kind, PACK_SCHEDULES[kind].packs(d, 2), sum(share), share)
    except UsageError as error:
        return error.hint or ""
    return None


def is_legal(schedule: Schedule) -> bool:
    """Return whether each rank has made the version of the weights that a forward of the next batch reads, in the
    second batch and later ones; schedules without forwards ahead need none."""
    if not any(program.start for program in schedule.ranks.values()):
        return True
    for program in schedule.ranks.values():
        updated: set[int] = set()
        for action in program.batch:
            if action.kind == "U":
                updated.add(action.stage)
            # Batch 1 is the one that is updated here; forwards of batch 3 would need that update.
            elif action.kind == "F" and action.mb >= 3 * schedule.microbatches and action.stage not in updated:
                return False
    return True


def test_equal_shares_are_advised_where_only_unequal_ones_are_illegal() -> None:
    assert hint_of("interleaved", 4, (9, 7)) == (
        "give 16 microbatches, shared out equally to 2 pipelines, or use schedule wrap"
    )
    build_packs("interleaved", PACK_SCHEDULES["interleaved"].packs(4, 2), 16, (8, 8))
    # The control: a multiple of four is legal for one pipeline, and may be illegal for two that share it.
    build_packs("interleaved", PACK_SCHEDULES["interleaved"].packs(4, 2), 28)
    with pytest.raises(UsageError, match="cannot deal 14 microbatches into 3 equal groups"):
        build_packs("interleaved", PACK_SCHEDULES["interleaved"].packs(4, 2), 28, (14, 14))
