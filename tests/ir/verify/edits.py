"""Programs with faults: words of a rank's list replaced, and what the verifier says of it."""

from __future__ import annotations

import pytest

from penstock.ir.schedule import Action, Program, Schedule
from penstock.ir.verify.verifier import check, verify
from penstock.passes.communicate.communicate import communicate
from penstock.passes.memory.lifetimes import lifetimes
from penstock.passes.schedules.schedule import ScheduleOptions, schedule
from penstock.passes.schedules.weight_versions import WeightVersionsOptions, weight_versions
from penstock.support.errors import DoesNotFit, VerifyError

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
