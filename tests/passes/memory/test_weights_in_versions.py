"""Weights in two versions that are elsewhere while a rank computes with others: the same numbers in a store of two
levels, the versions on the device, the bytes that move, and the programs that the verifier refuses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache

import pytest
from tests.oracles.drawn_chains import chain_model
from tests.passes.memory.test_offload import WIDTHS, edited, same, trained

from penstock.ir.cluster.cluster import Cluster
from penstock.ir.cluster.spaces import Space
from penstock.ir.graph import Module
from penstock.ir.memory.items import copied_bytes, home_bytes, resident_bytes, stage_images
from penstock.ir.memory.predict import measure_memory
from penstock.ir.schedule import Action, Program
from penstock.ir.text import parse_module, print_module
from penstock.ir.verify.verifier import verify
from penstock.passes.manager import run_passes
from penstock.passes.memory.weights.versions import with_versions_moved
from penstock.passes.pipelines import PASSES, PipelineOptions, training_pipeline
from penstock.support.errors import DoesNotFit, UsageError, VerifyError

M = 4
# Devices, stages of each, and what else is asked for.
CASES = {
    "one device": (1, 4, {}),
    "two devices": (2, 4, {}),
    "clipped": (2, 4, {"guard": {"clip": 0.5}}),
    "clipped, one visit": (3, 3, {"guard": {"clip": 0.5}}),
    "made again": (2, 4, {"recompute": "all"}),
    "all of it": (2, 4, {"offload": "all"}),
    "wrapped": (2, 4, {"schedule": "wrap-2bw"}),
    "wrapped, clipped": (2, 4, {"schedule": "wrap-2bw", "guard": {"clip": 0.5}}),
}


@cache
def planned(case: str, offload: str = "weights", memory: int = 0) -> Module:
    devices, packs, settings = CASES[case]
    kind = {"offload": offload, **settings, **({"offload": offload} if offload == "none" else {})}
    return two_versions(devices, packs, M, memory, **kind)


def two_versions(devices: int, packs: int, m: int, memory: int = 0, **settings: object) -> Module:
    cluster = replace(Cluster.local(devices), spaces=(Space("disk"),))
    if memory:
        cluster = replace(cluster, devices=tuple(replace(d, spaces=(("ram", memory),)) for d in cluster.devices))
    options = PipelineOptions(
        microbatches=m,
        packs=packs,
        **{"schedule": "interleaved-2bw", "recompute": "none", "offload": "weights", **settings},
    )
    stages = devices * packs
    widths = WIDTHS if 8 % stages == 0 else [4, *[6] * (2 * stages - 1), 4]
    every = (len(widths) - 1) // stages
    cuts = tuple(f"layer{i}" for i in range(every, len(widths) - 1, every))
    calls = training_pipeline({"kind": "adamw", "lr": 0.1}, {"split_at": cuts}, options)
    return run_passes(chain_model(widths, [], rows=2).but(cluster=cluster), calls, PASSES)


@pytest.mark.parametrize("case", CASES)
def test_numbers_are_the_same_bit_for_bit(case: str) -> None:
    module = planned(case)
    verify(module)
    assert parse_module(print_module(module)) == module
    assert {"o", "w"} <= {a.item for a in module.schedule.actions()}
    assert same(trained(module), trained(planned(case, "none")))


@pytest.mark.parametrize(
    ("devices", "packs", "m"), [(1, 3, 1), (1, 4, 3), (2, 3, 2), (2, 4, 6), (3, 3, 4), (3, 4, 6), (4, 3, 6)]
)
def test_every_shape_is_legal_and_ends_with_all_at_home(devices: int, packs: int, m: int) -> None:
    """The verifier follows runs of several lengths and first batches."""
    module = two_versions(devices, packs, m)
    verify(module)
    for rank in module.schedule.ranks:
        for batches in (1, 2, 5):
            *_, left = resident_bytes(module, module.schedule.expand(rank, batches))
            assert left == 0


@pytest.mark.parametrize(("devices", "packs", "m"), [(1, 3, 1), (2, 3, 2), (2, 3, 3), (2, 4, 4)])
def test_late_updates_are_legal_too(devices: int, packs: int, m: int) -> None:
    """Gradients go behind the update of their batch, which stands in the list of the next one. Those that have two
    buffers stay: with many microbatches all of them."""
    module = two_versions(devices, packs, m, guard={"clip": 0.5})
    verify(module)
    gradients = [var for var in module.vars.values() if var.role == "grad"]
    assert all(bool(var.home) == (var.versions == 1) for var in gradients)
    assert any(var.home for var in gradients) == (m < 2 * devices)


def test_a_schedule_that_does_not_begin_as_it_goes_on_is_refused() -> None:
    module = planned("one device", "none")
    program = Program(module.schedule.ranks[0].start[1:], module.schedule.ranks[0].batch)
    homes = replace_homes(module)
    with pytest.raises(UsageError, match="the schedule does not begin with 0F"):
        with_versions_moved(homes, program, range(4))


def replace_homes(module: Module) -> Module:
    return module.but(vars={n: replace(v, home="disk") if v.role == "param" else v for n, v in module.vars.items()})


def versions_here(module: Module, rank: int, batches: int) -> Iterable[tuple[Action, Counter[int]]]:
    """The actions of a run, each with the number of versions of each stage's weights on the device behind it."""
    claims = Counter[tuple[int, int]]()
    for a in module.schedule.expand(rank, batches):
        if a.item == "w" and a.kind in ("CI", "L"):
            claims[a.stage, a.version] += 1 if a.kind == "CI" else -1
        yield a, Counter(stage for (stage, _), count in claims.items() if count)


def test_both_versions_are_there_around_the_update_alone() -> None:
    """Of a stage where forwards of a batch do not meet backwards of the one before."""
    module, both = planned("two devices"), Counter[int]()
    apart = set[int]()
    for rank in module.schedule.ranks:
        last = {a.stage: a for a in module.schedule.ranks[rank].batch if a.kind == "B" and a.batch(M) == 1}
        for a, here in versions_here(module, rank, 4):
            assert max(here.values(), default=0) <= 2
            both.update(stage for stage, count in here.items() if count == 2 and a.kind == "F" and a.stage == stage)
        apart |= last.keys() - both.keys()
    assert len(apart) > len(both)


def test_fewer_are_on_the_device_than_there_are() -> None:
    module, whole = planned("two devices"), planned("two devices", "none")
    for rank, row in measure_memory(module).items():
        images = [image for s in module.rank_packs()[rank] for image in stage_images(module, s).values()]
        weights = sum(image.nbytes for image in images if image.versions == 2)
        assert weights
        assert home_bytes(module)["disk", "localhost"][rank] == sum(i.stored * i.versions for i in images)
        assert row.fixed < measure_memory(whole)[rank].fixed - weights


def test_a_batch_moves_weights_four_times_at_most_where_a_stage_runs_all_microbatches_at_once() -> None:
    """In for F, for B and for U, out after U. What is still there is not copied. Under wrap-2bw that is so for any number
    of microbatches. The control: in groups of them more is copied."""
    cases = [("interleaved-2bw", *shape) for shape in ((2, 6, 2), (2, 4, 3), (1, 8, 1), (3, 4, 4))]
    cases += [("wrap-2bw", *shape) for shape in ((2, 6, 2), (2, 4, 8), (1, 8, 5), (3, 4, 13))]
    for kind, devices, packs, m in cases:
        module = two_versions(devices, packs, m, schedule=kind)
        for rank, pack in enumerate(module.rank_packs()):
            images = [stage_images(module, s) for s in pack]
            w, o = (sum(i[item].nbytes for i in images) for item in ("w", "o"))
            copied = copied_bytes(module, rank)
            assert copied["CO"] == w + o
            assert 2 * w < copied["CI"] - o <= 3 * w
    grouped = two_versions(2, 4, 8)
    assert copied_bytes(grouped, 0)["CI"] > 2 * copied_bytes(two_versions(2, 4, 8, schedule="wrap-2bw"), 0)["CI"]


# ------------------------------------------------------------------------------------------------ refused programs

LAST = 3


def change(kind: str, put: Callable[[Action], Iterable[Action]], ahead: int = 0) -> Callable[[Module], Module]:
    """Change the moves of the last stage's weights whose version is so far ahead of their batch."""

    def rule(_: int, a: Action) -> Iterable[Action]:
        fits = (a.kind, a.item, a.stage) == (kind, "w", LAST) and a.version is not None
        return put(a) if fits and a.version - a.mb == ahead else (a,)

    return lambda module: edited(module, rule)


NOTHING: Callable[[Action], Iterable[Action]] = lambda a: ()  # noqa: E731
REFUSED = {
    "the CI of a reader left out": (
        change("CI", NOTHING, -1), r"takes version 0 of @.*, which is at home in disk \(no 3CI\d@0:w before\)"
    ),
    "the CI of the update left out": (change("CI", NOTHING), r"takes version 0 of @.*\(no 3CI0@0:w before\)"),
    "no room for the new version": (
        change("CI", NOTHING, 1), r"makes version 1 of @.*, which has no memory on the device \(no 3CI0@1:w before\)"
    ),
    "the CO left out": (
        change("CO", NOTHING, 1), r"lets go of the only copy of version 1 of @.*\(no 3CO0@1:w before\)"
    ),
    "another version copied out": (
        change("CO", lambda a: (a._replace(version=a.version - 1),), 1), "copies version 0 of @.*|which nothing changed"
    ),
    "let go of once too often": (change("L", lambda a: (a, a), 1), "lets go of version 1 of @.*, which is not on the"),
    "never let go of": (change("L", NOTHING, 1), "in the place of it, is on the device|never lets go of w"),
    "no version": (change("CI", lambda a: (a._replace(version=None),), -1), "names no version of @.*there are 2 versions|names no version"),
}  # fmt: skip


@pytest.mark.parametrize("how", REFUSED)
def test_the_verifier_refuses(how: str) -> None:
    edit, message = REFUSED[how]
    with pytest.raises(VerifyError, match=message):
        verify(edit(planned("one device")))


@pytest.mark.parametrize("how", ["the CI of a reader left out", "the CI of the update left out", "the CO left out"])
def test_the_interpreter_shows_it_as_well(how: str) -> None:
    assert not same(trained(REFUSED[how][0](planned("one device"))), trained(planned("one device", "none")))


def test_one_byte_less_is_refused() -> None:
    peak = max(row.peak for row in measure_memory(planned("two devices")).values())
    verify(planned("two devices", memory=peak))
    with pytest.raises(DoesNotFit, match="at the worst moment"):
        planned("two devices", memory=peak - 1)


def test_other_schedules_that_overlap_batches_have_one_stage_and_are_refused() -> None:
    chain = chain_model(WIDTHS, [], rows=2).but(cluster=replace(Cluster.local(2), spaces=(Space("disk"),)))
    options = PipelineOptions(schedule="2bw", microbatches=M, offload="weights")
    calls = training_pipeline({"kind": "adamw", "lr": 0.1}, {"split_at": ("layer4",)}, options)
    with pytest.raises(UsageError, match="it takes three stages or more"):
        run_passes(chain, calls, PASSES)
