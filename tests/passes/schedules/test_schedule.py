"""Laws of the schedules: time per batch, activations in flight, no deadlock, illegal combinations refused.

Formulas are those of the papers, as quoted in passes/schedules. Meaning is judged by a brute-force executor (brute.py) that knows
nothing of the passes and the checker.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.ir.grid import most_in_flight, simulate, time_per_batch
from penstock.ir.schedule import Action, Program, Schedule
from penstock.ir.verify.verifier import verify
from penstock.passes.communicate.communicate import communicate
from penstock.passes.manager import Pass, parse_pipeline
from penstock.passes.memory.lifetimes import lifetimes
from penstock.passes.partition.split_backward import split_backward
from penstock.passes.schedules.kind import ScheduleKind, forwards, pairs
from penstock.passes.schedules.schedule import SCHEDULES, ScheduleOptions, build_schedule, schedule
from penstock.passes.schedules.weight_versions import weight_versions
from penstock.support.errors import UsageError, VerifyError

STAGES, MICROBATCHES = (1, 2, 3, 4, *(pytest.param(d, marks=pytest.mark.slow) for d in (5, 6))), range(1, 13)
FORWARD, BACKWARD = 1, 2


def pipeline(module, kind, m):
    module = split_backward(module) if SCHEDULES[kind].splits else module
    module = weight_versions(schedule(module, ScheduleOptions(kind, m)))
    facts = ("scheduled", "versioned", "wired", "freed")
    module = lifetimes(communicate(module))
    return module.but(facts=module.facts + facts)


@dataclass(frozen=True)
class Law:
    """What the papers say of a schedule, d stages, m microbatches, stage s: time per batch (of tb, tw is the part that may run apart), most
    microbatches in flight, fewest microbatches."""

    per_batch: Callable[[int, int, int, int, int], int]
    in_flight: Callable[[int, int, int], int]
    fewest: Callable[[int], int] = lambda d: 1


def flush(d, m, tf, tb, tw):
    return (m + d - 1) * (tf + tb)


def ideal(d, m, tf, tb, tw):
    return m * (tf + tb)


def zero_bubble(d, m, tf, tb, tw):
    """ZB-H1; with fewer microbatches than stages all W but one fit into the waiting time."""
    return m * (tf + tb) + (d - 1) * (tf + tb - 2 * tw) if m >= d else (m + d - 1) * (tf + tb - tw) + tw


LAWS = {
    "1f1b": Law(flush, lambda d, m, s: min(d - s, m)),
    "gpipe": Law(flush, lambda d, m, s: m),
    "2bw": Law(ideal, lambda d, m, s: d - s, lambda d: d - 1),
    "eager-2bw": Law(ideal, lambda d, m, s: 2 * (d - s) - 1, lambda d: 2 * d - 2),
    "zb-1f1b": Law(zero_bubble, lambda d, m, s: min(d, m)),
    "forward": Law(lambda d, m, tf, tb, tw: m * tf, lambda d, m, s: 0),
}
TRAINING = [kind for kind in SCHEDULES if kind != "forward"]


def legal(kind, d, m):
    return m >= LAWS[kind].fewest(d)


def test_there_is_a_law_for_every_schedule():
    assert LAWS.keys() == SCHEDULES.keys()


def test_delays_and_what_schedules_are_for():
    assert {kind: row.delay for kind, row in SCHEDULES.items() if row.delay} == {"2bw": 1, "eager-2bw": 1}
    assert [kind for kind, row in SCHEDULES.items() if row.splits] == ["zb-1f1b"]
    assert ScheduleOptions() == ScheduleOptions("1f1b", 1, ())


LISTS = {
    "1f1b": ["F3 F4 F5 B3 B4 B5 U1", "F3 F4 B3 F5 B4 B5 U1", "F3 B3 F4 B4 F5 B5 U1"],
    "gpipe": ["F3 F4 F5 B3 B4 B5 U1"] * 3,
    "2bw": ["F3 F4 | F5 B3 F6 B4 F7 B5 U1", "F3 | F4 B3 F5 B4 F6 B5 U1", "F3 B3 F4 B4 F5 B5 U1"],
    "eager-2bw": ["F3 F4 F5 F6 | F7 B3 F8 B4 F9 B5 U1", "F3 F4 | F5 B3 F6 B4 F7 B5 U1", "F3 B3 F4 B4 F5 B5 U1"],
    "zb-1f1b": ["F3 F4 F5 B3 W3 B4 W4 B5 W5 U1", "F3 F4 B3 F5 B4 W3 B5 W4 W5 U1", "F3 B3 F4 B4 F5 B5 W3 W4 W5 U1"],
    "forward": ["F3 F4 F5"] * 3,
}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_the_lists_of_three_stages_and_microbatches(kind):
    """From the papers, by hand: what is done once, a bar, what is done in every batch."""
    for stage, program in build_schedule(kind, 3, 3).ranks.items():
        parts = [" ".join(f"{a.kind}{a.mb}" for a in part) for part in (program.start, program.batch)]
        assert " | ".join(filter(None, parts)) == LISTS[kind][stage]
        assert {(a.stage, a.version, a.peer) for a in (*program.start, *program.batch)} == {(stage, None, None)}


def test_fewer_microbatches_than_stages():
    assert [" ".join(f"{a.kind}{a.mb}" for a in p.batch) for p in build_schedule("zb-1f1b", 3, 1).ranks.values()] == [
        "F1 B1 W1 U1"
    ] * 3
    assert [" ".join(f"{a.kind}{a.mb}" for a in p.batch) for p in build_schedule("1f1b", 3, 1).ranks.values()] == [
        "F1 B1 U1"
    ] * 3


@pytest.mark.parametrize("kind", SCHEDULES)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(d=st.integers(1, 8), m=st.integers(1, 20), tw=st.integers(1, 3), f=st.integers(0, 3), b=st.integers(0, 3))
def test_time_per_batch_and_in_flight_follow_the_formulas(kind, d, m, tw, f, b):
    """W takes no longer than a forward, nor than the rest of the backward: what ZB-H1 is made for."""
    m, tf, tb = max(m, LAWS[kind].fewest(d)), tw + f, 2 * tw + b
    found = build_schedule(kind, d, m)
    assert time_per_batch(found, tf, tb, tw) == LAWS[kind].per_batch(d, m, tf, tb, tw)
    if kind != "forward":
        assert [most_in_flight(found.expand(s, 4)) for s in range(d)] == [
            LAWS[kind].in_flight(d, m, s) for s in range(d)
        ]


@pytest.mark.parametrize(("d", "m", "ratio"), [(2, 2, 1.5), (4, 4, 1.75), (4, 8, 1.375), (8, 8, 1.875), (8, 32, 1.219)])
def test_2bw_is_faster_than_flush_by_the_bubble(d, m, ratio):
    found = time_per_batch(build_schedule("1f1b", d, m)) / time_per_batch(build_schedule("2bw", d, m))
    assert found == pytest.approx(ratio, abs=5e-4)


@pytest.mark.parametrize(("d", "m", "slow"), [(4, 6, 1.5), (8, 16, 19 / 12)])
def test_latency_of_one_forward_slows_2bw_and_not_eager_2bw(d, m, slow):
    """Both are ideal without latency; with it, plain 2bw takes 3/2 and 19/12 of the ideal time."""
    best = m * (FORWARD + BACKWARD)
    assert time_per_batch(build_schedule("2bw", d, m), latency=FORWARD) == pytest.approx(slow * best)
    assert time_per_batch(build_schedule("eager-2bw", d, m), latency=FORWARD) == best


def test_a_new_schedule_is_one_function_and_the_checker_judges_it(toy, monkeypatch):
    """Three times the warm-up, in no table of the package: what it needs is found, not looked up."""

    def order(place, m):
        stage, w = place.stage, 3 * place.ahead
        return Program(tuple(forwards(stage, m, w)), (*pairs(stage, m + w, m, m), Action("U", stage, 1)))

    monkeypatch.setitem(SCHEDULES, "more", ScheduleKind(order, 1, "2bw with three times the warm-up"))
    verify(pipeline(toy(3), "more", 6))
    with pytest.raises(VerifyError, match=r"microbatches >= 6 or schedule 1f1b"):
        pipeline(toy(3), "more", 5)


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("d", STAGES)
def test_every_legal_combination_verifies_and_every_other_is_refused(toy, kind, d):
    source = toy(d, skip=d % 2 == 1, trains=SCHEDULES[kind].trains)
    for m in MICROBATCHES:
        if legal(kind, d, m):
            verify(pipeline(source, kind, m))
        else:
            with pytest.raises(VerifyError) as caught:
                pipeline(source, kind, m)
            text = str(caught.value)
            assert re.search(
                r"rank 0 step \d+ \(0F\d+@1\): reads version 1 of @w0, which is made only later by rank 0 step \d+ \(0U0@1\)",
                text,
            )
            fewest = LAWS[kind].fewest(d)
            assert f"microbatches >= {fewest} or schedule 1f1b" in text
            assert f"this would need {-(-fewest // m) + 1} live versions" in text


def test_eager_2bw_needs_three_versions_just_below_its_limit(toy):
    with pytest.raises(VerifyError) as caught:
        pipeline(toy(4), "eager-2bw", 5)
    assert "6 forwards run ahead, a delay of 1 at 5 microbatches allows 5; this would need 3 live versions" in str(
        caught.value
    )
    assert "microbatches >= 6 or schedule 1f1b" in str(caught.value)


@pytest.mark.parametrize("kind", TRAINING)
def test_the_brute_force_executor_agrees(toy, brute, kind):
    for d, m in [(1, 1), (2, 1), (2, 3), (3, 2), (4, 3), (4, 7), (6, 5)]:
        m = max(m, LAWS[kind].fewest(d))
        module = pipeline(toy(d, skip=True), kind, m)
        for first, batches in [(0, 1), (0, 5), (2, 3), (3, 1)]:
            assert brute.run(module, first, batches) == brute.recurrence(module, first, batches, SCHEDULES[kind].delay)


def test_the_brute_force_executor_tells_delays_apart(toy, brute):
    module = pipeline(toy(3), "2bw", 4)
    assert brute.run(module, 0, 3) != brute.recurrence(module, 0, 3, 0)


@pytest.mark.parametrize("kind", TRAINING)
def test_gradients_are_summed_in_microbatch_order(kind):
    for rank, actions in build_schedule(kind, 4, 6).expand_all(3).items():
        for part in ("B", "W") if SCHEDULES[kind].splits else ("B",):
            assert [a.mb for a in actions if a.kind == part] == list(range(18)), rank


def test_zb_1f1b_leaves_a_third_of_the_bubble_of_1f1b_at_equal_times():
    for d, m in [(2, 2), (4, 4), (4, 8), (8, 8)]:
        whole, apart = (time_per_batch(build_schedule(kind, d, m)) - 3 * m for kind in ("1f1b", "zb-1f1b"))
        assert (whole, apart) == (3 * (d - 1), d - 1)


def test_a_module_whose_backwards_are_split_wants_a_schedule_that_runs_their_rest(toy):
    with pytest.raises(
        UsageError, match="schedule: schedule 1f1b runs whole backwards, but the module has weight gradients apart"
    ):
        schedule(split_backward(toy(3)), ScheduleOptions("1f1b", 2))


def test_2bw_warms_up_once_and_never_drains_between_batches():
    found = build_schedule("2bw", 3, 2)
    assert " ".join(map(str, found.expand(0, 2))) == "0F0 0F1 0F2 0B0 0F3 0B1 0U0 0B2 0B3 0U1"
    assert " ".join(map(str, found.expand(0, 1, first=5))) == "0F10 0F11 0B10 0B11 0U5"
    assert " ".join(map(str, build_schedule("1f1b", 3, 2).expand(0, 2))) == "0F0 0F1 0B0 0B1 0U0 0F2 0F3 0B2 0B3 0U1"


def test_a_stage_with_nothing_to_train_only_runs_forward(toy):
    source = toy(3)
    graphs = {n: g for n, g in source.graphs.items() if n not in ("s0.B", "s0.U")}
    graphs["s0.F"] = type(graphs["s0.F"])("s0.F", graphs["s0.F"].ins, graphs["s0.F"].outs, graphs["s0.F"].ops)
    graphs["s1.B"] = type(graphs["s1.B"])("s1.B", graphs["s1.B"].ins, (), graphs["s1.B"].ops)
    frozen = source.but(graphs=graphs, vars={n: v for n, v in source.vars.items() if n != "w0.grad"})
    for kind in TRAINING:
        module = pipeline(frozen, kind, 4)
        verify(module)
        assert {a.kind for a in module.schedule.actions() if a.stage == 0} == {"F", "SF", "D"}
        assert module.vars["w0"].versions == 1


def test_options_that_make_no_sense_are_refused(toy):
    with pytest.raises(
        UsageError,
        match="schedule: unknown schedule '3bw', expected one of 1f1b, gpipe, 2bw, eager-2bw, zb-1f1b, forward",
    ):
        schedule(toy(2), ScheduleOptions("3bw", 2))
    with pytest.raises(UsageError, match="at least one stage and one microbatch, got 2 and 0"):
        schedule(toy(2), ScheduleOptions("1f1b", 0))
    with pytest.raises(UsageError, match="schedule: schedule 2bw trains, but no stage has a backward graph"):
        schedule(toy(2, trains=False), ScheduleOptions("2bw", 2))
    with pytest.raises(UsageError, match="schedule: schedule forward never runs a backward"):
        schedule(toy(2), ScheduleOptions("forward", 2))


def test_sizes_have_bounds(monkeypatch):
    monkeypatch.setattr("penstock.passes.schedules.schedule.MOST_MICROBATCHES", 4)
    assert len(build_schedule("forward", 1, 4).ranks[0].batch) == 4
    with pytest.raises(UsageError, match="schedule: a batch has at most 4 microbatches, got 5"):
        build_schedule("forward", 1, 5)
    with pytest.raises(UsageError, match="schedule: needs at least one stage and one microbatch, got 0 and 1"):
        build_schedule("1f1b", 0, 1)


def test_the_simulation_says_who_waits():
    crossed = Schedule(
        "crossed",
        1,
        {
            0: Program((), (Action("B", 0, 1), Action("F", 0, 1))),
            1: Program((), (Action("F", 1, 1), Action("B", 1, 1))),
        },
    )
    with pytest.raises(VerifyError, match=r"rank 0 at step 0 \(0B0\), rank 1 at step 0 \(1F0\)"):
        simulate(crossed, 1)


def test_schedule_names_need_no_quotes_in_a_pipeline():
    table = {"schedule": Pass("schedule", schedule, ScheduleOptions)}
    for kind in SCHEDULES:
        (call,) = parse_pipeline(f"schedule{{kind={kind},microbatches=3}}", table)
        assert call.options == ScheduleOptions(kind, 3)
        assert parse_pipeline(str(call), table) == [call]
