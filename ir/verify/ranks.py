"""The checker of ranks, a part of the fact scheduled: every rank runs the actions that are its own.

In: a module with a schedule. Out: problems.

A stage has one rank for each of its devices, and ranks are numbered stage by stage. Where it has several,
they share its work out by microbatches.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.ir.action_kinds import FORWARD
from penstock.ir.graph import Module, written_vars
from penstock.ir.schedule import Schedule

from .problems import Problem


def check_homes(module: Module, schedule: Schedule) -> Iterator[Problem]:
    """Check that every rank runs one stage, and every stage has a rank for each of its devices, numbered stage by
    stage."""
    homes: dict[int, set[int]] = {s.index: set() for s in module.stages}
    for rank, program in schedule.ranks.items():
        stages = {action.stage for action in (*program.start, *program.batch)}
        for stage in sorted(stages - homes.keys()):
            action = next(a for a in (*program.start, *program.batch) if a.stage == stage)
            yield Problem(
                f"schedule {schedule.name}, rank {rank}", f"{action} is of stage {stage}, which does not exist"
            )
        if len(stages) > 1:
            yield Problem(
                f"schedule {schedule.name}, rank {rank}",
                f"runs stages {', '.join(map(str, sorted(stages)))}, expected one",
            )
        for stage in stages & homes.keys():
            homes[stage].add(rank)
    first = 0
    for stage, ranks in homes.items():
        devices = module.devices_of(stage)
        expected = list(range(first, first + len(devices)))
        first += len(devices)
        if sorted(ranks) != expected:
            listed = (
                f"on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"
                if ranks
                else "on no rank"
            )
            wanted = f"rank{'s' if len(expected) > 1 else ''} {', '.join(map(str, expected))}"
            yield Problem(
                f"schedule {schedule.name}, stage {stage}", f"runs {listed}, expected {wanted} on {', '.join(devices)}"
            )


def check_dealing(module: Module, schedule: Schedule) -> Iterator[Problem]:
    """Check that one rank of each stage runs a given microbatch. A variable that changes with every microbatch is on
    one rank only."""
    for stage, ranks in schedule.members().items():
        dealt: dict[int, list[int]] = {k: [] for k in range(schedule.microbatches)}
        for rank in ranks:
            for k in {a.mb % schedule.microbatches for a in schedule.ranks[rank].batch if a.kind == FORWARD}:
                dealt[k].append(rank)
        place = f"schedule {schedule.name}, stage {stage}"
        for k, runners in dealt.items():
            if len(runners) > 1:
                yield Problem(
                    place,
                    f"microbatch {k} of a batch is run by ranks {', '.join(map(str, runners))}, expected one of them",
                )
            elif not runners and len(ranks) > 1:
                yield Problem(place, f"microbatch {k} of a batch is run by no rank")
        forward = module.stage_graph(stage, FORWARD)
        moving = sorted(written_vars(forward)) if forward is not None and len(ranks) > 1 else []
        if moving:
            what = (
                f"@{moving[0]} changes with every microbatch, so each of the {len(ranks)} ranks would have another one"
            )
            yield Problem(place, what, hint="put this stage on one device")
