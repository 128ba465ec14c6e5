"""The checkers of schedules: every kind of fault is found, and told with its place. That no fault gets past is tests/passes/test_mutants.py."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from penstock.ir.cluster import Cluster, Device
from penstock.ir.errors import DoesNotFit, VerifyError
from penstock.ir.graph import Edge
from penstock.ir.schedule import Action, Program, Schedule
from penstock.ir.verify import check, verify
from penstock.passes.communicate import communicate
from penstock.passes.lifetimes import lifetimes
from penstock.passes.schedules import ScheduleOptions, schedule
from penstock.passes.weight_versions import WeightVersionsOptions, weight_versions

FACTS = ("scheduled", "versioned", "wired", "freed")


def pipeline(module, kind="2bw", m=3, **options):
    module = weight_versions(schedule(module, ScheduleOptions(kind, m)), WeightVersionsOptions(**options))
    module = lifetimes(communicate(module))
    return module.but(facts=module.facts + FACTS)


def with_batch(module, rank, text):
    """The module with the batch list of one rank replaced."""
    old = module.schedule
    program = Program(old.ranks[rank].start, tuple(map(Action.parse, text.split())))
    return module.but(schedule=Schedule(old.name, old.microbatches, {**old.ranks, rank: program}))


def edited(module, rank, *pairs):
    """The module with words of one rank's batch list replaced."""
    text = " ".join(map(str, module.schedule.ranks[rank].batch))
    for old, new in pairs:
        assert old in text, (old, text)
        text = text.replace(old, new)
    return with_batch(module, rank, text)


def message(module, *facts):
    with pytest.raises((VerifyError, DoesNotFit)) as caught:
        check(module, facts) if facts else verify(module)
    return str(caught.value)


@pytest.fixture
def two(toy):
    return pipeline(toy(2), "1f1b", 2)


def test_the_text_these_tests_edit(two):
    verify(two)
    assert " ".join(map(str, two.schedule.ranks[0].batch)) == ("0F2@1 0SF2>1 0F3@1 0SF3>1 0RB2<1 0B2@1 0D2 0RB3<1 0B3@1 0D3 0U1@2")
    assert " ".join(map(str, two.schedule.ranks[1].batch)) == "1RF2<0 1F2@1 1B2@1 1SB2>0 1D2 1RF3<0 1F3@1 1B3@1 1SB3>0 1D3 1U1@2"


# rank, (old, new) words, what the message must say
FAULTS = [
    (0, [("0F3@1 0SF3>1 ", "")], ["rank 0", "never runs @s0.F for microbatch 1"]),
    (0, [("0D2 ", "0D2 0B2@1 ")], ["rank 0 step 7 (0B0@0): was already done at step 5"]),
    (0, [("0B2@1 0D2", "0D2")], ["uses the gradients of microbatches 1, expected 0..1"]),
    (0, [(" 0U1@2", ""), ("0RB3<1 0B3@1", "0U1@2 0RB3<1 0B3@1")], ["(0U0@1): uses the gradients of microbatches 0, expected 0..1"]),
    (0, [(" 0U1@2", "")], ["never runs @s0.U for batch 0"]),
    (0, [("0F2@1 0SF2>1 ", ""), ("0D2", "0D2 0F2@1 0SF2>1")], ["(0B0@0): microbatch 0 has not run forward on stage 0 yet"]),
    (0, [("0F2@1", "0F2@1 0F1@1")], ["(0F1@1): was already done at step 2"]),
    (0, [("0F2@1", "0F2@0")], ["(1F2@1): reads version 1, but microbatch 2 has version 0 in rank 0 step 11 (0F2@0)"]),
    (0, [("0B2@1", "0B2@0")], ["(0B2@0): reads version 0", "microbatch 2 has version 1 in rank 0"]),
    (0, [("0F2@1", "0F2")], ["(0F0): has no version, expected @<version>"]),
    (0, [("0U1@2", "0U1@3")], ["(0U0@2): makes version 2, expected 1"]),
    (
        0,
        [("0SF2>1 ", "")],
        ["rank 1 step 0 (1RF0<0)", "rank 0 never sends this message", "its results are never sent to stage 1 (0SF0>1)"],
    ),
    (1, [("1RF2<0 ", "")], ["(1F0@0): runs before its inputs from stage 0 have arrived (1RF0<0)", "rank 1 never receives this message"]),
    (1, [("1RF2<0", "1RF2<0 1RF2<0")], ["rank 1 step 1 (1RF0<0): was already done at step 0"]),
    (0, [("0F2@1 0SF2>1", "0SF2>1 0F2@1")], ["(0SF0>1): sends what 0F0 has not computed yet"]),
    (0, [("0SF2>1 0F3@1 0SF3>1", "0F3@1 0SF3>1 0SF2>1")], ["(1RF0<0): receives F0 where rank 0 step 2 (0SF1>1) sends F1"]),
    (0, [("0SF2>1", "0SF2>1 0SB2>1")], ["(0SB0>1)", "there is no B edge between stages 0 and 1 in that direction"]),
    (0, [("0D2 ", "")], ["microbatch 0 is never dropped on stage 0 (no 0D0)"]),
    (0, [("0D2 ", "0D2 0D2 ")], ["(0D0): microbatch 0 was dropped at step 6, and this drops it a second time"]),
    (0, [(" 0D2", ""), ("0RB2<1", "0D2 0RB2<1")], ["microbatch 0 was dropped at step 4, and this needs it"]),
    (0, [("0F2@1", "0D3 0F2@1")], ["(0D1): stage 0 holds nothing of microbatch 1"]),
]


@pytest.mark.parametrize(("rank", "pairs", "said"), FAULTS, ids=[" ".join(said)[:60] for _, _, said in FAULTS])
def test_each_fault_is_found_and_told(two, rank, pairs, said):
    text = message(edited(two, rank, *pairs))
    for part in said:
        assert part in text, text
    assert "schedule 1f1b, run of" in text


def test_a_fault_is_shown_with_three_steps_around(two):
    text = message(edited(two, 0, ("0U1@2", "0U1@3")))
    assert text.splitlines()[1:] == ["        7 | 0RB1<1", "        8 | 0B1@0", "        9 | 0D1", "  >    10 | 0U0@2"]
    assert text.startswith("@toy schedule 1f1b, run of 1 batch from batch 0, rank 0 step 10 (0U0@2): makes version 2, expected 1")


def test_a_deadlock_is_told_as_a_circle(two):
    crossed = edited(two, 0, ("0F2@1 0SF2>1 0F3@1 0SF3>1 0RB2<1", "0F2@1 0RB2<1 0SF2>1 0F3@1 0SF3>1"))
    text = message(crossed)
    assert (
        "deadlock: rank 0 step 1 (0RB0<1) waits for rank 1 step 3 (1SB0>0), rank 1 step 0 (1RF0<0) waits for rank 0 step 2 (0SF0>1)" in text
    )
    assert "  >     1 | 0RB0<1" in text
    assert "  >     0 | 1RF0<0" in text


def test_a_deadlock_shows_before_sends_exist(toy):
    plain = schedule(toy(3), ScheduleOptions("1f1b", 2))
    check(plain, ("scheduled",))
    late = with_batch(plain, 1, "1F3 1B3 1F2 1B2 1U1")
    late = with_batch(late, 2, "2F2 2B2 2F3 2B3 2U1")
    assert "deadlock: " in message(with_batch(late, 0, "0F2 0F3 0B2 0B3 0U1"), "scheduled")


def test_one_slot_is_not_enough_for_2bw(toy):
    text = message(pipeline(toy(3), "2bw", 2, versions=1, checked=False))
    assert "rank 0 step 14 (0U0@1): makes version 1 of @w0 in the slot of version 0, which rank 0 step 19 (0B3@0) still reads" in text
    assert "still reads; 1 version is kept" in text
    assert "hint: keep 2 versions or schedule 1f1b" in text


def test_the_pass_refuses_what_the_checker_refuses(toy):
    with pytest.raises(VerifyError, match="in the slot of version 0"):
        pipeline(toy(3), "2bw", 2, versions=1)
    with pytest.raises(VerifyError, match="which is made only later by"):
        pipeline(toy(3), "2bw", 2, delay=0)
    with pytest.raises(VerifyError, match=r"microbatches >= 3 or schedule 1f1b"):
        pipeline(toy(4), "2bw", 2)


def test_more_slots_or_more_delay_than_needed_are_legal(toy):
    verify(pipeline(toy(3), "1f1b", 2, versions=3))
    verify(pipeline(toy(3), "1f1b", 2, delay=1))


def test_a_read_that_does_not_follow_the_microbatch_is_told(two):
    graph = two.graphs["s1.B"]
    ops = tuple(op.with_attrs(version=None) if op.kind == "read" else op for op in graph.ops)
    text = message(two.with_graph(replace(graph, ops=ops)))
    assert "@s1.B op 1: reads @w1 in version latest, expected version=mb" in text
    graph = two.graphs["s1.U"]
    ops = tuple(op.with_attrs(version="mb") if op.kind == "read" else op for op in graph.ops)
    assert "@s1.U op 0: reads @w1 in version mb, expected version=latest" in message(two.with_graph(replace(graph, ops=ops)))


def test_edges_must_be_what_the_graphs_need(two):
    forward, backward = two.edges
    assert "edge 1>0 B: there is none, but @s0.B takes %h0.grad : f32[4] from @s1.B" in message(two.but(edges=(forward,)))
    assert "edge 0>1 F: carries nothing, expected %h0 : f32[4]" in message(two.but(edges=(replace(forward, values=()), backward)))
    assert "edge 1>0 F: carries %h0 : f32[4], which @s0.F does not take" in message(
        two.but(edges=(*two.edges, Edge(1, 0, "F", forward.values)))
    )
    assert "two edges have the same" in message(two.but(edges=(*two.edges, forward)))


def test_stages_and_ranks_belong_together(two):
    ranks = two.schedule.ranks
    assert "stage 1: runs on no rank, expected rank 1 on cpu:1" in message(two.but(schedule=Schedule("1f1b", 2, {0: ranks[0]})))
    doubled = Schedule("1f1b", 2, {**ranks, 2: ranks[1]})
    assert "stage 1: runs on ranks 1, 2, expected rank 1 on cpu:1" in message(two.but(schedule=doubled))
    assert "1RF2<0 is of stage 1, which does not exist" in message(two.but(stages=two.stages[:1]), "scheduled")
    assert "0 microbatches per batch" in message(two.but(schedule=replace(two.schedule, microbatches=0)))
    assert "schedule: there is none" in message(two.but(schedule=None))
    graphs = {n: g for n, g in two.graphs.items() if n != "s0.U"}
    assert "there is no graph @s0.U" in message(two.but(graphs=graphs), "scheduled")


def test_parameters_of_two_stages_need_the_whole_gradient(two):
    """Both stages update @w0 by their own part of its gradient only: the copies would differ."""
    names = {"w1": "w0", "w1.grad": "w0.grad"}

    def tie(op):
        return op.with_attrs(var=names.get(op.var, op.var)) if "var" in op.attrs else op

    graphs = {n: replace(g, ops=tuple(map(tie, g.ops))) for n, g in two.graphs.items()}
    shared = {n: replace(v, stage=None) for n, v in two.vars.items() if n in ("w0", "w0.grad")}
    tied = two.but(graphs=graphs, vars=shared)
    text = message(tied)
    for stage, source in product(range(2), repeat=2):
        assert f"@s{stage}.U: updates @w0 without the part of its gradient from stage {source}; stages [0, 1] update it" in text


def test_sums_of_ranks_in_different_orders_are_told(toy):
    """Sums go on in the background, so that two of them may be under way: both ranks begin them in the same order."""
    several = pipeline(toy(1, devices=(2,)), "2bw", 2)
    text = message(edited(several, 1, ("0AR1", "0AR2")), "wired")
    assert "ranks 0, 1 sum in different orders: rank 0 [0], rank 1 []" in text


def test_memory_over_the_budget_of_a_device_is_told(two):
    def cluster(size):
        return two.but(cluster=Cluster((Device("cpu:0", spaces=(("ram", size),)), Device("cpu:1"))))

    peak = next(n for n in range(1, 10**4) if _fits(cluster(n)))
    assert f"device cpu:0: needs {peak} bytes at the worst moment (rank 0 {peak}), it has {peak - 1}" in message(cluster(peak - 1))


def _fits(module):
    try:
        verify(module)
    except DoesNotFit:
        return False
    return True
