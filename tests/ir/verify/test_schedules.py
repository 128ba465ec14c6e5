"""The checkers of schedules: every kind of fault is found, and told with its place. That no fault gets past is tests/passes/schedules/test_mutants.py."""

from __future__ import annotations

import re
from bisect import bisect_left
from dataclasses import replace
from itertools import product

import pytest

from penstock.ir.cluster.cluster import Cluster, Device
from penstock.ir.graph import Edge
from penstock.ir.memory.predict import measure_memory
from penstock.ir.schedule import Action, Program, Schedule
from penstock.ir.verify import runs as verify_runs
from penstock.ir.verify.verifier import check, verify
from penstock.passes.schedules.schedule import ScheduleOptions, schedule
from penstock.support.errors import DoesNotFit, VerifyError
from penstock.support.words import exact_bytes, shown_bytes

from .edits import FACTS, edited, message, pipeline, with_batch


@pytest.fixture
def two(toy):
    return pipeline(toy(2), "1f1b", 2)


def test_the_text_these_tests_edit(two):
    verify(two)
    assert " ".join(map(str, two.schedule.ranks[0].batch)) == (
        "0F2@1 0SF2>1 0F3@1 0SF3>1 0RB2<1 0B2@1 0D2 0RB3<1 0B3@1 0D3 0U1@2"
    )
    assert (
        " ".join(map(str, two.schedule.ranks[1].batch))
        == "1RF2<0 1F2@1 1B2@1 1SB2>0 1D2 1RF3<0 1F3@1 1B3@1 1SB3>0 1D3 1U1@2"
    )


# rank, (old, new) words, what the message must say
FAULTS = [
    (0, [("0F3@1 0SF3>1 ", "")], ["rank 0", "never runs @s0.F for microbatch 1"]),
    (0, [("0D2 ", "0D2 0B2@1 ")], ["rank 0 step 7 (0B0@0): was already done at step 5"]),
    (0, [("0B2@1 0D2", "0D2")], ["uses the gradients of microbatches 1, expected 0..1"]),
    (0, [("0B2@1 0D2", "0D2"), ("0B3@1 0D3", "0D3")], ["uses the gradients of microbatches none, expected 0..1"]),
    (0, [("0D2 ", "0D2 0AR2 ")], ["(0AR1): stage 0 has no gradients that several ranks add to"]),
    (0, [("0D2 ", "0D2 0W2@1 ")], ["(0W0@0): there is no graph @s0.W"]),
    (
        0,
        [(" 0U1@2", ""), ("0RB3<1 0B3@1", "0U1@2 0RB3<1 0B3@1")],
        ["(0U0@1): uses the gradients of microbatches 0, expected 0..1"],
    ),
    (0, [(" 0U1@2", "")], ["never runs @s0.U for batch 0"]),
    (
        0,
        [("0F2@1 0SF2>1 ", ""), ("0D2", "0D2 0F2@1 0SF2>1")],
        ["(0B0@0): microbatch 0 has not run forward on stage 0 yet"],
    ),
    (0, [("0F2@1", "0F2@1 0F1@1")], ["(0F1@1): was already done at step 2"]),
    (0, [("0F2@1", "0F2@0")], ["(1F2@1): reads version 1, but microbatch 2 has version 0 in rank 0 step 11 (0F2@0)"]),
    (0, [("0B2@1", "0B2@0")], ["(0B2@0): reads version 0", "microbatch 2 has version 1 in rank 0"]),
    (0, [("0F2@1", "0F2")], ["(0F0): has no version, expected @<version>"]),
    (0, [("0U1@2", "0U1@3")], ["(0U0@2): makes version 2, expected 1"]),
    (
        0,
        [("0SF2>1 ", "")],
        [
            "rank 1 step 0 (1RF0<0)",
            "rank 0 never sends this message",
            "its results are never sent to stage 1 (0SF0>1)",
            "rank 1 step 0 (1RF0<0): deadlock: waits for something that no rank ever does",
        ],
    ),
    (
        1,
        [("1RF2<0 ", "")],
        ["(1F0@0): runs before its inputs from stage 0 have arrived (1RF0<0)", "rank 1 never receives this message"],
    ),
    (1, [("1RF2<0", "1RF2<0 1RF2<0")], ["rank 1 step 1 (1RF0<0): was already done at step 0"]),
    (0, [("0F2@1 0SF2>1", "0SF2>1 0F2@1")], ["(0SF0>1): sends what 0F0 has not computed yet"]),
    (
        0,
        [("0SF2>1 0F3@1 0SF3>1", "0F3@1 0SF3>1 0SF2>1")],
        ["(1RF0<0): receives F0 where rank 0 step 2 (0SF1>1) sends F1"],
    ),
    (
        0,
        [("0SF2>1", "0SF2>1 0SF2>7")],
        ["(0SF0>7): there is no F edge between stages 0 and the stage of rank 7 in that direction"],
    ),
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


@pytest.mark.parametrize(
    ("rank", "pairs", "said"),
    [
        (0, [("0D2 ", "0D2 0B2@1 "), ("0D3 ", "0D3 0B3@1 ")], "was already done"),
        (0, [("0F2@1", "0F2"), ("0F3@1", "0F3")], "has no version"),
        (1, [("1RF2<0 ", ""), ("1RF3<0 ", "")], "runs before its inputs"),
    ],
)
def test_of_faults_of_one_kind_a_rank_tells_the_first(two, rank, pairs, said):
    assert message(edited(two, rank, *pairs)).count(said) == 1


@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        ([("0D2 ", "0D2 0D2 "), ("0D3 ", "0D3 0D3 ")], "was dropped at step"),
        ([("0F2@1", "0D2 0D3 0F2@1"), ("0B2@1 0D2", "0B2@1"), ("0B3@1 0D3", "0B3@1")], "holds nothing"),
        ([("0B2@1 0D2", "0B2@1"), ("0B3@1 0D3", "0B3@1")], "is never dropped"),
    ],
)
def test_of_faulty_drops_a_rank_tells_the_first(two, pairs, said):
    text = message(edited(two, 0, *pairs), "freed")
    assert text.count(said) == 1
    assert "problems" not in text


@pytest.mark.parametrize("action", ["0AR2", "0W2@1", "0AR2 0W2@1"])
def test_what_has_no_graph_has_no_consequences(two, action):
    assert "problems" not in message(edited(two, 0, ("0D2 ", f"0D2 {action} ")))


def test_small_schedules_are_legal(toy):
    for stages, kind in ((1, "1f1b"), (2, "gpipe"), (2, "2bw")):
        verify(pipeline(toy(stages), kind, 1))
    for devices in ((2, 1), (1, 2)):
        verify(pipeline(toy(2, devices=devices), "1f1b", 2))
    verify(pipeline(toy(1, devices=(2,), trains=False), "forward", 2))


def test_faults_of_stages_on_several_devices(toy):
    several = pipeline(toy(1, devices=(2,)), "1f1b", 4)
    assert " ".join(map(str, several.schedule.ranks[0].batch)) == "0F4@1 0B4@1 0D4 0F6@1 0B6@1 0D6 0AR1 0U1@2"
    assert "(0B1@0): runs forward on another rank of stage 0" in message(edited(several, 0, ("0B4@1", "0B4@1 0B5@1")))
    assert "rank 0: never runs @s0.B for microbatch 0" in message(edited(several, 0, ("0B4@1 0D4", "0D4")))
    into, out = (pipeline(toy(2, devices=devices), "1f1b", 2) for devices in ((2, 1), (1, 2)))
    assert "runs before its inputs from stage 0 have arrived (1RF0<0|1)" in message(edited(into, 2, ("1RF2<0 ", "")))
    assert "its results are never sent to stage 1 (0SF0>1|2)" in message(edited(out, 0, ("0SF2>1 ", "")))
    assert "its results are never sent to stage 1 (0SF0>2)" in message(edited(into, 0, ("0SF2>2 ", "")))


def counting(toy):
    """Stage 0 trains nothing, but counts batches."""
    module = toy(2)
    forward, update = module.graphs["s0.F"], module.graphs["s0.U"]
    read, write = update.ops[0], update.ops[-1]
    counting = (read.with_attrs(var="count"), replace(write, ins=read.outs).with_attrs(var="count"))
    graphs = {name: graph for name, graph in module.graphs.items() if name != "s0.B"}
    graphs |= {"s0.F": replace(forward, saved=()), "s0.U": replace(update, ops=counting)}
    graphs["s1.B"] = replace(graphs["s1.B"], outs=())
    count = replace(module.vars["w0"], name="count", role="state")
    variables = {name: var for name, var in module.vars.items() if name != "w0.grad"} | {"count": count}
    return module.but(graphs=graphs, vars=variables)


def test_a_stage_without_gradients_may_have_an_update(toy):
    verify(pipeline(counting(toy), "1f1b", 2))


def test_a_version_that_was_overwritten_before_the_run_is_told(toy):
    """Forward reads the count, and its first microbatch does so too late, which shows in runs from a later batch alone."""
    module = counting(toy)
    forward, update = module.graphs["s0.F"], module.graphs["s0.U"]
    read = replace(update.ops[0], outs=(replace(update.ops[0].outs[0], name="c"),))
    module = pipeline(module.with_graph(replace(forward, ops=(*forward.ops, read))), "1f1b", 2)
    first, second = "0F2@1 0SF2>1 0D2", "0F3@1 0SF3>1 0D3"
    assert " ".join(map(str, module.schedule.ranks[0].batch)) == f"{first} {second} 0U1@2"

    def early(version):
        """With the first microbatch of each batch run at the end of the batch before."""
        moved = edited(module, 0, (f"{first} {second} 0U1@2", f"{second} 0U1@2 0F4@2 0SF4>1 0D4")).schedule
        start = tuple(map(Action.parse, f"0F2@{version} 0SF2>1 0D2".split()))
        return module.but(schedule=replace(moved, ranks={**moved.ranks, 0: Program(start, moved.ranks[0].batch)}))

    verify(early(1))
    text = message(early(0), "versioned")
    assert (
        "from batch 2, rank 0 step 0 (0F4@1): reads version 1 of @count, which version 2 has overwritten; 1 kept"
        in text
    )
    assert "hint: keep 2 versions" in text


def test_what_a_stage_has_already_does_not_travel(toy):
    """Stage 2 hands out the input of the module, and in its backward what stage 1 has saved."""
    module = toy(3)
    first, last, backward = (module.graphs[name] for name in ("s0.F", "s1.F", "s2.B"))
    again = replace(first.outs[0], name="h0")
    made = replace(backward.ops[0], kind="neg", attrs={}, ins=(backward.ins[0],), outs=(again,))
    module = module.with_graph(replace(first, outs=(*first.outs, first.ins[0])))
    module = module.with_graph(replace(last, ins=(*last.ins, module.inputs[0])))
    module = module.with_graph(replace(backward, ops=(*backward.ops, made), outs=(*backward.outs, again)))
    check(pipeline(module, "1f1b", 2), ("wired",))


def test_a_fault_is_shown_with_three_steps_around(two):
    text = message(edited(two, 0, ("0U1@2", "0U1@3")))
    assert text.splitlines()[1:] == ["        7 | 0RB1<1", "        8 | 0B1@0", "        9 | 0D1", "  >    10 | 0U0@2"]
    assert text.startswith(
        "@toy schedule 1f1b, run of 1 batch from batch 0, rank 0 step 10 (0U0@2): makes version 2, expected 1"
    )


def test_a_gap_in_a_list_of_microbatches_is_told(toy):
    three = pipeline(toy(1), "1f1b", 3)
    assert "uses the gradients of microbatches 0, 2, expected 0..2" in message(edited(three, 0, ("0B4@1 ", "")))


def test_a_deadlock_is_told_as_a_circle(two):
    crossed = edited(two, 0, ("0F2@1 0SF2>1 0F3@1 0SF3>1 0RB2<1", "0F2@1 0RB2<1 0SF2>1 0F3@1 0SF3>1"))
    text = message(crossed)
    assert (
        "deadlock: rank 0 step 1 (0RB0<1) waits for rank 1 step 3 (1SB0>0), rank 1 step 0 (1RF0<0) waits for rank 0 step 2 (0SF0>1)"
        in text
    )
    assert "  >     1 | 0RB0<1" in text
    assert "  >     0 | 1RF0<0" in text


def test_with_sends_a_deadlock_is_one_of_messages(two):
    late = edited(
        two, 0, ("0F2@1 0SF2>1 0F3@1 0SF3>1 0RB2<1 0B2@1 0D2 ", "0F2@1 0SF2>1 0RB2<1 0B2@1 0D2 0F3@1 0SF3>1 ")
    )
    first, second = "1RF2<0 1F2@1 1B2@1 1SB2>0 1D2 ", "1RF3<0 1F3@1 1B3@1 1SB3>0 1D3 "
    assert "deadlock: rank 0 step 2 (0RB0<1) waits for rank 1 step 8 (1SB0>0)" in message(
        edited(late, 1, (first + second, second + first))
    )


def test_a_deadlock_shows_before_sends_exist(toy):
    plain = schedule(toy(3), ScheduleOptions("1f1b", 2))
    check(plain, ("scheduled",))
    late = with_batch(plain, 1, "1F3 1B3 1F2 1B2 1U1")
    late = with_batch(late, 2, "2F2 2B2 2F3 2B3 2U1")
    assert "deadlock: " in message(with_batch(late, 0, "0F2 0F3 0B2 0B3 0U1"), "scheduled")


def test_one_slot_is_not_enough_for_2bw(toy):
    text = message(pipeline(toy(3), "2bw", 2, versions=1, checked=False))
    assert (
        "rank 0 step 14 (0U0@1): makes version 1 of @w0 in the slot of version 0, which rank 0 step 19 (0B3@0) still reads"
        in text
    )
    assert "still reads; 1 version is kept" in text
    assert "hint: keep 2 versions or schedule 1f1b" in text
    assert "has overwritten" not in text


def test_what_would_be_legal_is_told(toy):
    def said(module, kind, m):
        return message(pipeline(module, kind, m, checked=False), "versioned")

    text = said(toy(4), "eager-2bw", 5)
    assert "(6 forwards run ahead, a delay of 1 at 5 microbatches allows 5; this would need 3 live versions)" in text
    assert "hint: microbatches >= 6 or schedule 1f1b" in text
    # A stage that only runs forward is ahead of nothing.
    module = toy(5)
    graphs = {name: graph for name, graph in module.graphs.items() if name not in ("s0.B", "s0.U")}
    graphs |= {"s0.F": replace(graphs["s0.F"], saved=()), "s1.B": replace(graphs["s1.B"], outs=())}
    frozen = module.but(graphs=graphs, vars={name: var for name, var in module.vars.items() if name != "w0.grad"})
    assert "hint: microbatches >= 3 or schedule 1f1b" in said(frozen, "2bw", 2)
    plain = edited(pipeline(toy(2), "1f1b", 2), 0, (" 0U1@2", ""), ("0F2@1 ", "0F2@1 0U0@1 "))
    text = message(plain, "versioned")
    assert re.search(r"which is made only later by rank 0 step \d+ \(0U0@1\); the newest then is 0\n", text)
    assert "hint" not in text


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
    assert "@s1.U op 0: reads @w1 in version mb, expected version=latest" in message(
        two.with_graph(replace(graph, ops=ops))
    )


def test_edges_must_be_what_the_graphs_need(two):
    forward, backward = two.edges
    assert "edge 1>0 B: there is none, but @s0.B takes %h0.grad : f32[4] from @s1.B" in message(
        two.but(edges=(forward,))
    )
    assert "edge 0>1 F: carries nothing, expected %h0 : f32[4]" in message(
        two.but(edges=(replace(forward, values=()), backward))
    )
    one = two.graphs["s0.F"].ops[0].outs[0]
    assert "edge 0>1 F: carries %w : f32[4], expected %h0 : f32[4]" in message(
        two.but(edges=(replace(forward, values=(one,)), backward))
    )
    assert "edge 1>0 F: carries %h0 : f32[4], which @s0.F does not take" in message(
        two.but(edges=(*two.edges, Edge(1, 0, "F", forward.values)))
    )
    handed = Edge(0, 1, "P", forward.values)
    assert "edge 0>1 P: carries %h0 : f32[4], which @s1.N or @s1.U does not take" in message(
        two.but(edges=(*two.edges, handed))
    )
    assert "@toy edges: two edges have the same" in message(two.but(edges=(*two.edges, forward)))


def test_stages_and_ranks_belong_together(two):
    ranks = two.schedule.ranks
    assert "stage 1: runs on no rank, expected rank 1 on cpu:1" in message(
        two.but(schedule=Schedule("1f1b", 2, {0: ranks[0]}))
    )
    doubled = Schedule("1f1b", 2, {**ranks, 2: ranks[1]})
    assert "stage 1: runs on ranks 1, 2, expected rank 1 on cpu:1" in message(two.but(schedule=doubled))
    assert "rank 0: runs stages 0, 1, expected one" in message(edited(two, 0, ("0D2 ", "0D2 1F2@1 ")))
    crossed = Schedule("1f1b", 2, {0: ranks[1], 1: ranks[0]})
    assert "stage 0: runs on rank 1, expected rank 0 on cpu:0" in message(two.but(schedule=crossed))
    assert "1RF2<0 is of stage 1, which does not exist" in message(two.but(stages=two.stages[:1]), "scheduled")
    assert "0 microbatches per batch" in message(two.but(schedule=replace(two.schedule, microbatches=0)))
    for fact in FACTS:
        assert message(two.but(schedule=None), fact) == "@toy schedule: there is none"
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
        assert (
            f"@s{stage}.U: updates @w0 without the part of its gradient from stage {source}; stages [0, 1] update it"
            in text
        )


def test_sums_of_ranks_in_different_orders_are_told(toy):
    """Sums go on in the background, so that two of them may be under way: both ranks begin them in the same order."""
    several = pipeline(toy(1, devices=(2,)), "2bw", 2)
    text = message(edited(several, 1, ("0AR1", "0AR2")), "wired")
    assert "ranks 0, 1 sum in different orders: rank 0 [0AR0], rank 1 []" in text


def test_a_rank_may_wait_for_itself(toy):
    """The sum of a batch begins behind the update that uses it."""
    several = pipeline(toy(1, devices=(2,)), "1f1b", 2)
    early = edited(several, 0, ("0AR1 0U1@2", "0U1@2 0AR1"))
    assert "(0U0@1): comes before 0AR0, whose results it may use" in message(early)
    text = message(early, "wired")
    assert re.search(r"deadlock: rank 0 step \d+ \(0U0@1\) waits for rank 0 step \d+ \(0AR0\)\n", text)


def test_the_fewest_versions_of_a_stage_count(toy):
    module = pipeline(toy(2), "2bw", 2)
    forward, update = module.graphs["s0.F"], module.graphs["s0.U"]
    read = replace(forward.ops[0], outs=(replace(forward.ops[0].outs[0], name="z"),)).with_attrs(var="z")
    write = update.ops[-1].with_attrs(var="z")
    module = module.with_graph(replace(forward, ops=(*forward.ops, read))).with_graph(
        replace(update, ops=(*update.ops, write))
    )
    kept = module.vars["w0"]
    for fewest, other in (("w0", "z"), ("z", "w0")):
        pair = {fewest: replace(kept, name=fewest, versions=1), other: replace(kept, name=other)}
        text = message(module.but(vars={**module.vars, **pair}), "versioned")
        assert f"makes version 1 of @{fewest} in the slot of version 0" in text


def test_the_shortest_run_that_shows_a_fault_is_told(toy, monkeypatch):
    """Schedules of many actions are checked on fewer runs."""
    plain, delayed = pipeline(toy(2), "1f1b", 2), pipeline(toy(2), "2bw", 2)
    assert " ".join(map(str, delayed.schedule.ranks[0].batch)).endswith("0B2@0 0D2 0F4@1 0SF4>1 0RB3<1 0B3@0 0D3 0U1@2")
    stale = delayed.schedule.ranks[0]
    ahead = Program(tuple(a if a.kind != "F" else a._replace(version=1) for a in stale.start), stale.batch)
    buffers = {name: replace(var, versions=2) if var.role == "grad" else var for name, var in delayed.vars.items()}
    faults = [
        ((1, 0), (1, 0), edited(plain, 0, ("0U1@2", "0U1@3"))),
        ((2, 0), (3, 0), edited(plain, 0, (" 0U1@2", ""), ("0F2@1 ", "0F2@1 0U0@1 "))),
        ((3, 0), (3, 0), edited(delayed.but(vars=buffers), 0, ("0U1@2", "0U0@1"))),
        ((1, 2), (2, 2), delayed.but(schedule=replace(delayed.schedule, ranks={**delayed.schedule.ranks, 0: ahead}))),
    ]
    for few, many, module in faults:
        count = sum(1 for _ in module.schedule.actions())
        for limit, (batches, first) in ((count, few), (count - 1, many)):
            monkeypatch.setattr(verify_runs, "MANY_ACTIONS", limit)
            assert f"run of {batches} batch{'es' * (batches > 1)} from batch {first}, rank" in message(
                module, "versioned"
            )


def test_memory_over_the_budget_of_a_device_is_told(two):
    def cluster(size):
        return two.but(cluster=Cluster((Device("cpu:0", spaces=(("ram", size),)), Device("cpu:1"))))

    peak = bisect_left(range(10**4), True, key=lambda n: _fits(cluster(n)))
    told = message(cluster(peak - 1))
    purposes = measure_memory(two)[0].at_peak()
    assert sum(purposes.values()) == peak
    listed = ", ".join(f"{purpose} {shown_bytes(n)}" for purpose, n in purposes.items() if n)
    needs, has = exact_bytes(peak), exact_bytes(peak - 1)
    assert f"device cpu:0: needs {needs} at the worst moment, it has {has}\n  rank 0: {listed}\n" in f"{told}\n"
    together = cluster(peak).but(stages=tuple(replace(stage, place="cpu:0") for stage in two.stages))
    both = re.escape(f"(rank 0 {shown_bytes(peak)} + rank 1 ")
    assert re.search(
        rf"device cpu:0: needs .* at the worst moment {both}.*\), it has {re.escape(needs)}", message(together)
    )


def _fits(module):
    try:
        verify(module)
    except DoesNotFit:
        return False
    return True
