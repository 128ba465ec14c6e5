"""Schedules that are written by hand, times for them, and what a run of them comes to."""

from __future__ import annotations

from penstock.ir.schedule import Action, Program, Schedule
from penstock.passes.simulator.machine import TransportModel

EAGER = TransportModel(posted=None)


def written(microbatches, **ranks):
    """A schedule whose batch lists are given as text, for batch 1: written(2, r0="0F2 0SF2>1")."""
    programs = {int(name[1:]): Program((), tuple(map(Action.parse, text.split()))) for name, text in ranks.items()}
    return Schedule("hand", microbatches, programs)


def lasting(**times):
    return lambda rank, action: times.get(action.kind, 0.0)


def nothing(*_):
    return 0.0


def when(found, rank):
    return {str(action): (start, finish) for action, start, finish in found.timed(rank)}


def played(programs, lasts):
    """By brute force: every action starts when the one before it has ended, and the send whose message it takes."""
    ends, starts = {}, {}
    while len(ends) < sum(map(len, programs.values())):
        for rank, actions in programs.items():
            for position, a in enumerate(actions):
                before = [(rank, position - 1)] if position else []
                if a.kind.startswith("R"):
                    sent = Action(f"S{a.kind[1]}", a.peer, a.mb, None, rank)
                    before.append((a.peer, programs[a.peer].index(sent)))
                if (rank, position) not in ends and all(key in ends for key in before):
                    starts[rank, position] = max((ends[key] for key in before), default=0.0)
                    ends[rank, position] = starts[rank, position] + lasts(a)
    return {
        rank: [(a, starts[rank, i], ends[rank, i]) for i, a in enumerate(actions)] for rank, actions in programs.items()
    }


ONE_WAY = written(2, r0="0F2 0SF2>1 0F3 0SF3>1", r1="1RF2<0 1F2 1RF3<0 1F3")
