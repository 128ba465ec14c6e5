"""Stages on several devices: the microbatches of a batch are dealt to ranks, and their gradients summed once per batch.

What a program computes is judged by the recurrence in NumPy, written out here for the toy model, which knows nothing of ranks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.ir.grid import simulate, time_per_batch
from penstock.ir.interpreter.schedules import run_schedule
from penstock.ir.schedule import Action, Program, Schedule
from penstock.ir.text import parse_module, print_module
from penstock.ir.verify.verifier import verify
from penstock.passes.communicate.communicate import communicate
from penstock.passes.memory.lifetimes import lifetimes
from penstock.passes.partition.split_backward import split_backward
from penstock.passes.schedules.dealing import deal, equal_shares, fair_shares, forwards_ahead, weights_behind
from penstock.passes.schedules.late_updates import sum_late
from penstock.passes.schedules.schedule import SCHEDULES, ScheduleOptions, build_schedule, schedule
from penstock.passes.schedules.weight_versions import weight_versions
from penstock.passes.simulator.simulate import simulate as play
from penstock.passes.simulator.wiring import wire_chain
from penstock.support.errors import UsageError, VerifyError

FACTS = ("scheduled", "versioned", "wired", "freed")
TRAINING = [kind for kind, row in SCHEDULES.items() if row.trains]


def pipeline(module, kind, shares):
    m = sum(shares[0])
    module = split_backward(module) if SCHEDULES[kind].splits else module
    module = weight_versions(schedule(module, ScheduleOptions(kind, m, tuple(n for share in shares for n in share))))
    module = lifetimes(communicate(module))
    return module.but(facts=module.facts + FACTS)


def legal(kind: str, shares: Sequence[Sequence[int]]) -> bool:
    """Under a delay of one batch a rank may not begin with the batch after the next one before it is done with this one."""
    times, m, dealt = {"2bw": 1, "eager-2bw": 2}.get(kind, 0), sum(shares[0]), [deal(share) for share in shares]
    # Microbatch k of the batch after the next one must not run forward before the last backward of this batch.
    return all(
        own[-1] + times * w < 2 * m + own[0]
        for row, ranks in zip(forwards_ahead(dealt), dealt, strict=True)
        for w, own in zip(row, ranks, strict=True)
    )


@st.composite
def several_shares(draw, fewest=1, most=12):
    """Shares of the ranks of every stage, at least one each, of the same number of microbatches."""
    m = draw(st.integers(3, most))
    found = []
    for _ in range(draw(st.integers(fewest, 4))):
        cuts = sorted(draw(st.sets(st.integers(1, m - 1), max_size=2)))
        found.append(tuple(b - a for a, b in zip([0, *cuts], [*cuts, m], strict=True)))
    return found


@given(share=st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_dealing_gives_everybody_his_share_spread_over_the_batch(share):
    dealt = deal(share)
    assert [len(own) for own in dealt] == share
    assert sorted(k for own in dealt for k in own) == list(range(sum(share)))
    for own, n in zip(dealt, share, strict=True):
        for k in range(sum(share) + 1):
            assert abs(sum(i < k for i in own) - n * k / sum(share)) < len(share)


def test_shares_by_hand():
    assert [equal_shares(3, m) for m in (3, 7, 8)] == [(1, 1, 1), (3, 2, 2), (3, 3, 2)]
    assert fair_shares((2.0, 1.0), 6) == (4, 2)
    assert fair_shares((3.0, 1.0), 5) == (4, 1)
    assert fair_shares((1.0, 1.0), 3) == (2, 1)
    assert fair_shares((1.0, 5.0), 2) == (1, 1)
    with pytest.raises(UsageError, match="2 microbatches per batch cannot be shared out among 3 devices"):
        fair_shares((1.0, 1.0, 1.0), 2)


def test_dealing_by_hand():
    """Of three microbatches two and one: rank 0 has them one and a half times as long as they take alone, rank 1 three times."""
    assert (deal((2, 1)), deal((3, 2)), deal((1, 1))) == ([[0, 2], [1]], [[0, 2, 4], [1, 3]], [[0], [1]])
    uneven = [deal(share) for share in ((3,), (2, 1), (2, 1))]
    assert forwards_ahead(uneven) == [[6], [2, 3], [0, 0]]
    assert weights_behind(uneven) == [[0], [1, 1], [3, 4]]
    assert forwards_ahead([deal(share) for share in ((4,), (2, 2))]) == [[2], [0, 0]]


@pytest.mark.parametrize("d", range(1, 6))
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_equal_shares_are_pipelines_side_by_side(d, ranks):
    """Each of them is the schedule of one pipeline, over its own microbatches."""
    assert forwards_ahead([deal([4] * ranks)] * d) == [[ranks * (d - 1 - s)] * ranks for s in range(d)]
    found, alone = build_schedule("1f1b", d, 4 * ranks, [(4,) * ranks] * d), build_schedule("1f1b", d, 4)
    for rank, program in found.ranks.items():
        stage = rank // ranks
        assert [(a.kind, a.stage) for a in program.batch] == [(a.kind, a.stage) for a in alone.ranks[stage].batch]
    assert time_per_batch(found) == time_per_batch(alone)


@pytest.mark.parametrize("kind", TRAINING)
@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shares=several_shares())
def test_nobody_waits_for_ever_and_illegal_shares_are_refused(toy, kind, shares):
    source = toy(len(shares), devices=[len(share) for share in shares])
    if legal(kind, shares):
        verify(pipeline(source, kind, shares))
    else:
        with pytest.raises(VerifyError, match=r"reads version|in the slot of version"):
            pipeline(source, kind, shares)


def recurrence(weights, batches, m, delay):
    """The toy in NumPy: h = x * w0 * w1 ..., gradients of the sum over all outputs, plain steps of 0.1."""
    versions = [[weights[f"w{i}"] for i in range(len(weights))]]
    for t, batch in enumerate(batches):
        old = versions[max(t - delay, 0)]
        grads = [np.zeros(4) for _ in old]
        for x in batch["x"].reshape(m, 4):
            for i in range(len(old)):
                grads[i] += x * np.prod([w for j, w in enumerate(old) if j != i] or [np.ones(4)], axis=0)
        versions.append([w - 0.1 * g for w, g in zip(versions[-1], grads, strict=True)])
    return versions[-1]


@pytest.mark.parametrize("kind", TRAINING)
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shares=several_shares(most=9))
def test_ranks_compute_what_one_device_would(toy, kind, shares):
    if not legal(kind, shares):
        return
    d, m = len(shares), sum(shares[0])
    module = pipeline(toy(d, devices=[len(share) for share in shares]), kind, shares)
    rng = np.random.default_rng(0)
    weights = {f"w{i}": rng.uniform(0.5, 1.0, 4) for i in range(d)}
    batches = [{"x": rng.normal(size=4 * m) * 0.3} for _ in range(3)]
    found = run_schedule(module, weights, batches).variables
    for i, expected in enumerate(recurrence(weights, batches, m, SCHEDULES[kind].delay)):
        np.testing.assert_allclose(found[f"w{i}"], expected, rtol=1e-12, atol=1e-12)


def two_by_two(toy, kind="1f1b", shares=((2, 2), (3, 1))):
    return pipeline(toy(2, devices=(2, 2)), kind, shares)


def without(module, rank, unwanted):
    """The module without some actions of one rank."""
    old = module.schedule
    programs = {
        r: Program(p.start, tuple(a for a in p.batch if r != rank or not unwanted(a))) for r, p in old.ranks.items()
    }
    return module.but(schedule=Schedule(old.name, old.microbatches, programs))


def replaced(module, rank, old, new):
    """The module with words of one rank's batch list replaced."""
    found = module.schedule
    text = " ".join(map(str, found.ranks[rank].batch))
    assert old in text, text
    program = Program(found.ranks[rank].start, tuple(map(Action.parse, text.replace(old, new).split())))
    return module.but(schedule=Schedule(found.name, found.microbatches, {**found.ranks, rank: program}))


def message(module):
    with pytest.raises(VerifyError) as caught:
        verify(module)
    return str(caught.value)


def test_the_text_form_survives(toy):
    module = two_by_two(toy)
    assert "mesh @s0 (dp=2) cpu:0.0 cpu:0.1" in print_module(module)
    assert print_module(parse_module(print_module(module))) == print_module(module)
    assert [str(a) for a in module.schedule.ranks[0].batch][:6] == [
        "0F4@1",
        "0SF4>2",
        "0F6@1",
        "0SF6>3",
        "0RB4<2",
        "0B4@1",
    ]
    assert "0AR1 0U1@2" in " ".join(map(str, module.schedule.ranks[0].batch))


def test_without_the_sum_copies_differ(toy):
    """The control of the whole construction: the interpreter sees that ranks end with other weights."""
    module = two_by_two(toy)
    for rank in range(4):
        module = without(module, rank, lambda a: a.kind == "AR")
    assert "never sums up the gradients" in message(module)
    weights = {"w0": np.full(4, 0.7), "w1": np.full(4, 0.9)}
    with pytest.raises(VerifyError, match="ranks 0 and 1 of stage 0 end with different @w0"):
        run_schedule(module, weights, [{"x": np.arange(16.0)}])


def test_faults_are_told_with_their_place(toy):
    module = two_by_two(toy)
    assert re.search(
        r"comes before 0AR\d, whose results it may use", message(replaced(module, 0, "0AR1 0U1@2", "0U1@2 0AR1"))
    )
    assert "rank 1: never sums up the gradients for batch 0" in message(without(module, 1, lambda a: a.kind == "AR"))
    twice = replaced(module, 1, "0F5@1 0SF5>2", "0F4@1 0SF4>2")
    assert "microbatch 0 of a batch is run by ranks 0, 1, expected one of them" in message(twice)
    assert "microbatch 1 of a batch is run by no rank" in message(twice)
    elsewhere = replaced(module, 0, "0SF4>2", "0SF4>3")
    assert "rank 3 never receives this message" in message(elsewhere)


def test_versions_are_kept_apart_while_a_sum_is_under_way(toy):
    """Under 2bw gradients of the next batch are added up while those of this one are summed over ranks, in a second buffer."""
    module = pipeline(toy(2, devices=(2, 2)), "2bw", ((2, 2), (2, 2)))
    assert {module.vars[f"w{i}.grad"].versions for i in range(2)} == {2}
    program = " ".join(map(str, module.schedule.ranks[0].batch))
    # The sum of a batch starts behind its last backward, and is waited for where the version is needed that the update makes.
    assert re.search(r"0U0@1 .*0AR1", program)
    single = module.but(
        vars={
            name: var if not name.endswith("grad") else type(var)(**{**fields_of(var), "versions": 1})
            for name, var in module.vars.items()
        }
    )
    assert "before the sum of batch" in message(single)


def fields_of(var):
    return {name: getattr(var, name) for name in var.__dataclass_fields__}


def test_what_every_forward_changes_is_on_one_device(toy):
    text = print_module(toy(1, devices=(2,), trains=False)).replace(
        "  var @w0", "  var @count : f32[4] stage 0 buffer\n  var @w0"
    )
    text = text.replace(
        "    return %h0",
        "    %seen : f32[4] = read(@count)\n    %more : f32[4] = add(%seen, %h0)\n    write(%more, @count)\n    return %h0",
    )
    with pytest.raises(
        VerifyError, match="@count changes with every microbatch, so each of the 2 ranks would have another one"
    ):
        verify(
            communicate(weight_versions(schedule(parse_module(text), ScheduleOptions("forward", 2)))).but(
                facts=("scheduled",)
            )
        )


def test_shares_that_do_not_fit_are_refused(toy):
    with pytest.raises(UsageError, match="there are shares for 2 devices, the stages have 3"):
        schedule(toy(2, devices=(2, 1)), ScheduleOptions("1f1b", 4, (4, 4)))
    with pytest.raises(UsageError) as caught:
        schedule(toy(2, devices=(2, 1)), ScheduleOptions("1f1b", 4, (4, 0, 5)))
    assert "the shares 4, 0 of stage 0 must be at least 1 each and 4 together" in str(caught.value)
    assert "the shares 5 of stage 1 must be at least 1 each and 4 together" in str(caught.value)
    with pytest.raises(UsageError, match="2 microbatches per batch cannot be shared out among 3 devices"):
        schedule(toy(1, devices=(3,)), ScheduleOptions("1f1b", 2))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(shares=several_shares(fewest=2))
def test_no_rank_runs_two_things_at_once_and_all_ends(shares):
    played = simulate(build_schedule("1f1b", len(shares), sum(shares[0]), shares), 3)
    for line in played.ranks.values():
        for before, after in pairwise(line):
            assert after.start >= before.finish


@pytest.mark.parametrize("kind", ["2bw", "eager-2bw"])
@pytest.mark.parametrize(
    "ranks", [(2, 1), (1, 2, 1), (1, 3, 4), (2, 3, 1), (4, 4, 2), (3, 2, 2, 1), (1, 2, 1, 2, 2), (4, 1, 3)]
)
def test_stages_with_unequal_numbers_of_ranks_wait_for_nobody(kind: str, ranks: tuple[int, ...]) -> None:
    """As many ranks as a stage is slow: a batch takes no longer than each stage alone, message by message."""
    m = 24
    wired = wire_chain(
        sum_late(build_schedule(kind, len(ranks), m, [equal_shares(n, m) for n in ranks]), SCHEDULES[kind].delay)
    )
    played = play(
        wired,
        8,
        lambda rank, action: {"F": 1.0, "B": 2.0}.get(action.kind, 0.0) * ranks[action.stage],
        lambda *edge: 0.0,
    )
    assert played.step_seconds == pytest.approx(3 * m)
