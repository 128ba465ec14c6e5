"""The checker of ranks, a part of the fact scheduled: every rank runs the actions that are its own.

In: a module with a schedule. Out: problems.

A stage has one rank for each of its devices, and ranks are numbered stage by stage. A rank may run several stages, if
the module says so; all of these lie on the same ranks. The mesh of a stage says which of them are a team: teams share
the work of the stage out by microbatches, and all ranks of a team do the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import zip_longest

from penstock.ir.action_kinds import FORWARD
from penstock.ir.graph import Module, written_vars
from penstock.ir.schedule import HANDS, RECEIVES, SENDS, Action, Program, Schedule
from penstock.support.words import counted, numbered

from .problems import Problem


def check_homes(module: Module, schedule: Schedule) -> Iterator[Problem]:
    """Check that every rank runs one stage, or the stages of its pack, and every stage has a rank for each of its
    devices, numbered stage by stage."""
    yield from _check_packs(module)
    homes: dict[int, set[int]] = {s.index: set() for s in module.stages}
    for rank, program in schedule.ranks.items():
        stages = {action.stage for action in (*program.start, *program.batch)}
        for stage in sorted(stages - homes.keys()):
            action = next(a for a in (*program.start, *program.batch) if a.stage == stage)
            yield Problem(
                f"schedule {schedule.name}, rank {rank}", f"{action} is of stage {stage}, which does not exist"
            )
        allowed = module.packs[rank] if rank < len(module.packs) else ()
        if len(stages) > 1 and not stages <= set(allowed):
            yield Problem(
                f"schedule {schedule.name}, rank {rank}",
                f"runs stages {', '.join(map(str, sorted(stages)))}, expected "
                + (f"stages {', '.join(map(str, allowed))}" if allowed else "one"),
            )
        for stage in stages & homes.keys():
            homes[stage].add(rank)
    places: dict[int, list[int]] = {}
    for rank, stages_there in enumerate(module.rank_packs()):
        for stage in stages_there:
            places.setdefault(stage, []).append(rank)
    for stage, ranks in homes.items():
        devices, expected = module.devices_of(stage), places.get(stage, [])
        if sorted(ranks) != expected:
            listed = f"on {numbered('rank', sorted(ranks))}" if ranks else "on no rank"
            wanted = numbered("rank", expected)
            yield Problem(
                f"schedule {schedule.name}, stage {stage}", f"runs {listed}, expected {wanted} on {', '.join(devices)}"
            )


def _check_packs(module: Module) -> Iterator[Problem]:
    """Check that packs have every stage once and a rank for each device, on the same devices and axes, and order ranks
    by their first stage."""
    known = {stage.index for stage in module.stages}
    for stages, ranks in Counter(module.packs).items():
        devices = module.devices_of(stages[0]) if stages and stages[0] in known else None
        if devices is not None and len(devices) != ranks:
            yield Problem(
                "ranks",
                f"{numbered('stage', stages)} {'lies' if len(stages) == 1 else 'lie'} on {counted(ranks, 'rank')}, "
                f"expected {len(devices)}, one for each of the devices {', '.join(devices)}",
            )
    for rank, stages in enumerate(module.packs):
        meshes = {(mesh.axes, mesh.devices) for mesh in map(module.mesh_of, known & {*stages})}
        if len(meshes) > 1:
            yield Problem(
                f"rank {rank}", "runs stages that lie on unlike devices: those of a pack lie on the same ones"
            )
        if list(stages) != sorted(stages):
            yield Problem(f"rank {rank}", "its stages are not in order")
    listed = sorted(stage for stages in dict.fromkeys(module.packs) for stage in stages)
    if module.packs and listed != sorted(known):
        yield Problem("ranks", f"run stages {', '.join(map(str, listed))}, expected each of the module in one pack")
    firsts = [stages[0] for stages in module.packs]
    if firsts != sorted(firsts):
        yield Problem("ranks", "are not in the order of their first stages")


def check_dealing(module: Module, schedule: Schedule) -> Iterator[Problem]:
    """Check that one team of each stage runs a given microbatch, all its ranks in the same way. A variable that changes
    with every microbatch is on one team only."""
    for stage, ranks in schedule.members().items():
        place = f"schedule {schedule.name}, stage {stage}"
        teams = [tuple(ranks[at] for at in team) for team in module.mesh_of(stage).teams()]
        for team in teams:
            yield from _check_team(schedule, team, place)
        dealt: dict[int, list[int]] = {k: [] for k in range(schedule.microbatches)}
        for team in teams:
            for k in {a.mb % schedule.microbatches for a in schedule.ranks[team[0]].batch if a.kind == FORWARD}:
                dealt[k].append(team[0])
        for rank in ranks:
            yield from _check_shares(schedule, rank, stage, place)
        for k, runners in dealt.items():
            if len(runners) > 1:
                yield Problem(
                    place,
                    f"microbatch {k} of a batch is run by ranks {', '.join(map(str, runners))}, expected one of them",
                )
            elif not runners and len(ranks) > 1:
                yield Problem(place, f"microbatch {k} of a batch is run by no rank")
        forward = module.stage_graph(stage, FORWARD)
        moving = sorted(written_vars(forward)) if forward is not None and len(teams) > 1 else []
        if moving:
            what = (
                f"@{moving[0]} changes with every microbatch, so each of the {len(teams)} ranks would have another one"
            )
            yield Problem(place, what, hint="put this stage on one device")


def _check_shares(schedule: Schedule, rank: int, stage: int, place: str) -> Iterator[Problem]:
    """Check that a rank runs the same microbatches on a stage as on the first of its pack."""
    m = schedule.microbatches
    forwards = [a for a in schedule.ranks[rank].batch if a.kind == FORWARD]
    first = min((a.stage for a in forwards), default=stage)
    there, here = ({a.mb % m for a in forwards if a.stage == other} for other in (first, stage))
    if there != here:
        yield Problem(f"{place}, rank {rank}", f"runs other microbatches than on stage {first} of its pack")


def _check_team(schedule: Schedule, team: Sequence[int], place: str) -> Iterator[Problem]:
    """Check that the ranks of a team run the same actions in the same order. Only the peers of messages differ, and
    sends: where a stage that takes results has fewer or more ranks, some send nothing, or several times. Tiles come
    from several ranks, one behind the other."""
    programs = [_without_messages(schedule.ranks[rank]) for rank in team]
    alike = [[*p.start, *p.batch] for p in programs]
    for rank, program, actions in zip(team[1:], programs[1:], alike[1:], strict=True):
        at = next((i for i, pair in enumerate(zip_longest(alike[0], actions)) if pair[0] != pair[1]), None)
        if at is None and len(program.start) == len(programs[0].start):
            continue
        at = min(len(program.start), len(programs[0].start)) if at is None else at
        first, other = (str(listed[at]) if at < len(listed) else "nothing" for listed in (alike[0], actions))
        yield Problem(
            f"{place}, rank {rank} step {at} ({other})",
            f"rank {team[0]} of the same team does {first} there; expected the same actions in the same order",
        )


def _without_messages(program: Program) -> Program:
    """Return a program without sends and peers, and one receive in place of several behind each other."""

    def short(actions: Sequence[Action]) -> tuple[Action, ...]:
        bare = [
            a._replace(peer=None, end=None if a.kind in RECEIVES else a.end)
            for a in actions
            if a.kind not in (*SENDS, *HANDS)
        ]
        return tuple(a for i, a in enumerate(bare) if not (i and a.kind in RECEIVES and a == bare[i - 1]))

    return Program(short(program.start), short(program.batch))
