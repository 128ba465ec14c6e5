"""Sends and receives of a plain chain of stages, for schedules without a module.

In: a schedule of computations. Out: the same, with messages between neighbours.
"""

from __future__ import annotations

from penstock.ir.action_kinds import ACTION_KINDS
from penstock.ir.schedule import RECEIVE_OF, SEND_OF, Action, Routes, Schedule


def wire_chain(schedule: Schedule) -> Schedule:
    """Add sends and receives around the computations of a plain chain, as `communicate` does. Each stage takes the
    values of the stage before it, and the gradient of the stage after it. Where stages lie on several ranks,
    `passes.late_updates.sum_late` comes first."""
    present = {(a.kind, a.stage) for a in schedule.actions()}
    routes, packed = Routes(schedule), any(len(schedule.stages_of(rank)) > 1 for rank in schedule.ranks)

    def surround(rank: int, action: Action) -> list[Action]:
        kind, stage, mb = action.kind, action.stage, action.mb
        way = ACTION_KINDS[kind].way
        if not way:
            return [action]
        source, target = stage - way, stage + way
        sources = [routes.source(rank, kind, source, mb)] if (kind, source) in present else []
        targets = routes.targets(rank, kind, stage, target, mb) if (kind, target) in present else []
        before, after = (
            [Action(messages[kind], stage, mb, None, peer, end if packed else None) for peer in peers if peer != rank]
            for messages, peers, end in ((RECEIVE_OF, sources, source), (SEND_OF, targets, target))
        )
        return [*before, action, *after]

    return schedule.rewrite_ranks(surround)
