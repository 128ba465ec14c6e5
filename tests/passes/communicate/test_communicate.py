"""Tests of the values that travel between stages, and of the places of sends and receives."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.ir.graph import Value
from penstock.ir.types import parse_type
from penstock.passes.communicate.communicate import communicate, find_edges
from penstock.passes.schedules.schedule import SCHEDULES, ScheduleOptions, schedule
from penstock.support.errors import UsageError, VerifyError


def edges(module):
    return [f"{e.src}>{e.dst} {e.phase} {' '.join(v.name for v in e.values)}" for e in find_edges(module)]


def test_a_chain_has_one_edge_each_way(toy):
    assert edges(toy(3)) == ["0>1 F h0", "1>2 F h1", "1>0 B h0.grad", "2>1 B h1.grad"]


def test_a_value_that_skips_stages_goes_straight_once_per_destination(toy):
    assert edges(toy(4, skip=True)) == [
        "0>1 F h0", "0>3 F h0", "1>2 F h1", "2>3 F h2", "1>0 B h0.grad", "2>1 B h1.grad", "3>0 B h0.skip.grad", "3>2 B h2.grad",
    ]  # fmt: skip


def test_inputs_of_the_module_and_saved_values_do_not_travel(toy):
    module = toy(2)
    last = module.graphs["s1.F"]
    labelled = replace(last, ins=(*last.ins, module.inputs[0]), saved=(*last.saved, module.inputs[0]))
    assert edges(module.with_graph(labelled)) == edges(module)


def test_several_values_travel_together_in_the_order_of_their_maker(toy):
    module = toy(2)
    first, last = module.graphs["s0.F"], module.graphs["s1.F"]
    w = first.ops[0].outs[0]
    wide = module.with_graph(replace(first, outs=(*first.outs, w))).with_graph(
        replace(last, ins=(w, *last.ins), ops=last.ops[1:])
    )
    assert edges(wide)[0] == "0>1 F h0 w"


def test_sends_stand_right_after_and_receives_right_before(toy):
    module = communicate(schedule(toy(3, skip=True), ScheduleOptions("1f1b", 1)))
    assert {r: " ".join(map(str, p.batch)) for r, p in module.schedule.ranks.items()} == {
        0: "0F1 0SF1>1 0SF1>2 0RB1<1 0RB1<2 0B1 0U1",
        1: "1RF1<0 1F1 1SF1>2 1RB1<2 1B1 1SB1>0 1U1",
        2: "2RF1<0 2RF1<1 2F1 2B1 2SB1>0 2SB1>1 2U1",
    }


@pytest.mark.parametrize("kind", SCHEDULES)
def test_both_ends_of_a_channel_have_the_same_order(toy, kind):
    module = communicate(schedule(toy(5, skip=True, trains=SCHEDULES[kind].trains), ScheduleOptions(kind, 4)))
    for first, batches in [(0, 1), (0, 3), (2, 2)]:
        sent, received = {}, {}
        for actions in module.schedule.expand_all(batches, first).values():
            for a in actions:
                if a.kind in ("SF", "SB"):
                    sent.setdefault((a.stage, a.peer), []).append((a.kind[1], a.mb))
                elif a.kind in ("RF", "RB"):
                    received.setdefault((a.peer, a.stage), []).append((a.kind[1], a.mb))
        assert sent == received
        assert all(len(set(messages)) == len(messages) for messages in sent.values())


def test_one_stage_needs_no_messages(toy):
    module = schedule(toy(1), ScheduleOptions("2bw", 2))
    assert communicate(module) is module


def test_inputs_that_nobody_provides_are_all_listed(toy):
    module = toy(3)
    ghost = Value("ghost", parse_type("f32[2]"))
    for name in ("s1.F", "s2.B"):
        graph = module.graphs[name]
        module = module.with_graph(replace(graph, ins=(*graph.ins, ghost)))
    with pytest.raises(VerifyError) as caught:
        find_edges(module)
    text = str(caught.value)
    assert (
        "@s1.F takes %ghost : f32[2], which is no input of the module, and not returned by the forward graph of another stage"
        in text
    )
    assert (
        "@s2.B takes %ghost : f32[2], which is no input of the module, not saved by @s2.F and not returned by the backward graph"
        in text
    )


def test_two_makers_and_unequal_types_are_refused(toy):
    module = toy(3)
    last = module.graphs["s2.F"]
    with pytest.raises(VerifyError, match=r"%h0 is returned by both @s0.F and @s2.F, expected one maker"):
        find_edges(module.with_graph(replace(last, outs=(Value("h0", parse_type("f32[4]")),))))
    middle = module.graphs["s1.F"]
    with pytest.raises(VerifyError, match=r"@s1.F takes %h0 : f32\[5\], but @s0.F returns %h0 : f32\[4\]"):
        find_edges(module.with_graph(replace(middle, ins=(Value("h0", parse_type("f32[5]")),))))


def test_order_of_passes_is_checked(toy):
    with pytest.raises(UsageError, match="no schedule"):
        communicate(toy(2))
    once = communicate(schedule(toy(2), ScheduleOptions("1f1b", 2)))
    with pytest.raises(UsageError, match="already has edges"):
        communicate(once)
