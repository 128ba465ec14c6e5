"""Plans whose schedule is changed by hand, and what the checker of messages says of it: controls for tests of edges."""

from __future__ import annotations

from collections.abc import Mapping

import penstock as ps
from penstock.ir.schedule import Action
from penstock.ir.verify.messages import check_wired


def wired_problems(plan: ps.Plan, changed: Mapping[str, tuple[str, ...]]) -> str:
    """Return what the checker of messages says where actions are replaced by others, by rank and action."""
    module = plan.module
    assert module.schedule is not None

    def rule(rank: int, action: Action) -> list[Action]:
        return [Action.parse(text) for text in changed.get(f"{rank} {action}", (str(action),))]

    return "; ".join(map(str, check_wired(module.but(schedule=module.schedule.rewrite_ranks(rule)))))
