"""Tests with random changes to legal schedules: every schedule that the checker accepts computes the recurrence, by
brute force (brute.py)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.ir.schedule import Action
from penstock.ir.verify.verifier import check, verify
from penstock.passes.communicate.communicate import communicate
from penstock.passes.memory.lifetimes import lifetimes
from penstock.passes.partition.split_backward import split_backward
from penstock.passes.schedules.schedule import SCHEDULES, ScheduleOptions, schedule
from penstock.passes.schedules.weight_versions import weight_versions
from penstock.support.errors import VerifyError


def pipeline(module, kind, m):
    module = split_backward(module) if SCHEDULES[kind].splits else module
    module = lifetimes(communicate(weight_versions(schedule(module, ScheduleOptions(kind, m)))))
    return module.but(facts=(*module.facts, "scheduled", "versioned", "wired", "freed"))


def mutations(draw, module):
    """One random change to the lists of one rank: swap, drop, repeat, move, or change a number."""
    old = module.schedule
    rank = draw(st.sampled_from(sorted(old.ranks)))
    program = old.ranks[rank]
    part = draw(st.sampled_from(["start", "batch"])) if program.start else "batch"
    actions = list(getattr(program, part))
    i = draw(st.integers(0, len(actions) - 1))
    j = draw(st.integers(0, len(actions) - 1))
    match draw(st.sampled_from(["swap", "neighbours", "drop", "repeat", "move", "version", "microbatch", "peer"])):
        case "swap":
            actions[i], actions[j] = actions[j], actions[i]
        case "neighbours":
            i = min(i, len(actions) - 2)
            actions[i : i + 2] = actions[i : i + 2][::-1]
        case "drop":
            del actions[i]
        case "repeat":
            actions.insert(j, actions[i])
        case "move":
            actions.insert(j, actions.pop(i))
        case "version":
            a = actions[i]
            actions[i] = a._replace(version=draw(st.integers(0, 3))) if a.version is not None else a
        case "microbatch":
            actions[i] = actions[i]._replace(mb=draw(st.integers(0, 3 * old.microbatches)))
        case "peer":
            a = actions[i]
            actions[i] = a._replace(peer=draw(st.integers(0, len(old.ranks) - 1))) if a.peer is not None else a
    changed = replace(program, **{part: tuple(actions)})
    return module.but(schedule=replace(old, ranks={**old.ranks, rank: changed}))


COUNTS = {"caught": 0, "harmless": 0}


@pytest.mark.parametrize("kind", ["1f1b", "gpipe", "2bw", "eager-2bw", "zb-1f1b"])
@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)
@given(data=st.data())
def test_mutants_are_caught_or_harmless(toy, brute, kind, data):
    d, m = data.draw(st.sampled_from([(1, 2), (2, 1), (2, 3), (3, 2), (4, 3)]))
    legal = pipeline(toy(d, skip=True), kind, max(m, 2 * d - 2) if kind == "eager-2bw" else m)
    mutant = legal
    for _ in range(data.draw(st.integers(1, 2))):
        mutant = mutations(data.draw, mutant)
    try:
        verify(mutant)
    except VerifyError:
        COUNTS["caught"] += 1
        return
    COUNTS["harmless"] += 1
    for first, batches in [(0, 1), (0, 2), (0, 6), (1, 2), (3, 4)]:
        assert brute.run(mutant, first, batches) == brute.recurrence(legal, first, batches, SCHEDULES[kind].delay)


def test_the_mutants_were_worth_it():
    """The law above says something only when it saw both kinds."""
    if sum(COUNTS.values()):
        assert COUNTS["caught"] > 100
        assert COUNTS["harmless"] > 10


# Faults that exactly one checker sees: fact, schedule, rank, old words, new words. The oracle must see them too, or the law above would be empty.
ONLY = [
    ("scheduled", "1f1b", 1, "1F2@1", "1F2@1 1F2@1"),
    ("versioned", "2bw", 0, "0F4@1", "0F4@0"),
    ("wired", "1f1b", 0, "0SF2>1 0F3@1 0SF3>1", "0F3@1 0SF3>1 0SF2>1"),
    ("freed", "1f1b", 0, "0D2 ", ""),
    ("scheduled", "zb-1f1b", 1, "1W2@1 1D2", "1D2"),
    ("scheduled", "zb-1f1b", 1, "1B3@1 1SB3>0 1W2@1 1D2 1W3@1 1D3", "1W3@1 1B3@1 1SB3>0 1D3 1W2@1 1D2"),
]


@pytest.mark.parametrize(("fact", "kind", "rank", "old", "new"), ONLY)
def test_without_its_checker_a_fault_gets_past_and_the_oracle_sees_it(toy, brute, fact, kind, rank, old, new):
    legal = pipeline(toy(2), kind, 2)
    program = legal.schedule.ranks[rank]
    text = " ".join(map(str, program.batch))
    assert old in text
    changed = replace(program, batch=tuple(map(Action.parse, text.replace(old, new).split())))
    mutant = legal.but(schedule=replace(legal.schedule, ranks={**legal.schedule.ranks, rank: changed}))
    with pytest.raises(VerifyError):
        verify(mutant)
    check(mutant, [f for f in mutant.facts if f != fact])
    with pytest.raises((brute.Wrong, AssertionError)):
        assert brute.run(mutant, 0, 3) == brute.recurrence(legal, 0, 3, SCHEDULES[kind].delay)
