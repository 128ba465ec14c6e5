"""Ranks that run several stages: orders as torch has them, times as formulas say, numbers as with a device per
stage."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from tests.oracles.drawn_chains import chain_model
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B, ScheduleZBVZeroBubble

from penstock.inspection.views.schedule_grid import format_grid
from penstock.ir.cluster.cluster import Cluster
from penstock.ir.graph import Module
from penstock.ir.grid import most_in_flight, simulate
from penstock.ir.interpreter.schedules import run_schedule
from penstock.ir.memory.predict import measure_memory, memory_course
from penstock.ir.schedule import MESSAGES, Action, Program, Schedule
from penstock.ir.text import parse_module, print_module
from penstock.ir.verify.verifier import verify
from penstock.passes.manager import run_passes
from penstock.passes.pipelines import PASSES, PipelineOptions, training_pipeline
from penstock.passes.schedules.dealing import deal
from penstock.passes.schedules.kind import PackPlace
from penstock.passes.schedules.packs.interleaved import Turns
from penstock.passes.schedules.schedule import PACK_SCHEDULES, build_packs
from penstock.passes.simulator.wiring import wire_chain
from penstock.support.errors import ParseError, UsageError, VerifyError

# Of torch's kinds of computations: a backward whole, or the part of it that gradients of weights are apart from.
LETTERS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "B", "BACKWARD_WEIGHT": "W"}


def packs_of(kind: str, d: int, v: int) -> tuple[tuple[int, ...], ...]:
    return PACK_SCHEDULES[kind].packs(d, v)


def orders(kind: str, d: int, v: int, m: int) -> list[list[tuple[str, int, int]]]:
    built = build_packs(kind, packs_of(kind, d, v), m)
    return [[(a.kind, a.stage, a.mb - m) for a in p.batch if a.kind != "U"] for p in built.ranks.values()]


def orders_of_torch(kind: str, d: int, v: int, m: int) -> list[list[tuple[str, int, int]]]:
    rounds = 1 if kind == "wrap" else max(1, m // d)
    made = SimpleNamespace(
        pp_group_size=d,
        num_stages=d * v,
        n_local_stages=v,
        _n_microbatches=m,
        number_of_rounds=rounds,
        microbatches_per_round=m // rounds,
    )
    cls = ScheduleZBVZeroBubble if kind == "zb-v" else ScheduleInterleaved1F1B
    listed = [cls._calculate_single_rank_operations(made, rank) for rank in range(d)]  # type: ignore[arg-type]
    return [
        [(LETTERS[a.computation_type.name], a.stage_index, a.microbatch_index) for a in actions if a is not None]
        for actions in listed
    ]


DRAINED = [kind for kind, row in PACK_SCHEDULES.items() if not row.delay]
SIZES = [(kind, d, v, m) for kind in DRAINED for d in range(1, 7) for v in range(1, 5) for m in range(1, 13)]
FITS = {"interleaved": lambda d, v, m: m % max(1, m // d) == 0, "zb-v": lambda d, v, m: v == 2}
LEGAL = [(kind, d, v, m) for kind, d, v, m in SIZES if kind not in FITS or FITS[kind](d, v, m)]


def test_every_rank_has_the_order_of_torch_and_no_rank_waits_for_ever():
    for kind, d, v, m in LEGAL:
        assert orders(kind, d, v, m) == orders_of_torch(kind, d, v, m), (kind, d, v, m)
        built = build_packs(kind, packs_of(kind, d, v), m)
        assert simulate(built, 2).finish == simulate(wire_chain(built), 2).finish
    assert orders("interleaved", 2, 2, 4) != orders_of_torch("interleaved", 2, 2, 8)


def test_pipelines_beside_each_other_have_that_order_each():
    """Of a batch dealt out to two, in equal or unequal shares: each has the order of one that has its share alone."""
    for kind, share in (("interleaved", (4, 4)), ("interleaved", (3, 2)), ("zb-v", (4, 4)), ("zb-v", (5, 3))):
        built, dealt = build_packs(kind, packs_of(kind, 2, 2), sum(share), share), deal(share)
        for team, numbers in enumerate(dealt):
            alone = orders_of_torch(kind, 2, 2, len(numbers))
            for place in range(2):
                actions = [a for a in built.ranks[2 * place + team].batch if a.kind != "U"]
                there = [(a.kind, a.stage, numbers.index(a.mb - sum(share))) for a in actions]
                assert there == alone[place], (kind, share, team, place)
        assert simulate(built, 2).finish == simulate(build_packs(kind, packs_of(kind, 2, 2), max(share)), 2).finish


def test_sizes_that_a_schedule_has_no_order_for_are_refused():
    for kind, d, v, m in set(SIZES) - set(LEGAL):
        with pytest.raises(UsageError, match="equal groups" if kind == "interleaved" else "two stages"):
            build_packs(kind, packs_of(kind, d, v), m)
    with pytest.raises(UsageError, match="runs one stage on a rank"):
        build_packs("1f1b", ((0, 2), (1, 3)), 4)
    with pytest.raises(UsageError, match="needs the stages 0 3 / 1 2"):
        build_packs("zb-v", ((0, 2), (1, 3)), 4)


@pytest.mark.parametrize(
    ("d", "v", "m", "units"),
    [
        (2, 2, 4, 13.5),
        (2, 4, 4, 12.75),
        (4, 2, 4, 16.5),
        (4, 4, 4, 14.25),
        (2, 2, 8, 25.5),
        (2, 4, 8, 24.75),
        (4, 2, 8, 28.5),
        (4, 4, 8, 26.25),
        (4, 2, 16, 52.5),
    ],
)
@pytest.mark.parametrize("kind", ["interleaved", "wrap"])
def test_the_bubble_is_divided_by_the_stages_of_a_rank(kind, d, v, m, units):
    built = build_packs(kind, packs_of(kind, d, v), m)
    assert simulate(built, 1, 1 / v, 2 / v).finish == units == m * 3 + (d - 1) * 3 / v
    group = m if kind == "wrap" else m // max(1, m // d)
    # With fewer microbatches than two groups the ends of the batch are all there is of it.
    assert most_in_flight(built.expand(0, 1)) == min(v * m, (v - 1) * group + 2 * (d - 1) + 1)


@pytest.mark.parametrize(("kind", "several"), [("wrap", False), ("wrap-2bw", False), ("interleaved", True)])
def test_a_stage_runs_all_microbatches_before_the_next_one(kind, several):
    """Forwards and backwards of each rank, by themselves. The control has groups of them."""
    for d, v, m in ((1, 3, 4), (2, 3, 4), (3, 4, 9)):
        for program in build_packs(kind, packs_of(kind, d, v), m).ranks.values():
            for letter in "FB":
                listed = [a.stage for a in (*program.start, *program.batch) if a.kind == letter]
                turns = sum(one != other for one, other in pairwise(listed))
                assert turns >= v * m // d - 1 if several else turns < 2 * v, (d, v, m)


def test_what_interleaving_holds_at_four_ranks_of_two_stages():
    """5.5 whole microbatches, where 1f1b holds 4."""
    assert most_in_flight(build_packs("interleaved", packs_of("interleaved", 4, 2), 8).expand(0, 1)) / 2 == 5.5


def test_a_v_holds_as_much_as_1f1b_and_waits_least():
    """With equal times of F, B without W, and W: a batch of 1f1b takes 3 (m + d - 1) units of whole stages."""
    for d in (2, 3, 4):
        m = 4 * d
        built = build_packs("zb-v", packs_of("zb-v", d, 2), m)
        finish = simulate(built, 1, 0.5, 1.0, 0.5).finish
        assert finish < simulate(build_packs("interleaved", packs_of("interleaved", d, 2), m), 1, 0.5, 1.0).finish
        assert most_in_flight(built.expand(0, 1)) / 2 <= d


def test_the_picture_names_stages_where_ranks_have_several():
    assert "2F0" in format_grid(build_packs("interleaved", ((0, 2), (1, 3)), 4), 1)


# ------------------------------------------------------------------------------------------------ never drained


@pytest.mark.parametrize(("kind", "like"), [("interleaved-2bw", "interleaved"), ("wrap-2bw", "wrap")])
@pytest.mark.parametrize("d", range(1, 7))
@pytest.mark.parametrize("v", range(1, 5))
def test_a_schedule_that_never_drains_has_no_bubble(kind, like, d, v):
    """Each further batch takes m(tf+tb) of all stages of a rank. It is that of the one that drains, but for the ends of
    batches: as many forwards at the start, and the same backwards."""
    for m in range(max(1, 2 * d - 2), 19):
        if not PACK_SCHEDULES[kind].is_legal(d, m):
            continue
        packs = packs_of(kind, d, v)
        built, drained = build_packs(kind, packs, m), build_packs(like, packs, m)
        seconds = [simulate(built, batches, 1 / v, 2 / v).finish for batches in (4, 7)]
        assert seconds[1] - seconds[0] == pytest.approx(3 * 3 * m)
        for rank, program in built.ranks.items():
            batch = drained.ranks[rank].batch
            assert all(a == b for a, b in zip(program.start, batch, strict=False) if b.kind == "F")
            assert [a for a in program.batch if a.kind == "B"] == [a for a in batch if a.kind == "B"]
            for stage in packs[rank]:
                assert sorted(a.kind for a in program.batch if a.stage == stage) == ["B"] * m + ["F"] * m + ["U"]


@pytest.mark.parametrize(("d", "m"), [(3, 1), (4, 2), (6, 4)])
def test_so_few_microbatches_would_wait_for_ever(d, m):
    """One more runs. The control: the order that is refused, by its turns, does wait."""
    packs = packs_of("interleaved-2bw", d, 2)
    for kind in ("interleaved-2bw", "wrap-2bw"):
        with pytest.raises(UsageError, match="would wait for ever"):
            build_packs(kind, packs, m)
        simulate(build_packs(kind, packs, m + 1), 3)
    programs = {}
    for rank, stages in enumerate(packs):
        turns = Turns(PackPlace(rank, d, stages), m, m)
        pairs = [(turns.forward(turns.ahead + turn), turns.backward(turn)) for turn in range(2 * m)]
        start = tuple(turns.forward(turn) for turn in range(turns.ahead))
        programs[rank] = Program(start, tuple(action for pair in pairs for action in pair))
    with pytest.raises(VerifyError):
        simulate(Schedule("interleaved-2bw", m, programs), 3)


def test_updates_come_one_after_the_other():
    """U of a stage stands behind its last backward, and forwards of the next batch behind it."""
    program = build_packs("interleaved-2bw", packs_of("interleaved-2bw", 2, 2), 4).ranks[0]
    listed = [(a.kind, a.stage) for a in program.batch]
    assert [listed[i - 1] for i, entry in enumerate(listed) if entry[0] == "U"] == [("B", 2), ("B", 0)]
    assert any(entry[0] == "F" for entry in listed[listed.index(("U", 2)) :])


@pytest.mark.parametrize("kind", ["interleaved-2bw", "wrap-2bw"])
@pytest.mark.parametrize(("d", "v"), [(1, 2), (2, 2), (2, 3), (3, 2), (4, 2)])
def test_two_versions_take_as_many_microbatches_as_forwards_run_ahead(d, v, kind):
    """Legal iff m >= 2d-2, as the checker of versions finds it, which knows nothing of schedules."""
    module = chain_model([4] * (d * v + 1), [], False).but(cluster=Cluster.local(d))
    stages = tuple(f"layer{i}" for i in range(1, d * v))

    def with_microbatches(m):
        options = PipelineOptions(schedule=kind, microbatches=m, packs=v, recompute="none")
        return training_pipeline({"kind": "sgd", "lr": 0.1}, {"split_at": stages}, options)

    for m in range(1, 2 * d + 2):
        if m >= d - 1 and PACK_SCHEDULES[kind].refused(d, m):
            continue
        calls = with_microbatches(m)
        if m >= 2 * d - 2:
            run_passes(module, calls, PASSES)
            continue
        with pytest.raises(VerifyError if m >= d - 1 else UsageError) as error:
            run_passes(module, calls, PASSES)
        said = f"{error.value} {error.value.hint}"
        assert "schedule interleaved" in said
        # What it says can be done.
        (size,) = set(re.findall(r"([0-9]+) microbatches(?: or|, or)", said))
        run_passes(module, with_microbatches(int(size)), PASSES)


def test_a_batch_that_never_drains_is_dealt_to_pipelines_beside_each_other():
    share = (4, 4)
    built, dealt = build_packs("interleaved-2bw", packs_of("interleaved-2bw", 2, 2), 8, share), deal(share)
    alone = build_packs("interleaved-2bw", packs_of("interleaved-2bw", 2, 2), 4)
    for team, numbers in enumerate(dealt):
        for place in range(2):
            there, expected = built.ranks[2 * place + team], alone.ranks[place]
            for actions, others in ((there.start, expected.start), (there.batch, expected.batch)):
                own = [a if a.once else a._replace(mb=a.mb // 8 * 4 + numbers.index(a.mb % 8)) for a in actions]
                assert own == list(others)


# ------------------------------------------------------------------------------------------------ whole programs

WIDTHS, M = (8, 8, 8, 8, 8), 4


def compiled(schedule: str, devices: int, packs: int = 1, tied: bool = False, skips: Sequence[tuple[int, int]] = ()):
    module = chain_model(list(WIDTHS), list(skips), tied).but(cluster=Cluster.local(devices))
    guard = {"clip": 0.5}
    options = PipelineOptions(schedule=schedule, microbatches=M, packs=packs, recompute="none", guard=guard)
    stages = tuple(f"layer{i}" for i in range(1, devices * packs))
    calls = training_pipeline({"kind": "adamw", "lr": 0.1}, {"split_at": stages}, options)
    return run_passes(module, calls, PASSES)


def trained(module: Module):
    draw = np.random.default_rng(5)
    weights = {n: draw.standard_normal(var.type.dims).astype("f4") for n, var in module.vars.items() if n[0] in "ws"}
    batches = [
        {v.name: draw.standard_normal((4 * M, *v.type.dims[1:])).astype("f4") for v in module.data_inputs}
        for _ in range(3)
    ]
    return run_schedule(module, {n: w for n, w in weights.items() if module.vars[n].role == "param"}, batches)


@pytest.mark.parametrize("kind", list(PACK_SCHEDULES))
@pytest.mark.parametrize(("tied", "skips"), [(False, ()), (True, ()), (False, ((0, 2), (1, 3)))])
def test_packs_compute_what_a_device_per_stage_does(kind, tied, skips):
    """Under a schedule of the same delay. Gradients are clipped, so that updates wait for other stages."""
    single = "2bw" if PACK_SCHEDULES[kind].delay else "1f1b"
    whole, packed = compiled(single, 4, tied=tied, skips=skips), compiled(kind, 2, 2, tied=tied, skips=skips)
    verify(packed)
    assert parse_module(print_module(packed)) == packed
    one, other = trained(whole), trained(packed)
    assert one.losses == other.losses
    assert len(one.losses) == 3 * M
    for name, array in one.variables.items():
        assert np.array_equal(array, other.variables[name]), name


def test_stages_of_one_rank_exchange_no_messages():
    module = compiled("zb-v", 2, 2)
    assert [line for line in print_module(module).splitlines() if " runs " in line][:2] == [
        "  rank 0 on cpu:0 runs 0 3",
        "  rank 1 on cpu:1 runs 1 2",
    ]
    assert any((edge.src, edge.dst) == (1, 2) for edge in module.edges)
    assert module.schedule is not None
    sent = {(a.stage, a.end) for a in module.schedule.actions() if a.kind in MESSAGES}
    assert sent
    assert not sent & {(1, 2), (2, 1), (0, 3), (3, 0)}
    # Without packs nothing of it is in the text.
    assert " runs " not in print_module(compiled("1f1b", 4))


def test_copies_of_a_tied_weight_on_one_rank_exchange_nothing():
    """All readers are on one rank: P has no message. With a device per stage it has."""

    def exchanged(module: Module) -> int:
        assert module.schedule is not None
        return sum(a.kind == "SP" for a in module.schedule.actions())

    for kind in PACK_SCHEDULES:
        assert exchanged(compiled("1f1b", 4, tied=True)) > 0
        assert exchanged(compiled(kind, 1, 2 if kind == "zb-v" else 4, tied=True)) == 0


def test_variables_of_a_rank_are_those_of_its_stages():
    """What its values take together is the business of tests/runtime/telemetry/test_memory_of_packs.py."""
    whole, packed = measure_memory(compiled("1f1b", 4)), measure_memory(compiled("interleaved", 2, 2))
    for rank, stages in enumerate([(0, 2), (1, 3)]):
        assert packed[rank].fixed == sum(whole[stage].fixed for stage in stages)
    module = compiled("zb-v", 2, 2)
    course = memory_course(module, 1, 3)
    assert course.held[-1][:2] == (0, 0)
    row = measure_memory(module)[1]
    assert max(map(sum, course.held)) + row.fixed + row.data == row.peak


def changed(module: Module, rank: int, change) -> Module:
    assert module.schedule is not None
    program = module.schedule.ranks[rank]
    ranks = {**module.schedule.ranks, rank: Program(program.start, tuple(change(list(program.batch))))}
    return module.but(schedule=Schedule(module.schedule.name, module.schedule.microbatches, ranks))


def refused(module: Module) -> str:
    with pytest.raises(VerifyError) as error:
        verify(module)
    return str(error.value)


def test_wrong_programs_of_packs_are_refused():
    module = compiled("zb-v", 2, 2)

    def early(batch: list[Action]) -> list[Action]:
        first = next(a for a in batch if (a.kind, a.stage) == ("F", 2))
        return [first, *[a for a in batch if a != first]]

    assert "of the same rank, whose results it takes" in refused(changed(module, 1, early))

    def elsewhere(batch: list[Action]) -> list[Action]:
        return [a._replace(end=2) if (a.kind, a.stage) == ("SF", 0) else a for a in batch]

    assert "there is no F edge between stages 0 and 2" in refused(changed(module, 0, elsewhere))

    def unnamed(batch: list[Action]) -> list[Action]:
        return [a._replace(end=None) for a in batch]

    assert "there is no F edge" in refused(changed(module, 0, unnamed))
    assert "runs stages 0, 3, expected one" in refused(module.but(packs=()))
    assert "expected each of the module in one pack" in refused(module.but(packs=((0, 3), (1,))))


def test_the_text_of_packs_is_checked():
    text = print_module(compiled("zb-v", 2, 2))
    with pytest.raises(ParseError, match="stages whose next device is cpu:0"):
        parse_module(text.replace("rank 0 on cpu:0 runs 0 3", "rank 0 on cpu:0 runs 0 1"))
